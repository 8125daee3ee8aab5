"""The checkpoint that an export reads: a directory, a repository on the Hub, or a model in memory, saved first."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_quant.cards import origin_of
from hf_quant.checkpoint import workspace
from hf_quant.config import QuantMethod
from hf_quant.convert.files import check_out, local_checkpoint, read_config


_SHARD_SIZE = "5GB"  # one file is in memory beside the model


class Source(NamedTuple):
    """A checkpoint of hf_quant that is exported."""

    path: Path
    where: str  # its name in errors
    fields: dict[str, Any]  # of its config.json
    place: Path  # the workspace of the directory to write
    origin: tuple[str | None, bool] | None  # the result of `origin_of` for a model in memory


@contextlib.contextmanager
def source_of(
    model: nn.Module | str | Path, out: Path, *, revision: str | None, token: str | bool | None
) -> Iterator[Source]:
    """Context manager: the checkpoint of a quantized model of transformers, or of a directory or Hub name.

    Raises ValueError if it is not quantized by hf_quant, has adapters, or `out` holds anything.
    """
    if isinstance(model, str | Path):
        path, where = local_checkpoint(model, revision=revision, token=token), str(model)
        fields = _fields_of(path, where)
        with workspace(out) as place:
            yield Source(path, where, fields, place, None)
        return
    where = f"this {type(model).__name__}"
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; needs a model of transformers, or a directory")
    if getattr(model.config, "quantization_config", None) is None:
        raise ValueError(f"{where} is not quantized: quantize_ it first")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"{where} has adapters, which would be lost: merge or remove them first")
    check_out(out)  # before anything is written
    with workspace(out) as place:
        path = place / "saved"
        model.save_pretrained(path, max_shard_size=_SHARD_SIZE)
        yield Source(path, where, _fields_of(path, where), place, origin_of(model))


def _fields_of(path: Path, where: str) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError if hf_quant has not quantized the checkpoint."""
    fields = read_config(path)
    method = (fields.get("quantization_config") or {}).get("quant_method")
    if method != QuantMethod.HF_QUANT:
        found = "not quantized" if method is None else f"quantized by {method}"
        raise ValueError(f"{where} is {found}; needs a checkpoint that hf_quant has quantized")
    return fields
