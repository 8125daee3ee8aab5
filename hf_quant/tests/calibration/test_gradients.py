"""Sensitivities predict what an error of a weight costs the model, and leave the model as it was."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from hf_quant import Calibration, QuantizerConfig, quantize_
from hf_quant.calibration import gradients, record_calls, sensitivities
from hf_quant.calibration.gradients import NUM_CALLS, Call, InputRounding
from hf_quant.kernels import quantize_rowwise
from hf_quant.modules import rotated
from hf_quant.scheme import InputTransform
from hf_quant.tests.calibration.test_observe import IDS, llama
from hf_quant.tests.modules.test_experts import HOSTS


NAMES = ("model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj")


def trained() -> nn.Module:
    """A model whose predictions are sharp enough for a KL divergence above the noise."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def calls_of(ids=IDS) -> list[Call]:
    return [Call((), {"input_ids": row[None], "use_cache": False}) for row in ids]


def kl(model: nn.Module, other: nn.Module) -> float:
    with torch.no_grad():
        p, q = (m(IDS).logits.log_softmax(-1) for m in (model, other))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_the_labels_of_a_decoder_are_those_of_its_own_mask(monkeypatch):
    sizes = {"d_model": 64, "d_ff": 64, "d_kv": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    both = {"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": (torch.arange(40) < 30).expand(3, 40)}
    draw, counts = gradients._gradient_of_drawn_labels, []

    def drawn(*args):
        counts.append(draw(*args)[1])
        return draw(*args)

    monkeypatch.setattr(gradients, "_gradient_of_drawn_labels", drawn)
    for own in (None, (torch.arange(40) < 10).expand(3, 40)):
        sensitivities(model, [Call((), {**both, "decoder_attention_mask": own})], {"decoder.block.0.layer.2": None})
    assert counts == [120, 30]


@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_kl_is_that_of_small_errors(name):
    model, other = trained(), trained()
    weight = other.get_submodule(name).weight
    error = 0.01 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weight.add_(error)
    found = [sensitivities(model, calls_of(), {name: None}, seed=seed) for seed in range(4)]
    assert all(each.is_kl for each in found)
    predicted = sum(each.layers[name]["weight"][0].losses(error).sum().item() for each in found) / 4
    measured = kl(model, other)
    assert measured > 0 and 0.5 < predicted / measured < 2
    # In the rotated basis, where the error is another matrix, the loss is the same.
    transform = InputTransform(32)
    turned = sensitivities(model, calls_of(), {name: transform}).layers[name]["weight"][0]
    plain = found[0].layers[name]["weight"][0]
    torch.testing.assert_close(turned.losses(rotated(error, transform)), plain.losses(error), rtol=1e-3, atol=1e-9)


def test_the_predicted_error_of_a_model_without_labels():
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = BertModel(BertConfig(**fields, num_attention_heads=2), add_pooling_layer=False).eval()
    name = "encoder.layer.0.output.dense"
    ids = torch.randint(64, (64, 12))
    found = sensitivities(model, [Call((row[None],), {}) for row in ids], {name: None})
    assert not found.is_kl
    weight = model.get_submodule(name).weight
    error = 0.05 * weight.std() * torch.randn(weight.shape)
    with torch.no_grad():
        before = model(ids).last_hidden_state
        weight.add_(error)
        measured = ((model(ids).last_hidden_state - before).square().sum() / before.square().sum()).item()
    assert 0.5 < found.layers[name]["weight"][0].losses(error).sum().item() / measured < 2


def test_a_pooler_is_scored_by_its_output_and_the_encoder_by_its_own():
    torch.manual_seed(0)
    fields = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    model = BertModel(BertConfig(**fields, num_attention_heads=2)).eval()
    layers = {"pooler.dense": None, "encoder.layer.0.output.dense": None}
    calls = [Call((row[None],), {}) for row in torch.randint(64, (4, 12))]
    both = sensitivities(model, calls, layers).layers
    model.pooler = None
    alone = sensitivities(model, calls, {"encoder.layer.0.output.dense": None}).layers
    error = torch.randn(64, 64)
    assert both["pooler.dense"]["weight"][0].losses(error).sum() > 0
    wide = torch.randn(64, 96)
    found, expected = (each["encoder.layer.0.output.dense"]["weight"][0].losses(wide).sum() for each in (both, alone))
    assert 0.5 < found / expected < 2  # other random projections, but not the pooler's loss in addition


def test_an_output_of_zeros_says_nothing():
    """The contrastive loss of CLIP is 0 for each row by itself, and the first of its outputs."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            y = self.layer(x)
            return y.sum() * 0, y

    torch.manual_seed(0)
    model, x = Pair(), torch.randn(2, 8)
    found, alone = (
        sensitivities(of, [Call((x,), {})], {name: None}).layers[name]["weight"][0].rows
        for of, name in ((model, "layer"), (nn.Sequential(model.layer), "0"))
    )
    assert found.norm() > 0 and torch.equal(found, alone)


def test_the_model_is_as_it_was(monkeypatch):
    model = llama(attention_dropout=0.5).train()
    model.model.embed_tokens.weight.requires_grad_(False)
    expected = sensitivities(model, calls_of(), dict.fromkeys(NAMES)).layers
    assert model.training and model.lm_head.weight.requires_grad and not model.model.embed_tokens.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    # Large models compute their blocks twice, to the same values.
    monkeypatch.setattr(gradients, "_LARGE", 0)
    calls = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    again = sensitivities(model, calls_of(), dict.fromkeys(NAMES)).layers
    hook.remove()
    assert len(calls) == 2 * len(IDS)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    for name in NAMES:
        before, after = expected[name]["weight"][0], again[name]["weight"][0]
        torch.testing.assert_close((after.rows, after.inputs), (before.rows, before.inputs))
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("host", HOSTS)
def test_experts_have_sensitivities_of_their_own_tokens(host):
    torch.manual_seed(0)
    _, cls, config = HOSTS[host]
    model, name = cls(copy.deepcopy(config)).eval(), "model.layers.1.mlp.experts"
    found = sensitivities(model, calls_of(IDS[:1]), {name: None}).layers[name]
    module = model.get_submodule(name)
    assert {weight: len(of) for weight, of in found.items()} == {
        weight: module.get_parameter(weight).shape[0] for weight in found
    }
    seen = [of for weight in found.values() for of in weight if of is not None]
    assert seen and all(of.rows.isfinite().all() and of.inputs.isfinite().all() for of in seen)
    assert any((of.rows > 0).any() for of in seen) and "forward" not in vars(module)


def test_calls_are_recorded_row_by_row_and_spread():
    model = llama()
    ids = torch.arange(3, 63)[:, None].repeat(1, 4)
    calls = record_calls(model, iter([lambda m: m(input_ids=ids[:40]), lambda m: m(input_ids=ids[40:])]))
    first = [int(call.kwargs["input_ids"][0, 0]) for call in calls]
    assert NUM_CALLS <= len(calls) < 2 * NUM_CALLS and first == sorted(first)
    assert {b - a for a, b in zip(first, first[1:])} == {2}
    # What goes on from a filled cache is left out.
    generated = record_calls(model, iter([lambda m: m.generate(IDS[:2], max_new_tokens=3, min_new_tokens=3)]))
    assert [call.kwargs["input_ids"].tolist() for call in generated] == [IDS[:1].tolist(), IDS[1:2].tolist()]
    assert all("past_key_values" not in call.kwargs for call in generated)


@pytest.mark.parametrize("transform", [None, InputTransform(32)])
def test_the_predicted_kl_of_rounded_inputs(transform):
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1)
    name, generator = "lm_head", torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.randn(64, 64, generator=generator))
    rounding = InputRounding("fp8_e4m3", transform=transform)
    found = [sensitivities(model, calls_of(), {name: None}, {name: [rounding]}, seed=s) for s in range(4)]
    weight = model.lm_head.weight.detach()
    predicted = sum(each.layers[name]["weight"][0].input_loss(weight, rounding) for each in found) / 4
    with torch.no_grad():
        x = model.model(IDS).last_hidden_state.flatten(0, 1)
        turned = rotated(x, transform)
        codes, scale = quantize_rowwise(turned, format="fp8_e4m3")
        p, q = (
            (each.double() @ rotated(weight, transform).t().double()).log_softmax(-1)
            for each in (turned, codes.float() * scale)
        )
        measured = (p.exp() * (p - q)).sum(-1).mean().item()
    assert measured > 0 and 0.6 < predicted / measured < 1.6
    # One scale for all tokens is coarser for int8.
    x = turned * torch.linspace(0.1, 1, len(x))[:, None]
    errors = [InputRounding("int8", is_static=each).errors(x).mean() for each in (False, True)]
    assert 2 * errors[0] < errors[1] < (x.abs().max() / 127) ** 2 / 6


def test_inference_mode_changes_nothing(caplog):
    """Neither around the call, nor around what made the arguments of the model."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * gate)

    config, found = QuantizerConfig("int4", algorithm="gptq"), []
    for is_inference in (False, True):
        torch.manual_seed(0)
        model = Gated()
        calibration = Calibration(model, config)
        with torch.inference_mode(is_inference):
            batches = [(torch.randn(200, 64), torch.rand(200, 64)) for _ in range(4)]
            with calibration, torch.no_grad():
                for batch in batches:
                    model(*batch)
            quantize_(model, config, calibration=calibration)
        found.append(model.state_dict())
    assert not caplog.text
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    with torch.inference_mode():
        model = Gated()
    quantize_(model, config, calibration=batches)
    assert "Inference tensors cannot be saved for backward" in caplog.text
    assert model.training
