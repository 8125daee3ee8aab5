"""The grouped kernel in Triton's interpreter: every distribution of rows over experts."""

import pytest
import torch

from hf_quant.algorithms import geometry, quantize_matrix
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.grouped_mm.gpu import grouped_mm_gpu
from hf_quant.kernels.grouped_mm.gpu_backward import grouped_mm_backward_gpu
from hf_quant.kernels.grouped_mm.op import grouped_mm_backward_reference, grouped_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import PRODUCT_RMS, assert_close
from hf_quant.tests.kernels.cases import FLOAT_ZEROS, QUANTS, with_lowest_codes
from hf_quant.tests.kernels.interpreter import install


install()
pytestmark = pytest.mark.usefixtures("poison_empty")
INT4 = TensorQuant("int4", "group", 64, scale_dtype="bfloat16")


def _case(quant, counts, *, N=40, K=128, dtype=torch.bfloat16, tail=0):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(counts), N, K, generator=generator)
    x = torch.randn(sum(counts) + tail, K, generator=generator).to(dtype)
    bias = torch.randn(len(counts), N, generator=generator).to(dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    return (x, *with_lowest_codes(quantize_matrix(weight, quant, "absmax")), bias, offsets), {
        "format": quant.format,
        "group_size": geometry(quant, N, K)[1],
    }


def _check(args, kwargs, activation=None):
    y = grouped_mm_gpu(*args, activation=activation, **kwargs)
    expected = grouped_mm_reference(args[0].float(), *args[1:], activation=activation, **kwargs)
    assert_close(y, expected, rms=2 * PRODUCT_RMS[y.dtype])
    return y


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_every_format(quant, target):
    args, kwargs = _case(quant, [2, 0, 3])
    with pretend(TARGETS[target]):
        _check(args, kwargs)


def test_strides_of_offsets_and_codes_at_odd_addresses():
    args, kwargs = _case(TensorQuant("int8", "row"), [2, 0, 3])
    x, qdata, *rest, bias, offsets = args
    odd = torch.cat([qdata.new_zeros(1), qdata.flatten()])[1:].view(qdata.shape)
    spread = torch.stack([offsets, -offsets], 1)[:, 0]
    y = _check(args, kwargs)
    assert torch.equal(_check((x, odd, *rest, bias, spread), kwargs), y)
    grad = torch.ones(5, 40).bfloat16()
    expected = grouped_mm_backward_gpu(grad, qdata, *rest, offsets, **kwargs, K=128)
    assert torch.equal(grouped_mm_backward_gpu(grad, odd, *rest, spread, **kwargs, K=128), expected)
    with record_launches() as launches:
        for codes in (qdata, odd):
            grouped_mm_gpu(x, codes, *rest, bias, offsets, activation=None, **kwargs)
            grouped_mm_backward_gpu(grad, codes, *rest, offsets, **kwargs, K=128)
    assert [launch.options["CODES"] for launch in launches] == [2, 2, 1, 1]


@pytest.mark.parametrize("activation", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("quant", [INT4, *(QUANTS[i] for i in (0, 6, 14, 21)), *FLOAT_ZEROS[:1]], ids=str)
def test_quantized_activations(quant, activation, target):
    args, kwargs = _case(quant, [2, 0, 3])
    with pretend(TARGETS[target]):
        _check(args, kwargs, activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "counts",
    [[1], [0, 0, 1], [5, 0, 0], [8, 9, 0, 17], [1] * 12, [0, 130, 3], [40, 24]],
    ids=lambda c: "-".join(map(str, c)),
)
def test_every_distribution_of_rows(counts, dtype):
    args, kwargs = _case(INT4, counts, dtype=dtype)
    y = _check(args, kwargs)
    if len(counts) > 1 and sum(counts[1:]) and counts[0]:
        moved = args[-1] - (torch.arange(len(counts)) == 0).int()  # the first expert loses its last row
        wrong = grouped_mm_gpu(*args[:-1], moved, activation=None, **kwargs)
        assert not torch.equal(wrong[counts[0] - 1], y[counts[0] - 1])


@pytest.mark.parametrize("counts", [[2, 3], [0, 0], [20, 30]], ids=str)
def test_rows_of_no_expert_are_zero(counts):
    args, kwargs = _case(INT4, counts, tail=19)
    y = _check(args, kwargs)
    assert not y[sum(counts) :].any() and (not sum(counts) or y[: sum(counts)].any())


def test_no_rows_and_strided_rows():
    args, kwargs = _case(INT4, [0, 0])
    assert grouped_mm_gpu(*args, activation=None, **kwargs).shape == (0, 40)
    args, kwargs = _case(INT4, [2, 3])
    wide = torch.cat([args[0], args[0]], 1)
    expected = grouped_mm_gpu(*args, activation=None, **kwargs)
    assert torch.equal(grouped_mm_gpu(wide[:, :128], *args[1:], activation=None, **kwargs), expected)


def test_one_launch_whatever_the_distribution_and_nothing_read_on_the_host():
    args, kwargs = _case(INT4, [3, 0, 5, 1])
    args = [None if t is None else t.to("meta") for t in args]
    with record_launches() as launches:
        grouped_mm_gpu(*args, activation=None, **kwargs)
    assert [c.kernel.__name__ for c in launches] == ["_grouped_mm_kernel"]


@pytest.mark.parametrize("counts", [[3, 0, 5], [2, 60, 0]], ids=str)
def test_without_matrix_units_many_rows_go_expert_by_expert(counts):
    args, kwargs = _case(INT4, counts, dtype=torch.float16)
    grad = torch.ones(sum(counts), 40, dtype=torch.float16)
    with pretend(TARGETS["sm75"]):
        _check(args, kwargs)
        with record_launches() as launches:
            grouped_mm_gpu(*args, activation=None, **kwargs)
            served = [one.kernel.__name__ for one in launches]
            grouped_mm_backward_gpu(grad, *args[1:5], args[6], **kwargs, K=128)
        assert served == (["_grouped_mm_kernel"] if sum(counts) <= 16 * len(counts) else [])
        assert len(launches) == len(served), "no gradient of fp32 FMAs"
        _check_backward(args, kwargs)


def test_lengths_share_their_kernels():
    args, kwargs = _case(INT4, [1] * 8, N=64)
    args = [None if t is None else t.to("meta") for t in args]
    found = set()
    for M in (1, 3, 8, 20, 40, 100, 128, 300, 1000, 4096):
        with record_launches() as launches:
            grouped_mm_gpu(
                torch.empty(M, 128, dtype=torch.bfloat16, device="meta"), *args[1:], activation=None, **kwargs
            )
        found.add(tuple(sorted((k, str(v)) for k, v in launches[0].options.items())))
    assert 3 <= len(found) <= 5


def _check_backward(args, kwargs, K=128):
    _, *packed, bias, offsets = args
    M = args[0].shape[0]
    grad = torch.randn(M, bias.shape[1], generator=torch.Generator().manual_seed(3)).to(args[0].dtype)
    got = grouped_mm_backward_gpu(grad, *packed, offsets, **kwargs, K=K)
    expected = grouped_mm_backward_reference(grad.float(), *packed, offsets, **kwargs, K=K)
    assert_close(got, expected, rms=2 * PRODUCT_RMS[got.dtype])
    cut = grad.clone()
    cut[:, -8:] = 0
    wrong = grouped_mm_backward_gpu(cut, *packed, offsets, **kwargs, K=K)
    assert not M or not torch.equal(wrong, got)
    return got


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS, TensorQuant("int4", "group", 96, symmetric=False)], ids=str)
def test_gradient_in_every_format(quant, target):
    args, kwargs = _case(quant, [2, 0, 3])
    with pretend(TARGETS[target]):
        _check_backward(args, kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [[1], [8, 9, 0, 17], [0, 130, 3]], ids=lambda c: "-".join(map(str, c)))
def test_gradient_for_every_distribution(counts, dtype):
    args, kwargs = _case(INT4, counts, dtype=dtype, tail=5)
    got = _check_backward(args, kwargs)
    assert not got[sum(counts) :].any()


def test_gradient_off_the_tile_reads_nothing_on_the_host():
    args, kwargs = _case(TensorQuant("int8", "row"), [3, 2], N=70, K=150)
    _check_backward(args, kwargs, K=150)
    _, *packed, _, offsets = (None if t is None else t.to("meta") for t in args)
    with record_launches() as launches:
        grouped_mm_backward_gpu(
            torch.empty(5, 70, dtype=torch.float16, device="meta"), *packed, offsets, **kwargs, K=150
        )
    assert len(launches) == 1
