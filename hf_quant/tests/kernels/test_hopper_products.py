"""The kernels for Hopper in the interpreter for Gluon: what they compute, whatever the order of their warps."""

import pytest
import torch

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.gpu.hopper import plan
from hf_quant.kernels.gpu.hopper.pairs import undecodable_reason
from hf_quant.kernels.gpu.launch import TARGETS, Target, pretend, record_launches
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.grouped_mm.op import grouped_mm_reference
from hf_quant.kernels.grouped_scaled_mm.gpu import grouped_scaled_mm_gpu
from hf_quant.kernels.scaled_mm.gpu import quantized_mm_gpu, scaled_product
from hf_quant.kernels.scaled_mm.op import quantized_mm_reference
from hf_quant.kernels.weight_only.gpu import weight_only_mm_gpu
from hf_quant.kernels.weight_only.op import weight_only_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import PRODUCT_RMS, assert_close
from hf_quant.tests.kernels.cases import FLOAT_ZEROS, QUANTS, packed_case
from hf_quant.tests.kernels.test_grouped_mm_gpu import _case as experts_case
from hf_quant.tests.kernels.test_grouped_scaled_mm import rows_case


if not plan.HAS_GLUON:
    pytest.skip("triton has no Gluon", allow_module_level=True)

from hf_quant.tests.kernels.gluon_interpreter import interpreted


pytestmark = pytest.mark.usefixtures("poison_empty")
SM90 = TARGETS["sm90"]
INT4 = TensorQuant("int4", "group", 128, scale_dtype="bfloat16")
SERVED = [quant for quant in (*QUANTS, *FLOAT_ZEROS) if undecodable_reason(CODES[quant.format]) is None]


def _tile(monkeypatch, row, parts=1, whole=0):
    monkeypatch.setattr(plan, "choose", lambda *sizes: (row, plan.Split(parts, whole)))


def _weights_alone(quant, N, K, M, *, dtype=torch.bfloat16, seed=0, edit=None):
    packed, kwargs = packed_case(quant, N, K)
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(M, K, generator=generator).to(dtype), torch.randn(N, generator=generator).to(dtype)
    with interpreted(seed, edit), pretend(SM90):
        y = weight_only_mm_gpu(x, *packed, bias, **kwargs)
    assert_close(y, weight_only_mm_reference(x.float(), *packed, bias, **kwargs), rms=2 * PRODUCT_RMS[dtype])
    return y


@pytest.mark.parametrize("quant", SERVED, ids=str)
def test_every_format(quant):
    for dtype in (torch.bfloat16, torch.float16):
        _weights_alone(quant, 72, 256, 40, dtype=dtype)


@pytest.mark.parametrize("row", plan.ROWS, ids=lambda row: f"{row.block_m}x{row.block_n}")
def test_every_tile_off_its_edges_and_parts_of_k(row, monkeypatch):
    """The parts of K are added in one order, whichever comes last; K ends inside of a step."""
    for quant in (INT4, TensorQuant("nvfp4", "group", 16, scale_dtype="float8_e4m3fn")):
        _tile(monkeypatch, row)
        _weights_alone(quant, row.block_n + 8, 1056 if quant.group_size == 16 else 1152, row.block_m + 3)
        _tile(monkeypatch, row, 4)
        results = [_weights_alone(quant, 72, 1152, 20, seed=seed) for seed in range(3)]
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    _tile(monkeypatch, row, 3, 2)  # two tiles are whole, of the four others each is three parts of K
    _weights_alone(INT4, 3 * row.block_n, 1152, 2 * row.block_m)


def _codes_of_inputs(quant, *, K=1024, seed=0, edit=None):
    packed, kwargs = packed_case(quant, 200, K)
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (40, K), generator=generator).to(torch.int8)
    given = (codes, torch.rand(40, 1, generator=generator), *packed, None)
    with interpreted(seed, edit), pretend(SM90):
        y = quantized_mm_gpu(*given, out_dtype=torch.bfloat16, **kwargs)
    assert_close(y, quantized_mm_reference(*given, out_dtype=torch.float32, **kwargs), rms=2 * PRODUCT_RMS[y.dtype])


def test_codes_of_quantized_inputs():
    _codes_of_inputs(INT4)


