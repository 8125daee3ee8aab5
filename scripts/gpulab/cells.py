"""Products that each section of gpu_suite.py times."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from gpulab.cache_cases import CACHED, cached_case
from gpulab.cases import (
    ATTENTION,
    EXPERTS,
    LLAMA,
    Case,
    Linear,
    attention_case,
    candidate,
    gpu_ops,
    grouped_case,
    linear_case,
    memory_case,
    scaled_case,
)
from gpulab.checks import shrunk
from gpulab.measures import (
    Record,
    measure_attention,
    measure_cached,
    measure_grouped,
    measure_linear,
    measure_memory,
    measure_scaled,
)
from gpulab.timing import Ceilings, Timer


SQUARES = (Linear("4096 square", 4096, 4096), Linear("8192 square", 8192, 8192))
BF16 = torch.bfloat16


class Cell(NamedTuple):
    """One measurement, and the case by which its kernels are compiled before."""

    case: Case
    run: Callable[[Timer, Ceilings], Record]


def _linear(name: str, linear: Linear, M: int, wanted: tuple[str, ...] | None) -> Cell:
    one = candidate(name)
    run = partial(measure_linear, candidate=one, linear=linear, M=M, wanted=wanted)
    return Cell(linear_case(one, linear, M, BF16), lambda timer, ceilings: run(timer, ceilings=ceilings))


def weights(quick: bool, tiny: bool) -> list[Cell]:
    """Weight-only products: G1 to G4, G6, S1. The M that decide most come first."""
    wanted = ("tinygemm",) if quick or tiny else None
    size = shrunk if tiny else (lambda linear: linear)
    first = (1, 16, 64, 512, 4096) if quick else (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    cells = [_linear("int4 g128", size(linear), M, wanted) for M in first for linear in LLAMA]
    for name in ("int8", "fp8_e4m3", "int4 g32 fp8"):  # the last is the default of "int4"
        for M in (1, 64, 512) if quick else (1, 8, 64, 512, 4096):
            cells += [_linear(name, size(linear), M, wanted) for linear in (LLAMA[1:3] if quick else LLAMA)]
    if not quick:
        cells += [_linear("int4 g128", size(LLAMA[1]), M, ()) for M in (2, 4)]
        for name in ("int4 g128 float zeros", "int4 g32 float zeros"):
            cells += [_linear(name, size(LLAMA[2]), M, ("tinygemm",)) for M in (1, 64, 512)]
    return cells


def dynamic(quick: bool, tiny: bool) -> list[Cell]:
    """Products with quantized activations: G5, G7 to G9."""
    wanted = ("_int_mm", "_scaled_mm") if quick or tiny else None
    size = shrunk if tiny else (lambda linear: linear)
    cells = []
    for linear, M in zip(SQUARES, (4096, 8192)):
        for format in ("fp8_e4m3", "int8"):
            run = partial(measure_scaled, activation=format, linear=size(linear), M=M)
            case = scaled_case(format, size(linear), M, BF16)
            cells.append(Cell(case, lambda timer, ceilings, run=run: run(timer, ceilings=ceilings)))
    for M in (1, 128, 4096) if quick else (1, 16, 128, 2048, 4096):
        cells += [_linear("W8A8 int8", size(linear), M, wanted) for linear in LLAMA]
    for M in (4096,) if quick else (4096, 8192):
        cells += [_linear("W8A8 fp8", size(linear), M, wanted) for linear in LLAMA]
    cells += [_linear("W4A8 int8", size(linear), M, ()) for M in (64, 256, 4096) for linear in LLAMA[1:3]]
    return cells


def rowwise(quick: bool, tiny: bool) -> list[Cell]:
    """Ops that move data: G10. Comparisons with torch.compile, which takes seconds for each, come last."""
    names = ("quantize", "RMSNorm", "SiLU * up", "LayerNorm, modulated", "Hadamard", "Hadamard, quantize")
    names += ("Hadamard, signed, quantize", "SiLU * up, rotate", "LayerNorm, modulated, rotate")
    cells = []
    for name in names:
        sizes = ((4096, 8192),) if quick else ((4096, 8192), (14336, 8192), (4096, 16))
        for K, M in ((128, 8192),) if tiny else sizes:
            case = memory_case(name, K, M, BF16)
            if case.op in gpu_ops():
                cells.append(_memory(case))
    for name in () if quick or tiny else ("RMSNorm", "quantize"):
        cells.append(_memory(memory_case(name, 4096, 8192, BF16), inductor=True))
    return cells


def _memory(case: Case, *, inductor: bool = False) -> Cell:
    run = partial(measure_memory, case=case, inductor=inductor)
    return Cell(case, lambda timer, ceilings: run(timer, ceilings=ceilings))


def experts(quick: bool, tiny: bool) -> list[Cell]:
    """Experts of MoE models: G11."""
    size = shrunk if tiny else (lambda linear: linear)
    cells = []
    for name in ("int4 g128",) if quick else ("int4 g128", "int8", "W8A8 fp8"):
        for M in (1, 16, 4096) if quick else (1, 16, 256, 4096):
            for linear in map(size, EXPERTS[:2] if quick else EXPERTS):
                one = candidate(name)
                run = partial(measure_grouped, candidate=one, linear=linear, M=M)
                case = grouped_case(one, linear, M, BF16)
                cells.append(Cell(case, lambda timer, ceilings, run=run: run(timer, ceilings=ceilings)))
    return cells


def attention(quick: bool, tiny: bool) -> list[Cell]:
    """8-bit attention of diffusion transformers: D5; attention over quantized caches: K1."""
    cells = []
    long = [one for one in CACHED if one.S == 1 and one.T >= 32768]
    for one in long[-2:-1] if quick else long:
        label, one = f"{one.batch}x{one.T}", one._replace(T=one.T // 512, batch=1) if tiny else one
        for format in ("int4",) if quick else ("int8", "int4", "int2"):
            run = partial(measure_cached, one=one, format=format)
            name = f"{format} cache {label}"
            cells.append(
                Cell(
                    cached_case(one, format, BF16),
                    lambda t, c, run=run, name=name: {**run(timer=t, ceilings=c), "candidate": name},
                )
            )
    for one in ATTENTION[:1] if quick else ATTENTION:
        tokens, one = one.S, one._replace(S=one.S // 64, H=2, kv_heads=2) if tiny else one
        for values in (None, "fp8_e4m3"):
            if "int8_attention" in gpu_ops():
                run = partial(measure_attention, one=one, value_format=values)
                case = attention_case(one, BF16, values)
                cells.append(Cell(case, lambda t, c, run=run, M=tokens: {**run(timer=t, ceilings=c), "M": M}))
    return cells


CELLS: dict[str, Callable[[bool, bool], list[Cell]]] = {
    "weights": weights,
    "dynamic": dynamic,
    "rowwise": rowwise,
    "experts": experts,
    "attention": attention,
}
