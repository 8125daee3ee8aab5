"""`weight_only_mm`, `dynamic_mm` and their gradient: against plain fp64 math, every format, granularity and dtype."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_quant.algorithms import quantize_matrix
from hf_quant.kernels import (
    dequantize,
    dynamic_mm,
    quantize_rowwise,
    quantized_mm,
    weight_only_mm,
    weight_only_mm_backward,
)
from hf_quant.kernels.scaled_mm.op import dynamic_mm_reference
from hf_quant.kernels.weight_only.op import (
    dequantize_reference,
    weight_only_mm_backward_reference,
    weight_only_mm_reference,
)
from hf_quant.scheme import TensorQuant
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.cases import (
    FLOAT_ZEROS,
    QUANTS,
    SHAPES,
    assert_product,
    decode_slowly,
    packed_case,
    random_weight,
    rejects,
    swap_neighbours,
)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 3, 17, 128)  # of x: each side of the M at which the CPU paths change

pytestmark = pytest.mark.usefixtures("poison_empty", "cpu_kernels")


def exact_product(x, weight, bias=None):
    """fp64 [..., N]."""
    y = x.double() @ weight.t()
    return y if bias is None else y + bias.double()


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_weight_only_mm(shape, quant):
    N, K = shape
    packed, options = packed_case(quant, N, K)
    weight = decode_slowly(packed, quant, K)
    for dtype in DTYPES:
        for M in ROWS if dtype == torch.bfloat16 else (1, 17):
            x, bias = normal(M, K).to(dtype), normal(N, seed=2).to(dtype)
            exact = exact_product(x, weight, bias)
            y = weight_only_mm(x, *packed, bias, **options)
            assert y.dtype == dtype
            assert_product(y, exact, weight)
            assert torch.equal(weight_only_mm(x, *packed, bias, **options), y)  # nothing changes at the second use
            if M == 17:
                assert_product(weight_only_mm_reference(x, *packed, bias, **options), exact, weight)
                x[:, -(K % 32 or 32) :] = 0  # the last tile dropped
                assert rejects(weight_only_mm(x, *packed, bias, **options), exact, weight)
    if packed.qdata.dtype == torch.int32 or K % 2 == 0:
        x = normal(4, K).bfloat16()
        wrong = weight_only_mm(x, *swap_neighbours(packed), None, **options)
        assert rejects(wrong, exact_product(x, weight), weight)


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_small_beside_large_keeps_its_accuracy(quant):
    """By element: the error is small beside the sum of the magnitudes that were added up.

    Two allowances: the smallest levels of nf4 are 1.3 % off where it is computed as two terms, and x enters the int8
    GEMM in 16-bit fixed point, relative to its row's largest magnitude.
    """
    packed, options = packed_case(quant, 272, 256)
    weight = decode_slowly(packed, quant, 256)
    x = normal(4, 256).bfloat16()
    x[1] = 0
    x[2] *= 1e-4
    x[3, 5] = 3000  # one element that dominates its row
    for M in (4, 64):
        rows = x.repeat(M // 4, 1)
        y = weight_only_mm(rows, *packed, None, **options)
        assert y[1].count_nonzero() == 0 and y[:, 1].abs().max() < 1e-30
        magnitude = rows.double().abs() @ weight.abs().t()
        if quant.format == "int8":
            magnitude += rows.double().abs().amax(1, keepdim=True) * weight.abs().sum(1) * (2**-16 / 0.01)
        error = (y.double() - exact_product(rows, weight)).abs() / magnitude.clamp(min=1e-30)
        assert 1e-6 < error.max() < (0.02 if quant.format == "nf4" else 0.01)


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
def test_dynamic_mm(activation, quant):
    for N, K in SHAPES:
        packed, options = packed_case(quant, N, K)
        options["activation"] = activation
        weight = decode_slowly(packed, quant, K)
        for M, dtype in ((1, torch.bfloat16), (17, torch.bfloat16), (3, torch.float16), (17, torch.float32)):
            x, bias = normal(M, K).to(dtype), normal(N, seed=2).to(dtype)
            codes, scale = quantize_rowwise(x, format=activation)
            exact = exact_product(codes.double() * scale, weight, bias)
            y = dynamic_mm(x, *packed, bias, **options)
            assert_product(y, exact, weight)
            given = {key: value for key, value in options.items() if key != "activation"}
            again = quantized_mm(codes, scale, *packed, bias, **given, out_dtype=dtype)
            assert torch.equal(again, y) and again.dtype == dtype
        other = codes.view(torch.uint8).flip(1).view(codes.dtype)
        assert rejects(quantized_mm(other, scale, *packed, bias, **given, out_dtype=dtype), exact, weight, dtype=dtype)
        assert rejects(exact_product(x, weight, bias), exact, weight, dtype=dtype)  # x in fp32 is quantized indeed
        assert_product(dynamic_mm_reference(x, *packed, bias, **options), exact, weight)


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_backward(quant):
    for N, K in SHAPES[1:]:
        packed, options = packed_case(quant, N, K)
        options["K"] = K
        weight = decode_slowly(packed, quant, K)
        grad = normal(2, 5, N)
        grad[..., 2] /= 100  # the outlier row of the weight
        for dtype in DTYPES:
            exact = grad.to(dtype).double() @ weight
            assert_product(weight_only_mm_backward(grad.to(dtype), *packed, **options), exact, weight.t())
        assert_product(weight_only_mm_backward_reference(grad, *packed, **options), exact, weight.t())
        tiny = weight_only_mm_backward((grad * 1e-9).bfloat16(), *packed, **options)
        assert_product(tiny.float() * 1e9, exact, weight.t(), dtype=torch.bfloat16)  # nothing underflows
        grad[..., -1] = 0
        assert rejects(weight_only_mm_backward(grad, *packed, **options), exact, weight.t())


def test_backward_adds_up_blocks_of_rows():
    N, K = 5000, 1024  # more than one block of 2**22 weights
    packed, options = packed_case(QUANTS[4], N, K)
    weight = dequantize(*packed, **options, K=K, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        grad = normal(3, N).to(dtype)
        grad[:, 2] = 0
        grad_x = weight_only_mm_backward(grad, *packed, **options, K=K)
        assert_product(grad_x, grad.double() @ weight.double(), weight.t())


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_products_over_several_blocks(quant):
    N, K = 1100, 1024  # a block of 2**20 weights, and a rest
    packed, options = packed_case(quant, N, K)
    weight = dequantize(*packed, **options, K=K, dtype=torch.float32)
    for dtype, M in ((torch.bfloat16, 41), (torch.bfloat16, 2), (torch.float32, 2)):
        x = normal(M, K).to(dtype)
        assert_product(weight_only_mm(x, *packed, None, **options), exact_product(x, weight.double()), weight)


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_dequantize_is_the_reference_to_the_bit(quant):
    for N, K in SHAPES:
        packed, options = packed_case(quant, N, K)
        for dtype in DTYPES:
            expected = dequantize_reference(*packed, **options, K=K, dtype=dtype)
            assert torch.equal(dequantize(*packed, **options, K=K, dtype=dtype), expected)
        assert_close(dequantize(*packed, **options, K=K, dtype=dtype), decode_slowly(packed, quant, K), rms=1e-6)


def test_dequantize_gathered_rows_and_stacks():
    quant = QUANTS[6]
    packed, options = packed_case(quant, 64, 256)
    weight = dequantize(*packed, **options, K=256, dtype=torch.float32)
    tokens = torch.tensor([[3, 1, 3], [63, 0, 2]])
    gathered = [None if part is None else part[tokens] for part in packed]
    assert torch.equal(dequantize(*gathered, **options, K=256, dtype=torch.float32), weight[tokens])
    for quant in (QUANTS[1], QUANTS[21]):  # one scale, or one global scale, for each matrix of a stack
        packed, options = packed_case(quant, 32, 64)
        stack = [part if part is None else torch.stack([part, part]) for part in packed]
        if packed.global_scale is not None:
            stack[3] = torch.cat([packed.global_scale, 2 * packed.global_scale])
        expected = dequantize_reference(*stack, **options, K=64, dtype=torch.float32)
        assert torch.equal(dequantize(*stack, **options, K=64, dtype=torch.float32), expected)
    nothing = [None if part is None else part[:0] for part in packed_case(QUANTS[6], 64, 256)[0]]
    assert dequantize(*nothing, format="int4", group_size=64, K=256, dtype=torch.float32).shape == (0, 256)


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_shapes_and_strides_of_x(quant):
    packed, options = packed_case(quant, 272, 256)
    x = normal(2, 3, 256).bfloat16()
    y = weight_only_mm(x.view(6, 256), *packed, None, **options)
    assert torch.equal(weight_only_mm(x, *packed, None, **options), y.view(2, 3, 272))
    strided = torch.zeros(256, 3, 2, dtype=torch.bfloat16).permute(2, 1, 0).copy_(x)
    assert torch.equal(weight_only_mm(strided, *packed, None, **options), y.view(2, 3, 272))
    vector = weight_only_mm(x[0, 0], *packed, None, **options)
    assert vector.shape == (272,)
    assert_close(vector, y[0].double(), rms=6e-3)  # a unit in the last place of the largest value
    for empty in (x[:0], x[:, :0], x.view(6, 256)[:0]):
        assert weight_only_mm(empty, *packed, None, **options).shape == (*empty.shape[:-1], 272)
        assert dynamic_mm(empty, *packed, None, activation="int8", **options).shape == (*empty.shape[:-1], 272)
        grad = empty.new_zeros(*empty.shape[:-1], 272)
        assert weight_only_mm_backward(grad, *packed, K=256, **options).shape == empty.shape


@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_weights_that_are_not_contiguous(quant):
    packed, options = packed_case(quant, 272, 256)
    spread = [
        p if p is None or p.dim() < 2 else torch.stack([p.view(torch.uint8)] * 2, 1)[:, 0].view(p.dtype)
        for p in packed
    ]
    assert not spread[0].is_contiguous()
    for M in (1, 50):
        x = normal(M, 256).bfloat16()
        assert torch.equal(weight_only_mm(x, *spread, None, **options), weight_only_mm(x, *packed, None, **options))
    grad = normal(3, 272)
    expected = weight_only_mm_backward(grad, *packed, **options, K=256)
    assert torch.equal(weight_only_mm_backward(grad, *spread, **options, K=256), expected)
    expected = dequantize(*packed, **options, K=256, dtype=torch.float32)
    assert torch.equal(dequantize(*spread, **options, K=256, dtype=torch.float32), expected)


def test_autocast_and_inference_mode_change_nothing():
    for quant in (QUANTS[0], QUANTS[4], QUANTS[15], QUANTS[19]):
        for N in (64, 272):
            packed, options = packed_case(quant, N, 256)
            for dtype in DTYPES:
                x, bias = normal(5, 256).to(dtype), normal(N)
                expected = weight_only_mm(x, *packed, bias, **options)
                with torch.autocast("cpu", torch.bfloat16):
                    y = weight_only_mm(x, *packed, bias, **options)
                assert y.dtype == dtype
                assert_close(y, expected, rms=1e-6)
                with torch.inference_mode():
                    assert torch.equal(weight_only_mm(x, *packed, bias, **options), expected)


def test_threads_do_not_disturb_each_other():
    """Each thread decodes into its own scratch, and a new weight may be met by two at once."""
    cases = [packed_case(quant, 1100, 1024) for quant in QUANTS[::3]]
    x = normal(3, 1024).bfloat16()

    def products(_):
        return [weight_only_mm(x, *packed, None, **options) for packed, options in cases]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(products, range(8)))
    for result in results:
        assert all(torch.equal(mine, first) for mine, first in zip(result, products(0)))


def test_tensors_that_require_grad_are_taken():
    """The ops are not differentiable, the modules around them are; but an op alone must not fail on such input."""
    packed, options = packed_case(QUANTS[0], 272, 256)
    x, bias = normal(5, 256), normal(272)
    for op, more in ((weight_only_mm, {}), (dynamic_mm, {"activation": "int8"})):
        y = op(x.clone().requires_grad_(), *packed, bias.clone().requires_grad_(), **options, **more)
        assert torch.equal(y, op(x, *packed, bias, **options, **more))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_subnormal_fp8_codes_count(format):
    """Beside an outlier row, all other rows of a weight with one scale are subnormal: for a bf16 GEMM, zero."""
    weight = random_weight(300, 256, outlier=3000 if format == "fp8_e4m3" else 3e6)
    quant = TensorQuant(format, "tensor")
    packed = quantize_matrix(weight, quant)
    exact = decode_slowly(packed, quant, 256)
    assert exact[5].abs().max() > 0
    for M in (1, 40):
        x = normal(M, 256).bfloat16()
        y = weight_only_mm(x, *packed, None, format=format, group_size=256)
        assert_product(y, exact_product(x, exact), exact)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_a_nan_in_fp8_codes_stays(format):
    packed = quantize_matrix(random_weight(300, 256), TensorQuant(format, "row"))
    packed.qdata.view(torch.uint8)[7, 9] = 0x7F
    y = weight_only_mm(normal(2, 256).bfloat16(), *packed, None, format=format, group_size=256)
    assert y[:, 7].isnan().all() and y.isnan().sum() == 2


@pytest.mark.parametrize("exponent", [-110, -70, 66, 110])
def test_mxfp4_scales_at_the_ends_of_their_range(exponent):
    packed, options = packed_case(QUANTS[20], 272, 256)
    packed.scale.view(torch.uint8).add_(exponent)
    weight = dequantize(*packed, **options, K=256, dtype=torch.float32).double()
    x = normal(33, 256).bfloat16() * 2.0 ** -(exponent // 2)
    assert_product(
        weight_only_mm(x, *packed, None, **options), exact_product(x, weight), weight / 2.0 ** (exponent // 2)
    )


@pytest.mark.parametrize("op", [weight_only_mm, dynamic_mm])
def test_wrong_arguments_are_refused(op):
    packed, options = packed_case(QUANTS[4], 64, 256)
    x = torch.randn(2, 256)
    more = {} if op is weight_only_mm else {"activation": "int8"}
    for bad, message in (
        ((x[:, :-32], *packed, None), "K=224"),
        ((x.int(), *packed, None), "int32"),
        ((x, packed.qdata.view(torch.uint8), *packed[1:], None), "int32"),
        ((x, packed.qdata, packed.scale[:, :1], None, None, None), "groups of 128"),
        ((x, packed.qdata, packed.scale[:5], None, None, None), "5 rows"),
        ((x, *packed[:2], packed.scale.int(), None, None), "uint8"),
        ((x, *packed[:2], packed.scale[:, :1], None, None), "uint8, or a floating-point dtype"),
        ((x, *packed, torch.zeros(63)), "63"),
        ((x, *packed[:3], torch.ones(0), None), "needs 1 of"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*bad, **options, **more)
    with pytest.raises(ValueError, match="int5"):
        op(x, *packed, None, format="int5", group_size=128, **more)
    if op is dynamic_mm:
        with pytest.raises(ValueError, match="int4"):
            op(x, *packed, None, **options, activation="int4")


def test_the_same_bytes_in_another_format():
    packed, options = packed_case(QUANTS[4], 64, 256)
    x = torch.randn(2, 256)
    for format in ("int4", "nf4", "int4"):
        weight = dequantize_reference(*packed, format=format, group_size=128, K=256, dtype=torch.float64)
        y = weight_only_mm(x, *packed, None, format=format, group_size=128)
        assert_product(y, exact_product(x, weight), weight)
