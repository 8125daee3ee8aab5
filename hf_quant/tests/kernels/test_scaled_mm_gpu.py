"""The GPU kernels of codes x codes in Triton's interpreter: every branch, edge and target; sums of integers exact."""

import pytest
import torch

from hf_quant.kernels.dispatch import Problem
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import TARGETS, Target, pretend, record_launches, reload_tables
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.scaled_mm import gpu
from hf_quant.kernels.scaled_mm.gpu import dynamic_mm_gpu, fp8_scaled_mm_gpu, int8_scaled_mm_gpu
from hf_quant.kernels.scaled_mm.op import dynamic_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.cases import assert_product, decode_slowly, packed_case, rejects
from hf_quant.tests.kernels.interpreter import install


install()
pytestmark = pytest.mark.usefixtures("poison_empty")
OPS = {torch.int8: int8_scaled_mm_gpu, torch.float8_e4m3fn: fp8_scaled_mm_gpu}
# So few multiprocessors that small products reach every branch.
SMALL = {name: Target(name, 2, TARGETS[name].shared_memory) for name in TARGETS}


def _codes(rows: int, K: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, K), generator=generator, dtype=dtype)
    return torch.randn(rows, K, generator=generator).mul_(60).to(dtype)


def _operands(M: int, N: int, K: int, dtype: torch.dtype):
    """Codes with a row of zeros and a row of the largest sums, scales, bias."""
    a, b = _codes(M, K, dtype), _codes(N, K, dtype, 1)
    if M > 2:
        a[1] = 0
        a[2] = b[2] = 127
    generator = torch.Generator().manual_seed(2)  # the largest sum decides the RMS error, its rounding by chance
    scales = [torch.rand(size, 1, generator=generator) + 0.5 for size in (M, N)]
    return a, b, scales[0], scales[1] / 1000, torch.randn(N, generator=generator)


@pytest.fixture(autouse=True)
def without_gluon(monkeypatch):
    """Triton's kernels on Hopper, too: the interpreter knows no others."""
    monkeypatch.setattr(hopper, "HAS_GLUON", False)


def _exact(a, b, a_scale, b_scale, bias):
    y = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double().t()
    return y if bias is None else y + bias.double()


def _launches(M, N, K, dtype, target, out_dtype=torch.bfloat16):
    shapes = ((M, K), dtype), ((N, K), dtype), ((M, 1), torch.float32), ((N, 1), torch.float32), ((N,), torch.float32)
    operands = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in shapes]
    with pretend(target), record_launches() as launches:
        OPS[dtype](*operands, out_dtype=out_dtype)
    return launches


def _branch(launch) -> str:
    name = getattr(launch.kernel, "fn", launch.kernel).__name__
    if "split" in name:
        return "split" if launch.grid[1] > 1 else "one part"
    return ("chained " if launch.options["UNIT"] else "") + ("TMA" if launch.options["TMA"] else "pointers")


BRANCHES = (  # target, M, N, K, what runs
    ("sm90", 1, 72, 544, "split"),
    ("sm90", 17, 60, 528, "split"),
    ("sm90", 64, 300, 72, "one part"),
    ("sm90", 128, 100, 560, "one part"),
    ("sm90", 130, 304, 272, "TMA"),
    ("sm90", 130, 302, 136, "pointers"),
    ("sm100", 129, 528, 144, "TMA"),
    ("sm120", 130, 130, 144, "pointers"),
    ("sm80", 3, 66, 600, "split"),
    ("sm80", 130, 260, 192, "pointers"),
    ("sm89", 130, 130, 144, "pointers"),
    ("gfx942", 130, 140, 160, "pointers"),
    ("gfx942", 5, 70, 640, "split"),
)


