"""Products by matrix units (AMX) beside those of AVX-512, on CPUs without them: an emulator takes the instructions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_quant.kernels import grouped_mm, native
from hf_quant.kernels.weight import Weight
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.test_native import options_of, random_packed


CASES = [  # (format, columns of a group, zero points, integers, rows of x, shape)
    *(("int4", group, False, True, M, (70, 576)) for group in (32, 64, 192) for M in (48, 53, 66)),
    ("int4", 64, True, True, 48, (70, 640)),
    ("int4", 16, True, True, 48, (64, 256)),  # too narrow for a tile
    *(("int4 fp8", group, zeros, True, 48, (70, 640)) for group in (16, 32, 64) for zeros in (False, True)),
    *(("int4 fp8", 32, False, False, M, (70, 5000)) for M in (48, 53)),
    ("int3 fp8", 16, False, False, 48, (70, 640)),
    ("int2 fp8", 16, True, False, 48, (70, 640)),
    ("int8", None, False, True, 100, (64, 300)),
    ("int8", 64, False, True, 49, (70, 5000)),  # more than a panel
    ("int4", 64, True, False, 48, (70, 640)),
    ("int3", 64, False, False, 49, (70, 576)),
    ("int2", 32, True, False, 48, (64, 256)),
    ("int2", None, False, True, 48, (70, 300)),
    ("int2", 64, True, True, 100, (64, 640)),
    ("int2 fp8", 32, False, True, 48, (70, 640)),
    ("int8", None, False, False, 48, (64, 300)),
    ("nf4", 64, False, False, 48, (64, 256)),
    ("fp8_e4m3", None, False, False, 48, (64, 300)),
    ("nvfp4", 16, False, False, 48, (64, 256)),
]


def weight(name: str, group: int | None, zeros: bool, N: int, K: int) -> Weight:
    """A random weight of a format; with "fp8", its scales are fp8."""
    name, has_fp8 = name.removesuffix(" fp8"), name.endswith(" fp8") or name == "nvfp4"
    rest = {"symmetric": False} if zeros else {}
    rest |= {"scale_dtype": "float8_e4m3fn"} if has_fp8 else {"scale_dtype": "bfloat16"}
    quant = TensorQuant(name, "row" if group is None else "group", group, **rest)
    return Weight(*random_packed(quant, N, K, 0), name, quant.columns_per_scale(K), K)


def products(kernels: str, x: torch.Tensor, w: Weight, integer: bool) -> torch.Tensor:
    with native.using(kernels):
        return native.product(x, w, None, integer=integer)


def check() -> None:
    """Compare both instruction sets in a process that has the emulator."""
    torch.set_num_threads(2)
    assert native.instruction_sets()[:2] == ("amx", "avx512")
    for case in CASES:
        name, group, zeros, integer, M, (N, K) = case
        w = weight(name, group, zeros, N, K)
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(1)).bfloat16()
        if not integer:
            x[1, 3], x[2, 5] = float("inf"), float("nan")
        found, expected = (products(kernels, x, w, integer) for kernels in ("amx", "avx512"))
        if integer and group != 192 and "fp8" not in name:  # else sums are rounded elsewhere
            assert torch.equal(found, expected), case
            continue
        if not integer:
            assert not found[1:3].isfinite().any() and found[3:].isfinite().all(), case
        found, expected = found[3:].float(), expected[3:].float()
        # Levels that are no integers meet x in bf16, and in fp32 with Intel's AVX-512.
        limit = 4e-3 if name == "nf4" else 1e-3
        assert (found - expected).norm() <= limit * expected.norm(), case
    quant = TensorQuant("int4", "group", 64)
    packed = [random_packed(quant, 64, 256, seed) for seed in range(3)]
    stacked = [None if parts[0] is None else torch.stack(parts) for parts in zip(*packed)]
    x, ends = torch.randn(150, 256).bfloat16(), torch.tensor([90, 91, 150], dtype=torch.int32)
    results = []
    for kernels in ("amx", "avx512"):
        with native.using(kernels):
            results.append(grouped_mm(x, *stacked, None, ends, activation="int8", **options_of(quant, 64, 256)))
    assert torch.equal(*results)
    print("compared")


@pytest.mark.skipif("avx512" not in native.instruction_sets(), reason="needs AVX-512 beside the emulated tiles")
@pytest.mark.skipif("amx" in native.instruction_sets(), reason="all tests of products run on the units themselves")
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and a compiler")
def test_products_by_an_emulator(tmp_path):
    emulator = tmp_path / "emulator.so"
    source = Path(__file__).with_name("amx_emulator.cpp")
    options = ["-O2", "-std=c++17", "-fPIC", "-shared"]
    subprocess.run(["g++", *options, str(source), "-o", str(emulator)], check=True, timeout=120)
    environment = {**os.environ, "LD_PRELOAD": str(emulator), "HF_QUANT_EMULATED_AMX": "1"}
    child = [sys.executable, "-c", f"from {__name__} import check; check()"]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "compared", done.stderr[-3000:]
