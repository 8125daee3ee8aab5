"""Every format's grid: levels are exact, rounding is to the nearest with the format's ties, values beyond saturate."""

import pytest
import torch

from hf_quant.formats import ALIASES, FORMATS, Format


ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
MINIFLOATS = {"fp8_e4m3": (4, 3, 7), "fp8_e5m2": (5, 2, 15), "fp6_e3m2": (3, 2, 3), "fp6_e2m3": (2, 3, 1)} | {
    name: (2, 1, 1) for name in ("mxfp4", "nvfp4")
}


def levels_of(format: Format) -> torch.Tensor:
    """All finite values of a format, ascending, without duplicates: fp64."""
    if format.spec.levels:
        levels = torch.tensor(format.spec.levels, dtype=torch.float64)
    elif format.name == "int8":
        levels = torch.arange(-127, 128, dtype=torch.float64)
    else:
        levels = torch.arange(256, dtype=torch.uint8).view(format.spec.dtype).double()
    return levels[levels.isfinite()].unique()


def some_values(format: Format) -> torch.Tensor:
    """Values all over the grid and beyond it, among them exact levels and ties: fp32."""
    levels = levels_of(format).float()
    ties = (levels[1:] + levels[:-1]) / 2
    spread = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    scales = torch.exp2(torch.linspace(-24, 4, 4096)) * format.max
    near = torch.cat([torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)])
    return torch.cat([levels, ties, near, spread * scales, spread * format.max / 3])


@ALL
def test_every_level_survives(format: Format) -> None:
    levels = levels_of(format).float()
    assert torch.equal(format.decode(format.encode(levels)), levels)


@ALL
def test_codes_are_the_nearest(format: Format) -> None:
    values, levels = some_values(format), levels_of(format)
    distance = (format.decode(format.encode(values)).double() - values.double()).abs()
    nearest = (values.double()[:, None] - levels).abs().amin(1)
    # Midpoints between nf4's levels are no fp32 numbers; all others are.
    assert (distance - nearest).max() <= (6e-8 if format.name == "nf4" else 0)


@ALL
def test_one_code_off_is_noticed(format: Format) -> None:
    """Negative control of the test above."""
    values, levels = some_values(format), levels_of(format)
    wrong = format.decode(format.encode(values * 1.5)).double()
    nearest = (values.double()[:, None] - levels).abs().amin(1)
    assert ((wrong - values.double()).abs() - nearest).max() > 1e-3


@ALL
def test_snap_is_decode_of_encode(format: Format) -> None:
    values = some_values(format)
    before = values.clone()
    out = torch.full_like(values, float("nan"))
    assert torch.equal(format.snap(values, out), format.decode(format.encode(values)))
    assert torch.equal(values, before), "neither may change its argument"


@ALL
def test_saturation(format: Format) -> None:
    levels = levels_of(format)
    far = torch.tensor([1e30, float("inf"), -1e30, float("-inf")])
    assert format.decode(format.encode(far)).tolist() == [levels[-1], levels[-1], levels[0], levels[0]]


@ALL
def test_zero_is_exact(format: Format) -> None:
    assert format.decode(format.encode(torch.zeros(3))).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
def test_integer_ties_go_to_even(name: str) -> None:
    format = FORMATS[name]
    low, high = levels_of(format)[[0, -1]].tolist()
    ties = torch.arange(low, high) + 0.5
    assert torch.equal(format.decode(format.encode(ties)), ties.double().round().float())
    assert format.decode(format.encode(torch.tensor([0.5, -0.5, -1.5]))).tolist() == [0.0, 0.0, -2.0]


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloat_ties_go_to_even_mantissas(name: str) -> None:
    format = FORMATS[name]
    positive = levels_of(format)[levels_of(format) >= 0]
    ties = ((positive[1:] + positive[:-1]) / 2).float()
    # Codes of positive levels ascend from 0, so that an even position is an even mantissa.
    even = torch.stack([positive[1:], positive[:-1]], 1)[torch.arange(len(ties)), torch.arange(len(ties)) % 2 ^ 1]
    assert torch.equal(format.decode(format.encode(ties)).double(), even)
    assert torch.equal(format.decode(format.encode(-ties)).double(), -even)


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloat_levels_by_definition(name: str) -> None:
    format, (exponent_bits, mantissa_bits, bias) = FORMATS[name], MINIFLOATS[name]
    expected = {0.0}
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            value = 2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction
            expected |= {value, -value}
    # OCP fp8 gives some of the highest codes to NaN and inf; fp6 and fp4 have neither.
    limit = torch.finfo(format.spec.dtype).max if format.bits == 8 else max(expected)
    assert levels_of(format).tolist() == sorted(value for value in expected if abs(value) <= limit)
    assert format.max == limit


def test_fp8_is_torchs_own_cast() -> None:
    for name in ("fp8_e4m3", "fp8_e5m2"):
        format = FORMATS[name]
        values = some_values(format)
        expected = values.clamp(-format.max, format.max).to(format.spec.dtype)
        assert torch.equal(format.encode(values).view(torch.uint8), expected.view(torch.uint8))


def test_nf4_is_the_published_table() -> None:
    # QLoRA, https://arxiv.org/abs/2305.14314, appendix E.
    published = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    assert list(FORMATS["nf4"].spec.levels) == pytest.approx(published, abs=1e-7)


def test_nf4_ties_go_down() -> None:
    format = FORMATS["nf4"]
    levels = torch.tensor(format.spec.levels, dtype=torch.float64)
    ties = ((levels[1:] + levels[:-1]) / 2).float()
    assert format.encode(ties).tolist() == list(range(15))


def test_symmetric_integers_use_every_code() -> None:
    for name in ("int4", "int3", "int2"):
        format = FORMATS[name]
        assert format.encode(torch.tensor([-format.max, format.max])).tolist() == [0, 2**format.bits - 1]


def test_aliases_are_formats() -> None:
    assert set(ALIASES.values()) <= set(FORMATS) and not set(ALIASES) & set(FORMATS)


@ALL
def test_defaults_are_allowed(format: Format) -> None:
    assert format.granularity in format.granularities
    assert (format.group_size is not None) == (format.granularity == "group")
    assert format.symmetric or format.allows_asymmetric
