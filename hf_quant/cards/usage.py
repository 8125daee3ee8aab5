"""The snippets of a card: how to load a quantized model, and how to quantize it again."""

import json
import shlex
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from hf_quant.cards.classes import diffusers_class
from hf_quant.cards.source import CardSource, Part
from hf_quant.config import QuantizerConfig
from hf_quant.resolve import SCHEME_FIELDS


PLACEHOLDER, BASE, ORIGINAL, DATA = "USER/NAME", "BASE", "ORIGINAL", "DATA"
# Auto classes, the most telling first, and the task of the Hub that each one stands for alone.
_TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForVideoClassification": "video-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForObjectDetection": "object-detection",
    "AutoModelForDepthEstimation": "depth-estimation",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
    "AutoModelForZeroShotObjectDetection": "zero-shot-object-detection",
    "AutoModel": None,
}
_READS_TEXT = {name for name in _TASKS if name.endswith(("LM", "SequenceClassification", "TokenClassification"))}
_READS_MORE = {name for name in _TASKS if "Image" in name or "Speech" in name or "CTC" in name or "Audio" in name}
# Tasks of pipelines by diffusers' own tables of them, and of those that are in none.
_PIPELINE_TABLES = {
    "AUTO_TEXT2IMAGE_PIPELINES_MAPPING": "text-to-image",
    "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING": "image-to-image",
    "AUTO_INPAINT_PIPELINES_MAPPING": "image-to-image",
    "AUTO_TEXT2VIDEO_PIPELINES_MAPPING": "text-to-video",
    "AUTO_IMAGE2VIDEO_PIPELINES_MAPPING": "image-to-video",
    "AUTO_TEXT2AUDIO_PIPELINES_MAPPING": "text-to-audio",
}
_VIDEO_FAMILIES = ("Allegro", "CogVideoX", "Cosmos", "HunyuanVideo", "LTX", "Latte", "Mochi", "SkyReelsV2", "Wan")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


# Classes and tasks.


@cache
def _auto_classes() -> dict[str, str]:
    """Return {architecture: auto class of transformers}."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for name in _TASKS:
        mapping = getattr(getattr(modeling_auto, name, None), "_model_mapping", None)
        for entry in () if mapping is None else mapping._model_mapping.values():
            for architecture in (entry,) if isinstance(entry, str) else entry or ():
                found.setdefault(architecture, name)
    return found


def auto_class(source: CardSource) -> str:
    """Return the class of transformers that loads a model: an auto class, or the model's own class."""
    if source.auto_class is not None:
        return source.auto_class
    if source.class_name is None:
        return "AutoModel"
    import transformers

    found = _auto_classes().get(source.class_name)
    return found or (source.class_name if hasattr(transformers, source.class_name) else "AutoModel")


def pipeline_tag(source: CardSource) -> str | None:
    """Return the task for the Hub if the architecture has only one."""
    if source.kind == "transformers":
        return _TASKS.get(auto_class(source))
    if source.kind == "diffusers" or source.class_name is None:
        return None
    name = source.class_name
    if "ImageToVideo" in name:
        return "image-to-video"
    if "VideoToVideo" in name:
        return "video-to-video"
    if _has_diffusers():
        tables = import_module("diffusers.pipelines.auto_pipeline")
        classes = {table: getattr(tables, table, {}).values() for table in _PIPELINE_TABLES}
        tasks = {_PIPELINE_TABLES[table] for table, found in classes.items() if any(c.__name__ == name for c in found)}
        if tasks:
            return tasks.pop() if len(tasks) == 1 else None
    return "text-to-video" if any(name == f"{family}Pipeline" for family in _VIDEO_FAMILIES) else None


def _has_diffusers() -> bool:
    return "diffusers" in sys.modules or find_spec("diffusers") is not None


def _absent(source: CardSource) -> str:
    """Return arguments for the components that a pipeline does not have, except for optional ones."""
    cls = getattr(import_module("diffusers"), source.class_name or "", None) if _has_diffusers() else None
    optional = getattr(cls, "_optional_components", ())
    return "".join(f", {part}=None" for part in source.absent if part not in optional)


# Loading.


def _diffusers_class(source: CardSource) -> tuple[str, str]:
    """Return (the module to import it from, the class of diffusers) that loads a model or pipeline."""
    if source.class_name is None or source.kind == "pipeline":
        return "diffusers", source.class_name or ("DiffusionPipeline" if source.kind == "pipeline" else "AutoModel")
    known = diffusers_class(source.class_name) if _has_diffusers() else None
    return "diffusers" if known is None else known[0], source.class_name