@pytest.mark.parametrize("dtype", OPS, ids=str)
@pytest.mark.parametrize("name,M,N,K,branch", BRANCHES)
def test_every_branch(name, M, N, K, branch, dtype):
    target = SMALL[name]
    if dtype != torch.int8 and not target.has_fp8_dot:
        assert not _launches(M, N, K, dtype, target)
        pytest.skip(f"{name} has no fp8 units: the dense path, see test_empty_and_no_units")
    (launch,) = _launches(M, N, K, dtype, target)
    assert _branch(launch) == branch
    operands = _operands(M, N, K, dtype)
    exact = _exact(*operands)
    with pretend(target):
        y = OPS[dtype](*operands, out_dtype=torch.bfloat16)
        assert y.dtype == torch.bfloat16 and y.shape == (M, N)
        assert_close(y, exact, rms=3e-3)
        ones = torch.ones(M, 1), torch.ones(N, 1)
        y = OPS[dtype](*operands[:2], *ones, None, out_dtype=torch.float32)
    sums = _exact(*operands[:2], *ones, None)
    if dtype == torch.int8:
        assert torch.equal(y.double(), sums)
    else:
        assert_close(y, sums, rms=1e-6)
    without_last_tile = operands[0].clone()
    without_last_tile[:, K - 8 :] = 0
    with pytest.raises(AssertionError):
        assert_close(_exact(without_last_tile, *operands[1:]), exact, rms=3e-3)


@pytest.mark.parametrize("name,M", [("sm90", 130), ("sm89", 130), ("sm90", 3)])
def test_long_sums_of_fp8_are_cut_into_chains(name, M, monkeypatch):
    monkeypatch.setattr(gpu, "_CHAIN", 256)
    reload_tables()
    target, (N, K) = SMALL[name], (272, 640)
    try:
        (launch,) = _launches(M, N, K, torch.float8_e4m3fn, target)
        operands = _operands(M, N, K, torch.float8_e4m3fn)
        operands[0][0] = operands[1][0] = 448  # the largest sum must not overflow
        with pretend(target):
            y = fp8_scaled_mm_gpu(*operands, out_dtype=torch.float32)
            (int8,) = _launches(M, N, K, torch.int8, target)
    finally:
        reload_tables()
    if M == 3:
        assert launch.grid[1] == 3
    else:
        assert _branch(launch).startswith("chained") and not int8.options["UNIT"]
        assert 448**2 * K * launch.options["UNIT"] <= 2**15
    assert_close(y, _exact(*operands), rms=3e-4)
    assert_close(y[1:], _exact(*operands)[1:], rms=3e-4)


