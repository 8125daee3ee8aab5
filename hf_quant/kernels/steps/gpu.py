"""Norms, activation functions and rotary embeddings in Triton, one launch each.

Decoding is bound by the number of launches, so each op is one: `_rms_norm_kernel` takes whole rows in registers (rows
of more than 16384 values are read again, from the L2 cache), also of a sum that it writes; `_gate_kernel` is
elementwise; a program of `_rotary_kernel` takes some heads of one token, of queries or of keys, with their norm.

Not timed on a GPU. By the compiler's output for sm90: 16 to 95 registers, no spills, loads and stores of 16 bytes.
"""

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.launch import Target, cached_plan, launch, target_of, tl, triton, unavailable_reason
from hf_quant.kernels.gpu.rows import activated, load, row_mask
from hf_quant.kernels.rowwise.gpu import config
from hf_quant.kernels.steps import op


_LANE = 8  # values: 16 bytes of a 16-bit dtype
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _rounded(v, y):
    """fp32 values rounded to the dtype of y's elements."""
    return v.to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _scaled(v, rstd, weight, rows, columns, mask, y, PLUS_ONE: tl.constexpr, ROUNDS: tl.constexpr):
    """v * rstd * weight in fp32; the weights of one row are those of the next: they stay in the L1 cache."""
    v *= rstd
    if ROUNDS:
        v = _rounded(v, y)
    if weight is not None:
        w = load(weight, rows, columns, mask, "evict_last")
        v *= w + 1.0 if PLUS_ONE else w
    return v