@pytest.mark.parametrize("row", plan.CODE_ROWS, ids=lambda row: f"{row.block_m}x{row.block_n}")
@pytest.mark.parametrize(
    "quant",
    [
        INT4,
        TensorQuant("int4", "row", scale_dtype="bfloat16"),
        TensorQuant("int4", "group", 256, scale_dtype="float8_e4m3fn"),
    ],
    ids=str,
)
def test_codes_of_4_bits_times_codes_of_inputs(quant, row, monkeypatch):
    monkeypatch.setattr(plan, "UNTRIED", True)
    for parts, K in ((1, 1024), (1, 1312 if quant.granularity == "row" else 1280), (2, 1280)):
        _tile(monkeypatch, row, parts)
        for seed in range(2):
            _codes_of_inputs(quant, K=K, seed=seed)


def test_codes_of_experts_with_4_bits_times_codes_of_inputs(monkeypatch):
    args, kwargs = experts_case(INT4, [40, 0, 3, 90], N=136, K=256, tail=5)
    expected = grouped_mm_reference(args[0].float(), *args[1:], activation="int8", **kwargs)
    monkeypatch.setattr(plan, "UNTRIED", True)
    with interpreted(), pretend(SM90):
        y = grouped_mm_gpu(*args, activation="int8", **kwargs)
    assert_close(y, expected, rms=2 * PRODUCT_RMS[y.dtype])


def test_which_codes_are_multiplied_as_they_are(monkeypatch):
    def kind(quant):
        packed, kwargs = packed_case(quant, 200, 256)
        meta = [part if part is None else part.to("meta") for part in packed]
        codes, row_scale = torch.empty(40, 256, dtype=torch.int8, device="meta"), torch.empty(40, 1, device="meta")
        with interpreted(), pretend(SM90), record_launches() as launches:
            quantized_mm_gpu(codes, row_scale, *meta, None, out_dtype=torch.bfloat16, **kwargs)
        return launches[-1].args[2].base.dtype

    assert kind(INT4) == torch.bfloat16
    monkeypatch.setattr(plan, "UNTRIED", True)
    assert kind(INT4) == torch.int8
    for quant in (
        TensorQuant("int4", "group", 32, scale_dtype="float8_e4m3fn"),
        TensorQuant("int4", "group", 128, symmetric=False, scale_dtype="bfloat16"),
        TensorQuant("nf4", "group", 128, scale_dtype="bfloat16"),
    ):
        assert kind(quant) == torch.bfloat16


@pytest.mark.parametrize("counts", [[40, 0, 3, 90], [0, 0, 130], [70, 1]], ids=str)
@pytest.mark.parametrize("activation", [None, "int8"])
@pytest.mark.parametrize("quant", [INT4, TensorQuant("int4", "tensor", symmetric=False), FLOAT_ZEROS[1]], ids=str)
def test_experts(quant, activation, counts):
    args, kwargs = experts_case(quant, counts, N=136, K=256, tail=5)
    with interpreted(), pretend(SM90):
        y = grouped_mm_gpu(*args, activation=activation, **kwargs)
    expected = grouped_mm_reference(args[0].float(), *args[1:], activation=activation, **kwargs)
    assert_close(y, expected, rms=2 * PRODUCT_RMS[y.dtype])
    assert not y[-5:].any()


FEW_BLOCKS = Target("sm90", 2, 232448)  # blocks that stay have several tiles each


def _codes_case(dtype, M, N, K):
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.int8:
        a, b = (torch.randint(-127, 128, (size, K), generator=generator).to(dtype) for size in (M, N))
    else:
        a, b = (torch.randn(size, K, generator=generator).to(dtype) for size in (M, N))
    scales = torch.rand(M, 1, generator=generator), torch.rand(N, 1, generator=generator)
    bias = torch.randn(N, generator=generator)
    exact = (a.double() @ b.double().t()) * scales[0] * scales[1].t() + bias
    return (a, b, *scales, bias), exact


def _codes(dtype, K, *, seed=0, edit=None):
    args, exact = _codes_case(dtype, 300, 520, K)
    with interpreted(seed, edit), pretend(FEW_BLOCKS):
        y = scaled_product(*args, torch.bfloat16)
    assert_close(y, exact, rms=2 * PRODUCT_RMS[y.dtype])


@pytest.mark.parametrize("K", [528, 4352])  # of fp8 the second is added up in parts
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_products_of_codes_by_blocks_that_stay(dtype, K):
    for seed in range(2):
        _codes(dtype, K, seed=seed)


