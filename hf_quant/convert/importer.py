"""Make checkpoints of hf_quant from GPTQ, AWQ and compressed-tensors; every weight keeps its value."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_quant.cards import CARD, converted_card, hub_id
from hf_quant.checkpoint import one_line
from hf_quant.convert.experts import merge_experts
from hf_quant.convert.files import local_checkpoint, read_config, staged
from hf_quant.convert.foreign import Foreign, ForeignWeight, write_foreign
from hf_quant.convert.hosts import Empty, empty_host
from hf_quant.convert.readers import PICKLES, detect, is_pickled, opened, read


def import_checkpoint(
    source: str | Path, out: str | Path, *, revision: str | None = None, token: str | bool | None = None
) -> tuple[str, ...]:
    """Make a checkpoint of hf_quant from one that GPTQ, AWQ or compressed-tensors has quantized.

    Codes, scales and zero points are repacked, never rounded; scales keep their dtype, even if the model has another.
    The checkpoint is read file by file, and no weight is decoded. `from_pretrained` then loads the result onto
    hf_quant's kernels. Its README.md names the base model and the licence that the original's card names.

        gptq                4 and 8 bits, format versions 1 and 2, columns in their own order
        awq                 4 bits, version "gemm"
        compressed-tensors  pack-quantized int4 and int8, int-quantized, float-quantized (channel, tensor, block),
                            naive-quantized fp8 and int8, nvfp4-pack-quantized and mxfp4-pack-quantized without
                            quantized inputs

    Args:
        source: the other library's checkpoint: a directory, or USER/NAME on the Hub.
        out: a directory that does not exist yet, or is empty; it appears when it is complete.
        revision: of a repository on the Hub.
        token: for the Hub.

    Returns:
        Differences from the original, one line each, e.g. that calibrated scales of a KV cache are left out.

    Raises:
        ValueError: if the checkpoint is of another kind, or something in it has no exact counterpart, with the reason.
    """
    name, where, out = source, str(source), Path(out)
    source = local_checkpoint(source, revision=revision, token=token)
    fields = read_config(source, hosts=("transformers", "diffusers"))
    method, own = detect(source, fields, where)
    if is_pickled(source, method):
        source = local_checkpoint(name, revision=revision, token=token, weights=PICKLES)
    with staged(source, out) as target, opened(source, method) as files:
        try:
            host = empty_host(source, fields, files.tensors)
            found = read(method, files, own, host, host.dtype if host.is_diffusers else _stated_dtype(fields))
            found = _for_host(found, host)
        except ValueError as error:
            raise ValueError(f"{where} cannot be imported: {one_line(error)}") from None
        origin = {"method": method, "name": hub_id(str(source))}
        write_foreign(target, fields, files, found, host, where=where, origin=origin)
        converted_card(target, source, token=token).save(target / CARD)
    return tuple(found.notes)


def _stated_dtype(fields: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that a config of transformers names, or None."""
    dtype = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _for_host(found: Foreign, host: Empty) -> Foreign:
    """Return what the host's model has, experts fused as it has them. Raises ValueError as `merge_experts`."""
    used = [weight for weight in found.weights if host.uses(f"{weight.module}.{weight.name}")]
    dropped = {key for weight in found.weights for key in weight.keys} - {
        key for weight in used for key in weight.keys
    }
    notes = found.notes
    if dropped:
        notes = [
            *notes,
            f"layers that {type(host.model).__name__} does not use are left out, {min(dropped)} among them",
        ]
    weights = used if host.is_diffusers else merge_experts(host.model, used)
    return Foreign(weights, found.dropped | dropped, notes)


def _keys(weights: list[ForeignWeight]) -> Iterator[str]:
    return (key for weight in weights for key in weight.keys)
