"""Products with quantized activations on CPU.

Where the native kernels serve (`kernels.native`) they quantize the rows of x on the way and multiply int4 and int8
codes with them in integer sums; codes of other formats are multiplied in bf16 or fp32. The rest is stock torch:
int8 x int8 with row scales runs in oneDNN's int8 GEMM on a prepacked weight (without one, and where the CPU lacks
VNNI, in `_int_mm`): sums of integers are exact. Anything else multiplies the codes of x, which bf16 holds exactly, by
the paths of `cpu.product`, and puts the row scales on the product; a weight of at most 2**16 elements, too.
"""

import sys
from functools import partial

import torch
from torch import Tensor

from hf_quant.kernels import native, prepack
from hf_quant.kernels.codes import CODES, MIN_SHARED_ROWS, row_max
from hf_quant.kernels.cpu.decode import level_block
from hf_quant.kernels.cpu.layouts import pack_qlinear
from hf_quant.kernels.cpu.product import (
    DENSE,
    NATIVE_PATH,
    PATHS,
    Run,
    make_ready,
    product,
    qlinear,
    qlinear_unsupported_reason,
)
from hf_quant.kernels.cpu.rows import as_rows, row_vector, scaled, transform_rows
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.rowwise.cpu import row_codes, scales_of
from hf_quant.kernels.scaled_mm import op
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.by_parts import by_parts_of_rows


_CHUNK = 2**18  # values of x quantized at a time: temporaries stay in the cache
_GEMM_ROWS = 256  # of the sums of int8 products at a time
_MIN_GEMM_ROWS = 64  # oneDNN reorders b at each call
_WITH_GEMM = ("amx", "avx512", "avx512_vnni")  # instruction sets with which oneDNN's sums come sooner


def _supports_int8(problem: Problem) -> str | None:
    if problem.format != "int8" or problem.activation != "int8":
        return "only int8 weights with int8 activations"
    if problem.group_size < problem.K:
        return "only one scale per row"
    return qlinear_unsupported_reason(problem.K)


INT8_PATH = Path("int8 GEMM (oneDNN)", "any M", _supports_int8)


@implements(op.dynamic_mm, "CPU", paths=(NATIVE_PATH, INT8_PATH, *PATHS[1:]))
@takes_weight(op.check_dynamic, transforms=True, quantizes=True)
def dynamic_mm_cpu(x: Tensor, w: Weight, bias: Tensor | None, *, activation: str) -> Tensor:
    """Compute `dynamic_mm_reference`; the product of the codes is rounded to bf16 before the row scales for bf16."""
    if w.has_float_zeros:  # both parts of the product need the codes of the rows
        codes, row_scale = op.quantized_for(x, w, activation)
        options = {"format": w.format, "group_size": w.group_size, "out_dtype": x.dtype}
        return quantized_mm_cpu(codes, row_scale, *w.packed, bias, **options)
    y = dynamic_product(as_rows(x), w, None if bias is None else bias.detach(), activation)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def dynamic_product(x: Tensor, w: Weight, bias: Tensor | None, activation: str) -> Tensor:
    """`dynamic_mm` for x [M, K] contiguous, after the checks."""
    if x.shape[0] == 0:
        return x.new_empty(0, w.N)
    integer = activation == "int8" and native.takes_int8(w.spec)
    if native.serves(w, x.dtype, int8=integer):
        whole = w.contiguous()
        run = _native_product(whole, activation, integer)
        if whole is w:
            # Layers that read the same rows share their fp8 codes from so many on.
            max_rows = MIN_SHARED_ROWS - 1 if activation == "fp8_e4m3" else sys.maxsize
            make_ready(w, x.dtype, activation, run, max_rows=max_rows, is_native=integer)
        return run(x, whole.qdata, bias)
    wanted, limit = x.dtype, row_max(activation)
    dtype = torch.bfloat16 if wanted == torch.bfloat16 else torch.float32
    if w.input_diagonal is not None:
        x, w = _transformed(x, w.input_diagonal), w._replace(input_diagonal=None)
    row_scale = scales_of(x, limit, w.input_scale)
    codes = _codes(x, row_scale, limit, activation, torch.int8 if _is_int8_product(activation, w) else dtype)
    return _torch_product(codes, row_scale, w, bias, wanted)


