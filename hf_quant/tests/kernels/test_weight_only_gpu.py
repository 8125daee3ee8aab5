"""The fused weight-only kernel in Triton's interpreter: every format, branch and edge, against the exact product."""

import pytest
import torch

from hf_quant.algorithms import empty_packed, geometry, quantize_matrix
from hf_quant.kernels.gpu import ready
from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference
from hf_quant.kernels.weight import weight_of
from hf_quant.kernels.weight_only import gpu
from hf_quant.kernels.weight_only.gpu import fused_mm, weight_only_mm_gpu
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.cases import (
    FLOAT_ZEROS,
    QUANTS,
    assert_product,
    decode_slowly,
    packed_case,
    rejects,
    swap_neighbours,
)
from hf_quant.tests.kernels.interpreter import install


install()
pytestmark = pytest.mark.usefixtures("poison_empty")


def _x(M, K, dtype, seed=1):
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_every_format(quant, target):
    N, K, M = 72, 288, 3
    packed, kwargs = packed_case(quant, N, K)
    weight = decode_slowly(packed, quant, K)
    for dtype in (torch.bfloat16, torch.float16):
        x = _x(M, K, dtype)
        bias = torch.randn(N).to(dtype)
        with pretend(TARGETS[target]):
            y = weight_only_mm_gpu(x, *packed, bias, **kwargs)
        exact = x.double() @ weight.t() + bias.double()
        assert_product(y, exact, weight)


INT4 = TensorQuant("int4", "group", 128, scale_dtype="bfloat16")
ASYMMETRIC = TensorQuant("int4", "group", 64, symmetric=False, scale_dtype="bfloat16")
INT8 = TensorQuant("int8", "row", scale_dtype="bfloat16")


def _kernels(M, quant, N, K, target, dtype=torch.bfloat16):
    """Launches of a call, from meta tensors."""
    packed = empty_packed((N, K), quant, "meta")
    kwargs = {"format": quant.format, "group_size": geometry(quant, N, K)[1]}
    with pretend(TARGETS[target]), record_launches() as launches:
        weight_only_mm_gpu(torch.empty(M, K, dtype=dtype, device="meta"), *packed, None, **kwargs)
    return launches


@pytest.mark.parametrize("M", [1, 3, 17, 40, 128])
@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
@pytest.mark.parametrize("quant", [INT4, *FLOAT_ZEROS[:2]], ids=str)
def test_every_branch_of_m(quant, M, target):
    N, K = 200, 384
    packed, kwargs = packed_case(quant, N, K)
    weight, x = decode_slowly(packed, quant, K), _x(M, K, torch.bfloat16)
    with pretend(TARGETS[target]):
        y = weight_only_mm_gpu(x, *packed, None, **kwargs)
    assert_product(y, x.double() @ weight.t(), weight)
    assert rejects(y, x[:, :256].double() @ weight[:, :256].t(), weight)  # without the last step of K


@pytest.mark.parametrize("M", [128, 200])
@pytest.mark.parametrize(
    "quant", [q for q in (*QUANTS, *FLOAT_ZEROS) if q.format in ("int3", "int2", "nf4", "fp6_e3m2", "int8")], ids=str
)
def test_many_tokens_in_every_number_of_codes_per_element(quant, M):
    packed, kwargs = packed_case(quant, 72, 288)
    weight, x = decode_slowly(packed, quant, 288), _x(M, 288, torch.bfloat16)
    assert_product(weight_only_mm_gpu(x, *packed, None, **kwargs), x.double() @ weight.t(), weight)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("quant", [INT4, INT8, TensorQuant("fp8_e4m3", "block"), FLOAT_ZEROS[0]], ids=str)
