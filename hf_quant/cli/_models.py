"""Find the model in a directory or a repository of the Hub, and load it."""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from hf_quant.cards import diffusers_class
from hf_quant.checkpoint import gguf_hint, open_folder, read_header, refuse_file
from hf_quant.config import QuantizerConfig
from hf_quant.convert.files import SIDE_FILES, is_side_file
from hf_quant.convert.gguf.imports import is_gguf_folder


DTYPES = {"auto": "auto", "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Source:
    """A model to read."""

    name: str  # directory, or USER/NAME on the Hub
    kind: str  # "transformers", "diffusers" (one model) or "pipeline" (of diffusers)
    fields: dict[str, Any]  # of its config.json, or model_index.json

    @property
    def quant_method(self) -> str | None:
        """The method that quantized the model, None for a model in 16 bit."""
        config = self.fields.get("quantization_config")
        return None if not isinstance(config, dict) else str(config.get("quant_method", "an unknown method"))


def find_source(name: str) -> Source:
    """Look at a directory or repository. Raises ValueError if no model is there."""
    refuse_file(name)
    for file in ("config.json", "model_index.json"):
        path = find_file(name, file)
        fields = {} if path is None else _read_json(path)
        config = fields.get("quantization_config")
        if config is not None and not isinstance(config, dict):
            raise ValueError(f"{path}: quantization_config is a {type(config).__name__}; needs an object")
        if file == "model_index.json" and fields:
            return Source(name, "pipeline", fields)
        if "_class_name" in fields:
            return Source(name, "diffusers", fields)
        if "model_type" in fields or "architectures" in fields:
            return Source(name, "transformers", fields)
    if Path(name).is_dir():
        hint = gguf_hint(open_folder(name).files())
        raise ValueError(
            f"{name} is not a model directory: it has no config.json of a model and no model_index.json{hint}"
        )
    if HF_HUB_OFFLINE:
        raise ValueError(
            f"{name} is not a directory, and not in the cache of the Hub; HF_HUB_OFFLINE is set: unset it to download"
        )
    hint = gguf_hint(open_folder(name).files())
    raise ValueError(f"{name} has no config.json of a model on the Hub, and no model_index.json{hint}")


def check_file(path: Path, option: str) -> None:
    """Raise ValueError if what an option names is a directory, or could not be written."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; {option} takes a file")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise ValueError if a file or directory of this path could not be written."""
    where = path if path.is_dir() else path.absolute().parent
    existing = next(parent for parent in (where, *where.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"{path} cannot be written: {existing} is {'not writable' if existing.is_dir() else 'a file'}"
        )
    try:  # to root everything is writable, but not in /proc
        with tempfile.TemporaryDirectory(prefix=".hf-quant-", dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: nothing can be made in {existing} ({error.strerror})") from None


def find_file(name: str, file: str) -> Path | None:
    """Return a file of a directory or of a repository of the Hub, or None if it has no such file."""
    if Path(name).exists():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file))
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError) and not HF_HUB_OFFLINE:
            open_folder(name)  # raises an error of one line
            raise ValueError(f"{name}: {file} could not be downloaded from the Hub: try again") from None
        return None  # offline, another file may be in the cache
    except (HfHubHTTPError, HFValidationError):
        open_folder(name)
        raise ValueError(f"{name}: {file} could not be downloaded from the Hub: try again") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read JSON as the hosts do: of duplicate keys, which `checkpoint.parse_json` refuses, the last is read."""
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a JSON {type(fields).__name__}; needs an object")
    return fields


def model_class(source: Source, *, trust_remote_code: bool = False) -> type[nn.Module]:
    """Return the class whose `from_pretrained` loads a source that is one model.

    Raises ValueError if neither transformers nor, where it is trusted, the model's own code has it.
    """
    if source.kind == "diffusers":
        import diffusers

        name = source.fields["_class_name"]
        known = diffusers_class(name)
        if known is None:
            raise ValueError(f"{source.name} is a {name}, which is no model of diffusers {diffusers.__version__}")
        return known[1]
    names = source.fields.get("architectures") or ["AutoModel"]
    found = getattr(transformers, str(names[0]), None)
    if found is None:
        found = _class_of_pipeline(source)
    if found is not None:
        return found
    auto_map = source.fields.get("auto_map") or {}
    auto = next((key for key, value in auto_map.items() if str(value).endswith(f".{names[0]}")), None)
    if auto is None:
        raise ValueError(f"{source.name} is a {names[0]}, which transformers {transformers.__version__} does not have")
    if not trust_remote_code:
        raise ValueError(f"{source.name} brings the code of its {names[0]} along: --trust-remote-code runs it")
    return getattr(transformers, auto)


def _class_of_pipeline(source: Source) -> type[nn.Module] | None:
    """Return the class that a pipeline of diffusers brings along for a text encoder, as Kolors does; None for others.

    The index of the pipeline, in the directory above, names the class and its package.
    """
    folder = Path(source.name)
    index = folder.parent / "model_index.json"
    entry = _read_json(index).get(folder.name) if index.is_file() else None
    known = diffusers_class(entry[1]) if isinstance(entry, list) and len(entry) == 2 else None
    return None if known is None or known[0] != f"diffusers.pipelines.{entry[0]}" else known[1]


def load_model(
    source: Source,
    *,
    dtype: str = "auto",
    config: QuantizerConfig | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model in evaluation mode, quantized while loading if a config is given.

    Raises ValueError if it is to be quantized and is quantized already, or has its weights in a GGUF file.
    """
    if config is not None:
        check_not_quantized(source)
    _check_weights(source)
    cls = model_class(source, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {} if config is None else {"quantization_config": config}
    if device is not None:
        options["device_map"] = parse_device(device)
    if source.kind == "diffusers":
        folder = source.name if Path(source.name).is_dir() else snapshot_download(source.name)
        return cls.from_pretrained(folder, torch_dtype=diffusers_dtype(Path(folder), dtype), **options).eval()
    options["trust_remote_code"] = trust_remote_code
    return cls.from_pretrained(source.name, dtype=DTYPES[dtype], **options).eval()


def meta_model(source: Source, *, dtype: str = "auto", trust_remote_code: bool = False) -> nn.Module:
    """Make the model on the meta device: every module, no weights."""
    cls = model_class(source, trust_remote_code=trust_remote_code)
    if source.kind == "diffusers":
        with torch.device("meta"):
            return cls.from_config(source.fields).to(diffusers_dtype(Path(source.name), dtype))
    # A class of a pipeline's own has a config that no auto class knows.
    known = transformers.AutoConfig if hasattr(transformers, cls.__name__) else cls.config_class
    config = known.from_pretrained(source.name, trust_remote_code=trust_remote_code)
    final = DTYPES[dtype] if DTYPES[dtype] != "auto" else config.dtype or torch.float32
    with torch.device("meta"):
        if hasattr(cls, "_from_config"):
            return cls._from_config(config, dtype=final)
        return cls.from_config(config, dtype=final, trust_remote_code=trust_remote_code)


def diffusers_dtype(folder: Path, dtype: str) -> torch.dtype:
    """Return the dtype to load a model of diffusers in, from the headers of its files: its configs do not store it.

    "auto" without a safetensors file at hand is bf16.
    """
    if DTYPES[dtype] != "auto":
        return DTYPES[dtype]
    sizes: Counter[torch.dtype] = Counter()
    if any(folder.glob("*.safetensors")):
        for info in read_header(folder).values():
            sizes[info.dtype] += info.nbytes if info.dtype in DTYPES.values() else 0
    return sizes.most_common(1)[0][0] if sizes.total() else torch.bfloat16


def check_one_model(source: Source, command: str, hint: str) -> None:
    """Raise ValueError if the source is a pipeline: `hint` continues what to give to the command instead."""
    if source.kind == "pipeline":
        raise ValueError(f"{command} takes one model: give the directory of a component, such as {hint}")


def _check_weights(source: Source) -> None:
    """Raise ValueError if a directory has a GGUF file in the place of weights that its host would load."""
    folder = Path(source.name)
    if folder.is_dir() and is_gguf_folder(folder):
        raise ValueError(f"{folder} holds no safetensors file{gguf_hint(open_folder(folder).files())}")


def check_not_quantized(source: Source) -> None:
    """Raise ValueError if the source is quantized."""
    if source.quant_method is not None:
        raise ValueError(f"{source.name} is quantized already, by {source.quant_method}; needs the 16-bit model")


def load_tokenizer(source: Source, *, trust_remote_code: bool = False) -> Any | None:
    """Return the tokenizer beside a model, or None if it has none."""
    try:
        return transformers.AutoTokenizer.from_pretrained(source.name, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError):  # depends on which file is missing
        return None


def parse_device(name: str | None) -> torch.device:
    """Return the device that a user names; None: CUDA if available. Raises ValueError if it does not exist here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, dtype=torch.uint8, device=device)
    # torch answers a build without the device's code by AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def copy_side_files(source: Source, directory: Path) -> list[str]:
    """Copy tokenizer, processor and the like of a transformers model beside its weights; return their names."""
    root = Path(source.name)
    if not root.is_dir():
        root = Path(snapshot_download(source.name, allow_patterns=[*SIDE_FILES, "[0-9]*_*/*"]))
    folders = [root, *(root / part for part in _sentence_transformers_parts(root))]
    copied = []
    for folder in folders:
        # The further modules of sentence-transformers (pooling, dense) come with their small weights.
        for path in sorted(folder.iterdir()):
            name = path.relative_to(root)
            wanted = is_side_file(path, but=["generation_config.json"]) if folder == root else path.is_file()
            if wanted and not (directory / name).exists():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, directory / name)
                copied.append(str(name))
    return copied


def _sentence_transformers_parts(root: Path) -> list[str]:
    """Return the folders of the modules after the encoder, as sentence-transformers lists them in modules.json."""
    path = root / "modules.json"
    if not path.is_file():
        return []
    modules = json.loads(path.read_bytes())
    names = [m.get("path") for m in modules if isinstance(m, dict)] if isinstance(modules, list) else []
    # A name with a path in it could be outside of the model's directory.
    return [n for n in names if isinstance(n, str) and n and Path(n).name == n and (root / n).is_dir()]


def progress_wanted() -> bool:
    """Return True if stderr is a terminal: progress bars are shown on terminals only."""
    return sys.stderr.isatty()
