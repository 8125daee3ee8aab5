"""Arguments of the extension: dtypes and layouts as its numbers, tables of levels, and the addresses of a weight."""

import struct
from functools import cache

import torch
from torch import Tensor

from hf_quant.kernels.codes import BLOCK_SIZE, CODES, CodeSpec
from hf_quant.kernels.weight import Weight


DTYPES = {
    dtype: i
    for i, dtype in enumerate(
        (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.int8)
    )
}
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 16  # group sizes are a multiple of it, for lanes to hold codes of one group
_LAYOUTS = {(2,): 0, (2, 1): 1, (4,): 2, (4, 2): 3}  # by bit planes
_BYTES_INT, _BYTES_FLOAT = 4, 5


@cache  # asked by every product, and by name: to hash 16 levels takes longer than the answer
def knows(format: str) -> bool:
    """True if the extension reads the codes of a format, and makes them: bytes, integers of up to 4 bits, floats of up
    to 6, and tables of 16 levels."""
    spec = CODES[format]
    if not spec.is_packed:
        return True
    is_kind = spec.bits <= 4 if spec.is_integer else spec.minifloat is not None or spec.bits == 4
    return is_kind and spec.planes in _LAYOUTS


@cache
def levels(name: str, unsigned: bool) -> Tensor:
    """fp32 value of each code; `unsigned`: of the code itself, from which a zero point is taken."""
    spec = CODES[name]
    with torch.inference_mode(False):
        if not spec.is_packed:
            return torch.arange(256, dtype=torch.uint8, device="cpu").view(spec.dtype).float()
        levels = torch.tensor(spec.levels, dtype=torch.float32, device="cpu")
        return levels + 2 ** (spec.bits - 1) if unsigned else levels


def layout(spec: CodeSpec) -> int:
    """The extension's number of a layout of codes."""
    if spec.is_packed:
        return _LAYOUTS[spec.planes]
    return _BYTES_INT if spec.dtype == torch.int8 else _BYTES_FLOAT


def bits(*numbers: float) -> tuple[int, ...]:
    """Arguments of the extension for numbers: the bits of each in fp32."""
    return struct.unpack(f"{len(numbers)}I", struct.pack(f"{len(numbers)}f", *numbers))


def layout_arguments(spec: CodeSpec) -> tuple[int, int, bool]:
    """Arguments of the extension for codes: their layout, their levels, and whether these are equally spaced."""
    return layout(spec), levels(spec.name, False).data_ptr(), spec.is_integer


def weight_arguments(w: Weight) -> tuple[int, ...]:
    """Arguments of the extension for a weight [N, K], or experts [E, N, K], and the scale of its input: addresses and
    sizes; all contiguous."""
    qdata, scale, zero_point, global_scale = w.packed
    N, rows, groups = qdata.shape[-2], scale.shape[-2], scale.shape[-1]
    return (
        layout(w.spec),
        levels(w.format, zero_point is not None).data_ptr(),
        w.group_size,
        groups,
        qdata.data_ptr(),
        qdata.shape[-1] * qdata.element_size(),
        scale.data_ptr(),
        DTYPES[scale.dtype],
        0 if rows == 1 else groups,
        1 if rows in (1, N) else BLOCK_SIZE,
        0 if zero_point is None else zero_point.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        qdata.shape[0] if qdata.dim() == 3 else 1,
        N * qdata.shape[-1] * qdata.element_size(),
        rows * groups,
        N,
        0 if w.input_scale is None else w.input_scale.data_ptr(),
    )
