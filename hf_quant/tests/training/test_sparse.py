"""Two zeros in each four weights of a row: which ones, how they train, and what pruning leaves alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from hf_quant import calibrate, finish_training_, prepare_training_, quantize_
from hf_quant.tests.calibration.test_observe import llama
from hf_quant.tests.modules.test_experts import plain_experts, routing, tokens
from hf_quant.training import prune_
from hf_quant.training.sparse import DECAY, mask_24


def fours(weight: Tensor) -> Tensor:
    """The number of weights in each four of a row that are not zero."""
    return (weight.unflatten(-1, (-1, 4)) != 0).sum(-1)


def test_the_two_largest_stay_and_of_equals_the_first():
    nan = float("nan")
    scores = torch.tensor([[1, 2, 3, 4, 4, 3, 2, 1], [5, 5, 5, 5, 0, 0, 0, 1], [nan, 1, nan, 0, nan, nan, nan, 2]])
    expected = [[0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 1], [0, 1, 0, 1, 1, 0, 0, 1]]
    assert mask_24(scores).int().tolist() == expected
    scores = torch.rand(3, 50, 64, generator=torch.Generator().manual_seed(0))
    kept = mask_24(scores).unflatten(-1, (-1, 4))
    largest = scores.unflatten(-1, (-1, 4)).topk(2).indices
    assert torch.equal(kept, torch.zeros_like(kept).scatter(-1, largest, True))


def test_a_layer_computes_with_pruned_weights_and_trains_all_of_them():
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 80), torch.randn(5, 96, requires_grad=True)
    host = copy.deepcopy(layer)
    print_of_plan = str(prepare_training_(layer, "sparse24", min_size=1))
    assert "sparse24: half of the weights are zero" in print_of_plan
    pruned = host.weight.detach() * mask_24(host.weight.abs())
    assert bool((fours(pruned) == 2).all())
    y = layer(x)
    assert torch.equal(y, F.linear(x, pruned, host.bias))
    grad = torch.randn(5, 80)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ pruned)
    torch.testing.assert_close(layer.weight.grad, grad.t() @ x.detach() + DECAY * (host.weight - pruned).detach())
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))
    finish_training_(layer)
    assert type(layer) is nn.Linear and torch.equal(layer.weight, pruned)


def test_every_layer_that_is_pruned_stays_so():
    """Also one below the size from which products in 8 bits pay: stored as 2:4, it would lose half of its weights."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32)), torch.randn(5, 64)
    pruned = prune_(model)
    assert {f"{name}.weight" for name in prepare_training_(model, "sparse24").layers} == set(pruned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    finish_training_(model)
    dense, sparse = (quantize_(copy.deepcopy(model), {"weights": "int8", "sparsity": s})(x) for s in (None, "2:4"))
    torch.testing.assert_close(sparse, dense)


def test_training_by_pruned_weights_ends_below_pruning_after_training():
    ids = torch.randint(0, 30, (4, 32), generator=torch.Generator().manual_seed(3))

    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    found = {}
    for recipe in (None, "sparse24"):
        torch.manual_seed(0)
        model = llama()
        if recipe is not None:
            prepare_training_(model, recipe, min_size=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(25):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        if recipe is None:
            prune_(model)
        else:
            finish_training_(model)
        assert bool((fours(model.model.layers[0].mlp.up_proj.weight) <= 2).all())
        found[recipe] = loss_of(model).item()
    assert found["sparse24"] < found[None]


def test_compile_and_autocast():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 64)), torch.randn(5, 96)
    prepare_training_(model, "sparse24", min_size=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_experts_and_transposed_weights():
    experts = plain_experts("gpt_oss")
    pruned = copy.deepcopy(experts)
    assert prune_(pruned) == ["gate_up_proj", "down_proj"]
    assert bool((fours(pruned.down_proj.transpose(-1, -2)) == 2).all())  # stored [E, K, N]: along the inputs
    prepare_training_(experts, "sparse24", min_size=1)
    x, (index, weights) = tokens(33), routing(33)
    torch.testing.assert_close(experts(x, index, weights), pruned(x, index, weights))
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=40, n_positions=16, eos_token_id=1))
    assert "transformer.h.0.mlp.c_fc.weight" in prune_(model)
    assert bool((fours(model.transformer.h[0].mlp.c_fc.weight.t()) == 2).all())


def test_the_inputs_count_not_the_outputs():
    for nf, nx, is_planned in ((66, 64, True), (64, 66, False)):
        layers = nn.ModuleList([Conv1D(nf, nx), nn.Linear(64, 64)])
        assert ("0" in prepare_training_(layers, "sparse24", min_size=1).layers) == is_planned


def test_wanda_prunes_by_the_inputs():
    model = llama()
    ids = torch.randint(3, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(2))
    name = "model.layers.0.mlp.up_proj"
    inputs: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, args, y: inputs.append(args[0].detach()))
    with torch.no_grad():
        model(ids)
    hook.remove()
    norm = torch.cat([x.flatten(0, -2) for x in inputs]).square().mean(0).sqrt()
    weight = model.get_submodule(name).weight.detach().clone()
    statistics = calibrate(model, [{"input_ids": ids}], config="int8")
    for calibration in ([{"input_ids": ids}], statistics):
        pruned = copy.deepcopy(model)
        prune_(pruned, "wanda", calibration=calibration)
        assert torch.equal(pruned.get_submodule(name).weight, weight * mask_24(weight.abs() * norm))
    prune_(model)
    assert not torch.equal(pruned.get_submodule(name).weight, model.get_submodule(name).weight)


def test_what_cannot_be_pruned():
    model = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="method is 'random'; allowed: 'magnitude', 'wanda'"):
        prune_(model, "random")
    with pytest.raises(ValueError, match="method='magnitude' needs none: take method='wanda'"):
        prune_(model, calibration=["text"])
    other = calibrate(llama(hidden_size=128), [torch.ones(1, 8, dtype=torch.long)], config="int8")
    with pytest.raises(ValueError, match="statistics have no mean squares of the inputs of model.layers.0"):
        prune_(model, "wanda", calibration=other)
    with pytest.raises(ValueError, match="nothing to prune"):
        prune_(nn.Sequential(nn.Linear(66, 70)))
    with pytest.raises(ValueError, match="0 is quantized"):
        prune_(quantize_(nn.Sequential(nn.Linear(64, 64)), "int8"))
    with pytest.raises(ValueError, match="no products to switch off"):
        prepare_training_(model, "sparse24", output=False, min_size=1)
    with pytest.raises(ValueError, match="its inputs are no multiple of 4"):
        prepare_training_(nn.Sequential(nn.Linear(66, 70)), "sparse24", min_size=1)
    kept = prune_(model, modules={"*.down_proj": None})
    assert kept and not any("down_proj" in name for name in kept)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(kept)
