"""The facts in a card: read from a loaded model or pipeline, or from the configs and headers in a directory."""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_quant.checkpoint import (
    CheckpointSummary,
    Directory,
    TensorInfo,
    gguf_hint,
    inspect_checkpoint,
    read_header,
    scan_files,
    summarize,
)
from hf_quant.config import QuantizerConfig, QuantMethod


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_VERSION = re.compile(r"[0-9][\w.+-]{0,39}")


@dataclass(frozen=True)
class Part:
    """A quantized model: all of the source, or one component of a pipeline."""

    name: str  # of the component; "" is the source itself
    class_name: str | None  # an identifier
    summary: CheckpointSummary
    dtype: torch.dtype  # of the unquantized tensors

    @property
    def config(self) -> QuantizerConfig:
        return self.summary.config

    @property
    def nbytes_before(self) -> int:
        """The bytes of the same tensors with every quantized weight in `dtype`."""
        rows = self.summary.rows
        return sum(r.nbytes if r.scheme is None else r.num_weights * self.dtype.itemsize for r in rows)


@dataclass(frozen=True)
class CardSource:
    """A quantized model or pipeline."""

    kind: str  # "transformers", "diffusers" (one model) or "pipeline" (of diffusers)
    class_name: str | None  # of the model or pipeline: an identifier
    parts: tuple[Part, ...]  # the quantized models
    versions: dict[str, str]  # {package: version} that wrote the checkpoint
    origin: str | None  # directory or Hub name that it was loaded from
    origin_is_quantized: bool | None = None  # None: unknown
    others: dict[str, int] = field(default_factory=dict)  # {component that is not quantized: its bytes}
    absent: tuple[str, ...] = ()  # components that the pipeline does not have
    auto_class: str | None = None  # auto class of transformers for a model with its own code
    has_tokenizer: bool = False  # beside the weights
    revision: str | None = None  # branch of the repository of the card; None: its default branch

    @property
    def library(self) -> str:
        return "transformers" if self.kind == "transformers" else "diffusers"

    @property
    def nbytes(self) -> int:
        return sum(part.summary.nbytes for part in self.parts) + sum(self.others.values())

    @property
    def nbytes_before(self) -> int:
        return sum(part.nbytes_before for part in self.parts) + sum(self.others.values())

    @property
    def bits_per_weight(self) -> float | None:
        """The average of the quantized weights, scales and zero points included; None if only a cache is quantized."""
        rows = [row for part in self.parts for row in part.summary.rows if row.scheme is not None]
        return 8 * sum(row.nbytes for row in rows) / sum(row.num_weights for row in rows) if rows else None


def read_source(source: Any) -> CardSource:
    """Read a model, a pipeline, or a directory of either. Raises ValueError if nothing in it is quantized."""
    if isinstance(source, str | Path):
        return _read_directory(Path(source))
    if isinstance(source, nn.Module):
        return _read_model(source)
    if is_pipeline(source):
        return _read_pipeline(source)
    raise ValueError(
        f"got a {type(source).__name__}; needs a quantized model of transformers or diffusers, a pipeline of "
        "diffusers, or the directory of one"
    )


def origin_of(source: Any) -> tuple[str | None, bool]:
    """Return (directory or name that a loaded model or pipeline was loaded from, True if that is quantized itself)."""
    if not is_pipeline(source):
        return _origin_of(source), _is_prequantized(source)
    models = [m for m in source.components.values() if isinstance(m, nn.Module) and stored_config(m) is not None]
    origin = _origin_of(source)
    return origin, any(_is_prequantized(m) and _is_below(_origin_of(m), origin) for m in models)


def is_pipeline(value: Any) -> bool:
    """Return True for a pipeline of diffusers; imports nothing."""
    module = sys.modules.get("diffusers.pipelines.pipeline_utils")
    return module is not None and isinstance(value, module.DiffusionPipeline)


# Loaded models.


def _read_model(model: nn.Module) -> CardSource:
    from transformers import PreTrainedModel

    part, fields = _live_part("", model), _fields(model)
    origin, is_quantized = origin_of(model)
    return CardSource(
        kind="transformers" if isinstance(model, PreTrainedModel) else "diffusers",
        class_name=part.class_name,
        parts=(part,),
        origin=origin,
        origin_is_quantized=is_quantized,
        auto_class=_auto_class(fields, part.class_name),
        versions=_versions(part.config, fields),
    )