def test_quantized_activations(quant, activation, target):
    packed, kwargs = packed_case(quant, 72, 288)
    weight = decode_slowly(packed, quant, 288)
    codes, row_scale = quantize_rowwise_reference(_x(3, 288, torch.bfloat16), format=activation)
    bias = torch.randn(72).bfloat16()
    with pretend(TARGETS[target]):
        y = fused_mm(codes, weight_of(*packed, **kwargs, K=288), bias, row_scale, dtype=torch.bfloat16)
    assert_product(y, codes.double() @ weight.t() * row_scale.double() + bias.double(), weight)
    assert rejects(y, codes.double() @ weight.t() * row_scale.double().roll(1, 0) + bias.double(), weight)


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("format", ["int4", "nf4", "int3"])
def test_scales_in_fp8_give_the_bits_of_the_same_scales_in_16_bit(format, target):
    """Their decoding, and the products of 4-bit codes with them, are exact."""
    N, K, M = 72, 256, 3
    quant = TensorQuant(format, "group", 32, symmetric=format != "int3", scale_dtype="float8_e4m3fn")
    packed, kwargs = packed_case(quant, N, K)
    packed.scale[5] = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)  # zero and subnormal numbers
    packed.scale[6] = packed.scale[6].float().neg().to(torch.float8_e4m3fn)
    weight = decode_slowly(packed, quant, K)
    for dtype in (torch.bfloat16, torch.float16):
        x, found = _x(M, K, dtype), []
        for scale in (packed.scale, packed.scale.to(dtype)):
            with pretend(TARGETS[target]):
                found.append(weight_only_mm_gpu(x, *packed._replace(scale=scale), None, **kwargs))
        assert_product(found[0], x.double() @ weight.t(), weight)
        assert torch.equal(*found)


def test_wrong_weights_are_noticed():
    packed, kwargs = packed_case(INT4, 64, 256)
    weight, x = decode_slowly(packed, INT4, 256), _x(5, 256, torch.bfloat16)
    exact = x.double() @ weight.t()
    assert_product(weight_only_mm_gpu(x, *packed, None, **kwargs), exact, weight)
    assert rejects(weight_only_mm_gpu(x, *swap_neighbours(packed), None, **kwargs), exact, weight)
    moved = packed._replace(scale=packed.scale.roll(1, 0))
    assert rejects(weight_only_mm_gpu(x, *moved, None, **kwargs), exact, weight)


@pytest.mark.parametrize("quant", [INT4, ASYMMETRIC, INT8], ids=str)
def test_split_k_gives_the_same_bits_every_time_and_leaves_the_counters_at_zero(quant, monkeypatch):
    from hf_quant.kernels.weight_only import gpu

    counters = []

    def keep(count, device):
        counters.append(torch.zeros(count, dtype=torch.int32))
        return counters[-1]

    monkeypatch.setattr(gpu, "tile_counters", keep)
    N, K, M = 40, 2048, 2
    packed, kwargs = packed_case(quant, N, K)
    weight, x = decode_slowly(packed, quant, K), _x(M, K, torch.bfloat16)
    bias = torch.randn(N).bfloat16()
    first = weight_only_mm_gpu(x, *packed, bias, **kwargs)
    assert_product(first, x.double() @ weight.t() + bias.double(), weight)
    assert torch.equal(first, weight_only_mm_gpu(x, *packed, bias, **kwargs))
    assert len(counters) == 2 and not any(c.any() for c in counters)
    assert _kernels(M, quant, N, K, "sm90")[0].options["SPLIT_K"] >= 4


@pytest.mark.parametrize(
    ("quant", "K", "options"),
    [
        (INT8, 2088, {"EVEN_K": False, "ALIGN": 4, "BLOCK_K": 128}),  # rows of 1044 elements
        (INT4, 2088, {"EVEN_K": False, "ALIGN": 8, "BLOCK_K": 128}),  # of 544: its groups are filled up
        (INT4, 2112, {"EVEN_K": False, "ALIGN": 1, "BLOCK_K": 128}),
    ],
    ids=str,
)
def test_k_of_no_whole_steps(quant, K, options):
    packed, kwargs = packed_case(quant, 40, K)
    weight, x = decode_slowly(packed, quant, K), _x(2, K, torch.bfloat16)
    y = weight_only_mm_gpu(x, *packed, None, **kwargs)
    assert_product(y, x.double() @ weight.t(), weight)
    assert rejects(y, x[:, :-8].double() @ weight[:, :-8].t(), weight)
    launched = _kernels(2, quant, 40, K, "sm90")[0].options
    assert launched.items() >= options.items() and launched["SPLIT_K"] > 1


