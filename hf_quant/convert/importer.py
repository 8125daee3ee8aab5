"""Make checkpoints of hf_quant from GPTQ, AWQ, compressed-tensors and GGUF; every weight keeps its value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_quant.cards import CARD, converted_card, hub_id
from hf_quant.checkpoint import Directory, one_line, shorten
from hf_quant.config import QuantMethod
from hf_quant.convert.compressed_tensors.imports import read_compressed_tensors
from hf_quant.convert.experts import merge_experts
from hf_quant.convert.files import OWN_CONFIGS, TensorFiles, empty_model, local_checkpoint, read_config, staged
from hf_quant.convert.foreign import Foreign, write_foreign
from hf_quant.convert.gguf.imports import gguf_of, import_gguf
from hf_quant.convert.gptq_awq import read_awq, read_gptq


_READERS: dict[str, Callable[[TensorFiles, dict[str, Any], torch.dtype | None], Foreign]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
}


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    requantize: str | dict[str, Any] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[str, ...]:
    """Make a checkpoint of hf_quant from one that GPTQ, AWQ or compressed-tensors has quantized, or a GGUF file.

    Codes, scales and zero points are repacked, never rounded; scales keep their dtype, even if the model has another.
    The checkpoint is read file by file, and no weight is decoded. `from_pretrained` then loads the result onto
    hf_quant's kernels. Its README.md names the base model and the licence that the original's card names.

        gptq                4 and 8 bits, format versions 1 and 2, columns in their own order
        awq                 4 bits, version "gemm"
        compressed-tensors  pack-quantized int4 and int8, int-quantized, float-quantized (channel, tensor, block),
                            naive-quantized fp8 and int8, nvfp4-pack-quantized and mxfp4-pack-quantized without
                            quantized inputs
        GGUF                Q4_0, Q8_0, MXFP4, Q5_0, Q3_K, Q6_K, IQ4_NL, IQ4_XS; Q4_1 if its minima are multiples of
                            its scales; models of llama, qwen2, qwen3, gemma3 and phi3

    Types of GGUF with a minimum (Q4_K, Q5_K, ...) have no exact form here: they are refused, unless `requantize` says
    how to round them.

    Args:
        source: the other library's checkpoint: a directory, or USER/NAME on the Hub; a file NAME.gguf, or
            USER/NAME/FILE.gguf on the Hub.
        out: a directory that does not exist yet, or is empty; it appears when it is complete.
        requantize: GGUF only: format, preset or dict of scheme fields, e.g. "int8", to which weights without an exact
            form are rounded again. None: they are refused.
        revision: of a repository on the Hub.
        token: for the Hub.

    Returns:
        Differences from the original, one line each, e.g. that calibrated scales of a KV cache are left out.

    Raises:
        ValueError: if the checkpoint is of another kind, or something in it has no exact counterpart, with the reason.
    """
    where, out = str(source), Path(out)
    gguf = gguf_of(source)
    if gguf is not None:
        return import_gguf(gguf, out, requantize=requantize, revision=revision, token=token)
    if requantize is not None:
        raise ValueError(f"requantize is {requantize!r}, but {where} is no GGUF file: it is imported without rounding")
    source = local_checkpoint(source, revision=revision, token=token)
    fields = read_config(source)
    method, own = _detect(source, fields, where)
    name = fields.get("dtype") or fields.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    with staged(source, out) as target, TensorFiles(source) as files:
        try:
            found = _READERS[method](files, own, dtype)
            model = empty_model(source)
            found = found._replace(weights=merge_experts(model, found.weights))
        except ValueError as error:
            raise ValueError(f"{where} cannot be imported: {one_line(error)}") from None
        origin = {"method": method, "name": hub_id(str(source))}
        write_foreign(target, fields, files, found, model, where=where, origin=origin)
        converted_card(target, source, token=token).save(target / CARD)
    return tuple(found.notes)


def _detect(source: Path, fields: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Return (method, its fields) of a quantized checkpoint. Raises ValueError if the method is unsupported."""
    own = fields.get("quantization_config") or fields.get("compression_config")
    method = None
    if isinstance(own, dict):
        method = str(own.get("quant_method", "compressed-tensors" if "config_groups" in own else "gptq"))
    else:
        for file, known in OWN_CONFIGS.items():
            if (source / file).is_file():
                method, own = known, Directory(source).load_json(file)
    if method is None or not isinstance(own, dict):
        raise ValueError(f"{where} is not quantized: `hf-quant quantize` makes a checkpoint of it")
    if method == QuantMethod.HF_QUANT:
        raise ValueError(f"{where} is a checkpoint of hf_quant already")
    if method not in _READERS:
        raise ValueError(f"{where} is quantized by {shorten(repr(method))}; can be imported: {', '.join(_READERS)}")
    return method, own
