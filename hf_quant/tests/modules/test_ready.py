"""Products of layers that are ready: their bits, and that a change of what they were made from ends them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from hf_quant import quantize_
from hf_quant.kernels import clear_prepacked, native
from hf_quant.kernels.cpu.product import ReadyRun
from hf_quant.modules import products
from hf_quant.modules.ready import READY


pytestmark = pytest.mark.skipif(native.active() is None, reason="only native products are ready")
FORMATS = ("int8", "W8A8", "int4", "W4A8", "int3", "nf4", "fp8")


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(weights: str = "int4", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return quantize_(nn.Sequential(nn.Linear(64, 96, dtype=dtype)), weights)[0]


@pytest.fixture
def slow_calls(monkeypatch) -> list[torch.dtype]:
    """The dtypes of inputs of calls that asked for their product anew."""
    calls: list[torch.dtype] = []
    find = products.find_ready

    def found(dtype: torch.dtype, *args) -> ReadyRun | None:
        calls.append(dtype)
        return find(dtype, *args)

    monkeypatch.setattr(products, "find_ready", found)
    return calls


@torch.no_grad()
def warm(layer: nn.Module, x: Tensor, slow_calls: list[torch.dtype]) -> Tensor:
    """The layer's output for x; from then on its product is ready."""
    y = layer(x)
    layer(x)
    slow_calls.clear()
    assert torch.equal(layer(x), y) and not slow_calls
    return y


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("weights", FORMATS)
def test_inputs_of_any_shape_give_the_bits_of_the_first_call(weights, dtype, slow_calls):
    layer, x = quantized(weights, dtype), values(2, 3, 64, dtype=dtype)
    warm(layer, x, slow_calls)
    with torch.no_grad():
        inputs = (x[1, 2], x[0], x.transpose(0, 1), x[:, :0])
        found = [layer(x) for x in inputs]
        assert not slow_calls
        for y, x in zip(found, inputs):
            assert torch.equal(y, copy.deepcopy(layer)(x))


def test_inputs_that_something_watches_go_the_other_way(slow_calls):
    layer, x = quantized(), values(2, 64)
    warm(layer, x, slow_calls)
    with pytest.raises(ValueError, match="needs \\[..., 64\\]"):
        layer(values(2, 32))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    wanted = x.clone().requires_grad_()
    layer(wanted).sum().backward()
    assert wanted.grad is not None
    assert slow_calls == [torch.bfloat16]  # of autocast


def replace_codes(layer: nn.Module, other: nn.Module) -> None:
    layer._parameters["qdata"] = other._parameters["qdata"]


def replace_data(layer: nn.Module, other: nn.Module) -> None:
    layer._parameters["qdata"].data = other._parameters["qdata"].data


def write_codes(layer: nn.Module, other: nn.Module) -> None:
    layer._parameters["qdata"].copy_(other._parameters["qdata"])


def replace_bias(layer: nn.Module, other: nn.Module) -> None:
    layer.bias = nn.Parameter(torch.ones(96))


def load(layer: nn.Module, other: nn.Module) -> None:
    layer.load_state_dict(other.state_dict())


def drop_bias(layer: nn.Module, other: nn.Module) -> None:
    layer.bias = None


@pytest.mark.parametrize("change", (replace_codes, replace_data, write_codes, replace_bias, load, drop_bias))
@torch.no_grad()
def test_a_change_of_the_layer_shows_in_its_next_call(change, slow_calls):
    layer, x = quantized(), values(2, 64)
    other = quantize_(nn.Sequential(nn.Linear(64, 96)), "int4")[0]  # of other random numbers
    y = warm(layer, x, slow_calls)
    change(layer, other)
    changed = layer(x)
    assert not torch.equal(changed, y)
    fresh = copy.deepcopy(layer)
    clear_prepacked()
    assert torch.equal(fresh(x), changed)


@torch.no_grad()
def test_values_that_are_checked_are_checked_again_after_a_change(slow_calls):
    layer, x = quantized("W4A16_ASYM"), values(2, 64)
    y = warm(layer, x, slow_calls)
    layer._parameters["zero_point"].add_(1)
    assert not torch.equal(layer(x), y)
    assert slow_calls


@torch.no_grad()
def test_another_instruction_set_is_used_at_once(slow_calls):
    layer, x = quantized(), values(2, 64)
    warm(layer, x, slow_calls)
    with native.using(None):
        layer(x)
    assert slow_calls


@torch.no_grad()
def test_parameters_that_were_replaced_are_given_back(slow_calls):
    layer, x = quantized(), values(2, 64)
    warm(layer, x, slow_calls)
    before = weakref.ref(layer._parameters["qdata"])
    layer._parameters["qdata"] = nn.Parameter(before().clone(), requires_grad=False)
    layer(x)
    gc.collect()
    assert before() is None


@torch.no_grad()
def test_copies_begin_without_and_hooked_layers_have_none(slow_calls):
    layer, x = quantized(), values(2, 64)
    y = warm(layer, x, slow_calls)
    for twin in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert READY not in twin.__dict__
        assert torch.equal(twin(x), y)
    twin = copy.deepcopy(layer)
    twin.forward = twin.forward  # as a host that puts parameters in their place at every call
    for _ in range(3):
        twin(x)
    assert READY not in twin.__dict__


def test_parameters_that_another_thread_replaces_while_a_product_is_made(monkeypatch):
    layer, other, x, find = quantized(), quantized("int4"), values(2, 64), products.find_ready
    other.weight = torch.flip(other.weight.dequantize(), [0])

    def found(*args) -> ReadyRun | None:
        run = find(*args)
        if run is not None:
            layer.load_state_dict(other.state_dict(), assign=True)
        return run

    with torch.no_grad():
        before, expected = layer(x), other(x)
        monkeypatch.setattr(products, "find_ready", found)
        assert torch.equal(layer(x), before)  # which found the ready product of the replaced ones
        monkeypatch.undo()
        assert torch.equal(layer(x), expected) and torch.equal(layer(x), expected)
