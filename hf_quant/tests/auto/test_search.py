"""Automatic bits: a budget that is kept, a scheme for all that read one tensor, a plan that is stored and printed."""

import logging
import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, auto_plan, plan, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.tests.calibration.test_observe import IDS, llama


CANDIDATES = ["int2", "int4", "int8"]


def auto(**budget) -> QuantizerConfig:
    return QuantizerConfig("auto", budget=budget, candidates=CANDIDATES)


def bits_of(found, names=None) -> float:
    entries = [e for n, e in found.quantized.items() if names is None or n in names]
    return 8 * sum(e.bytes_after for e in entries) / sum(e.num_weights for e in entries)


@pytest.mark.parametrize("bits", [2.6, 3.5, 4.25, 7.0])
def test_the_budget_of_bits_is_kept_and_used(bits):
    found = auto_plan(llama(intermediate_size=160), auto(bits=bits), calibration=IDS)
    assert bits - 0.5 < bits_of(found) <= bits
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for layer in range(2):
            mine = [s for n, s in found.schemes.items() if f"layers.{layer}." in n and n.endswith(names)]
            assert len(mine) == len(names) and len(set(mine)) == 1
    assert found.is_kl and found.scores.keys() == found.schemes.keys() and sum(found.scores.values()) > 0
    assert "predicted KL divergence per token" in str(found) and " loss " in str(found).splitlines()[0]


def test_the_budget_of_gigabytes_counts_the_whole_model_and_the_cache():
    model = llama()
    small, large = (plan(model, name).nbytes for name in ("int2", "int8"))
    found = auto_plan(model, auto(gb=(small + large) / 2e9), calibration=IDS)
    assert small < found.nbytes <= (small + large) / 2
    per_token = 2 * 2 * 2 * 32 * 2  # layers, keys and values, heads, channels, bytes
    with_cache = auto_plan(model, auto(gb=((small + large) / 2 + 100 * per_token) / 1e9, context=100), calibration=IDS)
    assert with_cache.schemes == found.schemes
    with pytest.raises(ValueError, match="smallest candidates of LlamaForCausalLM take") as error:
        auto_plan(model, auto(gb=small / 2e9), calibration=IDS)
    needed = float(re.search(r"take ([\d.]+) GB", str(error.value))[1])
    assert small / 1e9 <= needed < 1.01 * small / 1e9  # so much suffices
    with pytest.raises(ValueError, match="needs weights='auto'"):
        auto_plan(model, QuantizerConfig("int4"), calibration=IDS)


def test_what_costs_the_model_more_gets_more_bits():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()  # what comes before it in its MLP does not matter
    found = auto_plan(model, auto(bits=4.0), calibration=IDS)
    dead = [n for n in found.schemes if n.startswith("model.layers.0.mlp.")]
    assert {found.schemes[n].weight.format for n in dead} == {"int2"}
    assert all(found.scores[n] < 1e-9 for n in dead)
    # Candidates of 16 bit, and modules that are named, count as such.
    config = QuantizerConfig("auto", budget={"bits": 12}, candidates=["int2", None], modules={"*.o_proj": "int4"})
    found = auto_plan(model, config, calibration=IDS)
    assert {s.weight.format for n, s in found.schemes.items() if n.endswith("o_proj")} == {"int4"}
    searched = {n: e for n, e in found.entries.items() if e.kind == "linear" and "o_proj" not in n and "lm_head" != n}
    assert {e.scheme is None for e in searched.values()} == {True, False}
    count = sum(e.num_weights for e in searched.values())
    assert sum(e.bytes_after for e in searched.values()) <= 12 * count / 8


