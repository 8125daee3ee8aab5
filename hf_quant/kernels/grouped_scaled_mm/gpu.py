"""Products of codes of rows with codes of experts on a GPU: one launch for all, and nothing is read on the host.

`grouped_scaled_mm` has the grid of `grouped_mm`: as many tiles of rows as any distribution over the experts can need.
`grouped_scaled_sums` has one program for each tile of each expert's gradient; it sums over that expert's rows, whose
blocks begin at multiples of 16 bytes and end with zeros, so that whole vectors are loaded.

Bound by the matrix unit from some 400 rows an expert on, by the bytes of the weight's codes below: half of those in 16
bit. Modelled, not measured; so are the tiles. On Hopper, from 65 rows an expert on, there is the Gluon kernel of
`gpu.hopper` whose blocks stay on their multiprocessors: measured for plain weights, not for experts, and off until it
is (`hopper.plan.UNTRIED`). Sums of fp8 codes are added up in fp32 (there in fp16) every 4096, see `scaled_mm`.
Where Triton has no matrix units (sm75), the vendor's GEMM multiplies expert by expert, and the host reads their rows.
"""

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.gpu.decode import scale_rows
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import Target, launch, target_of, tl, triton, unavailable_reason
from hf_quant.kernels.gpu.rows import rows_of_tile
from hf_quant.kernels.grouped_mm.op import rows_of_experts
from hf_quant.kernels.grouped_scaled_mm import op
from hf_quant.kernels.scaled_mm.gpu import chains, has_units, scaled_product
from hf_quant.kernels.scaled_mm.gpu_kernels import scaled
from hf_quant.kernels.two_way.gpu import block_of_group
from hf_quant.kernels.two_way.op import blocks_of


_CHAIN = 4096  # codes of fp8 that the matrix unit sums up before fp32 does
FEW = 64  # rows of an expert, up to which tiles of 128 rows are half empty


@triton.jit
def _chain(
    a,
    b,
    first,
    end,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACC: tl.constexpr,
):
    """Sums of a [BLOCK_M, K] * b [BLOCK_N, K], given as pointers to their first BLOCK_K columns, over steps of K."""
    a += first * BLOCK_K
    b += first * BLOCK_K
    k = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for step in range(first, end):
        if EVEN_K:
            left, right = tl.load(a), tl.load(b)
        else:
            mask = k < K - step * BLOCK_K
            left, right = tl.load(a, mask=mask, other=0.0), tl.load(b, mask=mask, other=0.0)
        total = tl.dot(left, right.T, total, out_dtype=ACC)
        a += BLOCK_K
        b += BLOCK_K
    return total


