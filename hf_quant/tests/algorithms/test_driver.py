"""`quantize_matrix`: every shape, dtype and memory layout gives what plain arithmetic on the whole weight gives."""

import pytest
import torch
from torch import Tensor

from hf_quant.algorithms import (
    ALGORITHMS,
    PackedWeight,
    default_algorithm,
    driver,
    empty_packed,
    geometry,
    quantize_matrix,
)
from hf_quant.formats import FORMATS
from hf_quant.kernels.weight_only.op import dequantize_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import assert_sqnr


def scheme(format: str, granularity: str | None = None, *, symmetric: bool | None = None) -> TensorQuant:
    """A scheme with the format's defaults where nothing else is said."""
    defaults = FORMATS[format]
    granularity = granularity or defaults.granularity
    group_size = (defaults.group_size or 32) if granularity == "group" else None
    dtype = "bfloat16" if defaults.scale_dtype == "model" else defaults.scale_dtype
    return TensorQuant(
        format, granularity, group_size, defaults.symmetric if symmetric is None else symmetric, scale_dtype=dtype
    )


SCHEMES = [
    scheme(format.name, granularity, symmetric=symmetric)
    for format in FORMATS.values()
    for granularity in format.granularities
    for symmetric in ((True, False) if format.allows_asymmetric else (True,))
]
ALL = pytest.mark.parametrize("quant", SCHEMES, ids=str)


def random_weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def decoded(packed: PackedWeight, quant: TensorQuant, shape: torch.Size) -> Tensor:
    group_size = geometry(quant, *shape[-2:])[1]
    return dequantize_reference(*packed, format=quant.format, group_size=group_size, K=shape[-1], dtype=torch.float32)


def assert_equal(packed: PackedWeight, expected: PackedWeight) -> None:
    for field, a, b in zip(PackedWeight._fields, packed, expected):
        assert (a is None) == (b is None), field
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, field
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), field


def plain_absmax(weight: Tensor, quant: TensorQuant) -> Tensor:
    """What symmetric absmax makes of a [N, K] weight whose groups are whole, by the definition: fp32 [N, K]."""
    format, (N, K) = FORMATS[quant.format], weight.shape
    rows, columns = geometry(quant, N, K)
    tiles = weight.float().view(N // rows, rows, K // columns, columns).transpose(1, 2)
    scale = tiles.abs().amax((-1, -2), keepdim=True) / format.max
    scale = scale.to(getattr(torch, quant.scale_dtype)).float()
    values = format.decode(format.encode(tiles / scale)) * scale
    return values.transpose(1, 2).reshape(N, K)


@pytest.mark.parametrize(
    "quant",
    [q for q in SCHEMES if q.symmetric and q.format not in ("mxfp4", "nvfp4")],
    ids=str,
)
def test_absmax_is_its_definition(quant: TensorQuant) -> None:
    weight = random_weight(128, 256)
    packed = quantize_matrix(weight, quant, "absmax")
    assert torch.equal(decoded(packed, quant, weight.shape), plain_absmax(weight, quant))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_asymmetric_absmax_is_its_definition(bits: int) -> None:
    quant = TensorQuant(f"int{bits}", "group", 32, symmetric=False, scale_dtype="bfloat16")
    weight = random_weight(8, 96) + 0.5
    groups, top = weight.view(8, 3, 32), 2**bits - 1
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / top).bfloat16().float()
    zero_point = (-low / scale).round().clamp(0, top)
    codes = ((groups / scale).round() + zero_point).clamp(0, top)
    packed = quantize_matrix(weight, quant, "absmax")
    assert torch.equal(packed.scale.float(), scale.squeeze(-1))
    assert torch.equal(packed.zero_point.float(), zero_point.squeeze(-1))
    assert torch.equal(decoded(packed, quant, weight.shape), ((codes - zero_point) * scale).view(8, 96))


