"""Kernels that are off until a GPU has run them: their errors, and their times beside what serves without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gpulab.cases import ATTENTION, EXPERTS, FLUX, LLAMA, Case, attention_case, candidate, grouped_case, linear_case
from gpulab.checks import check_case, shrunk
from gpulab.measures import Record, measure, op_calls
from gpulab.timing import Calls, Ceilings, Timer, num_copies
from hf_quant.kernels.gpu.hopper import plan
from hf_quant.kernels.gpu.launch import forget_plans


@contextmanager
def untried(is_on: bool = True) -> Iterator[None]:
    """Let kernels serve that no GPU has run yet, or not."""
    before = plan.UNTRIED
    plan.UNTRIED = is_on
    forget_plans()
    try:
        yield
    finally:
        plan.UNTRIED = before
        forget_plans()


def untried_cases(*, quick: bool, tiny: bool) -> list[Case]:
    """List the cases that they would serve; products of few tokens first, as most depends on them."""
    bf16, size = torch.bfloat16, shrunk if tiny else (lambda linear: linear)

    def linears(name: str, tokens: tuple[int, ...], layers: tuple) -> list[Case]:
        return [linear_case(candidate(name), size(linear), M, bf16) for M in tokens for linear in layers]

    cases = linears("int4 g32 fp8", (1, 8, 16), LLAMA) + linears("int4 g128", (1, 2, 8, 16), LLAMA)
    for name in () if quick else ("int8", "fp8_e4m3", "nf4 g64", "nvfp4", "int4 g128 asym"):
        cases += linears(name, (1, 16), LLAMA[2:3])
    cases += [attention_case(one._replace(S=70, H=2, kv_heads=2) if tiny else one, bf16) for one in ATTENTION]
    cases += linears("W4A8 int8", (64, 256, 4096), LLAMA[2:3])
    cases += [grouped_case(candidate("W8A8 int8"), size(linear), 4096, bf16) for linear in EXPERTS[::2]]
    cases += linears("int4 g128", (512, 4608), FLUX)
    return cases


def measure_untried(timer: Timer, case: Case, ceilings: Ceilings) -> Record:
    """Time a case with what is untried, and without ("default" of its rivals).

    Raises AssertionError if it is wrong.
    """
    with untried():
        reason = check_case(case, timer.device)
    if reason is not None:
        raise AssertionError(f"{case.op}: {case.name}: {reason}")

    def switched(is_on: bool, call: Any) -> Any:
        with untried(is_on):
            return call()

    def calls(is_on: bool) -> Calls:
        made = op_calls(case, num_copies(case.num_bytes(), timer.device), timer.device)
        return [partial(switched, is_on, call) for call in made]

    record = measure(timer, case, ceilings, ours=calls(True), rivals={"default": partial(calls, False)})
    return {**record, "candidate": case.name, "linear": ""}
