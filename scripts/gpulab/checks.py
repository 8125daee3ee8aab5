"""Compares ops on a GPU with their references at real shapes; used by gpu_suite.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpulab.cache_cases import CACHE_GROUPS, Cached, append_case, cached_case
from gpulab.cases import (
    CANDIDATES,
    EXPERTS,
    LLAMA,
    MAIN,
    MEMORY,
    OFF_TILE,
    Attention,
    Case,
    Linear,
    attention_case,
    backward_case,
    candidate,
    dequantize_case,
    gpu_ops,
    grouped_backward_case,
    grouped_case,
    linear_case,
    memory_case,
    quantized_case,
    reference,
    scaled_case,
)
from gpulab.optimizer_cases import adam_case, experts_cases, fake_case, requantize_cases, two_way_case, two_way_cases
from gpulab.step_cases import step_cases
from gpulab.timing import installed
from hf_quant.kernels.adam_step.op import STATES
from hf_quant.testing import PRODUCT_RMS, rms_error


# RMS error against the reference. fp8: matrix units of sm89 and sm90 keep some 13 bits of a sum.
FP8_PRODUCT_RMS = 1.5e-2
# The weights of softmax are rounded to 16 bits, or to fp8, whose relative error is 2**-4 / sqrt(3) at most.
SOFTMAX_RMS, FP8_WEIGHTS_RMS = 1e-2, 6e-2
MOVED_CODES = 1e-3  # share of codes that may differ: quotients at the edge between two of them


def shrunk(linear: Linear) -> Linear:
    """A tiny shape of the same kind, for dry runs."""
    experts = min(linear.experts, 4)
    return linear._replace(
        N=max(linear.N // 256, 8) // 8 * 8,
        K=max(linear.K // 32 // 128, 1) * 128,
        experts=experts,
        per_token=min(linear.per_token, max(experts - 1, 0)),
    )


def correctness_cases(*, quick: bool = False, tiny: bool = False) -> list[Case]:
    """List the cases to compare: every format and op, some M of every path, sizes off the tile."""
    size = shrunk if tiny else (lambda linear: linear)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    tokens = (1, 17, 600) if quick or tiny else (1, 5, 17, 64, 100, 300, 2000)
    linears = [LLAMA[1], OFF_TILE[0]] if quick else [LLAMA[1], LLAMA[3], *OFF_TILE]
    cases: list[Case] = []
    for one in CANDIDATES:
        main = one.name in MAIN
        for linear in map(size, linears if main else linears[:1]):
            some = tokens if main else (*tokens[:3], 200)
            cases += [linear_case(one, linear, M, bf16, bias=M == 17) for M in some]
        cases += [linear_case(one, size(LLAMA[1]), M, dtype) for dtype in (fp16, fp32) for M in (3, 200) if main]
        cases += [linear_case(one, size(LLAMA[1]), M, bf16, rotates=True) for M in (1, 300) if main]
        cases += [grouped_case(one, size(EXPERTS[2]), M, bf16) for M in (1, 40, 1000) if main or M == 40]
        if one.activation is not None:
            cases += [quantized_case(one, size(LLAMA[1]), M, bf16) for M in (17, 600)]
        else:
            cases.append(dequantize_case(one, size(LLAMA[1]), bf16))
            cases += [backward_case(one, size(LLAMA[1]), M, bf16) for M in (1, 300)]
            cases.append(grouped_backward_case(one, size(EXPERTS[3]), 40, bf16))
    for format in ("int8", "fp8_e4m3"):
        cases += [scaled_case(format, size(linear), M, bf16) for linear in (LLAMA[1], LLAMA[3]) for M in tokens]
        for name in MEMORY:
            cases += [
                memory_case(name, 128 if tiny else K, M, bf16, format) for K in (3072, 4096) for M in (1, 17, 1000)
            ]
    for one in (
        Attention("flux", 70 if tiny else 1200, 4, 4, 128),
        Attention("gqa", 65 if tiny else 1001, 4, 2, 64, is_causal=True),
    ):
        cases += [attention_case(one, bf16, values) for values in (None, "fp8_e4m3")]
        # 16-bit values by online softmax: all heads of fp16, and of bf16 those whose scores have no bound.
        cases += [attention_case(one, fp16), attention_case(one, bf16, loud=one.H // 2)]
    for format in CACHE_GROUPS:
        T = 300 if tiny else 3000
        for S in (1, 3, 70):
            cases.append(cached_case(Cached("gqa", 2, S, T, 8, 2, 128), format, bf16, rotates=S == 1))
            cases.append(cached_case(Cached("odd", 2, S, T - 7, 3, 3, 80), format, fp16))
            cases.append(cached_case(Cached("odd", 2, S, T - 7, 8, 2, 64), format, bf16, masked=True))
        cases += [
            append_case(Cached("odd", 2, S, T, 8, 2, 80), format, dtype) for S in (1, 70) for dtype in (bf16, fp32)
        ]
    for states in STATES:
        several = (size(LLAMA[1]), size(OFF_TILE[1]))
        cases += [adam_case(states, several, bf16, grad) for grad in (bf16, fp32)]
        cases.append(adam_case(states, several[:1], fp32, fp32, seed=None))
    for format, group_size in (("int4", 32), ("int8", size(LLAMA[1]).K), ("mxfp4", 32), ("nf4", 17)):
        for backward in (False, True):
            cases.append(fake_case(format, size(LLAMA[1]), group_size, bf16, backward=backward))
    cases += [*two_way_cases(256 if tiny else 4096), two_way_case("int8", "row", 1001, 77, bf16)]
    cases += requantize_cases(256 if tiny else 4096)
    cases += step_cases((1, 3) if tiny else (1, 17, 1000))
    cases += [case for M in (5, 200) for case in experts_cases(size(EXPERTS[2]), M)]
    cases.append(scaled_case("fp8_e5m2", size(LLAMA[1]), 64, bf16))
    return [case for case in cases if case.op in gpu_ops()]


def check_case(case: Case, device: torch.device) -> str | None:
    """Return the reason for which the op is wrong; None if it equals its reference and, bit by bit, a second call."""
    op = getattr(torch.ops.hf_quant, case.op)
    arguments, options = case.make(device)
    expected = _results(reference(case.op), arguments, options)
    _poison(expected)
    found = _results(op, arguments, options)
    reason = compare(case, found, expected)
    if reason is not None:
        return reason
    again = _results(op, arguments, options)
    if not all(_same_bits(a, b) for a, b in zip(found, again)):
        return "a second call gives other bits"
    if not case.num_ops:
        return None
    wrong = [part.roll(1, -1) for part in found]
    return None if compare(case, wrong, expected) else "the comparison accepts a result whose columns were moved"


def _results(call: Callable, arguments: tuple, options: dict[str, Any]) -> list[Tensor]:
    """Return the results of a call; of ops without any, the copies of their arguments that they wrote into."""
    copies: list[Any] = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    copies = [[part.clone() for part in value] if isinstance(value, list) else value for value in copies]
    result = call(*copies, **options)
    lists = [part for value in copies if isinstance(value, list) for part in value]
    if result is None and lists:
        return lists
    if result is None:
        return [value for value in copies[3:] or copies if value is not None]  # the first of `kv_append` are read
    return list(result) if isinstance(result, tuple | list) else [result]


def _poison(parts: list[Tensor]) -> None:
    """Leave NaN in memory of these sizes, which the allocator hands out next."""
    spoiled = [torch.empty_like(part).view(torch.uint8).fill_(0xFF) for part in parts if part.numel()]
    del spoiled


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare(case: Case, found: list[Tensor], expected: list[Tensor]) -> str | None:
    """Return the reason for which `found` is not `expected`: shapes and dtypes, NaN, codes, RMS error."""
    for value, wanted in zip(found, expected):
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            return f"{tuple(value.shape)} {value.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        if not value.float().isfinite().all():
            return f"{(~value.float().isfinite()).sum().item()} values are not finite"
    if case.op == "adam_step_":
        wrong = sum(not _same_bits(value, wanted) for value, wanted in zip(found, expected))
        return f"{wrong} of {len(found)} parameters, gradients and states have other bits" if wrong else None
    if case.op == "kv_append":
        return _compare_caches(found, expected)
    if case.op in ("quantize_two_way", "requantize_rows_"):
        wrong = sum(not _same_bits(value, wanted) for value, wanted in zip(found, expected))
        return f"{wrong} of {len(found)} results have other bits" if wrong else None
    if case.op.startswith("fake_quantize") and not _same_bits(found[0], expected[0]):
        return "the weights as stored, or their gradients, have other bits"
    if case.op in ("add_rms_norm", "rotary"):
        error = max(rms_error(value, wanted) for value, wanted in zip(found, expected))
        limit = PRODUCT_RMS[found[0].dtype]
        return f"RMS error {error:.2e}, allowed {limit:.2e}" if not error <= limit else None
    if len(found) == 2 and case.op != "kv_attention":  # codes and scales of rows
        moved = (found[0].float() != expected[0].float()).float().mean().item()
        error = rms_error(found[1], expected[1])
        return (
            f"{moved:.1e} of the codes differ, scales by {error:.1e}" if moved > MOVED_CODES or error > 1e-5 else None
        )
    limit = PRODUCT_RMS[found[0].dtype]
    if case.op == "kv_attention":
        limit = SOFTMAX_RMS
        if not torch.allclose(found[1], expected[1], atol=1e-2):
            return f"log-sum-exp differs by {(found[1] - expected[1]).abs().max().item():.1e}"
    elif case.op == "int8_attention":
        limit = FP8_WEIGHTS_RMS if "fp8" in case.name else SOFTMAX_RMS
    elif "fp8" in case.name and case.op in _FP8_SUMS:
        limit = FP8_PRODUCT_RMS
    error = rms_error(found[0], expected[0])
    return f"RMS error {error:.2e}, allowed {limit:.2e}" if not error <= limit else None


def _compare_caches(found: list[Tensor], expected: list[Tensor]) -> str | None:
    """Sums in another order move a code, or a scale by its last place, where it is between two."""
    for value, wanted in zip(found, expected):
        if value.dtype in (torch.int8, torch.int32, torch.float8_e4m3fn):
            moved = (value.float() != wanted.float()).float().mean().item()
            if moved > 8 * MOVED_CODES:  # words of 4 to 16 codes
                return f"{moved:.1e} of the words of codes differ"
        elif rms_error(value, wanted) > 1e-3:
            return f"scales or offsets differ by {rms_error(value, wanted):.1e}"
    return None


_FP8_SUMS = ("dynamic_mm", "quantized_mm", "fp8_scaled_mm", "grouped_mm", "grouped_scaled_mm", "grouped_scaled_sums")


def check_no_recompilation(device: torch.device, *, tiny: bool = False) -> str | None:
    """Ten numbers of tokens after a first one must compile nothing; None if so."""
    if not installed("triton"):
        return None
    import triton

    linear = shrunk(LLAMA[1]) if tiny else LLAMA[1]
    compiled: list[str] = []
    before = triton.knobs.compilation.listener

    def call(M: int) -> None:
        case = linear_case(candidate("int4 g128"), linear, M, torch.bfloat16)
        arguments, options = case.make(device)
        torch.ops.hf_quant.weight_only_mm(*arguments, **options)

    for first, others in ((20, range(21, 31)), (700, range(701, 711))):
        call(first)
        triton.knobs.compilation.listener = partial(_note, compiled)
        try:
            for M in others:
                call(M)
        finally:
            triton.knobs.compilation.listener = before
    return f"ten numbers of tokens compiled {len(compiled)} kernels anew: {compiled[:3]}" if compiled else None


def _note(compiled: list[str], *, src: Any, **_: Any) -> None:
    compiled.append(getattr(src, "name", "a kernel"))
