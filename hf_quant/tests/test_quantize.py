"""`quantize_` and `dequantize_`: in place, layer by layer, all or nothing, and back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_quant
from hf_quant import QuantEmbedding, QuantizerConfig, QuantLinear, dequantize_, quantize, quantize_
from hf_quant.algorithms import ALGORITHMS
from hf_quant.modules import QuantizedModule
from hf_quant.testing import all_scheme_fields, assert_close, assert_sqnr


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 96), nn.ReLU(), nn.Linear(96, 160, bias=False)).to(dtype)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


TIED = QuantizerConfig(None, modules={"embed": "int8"})


def assert_unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) or before[k].isnan().any() for k in before)
    assert not any(isinstance(module, QuantizedModule) for module in model.modules())


# dB that a weight of N(0, 1) keeps with one scale per row or group, symmetric, by absmax.
QUALITY = {"int8": 43.6, "int4": 18.9, "int3": 12.3, "int2": 5.0, "fp8_e4m3": 31.7, "fp8_e5m2": 25.7}
QUALITY |= {"fp6_e3m2": 25.7, "fp6_e2m3": 31.5, "nf4": 20.3, "mxfp4": 18.8, "nvfp4": 20.5}


@pytest.mark.parametrize("fields", all_scheme_fields().values(), ids=all_scheme_fields())
def test_every_scheme_keeps_the_weights_as_well_as_its_format_can(fields):
    model = mlp()
    with torch.no_grad():
        model[0].weight.normal_()
    weight = model[0].weight.detach().clone()
    assert quantize_(model, fields) is model
    assert type(model[0]) is type(model[2]) is QuantLinear
    quality, coarse = QUALITY[fields["weights"]], fields["granularity"] == "tensor"
    # A clip search gains up to 4 dB, and more where the scale is coarse or of few weights; beyond that, nothing was
    # quantized.
    low, high = quality - (4 if coarse else 1), quality + 6
    assert_sqnr(model[0].dequantize_weight(), weight, at_least=low, at_most=high)


def test_a_bare_layer():
    layer = mlp()[0]
    bias = layer.bias
    assert quantize_(layer, "int4") is layer
    assert isinstance(layer, QuantLinear) and isinstance(layer, nn.Linear) and layer.bias is bias
    assert dict(layer.named_parameters()).keys() == {"bias", "qdata", "scale", "global_scale"}


@pytest.mark.parametrize(
    "call",
    [
        *("quantize_", "dequantize_", "plan", "fuse_projections_", "unfuse_projections_", "fuse_activations_"),
        *("unfuse_activations_", "save_quantized", "load_quantized_", "prepare_qat_", "convert_qat_"),
        *("prepare_training_", "finish_training_"),
    ],
)
def test_what_is_no_model(call, tmp_path):
    config = {"plan": ["int8"], "prepare_training_": ["int8"]}
    directory = {"save_quantized": [tmp_path], "load_quantized_": [tmp_path]}
    with pytest.raises(ValueError, match=r"model is a str; needs a torch.nn.Module: .*, such as pipe.transformer"):
        getattr(hf_quant, call)("org/model", *config.get(call, []), *directory.get(call, []))


def test_a_config_a_name_or_fields():
    states = [
        quantize_(mlp(), config).state_dict()
        for config in ("nf4", {"weights": "nf4"}, QuantizerConfig("NF4"), QuantizerConfig("nf4", group_size=32))
    ]
    assert all(torch.equal(state[k], states[0][k]) for state in states for k in states[0])
    assert str(quantize_(mlp())[0].scheme) == "int8 row"


def test_modules_and_what_they_name():
    model = quantize_(mlp(), QuantizerConfig("int4", algorithm="absmax", modules={"2": {"weights": "nf4"}}))
    assert [str(model[i].scheme) for i in (0, 2)] == ["int4 g32", "nf4 g32"]
    assert [model[i].algorithm for i in (0, 2)] == ["absmax", None]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(algorithm):
    model, weight = mlp(), mlp()[0].weight
    quantize_(model, QuantizerConfig("int4", algorithm=algorithm))
    assert_sqnr(model[0].dequantize_weight(), weight, at_least=17, at_most=30)


def test_computed_on_another_device_and_left_where_the_weight_was(monkeypatch):
    seen = []
    original = QuantizedModule.quantize
    monkeypatch.setattr(
        QuantizedModule, "quantize", lambda self, n, w, **k: (seen.append(w), original(self, n, w, **k))[1]
    )
    model = quantize_(mlp(), "int4", device="cpu")
    assert len(seen) == 2 and model[0].qdata.device.type == "cpu"
    expected = quantize_(mlp(), "int4").state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    quantize_(mlp(), QuantizerConfig("int4", quantization_device="cpu"), device=torch.device("cpu"))


def test_one_layer_at_a_time():
    model, order = mlp(), []
    names = quantize.apply_plan(model, quantize.plan(model, "int4"))
    for name in names:
        order.append((name, [isinstance(model[i], QuantLinear) for i in (0, 2)]))
    assert order == [("0", [True, False]), ("2", [True, True])]


def test_tied_weights_are_quantized_once_and_shared():
    model = Tied()
    ids = torch.tensor([[1, 2, 79]])
    quantize_(model, TIED)
    assert isinstance(model.embed, QuantEmbedding) and isinstance(model.head, QuantLinear)
    assert model.embed.qdata is model.head.qdata and model.embed.scale is model.head.scale
    assert list(dict(model.named_parameters())) == ["embed.qdata", "embed.scale"]
    table = model.embed.dequantize_weight()
    assert_close(model(ids), F.linear(table[ids], table), rms=1e-5)


def test_three_tied_modules_of_which_the_host_names_the_last():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[1].weight = model[2].weight = model[0].weight
    model.all_tied_weights_keys = {"0.weight": "2.weight", "1.weight": "2.weight"}
    quantize_(model, QuantizerConfig("int8", modules={"*": "int8"}))
    assert model[0].qdata is model[1].qdata is model[2].qdata


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_weight_is_named_and_the_model_unchanged(bad):
    model = mlp()
    with torch.no_grad():
        model[2].weight[5, 7] = bad
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="2.weight contains NaN or inf and cannot be quantized"):
        quantize_(model, "int4")
    assert_unchanged(model, before)


def test_a_weight_on_the_meta_device_is_named_and_the_model_unchanged():
    model = mlp()
    model[2].to("meta")
    with pytest.raises(ValueError, match="2.weight is on the meta device: load the model's weights before"):
        quantize_(model, "int4")
    assert type(model[0]) is nn.Linear


def test_a_failure_in_the_middle_leaves_that_layer_whole(monkeypatch):
    model = mlp()
    weight = model[0].weight
    monkeypatch.setattr(QuantizedModule, "quantize", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        quantize_(model, "int4")
    assert type(model[0]) is nn.Linear and model[0].weight is weight
    assert "scheme" not in vars(model[0]) and model(torch.ones(1, 160)).shape == (1, 160)


def test_what_is_left_of_a_quantized_model(tmp_path):
    fields = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**fields, num_hidden_layers=2, tie_word_embeddings=False)).eval()
    quantize_(model, QuantizerConfig("int4", kv_cache="int8", modules={"lm_head": None, "*.1.*.down_proj": None}))
    with pytest.raises(ValueError, match="matches no module that can be quantized; .*q_proj is quantized already"):
        quantize_(model, QuantizerConfig(None, modules={"model.layers.0.self_attn.q_proj": "int8"}))
    with pytest.raises(ValueError, match="is quantized already .*, or name modules that are left in 16 bit"):
        quantize_(model, "int8")
    down = model.model.layers[1].mlp.down_proj
    quantize_(model, QuantizerConfig(None, modules={"lm_head": "int8"}))
    assert str(model.lm_head.scheme) == "int8 row" and type(down) is nn.Linear
    config = model.config.quantization_config
    assert config.weights == "int4" and config.kv_cache == "int8" and config.modules["lm_head"] == "int8"
    quantize_(model, QuantizerConfig(None, kv_cache="int4", modules={"*": "nf4"}))
    schemes = {str(m.scheme) for m in model.modules() if isinstance(m, QuantizedModule)}
    assert schemes == {"int4 g32", "int8 row", "nf4 g32"}
    assert model.config.quantization_config.kv_cache == "int4"
    model.save_pretrained(tmp_path)
    again, ids = LlamaForCausalLM.from_pretrained(tmp_path).eval(), torch.arange(12)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="this Sequential is no model of transformers or diffusers"):
        quantize_(nn.Sequential(model, nn.Linear(96, 96)), QuantizerConfig(None, modules={"1": "int8"}))


def test_quantizing_twice_and_what_is_not_quantized():
    model = quantize_(mlp(), "int4")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="the model is quantized already"):
        quantize_(model, "int8")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="nothing in this Sequential is quantized"):
        dequantize_(mlp())


def test_weights_of_zeros():
    model = mlp()
    with torch.no_grad():
        model[0].weight[3:5] = 0
        model[2].weight.zero_()
    quantize_(model, "int4")
    assert (model[0].dequantize_weight()[3:5] == 0).all() and (model[2].dequantize_weight() == 0).all()
    assert model(torch.randn(2, 160)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_there_and_back(dtype):
    model = mlp(dtype)
    model[2].weight.requires_grad_(False)
    weights = [model[i].weight.detach().clone() for i in (0, 2)]
    quantize_(model, "int8")
    quantized = [model[i].dequantize_weight() for i in (0, 2)]
    assert dequantize_(model) is model
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.weight"}
    assert [model[i].weight.requires_grad for i in (0, 2)] == [True, False]
    for layer, weight, expected in zip((model[0], model[2]), weights, quantized):
        assert layer.weight.dtype == dtype and torch.equal(layer.weight, expected)
        assert_sqnr(layer.weight, weight, at_least=38, at_most=50)
        assert vars(layer).keys() == vars(nn.Linear(1, 1)).keys()


def test_dequantize_to_another_dtype():
    model = dequantize_(quantize_(mlp(torch.bfloat16), "int4"), torch.float32)
    assert model[0].weight.dtype == torch.float32


def test_dequantized_weights_are_tied_again():
    model = Tied()
    model.embed.weight.requires_grad_(False)
    dequantize_(quantize_(model, TIED))
    assert model.embed.weight is model.head.weight and not model.head.weight.requires_grad
    assert type(model.embed) is nn.Embedding


def test_a_dequantized_model_can_be_quantized_again_without_loss():
    model = quantize_(mlp(), "int8")
    codes = model[0].qdata.clone()
    quantize_(dequantize_(model), "int8")
    assert torch.equal(model[0].qdata, codes)


@pytest.fixture
def heard(monkeypatch):
    """[(model, config)] of what an observer of nn.Sequential is told."""
    told = []
    observer = quantize.Observer(lambda m: isinstance(m, nn.Sequential), lambda *args: told.append(args), told.append)
    monkeypatch.setattr(quantize, "OBSERVERS", [observer])
    return told


def test_observers_hear_of_both(heard):
    model = dequantize_(quantize_(mlp(), "W4A16"))
    (first, config, given), (second, *none) = heard
    assert first is second is model and none == [None, None] and given.plan is None
    assert config.weights == "W4A16" and config.plan[0]["modules"] == ["{0,2}"]


def test_observers_hear_of_models_inside_with_their_own_names_and_not_of_their_parts(heard):
    outer = nn.ModuleDict({"first": nn.Sequential(mlp()), "head": nn.Linear(64, 64), "last": mlp()})
    quantize_(outer, QuantizerConfig("int8", modules={"last.*": None}))
    [(model, config, _)] = heard  # nothing in `last` was quantized
    assert model is outer["first"] and config.plan[0]["modules"] == ["0.{0,2}"]
    dequantize_(outer)
    assert [m for m, config, _ in heard if config is None] == [outer["first"], outer["last"]]


def test_the_users_config_is_not_changed():
    config = QuantizerConfig("int4")
    quantize_(mlp(), config)
    assert config.plan is None


def test_progress(capsys):
    quantize_(mlp(), "int4")
    assert capsys.readouterr().err == ""
    quantize_(mlp(), "int4", progress=True)
    assert "Quantizing: 100%" in capsys.readouterr().err
