"""transformers' Trainer on quantized models: adapters train, save and resume; the quantized model alone is refused."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_quant import quantize_
from integration_tests.support.tiny_models import build, inputs


IDS = inputs("llama")["input_ids"]
DATA = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]


def trainer(model: nn.Module, directory: Path, **arguments) -> Trainer:
    settings = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 0.02,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 2,
    }
    return Trainer(
        model=model, args=TrainingArguments(output_dir=str(directory), **{**settings, **arguments}), train_dataset=DATA
    )


def codes(model: nn.Module) -> list[torch.Tensor]:
    return [p.clone() for name, p in model.state_dict().items() if name.endswith((".qdata", ".scale", ".zero_point"))]


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("scheme", "dtype", "autocast"),
    [("int4", "bfloat16", False), ("W8A8", "float32", True)],
)
def test_an_adapter_trains_saves_and_resumes(scheme, dtype, autocast, tmp_path):
    model = quantize_(build("llama", getattr(torch, dtype)), scheme)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    before = codes(model)
    training = trainer(
        model,
        tmp_path,
        bf16=autocast,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    training.train()
    first, second = losses(training)
    assert second < first - 0.01
    assert all(map(torch.equal, codes(model), before))
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not list(checkpoint.glob("model*.safetensors"))

    # A new model and a new Trainer go on where this one stopped.
    fresh = quantize_(build("llama", getattr(torch, dtype)), scheme)
    fresh = get_peft_model(fresh, LoraConfig(target_modules="all-linear", r=4))
    resumed = trainer(fresh, tmp_path, bf16=autocast, max_steps=3)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 3
    assert losses(resumed)[:2] == losses(training) and losses(resumed)[2] < second

    resumed.save_model(str(tmp_path / "final"))
    reloaded = PeftModel.from_pretrained(quantize_(build("llama", getattr(torch, dtype)), scheme), tmp_path / "final")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(reloaded(IDS).logits.float(), fresh.eval()(IDS).logits.float())


def test_adapters_of_the_model_itself_train(tmp_path):
    quantize_(build("llama"), "int8").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.add_adapter(LoraConfig(target_modules=["q_proj", "up_proj"]))
    training = trainer(model, tmp_path)
    training.train()
    assert losses(training)[1] < losses(training)[0]
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file()


def test_a_quantized_model_alone_is_refused(tmp_path):
    quantize_(build("llama"), "int8").save_pretrained(tmp_path / "base")
    for model in (quantize_(build("llama"), "int8"), AutoModelForCausalLM.from_pretrained(tmp_path / "base")):
        with pytest.raises(ValueError, match=re.escape("Please attach trainable adapters")):
            trainer(model, tmp_path)
