"""FSDP2 in two processes: codes are sharded as they are, the forward is bit-equal, adapters train."""

import copy
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_quant import QuantizerConfig, quantize_
from hf_quant.integrations.transformers.parallel import refuse_fsdp_of_integers
from integration_tests.support.tiny_models import build, inputs
from integration_tests.support.two_processes import SHARDS_INTEGERS, Failures, change, run_in_two_processes, whole


TIED = QuantizerConfig("int4", modules={"lm_head": "int8", "model.embed_tokens": "int8"})
# {case: (architecture, config, fields of LoraConfig)}
CASES: dict[str, tuple[str, QuantizerConfig, dict]] = {
    "int8": ("llama", QuantizerConfig("int8"), {}),
    "int4 asymmetric": ("llama", QuantizerConfig("int4", group_size=32, symmetric=False), {"use_dora": True}),
    "nvfp4": ("llama", QuantizerConfig("nvfp4"), {}),
    "W8A8": ("llama", QuantizerConfig("W8A8"), {}),
    "W8A8_FP8": ("llama", QuantizerConfig("W8A8_FP8"), {}),
    "static": ("llama", QuantizerConfig("W8A8", activation_scale="static"), {}),
    "tied": ("llama_tied", TIED, {}),
    "experts": ("qwen3_moe", QuantizerConfig("int8"), {"target_modules": ["q_proj", "o_proj"]}),
}
IDS = inputs("llama")["input_ids"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def load(directory: Path, name: str, **fields) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory / name.replace(" ", "-"), **fields)


@pytest.mark.skipif(not SHARDS_INTEGERS, reason="fully_shard of this torch takes floating-point parameters only")
def test_two_processes_agree_with_one(tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path / "plain")
    for case, (architecture, config, _) in CASES.items():
        ids = IDS if config.activation_scale == "static" else None
        model = quantize_(build(architecture, torch.float32), config, calibration=ids)
        model.save_pretrained(tmp_path / case.replace(" ", "-"))
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)


def test_a_torch_that_shards_no_integers_is_named(monkeypatch):
    model = nn.Linear(4, 4)
    model.config = types.SimpleNamespace(distributed_config=DistributedConfig(fsdp_size=2))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    refuse_fsdp_of_integers(model)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ValueError, match="fsdp_size=2 with torch 2.11.0.*Install torch 2.13"):
        refuse_fsdp_of_integers(model)
    model.config.distributed_config = DistributedConfig(tp_size=2)
    refuse_fsdp_of_integers(model)


def in_each_process(directory: Path, failures: Failures) -> None:
    for case in CASES:
        with failures.of(f"{case}, fully_shard"):
            check_training(case, directory)
        with failures.of(f"{case}, loaded sharded"):
            check_load(case, directory)
    for check in (check_mixed_precision, check_16_bit_scales, check_quantization_on_load, check_writes):
        with failures.of(check.__name__):
            check(directory)


def with_adapter(model: nn.Module, fields: dict) -> PeftModel:
    torch.manual_seed(1)
    fields = {"target_modules": "all-linear", "r": 4, "init_lora_weights": False, **fields}
    return get_peft_model(model, LoraConfig(**fields))


