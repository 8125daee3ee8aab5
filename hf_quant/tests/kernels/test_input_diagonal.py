"""Products with a transformed input (`input_diagonal`): every op and backend against plain fp64 math."""

import pytest
import torch

from hf_quant.kernels import (
    act_quantize_rowwise,
    dynamic_mm,
    grouped_mm,
    hadamard,
    hadamard_quantize_rowwise,
    layer_norm_quantize_rowwise,
    native,
    rms_norm_quantize_rowwise,
    weight_only_mm,
)
from hf_quant.kernels.cpu import ready_product
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.grouped_mm.op import grouped_mm_reference
from hf_quant.kernels.hadamard.gpu import hadamard_gpu, hadamard_quantize_rowwise_gpu
from hf_quant.kernels.rowwise.gpu import (
    act_quantize_rowwise_gpu,
    layer_norm_quantize_rowwise_gpu,
    rms_norm_quantize_rowwise_gpu,
)
from hf_quant.kernels.scaled_mm.gpu import dynamic_mm_gpu
from hf_quant.kernels.scaled_mm.op import dynamic_mm_reference
from hf_quant.kernels.sign_matrices import hadamard_matrix
from hf_quant.kernels.weight_only.gpu import weight_only_mm_gpu
from hf_quant.kernels.weight_only.op import weight_only_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import assert_close, rms_error
from hf_quant.tests.kernels.cases import assert_product, decode_slowly, packed_case, rejects
from hf_quant.tests.kernels.interpreter import install


