"""`grouped_mm`: each expert's rows as one product with its weight; rows without an expert give zeros."""

import pytest
import torch

from hf_quant.algorithms import quantize_matrix
from hf_quant.kernels import clear_prepacked, grouped_mm, grouped_mm_backward, prepacked_bytes, quantize_rowwise
from hf_quant.kernels.grouped_mm.op import grouped_mm_backward_reference, grouped_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.cases import FLOAT_ZEROS, QUANTS, assert_product, decode_slowly, rejects, with_lowest_codes


pytestmark = pytest.mark.usefixtures("poison_empty", "cpu_kernels")
E, N, K = 5, 272, 256
ENDS = (1, 1, 20, 80, 83)  # rows 83.. belong to no expert; expert 1 has none
M = 90


def experts_case(quant):
    stack = quantize_matrix(torch.randn(E, N, K, generator=torch.Generator().manual_seed(0)), quant, "absmax")
    with_lowest_codes(stack)
    weights = []
    for e in range(E):
        parts = [part if part is None else part[e] for part in stack]
        weights.append(decode_slowly(stack._make(parts), quant, K))
    options = {"format": quant.format, "group_size": quant.columns_per_scale(K)}
    return stack, torch.stack(weights), options


def exact_product(x, weights, bias):
    y = torch.zeros(M, weights.shape[1], dtype=torch.float64)
    start = 0
    for e, end in enumerate(ENDS):
        y[start:end] = x[start:end].double() @ weights[e].t() + (0 if bias is None else bias[e].double())
        start = end
    return y


@pytest.mark.parametrize("quant", [*(q for q in QUANTS if q.granularity != "tensor"), *FLOAT_ZEROS], ids=str)
def test_grouped_mm(quant):
    stack, weights, options = experts_case(quant)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    bias, x = torch.randn(E, N, generator=generator), torch.randn(M, K, generator=generator)
    for dtype in (torch.bfloat16, torch.float32):
        rows, mine = x.to(dtype), bias.to(dtype)
        exact = exact_product(rows, weights, mine)
        for compute in (grouped_mm, grouped_mm_reference):
            y = compute(rows, *stack, mine, offsets, activation=None, **options)
            assert y.dtype == dtype and y[ENDS[-1] :].count_nonzero() == 0
            assert_product(y, exact, weights[0])
        shifted = grouped_mm(rows, *stack, mine, offsets.roll(-1).clamp(max=83), activation=None, **options)
        assert rejects(shifted, exact, weights[0])
    codes, scale = quantize_rowwise(x, format="int8")
    y = grouped_mm(x, *stack, None, offsets, activation="int8", **options)
    assert_product(y, exact_product(codes.double() * scale, weights, None), weights[0])


@pytest.mark.parametrize("quant", [QUANTS[0], QUANTS[6], QUANTS[12], QUANTS[21]], ids=str)
def test_backward(quant):
    stack, weights, options = experts_case(quant)
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    grad = torch.randn(M, N, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.bfloat16, torch.float32):
        exact = exact_product(grad.to(dtype), weights.transpose(1, 2), None)
        for compute in (grouped_mm_backward, grouped_mm_backward_reference):
            grad_x = compute(grad.to(dtype), *stack, offsets, **options, K=K)
            assert grad_x.dtype == dtype
            assert_product(grad_x, exact, weights[0].t())


def test_no_rows_and_no_experts_with_rows():
    stack, _, options = experts_case(QUANTS[4])
    offsets = torch.zeros(E, dtype=torch.int32)
    for rows in (0, 3):
        y = grouped_mm(torch.randn(rows, K), *stack, None, offsets, activation=None, **options)
        assert y.shape == (rows, N) and y.count_nonzero() == 0


def test_only_experts_with_rows_are_prepacked(torch_kernels):
    clear_prepacked()
    stack, _, options = experts_case(TensorQuant("int4", "group", 128, scale_dtype="bfloat16"))
    x = torch.randn(2, K).bfloat16()
    one = torch.tensor([2, 2, 2, 2, 2], dtype=torch.int32)
    first = grouped_mm(x, *stack, None, one, activation=None, **options)
    used = prepacked_bytes()
    assert N * K // 2 <= used < N * K
    assert torch.equal(grouped_mm(x, *stack, None, one, activation=None, **options), first)  # found again
    assert prepacked_bytes() == used
    grouped_mm(x, *stack, None, torch.tensor([0, 0, 0, 0, 2], dtype=torch.int32), activation=None, **options)
    assert prepacked_bytes() == 2 * used


def test_wrong_arguments_are_refused():
    stack, _, options = experts_case(QUANTS[4])
    x, offsets = torch.randn(3, K), torch.tensor(ENDS, dtype=torch.int32)
    for bad, message in (
        ((x[None], *stack, None, offsets), "x is"),
        ((x, *(p if p is None else p[0] for p in stack), None, offsets), "3-D"),
        ((x, *stack, None, offsets.long()), "int64"),
        ((x, *stack, None, offsets[:2]), "offsets is"),
        ((x, *stack, torch.zeros(N), offsets), "bias is"),
        ((x, stack[0], stack[1][:1], None, None, None, offsets), "leading sizes"),
        ((x, *stack[:3], torch.ones(1), None, offsets), "global_scale is"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_mm(*bad, activation=None, **options)
