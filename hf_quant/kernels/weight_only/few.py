"""Products of few tokens with a quantized weight on NVIDIA's GPUs, by the Gluon kernel of few_kernel.py.

No GPU has run it yet, so it serves only if `hopper.plan.UNTRIED` says so; it is compiled for sm80 to sm120.

The Triton kernel of gpu.py takes nearly the same time for one token on an H100 and on an H200, whose memory is 1.4
times as fast, and a third of the issue slots: it is bound by what each of its steps waits for, which are shared
memory, a barrier, and products one after the other. Here

- codes go from global memory to the registers that mma.sync reads them from. Along K the order of a product is free
  (see `gpu.tile`), so a thread reads 16 bytes of a row, the next of its four neighbours the next 16, and nothing has
  to change places;
- the warps of a block share K, not rows: none waits for another before the last sum, whose parts do not pass through
  global memory. Each has the codes of two steps on their way, 2 KB, while it multiplies two others;
- the products of a step are two chains;
- what decoding adds to codes of 4 bits (128 in bf16) is taken off by a product with x that serves all rows, not from
  each weight: 149 instructions of a warp for 2048 weights in groups of 128 (Triton: 161), 174 in groups of 32.

Tried and lost, by the compiler's output: tiles of 32 rows, 131 instructions instead of 149, but 127 registers instead
of 80, and half as many blocks; groups of 32 as sums of their own in the unused columns of the right operand, 203
instructions instead of 174.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import Path, Problem
from hf_quant.kernels.gpu.compiled import Address, address_of
from hf_quant.kernels.gpu.decode import ANY_GROUP, bits_of, decode_options, scale_kind, scale_rows
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import Target, cached_plan, launch, target_of, triton
from hf_quant.kernels.gpu.ready import Run, make_ready
from hf_quant.kernels.weight import Weight


MOST_TOKENS = 16
_ROWS, _STEP = 16, 32  # ROWS and STEP of the kernel
_MOST_WARPS = 8  # of a block; 16 where there are fewer blocks than multiprocessors
_WARPS_AT_ONCE = 16  # of a multiprocessor: they keep 32 KB on their way
_LEAST_STEPS = 2  # of a warp


class Plan(NamedTuple):
    """The launch of a product: all that follows from sizes and types."""

    blocks: int
    limit: int  # elements of a row
    steps: int  # of a warp
    options: dict[str, Any]


def unsupported_reason(format: str, group_size: int, K: int) -> str | None:
    """The reason why the kernel cannot serve a weight, None if it can."""
    spec = CODES[format]
    if spec.is_packed and spec.planes != (4,):
        return f"{format}, whose codes are in planes of {spec.planes} bits"
    if K % 64:
        return f"rows of {K} codes, which is no multiple of 64"
    columns = _columns(format)
    if group_size < K and group_size % columns and (columns % group_size or group_size < 8):
        return f"groups of {group_size}, which neither divide {columns} columns nor hold whole ones"
    return None


def supports(problem: Problem) -> str | None:
    """The reason why the kernel cannot serve a product, None if it can."""
    if not hopper.UNTRIED:
        return "no GPU has run it yet: set HF_QUANT_UNTRIED_KERNELS=1 to use it"
    if not hopper.HAS_GLUON:
        return "Gluon, a part of triton, is not installed"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"{problem.dtype} activations"
    return unsupported_reason(problem.format, problem.group_size, problem.K)


FEW = (Path("Gluon, codes straight to registers", "up to 16 tokens, on sm80 and newer", supports),)


def _columns(format: str) -> int:
    """Columns of a step."""
    return _STEP * (4 if CODES[format].is_packed else 2)


def warps_of(blocks: int, steps: int, registers: int, target: Target) -> int:
    """Parts of K, a warp each: as few as fill the multiprocessors."""
    most = _MOST_WARPS if blocks >= target.multiprocessors or registers > 128 else 2 * _MOST_WARPS
    warps = 1
    while warps < most and blocks * warps < _WARPS_AT_ONCE * target.multiprocessors:
        if steps < 2 * warps * _LEAST_STEPS:
            break
        warps *= 2
    return warps


@cache
def _gluon() -> Any:
    """The module of the kernel: importing it needs Gluon."""
    from hf_quant.kernels.weight_only import few_kernel

    return few_kernel


@cached_plan
def plan(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    format: str,
    group_size: int,
    scale_shape: tuple[int, ...],
    scale_dtype: torch.dtype,
    zeros: str,
    target: Target,
) -> Plan | None:
    """The plan for M tokens, None where another path serves."""
    if not hopper.UNTRIED or not target.is_nvidia or not target.has_dot:
        return None
    if not 0 < M <= MOST_TOKENS or N * K == 0 or dtype not in (torch.float16, torch.bfloat16):
        return None
    if unsupported_reason(format, group_size, K) is not None:
        return None
    columns, gl = _columns(format), _gluon().gl
    decoding = decode_options(format, dtype, columns // _STEP, use_ptx=True)
    blocks, steps = triton.cdiv(N, _ROWS), triton.cdiv(K, columns)
    is_table = decoding["KIND"] == "table"
    if is_table and M > 8:  # no registers are left for it (8 to 24 bytes on the stack in loops)
        return None
    # Of 128 registers at most, 8 warps fill half of a multiprocessor, and a block may have 16.
    registers = 168 if M > 8 or is_table else 128
    warps = warps_of(blocks, steps, registers, target)
    share = triton.cdiv(steps, 2 * warps) * 2
    mode = "row" if group_size >= K else "before" if group_size < columns else "after"
    mode = "before" if zeros == "values" else mode  # as they are added to the weights
    options = {
        "BLOCK_M": 8 if M <= 8 else 16,
        "WARPS": warps,
        "EVEN_K": share * warps * columns == K,
        "GROUP": group_size if group_size < K else ANY_GROUP,
        "SCALE_MODE": mode,
        "SCALE": scale_kind(scale_dtype),
        "SCALE_ROWS": scale_rows(scale_shape, N),
        "HAS_ZERO": bool(zeros),
        # 16 tokens leave no registers for it, and sums with 1024 of fp16 lose more than its products may.
        "BY_SUM": format == "int4" and not zeros and mode != "before" and M <= 8 and dtype == torch.bfloat16,
        "DOT": gl.bfloat16 if dtype == torch.bfloat16 else gl.float16,
        **{name: decoding[name] for name in ("KIND", "BITS", "CODES", "MULTIPLIER", "PTX")},
        "num_warps": warps,
    }
    if registers > 128 or target.has_warp_dot:
        # Left alone, ptxas takes as few as 72, and keeps 8 to 16 bytes on the stack in loops; on sm90 it takes 80.
        options["maxnreg"] = registers
    return Plan(blocks, K // decoding["CODES"], share, options)


class Weights(NamedTuple):
    """A weight [N, K] as the kernel takes it: tensors, or what stands for them, and its strides."""

    codes: Tensor | Address
    scale: Tensor | Address
    zero_point: Tensor | Address | None
    global_scale: Tensor | Address | None
    N: int
    q_stride: int  # of 16 bytes
    scale_stride: int


def few_mm(x: Tensor, w: Weight, bias: Tensor | None, *, lasts: bool) -> Tensor | None:
    """x [M, K] (rows contiguous) @ dequant(w).T + bias in x's dtype, None where another path serves.

    lasts: x and w are the caller's, see `make_ready`.
    """
    if not hopper.has_kernels():
        return None
    sizes = (x.shape[0], w.N, w.K, x.dtype, w.format, w.group_size)
    found = plan(*sizes, tuple(w.scale.shape), w.scale.dtype, w.zeros, target_of(x.device))
    if found is None or not hopper.can_run(x, w.qdata):
        return None
    parts = bits_of(w.qdata), bits_of(w.scale), w.zero_point, w.global_scale
    strides = w.N, w.qdata.stride(-2) * w.qdata.element_size() // 16, w.scale.stride(0)
    if lasts:
        make_ready(x, w, lambda: _ready(Weights(*map(address_of, parts), *strides), found))
    return _product(x, Weights(*parts, *strides), bias, found)


def _ready(w: Weights, plan: Plan) -> Run:
    return lambda x, bias: _product(x if x.data_ptr() % 16 == 0 else x.clone(), w, bias, plan)


def _product(x: Tensor, w: Weights, bias: Tensor | None, plan: Plan) -> Tensor:
    y = torch.empty(x.shape[0], w.N, dtype=x.dtype, device=x.device)
    launch(
        _gluon()._few_mm_kernel,
        (plan.blocks,),
        x,
        *w[:4],
        None if bias is None else bias.contiguous(),
        y,
        x.shape[0],
        w.N,
        plan.limit,
        plan.steps,
        x.stride(0) // 8,
        w.q_stride,
        w.scale_stride,
        HAS_GLOBAL=w.global_scale is not None,
        HAS_BIAS=bias is not None,
        shared=plan.options,
    )
    return y
