"""The AdamW of hf_quant.optim in one process: beside torch's own, its states, state dicts, and refusals."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_quant.optim import AdamW, AdamW4bit, AdamW8bit, AdamWFp8, CPUOffloadOptimizer


pytestmark = pytest.mark.usefixtures("poison_empty")
STATES = ("fp32", "bf16", "int8", "fp8", "int4")


def network(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """Matrices, an odd number of columns, a convolution, vectors, and a frozen layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Flatten(),
        nn.Linear(8 * 36, 130),
        nn.LayerNorm(130),
        nn.Linear(130, 65),
        nn.Linear(65, 3),
    )
    model[5].requires_grad_(False)
    return model.to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: range, schedule=None) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(model[2].weight.dtype)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def bits(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in (*model.parameters(), *states)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_with_fp32_states_it_is_torchs():
    """Two groups, a schedule, clipping."""
    models = [network(torch.float32) for _ in range(2)]
    losses = []
    for model, cls in zip(models, (AdamW, torch.optim.AdamW)):
        groups = [
            {"params": model[0].parameters(), "lr": 3e-3, "weight_decay": 0.2},
            {"params": model[1:].parameters()},
        ]
        optimizer = cls(groups, lr=1e-3, betas=(0.8, 0.95), eps=1e-6)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        losses.append(train(model, optimizer, range(8), schedule))
    assert losses[0][-1] < losses[0][0] / 2
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(*losses)), losses


@pytest.mark.parametrize("states", STATES)
def test_training_in_bf16(states):
    model = network()
    losses = train(model, AdamW(model.parameters(), lr=3e-3, states=states, min_size=64), range(30))
    exact = network(torch.float32)
    expected = train(exact, torch.optim.AdamW(exact.parameters(), lr=3e-3), range(30))
    assert losses[-1] < losses[0] / 4 and abs(losses[-1] - expected[-1]) < 0.05 * expected[0]


def test_small_updates_arrive_on_average():
    """Updates of 1/16 of the last place of bf16: the weights move by their sum; to nearest they do not move."""
    moved = {}
    for rounding in (True, False):
        p = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        optimizer = AdamW8bit([p], lr=2.0**-12, weight_decay=0, stochastic_rounding=rounding)
        for _ in range(32):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[rounding] = 1 - p.detach().double().mean().item()
    assert abs(moved[True] - 32 * 2.0**-12) < 0.03 * 32 * 2.0**-12 and moved[False] == 0