@pytest.mark.parametrize("shape", [(0, 64, 256), (2, 1, 256), (3, 33, 33), (2, 130, 100), (1, 5, 7)], ids=str)
@pytest.mark.parametrize("quant", [INT4, INT8, TensorQuant("int3", "row"), TensorQuant("nf4", "group", 64)], ids=str)
def test_shapes_off_the_tile(quant, shape):
    M, N, K = shape
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    packed = quantize_matrix(weight, quant, "absmax")
    x = _x(M, K, torch.float16)
    y = weight_only_mm_gpu(x, *packed, None, format=quant.format, group_size=geometry(quant, N, K)[1])
    assert y.shape == (M, N)
    if M:
        exact = decode_slowly(packed, quant, K)
        assert_product(y, x.double() @ exact.t(), exact)


def test_strides_and_leading_dimensions():
    packed, kwargs = packed_case(INT4, 64, 256)
    weight = decode_slowly(packed, INT4, 256)
    wide = torch.randn(2, 3, 512).bfloat16()
    for x in (wide[..., :256], wide[..., ::2], wide.transpose(0, 1)[..., 256:]):
        y = weight_only_mm_gpu(x, *packed, None, **kwargs)
        assert y.shape == (*x.shape[:-1], 64)
        assert_product(y, x.double() @ weight.t(), weight)
    # codes whose rows are views of a wider tensor
    wide = torch.cat([packed.qdata, packed.qdata], 1)
    strided = packed._replace(qdata=wide[:, : packed.qdata.shape[1]])
    assert torch.equal(weight_only_mm_gpu(x, *strided, None, **kwargs), y)
    columns = packed._replace(scale=packed.scale.t().contiguous().t())
    assert torch.equal(weight_only_mm_gpu(x, *columns, None, **kwargs), y)
    packed, kwargs = packed_case(ASYMMETRIC, 64, 256)
    y = weight_only_mm_gpu(x, *packed, None, **kwargs)
    columns = packed._replace(zero_point=packed.zero_point.t().contiguous().t())
    assert torch.equal(weight_only_mm_gpu(x, *columns, None, **kwargs), y)


@pytest.mark.parametrize("K", [2048, 288], ids=["split K", "one part"])
def test_strides_of_bias_and_row_scale(K):
    packed, kwargs = packed_case(INT8, 40, K)
    codes, row_scale = quantize_rowwise_reference(_x(3, K, torch.bfloat16), format="int8")
    bias = torch.randn(40).bfloat16()
    w = weight_of(*packed, **kwargs, K=K)
    expected = fused_mm(codes, w, bias, row_scale, dtype=torch.bfloat16)
    strided = torch.stack([bias, -bias], 1)[:, 0], torch.cat([row_scale, -row_scale], 1)[:, :1]
    assert strided[0].stride() == (2,) and strided[1].stride() == (2, 1)
    assert torch.equal(fused_mm(codes, w, *strided, dtype=torch.bfloat16), expected)
    assert not torch.equal(fused_mm(codes, w, -bias, row_scale, dtype=torch.bfloat16), expected)


def test_codes_at_odd_addresses_are_read_one_by_one():
    packed, kwargs = packed_case(INT8, 40, 288)
    x = _x(3, 288, torch.bfloat16)
    odd = torch.cat([packed.qdata.new_zeros(1), packed.qdata.flatten()])[1:].view(packed.qdata.shape)
    assert odd.data_ptr() % 2
    y = weight_only_mm_gpu(x, *packed, None, **kwargs)
    found = {}
    for qdata in (packed.qdata, odd):
        moved = packed._replace(qdata=qdata)
        assert torch.equal(weight_only_mm_gpu(x, *moved, None, **kwargs), y)
        with record_launches() as launches:
            weight_only_mm_gpu(x, *moved, None, **kwargs)
        found[qdata.data_ptr() % 2] = launches[0].options["CODES"]
    assert found == {0: 2, 1: 1}


