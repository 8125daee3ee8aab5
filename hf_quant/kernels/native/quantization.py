"""Weights and rows of activations, quantized by the extension: the bits of the torch algorithms."""

from functools import cache

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.native.arguments import DTYPES, INPUTS, knows, layout
from hf_quant.kernels.native.extension import active, module


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """x [M, K] contiguous -> (int8 codes [M, K], fp32 scales [M, 1]) as `quantize_rowwise`; None: not here."""
    if active() is None or x.dtype not in INPUTS:
        return None
    codes = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(x.shape[0], 1, device="cpu")
    module.quantize_rows(
        *(*x.shape, x.data_ptr(), DTYPES[x.dtype], x.shape[1]),
        *(codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()),
    )
    return codes, scales


def quantizes(weight: Tensor, spec: CodeSpec) -> bool:
    """True if `quantize` is for this weight [L, N, K] and these codes."""
    if active() is None or not knows(spec.name):
        return False
    return is_plain(weight) and weight.device.type == "cpu" and weight.dtype in INPUTS


def quantize(
    weight: Tensor,
    group_size: int,
    spec: CodeSpec,
    largest: float,
    qdata: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    *,
    shrinks: tuple[float, ...],
    turns: bool,
    moves: bool,
    steps: tuple[float, ...],
    fits: bool,
    norm: bool,
) -> bool:
    """Fill qdata, scale and zero_point [L, N, ...], contiguous, for weight [L, N, K]; False if one is NaN or inf.

    Each row's groups of `group_size` get what `hf_quant.algorithms` would choose, bit for bit: absmax, with `shrinks`
    the search of mse, with `norm` its norm. `largest` is the value at amax (Format.max); global_scale [L] is given.
    The weight's last dimension is contiguous. Ask `quantizes` first.
    """
    matrices, N, K = weight.shape
    low, high = (int(spec.levels[0]), int(spec.levels[-1])) if spec.is_packed else (-int(largest), int(largest))
    factors = torch.tensor([largest, *shrinks, *steps], dtype=torch.float32, device="cpu")
    return module.quantize(
        *(matrices, N, K, group_size, scale.shape[-1]),
        *(weight.data_ptr(), DTYPES[weight.dtype], weight.stride(0), weight.stride(1)),
        *(qdata.data_ptr(), qdata.shape[-1] * qdata.element_size(), layout(spec)),
        *(scale.data_ptr(), DTYPES[scale.dtype]),
        0 if zero_point is None else zero_point.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        *(low, high),
        *(spec.minifloat or (0, 0, 0)),
        0 if spec.is_integer or spec.minifloat else _levels_and_midpoints(spec.name).data_ptr(),
        factors.data_ptr(),
        *(len(shrinks), len(steps), turns, moves, fits, norm),
        torch.get_num_threads(),
    )


@cache
def _levels_and_midpoints(name: str) -> Tensor:
    """fp32: the levels, ascending, and the midpoints between them."""
    with torch.inference_mode(False):
        levels = torch.tensor(CODES[name].levels, dtype=torch.float64, device="cpu")
        return torch.cat([levels, (levels[1:] + levels[:-1]) / 2]).float()