@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_quantize_save_and_reload(algorithm, tmp_path):
    config = QuantizerConfig("auto", budget={"bits": 4.0}, candidates=CANDIDATES, algorithm=algorithm)
    model = quantize_(llama(), config, calibration=IDS)
    schemes = {n: m.scheme for n, m in model.named_modules() if isinstance(m, QuantizedModule)}
    assert schemes == auto_plan(llama(), config, calibration=IDS).schemes and len(set(schemes.values())) > 1
    model.save_pretrained(tmp_path / "out")
    llama().save_pretrained(tmp_path / "base")
    config.calibration = {"data": IDS, "num_tokens": IDS.numel()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=QuantizerConfig(
            **{"weights": "auto", "budget": {"bits": 4.0}, "candidates": CANDIDATES, "algorithm": algorithm}
        ),
    )
    assert again.config.quantization_config.format_version == 2
    assert again.config.quantization_config.calibrated_with["num_tokens"] == IDS.numel()
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(again(IDS).logits, expected) and torch.equal(loaded(IDS).logits, expected)
    with pytest.raises(ValueError, match="is quantized already"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=auto(bits=5.0))


def test_without_data_a_warning_says_what_decides(caplog):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with caplog.at_level(logging.WARNING, "hf_quant"):
        found = auto_plan(model, auto(bits=5.0))
    assert "by the relative errors of the weights" in caplog.text
    assert found.is_kl is None and bits_of(found) <= 5.0 and "predicted" not in str(found)
    with_data = auto_plan(model, auto(bits=5.0), calibration=torch.randn(4, 64))
    assert with_data.is_kl is False and "relative squared error" in str(with_data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "auto"}, "budget None; needs"),
        ({"weights": "auto", "budget": {"bits": 0}}, "needs {'bits': n}"),
        ({"weights": "auto", "budget": {"gb": 1, "bits": 4}}, "needs {'bits': n}"),
        ({"weights": "auto", "budget": {"gb": 1, "context": 1.5}}, "context of the budget is 1.5"),
        ({"weights": "auto", "budget": {"bits": 4}, "candidates": ["int4"]}, "a list of two schemes"),
        ({"weights": "auto", "budget": {"bits": 4}, "candidates": ["int4", "int5"]}, "candidate 'int5'"),
        ({"weights": "auto", "budget": {"bits": 4}, "candidates": ["int4", {"group_size": 64}]}, "candidate"),
        ({"weights": "int4", "budget": {"bits": 4}}, "give weights='auto'"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        QuantizerConfig(**fields)


def test_candidates_may_rotate_their_inputs_differently():
    candidates = ["int4", {"weights": "int4", "input_transform": "hadamard"}, "W8A8"]
    config = QuantizerConfig("auto", budget={"bits": 8.5}, candidates=candidates)
    found = auto_plan(llama(intermediate_size=128), config, calibration=IDS)
    assert {s.weight.format for s in found.schemes.values()} == {"int8"}
    config.budget["bits"] = 4.26
    schemes = set(auto_plan(llama(intermediate_size=128), config, calibration=IDS).schemes.values())
    assert {s.input_transform is None for s in schemes} == {True, False}


def test_what_cannot_be_searched(tmp_path):
    model = llama()
    with pytest.raises(ValueError, match="see hf_quant.auto_plan"):
        plan(model, auto(bits=4.0))
    with pytest.raises(ValueError, match="the smallest candidates of LlamaForCausalLM take 2.507 bits per weight"):
        quantize_(model, auto(bits=2.0), calibration=IDS)
    with pytest.raises(ValueError, match="runs the model backward"):
        quantize_(model, auto(bits=4.0), calibration=tmp_path / "imatrix.safetensors")
    with pytest.raises(ValueError, match="does not run the model"):
        quantize_(model, auto(bits=4.0), calibration=lambda model: None)
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="smallest candidates"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=auto(bits=2.0))
    assert not any(isinstance(m, QuantizedModule) or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("data", [IDS, {"num_tokens": 16, "length": 8}], ids=["ids", "own text"])
def test_logits_from_which_no_token_can_be_drawn(data):
    """A model that overflows in float16, or is broken, is named as such."""
    model = llama()
    model.model.norm.weight.data[3] = torch.inf
    with pytest.raises(ValueError, match="the logits of the model contain NaN or inf before anything is quantized"):
        auto_plan(model, auto(bits=4.0), calibration=data)
