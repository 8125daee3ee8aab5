"""The Triton kernel of `dequantize` gives the bits of the reference."""

from itertools import product

import pytest
import torch

from hf_quant.algorithms import geometry, quantize_matrix
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.weight_only.gpu_dequantize import dequantize_gpu
from hf_quant.kernels.weight_only.op import dequantize_reference
from hf_quant.scheme import TensorQuant
from hf_quant.tests.kernels.cases import FLOAT_ZEROS, QUANTS, swap_neighbours, with_lowest_codes
from hf_quant.tests.kernels.interpreter import install


install()
pytestmark = pytest.mark.usefixtures("poison_empty")


def _case(quant, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[..., 1, :] = 0
    packed = with_lowest_codes(quantize_matrix(weight, quant, "absmax"))
    return packed, {"format": quant.format, "group_size": geometry(quant, *shape[-2:])[1], "K": shape[-1]}


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("sm90", torch.bfloat16), ("sm90", torch.float16), ("sm90", torch.float32), ("gfx942", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("quant", [*QUANTS, *FLOAT_ZEROS], ids=str)
def test_bits_of_the_reference(quant, dtype, target):
    packed, kwargs = _case(quant, (5, 1120))
    with pretend(TARGETS[target]):
        got = dequantize_gpu(*packed, **kwargs, dtype=dtype)
    assert torch.equal(got, dequantize_reference(*packed, **kwargs, dtype=dtype))
    assert not torch.equal(dequantize_gpu(*swap_neighbours(packed), **kwargs, dtype=dtype), got)


OTHERS = [
    TensorQuant("int4", "group", 32, symmetric=False, scale_dtype="bfloat16"),
    TensorQuant("int8", "row"),
    TensorQuant("fp8_e4m3", "block"),
    TensorQuant("nvfp4", "group", 16, scale_dtype="float8_e4m3fn"),
    TensorQuant("int3", "tensor"),
    TensorQuant("int4", "group", 96, symmetric=False),  # no power of two
]
SHAPES = [(3, 7, 100), (2, 3, 2, 32), (2, 33), (2, 1), (2, 20, 64)]


@pytest.mark.parametrize("quant,shape", [*product(OTHERS, SHAPES), (OTHERS[2], (2, 140, 64))], ids=str)
def test_leading_dimensions_and_shapes_off_the_tile(quant, shape):
    packed, kwargs = _case(quant, shape)
    got = dequantize_gpu(*packed, **kwargs, dtype=torch.float32)
    assert got.shape == shape
    assert torch.equal(got, dequantize_reference(*packed, **kwargs, dtype=torch.float32))


def test_codes_at_odd_addresses_are_read_one_by_one():
    packed, kwargs = _case(TensorQuant("int8", "row"), (5, 96))
    odd = packed._replace(qdata=torch.cat([packed.qdata.new_zeros(1), packed.qdata.flatten()])[1:].view(5, 96))
    for part, codes in ((packed, 2), (odd, 1)):
        assert torch.equal(
            dequantize_gpu(*part, **kwargs, dtype=torch.float32),
            dequantize_reference(*packed, **kwargs, dtype=torch.float32),
        )
        with record_launches() as launches:
            dequantize_gpu(*part, **kwargs, dtype=torch.float32)
        assert launches[0].options["CODES"] == codes


def test_one_launch_without_reading_anything_on_the_host():
    packed, kwargs = _case(TensorQuant("int4", "group", 128), (64, 256))
    packed = type(packed)(*(None if t is None else t.to("meta") for t in packed))
    with record_launches() as launches:
        assert dequantize_gpu(*packed, **kwargs, dtype=torch.bfloat16).shape == (64, 256)
    assert len(launches) == 1