def shard(model: PeftModel, **fields) -> PeftModel:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **fields)
    return fully_shard(model, **fields)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def train(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, gradients of the first step)"""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses, first = [], {}
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        first = first or {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def codes(model: nn.Module) -> dict[str, Tensor]:
    parts = ("qdata", "scale", "zero_point", "global_scale")
    return {n: p for n, p in model.named_parameters() if n.rpartition(".")[2].startswith(parts)}


def assert_sharded_integers(model: nn.Module) -> None:
    for name, parameter in codes(model).items():
        assert not parameter.dtype.is_floating_point and not parameter.requires_grad, name
        rows = parameter.shape[0]
        assert parameter.to_local().shape[0] in (rows // 2, rows - rows // 2), name


def check_training(case: str, directory: Path) -> None:
    _, _, fields = CASES[case]
    base = load(directory, case)
    expected, model = with_adapter(copy.deepcopy(base), fields), shard(with_adapter(base, fields))
    stored = {name: p.clone() for name, p in codes(expected).items()}
    assert torch.equal(logits(model), logits(expected))
    (losses, gradients), (expected_losses, expected_gradients) = train(model.train()), train(expected.train())
    assert gradients.keys() == expected_gradients.keys()
    # Both processes see the same batch: the mean of two equal gradients.
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected_gradients.items())
    assert losses == expected_losses and losses[-1] < losses[0] - 0.01, losses
    assert_sharded_integers(model)
    assert all(torch.equal(whole(p), stored[name]) for name, p in codes(model).items())


def check_load(case: str, directory: Path) -> None:
    single, sharded = load(directory, case), load(directory, case, distributed_config=DistributedConfig(fsdp_size=2))
    assert_sharded_integers(sharded)
    assert torch.equal(logits(sharded), logits(single))
    tokens = [m.generate(IDS, max_new_tokens=4, do_sample=False) for m in (sharded, single)]
    assert torch.equal(*tokens)
    target = directory / f"{case.replace(' ', '-')}-saved"
    sharded.save_pretrained(target)
    dist.barrier()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(target)), logits(single))
    if case != "tied":  # the host stores both of two tied weights, of a 16-bit model, too
        saved, original = (d / "model.safetensors" for d in (target, directory / case.replace(" ", "-")))
        assert saved.read_bytes() == original.read_bytes()


def check_mixed_precision(directory: Path) -> None:
    """The policy casts norms, embeddings and adapters, and leaves codes and scales alone."""
    for case in ("int4 asymmetric", "nvfp4"):
        base = load(directory, case)
        expected, model = with_adapter(copy.deepcopy(base), {}), shard(with_adapter(base, {}), mp_policy=BF16)
        for parameter in expected.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
        found = logits(model)
        assert found.dtype == torch.bfloat16 and torch.equal(found, logits(expected)), case
        losses, _ = train(model.train())
        assert losses[-1] < losses[0] - 0.01, losses
        assert_sharded_integers(model)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def check_16_bit_scales(directory: Path) -> None:
    """They are stored as int16, which gloo and NCCL cannot send."""
    source = directory / "16-bit"
    if dist.get_rank() == 0:
        quantize_(build("llama", torch.bfloat16), "int8").save_pretrained(source)
    dist.barrier()
    single = AutoModelForCausalLM.from_pretrained(source)
    assert {p.dtype for p in codes(single).values()} == {torch.int8, torch.int16}
    for number, fields in enumerate(({"tp_plan": "auto"}, {"distributed_config": DistributedConfig(fsdp_size=2)})):
        AutoModelForCausalLM.from_pretrained(source, **fields).save_pretrained(directory / f"16-bit-{number}")
        dist.barrier()
        saved = directory / f"16-bit-{number}" / "model.safetensors"
        assert saved.read_bytes() == (source / "model.safetensors").read_bytes(), fields
    for broadcast in (False, True):  # loaded from all processes, or from the first
        model = fully_shard(quantize_(build("llama", torch.bfloat16, seed=1), "int8"))
        state = single.state_dict() if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, dict(state), options=options)
        assert torch.equal(logits(model), logits(single)), broadcast


def check_quantization_on_load(directory: Path) -> None:
    try:
        distributed = DistributedConfig(fsdp_size=2)
        load(directory, "plain", distributed_config=distributed, quantization_config=QuantizerConfig())
    except ValueError as error:
        assert "fsdp_size=2 with quantization on load" in str(error), error
    else:
        raise AssertionError("no error")


def check_writes(directory: Path) -> None:
    """Weights can be read between forwards, as every process does at the same time; they cannot be replaced."""
    single, model = (
        load(directory, "nvfp4"),
        load(directory, "nvfp4", distributed_config=DistributedConfig(fsdp_size=2)),
    )
    layers = [m.model.layers[0].mlp.up_proj for m in (single, model)]
    assert change(layers[1].weight * 1, layers[0].weight * 1) == 0
    for write in (lambda: layers[1].requantize_weight_("weight", torch.zeros(128, 64)), model.dequantize):
        try:
            write()
        except ValueError as error:
            assert "sharded" in str(error), error
        else:
            raise AssertionError("no error")
