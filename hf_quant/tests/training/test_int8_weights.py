"""Weights that are stored as int8 codes in training: what reads, writes, saves and finishes them."""

import copy
import io
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_quant import QuantLinear, finish_training_, prepare_training_
from hf_quant.coded_weight import CodedWeight
from hf_quant.optim import AdamW, CPUOffloadOptimizer
from hf_quant.tests.calibration.test_observe import llama
from hf_quant.tests.modules.test_experts import plain_experts, routing, tokens


def layer(dtype: torch.dtype = torch.bfloat16, N: int = 80, K: int = 96) -> nn.Linear:
    torch.manual_seed(0)
    found = nn.Linear(K, N).to(dtype)
    prepare_training_(found, "int8_weights", min_size=1)
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def inputs(rows: int = 20, K: int = 96, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def same_codes(a: Tensor, b: Tensor) -> bool:
    assert isinstance(a, CodedWeight) and isinstance(b, CodedWeight)
    return torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


def test_there_is_no_16_bit_weight():
    model = layer()
    assert isinstance(model.weight, CodedWeight) and isinstance(model.weight, nn.Parameter)
    assert model.weight.dtype == torch.bfloat16 and model.weight.shape == (80, 96) and model.weight.requires_grad
    state = model.state_dict()
    assert model.weight.element_size() == 1  # by which hosts count memory
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "qdata": torch.int8,
        "scale": torch.int32,
        "bias": torch.bfloat16,
    }


def test_what_reads_a_weight_gets_its_values():
    weight = layer().weight.detach()
    values = weight.codes.float() * weight.scale
    assert torch.equal(weight.dequantized(torch.float32), values)
    values = values.bfloat16()
    assert (
        torch.equal(weight + 0, values) and torch.equal(weight.t() * 1, values.t()) and bool((weight == values).all())
    )
    assert type(torch.zeros_like(weight)) is Tensor and type(weight.float().sum()) is Tensor
    for part, expected in ((weight[3:7], values[3:7]), (weight[5], values[5]), (weight[:, 2:4], values[:, 2:4])):
        assert torch.equal(part + 0, expected)
    assert isinstance(weight[3:7], CodedWeight) and not isinstance(weight[5], CodedWeight)
    assert isinstance(weight.to(torch.float32), CodedWeight) and weight.to(torch.float32).dtype == torch.float32
    other = torch.empty(80, 96, dtype=torch.bfloat16)
    other.copy_(weight)
    assert torch.equal(other, values)


def test_copies_are_weights_of_codes():
    model = layer()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        assert isinstance(other.weight, nn.Parameter) and same_codes(other.weight, model.weight)
        assert other.weight.codes.data_ptr() != model.weight.codes.data_ptr()
        assert torch.equal(other(inputs()), model(inputs()))


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_would_lose_updates_raises(foreach):
    model = layer()
    before = copy.deepcopy(model.weight)
    optimizer = torch.optim.SGD([model.weight], lr=0.1, foreach=foreach)
    model(inputs()).sum().backward()
    with pytest.raises(ValueError, match="which only the optimizers of hf_quant.optim change"):
        optimizer.step()
    assert same_codes(model.weight, before)


@pytest.mark.parametrize("states", ["fp32", "int8"])
def test_small_updates_move_codes_at_random(states):
    model = layer(N=256, K=256)
    before, scale = model.weight.dequantized(torch.float32), model.weight.scale.clone()
    optimizer = AdamW([model.weight], lr=1e-5, states=states, min_size=0, weight_decay=0.0)
    for _ in range(4):
        step(model, optimizer, inputs(K=256))
    change = model.weight.dequantized(torch.float32) - before
    moved = (change != 0).float().mean().item()
    steps = (4e-5 / scale).mean().item()  # how far four steps of Adam go, in steps of the grid
    assert moved == pytest.approx(steps, rel=0.5) and bool((change.abs() / scale < 4.5).all()) and moved > 0.01


def test_rounding_to_the_nearest_code_is_refused():
    model = nn.Sequential(nn.Linear(96, 96).bfloat16(), layer())
    before = copy.deepcopy(model)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "stochastic_rounding": False}]
    with pytest.raises(ValueError, match="would lose nearly every update"):
        step(model, AdamW(groups), inputs())
    assert same_codes(model[1].weight, before[1].weight)
    assert torch.equal(model[0].weight, before[0].weight)  # no group has made its step