def _transformed(x: Tensor, diagonal: Tensor) -> Tensor:
    """x [M, K] in fp32, in the basis of the weight's columns."""
    return transform_rows(x, diagonal.shape[1], diagonal, torch.float32)


def _native_product(w: Weight, activation: str, integer: bool) -> Run:
    """The native kernels quantize rows to int8 as they read them; for others the codes are numbers in bf16 or fp32."""
    if integer:
        return native.prepared(w, integer=True)
    diagonal, input_scale, limit = w.input_diagonal, w.input_scale, row_max(activation)
    multiply = native.prepared(w._replace(input_diagonal=None))

    def run(x: Tensor, qdata: Tensor, bias: Tensor | None) -> Tensor:
        wanted = x.dtype
        if diagonal is not None:
            x = _transformed(x, diagonal)
        row_scale = scales_of(x, limit, input_scale)
        codes = _codes(x, row_scale, limit, activation, torch.bfloat16 if wanted == torch.bfloat16 else torch.float32)
        return multiply(codes, qdata, bias, row_scale=row_scale, out_dtype=wanted)

    return run


def _is_int8_product(activation: str, w: Weight) -> bool:
    return activation == w.format == "int8" and w.is_row_scaled and w.qdata.numel() > DENSE


def _torch_product(codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes [M, K]: int8 for oneDNN's product of int8, else numbers in bf16 or fp32."""
    if codes.dtype == torch.int8:
        return _int8(codes, w.qdata, row_scale, w.scale, bias, dtype)
    return scaled(product(codes, w, None), row_scale, None, bias, dtype)


def _knows(codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype) -> bool:
    """True if the native kernels take floating-point zero points."""
    return (
        codes.numel() > 0
        and codes.dtype == torch.int8
        and native.takes_int8(w.spec)
        and native.serves(w, out_dtype, int8=True)
    )


@implements(op.quantized_mm, "CPU", paths=(NATIVE_PATH, INT8_PATH, *PATHS[1:]))
@takes_weight(op.check_quantized)
@partial(by_parts_of_rows, knows=_knows)
def quantized_mm_cpu(
    codes: Tensor, row_scale: Tensor, w: Weight, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `quantized_mm_reference`; the product of the codes is rounded to bf16 before the row scales for bf16."""
    rows, row_scale = as_rows(codes), row_scale.reshape(-1, 1)
    bias = None if bias is None else bias.detach()
    shape = (*codes.shape[:-1], w.N)
    if rows.shape[0] == 0 or w.K == 0:
        row_scale = row_scale.view(*shape[:-1], 1)
        options = {"format": w.format, "group_size": w.group_size, "out_dtype": out_dtype}
        return op.quantized_mm_reference(codes, row_scale, *w.packed, bias, **options)
    integer = codes.dtype == torch.int8 and native.takes_int8(w.spec)
    is_native = native.serves(w, out_dtype, int8=integer)
    if is_native and integer:
        return native.product(rows, w, bias, integer=True, row_scale=row_scale, out_dtype=out_dtype).view(shape)
    if is_native or not _is_int8_product("int8" if codes.dtype == torch.int8 else "fp8_e4m3", w):
        dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
        rows = rows.to(dtype) if codes.dtype == torch.int8 else _float8_values(rows, dtype)
    if is_native:
        return native.product(rows, w, bias, row_scale=row_scale, out_dtype=out_dtype).view(shape)
    return _torch_product(rows, row_scale, w, bias, out_dtype).view(shape)


def _codes(x: Tensor, row_scale: Tensor, limit: float, activation: str, dtype: torch.dtype) -> Tensor:
    """The codes of x [M, K] as numbers in `dtype`: int8, bf16 or fp32, all of which hold them exactly."""
    step = max(_CHUNK // x.shape[1], 1)
    if x.shape[0] > step:
        codes = torch.empty(x.shape, dtype=dtype)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            codes[rows] = _codes(x[rows], row_scale[rows], limit, activation, dtype)
        return codes
    values = row_codes(x, row_scale, limit, activation)
    return values.to(dtype) if activation == "int8" else _float8_values(values.to(torch.float8_e4m3fn), dtype)


def _float8_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [M, K] float8_e4m3fn -> bf16 or fp32, exactly; by a table, as `.to` takes 3 ns per element."""
    M, K = codes.shape
    values = torch.empty(M, K, dtype=dtype)
    step = min(max(_CHUNK // K, 1), M)
    for start in range(0, M, step):
        part = codes[start : start + step]
        rows, fill = level_block(part, CODES["fp8_e4m3"], K, dtype, part.shape[0])
        fill(0)
        values[start : start + step] = rows
    return values


def _int8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(a @ b.T) * a_scale * b_scale.T + bias; a [M, K] int8 contiguous, b_scale [N | 1, 1] of any floating dtype."""
    weight_scale = row_vector(b_scale, b.shape[0], torch.float32)
    weight = None if qlinear_unsupported_reason(a.shape[1]) else prepack.get_or_build("qlinear", (b,), pack_qlinear, b)
    if weight is None:
        return scaled(torch._int_mm(a, b.t()), a_scale, weight_scale, bias, dtype)
    return scaled(qlinear(a.view(torch.uint8).bitwise_xor(128), weight, weight_scale), a_scale, None, bias, dtype)


@implements(op.int8_scaled_mm, "CPU", paths=(NATIVE_PATH, INT8_PATH))
def int8_scaled_mm_cpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `int8_scaled_mm_reference`."""
    op.check(a, b, a_scale, b_scale, bias, torch.int8)
    if a.shape[0] == 0 or a.shape[1] < 2:
        return op.int8_scaled_mm_reference(a, b, a_scale, b_scale, bias, out_dtype=out_dtype)
    if a.shape[0] >= _MIN_GEMM_ROWS and native.active() in _WITH_GEMM and native.scales_sums(out_dtype):
        return _by_gemm(a, b, a_scale.contiguous(), b_scale.contiguous(), bias, out_dtype)
    w = Weight(b, b_scale, None, None, "int8", a.shape[1], a.shape[1])
    if out_dtype != torch.float64 and native.serves(w, torch.float32, int8=True):
        how = {"integer": True, "row_scale": a_scale.contiguous(), "out_dtype": out_dtype}
        return native.product(a.contiguous(), w, bias, **how)
    return _int8(a.contiguous(), b, a_scale, b_scale, bias, out_dtype)


def _by_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """oneDNN's sums in int32, scaled while they are in the cache: for a b that is new at each call, as in training."""
    M, N = a.shape[0], b.shape[0]
    y = torch.empty(M, N, dtype=dtype)
    sums = torch.empty(min(M, _GEMM_ROWS), N, dtype=torch.int32)
    for start in range(0, M, _GEMM_ROWS):
        rows = slice(start, min(start + _GEMM_ROWS, M))
        part = sums[: rows.stop - start]
        torch._int_mm(a[rows], b.t(), out=part)
        native.scale_sums(part, a_scale[rows], b_scale, bias, y[rows])
    return y


@implements(op.fp8_scaled_mm, "CPU", paths=(Path("GEMM of the decoded codes", "any M", lambda problem: None),))
def fp8_scaled_mm_cpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Compute `fp8_scaled_mm_reference`; for bf16 output the product is rounded to bf16 before the row scales."""
    op.check(a, b, a_scale, b_scale, bias, *op.FLOAT8)
    M, K = a.shape
    if M == 0 or K == 0:
        return op.fp8_scaled_mm_reference(a, b, a_scale, b_scale, bias, out_dtype=out_dtype)
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    codes = _float8_values(a.contiguous(), dtype) if a.dtype == b.dtype else a.to(dtype)
    y = product(codes, Weight(b, b_scale, None, None, "fp8_e4m3", K, K), None)
    return scaled(y, a_scale, None, bias, out_dtype)