@triton.jit
def _sums(
    a,
    b,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """`_chain` over all of K; CHAIN other than 0: sums over that many steps are added up in fp32."""
    ACC: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    steps = tl.cdiv(K, BLOCK_K)
    if CHAIN == 0:
        total = _chain(a, b, 0, steps, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, ACC)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        for first in tl.range(0, steps, CHAIN, num_stages=1):
            end = tl.minimum(first + CHAIN, steps)
            total += _chain(a, b, first, end, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, ACC)
    return total


@triton.jit(do_not_specialize=["M", "tiles_m"])
def _grouped_scaled_mm_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    offsets,
    y,
    M,
    N,
    K,
    tiles_m,
    a_stride,
    b_stride,
    b_matrix,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    EVEN_K: tl.constexpr,
    CHAIN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program tile_n * tiles_m + tile_m: tiles of rows, and so the tiles of one expert, are neighbours."""
    program = tl.program_id(0)
    expert, first_row, end_row = rows_of_tile(offsets, program % tiles_m, M, BLOCK_M, EXPERTS, EXPERTS_PADDED)
    n = program // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first_row + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    out = y + m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < end_row)[:, None] & (n < N)[None, :]
    if expert == EXPERTS:
        tl.store(out, tl.zeros((BLOCK_M, BLOCK_N), y.dtype.element_ty), mask=mask)
    else:
        left = a + tl.minimum(m, M - 1).to(tl.int64)[:, None] * a_stride + k[None, :]
        right = b + expert.to(tl.int64) * b_matrix + tl.minimum(n, N - 1).to(tl.int64)[:, None] * b_stride + k[None, :]
        total = _sums(left, right, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, CHAIN)
        if HAS_BIAS:
            bias += expert * N
        row_scale = tl.load(a_scale + m, mask=m < end_row, other=0.0)
        b_scale += expert * (1 if SCALE_ROWS == 0 else tl.cdiv(N, SCALE_ROWS))
        value = scaled(total, row_scale, b_scale, bias, n, N, SCALE_ROWS, HAS_BIAS)
        tl.store(out, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_scaled_sums_kernel(
    a,
    b,
    a_scale,
    b_scale,
    offsets,
    y,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Program (tile of K, tile of N, expert): y[expert] = block of a [N, rows] @ block of b [K, rows].T, scaled."""
    expert = tl.program_id(2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    _, size, before = block_of_group(offsets, expert, EXPERTS, EXPERTS_PADDED)
    left = a + before * N + tl.minimum(n, N - 1).to(tl.int64)[:, None] * size + m[None, :]
    right = b + before * K + tl.minimum(k, K - 1).to(tl.int64)[:, None] * size + m[None, :]
    total = _sums(left, right, size, BLOCK_N, BLOCK_K, BLOCK_M, False, CHAIN)
    row_scale = tl.load(a_scale + expert * N + n, mask=n < N, other=0.0)
    value = scaled(total, row_scale, b_scale + expert * K, None, k, K, 1, False)
    out = y + (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(out, value.to(y.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _operands(a: Tensor, b: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Codes as the matrix units take them: where they take no such codes in fp16, which holds all of them exactly."""
    if not has_units(a.dtype != torch.int8, target):
        a, b = a.to(torch.float16), b.to(torch.float16)
    return (a if a.stride(-1) == 1 else a.contiguous()), (b if b.stride(-1) == 1 else b.contiguous())


def _tiles(rows: int, itemsize: int, target: Target) -> dict[str, int]:
    """One side of a tile, for that many rows of it, the step of the sum, warps and stages; the other side is 128."""
    block, is_large = 64 if rows <= 64 else 128, target.shared_memory >= 2**17
    stages = (4 if is_large else 3) if target.is_nvidia else 2
    step = (128 if is_large else 64) // itemsize
    return {"block": block, "step": step, "num_warps": 8 if block == 128 else 4, "num_stages": stages}


def _hopper_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    y: Tensor,
) -> Tensor | None:
    """`grouped_product` by the kernel for Hopper, None where it does not serve; operands are contiguous."""
    (M, K), (E, N, _) = a.shape, b.shape
    used = min(E, M)
    is_aligned = (a.data_ptr() | b.data_ptr() | K | N * y.element_size()) % 16 == 0
    if M // used <= FEW or not is_aligned or a.dtype != b.dtype or y.element_size() != 2 or not hopper.has_kernels():
        return None
    steps, unit = triton.cdiv(K, 128), 0.0
    if a.dtype != torch.int8 and K > _CHAIN:
        steps, unit = chains(K, steps, 448.0**2)
    options = {
        "BLOCK_M": 128,
        "BLOCK_N": 256,
        "BLOCK_K": 128,
        "EXPERTS": E,
        "PADDED": triton.next_power_of_2(E),
        "UNIT": unit,
        "SCALE_ROWS": scale_rows(tuple(b_scale.shape), N),
        "STAGES": 4,
        "WARPS": 8,
        "num_warps": 8,
        "maxnreg": 168,
    }
    return hopper.product_of_codes(
        a, b.flatten(0, 1), a_scale, b_scale, bias, offsets, y, M // 128 + used + 1, steps, options
    )


def grouped_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """`grouped_scaled_mm_reference` for at least one product, on any GPU.

    b_scale [E, N | 1 | ceil(N / 128), 1] in fp32, bf16 or fp16.
    """
    (M, K), (E, N, _) = a.shape, b.shape
    is_fp8, target = a.dtype != torch.int8, target_of(a.device)
    if not target.has_dot:
        y = a.new_zeros((M, N), dtype=out_dtype)
        for e, rows in rows_of_experts(offsets):
            own_bias = None if bias is None else bias[e]
            y[rows] = scaled_product(a[rows], b[e], a_scale[rows], b_scale[e], own_bias, out_dtype)
        return y
    y = torch.empty(M, N, dtype=out_dtype, device=a.device)
    a_scale, b_scale, offsets = a_scale.contiguous(), b_scale.contiguous(), offsets.contiguous()
    bias = None if bias is None else bias.contiguous()
    if hopper.UNTRIED and target.name == "sm90" and a.is_contiguous() and b.is_contiguous():
        found = _hopper_product(a, b, a_scale, b_scale, bias, offsets, y)
        if found is not None:
            return found
    a, b = _operands(a, b, target)
    tiles = _tiles(triton.cdiv(M, min(E, M)), a.element_size(), target)
    block_m, block_k = tiles.pop("block"), tiles.pop("step")
    tiles_m = M // block_m + min(E, M) + 1
    launch(
        _grouped_scaled_mm_kernel,
        (tiles_m * triton.cdiv(N, 128),),
        *(a, b, a_scale, b_scale, bias, offsets, y, M, N, K, tiles_m, a.stride(0), b.stride(1), b.stride(0)),
        BLOCK_M=block_m,
        BLOCK_N=128,
        BLOCK_K=block_k,
        EXPERTS=E,
        EXPERTS_PADDED=triton.next_power_of_2(E),
        EVEN_K=K % block_k == 0,
        CHAIN=_CHAIN // block_k if is_fp8 and K > _CHAIN else 0,
        SCALE_ROWS=scale_rows(tuple(b_scale.shape), N),
        HAS_BIAS=bias is not None,
        **tiles,
    )
    return y


@implements(op.grouped_scaled_mm, "XPU")
@implements(op.grouped_scaled_mm, "CUDA")
def grouped_scaled_mm_gpu(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute `grouped_scaled_mm_reference`."""
    op.check(a, b, a_scale, b_scale, bias, offsets)
    if a.numel() * b.numel() == 0 or unavailable_reason(a.device) is not None:
        return op.grouped_scaled_mm_reference(a, b, a_scale, b_scale, bias, offsets, out_dtype=out_dtype)
    return grouped_product(a, b, a_scale, b_scale, bias, offsets, out_dtype)


@implements(op.grouped_scaled_sums, "XPU")
@implements(op.grouped_scaled_sums, "CUDA")
def grouped_scaled_sums_gpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offsets: Tensor, *, M: int, out_dtype: torch.dtype
) -> Tensor:
    """Compute `grouped_scaled_sums_reference`."""
    op.check_sums(a, b, a_scale, b_scale, offsets, M=M)
    E, N, K = len(offsets), a_scale.shape[1], b_scale.shape[1]
    if M * N * K == 0 or unavailable_reason(a.device) is not None:
        return op.grouped_scaled_sums_reference(a, b, a_scale, b_scale, offsets, M=M, out_dtype=out_dtype)
    is_fp8, target = a.dtype != torch.int8, target_of(a.device)
    if not target.has_dot:
        y = a.new_zeros((E, N, K), dtype=out_dtype)
        for (e, _, left), (_, _, right) in zip(blocks_of(a, N, offsets), blocks_of(b, K, offsets)):
            y[e] = scaled_product(left, right, a_scale[e], b_scale[e], None, out_dtype)
        return y
    a, b = _operands(a, b, target)
    tiles = _tiles(N, a.element_size(), target)
    block_n, step = tiles.pop("block"), tiles.pop("step")
    y = torch.empty(E, N, K, dtype=out_dtype, device=a.device)
    launch(
        _grouped_scaled_sums_kernel,
        (triton.cdiv(K, 128), triton.cdiv(N, block_n), E),
        *(a, b, a_scale.contiguous(), b_scale.contiguous(), offsets.contiguous(), y, N, K),
        BLOCK_N=block_n,
        BLOCK_K=128,
        BLOCK_M=step,
        EXPERTS=E,
        EXPERTS_PADDED=triton.next_power_of_2(E),
        CHAIN=_CHAIN // step if is_fp8 and M > _CHAIN else 0,
        **tiles,
    )
    return y