@triton.jit
def _sum(x, more, x_rows, more_rows, columns, mask, POLICY: tl.constexpr):
    """x, or x + more as rounded to their dtype, in fp32."""
    v = load(x, x_rows, columns, mask, POLICY)
    if more is not None:
        v = _rounded(v + load(more, more_rows, columns, mask, POLICY), x)
    return v


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x,
    more,
    weight,
    total,
    y,
    M,
    K,
    x_stride,
    more_stride,
    eps,
    PLUS_ONE: tl.constexpr,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_m = (row < M)[:, None]
    row = row.to(tl.int64)[:, None]
    x_rows, more_rows, y_rows = row * x_stride, row * more_stride, row * K
    column = tl.arange(0, BLOCK_K)[None, :]
    # All weights of a row, whatever rows of the block are beyond M.
    any_row = tl.full([1, 1], True, tl.int1)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    if BLOCKS is not None:  # the row stays in registers
        values = ()
        for i in tl.static_range(BLOCKS):
            columns = column + i * BLOCK_K
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _sum(x, more, x_rows, more_rows, columns, mask, "evict_first")
            squares += v * v
            values = values + (v,)
        rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / K + eps)
        for i in tl.static_range(BLOCKS):
            columns = column + i * BLOCK_K
            if more is not None:
                mask = row_mask(in_m, columns, K, EVEN_K)
                tl.store(total + (y_rows + columns), values[i].to(total.dtype.element_ty), mask=mask)
            mask = row_mask(any_row, columns, K, EVEN_K)
            v = _scaled(values[i], rstd, weight, 0, columns, mask, y, PLUS_ONE, ROUNDS)
            tl.store(y + (y_rows + columns), v.to(y.dtype.element_ty), mask=row_mask(in_m, columns, K, EVEN_K))
    else:
        for start in range(0, K, BLOCK_K):
            columns = column + start
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _sum(x, more, x_rows, more_rows, columns, mask, "evict_last")
            if more is not None:
                tl.store(total + (y_rows + columns), v.to(total.dtype.element_ty), mask=mask)
            squares += v * v
        rstd = tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / K + eps)
        for start in range(0, K, BLOCK_K):
            columns = column + start
            mask = row_mask(in_m, columns, K, EVEN_K)
            v = _sum(x, more, x_rows, more_rows, columns, mask, "evict_first")
            v = _scaled(v, rstd, weight, 0, columns, row_mask(any_row, columns, K, EVEN_K), y, PLUS_ONE, ROUNDS)
            tl.store(y + (y_rows + columns), v.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks"])
def _gate_kernel(x, up, y, K, blocks, x_stride, up_stride, ACT: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < K
    v = load(x, row * x_stride, column, mask, "evict_first")
    v = activated(v, ACT, PTX)
    if up is not None:
        v = _rounded(v, y) * load(up, row * up_stride, column, mask, "evict_first")
    tl.store(y + (row * K + column), v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _pair(x, rows, in_rows, half, C: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr):
    """Both channels [R, C] of each pair in fp32; `rows`: offsets [R, 1], `in_rows`: which of them there are."""
    if HALVES:
        column = tl.arange(0, C)[None, :]
        mask = row_mask(in_rows, column, half, EVEN)
        return load(x, rows, column, mask, "evict_last"), load(x, rows, column + half, mask, "evict_last")
    else:
        column = tl.arange(0, 2 * C)[None, :]
        v = load(x, rows, column, row_mask(in_rows, column, 2 * half, EVEN), "evict_last")
        return tl.split(tl.reshape(v, (v.shape[0], C, 2)))


@triton.jit
def _store_pair(y, rows, in_rows, a, b, half, C: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        column = tl.arange(0, C)[None, :]
        mask = row_mask(in_rows, column, half, EVEN)
        tl.store(y + (rows + column), a.to(y.dtype.element_ty), mask=mask)
        tl.store(y + (rows + column + half), b.to(y.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, 2 * C)[None, :]
        v = tl.reshape(tl.join(a, b), (a.shape[0], 2 * C))
        tl.store(y + (rows + column), v.to(y.dtype.element_ty), mask=row_mask(in_rows, column, 2 * half, EVEN))


@triton.jit
def _turned(own, other, cos, sin, y, SIGN: tl.constexpr, ROUNDS: tl.constexpr):
    """own * cos + SIGN * other * sin."""
    own, other = own * cos, other * sin
    if ROUNDS:
        own, other = _rounded(own, y), _rounded(other, y)
    return own + SIGN * other


@triton.jit
def _turn_heads(
    x,
    weight,
    cos,
    sin,
    y,
    token,
    angle,
    block,
    heads,
    x_token,
    x_head,
    half,
    D,
    eps,
    HALVES: tl.constexpr,
    BY_PAIR: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NORM_ROUNDS: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Norm and turn HEADS heads of one token: C pairs, and REST channels behind them."""
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    inside, any_row = head < heads, tl.full([1, 1], True, tl.int1)
    x_rows, y_rows = token * x_token + head.to(tl.int64) * x_head, (token * heads + head) * D
    # Vectors are read once for each head, from the L1 cache: read once for all they would pass through shared memory.
    same = tl.zeros([HEADS, 1], tl.int64)
    squares = tl.zeros([HEADS, 1], tl.float32)
    if C > 0:
        a, b = _pair(x, x_rows, inside, half, C, EVEN, HALVES)
        squares += tl.sum(a * a + b * b, 1, keep_dims=True)
    column = 2 * half + tl.arange(0, REST if REST > 0 else 1)[None, :]
    if REST > 0:
        rest = load(x, x_rows, column, inside & (column < D), "evict_first")
        squares += tl.sum(rest * rest, 1, keep_dims=True)
    if NORMS:
        rstd = tl.rsqrt(squares / D + eps)
        if C > 0:
            a, b = a * rstd, b * rstd
            if NORM_ROUNDS:
                a, b = _rounded(a, y), _rounded(b, y)
            if weight is not None:
                u, v = _pair(weight, same, any_row, half, C, EVEN, HALVES)
                a, b = a * (u + 1.0 if PLUS_ONE else u), b * (v + 1.0 if PLUS_ONE else v)
            a, b = _rounded(a, y), _rounded(b, y)
        if REST > 0:
            rest = _scaled(rest, rstd, weight, same, column, column < D, y, PLUS_ONE, NORM_ROUNDS)
    if C > 0:
        at = same + angle
        if BY_PAIR:
            pair = tl.arange(0, C)[None, :]
            mask = row_mask(any_row, pair, half, EVEN)
            cos_a, sin_a = load(cos, at, pair, mask, "evict_last"), load(sin, at, pair, mask, "evict_last")
            cos_b, sin_b = cos_a, sin_a
        else:
            cos_a, cos_b = _pair(cos, at, any_row, half, C, EVEN, HALVES)
            sin_a, sin_b = _pair(sin, at, any_row, half, C, EVEN, HALVES)
        first, second = _turned(a, b, cos_a, sin_a, y, -1, ROUNDS), _turned(b, a, cos_b, sin_b, y, 1, ROUNDS)
        _store_pair(y, y_rows, inside, first, second, half, C, EVEN, HALVES)
    if REST > 0:
        tl.store(y + (y_rows + column), rest.to(y.dtype.element_ty), mask=inside & (column < D))


@triton.jit(do_not_specialize=["angle_rows"])
def _rotary_kernel(
    q,
    k,
    cos,
    sin,
    q_weight,
    k_weight,
    q_out,
    k_out,
    angle_rows,
    q_heads,
    k_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    half,
    D,
    eps,
    HALVES: tl.constexpr,
    BY_PAIR: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    NORM_ROUNDS: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
):
    q_blocks = tl.cdiv(q_heads, HEADS)
    blocks = q_blocks + tl.cdiv(k_heads, HEADS)
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    angle = (token % angle_rows).to(tl.int64) * (2 * half)
    token = token.to(tl.int64)
    if block < q_blocks:
        _turn_heads(
            *(q, q_weight, cos, sin, q_out, token, angle, block, q_heads, q_token, q_head, half, D, eps),
            *(HALVES, BY_PAIR, ROUNDS, NORMS, PLUS_ONE, NORM_ROUNDS, HEADS, C, REST, EVEN),
        )
    else:
        _turn_heads(
            *(k, k_weight, cos, sin, k_out, token, angle, block - q_blocks, k_heads, k_token, k_head, half, D, eps),
            *(HALVES, BY_PAIR, ROUNDS, NORMS, PLUS_ONE, NORM_ROUNDS, HEADS, C, REST, EVEN),
        )


def _supports(problem: Problem) -> str | None:
    reason = unavailable_reason("cuda")
    if reason is None and problem.dtype not in _FLOATING:
        reason = f"no kernel for {problem.dtype}"
    return reason


PATHS = (Path("one launch", "any M", _supports),)


def _serves(x: Tensor, *others: Tensor | None) -> bool:
    """True if the kernels compute these; otherwise the reference does, in torch ops on the same device."""
    if unavailable_reason(x.device) is not None or x.numel() == 0 or x.dtype not in _FLOATING:
        return False
    return all([part is None or part.dtype in _FLOATING for part in others])


def _rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K] whose last dimension is dense; a copy only if there is no such view."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


@cached_plan
def _norm_options(
    ROWS: int, BLOCK_K: int, BLOCKS: int | None, num_warps: int, EVEN_K: bool, PLUS_ONE: bool, ROUNDS: bool
) -> dict[str, object]:
    """The options of a launch, the same object for all sizes that have them: launches know it by its identity."""
    return dict(locals())


@cached_plan
def _norm_plan(target: Target, M: int, K: int, plus_one: bool, rounds: bool) -> tuple[int, dict[str, object]]:
    """(blocks, options) of a launch: those of row quantization, but no lane has less than 8 values of a row."""
    ROWS, BLOCK_K, BLOCKS, num_warps = config(target, M, K)
    lanes = 64 if target.name.startswith("gfx") else 32
    if ROWS == 1 and BLOCK_K < num_warps * lanes * _LANE <= K:
        BLOCK_K = num_warps * lanes * _LANE
        BLOCKS = None if BLOCKS is None else -(-K // BLOCK_K)
    return -(-M // ROWS), _norm_options(ROWS, BLOCK_K, BLOCKS, num_warps, K % BLOCK_K == 0, plus_one, rounds)


def _norm(
    x: Tensor,
    more: Tensor | None,
    weight: Tensor | None,
    total: Tensor | None,
    eps: float,
    plus_one: bool,
    rounds: bool,
) -> Tensor:
    """Run the kernel on x [..., K] with at least one element."""
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, K = rows.shape
    more = None if more is None else _rows(more)
    blocks, options = _norm_plan(target_of(x.device), M, K, plus_one, rounds)
    launch(
        _rms_norm_kernel,
        (blocks,),
        rows,
        more,
        weight if weight is None or weight.is_contiguous() else weight.contiguous(),
        total,
        y,
        M,
        K,
        rows.stride(0),
        0 if more is None else more.stride(0),
        eps,
        shared=options,
    )
    return y


@implements(op.rms_norm, "XPU", PATHS)
@implements(op.rms_norm, "CUDA", PATHS)
def rms_norm_gpu(x: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool, rounds: bool) -> Tensor:
    """Compute `rms_norm_reference`; sums in another order."""
    op.check_weight("weight", weight, x.shape[-1])
    if not _serves(x, weight):
        return op.rms_norm_reference(x, weight, eps=eps, plus_one=plus_one, rounds=rounds)
    return _norm(x, None, weight, None, eps, plus_one, rounds)


@implements(op.add_rms_norm, "XPU", PATHS)
@implements(op.add_rms_norm, "CUDA", PATHS)
def add_rms_norm_gpu(
    x: Tensor, more: Tensor, weight: Tensor | None, *, eps: float, plus_one: bool, rounds: bool
) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm_reference`; the sum bit for bit."""
    op.check_sum(x, more)
    op.check_weight("weight", weight, x.shape[-1])
    if not _serves(x, weight):
        return op.add_rms_norm_reference(x, more, weight, eps=eps, plus_one=plus_one, rounds=rounds)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, _norm(x, more, weight, total, eps, plus_one, rounds)


@cached_plan
def _gate_options(target: Target, K: int, act: str) -> dict[str, object]:
    """The options of a launch: a block of a row, with 8 values for each lane if there are as many."""
    lanes = 64 if target.name.startswith("gfx") else 32
    BLOCK = min(max(triton.next_power_of_2(K), lanes * _LANE), 1024)
    return {"ACT": act, "PTX": target.is_nvidia, "BLOCK": BLOCK, "num_warps": BLOCK // (lanes * _LANE)}


@implements(op.gate, "XPU", PATHS)
@implements(op.gate, "CUDA", PATHS)
def gate_gpu(x: Tensor, up: Tensor | None, *, act: str) -> Tensor:
    """Compute `gate_reference`; the activation to about 1e-6."""
    op.check_gate(x, up, act)
    if not _serves(x, up):
        return op.gate_reference(x, up, act=act)
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    up = None if up is None else _rows(up)
    M, K = rows.shape
    options = _gate_options(target_of(x.device), K, act)
    blocks = -(-K // options["BLOCK"])
    up_stride = 0 if up is None else up.stride(0)
    launch(_gate_kernel, (M * blocks,), rows, up, y, K, blocks, rows.stride(0), up_stride, shared=options)
    return y


@cached_plan
def _rotary_options(
    target: Target, D: int, turned: int, pairs: str, rounds: bool, norms: bool, plus_one: bool, norm_rounds: bool
) -> dict[str, object]:
    """The options of a launch: one warp for as many heads as give each lane 8 values of a half, or of the rest."""
    lanes = 64 if target.name.startswith("gfx") else 32
    half, rest = turned // 2, D - turned
    C, REST = (triton.next_power_of_2(width) if width else 0 for width in (half, rest))
    narrow, wide = min(C or REST, REST or C), max(C, REST)
    HEADS = max(min(lanes * _LANE // narrow, 2 * lanes * _LANE // wide), 1)
    return {
        "HALVES": pairs == "halves",
        "BY_PAIR": pairs == "neighbors_by_pair",
        "ROUNDS": rounds,
        "NORMS": norms,
        "PLUS_ONE": plus_one,
        "NORM_ROUNDS": norm_rounds,
        "HEADS": HEADS,
        "C": C,
        "REST": REST,
        "EVEN": C == half,
        "num_warps": min(max(HEADS * narrow // (lanes * _LANE), 1), 8),
    }


def _heads(x: Tensor) -> Tensor:
    """x [B, S, H, D] -> [M, H, D] whose last dimension is dense; a copy only if there is no such view."""
    x = x.reshape(-1, x.shape[2], x.shape[3])
    return x if x.stride(2) == 1 else x.contiguous()


@implements(op.rotary, "XPU", PATHS)
@implements(op.rotary, "CUDA", PATHS)
def rotary_gpu(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *,
    pairs: str,
    rounds: bool,
    eps: float | None,
    plus_one: bool,
    norm_rounds: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `rotary_reference`; the sums of norms in another order."""
    op.check_rotary(q, k, cos, sin, q_weight, k_weight, pairs)
    if not _serves(q, cos, sin, q_weight, k_weight) or k.numel() == 0:
        norm = {"eps": eps, "plus_one": plus_one, "norm_rounds": norm_rounds}
        return op.rotary_reference(q, k, cos, sin, q_weight, k_weight, pairs=pairs, rounds=rounds, **norm)
    q_rows, k_rows = _heads(q), _heads(k)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    M, H, D = q_rows.shape
    turned = 0 if cos is None else cos.shape[2]
    options = _rotary_options(target_of(q.device), D, turned, pairs, rounds, eps is not None, plus_one, norm_rounds)
    HEADS, vectors = options["HEADS"], (cos, sin, q_weight, k_weight)
    launch(
        _rotary_kernel,
        (M * (-(-H // HEADS) - (-k_rows.shape[1] // HEADS)),),
        q_rows,
        k_rows,
        *[part if part is None or part.is_contiguous() else part.contiguous() for part in vectors],
        q_out,
        k_out,
        1 if cos is None else cos.shape[0] * cos.shape[1],
        H,
        k_rows.shape[1],
        q_rows.stride(0),
        q_rows.stride(1),
        k_rows.stride(0),
        k_rows.stride(1),
        turned // 2,
        D,
        0.0 if eps is None else eps,
        shared=options,
    )
    return q_out, k_out
