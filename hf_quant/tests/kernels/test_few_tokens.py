"""Products of few tokens by the Gluon kernel: what it computes, in the interpreter for Gluon, and when it serves."""

import pytest
import torch

from hf_quant.kernels.gpu.hopper import plan as hopper
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.weight_only import few
from hf_quant.kernels.weight_only.gpu import weight_only_mm_gpu
from hf_quant.kernels.weight_only.op import weight_only_mm_reference
from hf_quant.scheme import TensorQuant
from hf_quant.testing import PRODUCT_RMS, assert_close
from hf_quant.tests.kernels.cases import FLOAT_ZEROS, QUANTS, packed_case


if not hopper.HAS_GLUON:
    pytest.skip("triton has no Gluon", allow_module_level=True)

from hf_quant.tests.kernels.gluon_interpreter import interpreted


pytestmark = pytest.mark.usefixtures("poison_empty")
INT4 = TensorQuant("int4", "group", 128, scale_dtype="bfloat16")
INT4_32 = TensorQuant("int4", "group", 32, scale_dtype="float8_e4m3fn")
NF4 = TensorQuant("nf4", "group", 64)
ALL = [*QUANTS, *FLOAT_ZEROS]
SERVED = [quant for quant in ALL if few.unsupported_reason(quant.format, quant.group_size or 256, 256) is None]


@pytest.fixture(autouse=True)
def _are_on(monkeypatch):
    monkeypatch.setattr(hopper, "UNTRIED", True)


def _launched(x, packed, kwargs, target="sm90"):
    """Names of the kernels that a product launches."""
    meta = [None if part is None else part.to("meta") for part in packed]
    with interpreted(), pretend(TARGETS[target]), record_launches() as launches:
        weight_only_mm_gpu(x.to("meta"), *meta, None, **kwargs)
    return [one.kernel.__name__ for one in launches]


def _product(quant, N, K, M, *, dtype=torch.bfloat16, target="sm90", edit=None):
    packed, kwargs = packed_case(quant, N, K)
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(M, K, generator=generator).to(dtype), torch.randn(N, generator=generator).to(dtype)
    assert _launched(x, packed, kwargs, target) == ["_few_mm_kernel"]
    with interpreted(edit=edit), pretend(TARGETS[target]):
        y = weight_only_mm_gpu(x, *packed, bias, **kwargs)
    assert_close(y, weight_only_mm_reference(x.float(), *packed, bias, **kwargs), rms=2 * PRODUCT_RMS[dtype])
    return y


@pytest.mark.parametrize("quant", SERVED, ids=str)
def test_every_format(quant):
    for dtype in (torch.bfloat16, torch.float16):
        _product(quant, 40, 256, 3, dtype=dtype)


@pytest.mark.parametrize("M", [1, 16])
@pytest.mark.parametrize("quant", [INT4, INT4_32, TensorQuant("int8", "row"), NF4, *FLOAT_ZEROS[:2]], ids=str)
def test_sizes_off_the_tile(quant, M):
    M = min(M, 8) if quant is NF4 else M
    short = quant.group_size or 64
    for N, K in ((8, max(short, 64)), (17, 5 * max(short, 64)), (40, 4096)):
        _product(quant, N, K, M)


def test_rows_of_one_token_are_those_of_several():
    """A sequence gets the same logits alone and in a batch of up to 8."""
    packed, kwargs = packed_case(INT4, 40, 1152)
    x = torch.randn(8, 1152, generator=torch.Generator().manual_seed(1)).bfloat16()
    with interpreted(), pretend(TARGETS["sm90"]):
        together = weight_only_mm_gpu(x, *packed, None, **kwargs)
        alone = torch.cat([weight_only_mm_gpu(row[None], *packed, None, **kwargs) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("N", "K", "registers", "expected"),
    [
        (28672, 4096, 128, 2),  # 1792 blocks: 2 warps each are 27 a multiprocessor
        (6144, 4096, 128, 8),
        (4096, 14336, 128, 8),
        (1024, 4096, 128, 16),  # fewer blocks than multiprocessors
        (1024, 4096, 168, 8),  # 16 warps would not have so many
        (128256, 4096, 128, 1),
        (1024, 256, 128, 1),  # none has less than two steps
    ],
)
def test_warps_share_k_as_the_blocks_leave_them_room(N, K, registers, expected):
    blocks, steps = -(-N // 16), -(-K // 128)
    assert few.warps_of(blocks, steps, registers, TARGETS["sm90"]) == expected


def test_when_it_serves(monkeypatch):
    def kernel(M=1, K=256, quant=INT4, target="sm90", dtype=torch.bfloat16, shift=0):
        packed, kwargs = packed_case(quant, 64, K)
        x = torch.empty(M * K + 8, dtype=dtype)[shift : shift + M * K].view(M, K)
        return _launched(x, packed, kwargs, target)

    for target in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"):
        assert kernel(target=target) == ["_few_mm_kernel"]
    for other in (
        {"M": 17},
        {"M": 9, "quant": NF4},
        {"target": "sm75", "dtype": torch.float16},
        {"target": "gfx942"},
        {"K": 288, "quant": INT4_32},  # rows of x and of codes that are no whole 64
        {"quant": TensorQuant("int3", "group", 32)},
        {"dtype": torch.float32},
    ):
        assert "_few_mm_kernel" not in kernel(**other), other
    monkeypatch.setattr(hopper, "UNTRIED", False)
    assert kernel() == ["_weight_only_mm_kernel"]


def test_a_tensor_that_does_not_start_at_16_bytes_goes_another_way():
    packed, kwargs = packed_case(INT4, 64, 256)
    x = torch.randn(257).bfloat16()[1:].view(1, 256)
    with interpreted(), pretend(TARGETS["sm90"]), record_launches() as launches:
        weight_only_mm_gpu(x, *packed, None, **kwargs)
    assert [one.kernel.__name__ for one in launches] == ["_weight_only_mm_kernel"]


# (edit of the source, what the interpreter or the comparison says of it)
BROKEN = (
    ("element + step * STEP < limit, other=0, evic", "element < limit, other=0, evic", "of a tensor of"),
    ("(first + step * (STEP * CODES)) // GROUP", "first // GROUP", "RMS|rms"),
    ("_load_x(words, x_element, is_given, step + 1,", "_load_x(words, x_element, is_given, step,", "RMS|rms"),
    ("_places(WARPS, 0, 3, X) * share", "_places(WARPS, 0, 3, X) * 0", "RMS|rms"),
    ("mask=(m < M) & (n < N)", "mask=m < M", "of a tensor of"),
)


@pytest.mark.parametrize(("text", "other", "found"), BROKEN, ids=range(len(BROKEN)))
def test_what_a_wrong_kernel_does_is_found(text, other, found):
    with pytest.raises((AssertionError, IndexError), match=found):
        _product(INT4, 41, 1152, 3, edit=(text, other))