def _read_pipeline(pipe: Any) -> CardSource:
    models = {name: m for name, m in sorted(pipe.components.items()) if isinstance(m, nn.Module)}
    quantized = {name: m for name, m in models.items() if stored_config(m) is not None}
    if not quantized:
        raise ValueError(f"no component of this {type(pipe).__name__} is quantized by hf_quant: it is in 16 bit")
    parts = tuple(_live_part(name, model) for name, model in quantized.items())
    others = {name: m for name, m in models.items() if name not in quantized}
    origin, is_quantized = origin_of(pipe)
    return CardSource(
        kind="pipeline",
        class_name=_identifier(type(pipe).__name__),
        parts=parts,
        others={name: sum(t.nbytes for t in _tensors(m).values()) for name, m in others.items()},
        absent=tuple(name for name, value in sorted(pipe.components.items()) if value is None),
        origin=origin,
        origin_is_quantized=is_quantized,
        has_tokenizer=True,
        versions=_versions(parts[0].config, _live_versions()),
    )


def _live_part(name: str, model: nn.Module) -> Part:
    config = stored_config(model)
    if config is None:
        raise ValueError(
            f"this {type(model).__name__} is not quantized by hf_quant: a card is made of quantized models"
        )
    tensors = _tensors(model)
    summary = summarize(config, tensors, where=f"this {type(model).__name__}")
    dtype = _dtype({"dtype": model.dtype}, tensors)
    return Part(name, _identifier(type(model).__name__), summary, dtype)


def stored_config(model: nn.Module) -> QuantizerConfig | None:
    """Return the config, with its plan, by which a host's model was quantized, or None."""
    host = getattr(model, "config", None)
    config = host.get("quantization_config") if isinstance(host, dict) else getattr(host, "quantization_config", None)
    if isinstance(config, dict):  # what saving leaves in the config of a model of diffusers
        config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return config if isinstance(config, QuantizerConfig) and config.plan is not None else None


def _fields(model: Any) -> dict[str, Any]:
    return {**model.config, **_live_versions()} if isinstance(model.config, dict) else model.config.to_dict()


def _live_versions() -> dict[str, Any]:
    """Return the version field that diffusers writes into a config when it saves."""
    return {"_diffusers_version": getattr(sys.modules.get("diffusers"), "__version__", None)}


def _origin_of(model: Any) -> str | None:
    return _text(getattr(model.config, "_name_or_path", None))


def _is_prequantized(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False))


def _is_below(path: str | None, root: str | None) -> bool:
    """Return True if a component was loaded from the same place as its pipeline."""
    if not path or not root:
        return False
    return path == root or Path(path).parent == Path(root) or f"models--{root.replace('/', '--')}" in Path(path).parts