def test_no_values_of_k():
    bias = torch.randn(8).bfloat16()
    weight = torch.empty(8, 0, dtype=torch.int8), torch.empty(8, 0), None, None
    y = weight_only_mm_gpu(torch.empty(2, 3, 0).bfloat16(), *weight, bias, format="int8", group_size=1)
    assert torch.equal(y, bias.expand(2, 3, 8))


def test_nothing_is_hidden_by_masks():
    """Not a number in one row of x stays in its row, and reaches all of it."""
    packed, kwargs = packed_case(INT4, 72, 256)
    x = _x(3, 256, torch.bfloat16)
    x[1, 5] = float("nan")
    y = weight_only_mm_gpu(x, *packed, None, **kwargs)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_older_tritons_get_tiles_that_fit_the_tensor_memory(monkeypatch):
    for is_old in (False, True):
        monkeypatch.setattr(gpu, "IS_OLD_TRITON", is_old)
        for row in gpu.CONFIGS["sm100"]:
            for codes in (1, 2, 4, 8):
                sm100, sm90 = (gpu.tiling(row, codes, 128, 4096, table) for table in ("sm100", "sm90"))
                if is_old:
                    assert sm100.block_m * sm100.block_n * codes <= 2**15 and sm100.block_m >= min(sm90.block_m, 32)
                else:
                    assert sm100 == sm90


@pytest.mark.parametrize("target", ["sm80", "sm89", "sm90", "sm100", "gfx942"])
def test_lengths_share_their_kernels(target):
    """M is no constant: within a branch every length is the same compiled kernel."""
    found = set()
    for M in (1, 2, 5, 7, 8, 12, 16, 17, 30, 32, 33, 50, 64, 65, 100, 127, 128, 200, 256, 700):
        for one in _kernels(M, INT4, 4096, 4096, target, torch.float16):
            if "weight_only" in one.kernel.__name__ or "hopper" in one.kernel.__name__:
                found.add(tuple(sorted((k, str(v)) for k, v in one.options.items() if k != "SPLIT_K")))
    assert 4 <= len(found) <= 7


@pytest.mark.parametrize("name", ["sm75", "sm70"])
def test_without_matrix_units_many_tokens_and_bf16_go_to_the_vendor(monkeypatch, name):
    monkeypatch.setitem(TARGETS, name, TARGETS["sm75"]._replace(name=name))
    for M, dtype, served in (
        (4, torch.float16, True),
        (32, torch.float16, True),
        (33, torch.float16, False),
        (4, torch.bfloat16, False),
    ):
        kernels = {c.kernel.__name__ for c in _kernels(M, INT4, 64, 256, name, dtype)}
        assert kernels == ({"_weight_only_mm_kernel"} if served else set())
        packed, kwargs = packed_case(INT4, 64, 256)
        weight, x = decode_slowly(packed, INT4, 256), _x(M, 256, dtype)
        with pretend(TARGETS[name]):
            assert_product(weight_only_mm_gpu(x, *packed, None, **kwargs), x.double() @ weight.t(), weight)


@pytest.mark.parametrize("target", ["sm80", "sm89", "sm90", "sm100", "gfx942"])
def test_decode_fills_the_multiprocessors_twice(target):
    for N, K in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
        launch = _kernels(1, INT4, N, K, target)[0]
        tiles, split = launch.grid
        assert (
            split == 16
            or K // launch.options["BLOCK_K"] < 2 * split * 4
            or (tiles * split >= 2 * TARGETS[target].multiprocessors)
        )


def test_bad_input():
    packed, kwargs = packed_case(INT4, 64, 256)
    with pytest.raises(ValueError, match="K=300"):
        weight_only_mm_gpu(torch.randn(2, 300).bfloat16(), *packed, None, **kwargs)
    with pytest.raises(ValueError, match="needs .* in fp16, bf16 or fp32"):
        weight_only_mm_gpu(torch.ones(2, 256, dtype=torch.int32), *packed, None, **kwargs)


