"""The kernel of row quantization in Triton's interpreter: codes to the bit where x itself is quantized."""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from hf_quant.kernels import quantize_rowwise
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.rowwise import gpu
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.sign_matrices import hadamard_matrix
from hf_quant.tests.kernels.interpreter import install
from hf_quant.tests.kernels.test_rowwise import FORMATS, fused_cases, half_steps, normal


install()
pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # inf * 0, in numpy
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNELS = ("sm80", "sm90", "gfx942")  # codes of fp8 by integers; by conversions and PTX; 64 threads in a warp
OF = {
    "rms_norm_quantize_rowwise": gpu.rms_norm_quantize_rowwise_gpu,
    "layer_norm_quantize_rowwise": gpu.layer_norm_quantize_rowwise_gpu,
    "act_quantize_rowwise": gpu.act_quantize_rowwise_gpu,
}


@pytest.fixture
def in_a_loop(monkeypatch) -> None:
    """Rows that are too long for registers: the kernel reads them again for each step."""
    monkeypatch.setattr(gpu, "_IN_REGISTERS", 0)


@pytest.fixture
def as_many_rows(monkeypatch) -> None:
    """The configs of more than 256 rows, for few."""
    config = gpu.config
    monkeypatch.setattr(gpu, "config", lambda target, M, K, block=1: config(target, M + 256, K, block))


def rows_that_break_kernels(M: int, K: int, dtype: torch.dtype) -> torch.Tensor:
    """A row of zeros, ties at half of the largest value, and rows from 1e-26 to 1e38, if M and K allow."""
    x = normal(M, K)
    if M > 5:
        x[0] = 0
        x[1] = torch.sign(x[1]) * 2.0 ** torch.randint(-10, 1, (K,), generator=torch.Generator().manual_seed(1))
        x[2] *= 3e37 if dtype != torch.float16 else 1e4
        x[3] *= 1e-26
        x[4] = torch.arange(K) % 2 + 0.5
        x[4, 0] = 127
    return x.to(dtype)


