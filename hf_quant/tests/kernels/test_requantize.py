"""New values of int8 weights: the mean of random rounding, scales that last, all backends against the reference."""

import pytest
import torch
from torch import Tensor

from hf_quant.kernels import native, requantize_rows_
from hf_quant.kernels.requantize import gpu, op


pytestmark = pytest.mark.usefixtures("poison_empty")
REFERENCE = op.requantize_rows__reference


def weight(N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales, and new values: rows that stay, that grow, that shrink, of zeros, and one unchanged."""
    generator = torch.Generator().manual_seed(N + K)
    codes = torch.randint(-127, 128, (N, K), generator=generator, dtype=torch.int8)
    codes[:, 0] = 127
    scale = torch.logspace(-6, 3, N).view(N, 1) * 1.2345678
    values = codes * scale * 0.97 + scale * torch.randn(N, K, generator=generator) * 0.01
    for row, factor in ((1, 1.1), (2, 0.3), (3, 0.0)):
        values[row % N] = codes[row % N] * scale[row % N] * factor
    if N > 4:
        values[4] = codes[4].float() * scale[4]
    return codes, scale, values


def run(update, given: tuple[Tensor, Tensor, Tensor], **options) -> tuple[Tensor, Tensor]:
    codes, scale, values = (each.clone() for each in given)
    update(codes, scale, values, **options)
    return codes, scale


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected))


@pytest.mark.parametrize("options", [{}, {"low": 7, "high": 3}, {"low": -5, "high": 2**31, "row": 11}])
def test_every_backend_gives_the_bits_of_the_reference(options):
    for N, K in ((7, 53), (5, 1030), (1, 1), (40, 1024), (0, 8)):
        given = weight(N, K) if N else (torch.empty(0, K, dtype=torch.int8), torch.empty(0, 1), torch.empty(0, K))
        expected = run(REFERENCE, given, **options)
        for name in (None, *native.instruction_sets()):
            with native.using(name):
                assert same(run(requantize_rows_, given, **options), expected), (name, N, K)
        assert same(run(gpu.requantize_rows__gpu, given, **options), expected), (N, K)


def test_a_scale_lasts_while_it_fits():
    codes, scale, values = weight(7, 53)
    new_codes, new_scale = run(requantize_rows_, (codes, scale, values), low=1)
    kept = (new_scale == scale).view(-1).tolist()
    assert kept == [True, False, False, False, True, True, True]
    assert torch.equal(new_codes[4], codes[4])  # whose values have not changed
    assert new_scale[3] == 1 and bool((new_codes[3] == 0).all())
    for row in (1, 2):
        torch.testing.assert_close(new_scale[row], values[row].abs().amax().view(1) / 120)
    error = (new_codes * new_scale - values).abs() / new_scale
    assert error.max() <= 1 + 1e-5


def test_random_rounding_has_the_mean_that_the_nearest_code_loses():
    codes, scale = torch.full((400, 512), 100, dtype=torch.int8), torch.full((400, 1), 0.5)
    values = torch.full((400, 512), 50.005)  # a hundredth of a step above
    drawn, _ = run(requantize_rows_, (codes, scale, values), low=3)
    assert abs(drawn.float().mean().item() - 100.01) < 4 * (0.01 / 400 / 512) ** 0.5
    nearest, _ = run(requantize_rows_, (codes, scale, values))
    assert torch.equal(nearest, codes)


def test_parts_of_a_weight_round_as_the_whole():
    given = weight(9, 70)
    whole = run(requantize_rows_, given, low=5, high=1)
    parts = [run(requantize_rows_, tuple(t[a:b] for t in given), low=5, high=1, row=a) for a, b in ((0, 4), (4, 9))]
    assert same(tuple(torch.cat(both) for both in zip(*parts)), whole)
    moved = run(requantize_rows_, tuple(t[4:] for t in given), low=5, high=1)
    assert not torch.equal(moved[0], whole[0][4:])


@pytest.mark.parametrize("update", [REFERENCE, requantize_rows_, gpu.requantize_rows__gpu])
def test_a_row_with_nan_is_not_finite_and_others_are_as_without(update):
    codes, scale, values = weight(7, 53)
    expected = run(update, (codes, scale, values), low=1)
    for number in (float("nan"), float("inf")):
        broken = values.clone()
        broken[5, 3] = number
        found = run(update, (codes, scale, broken), low=1)
        assert not found[1][5].isfinite().any()
        rest = [0, 1, 2, 3, 4, 6]
        assert same((found[0][rest], found[1][rest]), (expected[0][rest], expected[1][rest]))


def test_wrong_tensors_raise():
    codes, scale, values = weight(7, 53)
    for wrong in (
        (codes.float(), scale, values),
        (codes, scale.double(), values),
        (codes, scale.view(-1), values),
        (codes, scale, values.bfloat16()),
        (codes, scale, values[:, 1:]),
        (codes[:, ::2], scale, values[:, ::2].contiguous()),
    ):
        with pytest.raises(ValueError, match="needs|must be contiguous"):
            requantize_rows_(*wrong)
