"""Optimizers in 8 and 4 bits in Trainer, on the asset model, and in accelerate: training, checkpoints, resuming."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_quant.integrations.training import trainer_optimizer
from hf_quant.optim import AdamW, AdamW8bit, CPUOffloadOptimizer


def trainer(asset: Path, directory: Path, states: str | None = "int8", **fields) -> Trainer:
    ids = torch.from_numpy(np.load(asset / "val_ids.npy")[: 16 * 32].astype(np.int64)).view(16, 32)
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"learning_rate": 1e-4, "warmup_steps": 1, "weight_decay": 0.1, "adam_beta2": 0.95}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    args = TrainingArguments(output_dir=str(directory), **{**settings, **quiet, **fields})
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(asset, dtype=torch.bfloat16),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        optimizer_cls_and_kwargs=None if states is None else trainer_optimizer(states, args),
    )


def optimizer_of(training: Trainer) -> AdamW:
    return getattr(training.optimizer, "optimizer", training.optimizer)


@pytest.mark.parametrize("states", ["int8", "int4"])
def test_training_resumes_to_the_bit(states, asset_model_dir, tmp_path):
    whole = trainer(asset_model_dir, tmp_path / "whole", states)
    whole.train()
    found = optimizer_of(whole)
    assert isinstance(found, AdamW) and {g["weight_decay"] for g in found.param_groups} == {0.0, 0.1}
    assert found.param_groups[0]["betas"] == (0.9, 0.95) and found.param_groups[0]["states"] == states
    bytes_of_states = sum(t.nbytes for state in found.state.values() for t in state.values())
    assert bytes_of_states < {"int8": 2.1, "int4": 1.13}[states] * whole.model.num_parameters()

    resumed = trainer(asset_model_dir, tmp_path / "resumed", states)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (whole, resumed)]
    assert losses[1] == losses[0] and len(losses[0]) == 4
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    again = optimizer_of(resumed).state
    for p, q in zip(whole.model.parameters(), resumed.model.parameters()):
        assert all(torch.equal(value, again[q][name]) for name, value in found.state[p].items())


def test_offloading_gives_the_same_model(asset_model_dir, tmp_path):
    plain = trainer(asset_model_dir, tmp_path, max_steps=2)
    plain.train()
    offloaded = trainer(asset_model_dir, tmp_path, states=None, max_steps=2)
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    offloaded.optimizer_cls_and_kwargs = CPUOffloadOptimizer, {"cls": AdamW8bit, **options}
    offloaded.train()
    assert all(map(torch.equal, plain.model.parameters(), offloaded.model.parameters()))
    start = AutoModelForCausalLM.from_pretrained(asset_model_dir, dtype=torch.bfloat16)
    assert not torch.equal(start.lm_head.weight, plain.model.lm_head.weight)


def test_accelerate_saves_and_loads_to_the_bit(tmp_path):
    def prepared(seed: int):
        torch.manual_seed(seed)
        model = torch.nn.Linear(128, 64).bfloat16()
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, AdamW8bit(model.parameters(), lr=1e-2))

    def train(accelerator, model, optimizer) -> None:
        for _ in range(3):
            accelerator.backward(model(torch.ones(4, 128).bfloat16()).float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    first = prepared(0)
    train(*first)
    first[0].save_state(str(tmp_path))
    train(*first)
    second = prepared(1)
    second[0].load_state(str(tmp_path))
    train(*second)
    assert all(map(torch.equal, first[1].parameters(), second[1].parameters()))


def test_refusals(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="states is '8bit'; allowed: 'fp32', 'bf16', 'int8', 'fp8', 'int4'"):
        trainer_optimizer("8bit", args)
    args.optim_args = "min_size=0"
    with pytest.raises(ValueError, match="optim_args is 'min_size=0', which has no effect"):
        trainer_optimizer("int8", args)
