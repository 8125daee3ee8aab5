"""Write checkpoints for serving engines: hf_quant's codes in the format of compressed-tensors, equal to the bit.

vLLM and SGLang load this format (https://github.com/vllm-project/compressed-tensors), transformers does where the
package compressed-tensors is installed; it is not needed to write one.
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_quant.cards import CARD, Export, Measurements, converted_card, origin_of
from hf_quant.cards.base import check_hub_id
from hf_quant.cards.measurements import as_measurements
from hf_quant.checkpoint import workspace
from hf_quant.config import QuantMethod
from hf_quant.convert.compressed_tensors.export_plan import READERS, plan_export, write_export
from hf_quant.convert.files import TensorFiles, check_out, local_checkpoint, read_config, staged


_SHARD_SIZE = "5GB"  # one file is in memory beside the model


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
    options = {"reader": reader, "measurements": measured, "repo_id": repo_id, "token": token}
    if isinstance(model, str | Path):
        return _write(local_checkpoint(model, revision=revision, token=token), out, str(model), **options)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; needs a model of transformers, or a directory")
    if getattr(model.config, "quantization_config", None) is None:
        raise ValueError(f"this {type(model).__name__} is not quantized: quantize_ it first")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"this {type(model).__name__} has adapters, which would be lost: merge or remove them first")
    check_out(out)  # before anything is written
    with workspace(out) as place:
        model.save_pretrained(place / "saved", max_shard_size=_SHARD_SIZE)
        saved, where = place / "saved", f"this {type(model).__name__}"
        return _write(saved, out, where, origin=origin_of(model), place=place, **options)


def _write(
    source: Path,
    out: Path,
    where: str,
    *,
    reader: str,
    measurements: Measurements,
    repo_id: str | None,
    token: str | bool | None,
    origin: tuple[str | None, bool] | None = None,
    place: Path | None = None,
) -> tuple[str, ...]:
    """Export the checkpoint in the directory `source` to `out`, and return the notes for the user.

    `where` is the name of the source in errors, `origin` the result of `origin_of` for a model in memory, and `place`
    the workspace of `out` if the caller has it already.
    """
    fields = read_config(source)
    method = (fields.get("quantization_config") or {}).get("quant_method")
    if method != QuantMethod.HF_QUANT:
        found = "not quantized" if method is None else f"quantized by {method}"
        raise ValueError(f"{where} is {found}; needs a checkpoint that hf_quant has quantized")
    with staged(source, out, place) as target, TensorFiles(source) as files:
        plan = plan_export(source, files, reader, where)
        card = converted_card(
            source,
            source,
            origin=origin,
            export=Export(plan.formats, reader, plan.engines),
            measurements=measurements,
            repo_id=repo_id,
            token=token,
        )
        write_export(plan, files, target, fields, where)
        card.save(target / CARD)
    return tuple(plan.notes)
