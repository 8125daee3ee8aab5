"""Training by products in 8 bits under Trainer, PEFT, FSDP2 and DistributedDataParallel."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_quant import finish_training_, prepare_qat_, prepare_training_, quantize_
from hf_quant.coded_weight import CodedWeight
from hf_quant.integrations.training import trainer_optimizer
from hf_quant.optim import AdamW, AdamW8bit
from hf_quant.training import LowBitModule, gather_in_low_bits_, low_bit, products, prune_
from integration_tests.support.tiny_diffusion import make_model
from integration_tests.support.tiny_models import VOCAB, build
from integration_tests.support.two_processes import Failures, run_in_two_processes, whole


IDS = torch.randint(3, VOCAB, (16, 24), generator=torch.Generator().manual_seed(4))
DATA = [{"input_ids": ids, "labels": ids} for ids in IDS]
STEPS = 3
WEIGHT_CODES = products.weight_codes


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


@pytest.mark.parametrize("recipe", ["int8", "int8_weights"])
def test_trainer_resumes_to_the_bit(recipe, tmp_path):
    whole_run = trainer(prepared(recipe=recipe), tmp_path / "whole")
    whole_run.train()
    resumed = trainer(prepared(recipe=recipe), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole_run) and len(losses(whole_run)) == 4
    if recipe == "int8_weights":
        middle = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-4")
        codes = finish_training_(whole_run.model).state_dict()
        assert {name: p.dtype for name, p in middle.state_dict().items()} == {n: p.dtype for n, p in codes.items()}
        assert all(torch.equal(p, codes[name]) for name, p in middle.state_dict().items())


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


def codes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The codes of all layers that have some, in training or quantized, by their names without PEFT's."""
    return {name.replace(".base_layer", ""): p for name, p in model.state_dict().items() if name.endswith("qdata")}


@pytest.mark.parametrize("around", ["nothing", "a module", "adapters"])
def test_checkpoints_of_int8_weights_load_whatever_is_around_the_host(around, tmp_path):
    host = build("llama", torch.bfloat16)
    model = {
        "nothing": lambda: host,
        "a module": lambda: nn.ModuleDict({"decoder": host, "head": nn.Linear(64, 2)}),
        "adapters": lambda: get_peft_model(host, LoraConfig(r=4, target_modules=["q_proj"])),
    }[around]()
    prepare_training_(model, "int8_weights", min_size=16)
    if around == "adapters":
        host = model.unload()
    host.save_pretrained(tmp_path)
    loaded, codes = AutoModelForCausalLM.from_pretrained(tmp_path), codes_of(host)
    found = codes_of(loaded)
    assert codes and found.keys() == codes.keys() and all(torch.equal(found[name], codes[name]) for name in codes)
    torch.testing.assert_close(loaded(IDS[:2]).logits, host.eval()(IDS[:2]).logits, rtol=0.1, atol=0.1)


def test_checkpoints_of_int8_weights_of_a_diffusion_model(tmp_path):
    model = make_model("flux", torch.bfloat16)
    prepare_training_(model, "int8_weights", min_size=16)
    model.save_pretrained(tmp_path)
    loaded, codes = type(model).from_pretrained(tmp_path), codes_of(model)
    found = codes_of(loaded)
    assert codes and found.keys() == codes.keys() and all(torch.equal(found[name], codes[name]) for name in codes)
    finish_training_(model)
    assert all(torch.equal(p, loaded.state_dict()[name]) for name, p in model.state_dict().items())