install()
QUANTS = (
    TensorQuant("int8", "row"),
    TensorQuant("int4", "group", 64, scale_dtype="bfloat16"),
    TensorQuant("int3", "group", 32, symmetric=False, scale_dtype="bfloat16"),
    TensorQuant("nf4", "group", 32, scale_dtype="float8_e4m3fn"),
    TensorQuant("fp8_e4m3", "row"),
)
N, K = 72, 192


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def diagonal(block: int) -> torch.Tensor:
    """Signs and factors of two, which 16 bits hold, so that only transforms and products round."""
    signs = normal(K, seed=3).sign() * torch.tensor([1.0, 2.0]).repeat(K // 2)
    return signs.view(K // block, block)


def moved(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [..., K] fp64 in the basis of the weight's columns."""
    n = factors.shape[1]
    return ((x.double() * factors.view(-1).double()).unflatten(-1, (-1, n)) @ hadamard_matrix(n)).flatten(-2)


@pytest.mark.usefixtures("poison_empty", "cpu_kernels")
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_products(quant):
    packed, options = packed_case(quant, N, K)
    weight = decode_slowly(packed, quant, K)
    for block in (2, 32, 64):
        factors = diagonal(block)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for M in (1, 3, 40):
                x, bias = normal(M, K).to(dtype), normal(N, seed=2).to(dtype)
                exact = moved(x, factors) @ weight.t() + bias.double()
                computes = (weight_only_mm, weight_only_mm_reference) if M == 3 else (weight_only_mm,)
                for compute in computes:
                    y = compute(x, *packed, bias, factors, **options)
                    assert_product(y, exact, weight)
                    assert torch.equal(y, compute(x, *packed, bias, input_diagonal=factors, **options))
                assert rejects(weight_only_mm(x, *packed, bias, **options), exact, weight)


@pytest.mark.usefixtures("poison_empty", "cpu_kernels")
@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("quant", QUANTS, ids=str)
def test_products_of_codes(quant, activation):
    """The rows are quantized in the other basis, where the outlier of each is spread."""
    packed, options = packed_case(quant, N, K)
    weight, factors = decode_slowly(packed, quant, K), diagonal(64)
    for dtype in (torch.bfloat16, torch.float32):
        for M in (1, 9):
            x = normal(M, K).to(dtype)
            x[:, 5] *= 30
            codes, scale = hadamard_quantize_rowwise(x, factors, block_size=64, format=activation)
            exact = codes.double() * scale.double() @ weight.t()
            for compute in (dynamic_mm, dynamic_mm_reference):
                y = compute(x, *packed, None, factors, activation=activation, **options)
                # Sums in fp32 may round a code the other way: one step of 254 of the largest.
                assert_product(y, exact, weight, dtype=torch.bfloat16)
            plain = dynamic_mm(x, *packed, None, activation=activation, **options)
            assert rejects(plain, exact, weight, dtype=torch.bfloat16)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("activation", [None, "int8"])
def test_a_product_is_ready_for_its_own_diagonal_only(activation):
    packed, options = packed_case(QUANTS[0], N, K)
    x, first, second = normal(1, K).bfloat16(), diagonal(64), diagonal(32)
    options |= {} if activation is None else {"activation": activation}
    op = weight_only_mm if activation is None else dynamic_mm
    results = [op(x, *packed, None, factors, **options) for factors in (first, second, None, first)]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(results[0], results[3])
    if native.active() is not None:
        for factors, y in zip((first, second, None), results):
            assert torch.equal(ready_product(x, None, packed, "int8", activation, factors), y)
        assert ready_product(x, None, packed, "int8", activation, first.clone()) is None


@pytest.mark.usefixtures("poison_empty", "cpu_kernels")
@pytest.mark.parametrize("activation", [None, "int8"])
def test_experts(activation):
    quant, factors = QUANTS[1], diagonal(64)
    cases = [packed_case(quant, N, K) for _ in range(3)]
    packed = [torch.stack(parts) if parts[0] is not None else None for parts in zip(*(case[0] for case in cases))]
    options = cases[0][1] | {"activation": activation}
    x, offsets = normal(7, K).bfloat16(), torch.tensor([2, 2, 6], dtype=torch.int32)
    want = grouped_mm_reference(x, *packed, None, offsets, factors, **options)
    weight = decode_slowly(cases[0][0], quant, K)
    assert_product(grouped_mm(x, *packed, None, offsets, factors, **options), want.double(), weight)
    with pretend(TARGETS["sm90"]):
        # The transformed x is rounded to bf16 before it is quantized: some codes are neighbours of the others.
        assert_close(grouped_mm_gpu(x, *packed, None, offsets, factors, **options), want, rms=0.01)
    assert rejects(grouped_mm(x, *packed, None, offsets, **options), want.double(), weight)


@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
def test_kernels_of_gpus(target):
    packed, options = packed_case(QUANTS[1], N, K)
    weight, factors = decode_slowly(packed, QUANTS[1], K), diagonal(64)
    x = normal(5, K).bfloat16()
    with pretend(TARGETS[target]):
        assert_close(hadamard_gpu(x, factors, block_size=64), moved(x, factors), rms=3e-3)
        for n in (12, 32):
            exact = (x.double() * factors.view(-1)).unflatten(-1, (-1, n)) @ hadamard_matrix(n)
            assert_close(hadamard_gpu(x, factors, block_size=n), exact.flatten(-2), rms=3e-3)
        codes, scale = hadamard_quantize_rowwise_gpu(x, factors, block_size=64, format="int8")
        assert_close(codes.double() * scale, moved(x, factors), rms=0.02)
        exact = moved(x, factors) @ weight.t()
        assert_product(weight_only_mm_gpu(x, *packed, None, factors, **options), exact, weight)
        y = dynamic_mm_gpu(x, *packed, None, factors, activation="int8", **options)
        assert_product(y, codes.double() * scale @ weight.t(), weight)


def test_wrong_diagonals_are_refused():
    packed, options = packed_case(QUANTS[0], N, K)
    x = normal(1, K).bfloat16()
    for bad, message in (
        (torch.ones(K), r"input_diagonal is \(192,\); K=192 needs \[192 / b, b\]"),
        (torch.ones(4, 48), "b is a power of two from 2 to 1024"),
        (torch.ones(2, 64), r"input_diagonal is \(2, 64\)"),
        (torch.ones(3, 64).bfloat16(), "needs contiguous torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            weight_only_mm(x, *packed, None, bad, **options)
    with pytest.raises(ValueError, match=r"diagonal is \(64,\) torch.float32; needs 192 values"):
        hadamard(x, torch.ones(64), block_size=64)


def test_vmap_shares_the_diagonal():
    packed, options = packed_case(QUANTS[0], N, K)
    x, factors = normal(4, 2, K), diagonal(64)
    want = weight_only_mm(x, *packed, None, factors, **options)
    assert torch.equal(torch.vmap(lambda row: weight_only_mm(row, *packed, None, factors, **options))(x), want)


FUSED = {
    "rms": (rms_norm_quantize_rowwise, lambda x, w, up: ((x, w), {"eps": 1e-6})),
    "layer": (layer_norm_quantize_rowwise, lambda x, w, up: ((x, w, None, up[:1], up[1:2]), {"eps": 1e-6})),
    "silu * up": (act_quantize_rowwise, lambda x, w, up: ((x, up), {"act": "silu"})),
    "gelu": (act_quantize_rowwise, lambda x, w, up: ((x, None), {"act": "gelu_tanh"})),
}
GPU = {
    rms_norm_quantize_rowwise: rms_norm_quantize_rowwise_gpu,
    layer_norm_quantize_rowwise: layer_norm_quantize_rowwise_gpu,
    act_quantize_rowwise: act_quantize_rowwise_gpu,
}


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", FUSED)
def test_what_norms_and_activations_make_is_transformed(name):
    op, arguments = FUSED[name]
    x, weight, up = normal(5, K).bfloat16(), normal(K, seed=4).bfloat16(), normal(5, K, seed=5).bfloat16()
    given, options = arguments(x, weight, up)
    plain, plain_scale = op(*given, **options, format="int8")
    for block in (32, 64):
        factors = diagonal(block)
        codes, scale = op(*given, factors, **options, format="int8")
        want = moved(plain.double() * plain_scale, factors)
        assert_close(codes.double() * scale, want, rms=0.02)
        assert rms_error(codes.double() * scale, want.flip(-1)) > 0.5


@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_of_gpus(name, target):
    op, arguments = FUSED[name]
    # For more than 256 rows a program takes 8 of them.
    for M, format, blocks in ((3, "int8", (2, 32, 64)), (259, "fp8_e4m3", (32,))):
        x, weight, up = normal(M, K).bfloat16(), normal(K, seed=4).bfloat16(), normal(M, K, seed=5).bfloat16()
        given, options = arguments(x, weight, up)
        for block in blocks:
            factors = diagonal(block)
            codes, scale = op(*given, factors, **options, format=format)
            with pretend(TARGETS[target]):
                found = GPU[op](*given, factors, **options, format=format)
            assert_close(found[1], scale, rms=2e-4)
            assert_close(found[0].float() * found[1], codes.float() * scale, rms=0.004 if format == "int8" else 0.01)
            assert rms_error(op(*given, **options, format=format)[0].float(), codes.float()) > 0.1


def test_rows_that_do_not_fit_into_registers_are_rotated_twice():
    x = normal(2, 17408).bfloat16()
    factors = normal(17408 // 128, 128).sign()
    with pretend(TARGETS["sm90"]), record_launches() as launched:
        act_quantize_rowwise_gpu(x.to("meta"), None, factors.to("meta"), act="silu", format="int8")
    assert len(launched) == 1
    with pretend(TARGETS["sm90"]):
        codes, scale = act_quantize_rowwise_gpu(x, None, factors, act="silu", format="int8")
    want = act_quantize_rowwise(x, None, factors, act="silu", format="int8")
    assert rms_error(scale, want[1]) < 1e-5 and rms_error(codes.float(), want[0].float()) < 0.01
