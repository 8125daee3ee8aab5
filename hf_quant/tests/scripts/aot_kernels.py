"""Kernels for test_aot.py, run by it in a process where Triton compiles: prints {kernel: [checks that failed]}."""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from gpulab.build import build, check_environment, record
from gpulab.cache_cases import Cached, cached_case
from gpulab.cases import LLAMA, Attention, attention_case, candidate, launcher, linear_case, memory_case
from gpulab.code_checks import check_built
from gpulab.collect import Use as KernelUse
from gpulab.collect import collect, cover
from hf_quant.kernels.gpu.launch import TARGETS, Target, launch, tl, triton


@triton.jit(do_not_specialize=["M"])
def _mm_kernel(x, w, y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, K, BLOCK_K):
        a = tl.load(x + m[:, None] * K + k[None, :] + i, mask=m[:, None] < M, other=0.0)
        b = tl.load(w + n[:, None] * K + k[None, :] + i)
        total = tl.dot(a, b.T, total)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=m[:, None] < M)


@triton.jit
def _strided_kernel(x, y, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i * stride, tl.load(x + i * stride))


def _product(M: int, block_m: int, block_n: int, block_k: int, stages: int, K: int = 4096) -> None:
    x, w, y = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((M, K), (4096, K), (M, 4096)))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    launch(_mm_kernel, (1,), x, w, y, M, 4096, K, **blocks, num_warps=4, num_stages=stages)


def _strided() -> None:
    x = torch.empty(4096, device="meta")
    launch(_strided_kernel, (4,), x, x, 3, BLOCK=1024, num_warps=4)


CALLS = {
    "good": lambda: _product(17, 64, 64, 64, 2),
    "small": lambda: _product(17, 16, 64, 64, 2),
    "large": lambda: _product(17, 128, 256, 32, 11),
    "strided": _strided,
    "broken": lambda: _product(17, 64, 64, 48, 2),
}


def kernels_by_length(target: Target) -> dict[str, int]:
    """{op: how many kernels five numbers of tokens take}; the keys of 77 fit one block."""
    attentions = [Attention("", S, 4, 2, 64) for S in (77, 1000, 2048, 4608, 17776)]
    cases = {
        f"attention, {values}": [attention_case(one, torch.bfloat16, values) for one in attentions]
        for values in (None, "fp8_e4m3")
    }
    for name in ("quantize", "LayerNorm, modulated"):
        cases[name] = [memory_case(name, 128, M, torch.bfloat16) for M in (300, 512, 999, 4608, 17776)]
    return {name: len(collect(same, [target]).uses) for name, same in cases.items()}


def covering(target: Target) -> list[int]:
    """Numbers of kernels of three formats and three tiles: a few, for every constexpr, for every pair, and all."""
    formats = [candidate(name) for name in ("int4 g128", "int4 g128 asym", "nf4 g64")]
    cases = [linear_case(one, LLAMA[1], M, torch.bfloat16) for one in formats for M in (16, 32, 64)]
    uses = list(collect(cases, [target]).uses.values())
    return [*(len(cover(uses, subset)) for subset in ("few", "ci", "tiles")), len(uses)]


def kernels_of_a_moving_window(target: Target) -> dict[str, int]:
    """{format: how many kernels attend to a window that has moved by 0 to 7 tokens}; with memory, hence addresses."""
    found = {}
    for format in ("int8", "int4"):
        one = Cached("", 1, 1, 64, 4, 2, 64)
        (q, *parts, mask, length), options = cached_case(one, format, torch.bfloat16).make("cpu")
        keys = set()
        for start in range(8):
            moved = [None if part is None else part[:, :, start : start + 40] for part in parts]
            call = partial(launcher("kv_attention"), q, *moved, mask, length, **options)
            keys.update(launched.unit.key for launched in record(call, target, {})[0])
        found[format] = len(keys)
    return found


def main(cache: Path, target_name: str) -> None:
    assert check_environment() is None, check_environment()
    target, binders = TARGETS[target_name], {}
    recorded = {name: record(call, target, binders)[0][0] for name, call in CALLS.items()}
    units = [launched.unit for launched in recorded.values()]
    built = build(units, cache=cache)
    files = {path: path.stat().st_mtime_ns for path in cache.glob("*/*.json")}
    again = build(units, cache=cache)
    found = {
        name: [finding.check for finding in check_built(built[launched.unit.key], target)]
        for name, launched in recorded.items()
    }
    # Another M is the same code; a K that 16 does not divide is not.
    same = record(lambda: _product(33, 64, 64, 64, 2), target, binders)[0][0].unit
    other = record(lambda: _product(17, 64, 64, 64, 2, K=4100), target, binders)[0][0].unit
    uses = [KernelUse(launched.unit, []) for launched in recorded.values()] + [KernelUse(other, [])]
    first = built[recorded["good"].unit.key]
    print(
        json.dumps(
            {
                "found": found,
                "is_same": same.key == recorded["good"].unit.key,
                "by_length": kernels_by_length(target),
                "by_window": kernels_of_a_moving_window(target),
                "is_other": other.key != recorded["good"].unit.key,
                "covered": [use.unit.values.get("BLOCK_M") for use in cover(uses, "ci")],
                "covering": covering(target),
                "matrix": first.summary.matrix,
                "error": built[recorded["broken"].unit.key].error,
                "cached": len(files),
                "is_kept": files == {path: path.stat().st_mtime_ns for path in cache.glob("*/*.json")},
                "is_equal": all(again[unit.key] == built[unit.key] for unit in units),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
