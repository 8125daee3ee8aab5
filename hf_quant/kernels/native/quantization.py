"""Weights and rows of activations, quantized by the extension: the bits of the torch algorithms."""

from functools import cache

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.native.arguments import DTYPES, INPUTS, knows, layout
from hf_quant.kernels.native.extension import active, module
from hf_quant.kernels.weight import LARGEST_BLOCK


def quantize_rows(
    x: Tensor,
    block_size: int = 0,
    diagonal: Tensor | None = None,
    input_scale: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """x [M, K] -> (int8 codes [M, K], fp32 scales [M, 1]) as `quantize_rowwise`; None: not here.

    With a block size, of the transform: as `hadamard_quantize_rowwise`; with input_scale [1]: as `quantize_static`;
    with a seed (one int64 on the CPU) rounded at random.
    """
    if not _reads_rows(x, block_size):
        return None
    codes = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device="cpu")
    given, key = (0 if part is None else part.data_ptr() for part in (input_scale, seed))
    _rows(x, block_size, diagonal, given, codes.data_ptr(), scales.data_ptr(), 0, 0, key, 0)
    return codes, scales


def quantize_rows_to_e4m3(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor] | None:
    """x [M, K] -> (float8_e4m3fn codes [M, K], fp32 scales [M, 1]) as `quantize_rowwise` at random; None: not here."""
    if not _reads_rows(x, 0):
        return None
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cpu")
    scales = torch.empty(x.shape[0], 1, dtype=torch.float32, device="cpu")
    _rows(x, 0, None, 0, codes.data_ptr(), scales.data_ptr(), 0, 0, seed.data_ptr(), 1)
    return codes, scales


def quantize_two_way(x: Tensor, *, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """x [M, K] -> int8 codes, row scales, codes and scales of the transpose, as `quantize_two_way`; None: not here.

    An extension that was built before it had the function has none until it is built again.
    """
    if active() is None or not hasattr(module, "quantize_two_way") or x.dtype not in INPUTS or x.numel() == 0:
        return None
    M, K = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    rows_t = K if columns else 0
    found = (
        torch.empty(M, K, dtype=torch.int8, device="cpu"),
        torch.empty(M, 1, dtype=torch.float32, device="cpu"),
        torch.empty(rows_t, M, dtype=torch.int8, device="cpu"),
        torch.empty(rows_t, 1, dtype=torch.float32, device="cpu"),
    )
    results = (each.data_ptr() for each in found)  # 0 for what is empty
    module.quantize_two_way(M, K, x.data_ptr(), DTYPES[x.dtype], x.stride(0), *results, torch.get_num_threads())
    return found


def scale_sums(sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y [M, N] = int32 sums * row_scale [M, 1] * column_scale [N, 1] + bias [N], all contiguous, scales in fp32.

    y is of a dtype that the extension knows. Ask `scales_sums` first.
    """
    bias = None if bias is None else bias.float()
    address = 0 if bias is None else bias.data_ptr()
    scales = (row_scale.data_ptr(), column_scale.data_ptr(), address)
    module.scale_sums(*y.shape, sums.data_ptr(), *scales, y.data_ptr(), DTYPES[y.dtype], torch.get_num_threads())


def scales_sums(dtype: torch.dtype) -> bool:
    """True if `scale_sums` is there for results of this dtype."""
    return active() is not None and hasattr(module, "scale_sums") and dtype in INPUTS


def transform_rows(x: Tensor, block_size: int, diagonal: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """x [M, K] -> its transform as by `hadamard` in `dtype` [M, K], computed in fp32; None: not here."""
    if not _reads_rows(x, block_size) or dtype not in INPUTS:
        return None
    y = torch.empty(x.shape, dtype=dtype, device="cpu")
    _rows(x, block_size, diagonal, 0, 0, 0, y.data_ptr(), DTYPES[dtype], 0, 0)
    return y


def _reads_rows(x: Tensor, block_size: int) -> bool:
    is_block = block_size & (block_size - 1) == 0 and block_size <= LARGEST_BLOCK
    return is_block and active() is not None and x.dtype in INPUTS


def _rows(x: Tensor, block_size: int, diagonal: Tensor | None, *scale_and_results: int) -> None:
    M, K = x.shape
    x = x.contiguous()
    if block_size and diagonal is None:
        diagonal = _ones(K)
    address = 0 if diagonal is None else diagonal.data_ptr()
    arguments = (M, K, x.data_ptr(), DTYPES[x.dtype], K, address, block_size)
    module.quantize_rows(*arguments, *scale_and_results, torch.get_num_threads())


@cache
def _ones(K: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(K, dtype=torch.float32, device="cpu")


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
    mirrors: bool,
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
        *(len(shrinks), len(steps), turns, mirrors, moves, fits, norm),
        torch.get_num_threads(),
    )


@cache
def _levels_and_midpoints(name: str) -> Tensor:
    """fp32: the levels, ascending, and the midpoints between them."""
    with torch.inference_mode(False):
        levels = torch.tensor(CODES[name].levels, dtype=torch.float64, device="cpu")
        return torch.cat([levels, (levels[1:] + levels[:-1]) / 2]).float()


def fake_quantizes(weight: Tensor, grad: Tensor | None, spec: CodeSpec) -> bool:
    """True if `fake_quantize` is for this weight and gradient, and these codes.

    An extension that was built before it had the function has none until it is built again.
    """
    if active() is None or not hasattr(module, "fake_quantize") or not knows(spec.name):
        return False
    return weight.dtype in INPUTS and (grad is None or grad.dtype in INPUTS) and weight.numel() > 0


def fake_quantize(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    grad: Tensor | None,
    spec: CodeSpec,
    group_size: int,
    bounds: tuple[float, float, float, float],
) -> tuple[Tensor, Tensor | None]:
    """weight [..., N, K] as it would be stored, and None; or the gradients of weight and of scale, with that of the
    former. Checked by the caller; bounds are those of the op. Ask `fake_quantizes` first."""
    *lead, K = weight.shape
    low, high, *inside = bounds
    weight, scale = weight.contiguous(), scale.contiguous()
    zero_point = None if zero_point is None else zero_point.contiguous()
    grad = None if grad is None else grad.contiguous()
    result = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
    grad_scale = None if grad is None else torch.empty(scale.shape, dtype=torch.float32, device="cpu")
    of_values = torch.tensor([high, *inside], dtype=torch.float32, device="cpu")
    is_table = not spec.is_integer and spec.minifloat is None
    module.fake_quantize(
        *(weight.numel() // K, K, group_size, scale.shape[-1]),
        *(weight.data_ptr(), DTYPES[weight.dtype], scale.data_ptr()),
        0 if zero_point is None else zero_point.data_ptr(),
        *((0, 0) if is_table or spec.minifloat else (int(low), int(high))),
        *(spec.minifloat or (0, 0, 0)),
        _levels_and_midpoints(spec.name).data_ptr() if is_table else 0,
        of_values.data_ptr(),
        *((0, 0) if grad is None else (grad.data_ptr(), DTYPES[grad.dtype])),
        *(result.data_ptr(), 0 if grad_scale is None else grad_scale.data_ptr(), torch.get_num_threads()),
    )
    return result, grad_scale
