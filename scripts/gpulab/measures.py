"""Time one case of an op against bf16 and rivals; used by bench_kernels.py, gpu_suite.py and tune.py."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from gpulab.cache_cases import Cached, cached_case
from gpulab.cases import (
    Attention,
    Candidate,
    Case,
    Linear,
    attention_case,
    grouped_case,
    linear_case,
    reference,
    rows_per_expert,
    scaled_case,
)
from gpulab.rivals import FAILURES, first_line, int_mm_alone, rivals_of, scaled_mm_alone
from gpulab.timing import Calls, Ceilings, Timer, num_copies, version_of
from hf_quant.planning import format_table


Record = dict[str, Any]
Builder = Callable[[], Calls]  # the calls of a variant, one for each copy of its weight


def op_calls(case: Case, copies: int, device: torch.device) -> Calls:
    """Calls of the case's op, each with data of its own."""
    op = getattr(torch.ops.hf_quant, case.op)
    calls = []
    for _ in range(copies):
        arguments, options = case.make(device)
        calls.append(partial(op, *arguments, **options))
    return calls


def measure(
    timer: Timer,
    case: Case,
    ceilings: Ceilings,
    *,
    rate: float = 1.0,
    ours: Calls | None = None,
    base: Builder | None = None,
    rivals: dict[str, Builder] | None = None,
    rounds: int = 9,
) -> Record:
    """Time a case (`ours`: calls of it, None for such of its op), its 16-bit `base` and its rivals in turns.

    `rate`: how much faster than bf16 the matrix units multiply its operands. A rival that fails is recorded with its
    reason; a failure of ours or of the base is raised.
    """
    nbytes = case.num_bytes()
    variants = {"ours": ours or op_calls(case, num_copies(nbytes, timer.device), timer.device)}
    if base is not None:
        variants["bf16"] = base()
    errors: dict[str, str] = {}
    for name, build in (rivals or {}).items():
        try:
            calls = build()
            calls[0]()
        except FAILURES as error:
            errors[name] = first_line(error)
        else:
            variants[name] = calls
    try:
        seconds = timer(variants, rounds=rounds)
    except FAILURES as error:
        kept = {name: calls for name, calls in variants.items() if name in ("ours", "bf16")}
        if len(kept) == len(variants):
            raise
        errors |= {name: f"in a graph: {first_line(error)}" for name in variants if name not in kept}
        seconds = timer(kept, rounds=rounds)
    spent, plain = seconds.pop("ours"), seconds.pop("bf16", None)
    floor = max(nbytes / (ceilings.copy * 1e9), case.num_ops / (ceilings.gemm * rate * 1e12))
    return {
        "op": case.op,
        "name": case.name,
        "M": case.M,
        "ms": spent * 1e3,
        "gbps": nbytes / spent / 1e9,
        "tflops": case.num_ops / spent / 1e12,
        "of_floor": floor / spent,
        "bf16_ms": None if plain is None else plain * 1e3,
        "vs_bf16": None if plain is None else plain / spent,
        "rivals_ms": {name: value * 1e3 for name, value in seconds.items()},
        "vs_rivals": {name: value / spent for name, value in seconds.items()},
        "rivals_failed": errors,
        "triton": version_of("triton"),  # other versions make other kernels of the same source
    }


