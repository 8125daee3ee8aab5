"""Read weights in float8_e4m3fn: in blocks of 128 x 128, by rows, or with one scale; inputs dynamic or static.

A layer has `weight`, and its factor as `weight_scale_inv` (DeepSeek-V3, Qwen, Mistral;
https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/finegrained_fp8.py) or
`weight_scale` (FBGEMM, AutoFP8, ModelOpt). A static scale of its input is `activation_scale` or `input_scale`. Fused
experts have `<weight>_scale_inv` beside `<weight>`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.layers import FLOATS, rows_of_scale, tensor_info, without_zero_scales
from hf_quant.scheme import BLOCK_SIZE, LinearScheme, TensorQuant


_SCALES = ("weight_scale_inv", "weight_scale")
_INPUTS = ("activation_scale", "input_scale")
_EXPERTS = "_proj_scale_inv"
_BOUND = ".input_scale_ub"  # of FBGEMM: the largest scale of an input


def read_fp8(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a checkpoint in fp8. Raises ValueError with the reason if one is unsupported."""
    block, scheme = fields.get("weight_block_size"), fields.get("activation_scheme", "dynamic")
    if block is not None and block != [BLOCK_SIZE, BLOCK_SIZE]:
        raise ValueError(f"its weight_block_size is {block!r}; hf_quant has [{BLOCK_SIZE}, {BLOCK_SIZE}] alone")
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"its activation_scheme is {scheme!r}; readable: 'dynamic', 'static'")
    weights = fp8_weights(files, quantizes_inputs=True)
    if not weights:
        raise ValueError(f"it holds no tensor named {' or '.join(map(repr, _SCALES))}: no layer of it is quantized")
    bounds = {key for key in files.tensors if key.endswith(_BOUND)}
    return Foreign(weights, bounds, list(_notes(weights, fields, bool(bounds))))


def _notes(weights: list[ForeignWeight], fields: dict[str, Any], has_bounds: bool) -> Iterator[str]:
    dynamic = {w.scheme.weight.granularity for w in weights if not w.scheme.is_static}
    if "block" in dynamic:
        yield "inputs of fp8 blocks are quantized with one scale per token, not per 128 values"
    if "tensor" in dynamic:
        yield "inputs are quantized with one scale per token, not with one for all tokens"
    if has_bounds or fields.get("activation_scale_ub") is not None:
        yield "the upper bound of scales of inputs (activation_scale_ub) is left out: no input is clipped"


def fp8_weights(files: TensorFiles, *, quantizes_inputs: bool) -> list[ForeignWeight]:
    """Return the weights in float8_e4m3fn; without a static scale, inputs are quantized per token if asked for."""
    found: list[ForeignWeight] = []
    for key in files.tensors:
        module, _, leaf = key.rpartition(".")
        if leaf == _SCALES[0] or (leaf in _SCALES and _is_fp8(files, f"{module}.weight")):
            inputs = [f"{module}.{name}" for name in _INPUTS if f"{module}.{name}" in files.tensors]
            found.append(_weight(files, module, "weight", key, inputs, quantizes_inputs))
        elif leaf.endswith(_EXPERTS):
            weight = leaf.removesuffix("_scale_inv")
            inputs = [name for name in [f"{module}.{weight}_activation_scale"] if name in files.tensors]
            found.append(_weight(files, module, weight, key, inputs, quantizes_inputs))
    return found


def _is_fp8(files: TensorFiles, name: str) -> bool:
    info = files.tensors.get(name)
    return info is None or info.dtype == torch.float8_e4m3fn  # a missing one is reported


def _weight(
    files: TensorFiles, module: str, leaf: str, scale_key: str, inputs: list[str], quantizes_inputs: bool
) -> ForeignWeight:
    key = f"{module}.{leaf}"
    dims = 2 if leaf == "weight" else 3
    *lead, N, K = tensor_info(files, key, [torch.float8_e4m3fn], dims=dims).shape
    block = (*lead, -(-N // BLOCK_SIZE), -(-K // BLOCK_SIZE))
    alone = [(*lead, 1, 1)] if lead else [(), (1,), (1, 1)]
    shapes = {"block": [block], "tensor": alone, "row": [(*lead, N, 1), (*lead, N)]}
    # Of a small weight [128, 128] block and tensor are the same.
    dtypes = (*FLOATS, torch.float8_e8m0fnu)
    info = tensor_info(files, scale_key, dtypes, [shape for given in shapes.values() for shape in given])
    order = ("row", "block", "tensor") if scale_key.endswith("weight_scale") else ("block", "tensor", "row")
    granularity = next(name for name in order if info.shape in shapes[name])
    is_power = info.dtype == torch.float8_e8m0fnu  # powers of two, which fp32 holds as they are
    kept = "float32" if is_power else str(info.dtype).removeprefix("torch.")
    quant = TensorQuant("fp8_e4m3", granularity, None, True, kept)
    dynamic = TensorQuant("fp8_e4m3", "row") if quantizes_inputs else None
    scheme = LinearScheme(quant, TensorQuant("fp8_e4m3", "tensor", dynamic=False) if inputs else dynamic)
    for name in inputs:
        tensor_info(files, name, FLOATS, [(), (1,), (1, 1), *([tuple(lead)] if lead else [])])

    def unpack() -> PackedWeight:
        scale = files.read(scale_key)
        if granularity != "block":
            scale = scale.reshape(*lead, -1, 1)
        scale = scale.float() if is_power else scale
        columns = BLOCK_SIZE if granularity == "block" else K
        codes, scale = without_zero_scales(files.read(key), scale, columns, rows=rows_of_scale(N, granularity))
        return PackedWeight(codes, scale, None, None)

    def input_scale() -> Tensor:
        scales = torch.cat([files.read(name).float().reshape(-1) for name in inputs])
        if bool((scales != scales[0]).any()):
            raise ValueError(f"{module} has one static scale of its input in hf_quant, but {inputs[0]} has several")
        return scales[0]

    keys = (key, scale_key, *inputs)
    static = input_scale if inputs else None
    return ForeignWeight(module, scheme, (*lead, N, K), keys, unpack, leaf, static)
