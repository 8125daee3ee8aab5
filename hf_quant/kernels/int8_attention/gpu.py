"""8-bit attention on a GPU: statistics of the keys, codes, then one pass over the keys for each block of queries.

Three or four launches:
1. the mean of the keys over the tokens (fp8 values: each channel's largest, too);
2. codes of queries and keys (fp8 values: of the values, too), and the norms that bound the scores;
3. the attention of the heads whose scores are bounded (bf16 values only), without the maximum of online softmax;
4. the attention of all other heads, as online softmax; a block whose head has been served returns at once.

Bounded scores. |q . k| <= |q| |k|, so every score of a query lies within +- its bound, in units of log 2. Keys without
their mean give scores whose mean is about 0, so the largest one is not below: with the reference `bound - 80`, weights
are at most 2**80, and those of the largest score at least 2**-80 for bounds up to 160, where fp32 and bf16 still have
all their bits (a sum of 2**17 such weights times values of 2**30 fits fp32). Under a causal mask the mean says nothing
about the first queries: bounds up to 85. Then there is no maximum to find, nothing to rescale, and the product with v
accumulates untouched: 7.0 instructions a score where online softmax takes 12.3 (D = 128). fp16 and fp8 weights do not
have that range: they take online softmax.

Traffic and time, modelled on an H200 (132 multiprocessors at 1.755 GHz, 4.3 TB/s, 1979 TOP/s int8, 989 bf16, 5.5 TB/s
from L2). Every block of 128 queries reads all keys (int8) and values (bf16) from L2.
- Flux, S = 4608, 24 heads of 128: 1 and 2 move 113 MB, 26 us. 3: L2 280 us, matrix units 198, exp2 137, instructions
  121; so some .31 ms, 840 TOP/s (bf16 at 600 TFLOP/s: .43 ms).
- CogVideoX, S = 17776, 48 heads of 64: 1 and 2 move 460 MB, .11 ms. 3: exp2 4.1 ms, L2 4.1, instructions 3.4, matrix
  units 3.0; so some 4.8 ms, 810 TOP/s (bf16: 6.5 ms).
Measured there with Triton 3.6 (docs/gpu.md): Flux .476 ms, .83 times as fast as torch's bf16 (.397 ms, a kernel made
for Hopper); CogVideoX 7.4 ms, 1.19 times. The waits below cost more than the model has. fp8 values: .84 and 13.2 ms.
`gpu.hopper.attention` is for the same heads without these waits, and has not run on a GPU.
Two blocks of 4 warps share a multiprocessor, so that one computes weights while the other multiplies: Triton waits for
int8 products at once, and warps of one block wait for each other.

Registers, sm90, bounded, D = 128: 128 for sums, 64 for scores, 253 in all, no stack. That needs keys, values and the
result to move by the copy engine: with pointers 36 spill. Online softmax: 8 warps, 192 registers.
fp8 values halve the product with v and a third of the L2 traffic, but need online softmax, shuffles for the operand's
layout, and, as their matrix unit keeps some 13 bits of a sum, one of their own for each step: 12.4 instructions a
score. So they are for GPUs whose matrix units are slow beside the rest (sm89), and never a default.

Tried and lost, by the compiler's output: queries quantized in the attention kernel (their codes are then loaded into
registers again for each block of keys: 16 more, and 224 instead of 145); `factor * k_scale` of vectors instead of
columns (a layout conversion through shared memory in each step); 128 keys a step with 4 warps (spills); 8 warps capped
at 128 registers (the compiler then waits for each matrix instruction); a scale for each key instead of each block of
them (one more multiplication a score).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import SMALLEST_SCALE, row_max
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.counters import tile_counters
from hf_quant.kernels.gpu.hopper import attention as hopper
from hf_quant.kernels.gpu.launch import (
    HAS_TRITON,
    Target,
    cached_plan,
    config_table,
    launch,
    launch_with_scratch,
    target_of,
    tl,
    triton,
    unavailable_reason,
)
from hf_quant.kernels.int8_attention import op
from hf_quant.kernels.int8_attention.cpu import DENSE, int8_attention_dense
from hf_quant.kernels.int8_attention.gpu_kernels import (
    _int8_attention_kernel,
    _int8_attention_quantize_kernel,
    _int8_attention_stats_kernel,
)
from hf_quant.kernels.int8_attention.op import KEY_BLOCK


BOUNDED, ONLINE, ONLINE_FP8 = range(3)
# (largest D, which of the three, BLOCK_M, BLOCK_N, num_warps, num_stages)
CONFIGS = {
    "sm80": (
        (64, BOUNDED, 128, 64, 4, 3),
        (64, ONLINE, 128, 64, 8, 3),
        (128, BOUNDED, 128, 64, 8, 3),
        (128, ONLINE, 128, 64, 8, 3),
    ),
    "sm89": (
        (64, BOUNDED, 128, 64, 8, 3),
        (64, ONLINE, 128, 64, 8, 3),
        (64, ONLINE_FP8, 128, 64, 8, 3),
        (128, BOUNDED, 128, 64, 8, 3),
        (128, ONLINE, 128, 64, 8, 3),
        (128, ONLINE_FP8, 128, 32, 8, 3),
    ),
    "sm90": (
        (64, BOUNDED, 128, 64, 4, 3),
        (64, ONLINE, 128, 64, 8, 3),
        (64, ONLINE_FP8, 128, 128, 8, 2),
        (128, BOUNDED, 128, 64, 4, 3),
        (128, ONLINE, 128, 64, 8, 3),
        (128, ONLINE_FP8, 128, 64, 8, 2),
    ),
    "sm100": (
        (64, BOUNDED, 128, 64, 4, 3),
        (64, ONLINE, 128, 64, 8, 3),
        (64, ONLINE_FP8, 128, 64, 8, 3),
        (128, BOUNDED, 128, 64, 4, 3),
        (128, ONLINE, 128, 64, 8, 3),
        (128, ONLINE_FP8, 128, 64, 8, 3),
    ),
    "gfx942": (
        (64, BOUNDED, 128, 64, 4, 1),
        (64, ONLINE, 128, 64, 4, 1),
        (128, BOUNDED, 128, 64, 4, 1),
        (128, ONLINE, 128, 64, 4, 1),
    ),
}
_MAX_D = 128
_MAX_HEADS = 2**14  # in a batch: one counter each
_TOKENS = 512  # that one block of the first launch takes
_STEP_VALUES = 4096  # of keys at once; 8192 keep 8 bytes in local memory (Triton 3.9, sm100, heads of 128)
_LIMITS = {False: 160.0, True: 85.0}  # of bounds in units of log 2, by is_causal; see above


def supports_int8_attention(problem: Problem) -> str | None:
    """The reason why the kernels do not serve heads, None if they do.

    `problem.K` is the size of a head, `problem.activation` the format of the values.
    """
    if not HAS_TRITON:
        return "triton is not installed"
    if problem.K > _MAX_D:
        return f"heads of {problem.K}: up to {_MAX_D} values have registers for their sums"
    return None


FUSED = (Path("Triton, int8 scores", "any length; sm80, gfx9 and newer, fp8 values: sm89", supports_int8_attention),)


class AttentionPlan(NamedTuple):
    """The launch of one attention: all that follows from sizes and types."""

    blocks: int  # of keys
    query_blocks: int
    parts: int  # of the tokens, for the mean
    shared: dict  # options of every launch
    attentions: tuple[tuple[int, dict], ...]  # (blocks of queries, options of the launch)


@cached_plan
def attention_plan(
    S: int, T: int, D: int, dtype: torch.dtype, fp8: bool, is_causal: bool, aligned: bool, target: Target
) -> AttentionPlan | None:
    """The plan, None where the dense path serves.

    dtype: of v in the product, fp16 or bf16. aligned: rows of v and of the result start at multiples of 16 bytes.
    """
    if D > _MAX_D or S * D == 0 or not target.has_dot or (fp8 and not target.has_fp8_dot):
        return None
    block_d = max(triton.next_power_of_2(D), 32)
    shared = {"D": D, "BLOCK_D": block_d, "FP8": fp8}
    has_tma = target.table in ("sm90", "sm100")
    bounded = dtype == torch.bfloat16 and not fp8 and (aligned or not has_tma)
    limit = _LIMITS[is_causal] if bounded else 0.0
    table = config_table("int8_attention", CONFIGS, target)
    attentions = []
    for kind in (BOUNDED, ONLINE) if bounded else (ONLINE_FP8,) if fp8 else (ONLINE,):
        row = next((row for row in table if D <= row[0] and kind == row[1]), None)
        if row is None:  # fp8 values on gfx950, which takes the table of gfx942
            return None
        options = {"BLOCK_M": row[2], "BLOCK_N": row[3], "CAUSAL": is_causal, "LIMIT": limit}
        options |= {"DOT": tl.float16 if dtype == torch.float16 else tl.bfloat16, "TMA": kind == BOUNDED and has_tma}
        options |= {"SEPARATE": kind == ONLINE and target.table == "sm90"}
        options |= {"BOUNDED": kind == BOUNDED, "num_warps": row[4], "num_stages": row[5]}
        attentions.append((triton.cdiv(S, row[2]), options))
    blocks = (triton.cdiv(size, KEY_BLOCK) for size in (T, S))
    return AttentionPlan(*blocks, triton.cdiv(T, _TOKENS), shared, tuple(attentions))


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _is_aligned(x: Tensor) -> bool:
    return all(n * x.element_size() % 16 == 0 for n in (x.data_ptr() // x.element_size(), *x.stride()[:3]))


@implements(op.int8_attention, "XPU", FUSED + DENSE)
@implements(op.int8_attention, "CUDA", FUSED + DENSE)
def int8_attention_gpu(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None, value_format: str | None
) -> Tensor:
    """Compute `int8_attention_reference`."""
    op.check(q, k, v, scale, value_format)
    (B, H, S, D), (kv_heads, T), fp8 = q.shape, k.shape[1:3], value_format is not None
    plan = None
    if unavailable_reason(q.device) is None and 0 < B * H <= _MAX_HEADS:
        out = torch.empty_like(q)
        y = out if out.stride(3) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        q, k, v = (_rows(part.detach()) for part in (q, k, v))
        values = v.bfloat16() if v.dtype == torch.float32 and not fp8 else v
        sizes = (S, T, D, values.dtype, fp8, is_causal, _is_aligned(values) and _is_aligned(y))
        plan = attention_plan(*sizes, target_of(q.device))
    if plan is None:
        return int8_attention_dense(q, k, v, is_causal=is_causal, scale=scale, value_format=value_format)
    heads, block_d, blocks = B * kv_heads, plan.shared["BLOCK_D"], plan.blocks

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    q_codes, q_stats = new(torch.int8, B * H, S, block_d), new(torch.float32, 2, B * H, S)
    k_codes, k_scale = new(torch.int8, heads, blocks * KEY_BLOCK, block_d), new(torch.float32, heads, blocks)
    mean, sums = new(torch.float32, heads, block_d), new(torch.float32, heads, plan.parts, 2, block_d)
    v_codes = new(torch.uint8, heads, block_d, blocks * KEY_BLOCK) if fp8 else None
    v_scale = new(torch.float32, heads, block_d) if fp8 else None
    norms = new(torch.int32, 2, heads)
    counters = tile_counters(heads, q.device)
    launch(
        *(_int8_attention_stats_kernel, (plan.parts, heads), k, v, sums, counters, mean, v_scale, norms, T, kv_heads),
        *(*k.stride()[:3], *v.stride()[:3]),
        **plan.shared,
        **{"TOKENS": _TOKENS, "STEP": _STEP_VALUES // block_d, "LIMIT": row_max("fp8_e4m3")},
        **{"SMALLEST": SMALLEST_SCALE, "num_warps": 4},
    )
    launch(
        *(_int8_attention_quantize_kernel, (heads * blocks + B * H * plan.query_blocks,), q, k, v, mean, v_scale),
        *(q_codes, q_stats, k_codes, k_scale, v_codes, norms, D**-0.5 if scale is None else scale),
        *(S, T, H, kv_heads, heads, blocks, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        **plan.shared,
        **{"KEYS": KEY_BLOCK, "SMALLEST": SMALLEST_SCALE, "num_warps": 8},
    )
    values, v_strides = (v_codes, (0, 0, blocks * KEY_BLOCK)) if fp8 else (values, values.stride()[:3])
    operands = (q_codes, q_stats, k_codes, k_scale, values, v_scale, norms, y)
    sizes = (S, T, H, kv_heads, heads, blocks, *v_strides, *y.stride()[:3])
    for query_blocks, options in plan.attentions:
        if options["BOUNDED"] and hopper.serves(block_d, target_of(q.device)):
            hopper.bounded_attention(
                *(y, q_codes, q_stats, k_codes, k_scale, values, norms), is_causal=is_causal, limit=options["LIMIT"]
            )
            continue
        run = launch_with_scratch if options["TMA"] else launch
        grid = (query_blocks, B * H)
        run(_int8_attention_kernel, grid, *operands, *sizes, **plan.shared, **{"KEYS": KEY_BLOCK, **options})
    return y if y is out else out.copy_(y)
