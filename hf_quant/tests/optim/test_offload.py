"""`CPUOffloadOptimizer`: the bits of the optimizer that it carries, however the gradients come."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hf_quant.optim import AdamW4bit, AdamW8bit, CPUOffloadOptimizer
from hf_quant.tests.optim.test_adam import network


BATCH = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()


def groups(model: nn.Module) -> list[dict]:
    return [{"params": model[:3].parameters(), "weight_decay": 0.1}, {"params": model[3:].parameters()}]


def train(model: nn.Module, optimizer: Optimizer, steps: int, clip=nn.utils.clip_grad_norm_) -> list[float]:
    """Batches in two parts, clipped gradients, a schedule."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    losses = []
    for _ in range(steps):
        for part in BATCH.chunk(2):
            loss = model(part).float().square().mean()
            loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


def same_states(a: dict, b: dict) -> bool:
    pairs = [(a["state"][i][name], b["state"][i][name]) for i in a["state"] for name in a["state"][i]]
    return a["param_groups"] == b["param_groups"] and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("cls", [AdamW8bit, torch.optim.AdamW])
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_it_trains_as_the_optimizer_itself(cls, offload_gradients):
    options = {"lr": 3e-3} if cls is torch.optim.AdamW else {"lr": 3e-3, "min_size": 64}
    alone, offloaded = network(), network()
    plain = cls(groups(alone), **options)
    optimizer = CPUOffloadOptimizer(groups(offloaded), cls, offload_gradients=offload_gradients, **options)
    expected = train(alone, plain, 6)
    clip = (lambda _, norm: optimizer.clip_grad_norm_(norm)) if offload_gradients else nn.utils.clip_grad_norm_
    assert train(offloaded, optimizer, 6, clip) == expected and expected[-1] < expected[0] / 2
    assert same(offloaded, alone) and same_states(optimizer.state_dict(), plain.state_dict())


def test_gradients_leave_their_parameters():
    model = network()
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, offload_gradients=True)
    model(BATCH).float().square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    before = optimizer.clip_grad_norm_(1e-3)
    assert before > 1e-2 and abs(optimizer.clip_grad_norm_(1.0) - 1e-3) < 1e-4
    optimizer.zero_grad()
    weights = copy.deepcopy(model)
    optimizer.step()
    assert same(model, weights)


def test_each_gradient_is_used_by_one_step():
    """Also in a loop that calls zero_grad of the model, as Trainer does."""
    layer = nn.Linear(4, 4)
    optimizer = CPUOffloadOptimizer(layer.parameters(), torch.optim.SGD, lr=1.0, offload_gradients=True)
    before = layer.weight.detach().clone()
    for _ in range(3):
        for _ in range(2):
            layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        layer.zero_grad()
    torch.testing.assert_close(before - layer.weight, torch.full((4, 4), 6.0))


@pytest.mark.parametrize("cls", [AdamW8bit, torch.optim.Adagrad])
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_a_parameter_is_trained_once_it_is_unfrozen(cls, offload_gradients):
    """`network` has a frozen layer. Its gradient counts in the first norm, too."""
    alone, offloaded = network(), network()
    plain = cls(alone.parameters(), lr=3e-3)
    optimizer = CPUOffloadOptimizer(offloaded.parameters(), cls, lr=3e-3, offload_gradients=offload_gradients)
    clip = (lambda _, norm: optimizer.clip_grad_norm_(norm)) if offload_gradients else nn.utils.clip_grad_norm_
    before = offloaded[5].weight.detach().clone()
    for steps in (2, 3):
        assert train(offloaded, optimizer, steps, clip) == train(alone, plain, steps)
        for model in (alone, offloaded):
            model[5].requires_grad_(True)
    assert not torch.equal(offloaded[5].weight, before)
    assert same(offloaded, alone) and same_states(optimizer.state_dict(), plain.state_dict())