@pytest.mark.parametrize("counts", [[130, 1, 0, 200], [0, 300], [150]], ids=str)
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_codes_of_experts_by_blocks_that_stay(format, counts, monkeypatch):
    monkeypatch.setattr(plan, "UNTRIED", True)
    for K in (144, 4112):
        args, exact = rows_case(counts, (format, format), N=264, K=K, tail=3)
        args[2][-3:] = float("nan")  # scales of rows that no expert has
        with interpreted(), pretend(FEW_BLOCKS):
            y = grouped_scaled_mm_gpu(*args, out_dtype=torch.bfloat16)
        assert_close(y, exact, rms=2 * PRODUCT_RMS[y.dtype])
        assert not y[-3:].any()


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_experts_with_many_quantized_rows_meet_codes_of_inputs(format, granularity, monkeypatch):
    args, kwargs = experts_case(TensorQuant(format, granularity), [130, 0, 190], N=264, K=144)
    expected = grouped_mm_reference(args[0].float(), *args[1:], activation=format, **kwargs)
    monkeypatch.setattr(plan, "UNTRIED", True)
    for target in ("sm80", "sm89", "sm90"):
        with interpreted(), pretend(TARGETS[target]):
            y = grouped_mm_gpu(*args, activation=format, **kwargs)
        assert_close(y, expected, rms=2 * PRODUCT_RMS[y.dtype])
    meta = [part if part is None else part.to("meta") for part in args]
    for target, is_untried, kernel in (
        ("sm89", False, "_grouped_scaled_mm_kernel"),
        ("sm90", False, "_hopper_mm_kernel"),
        ("sm90", True, "_hopper_scaled_mm_kernel"),
    ):
        monkeypatch.setattr(plan, "UNTRIED", is_untried)
        with interpreted(), pretend(TARGETS[target]), record_launches() as launches:
            grouped_mm_gpu(*meta, activation=format, **kwargs)
        assert [one.kernel.__name__ for one in launches] == [kernel]


WAITS = "mbarrier.wait(full.index(slot), phase)\n"
# (edit of a source, what the interpreter says of it). A kernel that is wrong in this way may pass on a GPU, mostly.
BROKEN = (
    ((f"        {WAITS}        total = ", "        total = "), "used before a copy has landed"),
    (("mma_wait(1, deps=[total])", "mma_wait(2, deps=[total])"), "where a product in flight reads"),
    (("mbarrier.arrive(empty.index(before), pred=step > 0)", "pass"), "deadlock"),
    (("pred=step > 0)", "pred=step >= 0)"), "where a product in flight reads|more arrivals|deadlock"),
    (("(BLOCK_M + BLOCK_N) * BLOCK_K)", "BLOCK_M * BLOCK_K)"), "used before a copy has landed"),
    (("hopper.warpgroup_mma_wait(0, deps=[total])\n    mbarrier", "total\n    mbarrier"), "used before its product"),
    (("[:, None] * N + n", "[:, None] * (N + 1) + n"), "of a tensor of"),
)


@pytest.mark.parametrize(("edit", "found"), BROKEN, ids=lambda part: part if isinstance(part, str) else None)
def test_what_a_wrong_kernel_does_is_found(edit, found):
    with pytest.raises((AssertionError, IndexError), match=found):
        for seed in range(8):
            _codes(torch.int8, 1040, seed=seed, edit=edit)


def test_what_a_wrong_kernel_of_weights_alone_does_is_found(monkeypatch):
    _tile(monkeypatch, plan.ROWS[0])
    with pytest.raises(AssertionError, match="deadlock"):
        _weights_alone(INT4, 72, 1152, 20, edit=("mbarrier.arrive(empty.index(before))\n", "pass\n"))
    _tile(monkeypatch, plan.ROWS[0], 2)
    with pytest.raises(AssertionError):
        _weights_alone(INT4, 72, 1152, 20, edit=("sums + i * (", "sums + 0 * ("))
    monkeypatch.setattr(plan, "UNTRIED", True)
    _tile(monkeypatch, plan.CODE_ROWS[0])
    with pytest.raises(AssertionError, match="where a product in flight reads"):
        early = "s0 = hopper.warpgroup_mma_wait(1, deps=[s0])\n        mbarrier.arrive(empty.index(before))"
        late = "mbarrier.arrive(empty.index(before))\n        s0 = hopper.warpgroup_mma_wait(1, deps=[s0])"
        for seed in range(8):
            _codes_of_inputs(INT4, K=2048, seed=seed, edit=(early, late))