def _randn(shape: tuple[int, ...], device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(scale)


def bf16_linear(linear: Linear, M: int, device: torch.device) -> Calls:
    """F.linear with 16-bit weights, as many copies as the cache asks for."""
    copies = num_copies(2 * linear.N * linear.K, device)
    x = _randn((M, linear.K), device)
    return [partial(F.linear, x, _randn((linear.N, linear.K), device, 0.02)) for _ in range(copies)]


def measure_linear(
    timer: Timer,
    candidate: Candidate,
    linear: Linear,
    M: int,
    ceilings: Ceilings,
    *,
    wanted: tuple[str, ...] | None = None,
    rounds: int = 9,
) -> Record:
    """`weight_only_mm` or `dynamic_mm` against bf16 and the rivals (`wanted`: only these; () for none)."""
    device = timer.device
    case = linear_case(candidate, linear, M, torch.bfloat16)
    copies = num_copies(case.num_bytes(), device)

    def rival_calls(build: Callable) -> Calls:
        x = _randn((M, linear.K), device)
        return [partial(build(_randn((linear.N, linear.K), device, 0.02)), x) for _ in range(copies)]

    rivals = {
        rival.name: partial(rival_calls, rival.build)
        for rival in rivals_of(candidate.name, M, linear.N, linear.K, wanted)
    }
    base = partial(bf16_linear, linear, M, device)
    rate = 1.0 if candidate.activation is None else 2.0
    record = measure(timer, case, ceilings, rate=rate, base=base, rivals=rivals, rounds=rounds)
    return {**record, "candidate": candidate.name, "linear": linear.name}


def measure_scaled(
    timer: Timer, activation: str, linear: Linear, M: int, ceilings: Ceilings, *, rounds: int = 9
) -> Record:
    """`int8_scaled_mm` or `fp8_scaled_mm` alone against the bf16 product and torch's own of the same type."""
    device = timer.device
    case = scaled_case(activation, linear, M, torch.bfloat16)

    def vendor() -> Calls:
        calls = []
        for _ in range(num_copies(case.num_bytes(), device)):
            (a, b, a_scale, b_scale, _), _ = case.make(device)
            if activation == "int8":
                calls.append(partial(int_mm_alone(b), a))
            else:
                calls.append(partial(scaled_mm_alone(b, b_scale), a, a_scale))
        return calls

    rival = "_int_mm" if activation == "int8" else "_scaled_mm"
    base = partial(bf16_linear, linear, M, device)
    record = measure(timer, case, ceilings, rate=2.0, base=base, rivals={rival: vendor}, rounds=rounds)
    return {**record, "candidate": activation, "linear": linear.name}


def grouped_bf16(linear: Linear, M: int, touched: float, device: torch.device) -> Calls:
    """torch's grouped product of 16-bit experts (a loop over the experts where it has none: CPU).

    touched: the share of the experts that the tokens use. Each copy is used by other tokens.
    """
    copies = num_copies(int(2 * linear.experts * linear.N * linear.K * touched), device)
    x = _randn((M * linear.per_token, linear.K), device)
    calls = []
    for _ in range(copies):
        weight, ends = _randn((linear.experts, linear.N, linear.K), device, 0.02), rows_per_expert(linear, M, device)
        if device.type in ("cuda", "meta"):
            calls.append(partial(torch._grouped_mm, x, weight.transpose(1, 2), offs=ends))
        else:
            calls.append(partial(_loop_over_experts, x, weight, ends.tolist()))
    return calls


def _loop_over_experts(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> torch.Tensor:
    starts = [0, *ends[:-1]]
    return torch.cat([x[start:end] @ w.t() for start, end, w in zip(starts, ends, weight)])


def measure_grouped(
    timer: Timer, candidate: Candidate, linear: Linear, M: int, ceilings: Ceilings, *, rounds: int = 9
) -> Record:
    """`grouped_mm` of M tokens against torch's bf16 grouped product."""
    case = grouped_case(candidate, linear, M, torch.bfloat16)
    rate = 1.0 if candidate.activation is None else 2.0
    base = partial(grouped_bf16, linear, M, case.touched, timer.device)
    record = measure(timer, case, ceilings, rate=rate, base=base, rounds=rounds)
    return {**record, "M": M, "candidate": candidate.name, "linear": linear.name}


def measure_attention(timer: Timer, one: Attention, value_format: str | None, ceilings: Ceilings) -> Record:
    """`int8_attention` against torch's bf16 attention. Half of the products are of int8, half of 16 or 8 bits."""
    case = attention_case(one, torch.bfloat16, value_format)

    def plain() -> Calls:
        (q, k, v), _ = case.make(timer.device)
        options = {"is_causal": one.is_causal, "enable_gqa": one.H != one.kv_heads}
        return [partial(F.scaled_dot_product_attention, q, k, v, **options)]

    record = measure(timer, case, ceilings, rate=2.0 if value_format else 4 / 3, base=plain, rounds=5)
    return {**record, "candidate": f"int8 attention{f', {value_format}' if value_format else ''}", "linear": one.name}


def measure_cached(timer: Timer, one: Cached, format: str, ceilings: Ceilings) -> Record:
    """`kv_attention` against torch's attention over a bf16 cache, with heads of keys as they are, and repeated."""
    case = cached_case(one, format, torch.bfloat16)

    def plain(repeats: int) -> Calls:
        heads, calls = one.kv_heads * repeats, []
        nbytes = 4 * one.batch * heads * one.T * one.D
        for _ in range(num_copies(nbytes, timer.device)):
            q = _randn((one.batch, one.H, one.S, one.D), timer.device)
            k, v = (_randn((one.batch, heads, one.T, one.D), timer.device) for _ in range(2))
            gqa = heads != one.H
            # A single query is the last one: it sees everything. Several stand at the end: lower right.
            mask = None if one.S == 1 else causal_lower_right(one.S, one.T)
            calls.append(partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask, enable_gqa=gqa))
        return calls

    rivals = {"SDPA": partial(plain, 1), "SDPA, heads repeated": partial(plain, one.H // one.kv_heads)}
    record = measure(timer, case, ceilings, rivals=rivals, rounds=5)
    return {**record, "candidate": f"{format} cache {one.batch}x{one.T}", "linear": one.name}


def measure_memory(timer: Timer, case: Case, ceilings: Ceilings, *, inductor: bool = False, rounds: int = 9) -> Record:
    """An op that only moves data, against the copy of the same run; `inductor`: its reference compiled by torch."""
    rivals: dict[str, Builder] = {}
    if inductor:
        compiled = torch.compile(reference(case.op), dynamic=False)

        def calls() -> Calls:
            made = [case.make(timer.device) for _ in range(num_copies(case.num_bytes(), timer.device))]
            return [partial(compiled, *arguments, **options) for arguments, options in made]

        rivals["inductor"] = calls
    record = measure(timer, case, ceilings, rivals=rivals, rounds=rounds)
    return {**record, "candidate": case.name.rsplit(", rows", 1)[0], "linear": ""}


def table(records: Iterable[Record]) -> str:
    """The records for people."""
    rows = [("case", "ms", "GB/s", "TFLOP/s", "of floor", "x bf16", "x rivals")]
    for record in records:
        rivals = [f"{name} {ratio:.2f}" for name, ratio in record["vs_rivals"].items()]
        rivals += [f"{name} failed" for name in record["rivals_failed"]]
        rows.append(
            (
                record["name"],
                f"{record['ms']:.4f}",
                f"{record['gbps']:.0f}",
                f"{record['tflops']:.1f}",
                f"{record['of_floor']:.0%}",
                "" if record["vs_bf16"] is None else f"{record['vs_bf16']:.2f}",
                ", ".join(rivals),
            )
        )
    return format_table(rows)
