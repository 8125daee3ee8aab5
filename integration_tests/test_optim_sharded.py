"""Optimizers with states in 8 and 4 bits in two processes: every sharding has the bits of one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hf_quant.optim import AdamW, CPUOffloadOptimizer
from integration_tests.support.two_processes import Failures, run_in_two_processes, whole


STATES = ("fp32", "bf16", "int8", "fp8", "int4")
STEPS = 3


def network(seed: int = 0) -> nn.Module:
    """Rows that two processes cannot halve, fewer rows than processes, and vectors."""
    torch.manual_seed(seed)
    layers = [nn.Linear(70, 301), nn.GELU(), nn.LayerNorm(301), nn.Linear(301, 33), nn.Linear(33, 1)]
    return nn.Sequential(*layers).bfloat16()


def optimizer_of(model: nn.Module, states: str) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, states=states, min_size=32)


def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 70, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Of whole parameters and states."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = whole(p.detach())
        found |= {f"{name} {key}": whole_codes(value) for key, value in optimizer.state[p].items()}
    return found


def whole_codes(value: Tensor) -> Tensor:
    """A state as bytes; gloo gathers no float8."""
    return whole(value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    wrong = [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])]
    assert not wrong, wrong


def trained_alone(states: str, steps: int = STEPS) -> tuple[nn.Module, AdamW]:
    model = network()
    optimizer = optimizer_of(model, states)
    train(model, optimizer, range(steps))
    return model, optimizer


def test_two_processes_have_the_bits_of_one(tmp_path):
    failures = run_in_two_processes(in_each_process, tmp_path)
    assert not failures, "\n".join(failures)
    for states in STATES:  # what two processes have saved, one goes on with
        model = network(seed=1)
        optimizer = optimizer_of(model, states)
        load(tmp_path / states, model, optimizer)
        train(model, optimizer, range(STEPS, 2 * STEPS))
        assert_same(bits(model, optimizer), bits(*trained_alone(states, 2 * STEPS)))


def load(directory: Path, model: nn.Module, optimizer: AdamW) -> None:
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(parts, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])


def in_each_process(directory: Path, failures: Failures) -> None:
    for states in STATES:
        with failures.of(f"{states}, fully_shard"):
            check_fully_sharded(states, directory / states)
        with failures.of(f"{states}, placements"):
            check_placements(states)
    for check in (check_refusals, check_offloaded_gradients_are_refused, check_a_first_step_of_zeros):
        with failures.of(check.__name__):
            check()


def sharded(seed: int = 0) -> nn.Module:
    model = network(seed)
    fully_shard(model[0])
    return fully_shard(model)


def check_fully_sharded(states: str, directory: Path) -> None:
    model = sharded()
    optimizer = optimizer_of(model, states)
    train(model, optimizer, range(STEPS))
    assert_same(bits(model, optimizer), bits(*trained_alone(states)))
    rows = optimizer.state[model[0].weight]["exp_avg"].to_local().shape[0]
    assert rows == (151, 150)[dist.get_rank()]
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(parts, checkpoint_id=directory)
    again = sharded(seed=1)
    other = optimizer_of(again, states)
    load(directory, again, other)
    assert_same(bits(again, other), bits(model, optimizer))


def check_placements(states: str) -> None:
    """Shards of rows, of columns, of vectors at odd places, and copies."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    for shape, placement in (((5, 512), Shard(1)), ((5, 300), Shard(0)), ((301,), Shard(0)), ((4, 90), Replicate())):
        value = torch.randn(shape, generator=generator).bfloat16()
        alone, parted = (nn.Parameter(p) for p in (value.clone(), distribute_tensor(value.clone(), mesh, [placement])))
        for seed in range(2):
            gradient = torch.randn(shape, generator=generator).bfloat16()
            alone.grad, parted.grad = gradient, distribute_tensor(gradient, mesh, [placement])
            for p in (alone, parted):
                AdamW([p], lr=1e-2, states=states, min_size=1, seed=seed).step()
        assert torch.equal(whole(parted.detach()), alone.detach()), (shape, placement)
        assert not torch.equal(alone.detach(), value)


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for shape, placement, match in (
        ((8, 300), Shard(1), "not a multiple of"),
        ((8, 4, 64), Shard(1), "allowed: shards of its rows"),
    ):
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [placement]))
        p.grad = distribute_tensor(torch.ones(shape), mesh, [placement])
        try:
            AdamW([p], states="int8", min_size=1).step()
        except ValueError as error:
            assert match in str(error), error
        else:
            raise AssertionError(f"no error for {placement}")


def check_offloaded_gradients_are_refused() -> None:
    """DistributedDataParallel would average what has left; gradients that stay until the step are averaged."""
    CPUOffloadOptimizer(network().parameters(), AdamW)
    with pytest.raises(ValueError, match="offload_gradients=True in one of 2 processes"):
        CPUOffloadOptimizer(network().parameters(), AdamW, offload_gradients=True)


def check_a_first_step_of_zeros() -> None:
    """One process has nothing but zeros of a gradient that is not zero: both count the step."""
    mesh = init_device_mesh("cpu", (2,))
    gradient = torch.zeros(301, 64)
    gradient[0, 0] = 1
    p = nn.Parameter(distribute_tensor(torch.ones(301, 64), mesh, [Shard(0)]))
    for value, step in ((gradient * 0, 0), (gradient, 1)):
        optimizer = AdamW([p], lr=0.0, states="int8")
        p.grad = distribute_tensor(value, mesh, [Shard(0)])
        optimizer.step()
        assert optimizer.state[p]["step"] == step