def test_a_later_optimizer_gets_the_gradients():
    """A notebook makes it again: the hooks of the earlier one stay with the parameters."""
    layer = nn.Linear(4, 4)
    first, second = (
        CPUOffloadOptimizer(layer.parameters(), torch.optim.SGD, lr=1.0, offload_gradients=True) for _ in range(2)
    )
    layer(torch.ones(1, 4)).sum().backward()
    assert first.clip_grad_norm_(9.0) == 0 and second.clip_grad_norm_(9.0) == 20**0.5
    before = layer.bias.detach().clone()
    second.step()
    torch.testing.assert_close(before - layer.bias, torch.ones(4))


def test_clipping_and_scaling_that_find_no_gradients_are_named():
    def offloaded(**options) -> tuple[torch.Tensor, CPUOffloadOptimizer]:
        layer = nn.Linear(4, 4)
        return layer(torch.ones(1, 4)).sum(), CPUOffloadOptimizer(layer.parameters(), AdamW8bit, **options)

    for clips in (True, False):
        loss, optimizer = offloaded(offload_gradients=True)
        if clips:
            optimizer.register_step_pre_hook(clip_to_one)
        loss.backward()
        with nullcontext() if clips else pytest.warns(UserWarning, match="clips nothing. .*clip_grad_norm_ of this"):
            optimizer.step()
        optimizer.step()  # it warns once
    for offload_gradients in (False, True):
        loss, optimizer = offloaded(offload_gradients=offload_gradients)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss).backward()
        expected = pytest.raises(ValueError, match="GradScaler finds no gradients")
        with expected if offload_gradients else nullcontext():
            scaler.step(optimizer)


def clip_to_one(optimizer: Optimizer, *_) -> None:
    assert isinstance(optimizer, CPUOffloadOptimizer)
    optimizer.clip_grad_norm_(1.0)


def test_it_saves_and_loads_what_the_optimizer_itself_does():
    model = network()
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, lr=1e-3, min_size=64)
    train(model, optimizer, 2)
    saved, twin = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    train(model, optimizer, 2)
    for cls in (CPUOffloadOptimizer, AdamW8bit):
        again = copy.deepcopy(twin)
        fresh = cls(again.parameters(), *((AdamW8bit,) if cls is CPUOffloadOptimizer else ()), lr=5.0)
        fresh.load_state_dict(saved)
        assert fresh.param_groups[0]["min_size"] == 64
        train(again, fresh, 2)
        assert same(again, model)


def test_weights_that_are_loaded_later_are_seen():
    """Before the first step, and between two; a copy of old weights would be written back by a step of size 0."""
    model, other = network(), network(seed=1)
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, lr=0.0)
    for _ in range(2):
        model.load_state_dict(other.state_dict())
        train(model, optimizer, 1)
        assert same(model, other)
        other = network(seed=2)


def test_named_parameters_a_closure_and_a_later_group():
    model = network(torch.float32)
    optimizer = CPUOffloadOptimizer(model[2].named_parameters(), torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": model[4].named_parameters(), "lr": 0.0})
    before = copy.deepcopy(model)

    def closure() -> torch.Tensor:
        loss = model(BATCH.float()).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert not torch.equal(model[2].weight, before[2].weight) and torch.equal(model[4].weight, before[4].weight)
    assert optimizer.param_groups[1]["momentum"] == 0


@pytest.mark.parametrize("cls", [AdamW8bit, torch.optim.SGD])
def test_schedules_change_its_momentum(cls):
    options, found = {"momentum": 0.9} if cls is torch.optim.SGD else {"min_size": 64}, []
    alone, offloaded = network(), network()
    for model, make in ((alone, cls), (offloaded, lambda p, **k: CPUOffloadOptimizer(p, cls, **k))):
        optimizer = make(model.parameters(), lr=1e-3, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=4)
        for _ in range(3):
            model(BATCH).float().square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found.append(optimizer.param_groups[0]["momentum" if "momentum" in options else "betas"])
    assert found[0] == found[1] and same(offloaded, alone)


def test_refusals():
    with pytest.raises(ValueError, match="states is 'int5'"):
        CPUOffloadOptimizer(network().parameters(), AdamW4bit.__base__.__base__, states="int5")
    with pytest.raises(TypeError, match="momentum"):
        CPUOffloadOptimizer(network().parameters(), AdamW8bit, momentum=0.9)