def test_fp8_chains_start_at_4096():
    target = TARGETS["sm90"]
    for K, chains in ((4096, 0), (4352, 2), (14336, 4)):
        (launch,) = _launches(4096, 4096, K, torch.float8_e4m3fn, target)
        steps = K // 128
        assert bool(launch.options["UNIT"]) == bool(chains) and launch.args[-1] == -(-steps // max(chains, 1))
        (launch,) = _launches(1, 100_000, K, torch.float8_e4m3fn, target)
        assert launch.grid[1] == max(chains, 1)


@pytest.mark.parametrize("dtype", OPS, ids=str)
@pytest.mark.parametrize("M", [3, 130])
def test_alignment_and_strides(dtype, M):
    N = 140
    for K, start, stride, align in ((72, 0, 80, 8), (60, 0, 64, 4), (33, 0, 40, 1), (96, 5, 112, 1), (64, 0, 128, 1)):
        a, b, *rest = _operands(M, N, K, dtype)
        wide = torch.zeros(M, stride + start, dtype=torch.float32).to(dtype)
        wide[:, start : start + K] = a
        a = wide[:, start : start + K]
        with pretend(SMALL["sm90"]), record_launches() as launches:
            OPS[dtype](a, b, *rest, out_dtype=torch.float32)
        assert launches[0].options["ALIGN"] == align
        with pretend(SMALL["sm90"]):
            y = OPS[dtype](a, b, *rest, out_dtype=torch.float32)
        assert_close(y, _exact(a, b, *rest), rms=1e-6)
    transposed = _codes(48, M, dtype).t()
    b, *rest = _operands(M, N, 48, dtype)[1:]
    with pretend(SMALL["sm90"]):
        y = OPS[dtype](transposed, b, *rest, out_dtype=torch.float32)
        assert_close(y, _exact(transposed, b, *rest), rms=1e-6)
        b = _codes(48, N, dtype).t()
        y = OPS[dtype](transposed, b, *rest, out_dtype=torch.float32)
        assert_close(y, _exact(transposed, b, *rest), rms=1e-6)


def test_empty_and_no_units():
    for dtype, compute in OPS.items():
        with pretend(TARGETS["sm90"]):
            assert compute(*_operands(0, 8, 16, dtype), out_dtype=torch.float16).shape == (0, 8)
            operands = _operands(2, 8, 0, dtype)
            y = compute(*operands, out_dtype=torch.float16)
            assert torch.equal(y, operands[4].half().expand(2, 8))
    for name in ("sm75", "sm80", "gfx942", "xpu"):
        assert bool(_launches(5, 40, 64, torch.int8, TARGETS[name])) == (name != "sm75")
        operands = _operands(5, 40, 64, torch.float8_e4m3fn)
        assert not _launches(5, 40, 64, torch.float8_e4m3fn, TARGETS[name])
        with pretend(TARGETS[name]):
            assert_close(fp8_scaled_mm_gpu(*operands, out_dtype=torch.float32), _exact(*operands), rms=1e-6)
    assert not _launches(5, 40, 64, torch.int8, TARGETS["sm75"]._replace(name="sm70"))
    with pytest.raises(ValueError, match="both must be torch.int8"):
        int8_scaled_mm_gpu(*_operands(5, 40, 64, torch.float8_e4m3fn), out_dtype=torch.float32)


def test_gradients_in_e5m2(monkeypatch):
    monkeypatch.setattr(gpu, "_CHAIN", 256)
    for name, M, N, K in (("sm90", 17, 70, 528), ("sm90", 130, 302, 1024), ("sm89", 130, 260, 1024)):
        a, b, *rest = _operands(M, N, K, torch.float8_e4m3fn)
        a = _codes(M, K, torch.float8_e5m2)
        a[0], b[0] = 57344, 448  # the largest sum there is must not overflow
        with pretend(SMALL[name]):
            y = fp8_scaled_mm_gpu(a, b, *rest, out_dtype=torch.float32)
        exact = _exact(a, b, *rest)
        assert_close(y[0], exact[0], rms=1e-3)
        assert_close(y[1:], exact[1:], rms=3e-3)
    with pytest.raises(ValueError, match="a must be torch.float8_e4m3fn or torch.float8_e5m2, b the first"):
        fp8_scaled_mm_gpu(b, a, *rest, out_dtype=torch.float32)


def test_more_unaligned_tiles_than_counters_of_a_stream():
    (launch,) = _launches(20000, 3072, 4098, torch.float8_e4m3fn, TARGETS["sm90"])
    assert launch.grid == (30000, 2) and launch.args[7].shape == (30000,)


@pytest.mark.parametrize("name, is_chained", [("sm89", True), ("sm120", True), ("sm121", True), ("sm100", False)])
def test_which_sums_of_fp8_are_short(name, is_chained):
    target = TARGETS["sm89"]._replace(name=name)
    (launch,) = _launches(4096, 4096, 8192, torch.float8_e4m3fn, target)
    assert bool(launch.options["UNIT"]) == is_chained


def test_results_that_do_not_fit_beside_the_tiles_are_not_copied():
    for dtype in OPS:
        found = [_launches(4096, 4096, 4096, dtype, TARGETS["sm90"], out)[0] for out in (torch.float32, torch.float64)]
        assert [launch.options["TMA"] for launch in found] == [True, False]
    operands = _operands(130, 272, 160, torch.int8)
    with pretend(SMALL["sm90"]):
        y = int8_scaled_mm_gpu(*operands, out_dtype=torch.float64)
    assert y.dtype == torch.float64
    assert_close(y, _exact(*operands), rms=1e-6)


def test_nan_in_fp8_codes_reaches_its_row():
    operands = _operands(3, 40, 64, torch.float8_e4m3fn)
    operands[0].view(torch.uint8)[1, 7] = 0x7F
    with pretend(SMALL["sm90"]):
        y = fp8_scaled_mm_gpu(*operands, out_dtype=torch.bfloat16)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "xpu"])
def test_lengths_share_their_kernels(name):
    """M is a runtime argument: all lengths between two sizes of a tile need one compilation."""
    for dtype in OPS:
        kinds = {}
        for M in (1, 2, 3, 7, 15, 16, 17, 25, 31, 33, 50, 64, 70, 100, 128, 200, 700, 1111, 4096, 17776):
            for launch in _launches(M, 4096, 4096, dtype, TARGETS[name]):
                kinds[launch.kernel, str(launch.options)] = launch.options
                assert launch.options["num_warps"] in (4, 8) and launch.args[0].device.type == "meta"
        assert len(kinds) <= 7


