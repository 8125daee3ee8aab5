"""Training by products in 8 bits under Trainer, PEFT, FSDP2 and DistributedDataParallel."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_quant import finish_training_, prepare_training_
from hf_quant.integrations.training import trainer_optimizer
from hf_quant.training import LowBitModule
from integration_tests.support.tiny_models import VOCAB, build
from integration_tests.support.two_processes import Failures, run_in_two_processes, whole


IDS = torch.randint(3, VOCAB, (16, 24), generator=torch.Generator().manual_seed(4))
DATA = [{"input_ids": ids, "labels": ids} for ids in IDS]
STEPS = 3


def prepared(name: str = "llama", recipe: str = "int8", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build(name, dtype)
    prepare_training_(model, recipe, min_size=1)
    return model


def trainer(model: nn.Module, directory: Path, **fields) -> Trainer:
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    args = TrainingArguments(output_dir=str(directory), **{**settings, **fields})
    return Trainer(model, args, train_dataset=DATA, optimizer_cls_and_kwargs=trainer_optimizer("int8", args))


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def test_trainer_resumes_to_the_bit(tmp_path):
    whole_run = trainer(prepared(), tmp_path / "whole")
    whole_run.train()
    resumed = trainer(prepared(), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole_run) and len(losses(whole_run)) == 4


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_trainer_learns_as_in_16_bit_and_saves_a_16_bit_model(name, tmp_path):
    whole_run = trainer(prepared(name), tmp_path / "whole")
    whole_run.train()
    plain = trainer(build(name, torch.float32), tmp_path / "plain")
    plain.train()
    for own, other in zip(losses(whole_run), losses(plain)):
        assert own != other and own == pytest.approx(other, rel=0.03)
    model = finish_training_(whole_run.model.eval())
    model.save_pretrained(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(reloaded(IDS).logits, model(IDS).logits)
    assert not hasattr(reloaded.config, "quantization_config")


def test_accumulation_and_checkpointing_under_autocast(tmp_path):
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True, "max_steps": 3}
    run = trainer(prepared(), tmp_path, **options)
    run.train()
    plain = trainer(build("llama", torch.float32), tmp_path / "plain", **options)
    plain.train()
    assert losses(run) == pytest.approx(losses(plain), rel=0.03) and losses(run) != losses(plain)


@pytest.mark.parametrize("adapter_first", [False, True])
def test_lora(adapter_first, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    model = build("llama", torch.float32)
    if adapter_first:
        model = get_peft_model(model, lora)
    found = prepare_training_(model, "int8", min_size=16)
    if not adapter_first:
        model = get_peft_model(model, lora)
    assert any(name.endswith("down_proj.base_layer" if adapter_first else "down_proj") for name in found.layers)
    run = trainer(model, tmp_path)
    run.train()
    assert all(loss > 0 for loss in losses(run))
    moved = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert moved and all(bool(p.any()) for p in moved)
    merged = finish_training_(model).merge_and_unload()
    assert not any(isinstance(module, LowBitModule) for module in merged.modules())


def network() -> nn.Module:
    """Rows that two processes cannot halve."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 301), nn.GELU(), nn.Linear(301, 33))


def train(model: nn.Module, rows: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.randn(8, 70, generator=torch.Generator().manual_seed(step))[rows]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p.detach()) for p in model.parameters()]


def test_two_processes_train_as_one(tmp_path):
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)


def in_each_process(directory: Path, failures: Failures) -> None:
    rank = dist.get_rank()
    for recipe in ("int8", "fp8_row"):
        alone = network()
        prepare_training_(alone, recipe, min_size=1)
        expected = train(alone, slice(None))
        with failures.of(f"{recipe}, fully_shard of the same rows"):
            model = network()
            prepare_training_(model, recipe, min_size=1)
            fully_shard(model[0])
            found = train(fully_shard(model), slice(None))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
        with failures.of(f"{recipe}, DistributedDataParallel, half of the rows each"):
            model = network()
            prepare_training_(model, recipe, min_size=1)
            found = train(DistributedDataParallel(model), slice(4 * rank, 4 * rank + 4))
            # Columns of the inputs have scales of their own in each process.
            assert all(torch.allclose(a, b, rtol=0.02, atol=2e-3) for a, b in zip(found, expected))
    with failures.of("tensor parallelism"):
        model = network()
        prepare_training_(model, "int8", min_size=1)
        mesh = init_device_mesh("cpu", (2,))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="sharded by tensor parallelism"):
            model(torch.ones(2, 70))