@pytest.mark.parametrize("M", [1, 8, 12, 30, 60])
@pytest.mark.parametrize("quant", [INT4, ASYMMETRIC, TensorQuant("nf4", "group", 64, scale_dtype="bfloat16")], ids=str)
def test_tiles_by_mma_sync_on_hopper(quant, M, monkeypatch):
    """x is read by four columns where its rows allow it, else one by one, to the same bits."""
    N, K = 72, 512
    packed, kwargs = packed_case(quant, N, K)
    weight, x = decode_slowly(packed, quant, K), _x(M, K, torch.bfloat16)
    elsewhere = torch.empty(M * K + 1, dtype=x.dtype)[1:].view(M, K).copy_(x)
    monkeypatch.setattr(hopper, "HAS_GLUON", False)
    with pretend(TARGETS["sm90"]):
        with record_launches() as launches:
            fused_mm(x, weight_of(*packed, **kwargs, K=K), None, dtype=x.dtype)
            fused_mm(elsewhere, weight_of(*packed, **kwargs, K=K), None, dtype=x.dtype)
        found, other = (weight_only_mm_gpu(each, *packed, None, **kwargs) for each in (x, elsewhere))
    options = [launch.options for launch in launches]
    batch = options[0]["BATCH"]
    assert batch == (options[0]["num_warps"] if options[0]["BLOCK_M"] == 32 else 1)
    assert options[0]["WIDE_X"] == (batch == 1 and options[0]["BLOCK_M"] <= 32) and not options[1]["WIDE_X"]
    if M <= 8:
        assert options[0]["BLOCK_K"] > quant.group_size
    assert_product(found, x.double() @ weight.t(), weight)
    assert torch.equal(found, other)


def _arguments(launch) -> list:
    """The arguments of a launch, tensors by their place; without the result and its parts, which are new."""
    new = [i for i, arg in enumerate(launch.args) if isinstance(arg, torch.Tensor)][-3:]
    given = [arg for i, arg in enumerate(launch.args) if i not in new]
    return [(arg.data_ptr(), arg.dtype, arg.get_device()) if hasattr(arg, "data_ptr") else arg for arg in given]


NVFP4 = TensorQuant("nvfp4", "group", 16, scale_dtype="float8_e4m3fn")


@pytest.mark.parametrize("quant", [INT4, ASYMMETRIC, NVFP4], ids=str)
def test_a_product_that_is_ready_launches_the_same(quant):
    N, K, M = 200, 1024, 3
    packed, kwargs = packed_case(quant, N, K)
    weight, x, bias = (*packed, None), _x(M, K, torch.bfloat16), torch.randn(N).bfloat16()
    with pretend(TARGETS["sm90"]), record_launches() as launches:
        assert ready.ready_product(x, bias, weight, quant.format) is None
        fused_mm(x, weight_of(*packed, **kwargs, K=K), bias, dtype=x.dtype)
        assert ready.ready_product(x.view(1, M, K), bias, weight, quant.format).shape == (1, M, N)
    first, again = launches
    assert first.options["SPLIT_K"] > 1 and first.options["HAS_BIAS"]
    assert (first.kernel, first.grid, first.options) == (again.kernel, again.grid, again.options)
    assert _arguments(first) == _arguments(again)


def test_when_a_product_is_ready():
    packed, kwargs = packed_case(INT4, 72, 256)
    w, x = weight_of(*packed, **kwargs, K=256), torch.randn(2, 3, 256)
    rows, result = x.view(6, 256), torch.ones(6, 72)

    def is_ready(x=x, bias=None, weight=(*packed, None)) -> bool:
        return ready.ready_product(x, bias, weight, "int4") is not None

    ready.make_ready(rows, w, lambda: lambda x, bias: result)
    assert ready.ready_product(x, None, (*packed, None), "int4").shape == (2, 3, 72)
    assert is_ready(rows) and not is_ready(x[:1]) and not is_ready(x.double())
    assert not is_ready(torch.randn(256, 6).t()), "rows that are not contiguous"
    assert not is_ready(weight=(packed.qdata.clone(), *packed[1:], None))
    ready.forget()
    assert not is_ready()
    ready.make_ready(rows, w, lambda: lambda x, bias: result)
    packed.scale.mul_(2)
    assert not is_ready(), "the weight has changed"
    many = torch.randn(ready.MOST_TOKENS + 1, 256)
    ready.make_ready(many, w, lambda: lambda x, bias: result)
    assert not is_ready(many)