def assert_the_reference(x: torch.Tensor, seed: torch.Tensor | None, format: str) -> None:
    codes, scale = gpu.quantize_rowwise_gpu(x, seed, format=format)
    expected, expected_scale = quantize_rowwise_reference(x, seed, format=format)
    assert codes.dtype == expected.dtype and codes.shape == expected.shape and scale.shape == expected_scale.shape
    assert torch.equal(scale, expected_scale) and torch.equal(codes.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_the_reference_to_the_bit(target, format):
    with pretend(TARGETS[target]):
        for i, shape in enumerate(((1, 64), (7, 33), (1, 1500), (17, 256), (1, 2100))):
            x = rows_that_break_kernels(*shape, DTYPES[i % 3])
            assert_the_reference(x, None, format)
            assert_the_reference(x, torch.tensor(12345 + 2**40), format)
        for dtype in DTYPES:
            assert_the_reference(rows_that_break_kernels(7, 40, dtype), None, format)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_of_many_rows(format, as_many_rows):
    for i, shape in enumerate(((40, 7), (20, 100), (9, 130), (6, 300), (1, 2100))):
        x = rows_that_break_kernels(*shape, DTYPES[i % 3])
        assert_the_reference(x, None, format)
        assert_the_reference(x, torch.tensor(-1), format)


@pytest.mark.parametrize("format", FORMATS)
def test_long_rows(format, in_a_loop):
    for shape in ((6, 300), (1, 2100)):
        x = rows_that_break_kernels(*shape, torch.bfloat16)
        assert_the_reference(x, None, format)
        assert_the_reference(x, torch.tensor(3), format)


def test_shapes_and_strides():
    x = normal(4, 6, 40).bfloat16()
    for view in (x[:, ::2], x[..., 3:29], x.transpose(0, 1), x[..., ::2], x[0], x[0, 0], x[:1].expand(3, 6, 40)):
        assert_the_reference(view, None, "int8")
    for shape in ((0, 8), (2, 0, 8), (3, 0)):
        assert_the_reference(torch.zeros(shape), torch.tensor(1), "fp8_e4m3")
    assert_the_reference(x.double(), None, "int8")  # no kernel: in torch ops
    seeded = torch.tensor([5])
    first = gpu.quantize_rowwise_gpu(x, seeded, format="int8")[0]
    assert torch.equal(first.view(-1, 40), gpu.quantize_rowwise_gpu(x.flatten(0, 1), seeded, format="int8")[0])


@pytest.mark.parametrize("target", KERNELS)
def test_every_rounding_of_fp8(target):
    """Each value of the grid, each midpoint, and their neighbours, at scale 1: as torch converts them."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    around = [points, torch.nextafter(points, torch.tensor(1e3)), torch.nextafter(points, torch.tensor(-1.0))]
    values = torch.cat(around).clamp(0, 448)
    x = torch.cat([values, -values, torch.tensor([448.0])])[None]
    with pretend(TARGETS[target]):
        codes, scale = gpu.quantize_rowwise_gpu(x, format="fp8_e4m3")
    assert scale.item() == 1
    assert torch.equal(codes.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("target", KERNELS)
def test_rows_that_are_not_finite(target):
    x = normal(4, 9)
    x[1, 3], x[2, 0] = torch.nan, -torch.inf
    with pretend(TARGETS[target]):
        for format in FORMATS:
            codes, scale = gpu.quantize_rowwise_gpu(x, format=format)
            assert scale[1].isnan() and scale[2].isinf()
            assert torch.equal(scale[[0, 3]], quantize_rowwise(x[[0, 3]], format=format)[1])
            assert not (codes.float() * scale)[1:3].sum(1).isfinite().any()


@pytest.mark.parametrize("target", ("sm90", "gfx942"))
@pytest.mark.parametrize("name", fused_cases())
def test_fused(name, target):
    for K, dtype in ((70, torch.float32), (1024, torch.bfloat16)):
        op, _, tensors, options, exact = fused_cases(6, K, dtype)[name]
        run = OF[op._schema.name.split("::")[1]]
        with pretend(TARGETS[target]):
            for format in FORMATS:
                codes, scale = run(*tensors, **options, format=format)
                assert half_steps(codes, scale, exact) < 1.002
                assert half_steps(codes.roll(1, -1), scale, exact) > 10  # other columns


@pytest.mark.parametrize("name", fused_cases())
def test_fused_in_blocks_of_rows(name, as_many_rows):
    op, _, tensors, options, exact = fused_cases(36, 33, torch.float16)[name]
    assert half_steps(*OF[op._schema.name.split("::")[1]](*tensors, **options, format="int8"), exact) < 1.002


@pytest.mark.parametrize("name", fused_cases())
def test_fused_in_a_loop(name, in_a_loop):
    op, _, tensors, options, exact = fused_cases(6, 300)[name]
    codes, scale = OF[op._schema.name.split("::")[1]](*tensors, **options, format="int8")
    assert half_steps(codes, scale, exact) < 1.002


def assert_rotated(name: str, M: int, K: int, block: int, format: str, dtype: torch.dtype = torch.float32) -> None:
    op, _, tensors, options, exact = fused_cases(M, K, dtype)[name]
    diagonal = normal(K // block, block, seed=5)
    exact = ((exact * diagonal.double().view(-1)).unflatten(-1, (-1, block)) @ hadamard_matrix(block)).flatten(-2)
    codes, scale = OF[op._schema.name.split("::")[1]](*tensors, diagonal, **options, format=format)
    assert half_steps(codes, scale, exact) < 1.002
    assert half_steps(codes.roll(1, -1), scale, exact) > 10  # other columns


@pytest.mark.parametrize("target", ("sm90", "gfx942"))
@pytest.mark.parametrize("name", fused_cases())
def test_rotated(name, target):
    with pretend(TARGETS[target]):
        assert_rotated(name, 6, 70, 2, "int8")
        assert_rotated(name, 6, 384, 128, "fp8_e4m3", torch.bfloat16)


@pytest.mark.parametrize("name", fused_cases())
def test_rotated_in_a_loop(name, in_a_loop):
    assert_rotated(name, 6, 288, 32, "int8")


def test_rotated_in_blocks_of_rows(as_many_rows):
    for K, block in ((96, 32), (1536, 512), (1024, 1024)):  # the last are wider than what is taken at once
        for name in ("layer modulated", "silu * up"):
            assert_rotated(name, 4, K, block, "int8")


def test_rows_beyond_the_last_read_no_modulation(monkeypatch, as_many_rows):
    """36 rows in blocks of 32: 28 of the second block have no modulation, and what follows it is not theirs."""
    x, memory = normal(4, 9, 33), normal(4 + 4, 2 * 33)
    load, ends = InterpreterBuilder.create_masked_load, set()

    def watched(self, ptrs, mask, *args):
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].astype(np.int64) - memory.data_ptr()
        ends.update(addresses[(addresses >= 0) & (addresses < memory.nbytes)].tolist())
        return load(self, ptrs, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    shift, scale = memory[:4].chunk(2, 1)
    gpu.layer_norm_quantize_rowwise_gpu(x, None, None, scale, shift, eps=1e-5, format="int8")
    assert max(ends) == memory[:4].nbytes - 4


def launches(call) -> list:
    with pretend(TARGETS["sm90"]), record_launches() as recorded:
        call()
    return recorded


def test_one_launch_without_reading_a_tensor():
    """On meta tensors, which hold nothing; the options, so the compiled kernel, are those of any number of rows."""
    found = set()
    for M in (300, 512, 999, 4608, 17776, 2**20):
        x, mod = (torch.empty(rows, 3072, dtype=torch.bfloat16, device="meta") for rows in (M, 1))
        (launched,) = launches(
            lambda x=x, mod=mod: gpu.layer_norm_quantize_rowwise_gpu(x, None, None, mod, mod, eps=1e-6, format="int8")
        )
        assert launched.grid == (M,)
        found.add(tuple(sorted(launched.options.items())))
    assert len(found) == 1
    found = set()
    for M in (300, 512, 999, 4608, 17776):  # of which blocks of 16 rows divide some
        x, mod = (torch.empty(rows, 128, dtype=torch.bfloat16, device="meta") for rows in (M, 1))
        (plain,) = launches(lambda x=x: gpu.quantize_rowwise_gpu(x, format="int8"))
        (modulated,) = launches(
            lambda x=x, mod=mod: gpu.layer_norm_quantize_rowwise_gpu(x, None, None, mod, mod, eps=1e-6, format="int8")
        )
        assert plain.grid == modulated.grid == (-(-M // 16),)
        found |= {tuple(sorted(plain.options.items())), tuple(sorted(modulated.options.items()))}
    assert len(found) == 2
    seed = torch.empty((), dtype=torch.int64, device="meta")
    assert len(launches(lambda: gpu.quantize_rowwise_gpu(x, seed, format="fp8_e4m3"))) == 1
    assert len(launches(lambda: gpu.act_quantize_rowwise_gpu(x, x, act="silu", format="int8"))) == 1
    assert len(launches(lambda: gpu.rms_norm_quantize_rowwise_gpu(x, mod[0], eps=1e-6, format="int8"))) == 1


def test_configs_keep_what_they_promise():
    for target in TARGETS.values():
        lanes = 64 if target.name.startswith("gfx") else 32
        for M in (1, 256, 257, 10**6):
            for K in (1, 64, 65, 512, 3072, 8192, 14336, 16384, 28672, 57344):
                for block in (1, 32, 128, 1024):
                    if K % block:
                        continue
                    rows, block_k, blocks, num_warps = gpu.config(target, M, K, block)
                    assert block_k % block == 0 and (blocks is None) == (K > 16384) and 1 <= num_warps <= 32
                    assert blocks is None or (blocks - 1) * block_k < K <= blocks * block_k
                    assert blocks is None or rows * blocks * block_k <= 64 * lanes * num_warps


def test_the_plan_can_explain_it():
    problem = Problem("int8", 64, 64, 64, torch.bfloat16, activation="int8")
    (row,) = explain(quantize_rowwise, "cuda", problem)
    assert row[2] is None
    rows = explain(quantize_rowwise, "cuda", problem._replace(dtype=torch.float64))
    assert "float64" in rows[0][2] and rows[1][0] == "reference"
