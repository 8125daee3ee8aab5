"""The gradient of expert products with respect to their input, on a GPU: one launch for all experts.

Each block decodes a tile [BLOCK_N, BLOCK_K] of its expert's weight per step of N and multiplies it from the right.
Here the codes' own order matters, as K is the output's: the places of an element are interleaved in registers.
Compute bound in training; modelled at .5 of the matrix unit's peak, as the decoded tile passes through shared memory.
Not measured.
"""

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.gpu.decode import (
    bits_of,
    codes_per_element,
    decode_in_order,
    decode_options,
    decoded_once,
    group_in_block,
    levels_tensor,
    load_planes,
    offset_in,
    row_alignment,
    row_elements,
    scale_in,
    scale_kind,
    scale_rows,
    spread,
    undecodable_reason,
)
from hf_quant.kernels.gpu.launch import Target, launch, target_of, tl, triton, unavailable_reason
from hf_quant.kernels.gpu.rows import rows_of_tile
from hf_quant.kernels.grouped_mm.gpu import FUSED, LOOP
from hf_quant.kernels.grouped_mm.op import grouped_mm_backward, rows_of_experts
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.op import weight_only_mm_backward


_BLOCK_N, _BLOCK_K = 64, 128


@triton.jit(do_not_specialize=["M", "tiles_m"])
def _grouped_mm_backward_kernel(
    grad,
    qdata,
    scale,
    zero_point,
    global_scale,
    offsets,
    levels,
    grad_x,
    M,
    N,
    K,
    tiles_m,
    grad_stride,
    q_stride,
    q_matrix,
    scale_stride,
    scale_matrix,
    GROUP_RUNTIME,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
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
    ONCE: tl.constexpr,
):
    """grad_x[m, k] = sum over n of grad[m, n] * weight[n, k]; programs as in `_grouped_mm_kernel`, over K for N."""
    program = tl.program_id(0)
    expert, first_row, end_row = rows_of_tile(offsets, program % tiles_m, M, BLOCK_M, EXPERTS, EXPERTS_PADDED)
    tile_k = program // tiles_m
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    m = first_row + tl.arange(0, BLOCK_M)
    out = grad_x + m.to(tl.int64)[:, None] * K + k[None, :]
    mask = (m < end_row)[:, None] & (k < K)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if expert < EXPERTS:
        element = tile_k * (BLOCK_K // CODES) + tl.arange(0, BLOCK_K // CODES)
        limit = (K + CODES - 1) // CODES
        MAGIC: tl.constexpr = 128 if DOT == tl.bfloat16 else 1024
        FLOAT_ZERO: tl.constexpr = HAS_ZERO and zero_point.dtype.element_ty.is_floating()
        for step in range(0, tl.cdiv(N, BLOCK_N)):
            n = step * BLOCK_N + tl.arange(0, BLOCK_N)
            row = n if EVEN else tl.minimum(n, N - 1)
            rows = expert.to(tl.int64) * q_matrix + row.to(tl.int64) * q_stride
            first, second = load_planes(qdata, rows, element, limit, PLANE0, PLANE1, CODES, not EVEN)
            at = expert * scale_matrix + row * 0
            if SCALE_ROWS > 0:
                at += row // SCALE_ROWS * scale_stride
            if GROUP > 0:
                GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
                group = tile_k * BLOCK_K // GROUP + tl.arange(0, GROUPS)
                at = at[:, None] + group[None, :]
                in_range = (group * GROUP < K)[None, :] & (n < N)[:, None]
            else:
                at = at[:, None] + (k // GROUP_RUNTIME)[None, :]
                in_range = (k < K)[None, :] & (n < N)[:, None]
            raw = tl.load(scale + at, mask=in_range, other=0)
            factor = scale_in(raw, SCALE, DOT)
            if GROUP > 0:
                factor = spread(factor, BLOCK_N, GROUPS, BLOCK_K)
            weight = decode_in_order(
                first, second, levels, DOT, KIND, BITS, PLANE0, PLANE1, CODES, MANTISSA, MULTIPLIER, PTX
            )
            if KIND == "integer" and BITS < 8:
                if HAS_ZERO and not FLOAT_ZERO:
                    zero = (tl.load(zero_point + at, mask=in_range, other=0).to(tl.int16) + MAGIC).to(DOT)
                    if GROUP > 0:
                        zero = spread(zero, BLOCK_N, GROUPS, BLOCK_K)
                    weight = weight - zero
                else:
                    weight = weight - tl.full((1, 1), MAGIC + 2 ** (BITS - 1), DOT)
            pointers = grad + m.to(tl.int64)[:, None] * grad_stride + n[None, :]
            values = tl.load(pointers, mask=(m < end_row)[:, None] & (n < N)[None, :], other=0.0)
            if FLOAT_ZERO:
                zero = tl.load(zero_point + at, mask=in_range, other=0)
                offset = offset_in(zero, scale_in(raw, SCALE, tl.float32), BITS, DOT)
                if GROUP > 0:
                    offset = spread(offset, BLOCK_N, GROUPS, BLOCK_K)
                weight = tl.fma(weight, factor, offset)
            else:
                weight = weight * factor
            if ONCE:
                weight = decoded_once(weight, DOT)
            total = tl.dot(values, weight, total)
        if HAS_GLOBAL:
            total *= tl.load(global_scale + expert)
    tl.store(out, total.to(grad_x.dtype.element_ty), mask=mask)


def _fused_backward(grad: Tensor, w: Weight, offsets: Tensor, target: Target) -> Tensor:
    """`grouped_mm_backward` in one launch; weights contiguous."""
    qdata, scale, zero_point, global_scale = w.packed
    (M, _), (E, N, _), K, dtype = grad.shape, qdata.shape, w.K, grad.dtype
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    codes = codes_per_element(w.spec, K, row_alignment(qdata))
    mean = triton.cdiv(M, min(E, M))
    block_m = 64 if mean <= 64 else 128  # the left side of wgmma has 64 rows
    tiles_m = M // block_m + min(E, M) + 1
    grad_x = torch.empty(M, K, dtype=dtype, device=grad.device)
    stride = row_elements(qdata, codes)
    launch(
        _grouped_mm_backward_kernel,
        (tiles_m * triton.cdiv(K, _BLOCK_K),),
        grad,
        bits_of(qdata),
        bits_of(scale),
        zero_point,
        global_scale,
        offsets.contiguous(),
        levels_tensor(w.format, dtype, grad.device),
        grad_x,
        M,
        N,
        K,
        tiles_m,
        grad.stride(0),
        stride,
        stride * N,
        scale.stride(1),
        scale.stride(0),
        w.group_size,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        EXPERTS=E,
        EXPERTS_PADDED=triton.next_power_of_2(E),
        EVEN=K % _BLOCK_K == 0 and N % _BLOCK_N == 0,
        GROUP=group_in_block(w.group_size, K, _BLOCK_K),
        SCALE=scale_kind(scale.dtype),
        SCALE_ROWS=scale_rows(tuple(scale.shape), N),
        HAS_ZERO=zero_point is not None,
        HAS_GLOBAL=global_scale is not None,
        DOT=tl.bfloat16 if dtype == torch.bfloat16 else tl.float16,
        **decode_options(w.format, dtype, codes, use_ptx=target.is_nvidia),
        ONCE=target.has_warp_dot,
        num_warps=8 if block_m == 128 else 4,
        num_stages=2 if target.shared_memory < 2**17 else 3,
    )
    return grad_x


@implements(grouped_mm_backward, "XPU", FUSED + LOOP)
@implements(grouped_mm_backward, "CUDA", FUSED + LOOP)
@takes_weight(K_is_option=True)
def grouped_mm_backward_gpu(grad: Tensor, w: Weight, offsets: Tensor) -> Tensor:
    """Compute `grouped_mm_backward_reference`; weights are rounded to grad's dtype before the product."""
    if unavailable_reason(grad.device) is None and grad.numel() * w.K > 0 and undecodable_reason(w.spec) is None:
        target = target_of(grad.device)
        if grad.dtype in (torch.float16, torch.bfloat16) and target.has_dot:
            return _fused_backward(grad, w.contiguous(), offsets, target)
    grad_x, options = grad.new_zeros(grad.shape[0], w.K), {"format": w.format, "group_size": w.group_size, "K": w.K}
    for e, rows in rows_of_experts(offsets):
        grad_x[rows] = weight_only_mm_backward(grad[rows], *w.expert(e).packed, **options)
    return grad_x