def usage(source: CardSource, repo_id: str | None, base: str | None, task: str | None) -> str:
    """Return Python that loads the model; `import hf_quant` comes first."""
    name = json.dumps(repo_id or PLACEHOLDER)
    name += "" if source.revision is None else f", revision={json.dumps(source.revision)}"
    if source.kind == "transformers":
        return _transformers_usage(source, name, base)
    module, cls = _diffusers_class(source)
    dtype = f"torch_dtype={_shared_dtype(source)}"
    lines = ["import hf_quant  # registers the format", "import torch", f"from {module} import {cls}", ""]
    if source.kind == "diffusers":
        return "\n".join([*lines, f"model = {cls}.from_pretrained({name}, {dtype})"])
    absent = _absent(source)
    lines += [f"pipe = {cls}.from_pretrained({name}, {dtype}{absent})"]
    lines += ['pipe.to("cuda" if torch.cuda.is_available() else "cpu")']
    result = {"text-to-image": "images[0]", "text-to-video": "frames[0]"}.get(task or "")
    if result is not None and not absent:
        lines.append(f'{result[:5]} = pipe("a lighthouse in a storm").{result}')
    return "\n".join(lines)


def _transformers_usage(source: CardSource, name: str, base: str | None) -> str:
    cls = auto_class(source)
    helper = "AutoTokenizer" if cls in _READS_TEXT else "AutoProcessor" if cls in _READS_MORE else None
    origin = name if source.has_tokenizer else None if base is None else json.dumps(base)
    trust = ", trust_remote_code=True" if source.auto_class is not None else ""
    imports = [cls] if helper is None or origin is None else sorted({cls, helper})
    lines = ["import hf_quant  # registers the format", f"from transformers import {', '.join(imports)}", ""]
    lines += [f'model = {cls}.from_pretrained({name}, device_map="auto"{trust})']
    if helper is None or origin is None:
        return "\n".join(lines)
    variable = "tokenizer" if helper == "AutoTokenizer" else "processor"
    lines += [f"{variable} = {helper}.from_pretrained({origin}{trust})"]
    if cls == "AutoModelForCausalLM":
        lines += [
            'inputs = tokenizer("The first three primes are", return_tensors="pt").to(model.device)',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))",
        ]
    return "\n".join(lines)


def _shared_dtype(source: CardSource) -> str:
    """Return the dtype of the part with the most bytes."""
    return str(max(source.parts, key=lambda part: part.summary.nbytes).dtype)


# Quantizing again.


def reproduce(source: CardSource, base: str | None) -> tuple[str, str]:
    """Return (language, text) that makes this quantization: a command, or Python if no command can."""
    part = source.parts[0]
    if part.config.imported_from is not None:
        return "sh", shlex.join(["hf-quant", "import", part.config.imported_from["name"] or ORIGINAL, "OUT"])
    if source.kind != "pipeline":
        command = quantize_command(part, base or BASE, trust_remote_code=source.auto_class is not None)
        if command is not None:
            return "sh", command
    return "python", _python(source, json.dumps(base or BASE))


def not_recorded(source: CardSource, base: str | None) -> str | None:
    """Explain the placeholders in `reproduce`; None if there is none."""
    origin = source.parts[0].config.imported_from
    if origin is None:
        known = any(calibration_data(part.config) == DATA for part in source.parts)
        data = f"`{DATA}` stands for the calibration data, of which only the record above is kept." if known else None
        model = None if base is not None else f"`{BASE}` is the 16-bit model; its name is not recorded here."
        return " ".join(filter(None, (model, data))) or None
    name, method = origin["name"], origin["method"]
    return None if name else f"`{ORIGINAL}` is the checkpoint of {method}; its name is not recorded here."


