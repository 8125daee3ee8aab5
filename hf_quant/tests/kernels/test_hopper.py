"""The kernel for Hopper: what its PTX decodes, which tile a product takes, and what is launched.

Triton's interpreter knows no Gluon: `make aot` compiles the kernel, `scripts/gpu_suite.py` runs it.
"""

import numpy as np
import pytest
import torch

from hf_quant.formats import FORMATS
from hf_quant.kernels.gpu.compiled import Address
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.hopper.pairs import pair_ptx, selectors, undecodable_reason
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.scaled_mm.gpu import fp8_scaled_mm_gpu, int8_scaled_mm_gpu
from hf_quant.kernels.weight import weight_of
from hf_quant.kernels.weight_only.gpu import fused_mm, weight_only_mm_gpu
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.cases import packed_case
from hf_quant.tests.kernels.interpreter import run_ptx


pytestmark = pytest.mark.skipif(not hopper.HAS_GLUON, reason="triton has no Gluon")
DECODED = [name for name in FORMATS if undecodable_reason(FORMATS[name].spec) is None]
INT4 = TensorQuant("int4", "group", 128, scale_dtype="bfloat16")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _words_of(name, t, codes, others):
    """(the word that thread t reads, 0 or 1) with `codes` at places 2t and 2t + 1 of a chunk, `others` elsewhere."""
    bits = 4 if FORMATS[name].spec.is_packed else 8
    places = {2 * t: codes[0], 2 * t + 1: codes[1]}
    first = 2 * t * bits // 32 * (32 // bits)
    return sum(
        np.uint32(1 << bits * i) * places.get(first + i, others).astype(np.uint32) for i in range(32 // bits)
    ).astype(np.uint32)


def _run(name, dtype, scaling, t, codes, others, *, scale=None, offset=None):
    """The two values that thread t decodes [2, codes]."""
    word = _words_of(name, t, codes, others)
    selector = np.full_like(word, selectors(FORMATS[name].spec)[t])
    inputs = [word, word, selector, selector]
    for value in (scale, offset):
        if value is not None:
            half = torch.tensor(value, dtype=dtype).view(torch.int16).item() & 0xFFFF
            inputs.append(np.full_like(word, half * 0x10001))
    (pairs,) = run_ptx(pair_ptx(name, dtype, scaling), inputs, 1)
    return torch.from_numpy(pairs.view(np.int16).reshape(-1, 2).T.copy()).view(dtype).double()


def _levels(name, dtype):
    spec = FORMATS[name].spec
    if spec.levels:
        return torch.tensor(spec.levels).to(dtype).double()
    return torch.arange(256).to(torch.uint8).view(spec.dtype).double()


@HALVES
@pytest.mark.parametrize("name", DECODED)
def test_every_thread_decodes_its_two_codes(name, dtype):
    expected = _levels(name, dtype)
    real = expected.isfinite()
    codes = np.arange(len(expected))
    for t in range(4):
        first, second = _run(name, dtype, "", t, (codes, codes[::-1]), ~codes & len(codes) - 1)
        assert torch.equal(first[real], expected[real])
        assert torch.equal(second[real.flip(0)], expected.flip(0)[real.flip(0)])
        first, _ = _run(name, dtype, "*", t, (codes, codes), codes, scale=0.375)
        assert torch.equal(first[real], (expected * 0.375).to(dtype).double()[real])


@HALVES
def test_offsets_and_exact_scales_of_four_bits(dtype):
    codes = np.arange(16)
    magic = 128 if dtype == torch.bfloat16 else 1024
    for zero in (0, 3, 15):
        (found, _) = _run("int4", dtype, "-*", 1, (codes, codes), codes, scale=1.5, offset=magic + zero)
        assert found.tolist() == [(code - zero) * 1.5 for code in codes]
        (found, _) = _run("int4", dtype, "*+", 3, (codes, codes), codes, scale=1.5, offset=zero - 4.25)
        assert found.tolist() == [(code - 8) * 1.5 + zero - 4.25 for code in codes]
    for scale in (0.875, 0.4375, 15.0):  # of e4m3: the sum of 17 * 15 eighths needs 8 bits
        (found, _) = _run("int4", torch.bfloat16, "fma", 2, (codes, codes), codes, scale=scale, offset=-136 * scale)
        assert found.tolist() == [float(torch.tensor((code - 8) * scale).bfloat16()) for code in codes]


def test_other_formats_are_left_to_other_kernels():
    assert set(FORMATS) - set(DECODED) == {"int3", "int2", "fp6_e3m2", "fp6_e2m3"}
    assert hopper.unsupported_reason("int3", 128, 4096) and hopper.unsupported_reason("int4", 24, 4096)
    assert hopper.unsupported_reason("int8", 2**30, 4104) and not hopper.unsupported_reason("int4", 128, 4128)
    assert not hopper.unsupported_reason("nvfp4", 16, 4096) and not hopper.unsupported_reason("int4", 256, 4096)


def _plan(M, N=4096, K=4096, dtype=torch.bfloat16, format="int4", target="sm90", experts=0):
    group = 128 if format == "int4" else K
    shape = (N, K // group)
    return hopper.plan(M, N, K, dtype, format, group, shape, torch.bfloat16, "", TARGETS[target], experts)


def test_few_tokens_other_gpus_and_wide_floats_are_left_to_other_kernels():
    assert _plan(17) and not _plan(16) and _plan(33, format="int8") and not _plan(32, format="int8")
    assert not _plan(64, target="sm80") and not _plan(64, target="sm100") and not _plan(64, dtype=torch.float32)
    assert _plan(16 * 8, experts=8) and not _plan(16 * 8 - 1, experts=8) and not _plan(0)


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (1536, 2048), (40, 96)], ids=str)
@pytest.mark.parametrize("is_untried", [False, True])
def test_a_plan_covers_all_tokens_rows_and_columns(shape, is_untried, monkeypatch):
    N, K = shape
    monkeypatch.setattr(hopper, "UNTRIED", is_untried)
    monkeypatch.setattr(hopper, "plan", hopper.plan.__wrapped__)  # without its cache
    for M in (17, 64, 65, 200, 1000, 4096, 20000):
        found = _plan(M, N, K)
        row = found.row
        assert found.tiles == -(-M // row.block_m) * -(-N // row.block_n) == found.tiles_m * -(-N // row.block_n)
        parts, whole = found.split
        assert found.steps * parts * row.block_k >= K > found.steps * (parts - 1) * row.block_k
        assert whole % 132 == 0 and (whole < found.tiles if parts > 1 else whole == 0)
        served = _plan(M, N, K, experts=8)
        if served:  # all rows of one expert, and one row of each
            assert served.split.parts == 1 and served.row.block_n >= 128
            assert served.tiles_m >= -(-M // served.row.block_m) + 1


def test_the_time_of_a_product_decides_its_tile(monkeypatch):
    def tile(M, N, K):
        row, split = hopper.choose(M, N, K, TARGETS["sm90"])
        return row.block_m, row.block_n, *split

    assert tile(1024, 28672, 4096) == (256, 128, 1, 0) and tile(64, 4096, 14336) == (64, 64, 4, 0)
    assert tile(128, 4096, 4096) == (64, 64, 1, 0)  # tiles of 128 tokens would leave half of the multiprocessors idle
    assert tile(512, 28672, 4096) == (256, 128, 1, 0)
    monkeypatch.setattr(hopper, "UNTRIED", True)
    assert tile(512, 28672, 4096) == (256, 128, 2, 396)  # 448 tiles: three rounds, and 52 tiles as 104 parts


def _launches(call):
    with pretend(TARGETS["sm90"]), record_launches() as launches:
        call()
    return launches


def _meta(quant, N, K, M, dtype=torch.bfloat16):
    packed, kwargs = packed_case(quant, N, K)
    packed = tuple(None if part is None else part.to("meta") for part in packed)
    return torch.empty(M, K, dtype=dtype, device="meta"), packed, kwargs


@pytest.mark.parametrize("quant", [INT4, TensorQuant("int8", "row"), TensorQuant("nf4", "group", 64)], ids=str)
def test_one_launch_with_tiles_of_x_and_of_codes(quant):
    x, packed, kwargs = _meta(quant, 192, 256, 100)
    bias = torch.empty(192, dtype=torch.bfloat16, device="meta")
    (one,) = _launches(lambda: weight_only_mm_gpu(x, *packed, bias, **kwargs))
    assert one.kernel.__name__ == "_hopper_mm_kernel" and one.options["HAS_BIAS"]
    x_tiles, q_tiles = one.args[2:4]
    assert x_tiles.shape == [100, 256] and q_tiles.shape[0] == 192
    assert q_tiles.shape[1] * 4 == packed[0].shape[1] * packed[0].element_size()
    assert x_tiles.block_shape == [one.options["BLOCK_M"], one.options["BLOCK_K"]]


def test_a_product_that_is_ready_launches_the_same(monkeypatch):
    """Its weight is addresses, and the device of the first argument is where it runs."""
    found = {}
    monkeypatch.setattr("hf_quant.kernels.weight_only.gpu.make_ready", lambda x, w, make: found.update(run=make()))
    x, packed, kwargs = _meta(INT4, 192, 256, 40)
    w = weight_of(*packed, **kwargs, K=256)
    (first,) = _launches(lambda: fused_mm(x, w, None, dtype=torch.bfloat16))
    (ready,) = _launches(lambda: found["run"](x, None))
    assert all(isinstance(one.args[0], torch.Tensor) and one.args[0].shape == (40, 192) for one in (first, ready))
    assert isinstance(ready.args[1], Address) and isinstance(ready.args[3].base, Address)
    assert first.grid == ready.grid and first.options == ready.options


def test_codes_of_quantized_inputs_and_rows_off_the_copies():
    x, packed, kwargs = _meta(INT4, 192, 256, 100)
    w, row_scale = weight_of(*packed, **kwargs, K=256), torch.empty(100, 1, device="meta")
    (one,) = _launches(lambda: fused_mm(x.to(torch.int8), w, None, row_scale, dtype=torch.bfloat16))
    assert one.options["HAS_ROW_SCALE"] and one.args[2].base.dtype == torch.bfloat16
    wide = torch.empty(100, 260, dtype=torch.bfloat16, device="meta")[:, :256]  # rows of 520 bytes
    (one,) = _launches(lambda: weight_only_mm_gpu(wide, *packed, None, **kwargs))
    assert one.kernel.__name__ == "_weight_only_mm_kernel"


@pytest.mark.parametrize("activation", [None, "int8"])
def test_all_experts_are_one_launch(activation):
    x, (qdata, scale, zero, _), kwargs = _meta(INT4, 192, 256, 100)
    parts = qdata.expand(4, *qdata.shape).contiguous(), scale.expand(4, *scale.shape).contiguous(), zero, None
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    (one,) = _launches(lambda: grouped_mm_gpu(x, *parts, None, offsets, activation=activation, **kwargs))
    assert one.kernel.__name__ == "_hopper_mm_kernel"
    assert one.options["EXPERTS"] == 4 and one.args[3].shape == [4 * 192, qdata.shape[1]]
    assert one.options["HAS_ROW_SCALE"] == (activation is not None)


def _product_of_codes(M, N, K, dtype, other=None):
    shapes = ((M, K), dtype), ((N, K), other or dtype), ((M, 1), torch.float32), ((N, 1), torch.float32)
    operands = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in shapes]
    multiply = int8_scaled_mm_gpu if dtype == torch.int8 else fp8_scaled_mm_gpu
    (one,) = _launches(lambda: multiply(*operands, None, out_dtype=torch.bfloat16))
    return one


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_of_many_tokens_are_multiplied_by_blocks_that_stay(dtype):
    one = _product_of_codes(4096, 4096, 4096, dtype)
    assert one.kernel.__name__ == "_hopper_scaled_mm_kernel" and one.grid == (132,) and not one.options["UNIT"]
    assert [tiles.shape for tiles in one.args[1:3]] == [[4096, 4096]] * 2
    assert one.args[1].block_shape == [one.options["BLOCK_M"], one.options["BLOCK_K"]]
    long = _product_of_codes(4096, 4096, 14336, dtype)
    assert bool(long.options["UNIT"]) == (dtype != torch.int8)
    assert long.args[-1] == (28 if dtype != torch.int8 else 112)  # steps of a sum
    assert _product_of_codes(64, 4096, 4096, dtype).kernel.__name__ == "_scaled_mm_split_kernel"
    assert _product_of_codes(4096, 4104, 4104, dtype).kernel.__name__ == "_scaled_mm_tiles_kernel"  # rows of 8 bytes


def test_two_kinds_of_float8_are_left_to_triton():
    one = _product_of_codes(4096, 4096, 4096, torch.float8_e5m2, torch.float8_e4m3fn)
    assert one.kernel.__name__ == "_scaled_mm_tiles_kernel"
