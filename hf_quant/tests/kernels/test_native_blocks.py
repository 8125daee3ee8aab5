"""`native.blocks.Block`: each step beside the ops of torch that it stands for, and products within a block."""

import pytest
import torch
import torch.nn.functional as F

from hf_quant.kernels import native
from hf_quant.kernels.native.blocks import ACTIVATIONS, PAIRS, Block
from hf_quant.modules import QuantLinear
from hf_quant.quantize import quantize_


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
M = 3


@pytest.fixture(params=native.instruction_sets(), autouse=True)
def instruction_set(request):
    with native.using(request.param):
        yield


def rows(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(block: Block, *tensors, angle_stride=0):
    block.finish()(len(tensors[0]), *(tensor.data_ptr() for tensor in tensors), angle_stride=angle_stride)


def assert_near(found, expected, roundings=1.0):
    """All values within some roundings of their own size, and a little of the largest."""
    bound = roundings * torch.finfo(found.dtype).eps * (expected.float().abs() + expected.float().abs().max() / 64)
    assert ((found.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "heads"), [(64, 1), (24, 5), (2050, 1)])
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_norm(dtype, width, heads, plus_one, rounds):
    x, weight = rows(M, heads * width, dtype=dtype), rows(width, dtype=dtype, seed=1)
    block, y = Block(dtype, heads * width, heads * width), torch.empty_like(x)
    block.norm(0, 1, weight, 1e-5, plus_one=plus_one, rounds=rounds)
    run(block, x, y)
    values = x.view(M, heads, width).float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5)
    values = values.to(dtype) if rounds else values
    expected = (values.float() * (weight.float() + plus_one)).to(dtype)
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert torch.equal(y, expected.view(M, -1))  # torch adds in the same order
    assert_near(y, expected.view(M, -1), 2 if dtype == torch.float32 else 1)


def test_norm_without_weight():
    x = rows(M, 96, dtype=torch.bfloat16)
    block, y = Block(torch.bfloat16, 96, 96), torch.empty_like(x)
    block.norm(0, 1, None, 1e-6, plus_one=False, rounds=True)
    run(block, x, y)
    assert_near(y, F.rms_norm(x, (96,), eps=1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("turned", [16, 10])
@pytest.mark.parametrize("shared", [False, True])
def test_turn(dtype, pairs, turned, shared):
    heads, D = 3, 16
    x = rows(M, heads * D, dtype=dtype)
    width = turned // 2 if pairs == "halves_by_pair" else turned
    angles = rows(1 if shared else M, width, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    block, y = Block(dtype, heads * D, width, width), x.clone()
    block.turn(0, 1, 2, head_dim=D, pairs=pairs, rounds=True)
    run(block, y, cos, sin, angle_stride=0 if shared else width)
    part = x.view(M, heads, D)[..., :turned]
    if pairs.startswith("halves"):
        other = torch.cat([-part[..., turned // 2 :], part[..., : turned // 2]], -1)
    else:
        other = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    if pairs == "neighbors_by_pair":
        cos, sin = (angle[..., : turned // 2].repeat_interleave(2, -1) for angle in (cos, sin))
    if pairs == "halves_by_pair":
        cos, sin = (angle.repeat(1, 2) for angle in (cos, sin))
    expected = x.view(M, heads, D).clone()
    expected[..., :turned] = part * cos[:, None] + other * sin[:, None]
    assert torch.equal(y.view(M, heads, D)[..., turned:], expected[..., turned:])
    assert_near(y, expected.view(M, -1), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(dtype, gated, activation):
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu_squared": lambda x: F.relu(x).square(),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }
    x, up = 4 * rows(M, 1501, dtype=dtype), rows(M, 1501, dtype=dtype, seed=1)
    block, y = Block(dtype, 1501, 1501, 1501), torch.empty_like(x)
    block.gate(0, 1 if gated else None, 2, activation)
    run(block, x, up, y)
    expected = functions[activation](x.float()).to(dtype)
    expected = expected * up if gated else expected
    assert_near(y, expected, 64 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_come_through(x):
    given = torch.tensor([[x, 1.0, 0.0, -2.0]])
    block, y = Block(torch.float32, 4, 4), torch.empty_like(given)
    block.gate(0, None, 1, "relu")
    run(block, given, y)
    assert torch.equal(y.nan_to_num(7.0), F.relu(given).nan_to_num(7.0))


@pytest.mark.parametrize("config", ["int4", {"weights": "int8", "cpu_activations": "int8"}, "nf4"], ids=str)
def test_products_in_a_block_are_those_of_the_layers(config):
    first, second = torch.nn.Linear(96, 160), torch.nn.Linear(160, 64, bias=False)
    model = quantize_(torch.nn.Sequential(first, second).bfloat16(), config)
    from hf_quant.integrations.transformers.blocks.base import add_product

    assert all(isinstance(layer, QuantLinear) for layer in model)
    x, y = rows(M, 96, dtype=torch.bfloat16), torch.empty(M, 64, dtype=torch.bfloat16)
    block = Block(torch.bfloat16, 96, 64)
    h = block.buffer(160)
    add_product(block, 0, h, model[0])
    block.gate(h, None, h, "silu")
    add_product(block, h, 1, model[1])
    run(block, x, y)
    with torch.no_grad():
        expected = model[1](F.silu(model[0](x))).float()
    assert (y.float() - expected).norm() < 0.02 * expected.norm()