def test_equal_weights_of_two_layers_are_not_rounded_alike():
    one, other = layer(N=256, K=256), layer(N=256, K=256)
    before = one.weight.codes.clone()
    optimizer = AdamW([one.weight, other.weight], lr=1e-5, weight_decay=0.0)
    (one(x := inputs(K=256)).square().mean() + other(x).square().mean()).backward()
    optimizer.step()
    moved = [each.weight.codes != before for each in (one, other)]
    assert moved[0].any() and moved[1].any() and not torch.equal(*moved)


def test_an_optimizer_that_was_made_before_trains_the_codes(caplog):
    model = nn.Linear(96, 80).bfloat16()
    optimizer, offloaded = AdamW(model.parameters(), lr=1e-3), CPUOffloadOptimizer(model.parameters(), AdamW)
    model(inputs()).float().square().mean().backward()
    prepare_training_(model, "int8_weights", min_size=1)
    assert model.weight.grad is None  # that of the weight before it was rounded
    codes = model.weight.codes.clone()
    step(model, optimizer, inputs())
    assert not torch.equal(model.weight.codes, codes)
    with pytest.raises(ValueError, match="make it anew"):
        offloaded.step()
    watched = nn.Linear(96, 80)
    reference = weakref.ref(watched.weight)
    prepare_training_(watched, "int8_weights", min_size=1)
    assert isinstance(watched.weight, CodedWeight) and not isinstance(reference(), CodedWeight)
    assert "made before prepare_training_ must be made anew" in caplog.text


def test_frozen_layers_stay_frozen_and_memory_can_be_shared():
    model = nn.Linear(96, 80).requires_grad_(False)
    prepare_training_(model, "int8_weights", min_size=1)
    y = model(inputs(dtype=torch.float32))
    assert not model.weight.requires_grad
    model.share_memory()
    assert model.weight.is_shared() and torch.equal(model(inputs(dtype=torch.float32)), y)


def test_its_own_values_written_to_a_weight_change_no_code():
    """DistributedDataParallel writes them; 127 * scale in bf16 may be larger than the largest code."""
    weight = CodedWeight(
        torch.full((4, 96), 127, dtype=torch.int8), torch.full((4, 1), 1.003 + 2**-9) * 1e-3, torch.bfloat16
    )
    assert bool((weight.dequantized().float() > 127 * weight.scale).all())
    before = copy.deepcopy(weight)
    weight.copy_(weight.dequantized())
    assert same_codes(weight, before)


def test_what_fails_midway_leaves_layers_that_finish(monkeypatch):
    model, of = nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 64)).bfloat16(), CodedWeight.of

    def out_of_memory(weight: Tensor) -> CodedWeight:
        if len(weight) == 64:
            raise MemoryError
        return of(weight)

    monkeypatch.setattr(CodedWeight, "of", out_of_memory)
    with pytest.raises(MemoryError):
        prepare_training_(model, "int8_weights", min_size=1)
    assert type(model[1]) is nn.Linear and model(inputs()).shape == (20, 64)
    assert isinstance(finish_training_(model)[0], QuantLinear)


def test_a_step_with_rate_0_and_an_unchanged_weight_keep_their_codes():
    model = layer()
    before = copy.deepcopy(model.weight)
    optimizer = AdamW(model.parameters(), lr=0.0, states="int8", min_size=0, weight_decay=0.1)
    for _ in range(3):
        step(model, optimizer, inputs())
    assert same_codes(model.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_to_the_bit_from_a_state_dict(dtype):
    model, x = layer(dtype), inputs(dtype=dtype)
    optimizer = AdamW(model.parameters(), lr=1e-3, states="int8", min_size=0)
    for _ in range(2):
        step(model, optimizer, x)
    other = nn.Linear(96, 80).to(dtype)
    prepare_training_(other, "int8_weights", min_size=1)
    again = AdamW(other.parameters(), lr=1e-3, states="int8", min_size=0)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(model, optimizer, x)
        step(other, again, x)
    assert same_codes(other.weight, model.weight) and torch.equal(other.bias, model.bias)


def test_a_layer_that_is_named_in_modules():
    model = nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 64)).bfloat16()
    prepare_training_(model, "int8", min_size=1, modules={"0": "int8_weights"})
    codes = model[0].weight.codes.clone()
    finish_training_(model)
    assert torch.equal(model[0].qdata, codes) and type(model[1]) is nn.Linear
    assert torch.equal(model[0].dequantize_weight(), (codes * model[0].packed().scale).bfloat16())