SCALED_QUANTS = (
    (TensorQuant("int8", "row", scale_dtype="bfloat16"), "int8"),
    (TensorQuant("int8", "tensor"), "int8"),
    (TensorQuant("fp8_e4m3", "row"), "fp8_e4m3"),
    (TensorQuant("fp8_e4m3", "tensor"), "fp8_e4m3"),
)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant,activation", SCALED_QUANTS, ids=str)
def test_dynamic_mm(quant, activation, x_dtype):
    N, K = 66, 160
    packed, options = packed_case(quant, N, K)
    rms = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}[x_dtype]
    bias = torch.randn(N).to(x_dtype)
    for shape in ((2, 3, K), (K,), (17, K), (0, K)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(x_dtype)
        expected = dynamic_mm_reference(x, *packed, bias, activation=activation, **options)
        with pretend(SMALL["sm90"]):
            y = dynamic_mm_gpu(x, *packed, bias, activation=activation, **options)
            meta = [part if part is None else part.to("meta") for part in (x, *packed, bias)]
            with record_launches() as launches:
                dynamic_mm_gpu(*meta, activation=activation, **options)
        names = [getattr(launch.kernel, "fn", launch.kernel).__name__ for launch in launches]
        assert names[-1:] == ([] if 0 in shape else ["_scaled_mm_split_kernel"])
        assert y.shape == expected.shape and y.dtype == x_dtype
        if expected.numel():
            assert_close(y, expected, rms=rms)
    strided = torch.randn(K, 5).to(x_dtype).t()
    with pretend(SMALL["sm90"]):
        y = dynamic_mm_gpu(strided, *packed, None, activation=activation, **options)
    assert_close(y, dynamic_mm_reference(strided, *packed, None, activation=activation, **options), rms=rms)


def test_weights_with_zero_points_are_not_multiplied_as_codes():
    quant = TensorQuant("int8", "row", symmetric=False, zero_point_dtype="float32")
    packed, options = packed_case(quant, 66, 160)
    weight = decode_slowly(packed, quant, 160)
    x = torch.randn(17, 160, generator=torch.Generator().manual_seed(3)).bfloat16()
    codes, row_scale = quantize_rowwise_reference(x, format="int8")
    exact = codes.double() @ weight.t() * row_scale.double()
    for name in ("sm90", "sm80", "gfx942"):
        with pretend(TARGETS[name]):
            y = dynamic_mm_gpu(x, *packed, None, activation="int8", **options)
            other = dynamic_mm_gpu(x, *packed._replace(zero_point=None), None, activation="int8", **options)
        assert_product(y, exact, weight)
        assert rejects(other, exact, weight)


def test_a_block_scale_over_all_of_k():
    packed, options = packed_case(TensorQuant("fp8_e4m3", "block"), 200, 96)
    assert packed.scale.shape == (2, 1)
    x = torch.randn(4, 96)
    expected = dynamic_mm_reference(x, *packed, None, activation="fp8_e4m3", **options)
    for name in ("sm90", "sm80"):
        with pretend(TARGETS[name]):
            y = dynamic_mm_gpu(x, *packed, None, activation="fp8_e4m3", **options)
        assert_close(y, expected, rms=1e-5)


def test_the_gpu_of_the_tensors_decides(monkeypatch):
    """Whatever the first GPU of the machine is."""
    packed, options = packed_case(TensorQuant("int8", "row"), 66, 160)
    problem = Problem("int8", 160, 66, 160, torch.bfloat16, activation="int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("hf_quant.kernels.gpu.launch._device_target", lambda kind, index: TARGETS["sm75"])
    assert "no matrix units for int8" in gpu.supports_scaled(problem)
    with pretend(TARGETS["sm90"]), record_launches() as launches:
        x, *weight = (None if part is None else part.to("meta") for part in (torch.ones(2, 160), *packed))
        dynamic_mm_gpu(x.bfloat16(), *weight, None, activation="int8", **options)
    assert getattr(launches[-1].kernel, "fn", launches[-1].kernel).__name__ == "_scaled_mm_split_kernel"


def test_the_reasons():
    problem = Problem("int8", 4096, 4096, 4096, torch.bfloat16, activation="int8")
    assert gpu.supports_scaled(problem) is None
    assert "only int8 x int8" in gpu.supports_scaled(problem._replace(activation="fp8_e4m3"))
    assert "groups of 128" in gpu.supports_scaled(problem._replace(group_size=128))
    assert "only int8 x int8" in gpu.supports_scaled(problem._replace(activation=None))
