"""`quantization_map`, `requantize_`, `freeze_`: a state dict and JSON give the model back, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hf_quant
from hf_quant import Calibration, QuantizerConfig, freeze_, quantization_map, quantize_, requantize_
from hf_quant.modules import QuantizedModule
from hf_quant.tests.calibration.test_observe import IDS, llama


STATIC = QuantizerConfig("W8A8", activation_scale="static")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.BatchNorm1d(64)).eval()


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def test_quanto_s_page_step_by_step(tmp_path):
    model = mlp()
    calibration = Calibration(model, STATIC, momentum=0.9)
    with calibration, torch.no_grad():
        model(X)
    quantize_(model, STATIC, calibration=calibration)
    freeze_(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "map.json").write_text(json.dumps(quantization_map(model)))
    state, schemes = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "map.json").read_text())
    with torch.device("meta"):
        empty = mlp()
    again = requantize_(empty, state, quantization_map=schemes, device="cpu")
    with torch.no_grad():
        assert torch.equal(again(X), model(X))
    assert quantization_map(again) == schemes


@pytest.mark.parametrize(
    "config", ["int4", "nvfp4", QuantizerConfig("int8", modules={"lm_head": "int4", "model.embed_tokens": "int4"})]
)
def test_a_model_of_transformers(config):
    model = quantize_(llama(tie_word_embeddings=True), config)
    again = requantize_(llama(tie_word_embeddings=True), model.state_dict(), quantization_map=quantization_map(model))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.quantization_config.plan == model.config.quantization_config.plan
    ties = [
        m.lm_head._parameters.get("qdata") is m.model.embed_tokens._parameters.get("qdata") for m in (model, again)
    ]
    assert ties[0] == ties[1]


def test_scales_that_are_missing_are_named():
    model = quantize_(mlp(), STATIC, calibration=X)
    model[2].input_scale.data.copy_(torch.tensor([torch.nan]).view(torch.int32))
    with pytest.raises(ValueError, match="is set for 2: calibrate"):
        freeze_(model)
    with pytest.raises(ValueError, match="is quantized: quantize_ it first"):
        freeze_(mlp())


def test_what_does_not_fit_changes_nothing():
    model = quantize_(mlp(), "int4")
    state, schemes = model.state_dict(), quantization_map(model)
    other = {
        "0": {**schemes["0"], "scheme": {**schemes["0"]["scheme"], "weight": {"format": "int8", "granularity": "row"}}}
    }
    for bad_state, bad_map, message in (
        ({k: v for k, v in state.items() if k != "0.qdata"}, schemes, "0.qdata is missing"),
        ({k: v for k, v in state.items() if k != "0.bias"}, schemes, "lacks 0.bias"),
        ({**state, "more": X}, schemes, "has no more"),
        (state, {**schemes, "9": schemes["0"]}, "names 9, which"),
        (state, {**schemes, "1": schemes["0"]}, "ReLU that cannot be quantized"),
        (state, {**schemes, "0": {"dtype": "int4"}}, "needs scheme, algorithm, dtype"),
        (state, other, "0.qdata is"),
        ({**state, "0.scale": torch.full_like(state["0.scale"], 127)}, schemes, "0.scale"),
    ):
        target = mlp()
        with pytest.raises(ValueError, match=message):
            requantize_(target, bad_state, quantization_map=bad_map)
        assert not any(isinstance(m, QuantizedModule) for m in target.modules())
    with pytest.raises(ValueError, match="has quantized already"):
        requantize_(model, state, quantization_map=schemes)
    with torch.device("meta"):
        rotary = llama()
    quantized = quantize_(llama(), "int4")
    with pytest.raises(ValueError, match="is on the meta device, and no state dict holds it"):
        requantize_(rotary, quantized.state_dict(), quantization_map=hf_quant.quantization_map(quantized))
