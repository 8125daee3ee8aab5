"""Quantization-aware training of models of transformers: the codes of `quantize_`, saving, loading, adapters."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, convert_qat_, prepare_qat_, quantize_
from hf_quant.modules.rotation import rotated_back
from hf_quant.testing import sqnr
from hf_quant.training import QatModule
from integration_tests.support.tiny_models import build, inputs


CASES = {
    "llama": "int4",
    "llama_tied": QuantizerConfig("int4", modules={"lm_head": "int8"}),
    "gemma3": QuantizerConfig("W4A8", modules={"*embed_tokens": "int8"}),
    "qwen3_moe": "int3",
    "mixtral": "W4A8",
    "gpt_oss": "nf4",
    "gpt2": "int4",
    "bert": "W8A8",
    "t5": {"weights": "int4", "input_transform": "hadamard"},
}


def same_bytes(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(
        torch.equal(first[k].contiguous().view(torch.uint8), second[k].contiguous().view(torch.uint8)) for k in first
    )


def logits(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        return model.eval()(**inputs(name)).logits


def train(model: nn.Module, name: str, *, steps: int = 3, lr: float = 1e-3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        model(**inputs(name)).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_prepared_trained_and_converted(name, tmp_path):
    model = build(name, torch.float32)
    quantized = quantize_(copy.deepcopy(model), CASES[name])
    prepare_qat_(model, CASES[name])
    assert sqnr(logits(model, name), logits(quantized, name)) > 60
    assert same_bytes(convert_qat_(copy.deepcopy(model)), quantized)
    train(model, name)
    expected = logits(model, name)
    before = [p.clone() for p in quantized.parameters()]
    convert_qat_(model)
    assert sqnr(logits(model, name), expected) > 60
    assert not all(map(torch.equal, model.parameters(), before))
    assert model.config.quantization_config.weights == quantized.config.quantization_config.weights
    assert model.config.quantization_config.plan == quantized.config.quantization_config.plan
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded, name), logits(model, name))


def test_it_generates(tmp_path):
    model = build("llama")
    prepare_qat_(model, "int4")
    train(model, "llama")
    options = {"max_new_tokens": 4, "do_sample": False}
    assert model.eval().generate(**inputs("llama"), **options).shape == (2, 16)
    convert_qat_(model)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model.generate(**inputs("llama"), **options)
    assert torch.equal(reloaded.generate(**inputs("llama"), **options), expected)


def test_a_prepared_model_is_saved_with_its_scales(tmp_path):
    """A checkpoint in the middle of training goes on in a model that was prepared in the same way."""
    model = build("llama_tied")
    config = QuantizerConfig("int4", modules={"lm_head": "int8"})
    prepare_qat_(model, config)
    train(model, "llama_tied")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    again = build("llama_tied")
    prepare_qat_(again, config)
    missing, unexpected = again.load_state_dict(saved, strict=False)
    again.tie_weights()
    assert not unexpected and all("lm_head" in key or "embed_tokens" in key for key in missing)
    assert torch.equal(logits(again, "llama_tied"), logits(model, "llama_tied"))


@pytest.mark.parametrize("fields", ["int4", "W4A8", {"weights": "int4", "input_transform": "hadamard"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merging_an_adapter_gives_the_codes_that_were_trained(fields, dtype):
    base = build("llama", dtype)
    lora = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(base, lora)
    plain = copy.deepcopy(model)
    prepare_qat_(model, fields)
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name]
    with torch.no_grad():
        assert torch.equal(logits(model, "llama"), logits(copy.deepcopy(model), "llama"))
    train(model, "llama", lr=2e-2)
    expected = logits(model, "llama")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, QatModule)
    weight = (layer.base_layer.weight + layer.get_delta_weight("default")).to(dtype)
    trained = layer.base_layer.weight_as_stored("weight", weight.detach())
    with pytest.raises(ValueError, match="q_proj has an adapter, .* merge it first"):
        convert_qat_(model)
    with model.disable_adapter():
        assert not torch.equal(logits(model, "llama"), expected)
    merged = model.merge_and_unload()
    assert torch.equal(logits(merged, "llama"), expected)
    found = merged.model.layers[0].self_attn.q_proj
    assert torch.equal(found.weight_as_stored("weight"), trained)
    convert_qat_(merged)
    codes = merged.model.layers[0].self_attn.q_proj
    assert torch.equal(codes.dequantize_weight(dtype=torch.float32).to(dtype), rotated_like(codes, trained, dtype))
    # Training the adapter beside fixed codes, and merging it then, gives other ones.
    train(plain, "llama", lr=2e-2)
    other = quantize_(plain.merge_and_unload(), fields)
    assert not same_bytes(other, merged)


def rotated_like(layer: nn.Module, values: Tensor, dtype: torch.dtype) -> Tensor:
    return rotated_back(values.detach().float(), layer.scheme.input_transform).to(dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"use_dora": True}, "DoRA"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "Embedding"),
    ],
)
def test_adapters_that_cannot_be_rounded_with_their_weight_are_refused(options, message):
    model = get_peft_model(build("llama"), LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options}))
    before = {name: type(module) for name, module in model.named_modules()}
    config = QuantizerConfig("int4", modules={"*embed_tokens*": "int8"} if "embed" in str(options) else {})
    with pytest.raises(ValueError, match=message):
        prepare_qat_(model, config)
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_a_prepared_model_gets_an_adapter_afterwards(tmp_path: Path):
    """PEFT takes prepared layers for those of the host; but what it adds is not rounded, so they are refused."""
    model = build("llama")
    prepare_qat_(model, "int4")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has an adapter"):
        convert_qat_(model)