def test_mxfp4_scale_is_the_rule_of_ocp() -> None:
    """2**(floor(log2(amax)) - 2): section 6.3 of the OCP Microscaling formats specification 1.0."""
    weight = random_weight(4, 64).abs() + 0.1
    packed = quantize_matrix(weight, scheme("mxfp4"), "absmax")
    expected = torch.exp2(weight.view(4, 2, 32).amax(-1).log2().floor() - 2)
    assert torch.equal(packed.scale.float(), expected)


@pytest.mark.parametrize("factor", [1.0, 1.9, 3e-38, 1e35])
def test_nvfp4_uses_the_upper_half_of_the_range_of_its_scales(factor: float) -> None:
    weight = random_weight(4, 64) * factor
    packed = quantize_matrix(weight, scheme("nvfp4"), "absmax")
    assert packed.global_scale.log2().frac().item() == 0
    assert 224 <= packed.scale.float().max() <= 448


def test_the_whole_range_of_nvfp4_is_used_where_its_end_is_a_power_of_two() -> None:
    packed = quantize_matrix(torch.full((1, 16), 6 * 448 * 2.0**-9), scheme("nvfp4"), "absmax")
    assert packed.global_scale.tolist() == [2.0**-9] and packed.scale.float().tolist() == [[448.0]]


@ALL
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ragged_shapes(quant: TensorQuant, algorithm: str) -> None:
    weight = random_weight(130, 139, dtype=torch.bfloat16)
    packed = quantize_matrix(weight, quant, algorithm)
    assert_shapes_of(packed, empty_packed(weight.shape, quant, "meta"))
    bits = FORMATS[quant.format].bits
    at_least = {8: 24, 6: 20, 4: 9, 3: 6, 2: 2}[bits]
    assert_sqnr(decoded(packed, quant, weight.shape), weight.float(), at_least=at_least, at_most=6.1 * bits)


def assert_shapes_of(packed: PackedWeight, expected: PackedWeight) -> None:
    for a, b in zip(packed, expected):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "nf4"])
def test_most_weights_have_one_global_scale(name: str) -> None:
    """A power of two at which neither the largest nor small scales are cut off."""
    quant = TensorQuant(name, "group", 32, scale_dtype="float8_e4m3fn")
    found = {}
    for power in (-100, -20, -5, -4, -3, 0, 3, 4, 5, 100):
        weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        weight *= 2.0**power * 0.999 / weight.abs().max()
        packed = quantize_matrix(weight, quant, "absmax")
        assert packed.global_scale.log2().frac() == 0 and packed.scale.float().abs().max() < 448
        assert packed.scale.float().abs().min() > 2.0**-6, "smaller ones have fewer digits"
        found[power] = packed.global_scale.item()
    assert len({found[power] for power in (-3, 0, 3, 4)}) == 1
    assert found[5] == 256 * found[4] and found[-4] == found[4] / 256
    assert quantize_matrix(torch.zeros(4, 64), quant, "absmax").global_scale == found[0]


@ALL
def test_experts_are_quantized_one_by_one(quant: TensorQuant) -> None:
    weight = random_weight(5, 9, 70)
    weight[2] *= 100
    together = quantize_matrix(weight, quant, "mse")
    for i in range(5):
        single = quantize_matrix(weight[i], quant, "mse")
        global_scale = None if together.global_scale is None else together.global_scale[i : i + 1]
        assert_equal(
            PackedWeight(*(None if t is None else t[i] for t in together))._replace(global_scale=global_scale), single
        )


@pytest.mark.parametrize(
    "quant", [scheme("int4"), scheme("int8"), scheme("nvfp4"), scheme("fp8_e4m3", "block")], ids=str
)
def test_more_leading_dimensions_and_views(quant: TensorQuant) -> None:
    weight = random_weight(2, 3, 140, 40)
    expected = quantize_matrix(weight, quant)
    transposed = weight.transpose(-1, -2).contiguous().transpose(-1, -2)
    strided = torch.stack([weight, weight], -2)[..., 0, :]
    for view in (transposed, strided):
        assert not view.is_contiguous()
        assert_equal(quantize_matrix(view, quant), expected)


