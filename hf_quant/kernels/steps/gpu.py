"""Norms, activation functions and rotary embeddings in Triton, one launch each.

Decoding is bound by the number of launches, so each op is one: `_rms_norm_kernel` takes whole rows in registers (rows
of more than 16384 values are read again, from the L2 cache), also of a sum that it writes; `_gate_kernel` is
elementwise; a program of `_rotary_kernel` takes some heads of one token, of queries or of keys, with their norm.

On an H200, one token of a Llama-3.1-8B: 1.7 us a norm, 1.2 a gate, 1.2 a rotary embedding. By the compiler's output
for sm90: 16 to 95 registers, no spills, loads and stores of 16 bytes.
"""

import torch
from torch import Tensor

from hf_quant.kernels.dispatch import Path, implements
from hf_quant.kernels.gpu.launch import Target, cached_plan, launch, target_of, triton
from hf_quant.kernels.rowwise.gpu import config, dense_rows, serves, supports
from hf_quant.kernels.steps import op
from hf_quant.kernels.steps.gpu_kernels import _gate_kernel, _rms_norm_kernel, _rotary_kernel


_LANE = 8  # values: 16 bytes of a 16-bit dtype
PATHS = (Path("one launch", "any M", supports),)


@cached_plan
def _norm_options(
    ROWS: int, BLOCK_K: int, BLOCKS: int | None, num_warps: int, EVEN_K: bool, PLUS_ONE: bool, ROUNDS: bool
) -> dict[str, object]:
    """The options of a launch, the same object for all sizes that have them: launches know it by its identity."""
    return dict(locals())


@cached_plan
def _norm_plan(target: Target, M: int, K: int, plus_one: bool, rounds: bool) -> tuple[int, dict[str, object]]:
    """(blocks, options) of a launch: those of row quantization, but no lane has less than 8 values of a row.

    Of a long row none has more than 32: beside 64, and what is to be written, Triton 3.6 spills registers (sm120).
    """
    ROWS, BLOCK_K, BLOCKS, num_warps = config(target, M, K)
    lanes = 64 if target.name.startswith("gfx") else 32
    if BLOCKS is not None and K > 8192:
        num_warps = max(num_warps, triton.next_power_of_2(K) // (32 * lanes))
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
    rows, y = dense_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, K = rows.shape
    more = None if more is None else dense_rows(more)
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
    if not serves(x, weight):
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
    if not serves(x, weight):
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
    if not serves(x, up):
        return op.gate_reference(x, up, act=act)
    rows, y = dense_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    up = None if up is None else dense_rows(up)
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
    if not serves(q, cos, sin, q_weight, k_weight) or k.numel() == 0:
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
