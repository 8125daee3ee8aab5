"""Quantization by the native CPU kernels: on every instruction set the bits of the torch algorithms."""

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hf_quant.algorithms import PackedWeight, quantize_matrix
from hf_quant.formats import FORMATS
from hf_quant.kernels import native
from hf_quant.scheme import TensorQuant


SETS = native.instruction_sets()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu")
ALGORITHMS = ("absmax", "mse", "norm")
INT4 = TensorQuant("int4", "group", 32, symmetric=False, scale_dtype="bfloat16")

pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    pytest.mark.skipif(not SETS, reason=f"no native kernels: {native.unavailable_reason()}"),
]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """One entry per call of the extension."""
    made, quantize = [], native.quantize
    monkeypatch.setattr(native, "quantize", lambda *args, **more: made.append(0) or quantize(*args, **more))
    return made


def random_quant(draw: random.Random, format: str) -> TensorQuant:
    spec = FORMATS[format]
    symmetric = not spec.allows_asymmetric or draw.random() < 0.5
    if spec.fixed_group_size:
        return TensorQuant(format, "group", spec.group_size, symmetric, spec.scale_dtype)
    group_size = draw.choice((None, None, 1, 7, 16, 32, 48, 64, 100, 128, 256))
    return TensorQuant(format, "group" if group_size else "row", group_size, symmetric, draw.choice(SCALES))


def random_weight(draw: random.Random, N: int, K: int) -> Tensor:
    """Of any distribution and magnitude, with ties, zeros of both signs and rows of zeros among the weights."""
    weight = torch.randn(N, K)
    weight = draw.choice(
        (
            lambda: weight,
            lambda: weight / torch.randn(N, K).abs().clamp(min=0.01),
            lambda: (weight * 3).round() / 4,
            lambda: weight * (torch.rand(N, K) < 0.05),
            lambda: weight.abs(),
            lambda: weight.sign() * 0.3 - 0.1,
        )
    )()
    weight[draw.randrange(N)] = 0
    weight = (weight / weight.abs().amax().clamp(min=1e-9)) * draw.choice((1, 1, 1, 1e-4, 1e-30, 1e-38, 1e-42, 3e38))
    dtype = draw.choice(DTYPES)
    return weight.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def by_torch(weight: Tensor, quant: TensorQuant, algorithm: str) -> PackedWeight:
    with native.using(None):
        return quantize_matrix(weight, quant, algorithm)


def assert_same_bits(packed: PackedWeight, expected: PackedWeight, where: str) -> None:
    for field, a, b in zip(PackedWeight._fields, packed, expected):
        assert (a is None) == (b is None), where
        if a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{field}: {where}"


@pytest.mark.parametrize("format", [name for name in FORMATS if native.arguments.knows(name)])
def test_the_bits_are_those_of_torch(format, calls):
    draw = random.Random(format)
    torch.manual_seed(0)
    for number in range(40):
        quant, algorithm = random_quant(draw, format), draw.choice(ALGORITHMS)
        weight = random_weight(draw, draw.randint(1, 12), 4200 if number == 0 else draw.randint(1, 300))
        where = f"{quant}, {quant.scale_dtype} scales, {algorithm}, {tuple(weight.shape)} {weight.dtype}"
        expected = by_torch(weight, quant, algorithm)
        assert not calls
        for name in SETS:
            with native.using(name):
                assert_same_bits(quantize_matrix(weight, quant, algorithm), expected, f"{name}, {where}")
        assert len(calls) == len(SETS)
        calls.clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("-nan"), float("inf"), float("-inf")])
def test_not_finite(bad, dtype, calls):
    weight = torch.randn(7, 139).to(dtype)
    for place in ((0, 0), (2, 127), (3, 128), (6, 138)):
        broken = weight.clone()
        broken[place] = bad
        for name in SETS:
            for algorithm in ALGORITHMS:
                with native.using(name), pytest.raises(ValueError, match="contains NaN or inf"):
                    quantize_matrix(broken, INT4, algorithm)
    assert len(calls) == 4 * len(SETS) * len(ALGORITHMS)


def test_threads_and_memory_layouts(calls):
    """Also weights between others, which no alignment can be expected of, and those of experts."""
    torch.manual_seed(0)
    weight = torch.randn(3, 150, 300).bfloat16()
    expected = by_torch(weight, INT4, "mse")
    shifted = torch.frombuffer(bytearray(2 * weight.numel() + 1), dtype=torch.bfloat16, offset=1)
    views = {
        "contiguous": weight,
        "off its alignment": shifted.view(weight.shape).copy_(weight),
        "of a wider matrix": torch.cat([weight, weight], -1)[..., 300:],
        "strided": torch.stack([weight, weight], -1)[..., 0],
        "transposed": weight.transpose(-1, -2).contiguous().transpose(-1, -2),
        "experts last": weight.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    }
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for how, view in views.items():
                calls.clear()
                assert_same_bits(quantize_matrix(view, INT4, "mse"), expected, f"{how}, {num_threads} threads")
                assert calls
    finally:
        torch.set_num_threads(threads)


def test_what_stays_with_torch(calls):
    weight = torch.randn(130, 130)
    for quant, algorithm in (
        (INT4, "hqq"),
        (TensorQuant("int8", "tensor"), "absmax"),
        (TensorQuant("fp8_e4m3", "block"), "mse"),
    ):
        assert_same_bits(quantize_matrix(weight, quant, algorithm), by_torch(weight, quant, algorithm), str(quant))
    quantize_matrix(weight.double(), INT4)
    assert not calls


def test_only_plain_memory_is_read(calls):
    """Views that are negated when they are read, and tensors without memory, are torch's affair."""
    weight = torch.randn(8, 64)
    quantized = quantize_matrix(torch._neg_view(weight), INT4, "absmax")
    assert not calls
    for mine, expected in zip(quantized, quantize_matrix(-weight, INT4, "absmax")):
        assert (mine is None and expected is None) or torch.equal(mine, expected)
    assert len(calls) == 1
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        quantize_matrix(torch.randn(8, 64), INT4, "absmax")
    assert len(calls) == 1