@ALL
@pytest.mark.parametrize("elements", [64, 1000, 128 * 139])
def test_blocks_change_nothing(quant: TensorQuant, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(3, 7, 139)
    expected = quantize_matrix(weight, quant, "absmax")
    monkeypatch.setattr(driver, "_BLOCK_ELEMENTS_CPU", elements)
    assert_equal(quantize_matrix(weight, quant, "absmax"), expected)


@ALL
def test_every_byte_is_written(quant: TensorQuant, poison_empty: None) -> None:
    weight = random_weight(3, 139)
    assert torch.isfinite(decoded(quantize_matrix(weight, quant), quant, weight.shape)).all()
    assert_equal(quantize_matrix(weight, quant), quantize_matrix(weight.clone(), quant))


@ALL
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zeros_stay_zeros(quant: TensorQuant, algorithm: str) -> None:
    weight = random_weight(4, 256)
    weight[1:3] = 0
    packed = quantize_matrix(weight, quant, algorithm)
    assert decoded(packed, quant, weight.shape)[1:3].count_nonzero() == 0
    if quant.granularity in ("row", "group") and packed.global_scale is None:
        assert (packed.scale[1:3].float() == 1).all()


@ALL
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1e20, 3e38])
def test_extreme_magnitudes_stay_finite(quant: TensorQuant, algorithm: str, magnitude: float) -> None:
    weight = random_weight(4, 64).clamp(-1, 1) * magnitude
    packed = quantize_matrix(weight, quant, algorithm)
    assert torch.isfinite(packed.scale.float()).all()
    assert not torch.isnan(decoded(packed, quant, weight.shape)).any()


@pytest.mark.parametrize("quant", SCHEMES[::3], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (2, 138), (6, 70)])
def test_not_finite(quant: TensorQuant, bad: float, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_BLOCK_ELEMENTS_CPU", 300)
    weight = random_weight(7, 139, dtype=torch.bfloat16)
    weight[place] = bad
    for algorithm in ALGORITHMS:
        with pytest.raises(ValueError, match="layers.3.weight contains NaN or inf"):
            quantize_matrix(weight, quant, algorithm, name="layers.3.weight")


def test_wrong_arguments() -> None:
    quant = scheme("int4")
    with pytest.raises(ValueError, match="algorithm is 'best'; allowed: absmax, mse"):
        quantize_matrix(random_weight(4, 64), quant, "best")
    for weight in (torch.zeros(4, 64, dtype=torch.int8), torch.zeros(64), torch.zeros(0, 64)):
        with pytest.raises(ValueError, match="needs a floating-point matrix"):
            quantize_matrix(weight, quant)


def test_the_weight_is_not_changed() -> None:
    weight = random_weight(8, 128)
    before = weight.clone()
    quantize_matrix(weight, scheme("int4"))
    assert torch.equal(weight, before)


@ALL
def test_the_default_is_an_algorithm(quant: TensorQuant) -> None:
    weight = random_weight(4, 64)
    assert_equal(quantize_matrix(weight, quant), quantize_matrix(weight, quant, default_algorithm(quant)))


def test_scratch_is_bounded() -> None:
    """A whole-tensor scale must not need the whole tensor in fp32."""
    for quant in (scheme("int8", "tensor"), scheme("int4"), scheme("fp8_e4m3", "block")):
        weight = torch.empty(1, dtype=torch.bfloat16).expand(65536, 4096)
        packed = PackedWeight(*(t if t is None else t.to("meta") for t in empty_packed(weight.shape, quant, "meta")))
        scratch = driver.Quantization(weight, quant, packed).scratch
        assert sum(t.numel() * t.element_size() for t in scratch) <= 7 * 2**20
