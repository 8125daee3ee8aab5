"""Read HQQ: groups along rows.

Layout (https://github.com/mobiusml/hqq/blob/master/hqq/core/quantize.py): `W_q` holds the codes [groups, group size],
of which those that share a byte (or, of 3 bits, a word) are as many groups apart as there are rows, the first in the
highest bits; `scale` and `zero` [groups, 1]; the other fields are tensors of one number, or of the bytes of a text.
Weights are (code - zero) * scale. HQQ's optimizer moves `zero` off the integers: then ours are code * scale + z with z
= -zero * scale, which fp32 holds exactly.
"""

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.layers import (
    FLOATS,
    float_zero_points,
    groups_of,
    modules_with,
    tensor_info,
    without_zero_scales,
)
from hf_quant.formats import FORMATS
from hf_quant.scheme import LinearScheme, TensorQuant


# {packing: (bits, shifts of the codes of one stored integer)}
_PACKINGS = {
    "8bit_u8": (8, (0,)),
    "4bit_u8": (4, (4, 0)),
    "3bit_32": (3, tuple(range(27, -1, -3))),
    "2bit_u8": (2, (6, 4, 2, 0)),
}
# Fields of a layer, each a tensor.
_FIELDS = (
    *("W_q", "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype"),
    *("view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)


def read_hqq(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of an HQQ checkpoint. Raises ValueError with the reason if one is unsupported."""
    return Foreign([_weight(files, module) for module in modules_with(files, "W_q")], set(), [])


def _number(files: TensorFiles, key: str, default: int = 0) -> int:
    """Read a field of one number."""
    if key not in files.tensors:
        return default
    if prod(files.tensors[key].shape) != 1:
        raise ValueError(f"{key} is {files.tensors[key]}; needs one number")
    return int(files.read(key))


def _weight(files: TensorFiles, module: str) -> ForeignWeight:
    tensor_info(files, f"{module}.packing", [torch.uint8], dims=1)
    packing = bytes(files.read(f"{module}.packing")[:20].tolist()).decode("ascii", "replace")
    if packing not in _PACKINGS:
        raise ValueError(f"{module}.packing is {packing!r}; readable: {', '.join(_PACKINGS)}")
    if _number(files, f"{module}.axis", 1) != 1:
        raise ValueError(f"{module} has groups across its rows (axis 0), which hf_quant has not: make it with axis=1")
    for name in ("quant_scale", "quant_zero"):
        if _number(files, f"{module}.{name}"):
            raise ValueError(f"{module} has a quantized {name.removeprefix('quant_')}, which hf_quant has no form for")
    tensor_info(files, f"{module}.shape", [torch.int64, torch.int32], [(2,)])
    N, K = (int(size) for size in files.read(f"{module}.shape"))
    scale = tensor_info(files, f"{module}.scale", FLOATS, dims=2)
    zero = tensor_info(files, f"{module}.zero", FLOATS, [scale.shape])
    groups, (bits, shifts) = scale.shape[0], _PACKINGS[packing]
    stored = tensor_info(files, f"{module}.W_q", (torch.uint8, torch.int32, *FLOATS), dims=2)
    if min(N, K) < 1 or scale.shape[1] != 1 or (N * K) % groups or stored.shape[0] != -(-groups // len(shifts)):
        raise ValueError(f"{module}.W_q is {stored} beside scales of {scale} for {N} x {K} weights")
    integer = torch.int32 if bits == 3 else torch.uint8
    if stored.shape[1] * stored.dtype.itemsize != N * K // groups * integer.itemsize:
        raise ValueError(f"{module}.W_q is {stored}; {groups} groups of {N} x {K} weights need another width")
    zeros = files.read(f"{module}.zero").float()
    if not bool(zeros.isfinite().all()):
        raise ValueError(f"{module}.zero ({zero}) has NaN or inf; needs finite zero points")
    symmetric = bool((zeros == 2 ** (bits - 1)).all())
    are_codes = not bool((zeros != zeros.round()).any() | (zeros < 0).any() | (zeros >= 2**bits).any())
    granularity, size, columns = groups_of(module, K, N * K // groups)
    kind = "uint8" if symmetric or (are_codes and bits < 8) else "float32"
    scale_dtype = str(scale.dtype).removeprefix("torch.")
    quant = TensorQuant(f"int{bits}", granularity, size, symmetric, scale_dtype, zero_point_dtype=kind)
    keys = (f"{module}.W_q", *(f"{module}.{name}" for name in _FIELDS[1:] if f"{module}.{name}" in files.tensors))
    unpack = partial(_unpack, files, module, integer, shifts, quant, (N, K), columns)
    return ForeignWeight(module, LinearScheme(quant), (N, K), keys, unpack)


def _unpack(
    files: TensorFiles,
    module: str,
    integer: torch.dtype,
    shifts: tuple[int, ...],
    quant: TensorQuant,
    shape: tuple[int, int],
    columns: int,
) -> PackedWeight:
    (N, K), format = shape, FORMATS[quant.format]
    stored, scale = files.read(f"{module}.W_q").contiguous().view(integer), files.read(f"{module}.scale")
    mask = 2**format.bits - 1
    groups = torch.cat([stored >> shift & mask for shift in shifts])[: scale.shape[0]]
    codes = groups.to(torch.uint8).reshape(N, K)
    each = stored.shape[1] // columns if quant.granularity == "group" else 0

    def spread(values: Tensor) -> Tensor:
        values = values.flatten()
        return values.repeat_interleave(each or N // values.numel()).view(N, -1)

    scale, zeros = spread(scale), spread(files.read(f"{module}.zero"))
    middle = 0 if format.spec.is_packed else 128
    codes = codes if format.spec.is_packed else (codes ^ 0x80).view(torch.int8)
    if quant.has_float_zeros:
        zeros = float_zero_points(zeros, scale, middle)
        codes, scale = without_zero_scales(codes, scale, columns, float_zeros=True)
        return PackedWeight(format.pack(codes), scale, zeros, None)
    zeros = zeros.to(torch.uint8)
    codes, scale = without_zero_scales(codes, scale, columns, zeros if format.spec.is_packed else 0)
    return PackedWeight(format.pack(codes), scale, None if quant.symmetric else zeros, None)
