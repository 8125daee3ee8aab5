"""Checkpoints for serving engines: hf_quant's codes in the format of compressed-tensors, equal to the bit.

vLLM and SGLang load this format (https://github.com/vllm-project/compressed-tensors), transformers does where the
package compressed-tensors is installed; it is not needed to write one.
"""

import tempfile
from pathlib import Path

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_quant.integrations._files import read_config, staged
from hf_quant.integrations.compressed_tensors._export import READERS, export_directory


def export_compressed_tensors(
    model: nn.Module | str | Path, out: str | Path, *, reader: str = "engines"
) -> tuple[str, ...]:
    """Write a quantized transformers model, or a checkpoint of one, in the format of compressed-tensors.

    Codes, scales and zero points are renamed and repacked, never rounded: every weight is afterwards what it was. A
    checkpoint is read file by file, and no weight is decoded.

        W4A16 (symmetric or not), W8A16       pack-quantized; scales in the model's dtype
        W8A8, W8A8_FP8, FP8_BLOCK             int-quantized, float-quantized; scales may be fp32
        W8A16_FP8                             naive-quantized
        NVFP4A16, MXFP4A16                    nvfp4-pack-quantized, mxfp4-pack-quantized

    Several of them in one model make its format "mixed-precision". Fused experts are written one by one, under the
    names of the original checkpoint. Tokenizer, generation config and licence are copied along.

    Args:
        model: a quantized model of transformers, or the directory of its checkpoint.
        out: a directory that does not exist yet, or is empty; it appears when it is complete.

        reader: "engines" (vLLM, SGLang), which compute query, key and value, and gate and up, as one layer each: they
            must be quantized alike, and share the one scale of fp8 per tensor. "transformers" keeps all
            layers apart.

    Returns:
        What the exported checkpoint does not say of ours, one line each, e.g. that a quantized KV cache is left out.

    Raises:
        ValueError: if any module has no exact counterpart (the error lists them with reasons), layers that engines
            compute as one are quantized differently, or the checkpoint is broken. Nothing is written then.
    """
    if reader not in READERS:
        raise ValueError(f"reader is {reader!r}; allowed: {', '.join(map(repr, READERS))}")
    out = Path(out)
    if isinstance(model, str | Path):
        return _export(Path(model), out, reader, str(model))
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; needs a model of transformers, or a directory")
    if getattr(model.config, "quantization_config", None) is None:
        raise ValueError(f"this {type(model).__name__} is not quantized: quantize_ it first")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"this {type(model).__name__} has adapters, which would be lost: merge or remove them first")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as saved:
        model.save_pretrained(saved)
        return _export(Path(saved), out, reader, f"this {type(model).__name__}")


def _export(source: Path, out: Path, reader: str, where: str) -> tuple[str, ...]:
    fields = read_config(source)
    method = (fields.get("quantization_config") or {}).get("quant_method")
    if method != "hf_quant":
        found = "not quantized" if method is None else f"quantized by {method}"
        raise ValueError(f"{where} is {found}; needs a checkpoint that hf_quant has quantized")
    with staged(source, out) as target:
        return export_directory(source, target, fields, reader=reader, where=where)