def test_what_is_written_elsewhere_or_loaded_from_elsewhere_raises():
    model = layer()
    state, weight = model.state_dict(), model.weight.detach()
    with pytest.raises(ValueError, match="which only the optimizers of hf_quant.optim change"):
        torch.add(torch.zeros(80, 96, dtype=torch.bfloat16), 1, out=weight)
    for change, message in (
        ({"qdata": state["qdata"].view(torch.uint8)}, "qdata is .* torch.uint8; needs"),
        ({"qdata": state["qdata"][1:]}, r"qdata is \(79, 96\)"),
        ({"scale": state["scale"].view(torch.int16)}, "scale is .*; needs"),
        ({"scale": state["scale"].float()}, "scale is .*float32.*; needs"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_state_dict({**state, **change})
    del state["scale"]
    with pytest.raises(ValueError, match="scale is None; needs"):
        model.load_state_dict(state, strict=False)


def test_states_on_the_cpu():
    plain, offloaded = layer(), layer()
    options = {"lr": 1e-3, "states": "int8", "min_size": 0}
    optimizers = AdamW(plain.parameters(), **options), CPUOffloadOptimizer(offloaded.parameters(), AdamW, **options)
    for model, optimizer in zip((plain, offloaded), optimizers):
        for _ in range(3):
            step(model, optimizer, inputs())
    assert same_codes(offloaded.weight, plain.weight)


def test_a_16_bit_state_dict_is_quantized():
    torch.manual_seed(0)
    host, model = nn.Linear(96, 80).bfloat16(), layer(N=80)
    with torch.no_grad():
        host.weight.mul_(3)
    model.load_state_dict(host.state_dict())
    assert same_codes(model.weight, CodedWeight.of(host.weight))


def test_checkpoints_load_as_quantized_models(tmp_path):
    model = llama().bfloat16()
    prepare_training_(model, "int8_weights", min_size=16)
    optimizer = AdamW(model.parameters(), lr=1e-3, states="int8", min_size=0)
    ids = torch.randint(3, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(2))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    codes = {name: m.weight.codes.clone() for name, m in model.named_modules() if hasattr(m, "low_bit")}
    model.save_pretrained(tmp_path / "training")
    finish_training_(model)
    model.save_pretrained(tmp_path / "finished")
    for directory in ("training", "finished"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / directory)
        for name, expected in codes.items():
            found = loaded.get_submodule(name)
            assert isinstance(found, QuantLinear) and torch.equal(found.qdata, expected)
            assert torch.equal(found.scale, model.get_submodule(name).scale)


def test_experts():
    experts = plain_experts("mixtral")
    before = copy.deepcopy(experts)
    prepare_training_(experts, "int8_weights", min_size=1)
    assert isinstance(experts.gate_up_proj, CodedWeight) and experts.gate_up_proj.scale.shape[-1] == 1
    x, (index, weights) = tokens(33), routing(33)
    y, expected = experts(x, index, weights), before(x, index, weights)
    assert (y - expected).norm() < 0.05 * expected.norm()
    y.square().sum().backward()
    optimizer = AdamW(experts.parameters(), lr=1e-3, states="int8", min_size=0)
    codes = experts.gate_up_proj.codes.clone()
    optimizer.step()
    assert not torch.equal(codes, experts.gate_up_proj.codes)
    codes = experts.gate_up_proj.codes.clone()
    assert torch.equal(finish_training_(experts).qdata_gate_up_proj, codes)


def test_layers_that_cannot_store_codes():
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=40, n_positions=16)
    with pytest.raises(ValueError, match="need a scale for each output, and this layer stores them transposed"):
        prepare_training_(GPT2LMHeadModel(config), "int8_weights", min_size=1)
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    modules = {"lm_head": "int8_weights"}
    with pytest.raises(ValueError, match="are one weight: only layers of their own train in int8_weights"):
        prepare_training_(model, "int8_weights", min_size=1, modules=modules)
    with pytest.raises(ValueError, match="int8_weights trains fp32 and bf16 models"):
        prepare_training_(nn.Linear(64, 64).half(), "int8_weights", min_size=1)
    broken = nn.Linear(64, 64)
    broken.weight.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match="weight contains NaN or inf"):
        prepare_training_(broken, "int8_weights", min_size=1)
    assert type(broken) is nn.Linear and type(broken.weight) is nn.Parameter