def _tensors(model: nn.Module) -> dict[str, TensorInfo]:
    """Return the tensors in a checkpoint of the model, each shared tensor once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = TensorInfo(tensor.dtype, tuple(tensor.shape))
    return tensors


# Directories.


def _read_directory(directory: Path) -> CardSource:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; needs the directory of a quantized model or pipeline")
    if (directory / "model_index.json").is_file():
        return _read_pipeline_directory(directory)
    if (directory / "hf_quant_config.json").is_file():
        raise ValueError(f"{directory} holds a plain module; cards are of models of transformers and diffusers")
    fields = _read_json(directory / "config.json")
    part = _stored_part("", directory, fields)
    return CardSource(
        kind="diffusers" if "_class_name" in fields else "transformers",
        class_name=part.class_name,
        parts=(part,),
        origin=_text(fields.get("_name_or_path")),
        auto_class=_auto_class(fields, part.class_name),
        has_tokenizer=any((directory / name).is_file() for name in _TOKENIZER_FILES),
        versions=_versions(part.config, fields),
    )


def _read_pipeline_directory(directory: Path) -> CardSource:
    index = _read_json(directory / "model_index.json")
    parts: list[Part] = []
    others: dict[str, int] = {}
    for path in sorted(directory.glob("*/config.json")):
        name, fields = path.parent.name, _read_json(path)
        if _identifier(name) is None:
            raise ValueError(f"{directory} has a component {name!r}; components have names of Python")
        if _method(fields) == QuantMethod.HF_QUANT:
            parts.append(_stored_part(name, path.parent, fields))
        else:
            others[name] = _size(path.parent)
    if not parts:
        raise ValueError(f"{directory} is a pipeline without a component that hf_quant has quantized: it is in 16 bit")
    absent = (name for name, entry in sorted(index.items()) if isinstance(entry, list) and entry and entry[0] is None)
    return CardSource(
        kind="pipeline",
        class_name=_identifier(index.get("_class_name")),
        parts=tuple(parts),
        others=others,
        absent=tuple(name for name in absent if _identifier(name) is not None),
        origin=_text(index.get("_name_or_path")),
        has_tokenizer=True,
        versions=_versions(parts[0].config, index),
    )


def _stored_part(name: str, directory: Path, fields: dict[str, Any]) -> Part:
    if _method(fields) != QuantMethod.HF_QUANT:
        how = "is in 16 bit" if _method(fields) is None else "was quantized by something else"
        raise ValueError(f"{directory} {how}; a card is made of a model that hf_quant has quantized")
    summary = inspect_checkpoint(directory)
    found = fields.get("architectures")
    class_name = fields.get("_class_name") or (found[0] if isinstance(found, list) and found else None)
    tensors = {name: info for stored in scan_files(directory).values() for name, info in stored.items()}
    return Part(name, _identifier(class_name), summary, _dtype(fields, tensors))


def _size(directory: Path) -> int:
    """Return the bytes of an unquantized component's tensors, from the headers of its files if it has them."""
    if any(directory.glob("*.safetensors")):
        return sum(info.nbytes for info in read_header(directory).values())
    return sum(path.stat().st_size for path in directory.glob("*.bin"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        hint = gguf_hint(Directory(path.parent).files())
        raise ValueError(f"{path.parent} is not the directory of a model or pipeline: it has no {path.name}{hint}")
    return Directory(path.parent).load_json(path.name)


# Fields of configs, which are untrusted.


def _method(fields: dict[str, Any]) -> Any:
    config = fields.get("quantization_config")
    return config.get("quant_method", "unknown") if isinstance(config, dict) else None


def _identifier(value: Any) -> str | None:
    """Return a class or component name that may be written into code, or None."""
    return value if isinstance(value, str) and value.isidentifier() and value.isascii() and len(value) < 200 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _auto_class(fields: dict[str, Any], class_name: str | None) -> str | None:
    """Return the auto class that loads a model's own code, or None if it has none."""
    auto_map = fields.get("auto_map")
    if not isinstance(auto_map, dict) or class_name is None:
        return None
    found = (key for key, value in auto_map.items() if str(value).endswith(f".{class_name}"))
    return next((key for key in found if _identifier(key) is not None), None)


def _versions(config: QuantizerConfig, fields: dict[str, Any]) -> dict[str, str]:
    found = {
        "hf_quant": config.hf_quant_version,
        "transformers": fields.get("transformers_version"),
        "diffusers": fields.get("_diffusers_version"),
    }
    return {name: v for name, v in found.items() if isinstance(v, str) and _VERSION.fullmatch(v)}


def _dtype(fields: dict[str, Any], tensors: dict[str, TensorInfo]) -> torch.dtype:
    """Return the dtype of the unquantized tensors: from the config, else the one with most bytes.

    fp32 is that of a model without tensors in 16 bit: others have parts that the host keeps in fp32.
    """
    sizes: Counter[torch.dtype] = Counter()
    for name, info in tensors.items():
        if info.dtype in _DTYPES and not name.rpartition(".")[2].startswith(("scale", "global_scale")):
            sizes[info.dtype] += info.nbytes
    stated = fields.get("dtype") or fields.get("torch_dtype")
    for dtype in _DTYPES:
        if str(dtype).removeprefix("torch.") == str(stated).removeprefix("torch."):
            return dtype
    found = [dtype for dtype, _ in sizes.most_common()]
    return next((dtype for dtype in found if dtype != torch.float32), found[0] if found else torch.bfloat16)
