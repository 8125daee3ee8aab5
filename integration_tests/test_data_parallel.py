"""DistributedDataParallel in two processes: plain torch, accelerate, and Trainer under torchrun.

Both processes end with the codes of process 0, and training gives the losses of one process that reads both halves of
each batch.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_quant import quantize_
from integration_tests.support.tiny_models import VOCAB, build
from integration_tests.support.two_processes import Failures, run_in_two_processes


SCHEMES = ("int8", "W8A8", "int4", "nf4", "fp8", "int3", "int2", "mxfp4")
DTYPES = (torch.bfloat16, torch.float16)
STEPS = 3
BATCH = torch.randint(3, VOCAB, (4, 12), generator=torch.Generator().manual_seed(5))
HALVES = BATCH.chunk(2)


def quantized(scheme: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    return quantize_(build("llama", dtype, seed=seed), scheme)


def with_adapter(model: nn.Module) -> PeftModel:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))


def codes(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if not p.is_floating_point()]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def losses_of_one_process(model: nn.Module) -> list[float]:
    """For each step the mean of the losses of both halves; their gradients are averaged."""
    optimizer, found = optimizer_of(model), []
    for _ in range(STEPS):
        losses = [model(half, labels=half).loss for half in HALVES]
        for loss in losses:
            loss.backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad.div_(2)  # not the losses: in fp16 their gradients would lose low bits
        optimizer.step()
        optimizer.zero_grad()
        found.append(sum(loss.item() for loss in losses) / 2)
    return found


def losses_of_two_processes(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward=torch.Tensor.backward
) -> list:
    half, found = HALVES[dist.get_rank()], []
    for _ in range(STEPS):
        loss = model(input_ids=half, labels=half).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone() / 2
        dist.all_reduce(total)
        found.append(total.item())
    return found


def assert_close(found: list[float], expected: list[float]) -> None:
    assert expected[-1] < expected[0] - 0.01, expected
    assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(found, expected, strict=True)), (found, expected)


def test_two_processes_train_as_one(tmp_path):
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)


def in_each_process(directory: Path, failures: Failures) -> None:
    for scheme in SCHEMES:
        for dtype in DTYPES:
            with failures.of(f"{scheme}, {dtype}"):
                check_training(scheme, dtype)
    for check in (check_accelerate, check_without_synchronization, check_a_model_alone):
        with failures.of(check.__name__):
            check()


def check_training(scheme: str, dtype: torch.dtype) -> None:
    single = with_adapter(quantized(scheme, dtype))
    model = with_adapter(quantized(scheme, dtype, seed=dist.get_rank()))
    assert all(map(torch.equal, codes(model), codes(single))) == (dist.get_rank() == 0)
    model(BATCH)  # what is kept of the codes for later calls must not outlive them
    before = copy.deepcopy(single.state_dict())
    parallel = DistributedDataParallel(model)
    after = model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    assert_close(losses_of_two_processes(parallel, optimizer_of(model)), losses_of_one_process(single))
    assert all(map(torch.equal, codes(model), codes(single)))


def check_accelerate() -> None:
    single, model = (with_adapter(quantized("int4", torch.bfloat16)) for _ in range(2))
    accelerator = Accelerator(cpu=True)
    parallel, optimizer = accelerator.prepare(model, optimizer_of(model))
    assert isinstance(parallel, DistributedDataParallel)
    assert_close(losses_of_two_processes(parallel, optimizer, accelerator.backward), losses_of_one_process(single))


def check_without_synchronization() -> None:
    """`init_sync=False` leaves every process its own."""
    model = with_adapter(quantized("int8", torch.bfloat16, seed=dist.get_rank()))
    before = [p.clone() for p in model.parameters()]
    DistributedDataParallel(model, init_sync=False)
    assert all(map(torch.equal, model.parameters(), before))


def check_a_model_alone() -> None:
    """A layer of nobody's model beside a trainable one."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
    quantize_(model, {"weights": None, "modules": {"0": "int4"}})
    DistributedDataParallel(model)(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    gathered = [torch.zeros_like(model[0].scale, dtype=torch.int32) for _ in range(2)]
    dist.all_gather(gathered, model[0].scale.int())
    assert torch.equal(*gathered) and gathered[0].any()


def train(directory: Path) -> None:
    """Trainer as a user's script has it; with torchrun in two processes, else in one that accumulates."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    model = AutoModelForCausalLM.from_pretrained(directory / "base")
    arguments = TrainingArguments(
        output_dir=str(directory / f"trained-by-{processes}"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // processes,
        max_steps=STEPS,
        learning_rate=0.05,
        optim="sgd",
        warmup_steps=0,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in BATCH.repeat(STEPS, 1)]
    trainer = Trainer(model=with_adapter(model), args=arguments, train_dataset=data)
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(data)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (directory / f"losses-of-{processes}.json").write_text(json.dumps(losses))


def test_trainer_under_torchrun(tmp_path):
    quantized("int4", torch.bfloat16).save_pretrained(tmp_path / "base")
    train(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom torch import distributed\n"
        "from integration_tests.test_data_parallel import train\n"
        "train(Path(sys.argv[1]))\ndistributed.destroy_process_group()\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(script),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected, found = (json.loads((tmp_path / f"losses-of-{n}.json").read_text()) for n in (1, 2))
    assert found == pytest.approx(expected, rel=1e-5) and found[-1] < found[0]
    one, two = (tmp_path / f"trained-by-{n}" / f"checkpoint-{STEPS}" / "adapter_model.safetensors" for n in (1, 2))
    assert one.is_file() and two.is_file()