def test_states_take_the_bytes_that_are_said():
    for cls, each in ((AdamW8bit, 2.03125), (AdamWFp8, 2.03125), (AdamW4bit, 1.0625)):
        p = nn.Parameter(torch.zeros(16, 1024, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = cls([p])
        optimizer.step()
        state = optimizer.state[p]
        assert sum(t.nbytes for name, t in state.items() if name != "step") == each * p.numel()
        assert state["exp_avg"].shape == ((16, 512) if cls is AdamW4bit else (16, 1024))
        assert state["exp_avg_scale"].shape == (16, 8 if cls is AdamW4bit else 4)


def test_vectors_and_small_parameters_have_fp32_states():
    model = network()
    optimizer = AdamW8bit(model.parameters(), min_size=8 * 27)
    train(model, optimizer, range(1))
    kinds = {name: optimizer.state[p].get("exp_avg") for name, p in model.named_parameters()}
    found = {name: None if value is None else value.dtype for name, value in kinds.items()}
    codes, plain = torch.uint8, torch.float32
    assert found["0.weight"] is codes and found["2.weight"] is codes and found["4.weight"] is codes
    assert found["0.bias"] is plain and found["3.weight"] is plain and found["5.weight"] is None
    fewer = AdamW8bit(model.parameters(), min_size=8 * 27 + 1)
    train(model, fewer, range(1))
    assert fewer.state[model[0].weight]["exp_avg"].dtype is plain


def test_groups_may_differ():
    model = network()
    optimizer = AdamW4bit(
        [{"params": model[:4].parameters(), "states": "bf16"}, {"params": model[4].parameters()}], lr=0.1
    )
    train(model, optimizer, range(1))
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[model[4].weight]["exp_avg"].dtype == torch.uint8


def test_a_closure_is_called_with_gradients():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = AdamW([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 16 and optimizer.step(closure).item() < 16


@pytest.mark.parametrize("states", STATES)
def test_training_that_was_interrupted_goes_on_to_the_bit(states):
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-3, states=states, min_size=64)
    train(model, optimizer, range(5))
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(5, 8))

    def resumed(state: dict) -> list[Tensor]:
        again = network(seed=1)
        again.load_state_dict(saved["model"])
        fresh = AdamW(again.parameters(), lr=5.0)
        fresh.load_state_dict(state)
        train(again, fresh, range(5, 8))
        return bits(again, fresh)

    assert same(resumed(saved["optimizer"]), bits(model, optimizer))
    if states in ("int8", "fp8", "int4"):  # scales in bf16, as other libraries have them
        broken = copy.deepcopy(saved["optimizer"])
        for state in broken["state"].values():
            for name in state.keys() & {"exp_avg_scale", "exp_avg_sq_scale"}:
                state[name] = state[name].bfloat16().float()
        assert not same(resumed(broken), bits(model, optimizer))


def test_torchs_own_loading_would_destroy_the_codes():
    model = network()
    optimizer = AdamW8bit(model.parameters(), min_size=64)
    train(model, optimizer, range(2))
    before = bits(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert same(bits(model, optimizer), before)
    Optimizer.load_state_dict(optimizer, saved)
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.bfloat16


def test_hooks_of_a_user_see_states_and_a_loaded_state_is_a_copy():
    model = network()
    optimizer = AdamW8bit(model.parameters(), min_size=64)
    train(model, optimizer, range(1))
    other = AdamW8bit(model.parameters())
    seen = []
    other.register_load_state_dict_pre_hook(lambda _, given: seen.append(len(given["state"])))
    other.register_load_state_dict_post_hook(lambda of: seen.append(len(of.state)))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [len(optimizer.state)] * 2 and len(other._optimizer_load_state_dict_pre_hooks) == 1
    p = model[2].weight
    assert other.state[p]["exp_avg"].data_ptr() != optimizer.state[p]["exp_avg"].data_ptr()


def test_a_step_of_zeros_makes_states_and_changes_nothing():
    """As torch.distributed.checkpoint makes it before it saves or loads; and a warm-up that begins at 0 counts."""
    model = network()
    before = [p.clone() for p in model.parameters()]
    optimizer = AdamW8bit(model.parameters(), lr=0.0, min_size=64)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert all(not state["step"] and not state["exp_avg"].any() for state in optimizer.state.values())
    train(model, optimizer, range(1))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(state["step"] == 1 and state["exp_avg"].any() for state in optimizer.state.values())


def test_memory_formats_and_dimensions():
    torch.manual_seed(0)
    values = torch.randn(8, 16, 5, 5)
    found = []
    for p in (values.clone(), values.clone().to(memory_format=torch.channels_last)):
        p = nn.Parameter(p.bfloat16())
        optimizer = AdamW8bit([p, nn.Parameter(torch.zeros(3, 4, 5))], min_size=64)
        for seed in range(2):
            p.grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
            optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found) and not torch.equal(found[0], values.bfloat16())
    number = nn.Parameter(torch.tensor(1.0))
    number.grad = torch.tensor(1.0)
    AdamW([number], lr=0.1, weight_decay=0).step()
    assert abs(number.item() - 0.9) < 1e-6


def test_equal_parameters_are_rounded_by_different_numbers():
    a, b = (nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2))
    for p in (a, b):
        p.grad = torch.ones_like(p)
    AdamW([a, b], lr=1e-3).step()
    assert 0.1 < (a != b).float().mean() < 0.9


def test_kept_products_of_a_weight_are_not_used_after_a_step():
    p = nn.Parameter(torch.ones(64, 64))
    before = p._version
    p.grad = torch.ones_like(p)
    AdamW8bit([p]).step()
    assert p._version > before


def test_it_can_be_copied_and_pickled():
    import pickle

    model = network()
    optimizer = AdamW8bit(model.parameters(), min_size=64)
    train(model, optimizer, range(2))
    for twin, other in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        train(twin, other, range(2, 3))
        expected = copy.deepcopy((model, optimizer))
        train(*expected, range(2, 3))
        assert same(bits(twin, other), bits(*expected))


def test_refusals():
    p = nn.Parameter(torch.zeros(100, 100))

    def refused(match: str, **options) -> None:
        with pytest.raises(ValueError, match=match):
            AdamW([p], **options)

    refused("states is 'int5'; allowed: 'fp32', 'bf16', 'int8', 'fp8', 'int4'", states="int5")
    refused("lr is -1", lr=-1)
    refused("betas is", betas=(0.9, 1.0))
    refused("eps is", eps=-1e-8)
    refused("weight_decay is", weight_decay=-0.1)
    refused("min_size is", min_size=0.5)
    refused("seed is", seed=0.5)
    with pytest.raises(ValueError, match="is torch.float16; allowed: torch.float32 and torch.bfloat16"):
        AdamW([nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))])
    AdamW([nn.Parameter(torch.zeros(2, 2, dtype=torch.int16), requires_grad=False), p])
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients .* \\(sparse=False"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("make", [AdamW8bit, partial(CPUOffloadOptimizer, cls=AdamW8bit)], ids=["alone", "offloaded"])
def test_a_group_that_is_refused_leaves_no_trace(make):
    p, half = (nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in (torch.float32, torch.float16))
    optimizer = make([p])
    with pytest.raises(ValueError, match="is torch.float16"):
        optimizer.add_param_group({"params": [half]})
    p.grad, half.grad = torch.ones_like(p), torch.ones_like(half)
    optimizer.step()
    assert len(optimizer.param_groups) == len(optimizer.state_dict()["param_groups"]) == 1
    assert (half == 1).all() and (p != 1).all()
    optimizer.add_param_group({"params": [nn.Parameter(half.float())]})


def test_states_that_do_not_fit_are_refused():
    def optimizer_of(rows: int, cls=AdamW8bit) -> Optimizer:
        p = nn.Parameter(torch.zeros(rows, 100))
        p.grad = torch.ones_like(p)
        found = cls([p])
        found.step()
        return found

    with pytest.raises(ValueError, match="of another optimizer: its groups have .* lack 'states'"):
        optimizer_of(100).load_state_dict(optimizer_of(100, torch.optim.AdamW).state_dict())
    with pytest.raises(ValueError, match="exp_avg of parameter 0 is torch.uint8 with shape \\(50, 100\\)"):
        optimizer_of(100).load_state_dict(optimizer_of(50).state_dict())
    four = optimizer_of(100, AdamW4bit).state_dict()
    with pytest.raises(ValueError, match="has 'int4' states in group 0, this AdamW8bit 'int8'"):
        optimizer_of(100, AdamW8bit).load_state_dict(four)
    optimizer_of(100, AdamW).load_state_dict(four)  # which has the states that it is given
    newer = optimizer_of(100).state_dict()
    newer["param_groups"][0]["format_version"] = 2
    with pytest.raises(ValueError, match="format_version 2; this version of hf-quant reads up to 1"):
        optimizer_of(100).load_state_dict(newer)
    missing = copy.deepcopy(optimizer_of(100).state_dict())
    del missing["state"][0]["exp_avg_scale"]
    with pytest.raises(ValueError, match="the state of parameter 0 has"):
        optimizer_of(100).load_state_dict(missing)
