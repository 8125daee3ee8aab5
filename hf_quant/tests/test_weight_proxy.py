"""The `weight` of a quantized module: looks like the 16-bit weight, computes on it, and takes new values."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_quant import QuantizerConfig, QuantLinear, quantize_
from hf_quant.testing import assert_close, assert_sqnr, sqnr
from hf_quant.weight_proxy import WeightProxy


def linear(weights: str = "int8", dtype=torch.float32, seed: int = 0, N: int = 96) -> QuantLinear:
    torch.manual_seed(seed)
    return quantize_(nn.Linear(64, N, dtype=dtype), weights)


def table() -> nn.Embedding:
    torch.manual_seed(0)
    return quantize_(nn.Embedding(96, 64), QuantizerConfig(None, modules={"": "int8"}))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_looks_like_the_16_bit_weight(dtype):
    layer = linear(dtype=dtype)
    weight = layer.weight
    assert isinstance(weight, WeightProxy) and isinstance(weight, torch.Tensor)
    assert weight.shape == (96, 64) and weight.dtype == dtype and weight.device == torch.device("cpu")
    assert weight.dim() == weight.ndim == 2 and weight.size(0) == 96 and weight.numel() == 96 * 64
    assert weight.is_floating_point() and not weight.requires_grad and not weight.is_meta
    assert repr(weight) == f"WeightProxy((96, 64), {dtype}, int8 row)"
    assert weight.data_ptr() == 0 or weight.untyped_storage().nbytes() == 0  # it holds no memory


def test_the_weight_is_no_parameter_and_not_in_the_state():
    layer = linear()
    assert "weight" not in dict(layer.named_parameters()) and "weight" not in layer.state_dict()
    assert hasattr(layer, "weight") and layer.weight is not None


READS = {
    "to": lambda w: w.to(torch.float64),
    "half": lambda w: w.half(),
    "clone": lambda w: w.clone(),
    "detach and clone": lambda w: w.detach().clone(),
    "data": lambda w: w.data.clone(),
    "contiguous": lambda w: w.contiguous() + 0,
    "transpose": lambda w: w.t() + 0,
    "transpose by dims": lambda w: w.transpose(-1, 0) * 2,
    "transpose twice": lambda w: w.T.mT - 1,
    "matmul": lambda w: torch.ones(3, 64) @ w.t(),
    "row": lambda w: w[5],
    "rows": lambda w: w[torch.tensor([1, 5])],
    "slice": lambda w: w[2:9, ::2],
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "sub": lambda w: w - torch.ones(96, 64),
    "mul": lambda w: w * 2,
    "norm": lambda w: torch.linalg.norm(w, dim=1),
    "abs max": lambda w: w.abs().max(),
    "isfinite": lambda w: torch.isfinite(w).all(),
    "cat": lambda w: torch.cat([w, torch.zeros(1, 64)]),
    "stack": lambda w: torch.stack([w, w]),
    "empty_like": lambda w: torch.zeros_like(w),
    "new_zeros": lambda w: w.new_zeros(3),
    "svd": lambda w: torch.linalg.svdvals(w),
    "chunk": lambda w: w.chunk(2)[1],
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(64, 96),
    "einsum": lambda w: torch.einsum("nk,nk->n", w, w),
    "numpy": lambda w: torch.from_numpy(w.dequantize().numpy().copy()),
    "allclose": lambda w: torch.tensor(torch.allclose(w, w.dequantize())),
    "F.linear": lambda w: F.linear(torch.ones(3, 64), w),
    "F.linear keywords": lambda w: F.linear(input=torch.ones(3, 64), weight=w, bias=torch.ones(96)),
    "F.embedding": lambda w: F.embedding(torch.tensor([3, 4]), w),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_compute_on_the_dequantized_weight(read):
    layer = linear()
    codes = layer.qdata.clone()
    found, expected = read(layer.weight), read(layer.dequantize_weight().as_subclass(_Plain))
    assert type(found) is Tensor
    torch.testing.assert_close(found, expected.as_subclass(Tensor), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.qdata, codes)


class _Plain(Tensor):
    """A dense weight with the one method of the proxy that tensors do not have."""

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor)


def set_attribute(layer, value):
    layer.weight = nn.Parameter(value)


def set_data(layer, value):
    layer.weight.data = value


def copy_into(layer, value):
    layer.weight.data.copy_(value)


def add_difference(layer, value):
    layer.weight.data += value - layer.weight


def subtract_difference(layer, value):
    layer.weight.data -= layer.weight - value


def augment_weight(layer, value):
    layer.weight += value - layer.weight


def in_place_add(layer, value):
    layer.weight.add_(value - layer.weight)


def in_place_sub(layer, value):
    layer.weight.data.sub_(layer.weight - value)


def set_all_items(layer, value):
    layer.weight[:] = value


def set_items_row_by_row(layer, value):
    layer.weight.data[:48] = value[:48]
    layer.weight.data[48:] = value[48:]


def copy_into_another_shape(layer, value):
    layer.weight.data.view(-1).copy_(value.flatten())


def write_into_views_of_a_view(layer, value):
    view = layer.weight.data.reshape(8, 12, 64)
    view[:3] = value.view(8, 12, 64)[:3]
    torch.add(value.view(8, 12, 64)[3:], 0, out=view[3:])


def write_columns_in_inference_mode(layer, value):
    with torch.inference_mode():
        layer.weight.data.T.index_copy_(0, torch.arange(64), value.T)


WRITES = [set_attribute, set_data, copy_into, add_difference, subtract_difference, augment_weight, in_place_add]
WRITES += [in_place_sub, set_all_items, set_items_row_by_row]
WRITES += [copy_into_another_shape, write_into_views_of_a_view, write_columns_in_inference_mode]


@pytest.mark.parametrize("write", WRITES)
def test_writes_quantize_the_new_value(write):
    layer, value = linear(), noise(96, 64)
    qdata, scale = layer.qdata, layer.scale
    assert sqnr(layer.dequantize_weight(), value) < 3
    write(layer, value)
    assert_sqnr(layer.dequantize_weight(), value, at_least=38, at_most=50)
    assert_close(layer(torch.eye(64)), value.t() + layer.bias, rms=1e-2)
    assert layer.qdata is qdata and layer.scale is scale  # in place: an optimizer or a tie would notice
    assert isinstance(layer.weight, WeightProxy) and not layer.qdata.requires_grad


def test_zero_fill_and_multiply_in_place():
    layer = linear()
    before = layer.dequantize_weight()
    layer.weight.mul_(2)
    assert_close(layer.dequantize_weight(), 2 * before, rms=1e-2)
    layer.weight.data.zero_()
    assert (layer.dequantize_weight() == 0).all()
    layer.weight.fill_(0.5)
    assert_close(layer.dequantize_weight(), torch.full((96, 64), 0.5), rms=1e-2)


@pytest.mark.parametrize("weights", ["int4", "W4A16_ASYM", "int2", "nf4", "fp8", "fp6", "mxfp4", "nvfp4", "W8A8"])
def test_every_kind_of_scheme_takes_new_values(weights):
    layer = linear(weights)
    again = quantize_(nn.Linear(64, 96), weights)
    value = layer.dequantize_weight()
    again.weight = noise(96, 64)
    again.weight = value
    # What lies on the grid stays there (a clip search may move the grid a little).
    assert sqnr(again.dequantize_weight(), value) > (8 if weights == "int2" else 18)


def test_bad_values_are_refused_and_change_nothing():
    layer = linear()
    codes = layer.qdata.clone()
    with pytest.raises(ValueError, match=r"weight is \(64, 96\); needs \(96, 64\)"):
        layer.weight = noise(64, 96)
    with pytest.raises(ValueError, match="contains NaN or inf"):
        layer.weight.data = torch.full((96, 64), float("nan"))
    with pytest.raises(TypeError, match="cannot assign str as 'weight'"):
        layer.weight = "zeros"
    with pytest.raises(TypeError, match="cannot assign NoneType as 'weight'"):
        layer.weight = None
    assert torch.equal(layer.qdata, codes)


def test_views_of_the_data_read_as_the_dequantized_weight():
    layer = linear()
    codes, weight = layer.qdata.clone(), layer.dequantize_weight()
    view = layer.weight.data.view(-1)[64:]
    assert torch.equal(view, weight.view(-1)[64:]) and type(view + 1) is Tensor
    for found in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), layer.weight.data[torch.tensor([1, 5])]):
        assert type(found) is Tensor
    assert torch.equal(layer.qdata, codes)


def test_it_is_not_trained():
    weight = linear().weight
    with pytest.raises(ValueError, match="stored as int8 row and cannot be trained: train an adapter"):
        weight.requires_grad = True
    weight.requires_grad = False


def test_iadd_gives_a_plain_tensor_so_that_the_sum_is_rounded_once():
    weight = linear().weight.data
    weight += 1.0
    assert type(weight) is Tensor


def test_gradients_reach_what_is_computed_with_it():
    layer = linear()
    x, magnitude = noise(3, 64).requires_grad_(), torch.ones(96, 1, requires_grad=True)
    y = x @ (layer.weight * magnitude).t()  # as DoRA does
    y.sum().backward()
    weight = layer.dequantize_weight()
    assert_close(x.grad, weight.sum(0).expand(3, -1), rms=1e-5)
    assert_close(magnitude.grad, (weight * x.detach().sum(0)).sum(1, keepdim=True), rms=1e-5)


PRODUCTS = {
    "F.linear": lambda x, w: F.linear(x, w),
    "T": lambda x, w: x @ w.T,
    "t": lambda x, w: torch.mm(x, w.t()),
    "transpose": lambda x, w: torch.matmul(x, w.transpose(-1, -2)),
    "of a transposed one": lambda x, w: F.linear(x, w.T.mT),
    "with columns": lambda x, w: (w @ x.T).T,
    "with columns of a batch": lambda x, w: torch.matmul(w, x[None].mT).mT[0],
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_with_it_is_the_layers(product):
    layer, conv = quantize_(nn.Linear(64, 64, bias=False), "W8A8"), Conv1D(64, 64)
    conv = quantize_(nn.Sequential(conv), "W8A8")[0]
    x = noise(3, 64)
    with torch.no_grad():
        assert torch.equal(product(x, layer.weight), layer(x))
        assert not torch.equal(layer(x), F.linear(x, layer.dequantize_weight()))
        assert torch.equal(product(x, conv.weight.T), conv(x))  # it is stored [in, out]
        assert torch.equal(product(x, conv.weight), product(x, conv.dequantize_weight()))


def test_a_transposed_weight_is_a_view():
    layer = quantize_(nn.Linear(64, 64), "int8")
    view, codes = layer.weight.T, layer.qdata.clone()
    assert view.shape == (64, 64) and torch.equal(view + 0, layer.dequantize_weight().T)
    assert type(view.data) is Tensor and torch.equal(view.data, layer.dequantize_weight().T)
    for write in (lambda: view.add_(1.0), lambda: view.__setitem__(0, 1.0), lambda: setattr(view, "data", view + 1)):
        with pytest.raises(ValueError, match="view of a quantized weight"):
            write()
    assert torch.equal(layer.qdata, codes)
    other = quantize_(nn.Linear(64, 64), "int8")
    other.weight = view  # no tie
    assert other.qdata is not layer.qdata
    assert_sqnr(other.dequantize_weight(), layer.dequantize_weight().T, at_least=38, at_most=60)


def test_copies_are_plain_and_pickles_too():
    layer = linear()
    weight = layer.weight
    for found in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(found) is Tensor and torch.equal(found, layer.dequantize_weight())


def test_assigning_the_proxy_ties():
    embed, head = table(), linear()
    head.weight = embed.weight
    assert head.qdata is embed.qdata and head.scale is embed.scale
    assert_close(head(torch.eye(64)) - head.bias, embed(torch.arange(96)).t(), rms=1e-4)
    with pytest.raises(ValueError, match="shares its codes with a tied module"):
        embed.weight = noise(96, 64)
    head.weight = head.weight  # its own: nothing happens
    assert head.qdata is embed.qdata


def test_a_proxy_of_another_scheme_or_shape_is_no_tie():
    layer, other = linear("int4"), linear("int8", seed=1)
    layer.weight = other.weight
    assert layer.qdata is not other.qdata
    assert_sqnr(layer.dequantize_weight(), other.dequantize_weight(), at_least=17, at_most=30)
    with pytest.raises(ValueError, match=r"weight is \(80, 64\); needs \(96, 64\)"):
        linear().weight = linear(N=80).weight


def test_a_placeholder_can_be_set_and_read():
    layer = linear()
    layer.weight = torch.empty(96, 64, device="meta")
    assert layer.placeholders == ("weight",) and layer.weight.is_meta
    assert not isinstance(layer.weight, WeightProxy)


def test_initialization_by_a_host_passes_it_by():
    # The mark is the tensor's: the module may have buffers that the host has to fill.
    layer = linear()
    assert layer.weight._is_hf_initialized and not hasattr(layer, "_is_hf_initialized")


@pytest.mark.parametrize("change", ["write", "load_state_dict", "tie", "replace"])
@pytest.mark.parametrize("weights", ["int8", "int4", "W4A16_ASYM", "nf4", "W8A8"])
def test_a_product_follows_the_weight_after_it_was_used(weights, change):
    """Backends keep copies of a weight in layouts of their own."""
    layer, other = linear(weights, torch.bfloat16), linear(weights, torch.bfloat16, seed=1)
    inputs = [noise(M, 64).bfloat16() for M in (1, 64)]
    with torch.no_grad():
        before = [[layer(x) for x in inputs] for _ in range(3)][-1]
        if change == "write":
            layer.weight = other.dequantize_weight()
        elif change == "load_state_dict":
            layer.load_state_dict(other.state_dict())
        elif change == "tie":
            layer.weight = other.weight
        else:
            for key in ("qdata", "scale", "zero_point"):
                if hasattr(other, key):
                    getattr(layer, key).data = getattr(other, key).data
        layer.bias.copy_(other.bias)
        for _ in range(3):
            for x, old in zip(inputs, before):
                expected = F.linear(x.double(), layer.dequantize_weight().double(), layer.bias.double())
                assert_close(layer(x), expected, rms=2e-2)
                assert sqnr(old, expected) < 10
