"""Quantized convolutions are those of the dequantized kernel: values and gradients, in 1, 2 and 3 dimensions."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_quant import QuantizerConfig, dequantize_, quantize_
from hf_quant.modules import QuantConv1d, QuantConv2d, QuantConv3d
from hf_quant.testing import PRODUCT_RMS, all_scheme_fields, assert_close, assert_sqnr


SCHEMES = all_scheme_fields()
CLASSES = {1: (nn.Conv1d, QuantConv1d), 2: (nn.Conv2d, QuantConv2d), 3: (nn.Conv3d, QuantConv3d)}
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 4},
    "depthwise": {"groups": 16},
    "same": {"padding": "same"},
    "same, dilated": {"padding": "same", "dilation": 2},
    "valid": {"padding": "valid"},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "replicate, same": {"padding": "same", "padding_mode": "replicate"},
}


def conv(dims: int, fields="int4", dtype=torch.float32, kernel: int = 3, **options) -> tuple[nn.Module, nn.Module]:
    """(quantized, the host's class with the dequantized kernel)."""
    torch.manual_seed(0)
    layer = CLASSES[dims][0](16, 32, kernel, dtype=dtype, **options)
    reference = copy.deepcopy(layer)
    quantize_(layer, QuantizerConfig(None, modules={"": fields}))
    reference.weight.data = layer.dequantize_weight()
    return layer, reference


def image(dims: int, dtype=torch.float32, batch: int = 2, size: int = 7) -> Tensor:
    return torch.randn(batch, 16, *[size] * dims, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dims", CLASSES)
def test_values_and_gradients(dims, options):
    if options.get("padding_mode") == "reflect" and dims == 3:
        options = {**options, "padding": 1}
    layer, reference = conv(dims, **options)
    assert type(layer) is CLASSES[dims][1] and isinstance(layer, CLASSES[dims][0])
    x, same = image(dims).requires_grad_(), image(dims).requires_grad_()
    y, expected = layer(x), reference(same)
    assert_close(y, expected, rms=1e-5)
    grad = torch.randn(y.shape)
    y.backward(grad)
    expected.backward(grad)
    assert_close(x.grad, same.grad, rms=1e-5)
    if layer.bias is not None:
        assert_close(layer.bias.grad, reference.bias.grad, rms=1e-5)
    assert not layer.qdata.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_every_scheme(fields, dtype):
    layer, reference = conv(2, fields, dtype, kernel=5)
    x = image(2, dtype)
    assert layer(x).dtype == dtype
    assert_close(layer(x), reference(x), rms=PRODUCT_RMS[dtype])


def test_it_is_quantized_and_close():
    torch.manual_seed(0)
    kernel = nn.Conv2d(16, 32, 3).weight
    layer, _ = conv(2, "int8")
    assert layer.qdata.shape == (32, 16 * 9)
    assert_sqnr(layer.dequantize_weight(), kernel, at_least=40, at_most=55)
    restored = dequantize_(layer)
    assert type(restored) is nn.Conv2d and restored.weight.shape == kernel.shape


@pytest.mark.parametrize("dims", CLASSES)
def test_unbatched_and_empty_inputs(dims):
    layer, reference = conv(dims, padding="same")
    x = image(dims)
    assert_close(layer(x[0]), reference(x[0]), rms=1e-5)
    assert layer(x[:0]).shape == reference(x[:0]).shape


def test_activations_stay_in_16_bit():
    layer, reference = conv(2, {"weights": "int8", "activations": "int8"})
    assert layer.scheme.activation is None
    assert_close(layer(image(2)), reference(image(2)), rms=1e-5)


def test_autocast_copies_and_what_builds_a_layer_of_its_type():
    layer, reference = conv(2)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(image(2)), reference(image(2))
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_close(y, expected, rms=PRODUCT_RMS[torch.bfloat16])
    for found in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(found(image(2)), layer(image(2)))
    assert type(type(layer)(4, 8, kernel_size=1)) is nn.Conv2d  # as PEFT builds an adapter
    assert repr(layer) == "QuantConv2d(16, 32, kernel_size=(3, 3), stride=(1, 1), int4 g32)"


@pytest.mark.parametrize("options", [{"padding": 1}, {"padding": "same", "padding_mode": "reflect"}])
def test_compiles_to_one_graph_for_every_length(options):
    layer, _ = conv(1, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 6, 7, 8, 13, 17, 31, 64, 65, 100):
        x = image(1, size=length).requires_grad_()
        y = compiled(x)
        assert_close(y, layer(x), rms=1e-5)
        (grad,), (expected,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(layer(x).sum(), x)
        assert_close(grad, expected, rms=1e-5)
    assert counter.frame_count == 1


def test_second_derivatives_and_forward_mode():
    torch.manual_seed(0)
    layer = quantize_(
        nn.Sequential(nn.Conv1d(8, 16, 3, padding=1, stride=2)), {"weights": None, "modules": {"0": "int4"}}
    )
    reference, x, found = dequantize_(copy.deepcopy(layer)), torch.randn(2, 8, 15), []
    for module in (layer, reference):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(leaf).tanh().sum(), leaf, create_graph=True)
        second = torch.autograd.grad(grad.square().sum(), (leaf, module[0].bias))
        found.append((*second, torch.func.jvp(module, (x,), (x.cos(),))[1], torch.func.jacrev(module)(x)))
    for ours, expected in zip(*found):
        assert_close(ours, expected, rms=1e-6)
