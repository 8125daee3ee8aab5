"""Weights with two zeros in each four, stored as the other two and their places."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, dequantize_, plan, prepare_qat_, quantize_
from hf_quant.algorithms import quantize_matrix
from hf_quant.evaluate import bits_per_weight
from hf_quant.formats import FORMATS
from hf_quant.kernels import set_prepack_limit
from hf_quant.modules.sparse24 import columns_of, compressed, expanded, pruned, width
from hf_quant.resolve import resolve_scheme
from hf_quant.tests.calibration.test_observe import llama
from hf_quant.tests.modules.test_experts import HOSTS, plain_experts, routing, tokens
from hf_quant.training import prune_


SPARSE_FORMATS = [name for name, format in FORMATS.items() if format.symmetric]
CASES = [(name, shape) for name in SPARSE_FORMATS for shape in ((16, 192), (3, 8, 64))]
CASES += [(name, (4, 100)) for name in SPARSE_FORMATS if not FORMATS[name].fixed_group_size]  # no whole groups
INT8 = {"weights": "int8"}
IDS = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_codes_come_back(name, shape):
    K = shape[-1]
    fields = {"weights": name, **({} if K % 32 == 0 else {"granularity": "row"})}
    quant = resolve_scheme(fields, torch.bfloat16)[0].weight
    matrix = pruned(numbers(*shape))
    assert bool(((matrix.unflatten(-1, (-1, 4)) != 0).sum(-1) <= 2).all())
    codes = quantize_matrix(matrix, quant).qdata
    stored = compressed(codes, quant, K)
    assert stored.dtype == torch.uint8 and stored.shape == (*shape[:-1], width(quant, K))
    assert columns_of(quant, width(quant, K)) >= K
    back, format = expanded(stored, quant, K), FORMATS[name]
    assert back.shape == codes.shape and back.dtype == codes.dtype
    assert torch.equal(format.values(back, K), format.values(codes, K))


def test_bytes_of_a_row_are_those_that_are_documented():
    quant = resolve_scheme({"weights": "int8"}, torch.float32)[0].weight
    codes = torch.tensor([[0, 5, 0, -7, 1, 2, 0, 0, 0, 0, 0, 9]], dtype=torch.int8)
    # Places (1, 3), (0, 1) and, as only one is not zero, (0, 3); the last byte is half full.
    assert compressed(codes, quant, 12).tolist() == [[5, 249, 1, 2, 0, 9, 0b0100_1101, 0b1100]]
    assert torch.equal(expanded(compressed(codes, quant, 12), quant, 12), codes)


@pytest.mark.parametrize(
    "fields",
    [{"weights": "int8"}, {"weights": "int4"}, {"weights": "fp8"}, {"weights": "int8", "activations": "int8"}],
)
def test_a_model_computes_as_the_dense_one_and_reloads(fields, tmp_path):
    sparse, dense = llama(), llama()
    prune_(dense)
    dense.save_pretrained(tmp_path / "pruned")
    config = QuantizerConfig(**fields, sparsity="2:4")
    quantize_(sparse, config)  # which prunes by magnitude
    quantize_(dense, QuantizerConfig(**fields, input_transform="none"))
    expected = dense(IDS).logits
    assert torch.equal(sparse(IDS).logits, expected)
    set_prepack_limit(0)
    try:
        assert torch.equal(copy.deepcopy(sparse)(IDS).logits, expected)
    finally:
        set_prepack_limit(None)
    assert bits_per_weight(sparse) < 0.8 * bits_per_weight(dense)
    sparse.save_pretrained(tmp_path / "sparse")
    for directory, options in (("sparse", {}), ("pruned", {"quantization_config": config})):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / directory, **options)
        assert loaded.model.layers[0].mlp.up_proj.scheme.sparsity == "2:4"
        assert torch.equal(loaded(IDS).logits, expected)
    weight = dequantize_(sparse).model.layers[0].mlp.up_proj.weight
    assert bool(((weight.unflatten(-1, (-1, 4)) == 0).sum(-1) >= 2).all())


@pytest.mark.parametrize("host", HOSTS)
def test_experts(host):
    experts = plain_experts(host)
    dense = copy.deepcopy(experts)
    prune_(dense)
    quantize_(experts, QuantizerConfig("int8", sparsity="2:4"))
    quantize_(dense, QuantizerConfig("int8"))
    index, weights = routing(33)
    assert torch.equal(experts(tokens(33), index, weights), dense(tokens(33), index, weights))
    assert experts.qdata_down_proj.dtype == torch.uint8


@pytest.mark.parametrize("fields", [INT8, {"weights": "int4"}, {"weights": "fp8"}])
def test_compile_and_export(fields):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), torch.randn(4, 64)
    quantize_(model, QuantizerConfig(**fields, sparsity="2:4"))
    expected = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def test_gradients_and_new_weights():
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    quantize_(layer, QuantizerConfig("int4", sparsity="2:4"))
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize_weight().sum(0).expand(3, 64))
    new = numbers(96, 64).float()
    layer.weight.data = new
    found = layer.dequantize_weight()
    assert bool(((found.unflatten(-1, (-1, 4)) == 0).sum(-1) >= 2).all())
    assert (found - pruned(new)).norm() < 0.1 * new.norm()


def test_layers_that_have_no_fours_stay_dense():
    model, config = nn.Sequential(nn.Linear(66, 80), nn.Linear(80, 66)), QuantizerConfig("int8", sparsity="2:4")
    assert plan(model, config).entries["0"].reason == "not sparse: inputs are no multiple of 4"
    quantize_(model, config)
    assert [layer.scheme.sparsity for layer in model] == [None, "2:4"]


def test_damaged_files_and_what_cannot_be_sparse(tmp_path):
    model = llama()
    quantize_(model, QuantizerConfig("int4", sparsity="2:4"))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.qdata"
    damaged = tensors[key].clone()
    damaged[0, -1] = 0
    for wrong, message in (
        (damaged, "places of codes that are not ascending"),
        (damaged[:, 1:], r"needs? \[96, 24\]"),
    ):
        save_file({**tensors, key: wrong.contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="would be sparse, which is not trained here"):
        prepare_qat_(llama(), QuantizerConfig("int4", sparsity="2:4"))
    config = QuantizerConfig("auto", budget={"bits": 5}, candidates=["int4", {"weights": "int8", "sparsity": "2:4"}])
    with pytest.raises(ValueError, match="candidates are sparse, whose loss is not predicted"):
        quantize_(llama(), config, calibration=[{"input_ids": IDS}])
