"""`QuantEmbedding` looks up rows of the dequantized table, to the bit."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_quant import QuantEmbedding, QuantizerConfig, quantize_
from hf_quant.testing import all_scheme_fields, assert_close, assert_sqnr


SCHEMES = all_scheme_fields()
IDS = torch.tensor([[0, 5, 5, 299], [7, 128, 255, 256]])


class ScaledEmbedding(nn.Embedding):
    """As Gemma has it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embedding_dim**0.5


def embedding(fields, dtype=torch.float32, cls=nn.Embedding, width: int = 160, **options) -> QuantEmbedding:
    torch.manual_seed(0)
    fields = {"weights": fields} if isinstance(fields, str) else fields
    return quantize_(cls(300, width, dtype=dtype, **options), QuantizerConfig(None, modules={"": fields}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_rows_are_those_of_the_dequantized_table(fields, dtype):
    layer = embedding(fields, dtype, width=150)  # neither the packing unit nor a group divides it
    assert type(layer) is QuantEmbedding and isinstance(layer, nn.Embedding)
    found = layer(IDS)
    assert found.dtype == dtype and torch.equal(found, layer.dequantize_weight()[IDS])
    assert not torch.equal(layer(IDS[:1]), layer(IDS[1:]))


def test_it_is_quantized_and_close():
    torch.manual_seed(0)
    table = nn.Embedding(300, 160).weight
    assert_sqnr(embedding("int8")(IDS), table[IDS], at_least=40, at_most=50)
    assert_sqnr(embedding("int4")(IDS), table[IDS], at_least=18, at_most=25)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_of_any_shape(shape, dtype):
    layer = embedding("int4")
    ids = torch.randint(0, 300, shape).to(dtype)
    assert torch.equal(layer(ids), F.embedding(ids, layer.dequantize_weight()))


@pytest.mark.parametrize("bad", [-1, 300])
def test_ids_outside_of_the_table_are_refused(bad):
    with pytest.raises(IndexError):
        embedding("int4")(torch.tensor([bad]))


@pytest.mark.parametrize("fields", ["int4", "W4A16_ASYM", "nf4", "fp8"])
def test_the_padding_row_stays_zero(fields):
    layer = embedding(fields, padding_idx=5)
    assert (layer(torch.tensor([5])) == 0).all() and layer.padding_idx == 5


def test_a_subclass_keeps_its_own_forward():
    layer = embedding("int8", cls=ScaledEmbedding)
    assert isinstance(layer, ScaledEmbedding) and isinstance(layer, QuantEmbedding)
    assert torch.equal(layer(IDS), layer.dequantize_weight()[IDS] * 160**0.5)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(IDS), layer(IDS))


def test_used_as_an_output_embedding():
    layer = embedding("int4")
    x = torch.randn(3, 160, requires_grad=True)
    y = F.linear(x, layer.weight)
    assert_close(y, x @ layer.dequantize_weight().t(), rms=1e-5)
    y.sum().backward()
    assert_close(x.grad, layer.dequantize_weight().sum(0).expand(3, -1), rms=1e-5)


def test_copies_casts_and_state_dict():
    layer = embedding("int4", torch.bfloat16)
    expected = layer(IDS)
    for found in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(found(IDS), expected)
    other = embedding("int4", torch.bfloat16)
    other.weight = torch.randn(300, 160)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(IDS), expected)
    assert layer.float()(IDS).dtype == torch.float32
    assert_close(layer(IDS), expected, rms=3e-3)
    assert repr(layer) == "QuantEmbedding(300, 160, int4 g32)"


def test_a_table_that_is_rescaled_at_lookup_is_refused():
    with pytest.raises(ValueError, match="matches no module that can be quantized"):
        embedding("int4", max_norm=1.0)


@pytest.mark.parametrize("fields", ["W4A16_ASYM", "nvfp4"])
def test_compiles_to_one_graph_for_every_length(fields):
    layer = embedding(fields)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for length in (2, 3, 5, 8, 13, 17, 31, 64, 65, 100):
        ids = torch.arange(length)
        assert torch.equal(compiled(ids), layer(ids))
    assert counter.frame_count == 1