def quantize_command(part: Part, base: str, *, trust_remote_code: bool = False) -> str | None:
    """Return the `hf-quant quantize` command that gives the config of a part, or None if no command can."""
    config = part.config
    # These have no option; `fuse_projections` and `quantization_device` are of one process.
    if config.modules_to_not_convert is not None or config.sparsity is not None:
        return None
    if any(isinstance(v, dict) for v in (config.kv_cache, config.input_transform)):
        return None
    names = [candidate for candidate in config.candidates or () if isinstance(candidate, str)]
    if len(names) < len(config.candidates or ()):
        return None
    options = ["--weights", config.weights or "none"]
    for name, value in (config.budget or {}).items():
        options += [f"--{name}", f"{value:g}" if name != "context" else str(value)]
    options += ["--candidates", *names] if names else []
    fields = ("activations", "cpu_activations", "kv_cache", "attention", "group_size", "granularity", "scale_dtype")
    for field in (*fields, "algorithm", "input_transform"):
        value = getattr(config, field)
        options += [] if value is None else [f"--{field.replace('_', '-')}", str(value)]
    options += ["--activation-scale", "static"] if config.activation_scale == "static" else []
    data = calibration_data(config)
    options += [] if data is None else ["--calibrate", data]
    if config.calibrated_with is not None and "num_tokens" in config.calibrated_with:
        options += ["--calibration-tokens", str(config.calibrated_with["num_tokens"])]
    options += [] if config.symmetric is None else ["--symmetric" if config.symmetric else "--asymmetric"]
    for pattern, entry in config.modules.items():
        value = _module_value(entry)
        # The first "=" ends the pattern.
        if value is None or "=" in pattern or not pattern.isprintable() or pattern.startswith("-"):
            return None
        options += ["--module", f"{pattern}={value}"]
    if part.dtype in _DTYPES:
        options += ["--dtype", _DTYPES[part.dtype]]
    options += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(["hf-quant", "quantize", base, "OUT", *options])


def _module_value(entry: Any) -> str | None:
    """Return an entry of `modules` as "int4,group_size=64", or None if it cannot be written in this form."""
    if entry is None:
        return "none"
    fields = {"weights": entry} if isinstance(entry, str) else dict(entry)
    texts = [str(fields.pop("weights", ""))]
    for name, value in fields.items():
        texts.append(f"{name}={json.dumps(value) if not isinstance(value, str) else value}")
        # What the command line reads as JSON would be no text any more.
        if name not in SCHEME_FIELDS or not isinstance(value, str | int | bool | None):
            return None
    plain = all(c.isascii() and (c.isalnum() or c in "_.=") for text in texts for c in text)
    # A dict of one format is not the format alone: configs are compared field by field.
    return ",".join(texts) if plain and texts[0] and (isinstance(entry, str) or len(texts) > 1) else None


def _python(source: CardSource, base: str) -> str:
    if source.kind == "transformers":
        library, cls, dtype = "transformers", auto_class(source), "dtype"
        rest = ", trust_remote_code=True" if source.auto_class is not None else ""
    else:
        (library, cls), dtype, rest = _diffusers_class(source), "torch_dtype", ""
    names, variable = [cls], "model"
    config = [f"config = {_expression(source.parts[0].config)}"]
    if source.kind == "pipeline":
        names, variable, rest = sorted([cls, "PipelineQuantizationConfig"]), "pipe", _absent(source)
        parts = (f'    "{part.name}": {_expression(part.config)},' for part in source.parts)
        config = ["configs = {", *parts, "}", "config = PipelineQuantizationConfig(quant_mapping=configs)"]
    options = f"{dtype}={_shared_dtype(source)}, quantization_config=config{rest}"
    imports = [
        "import torch",
        f"from {library} import {', '.join(names)}",
        "",
        "from hf_quant import QuantizerConfig",
        "",
    ]
    load = f"{variable} = {cls}.from_pretrained({base}, {options})"
    return "\n".join([*imports, *config, load, f'{variable}.save_pretrained("OUT")'])


def calibration_data(config: QuantizerConfig) -> str | None:
    """Return the file that a model was calibrated with, DATA for other data; None: none, or what the model wrote."""
    record = config.calibrated_with
    if record is None or "seed" in record:
        return None
    return record["data"] if record["data"].endswith((".txt", ".npy", ".md")) else DATA


def _expression(config: QuantizerConfig) -> str:
    """Return Python that makes the config, without its plan."""
    default: dict[str, Any] = {"activation_scale": "dynamic", "modules": {}}
    fields = {n: getattr(config, n) for n in config.user_fields() if n not in ("weights", "quantization_device")}
    given = [f"{name}={value!r}" for name, value in fields.items() if value != default.get(name)]
    data = calibration_data(config)
    given += [] if data is None else [f"calibration={data if data == DATA else repr(data)}"]
    return f"QuantizerConfig({', '.join([repr(config.weights), *given])})"
