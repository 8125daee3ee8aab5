"""Every call that ahead-of-time compilation covers: products, fused row kernels, attention, caches, training."""

from collections.abc import Sequence

import torch

from gpulab.cache_cases import cache_cases
from gpulab.cases import (
    ATTENTION,
    CANDIDATES,
    DTYPES,
    EXPERTS,
    FLUX,
    LLAMA,
    MAIN,
    MEMORY,
    OFF_TILE,
    TOKENS,
    Attention,
    Candidate,
    Case,
    Linear,
    attention_case,
    backward_case,
    dequantize_case,
    grouped_backward_case,
    grouped_case,
    linear_case,
    memory_case,
    quantized_case,
    scaled_case,
)
from gpulab.optimizer_cases import experts_cases, fake_cases, optimizer_cases, requantize_cases, two_way_cases
from gpulab.step_cases import step_cases


def all_cases(ops: Sequence[str] | None = None) -> list[Case]:
    """List the cases for ahead-of-time compilation: every format, op and M in bf16; other dtypes on fewer shapes."""
    found = []
    for dtype in DTYPES.values():
        for candidate in CANDIDATES:
            if dtype != torch.float32 or candidate.name in MAIN:
                found += _candidate_cases(candidate, dtype)
        plain = dtype == torch.bfloat16
        for format in ("int8", "fp8_e4m3"):
            for linear in LLAMA + FLUX + OFF_TILE if plain else LLAMA[1:2]:
                found += [scaled_case(format, linear, M, dtype) for M in TOKENS]
            for name in MEMORY:
                # 64, 1000 and 28672 have no Hadamard transform; 3072 and 14336 are 12 * 2**k and 28 * 2**k
                sizes = (128, 3072, 4096, 14336, *(() if "Hadamard" in name else (64, 1000, 28672)))
                for K in sizes if plain else (4096,):
                    found += [memory_case(name, K, M, dtype, format) for M in (1, 17, 256, 4096)]
        extra = (Attention("off-tile", 1001, 4, 2, 80), Attention("wide", 300, 2, 2, 256, is_causal=True))
        for one in (*ATTENTION, *extra) if plain else ATTENTION[:1]:
            found += [attention_case(one, dtype, format) for format in (None, "fp8_e4m3")]
        found += cache_cases(dtype)
    found += [scaled_case("fp8_e5m2", LLAMA[1], M, torch.bfloat16) for M in (64, 4096)]
    found += optimizer_cases() + fake_cases() + two_way_cases() + requantize_cases() + step_cases()
    found += [case for linear, M in ((EXPERTS[0], 16), (EXPERTS[2], 4096)) for case in experts_cases(linear, M)]
    return [case for case in found if ops is None or case.op in ops]


def _candidate_cases(candidate: Candidate, dtype: torch.dtype) -> list[Case]:
    """The products of one way to quantize."""
    main, plain = candidate.name in MAIN, dtype == torch.bfloat16
    linears = LLAMA + FLUX + OFF_TILE if plain and main else (LLAMA[1], LLAMA[3]) if plain else LLAMA[1:2]
    tokens = TOKENS if plain or main else (1, 17, 64, 256, 4096)
    found = [linear_case(candidate, linear, M, dtype) for linear in linears for M in tokens]
    found += [linear_case(candidate, LLAMA[0], M, dtype, bias=True) for M in (1, 256)]
    if main:
        found += [linear_case(candidate, linear, M, dtype, rotates=True) for linear in linears[:1] for M in (1, 4096)]
    # fp32 experts run one by one, as their plan says: offsets are read on the host.
    more = (Linear("gpt-oss down", 2880, 2880, 32, 4),)
    experts = () if dtype == torch.float32 else EXPERTS + more if plain and main else EXPERTS[:1]
    found += [grouped_case(candidate, linear, M, dtype) for linear in experts for M in tokens]
    if candidate.activation is not None:  # the kernels of dynamic_mm
        found += [quantized_case(candidate, LLAMA[1], M, dtype) for M in (1, 64, 4096)]
    else:
        found += [dequantize_case(candidate, linear, dtype) for linear in (*linears, EXPERTS[2])]
        found += [backward_case(candidate, LLAMA[1], M, dtype) for M in (1, 16, 512, 4096)]
        if experts:
            found += [grouped_backward_case(candidate, EXPERTS[2], M, dtype) for M in (16, 1024)]
    return found
