"""Make checkpoints of hf_quant from those of other libraries; every weight keeps its value."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_quant.cards import CARD, converted_card, hub_id
from hf_quant.checkpoint import one_line
from hf_quant.convert.experts import merge_experts
from hf_quant.convert.files import PICKLES, copy_side_files, local_checkpoint, read_config, staged
from hf_quant.convert.foreign import Foreign, ForeignWeight, write_foreign
from hf_quant.convert.gguf.imports import gguf_of, import_gguf
from hf_quant.convert.hosts import Empty, empty_host
from hf_quant.convert.pipelines import is_foreign, is_pipeline, local_pipeline
from hf_quant.convert.readers import detect, is_pickled, opened, read


HOSTS = ("transformers", "diffusers")


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    requantize: str | dict[str, Any] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[str, ...]:
    """Make a checkpoint of hf_quant from one that another library has quantized; the library is not needed.

    Codes, scales and zero points are repacked, never rounded; scales keep their dtype, even if the model has another.
    The checkpoint is read file by file, and no weight is decoded. `from_pretrained` then loads the result onto
    hf_quant's kernels. Its README.md names the base model and the licence that the original's card names. Models of
    transformers and diffusers are imported, and pipelines of diffusers, whose other components are copied.

        gptq                4 and 8 bits, format versions 1 and 2, columns in their own order
        awq                 4 bits, version "gemm"
        compressed-tensors  pack-quantized int4 and int8, int-quantized, float-quantized (channel, tensor, block),
                            naive-quantized fp8 and int8, nvfp4-pack-quantized and mxfp4-pack-quantized without
                            quantized inputs; int4 and int8 symmetric or not
        bitsandbytes        NF4 and FP4 with plain and quantized scales, LLM.int8
        mxfp4               experts of gpt-oss
        fp8, fbgemm_fp8     float8_e4m3fn in blocks of 128 x 128, by rows or per tensor, inputs dynamic or static
        torchao             int8, int4, intx, fp8, mxfp8, mxfp4 and nvfp4 subclasses, in safetensors files or pickles
        quanto              qint8, qfloat8, qint4 and qint2
        hqq                 axis 1
        auto-round          packed as GPTQ or AWQ
        modelopt            FP8 and NVFP4
        bitnet              ternary weights with int8 inputs, packed or as they were trained
        GGUF                Q2_K to Q6_K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, IQ4_NL, IQ4_XS, TQ1_0,
                            TQ2_0; models of llama, mixtral, qwen2, qwen3 (both with experts, too), gpt-oss, gemma3 and
                            phi3

    Other types of GGUF (IQ1 to IQ3) have no exact form here: they are refused, unless `requantize` says how to round
    them.

    Args:
        source: the other library's checkpoint, a model or a pipeline: a directory, or USER/NAME on the Hub; a file
            NAME.gguf, or USER/NAME/FILE.gguf on the Hub.
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
    if is_pipeline(source, revision=revision, token=token):
        path = local_pipeline(source, revision=revision, token=token)
        with staged(path, out) as target:
            notes = _import_parts(path, target, where)
            converted_card(target, path, token=token).save(target / CARD)
        return notes
    path = local_checkpoint(source, revision=revision, token=token)
    method, _ = detect(path, read_config(path, hosts=HOSTS), where)
    if is_pickled(path, method):
        path = local_checkpoint(source, revision=revision, token=token, weights=PICKLES)
    with staged(path, out) as target:
        notes = _import_model(path, target, where, hub_id(str(path)))
        converted_card(target, path, token=token).save(target / CARD)
    return notes


def _import_model(source: Path, target: Path, where: str, origin: str | None) -> tuple[str, ...]:
    """Write the weights and the config of one model into a directory. Returns and raises as `import_checkpoint`."""
    fields = read_config(source, hosts=HOSTS)
    method, own = detect(source, fields, where)
    with opened(source, method) as files:
        try:
            host = empty_host(source, fields, files.tensors)
            found = read(method, files, own, host, host.dtype if host.is_diffusers else _stated_dtype(fields))
            found = _for_host(found, host)
        except ValueError as error:
            raise ValueError(f"{where} cannot be imported: {one_line(error)}") from None
        write_foreign(target, fields, files, found, host, where=where, origin={"method": method, "name": origin})
    return tuple(found.notes)


def _import_parts(source: Path, target: Path, where: str) -> tuple[str, ...]:
    """Write the components of a pipeline: those of another library imported, the others as they are."""
    notes: list[str] = []
    imported = False
    for part in sorted(path for path in source.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if is_foreign(part):
            (target / part.name).mkdir()
            copy_side_files(part, target / part.name)
            found = _import_model(part, target / part.name, f"{where}/{part.name}", hub_id(str(source)))
            notes += [f"{part.name}: {note}" for note in found]
            imported = True
        else:
            shutil.copytree(part, target / part.name)
    if not imported:
        raise ValueError(f"{where} is a pipeline without a component that another library has quantized")
    return tuple(notes)


def _stated_dtype(fields: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that a config of transformers names, or None."""
    dtype = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _for_host(found: Foreign, host: Empty) -> Foreign:
    """Return what the host's model has, experts fused as it has them. Raises ValueError as `merge_experts`."""
    used = [weight for weight in found.weights if host.uses(f"{weight.module}.{weight.name}")]
    dropped, notes = set(_keys(found.weights)) - set(_keys(used)), found.notes
    if dropped:
        unused = f"layers that {type(host.model).__name__} does not use are left out, {min(dropped)} among them"
        notes = [*notes, unused]
    weights = used if host.is_diffusers else merge_experts(host.model, used)
    return Foreign(weights, found.dropped | dropped, notes)


def _keys(weights: list[ForeignWeight]) -> Iterator[str]:
    return (key for weight in weights for key in weight.keys)
