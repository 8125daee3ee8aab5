"""Codes by rows and by columns: against exact arithmetic, and every backend against the reference."""

import pytest
import torch
from torch import Tensor

from hf_quant.kernels import native, quantize_two_way
from hf_quant.kernels.two_way import gpu, op


pytestmark = pytest.mark.usefixtures("poison_empty")
CASES = [(f, s) for f in op.DTYPES for s in op.SCALINGS]
SIZES = ((37, 53), (128, 192), (1, 1), (200, 70))


def matrix(M: int, K: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows and columns of many sizes, one of zeros, and some values that lie between two codes."""
    generator = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=generator) * torch.logspace(-3, 2, M)[:, None]
    if M > 2:
        x[M // 2], x[:, K // 3] = 0, 0
        x[0] = torch.linspace(-127, 127, K).mul(2).round() / 2
    return x.to(dtype)


def same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected))


@pytest.mark.parametrize(("format", "scaling"), CASES)
def test_values_are_near_and_scales_are_the_least(format, scaling):
    x = matrix(37, 53, torch.float32)
    codes, row_scale, codes_t, column_scale = op.quantize_two_way_reference(x, format=format, scaling=scaling)
    limit, places = op.limit_of(format), {"int8": None, "fp8_e4m3": 3, "fp8_e5m2": 2}[format]
    for values, found, scale in ((x, codes, row_scale), (x.t(), codes_t, column_scale)):
        assert found.dtype == op.DTYPES[format] and found.shape == values.shape and found.is_contiguous()
        assert scale.shape == (len(values), 1) and scale.dtype == torch.float32 and scale.is_contiguous()
        exact = values.double() / scale.double()
        assert exact.abs().max() <= limit * (1 + 1e-6)
        error = (found.double() - exact).abs()
        steps = 0.5 if places is None else exact.abs().clamp(min=2.0**-6 if places == 3 else 2.0**-14) * 2.0**-places
        assert bool((error <= (steps if places is None else steps / 2 * (1 + 2**-10)) + 1e-4).all())
        amax = values.abs().amax(1, keepdim=True) if scaling != "tensor" else values.abs().amax()
        least = torch.where(amax > 0, amax / limit, 1.0).expand_as(scale)
        if scaling == "power_of_two":
            assert torch.equal(scale.frexp()[0], torch.full_like(scale, 0.5))
            assert bool(((scale >= least) & (scale < 2 * least * (1 + 1e-6)) | (amax == 0)).all())
        else:
            torch.testing.assert_close(scale, least)
    if scaling == "tensor":
        assert torch.equal(codes.float(), codes_t.t().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_gives_the_bits_of_the_reference(dtype):
    for M, K in (*SIZES, (64, 1100)):
        x = matrix(M, K, dtype)
        for given in (x, x.t().contiguous().t(), matrix(M, 2 * K, dtype)[:, ::2], matrix(M, K + 3, dtype)[:, 3:]):
            expected = op.quantize_two_way_reference(given, format="int8")
            for name in (None, *native.instruction_sets()):
                with native.using(name):
                    assert same_bits(quantize_two_way(given, format="int8"), expected), (name, M, K)
                    alone = quantize_two_way(given, format="int8", columns=False)
                assert same_bits(alone[:2], expected[:2]) and alone[2].shape == (0, M) and alone[3].shape == (0, 1)


@pytest.mark.parametrize(("format", "scaling"), CASES)
def test_the_gpu_kernel_gives_the_reference(format, scaling):
    for (M, K), dtype in zip(SIZES, (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)):
        x = matrix(M, K + 2, dtype)[:, 2:]
        options = {"format": format, "scaling": scaling}
        expected = op.quantize_two_way_reference(x, **options)
        assert same_bits(gpu.quantize_two_way_gpu(x, **options), expected), (M, K)
        for quantize in (gpu.quantize_two_way_gpu, op.quantize_two_way_reference):
            alone = quantize(x, **options, columns=False)
            assert same_bits(alone[:2], expected[:2]) and alone[2].shape == (0, M) and alone[3].shape == (0, 1)


@pytest.mark.parametrize(("format", "scaling"), CASES)
def test_groups_are_matrices_of_their_own(format, scaling):
    """Some groups are empty, one has one row, and rows lie behind the last."""
    x, offsets, options = matrix(120, 70), torch.tensor([0, 1, 81, 81, 110]), {"format": format, "scaling": scaling}
    offsets = offsets.to(torch.int32)
    expected = op.quantize_two_way_reference(x, offsets, **options)
    codes, row_scale, codes_t, column_scale = expected
    blocks = {e: (rows, block) for e, rows, block in op.blocks_of(codes_t, 70, offsets)}
    assert list(blocks) == [1, 2, 4] and [block.shape[1] for _, block in blocks.values()] == [16, 80, 32]
    for e, (rows, block) in blocks.items():
        own, size = op.quantize_two_way_reference(x[rows], **options), rows.stop - rows.start
        assert same_bits((codes[rows], row_scale[rows], block[:, :size].contiguous(), column_scale[e]), own)
        assert not block[:, size:].float().any()
    assert not codes[110:].float().any() and bool((row_scale[110:] == 1).all() and (column_scale[[0, 3]] == 1).all())
    spread = torch.stack([offsets, -offsets], 1)[:, 0]
    for quantize in (quantize_two_way, gpu.quantize_two_way_gpu):
        assert same_bits(quantize(x, spread, **options), expected)
        alone = quantize(x, offsets, **options, columns=False)
        assert same_bits(alone[:2], expected[:2]) and alone[2].shape == (0,) and alone[3].shape == (5, 0, 1)
        codes, *_, column_scale = quantize(x, offsets * 0, **options)  # no group has a row
        assert not codes.float().any() and bool((column_scale == 1).all())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("quantize", [op.quantize_two_way_reference, quantize_two_way, gpu.quantize_two_way_gpu])
@pytest.mark.parametrize("scaling", op.SCALINGS)
def test_products_with_broken_rows_and_columns_are_not_finite(number, quantize, scaling):
    x = matrix(70, 66)
    x[3, 5] = number
    for format in op.DTYPES:
        _, row_scale, _, column_scale = quantize(x, format=format, scaling=scaling)
        broken = row_scale.isfinite().logical_not(), column_scale.isfinite().logical_not()
        if scaling == "tensor":
            assert all(bool(each.all()) for each in broken)
        else:
            assert [each.nonzero()[:, 0].tolist() for each in broken] == [[3], [5]]


def test_empty_matrices_bad_input_and_tracing():
    for shape in ((0, 4), (4, 0)):
        codes, row_scale, codes_t, column_scale = quantize_two_way(torch.ones(shape), format="int8")
        assert codes.shape == shape and codes_t.shape == shape[::-1]
        assert torch.equal(row_scale, torch.ones(shape[0], 1)) and torch.equal(column_scale, torch.ones(shape[1], 1))
    for format, scaling in CASES:
        for columns in (True, False):
            options = {"format": format, "scaling": scaling, "columns": columns}
            for offsets in (None, torch.tensor([2, 2, 4], dtype=torch.int32)):
                torch.library.opcheck(quantize_two_way, (matrix(5, 7), offsets), options)
    with pytest.raises(ValueError, match="format is 'int4'; allowed: int8, fp8_e4m3, fp8_e5m2"):
        quantize_two_way(torch.ones(2, 2), format="int4")
    with pytest.raises(ValueError, match="scaling is 'group'; allowed: row, power_of_two, tensor"):
        quantize_two_way(torch.ones(2, 2), format="int8", scaling="group")
    with pytest.raises(ValueError, match=r"x is \(2,\) torch.float32; needs a floating-point matrix"):
        quantize_two_way(torch.ones(2), format="int8")
    with pytest.raises(ValueError, match=r"offsets is \(1,\) torch.int64; needs \[E\] torch.int32"):
        quantize_two_way(torch.ones(2, 2), torch.tensor([2]), format="int8")
