"""`dequantize` on a GPU: one pass, the bits of the reference.

Traffic: codes and scales once, the weight once. Modelled at 4.3 TB/s, int4 g128 to bf16: 2.53 bytes a weight; 28672 x
4096 takes 69 us, 4096 x 14336 35 us. Codes are decoded to a 16-bit float, which holds every level of every format but
nf4 (whose levels are looked up in fp32), and scaled in fp32.
"""

from math import prod

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import Path, implements
from hf_quant.kernels.gpu.decode import (
    bits_of,
    codes_per_element,
    decode_in_order,
    decode_options,
    group_in_block,
    levels_tensor,
    load_planes,
    row_alignment,
    row_elements,
    scale_in,
    scale_kind,
    scale_rows,
    spread,
    undecodable_reason,
)
from hf_quant.kernels.gpu.launch import HAS_TRITON, launch, target_of, tl, triton, unavailable_reason
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.op import dequantize, dequantized


_BLOCK_ROWS, _BLOCK_COLUMNS, _NUM_WARPS = 2, 2048, 4  # 32 weights a thread: 16 bytes of int4, four 16-byte stores


@triton.jit
def _dequantize_kernel(
    qdata,
    scale,
    zero_point,
    global_scale,
    levels,
    y,
    rows,
    N,
    K,
    q_stride,
    scale_stride,
    scale_matrix,
    GROUP_RUNTIME,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_GLOBAL: tl.constexpr,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANE0: tl.constexpr,
    PLANE1: tl.constexpr,
    CODES: tl.constexpr,
    MANTISSA: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
):
    """Program (rows, columns) of all matrices one below the other; two matrices are `scale_matrix` scales apart."""
    ELEMENTS: tl.constexpr = BLOCK_C // CODES
    FLOAT_ZERO: tl.constexpr = HAS_ZERO and zero_point.dtype.element_ty.is_floating()
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    row = tl.minimum(r, rows - 1)
    first, second = load_planes(
        qdata, row.to(tl.int64) * q_stride, element, tl.cdiv(K, CODES), PLANE0, PLANE1, CODES, True
    )
    matrix = row // N
    n = row % N
    at = matrix * scale_matrix
    if SCALE_ROWS > 0:
        at += n // SCALE_ROWS * scale_stride
    k = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < rows)[:, None] & (k < K)[None, :]
    if GROUP > 0:  # one load for each group of the block (of a row: for each row)
        GROUPS: tl.constexpr = BLOCK_C // GROUP if BLOCK_C > GROUP else 1
        group = tl.program_id(1) * BLOCK_C // GROUP + tl.arange(0, GROUPS)
        at = at[:, None] + group[None, :]
        in_range = (r < rows)[:, None] & (group * GROUP < K)[None, :]
    else:
        at = at[:, None] + (k // GROUP_RUNTIME)[None, :]
        in_range = mask
    factor = scale_in(tl.load(scale + at, mask=in_range, other=0), SCALE, tl.float32)
    if HAS_GLOBAL:
        factor *= tl.load(global_scale + matrix)[:, None]
    values = decode_in_order(first, second, levels, DOT, KIND, BITS, PLANE0, PLANE1, CODES, MANTISSA, MULTIPLIER, PTX)
    values = values.to(tl.float32)
    if HAS_ZERO:
        zero = tl.load(zero_point + at, mask=in_range, other=0).to(tl.float32)
        if not FLOAT_ZERO:
            zero += 128.0
        if GROUP > 0:
            zero = spread(zero, BLOCK_R, GROUPS, BLOCK_C)
    if KIND == "integer" and BITS < 8:
        if FLOAT_ZERO:
            values -= 128.0
        elif HAS_ZERO:
            values -= zero
        else:
            values -= 128.0 + 2 ** (BITS - 1)
    if GROUP > 0:
        factor = spread(factor, BLOCK_R, GROUPS, BLOCK_C)
    values *= factor
    if FLOAT_ZERO:
        values += zero
    tl.store(y + r.to(tl.int64)[:, None] * K + k[None, :], values.to(y.dtype.element_ty), mask=mask)


PATHS = (Path("Triton", "any M", lambda problem: None if HAS_TRITON else "triton is not installed"),)


@implements(dequantize, "XPU", PATHS)
@implements(dequantize, "CUDA", PATHS)
@takes_weight(K_is_option=True)
def dequantize_gpu(w: Weight, *, dtype: torch.dtype) -> Tensor:
    """Compute `dequantize_reference`, bit for bit."""
    (qdata, scale, zero_point, global_scale), K = w.packed, w.K
    *lead, N, width = qdata.shape
    is_served = unavailable_reason(qdata.device) is None and undecodable_reason(w.spec) is None
    if not is_served or prod(lead) * N * K == 0 or dtype == torch.float64:
        return dequantized(w, dtype)
    spec, rows = w.spec, prod(lead) * N
    qdata = qdata.reshape(-1, width)
    qdata = qdata if qdata.stride(1) == 1 else qdata.contiguous()
    scale = scale.contiguous()
    codes = codes_per_element(spec, K, row_alignment(qdata))
    is_table = not spec.is_integer and spec.minifloat is None
    dot = torch.float32 if is_table else torch.bfloat16
    y = torch.empty(*lead, N, K, dtype=dtype, device=qdata.device)
    launch(
        _dequantize_kernel,
        (triton.cdiv(rows, _BLOCK_ROWS), triton.cdiv(K, _BLOCK_COLUMNS)),
        bits_of(qdata),
        bits_of(scale),
        None if zero_point is None else zero_point.contiguous(),
        None if global_scale is None else global_scale.contiguous(),
        levels_tensor(w.format, dot, qdata.device),
        y,
        rows,
        N,
        K,
        row_elements(qdata, codes),
        scale.shape[-1],
        scale.shape[-2] * scale.shape[-1],
        w.group_size,
        GROUP=group_in_block(w.group_size, K, _BLOCK_COLUMNS),
        BLOCK_R=_BLOCK_ROWS,
        BLOCK_C=_BLOCK_COLUMNS,
        SCALE=scale_kind(scale.dtype),
        SCALE_ROWS=scale_rows(tuple(scale.shape), N),
        HAS_ZERO=zero_point is not None,
        HAS_GLOBAL=global_scale is not None,
        DOT=tl.float32 if is_table else tl.bfloat16,
        **decode_options(w.format, torch.bfloat16, codes, use_ptx=target_of(qdata.device).is_nvidia and not is_table),
        num_warps=_NUM_WARPS,
        **({"enable_fp_fusion": False} if w.has_float_zeros else {}),  # the reference rounds product and sum
    )
    return y
