"""Write checkpoints for serving engines: hf_quant's codes in the format of compressed-tensors, equal to the bit.

vLLM and SGLang load this format (https://github.com/vllm-project/compressed-tensors), transformers does where the
package compressed-tensors is installed; it is not needed to write one.
"""

from pathlib import Path
from typing import Any

from torch import nn

from hf_quant.cards import CARD, Export, Measurements, converted_card
from hf_quant.cards.base import check_hub_id
from hf_quant.cards.measurements import as_measurements
from hf_quant.convert.compressed_tensors.export_plan import READERS, plan_export, write_export
from hf_quant.convert.files import TensorFiles, staged
from hf_quant.convert.source import source_of


def export_compressed_tensors(
    model: nn.Module | str | Path,
    out: str | Path,
    *,
    reader: str = "engines",
    measurements: "Measurements | dict[str, Any] | Path | str | None" = None,
    repo_id: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[str, ...]:
    """Write a quantized transformers model, or a checkpoint of one, in the format of compressed-tensors.

    Codes, scales and zero points are renamed and repacked, never rounded: every weight is afterwards what it was. A
    checkpoint is read file by file, and no weight is decoded.

        W4A16 (symmetric or not), W8A16       pack-quantized; scales in the model's dtype
        W8A8, W8A8_FP8, FP8_BLOCK             int-quantized, float-quantized; scales may be fp32
        W8A16_FP8                             naive-quantized
        NVFP4A16, MXFP4A16                    nvfp4-pack-quantized, mxfp4-pack-quantized

    Inputs must not be rotated, as those of W8A8 are by default: quantize with `input_transform="none"` for an engine.

    Several schemes in one model make its format "mixed-precision". Fused experts are written one by one, under the
    names of the original checkpoint. Tokenizer, generation config and licence are copied along; a README.md, the model
    card, says how engines serve it.

    Args:
        model: a quantized model of transformers, or the directory of its checkpoint, or its name on the Hub.
        out: a directory that does not exist yet, or is empty; it appears when it is complete.
        reader: "engines" (vLLM, SGLang), which compute query, key and value, and gate and up, as one layer each: they
            must be quantized alike, and share the one scale of fp8 per tensor. "transformers" keeps all
            layers apart.
        measurements: of the model's quality, for the card, see `hf_quant.cards.measurements`.
        repo_id: where the export is going to be on the Hub; the card's commands name it.
        revision: of a model on the Hub.
        token: for the Hub.

    Returns:
        Properties that the exported checkpoint does not have, one line each, e.g. the quantized KV cache is left out.

    Raises:
        ValueError: if any module has no exact counterpart (the error lists them with reasons), layers that engines
            compute as one are quantized differently, or the checkpoint is broken. Nothing is written then.
    """
    if reader not in READERS:
        raise ValueError(f"reader is {reader!r}; allowed: {', '.join(map(repr, READERS))}")
    out, figures = Path(out), as_measurements(measurements)
    if repo_id is not None:
        check_hub_id(repo_id, "repo_id")

    # A card of the export shows the quality of its weights, not the speed or memory of hf_quant's kernels.
    measured = Measurements(quality=figures.quality, bits_per_weight=figures.bits_per_weight)
    with source_of(model, out, revision=revision, token=token) as found:
        with staged(found.path, out, found.place) as target, TensorFiles(found.path) as files:
            plan = plan_export(found.path, files, reader, found.where)
            card = converted_card(
                found.path,
                found.path,
                origin=found.origin,
                export=Export(plan.formats, reader, plan.engines),
                measurements=measured,
                repo_id=repo_id,
                token=token,
            )
            write_export(plan, files, target, found.fields, found.where)
            card.save(target / CARD)
    return tuple(plan.notes)