def network(recipe: str | None = None, dtype: torch.dtype = torch.float32, N: int = 301) -> nn.Module:
    """Rows that two processes cannot halve."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, N), nn.GELU(), nn.Linear(N, 97)).to(dtype)
    if recipe is not None:
        prepare_training_(model, recipe, min_size=1)
    return model


def sharded(model: nn.Module, **options) -> nn.Module:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


class Gathered:
    """Counts the bytes that this process gives to be gathered."""

    def __enter__(self) -> "Gathered":
        self.bytes, self.patch = 0, pytest.MonkeyPatch()
        for name in ("all_gather_single", "all_gather_into_tensor"):  # newer and older names
            if hasattr(dist, name):
                self.patch.setattr(dist, name, partial(self.count, getattr(dist, name)))
        return self

    def count(self, call, *args, **kwargs):
        given = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
        self.bytes += given.nbytes
        return call(*args, **kwargs)

    def __exit__(self, *_) -> None:
        self.patch.undo()


def codes_by_way_of_rows(weight: torch.Tensor, recipe: products.Recipe) -> products.Codes:
    """The codes of a weight of which only those of its rows are known, as after they were gathered."""
    codes, scale, *_ = WEIGHT_CODES(weight, recipe)
    return WEIGHT_CODES(CodedWeight(codes, scale, weight.dtype), recipe)


def int8_weights_in_each_process(directory: Path) -> None:
    """Steps of one process, to the bit; a checkpoint of two processes in the middle; and what cannot be done."""
    make = partial(network, "int8_weights", torch.bfloat16)
    alone, model = make(), sharded(make())
    optimizers = [AdamW8bit(each.parameters(), lr=1e-3, min_size=0) for each in (alone, model)]
    for each, optimizer in zip((alone, model), optimizers):
        run(each, optimizer, range(STEPS))
    replica = make()
    replicated = DistributedDataParallel(replica)
    run(replicated, AdamW8bit(replicated.parameters(), lr=1e-3, min_size=0), range(STEPS))
    DistributedDataParallel(replica)  # which sends values, and leaves codes as they are
    assert all(torch.equal(value, alone.state_dict()[key]) for key, value in replica.state_dict().items())
    state, optimizer_state = get_state_dict(model, optimizers[1])
    assert {key: whole(value).dtype for key, value in state.items() if key.startswith("0")} == {
        "0.qdata": torch.int8,
        "0.scale": torch.int32,
        "0.bias": torch.bfloat16,
    }
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=directory / "dcp")
    model = sharded(make())
    optimizer = AdamW8bit(model.parameters(), lr=1e-3, min_size=0)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=directory / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    for each, its in ((alone, optimizers[0]), (model, optimizer)):
        run(each, its, range(STEPS, 2 * STEPS))
    expected = alone.state_dict()
    found = {key: whole(value) for key, value in model.state_dict().items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    again = sharded(network("int8_weights", torch.bfloat16))
    set_model_state_dict(again, dict(expected), options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(whole(value), expected[key]) for key, value in again.state_dict().items())
    with pytest.raises(ValueError, match="int8 weights are sharded: gather the model in one process"):
        finish_training_(model)
    with pytest.raises(ValueError, match="0.weight is sharded: quantize or prepare the model before that"):
        prepare_training_(sharded(network()), "int8_weights", min_size=1)
    for prepare in (prune_, quantize_, prepare_qat_):
        with pytest.raises(ValueError, match="0.weight is sharded: quantize or prepare the model before that"):
            prepare(sharded(network()))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rows: slice = slice(None)) -> list[float]:
    """The loss of each step."""
    losses = []
    for step in steps:
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))[rows]
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(model: nn.Module, rows: slice) -> list[torch.Tensor]:
    is_bf16 = next(model.parameters()).dtype == torch.bfloat16  # which torch's optimizers round otherwise in a shard
    make = partial(AdamW8bit, lr=1e-3) if is_bf16 else partial(torch.optim.SGD, lr=0.1)
    run(model, make(model.parameters()), range(STEPS), rows)
    return [whole(p.detach()) for p in model.parameters()]


def test_two_processes_train_as_one(tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path / "llama")
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)


def in_each_process(directory: Path, failures: Failures) -> None:
    rank, learned = dist.get_rank(), {}
    for recipe in ("int8", "fp8_row", "fp8_tensor", "bitnet"):
        alone = network(recipe)
        expected = train(alone, slice(None))
        with failures.of(f"{recipe}, fully_shard of the same rows"):
            found = train(sharded(network(recipe)), slice(None))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
        with failures.of(f"{recipe}, DistributedDataParallel, half of the rows each"):
            found = train(DistributedDataParallel(network(recipe)), slice(4 * rank, 4 * rank + 4))
            # Columns of the inputs have scales of their own in each process.
            assert all(torch.allclose(a, b, rtol=0.02, atol=2e-3) for a, b in zip(found, expected))
        with failures.of(f"{recipe}, half of the bytes are gathered"):
            model = sharded(network(recipe, torch.bfloat16))
            with Gathered() as before:
                train(model, slice(None))
            model = sharded(network(recipe, torch.bfloat16))
            assert gather_in_low_bits_(model) == ["0.weight", "2.weight"]
            with Gathered() as after, pytest.MonkeyPatch.context() as patch:
                found = train(model, slice(None))
                assert 0 < after.bytes <= 0.52 * before.bytes
                patch.setattr(products, "weight_codes", codes_by_way_of_rows)
                patch.setattr(low_bit, "weight_codes", codes_by_way_of_rows)
                expected = train(network(recipe, torch.bfloat16), slice(None))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
    with failures.of("int8 weights"):
        int8_weights_in_each_process(directory)
    alone_in_shards = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for recipe in ("int8", "fp8_row", "fp8_tensor", "bitnet", "int8_weights"):
        with failures.of(f"{recipe}, shards of one process"):
            model = sharded(network(recipe, torch.bfloat16), mesh=alone_in_shards)
            if recipe != "int8_weights":
                gather_in_low_bits_(model)
            with pytest.MonkeyPatch.context() as patch:
                found = train(model, slice(None))
                patch.setattr(products, "weight_codes", codes_by_way_of_rows)
                patch.setattr(low_bit, "weight_codes", codes_by_way_of_rows)
                expected = train(network(recipe, torch.bfloat16), slice(None))
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
    with failures.of("nothing to gather"):
        with pytest.raises(ValueError, match="could be gathered in low bits: call prepare_training_, then"):
            gather_in_low_bits_(network())
    mesh = init_device_mesh("cpu", (2,))
    for recipe, rtol in (("int8", 2e-3), ("fp8_row", 1e-6), ("sparse24", 1e-6)):
        with failures.of(f"{recipe}, tensor parallelism"):
            alone, model, plain = network(recipe, N=256), network(recipe, N=256), network(N=256)
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            own, expected, other = (
                run(each, torch.optim.SGD(each.parameters(), lr=0.1, foreach=False), range(STEPS))
                for each in (model, alone, plain)
            )
            assert own == pytest.approx(expected, rel=rtol) and own != pytest.approx(other, rel=1e-4)
    with failures.of("tensor parallelism, one scale for a matrix"):
        model = network("fp8_tensor", N=256)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with pytest.raises(ValueError, match="its parts do not train by 'fp8_tensor': take 'int8' or 'fp8_row'"):
            model(torch.ones(2, 128))
    for recipe in (None, "int8"):
        with failures.of(f"{recipe}, a plan of transformers"):
            model = AutoModelForCausalLM.from_pretrained(directory / "llama", tp_plan="auto")
            if recipe is not None:
                prepare_training_(model, recipe, min_size=1)
            learned[recipe] = train_llama(model)
    with failures.of("plans of transformers"):
        alone = {None: build("llama", torch.float32), "int8": prepared()}
        for recipe, model in alone.items():
            assert learned[recipe] == pytest.approx(train_llama(model), rel=1e-6 if recipe is None else 1e-3)
        assert learned["int8"] != pytest.approx(learned[None], rel=1e-6)


def train_llama(model: nn.Module) -> list[float]:
    optimizer, losses = AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        loss = model(input_ids=IDS[4 * step : 4 * step + 4], labels=IDS[4 * step : 4 * step + 4]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
