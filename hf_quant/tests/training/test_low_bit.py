"""Training by products in 8 bits: what is computed in 8 bits, how near it is, and that nothing is stale or lost."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_quant import (
    QuantizerConfig,
    convert_qat_,
    dequantize_,
    finish_training_,
    prepare_qat_,
    prepare_training_,
    quantize_,
)
from hf_quant.coded_weight import CodedWeight
from hf_quant.kernels import quantize_two_way
from hf_quant.optim import AdamW8bit
from hf_quant.testing import sqnr
from hf_quant.tests.calibration.test_observe import llama
from hf_quant.tests.modules.test_experts import HOSTS, plain_experts, routing, tokens
from hf_quant.training import LowBitModule, low_bit, products
from hf_quant.training.products import RECIPES, grouped_product, product


ASSET = "integration_tests/assets/tiny-llama-13m"
INT8, FP8 = "hf_quant.int8_scaled_mm", "hf_quant.fp8_scaled_mm"
GROUPED = "hf_quant.grouped_scaled_mm", "hf_quant.grouped_scaled_sums"
EIGHT_BITS = [name for name, recipe in RECIPES.items() if recipe.format is not None]
DENSE = ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear")


class Calls(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function).rpartition(".")[0]] += 1
        return function(*args, **(kwargs or {}))

    def products(self) -> tuple[int, int]:
        """(in 8 bits, in 16)."""
        return self.counts[INT8] + self.counts[FP8], sum(self.counts[name] for name in DENSE)


def mlp(dtype: torch.dtype = torch.float32, K: int = 96) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 80), nn.ReLU(), nn.Linear(80, 64, bias=False)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32, K: int = 96, seed: int = 1) -> Tensor:
    return torch.randn(2, 20, K, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and all gradients of its product with fixed numbers."""
    model.zero_grad()
    x.grad = None
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return {"y": y.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", EIGHT_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_product_is_that_of_its_codes(recipe, dtype):
    layer, x, settings = nn.Linear(96, 80).to(dtype), inputs(dtype), RECIPES[recipe]
    host = copy.deepcopy(layer)
    prepare_training_(layer, recipe, min_size=1)
    found = results(layer, x)
    options = {"format": settings.format, "scaling": settings.scaling}
    rows, grad = x.detach().view(-1, 96), torch.linspace(-1, 1, 40 * 80).view(40, 80).to(dtype)
    of_x = quantize_two_way(rows, **options)
    of_grad = quantize_two_way(grad, format=settings.gradient, scaling=settings.scaling)
    w = [part.double() for part in products.weight_codes(layer.weight, settings)]
    (x_rows, x_columns), (g_rows, g_columns) = (
        (of[0].double() * of[1].double(), (of[2].double() * of[3].double()).t()) for of in (of_x, of_grad)
    )
    expected = {"y": x_rows @ (w[0] * w[1]).t() + layer.bias.double(), "x": g_rows @ (w[2] * w[3]).t()}
    expected["weight"] = g_columns.t() @ (x_columns if settings.grad_weight else rows.double())
    if not settings.grad_weight:
        expected["weight"] = grad.double().t() @ rows.double()
    expected["bias"] = grad.double().sum(0)
    plain = results(host, x)
    for name, wanted in expected.items():
        exactness = sqnr(found[name].view(wanted.shape).double(), wanted)
        assert exactness > (110 if dtype == torch.float32 else 45), name
        assert name == "bias" or (recipe, name) == ("fp8_row_gw16", "weight") or sqnr(found[name], plain[name]) < 60


@pytest.mark.parametrize("recipe", ["int8", "fp8_row", "fp8_tensor", "fp8_row_gw16"])
@pytest.mark.parametrize("switched_off", [(), ("output",), ("grad_input",), ("grad_weight",)])
def test_what_is_switched_off_is_computed_in_16_bit(recipe, switched_off):
    off = {*switched_off} | ({"grad_weight"} if recipe == "fp8_row_gw16" else set())
    model, x = mlp(), inputs()
    plain = results(model, x)
    prepare_training_(model, recipe, min_size=1, **dict.fromkeys(switched_off, False))
    with Calls() as calls:
        found = results(model, x)
    assert calls.products() == (2 * (3 - len(off)), 2 * len(off))
    assert (sqnr(found["y"], plain["y"]) > 100) == ("output" in off)
    assert (sqnr(found["2.weight"], plain["2.weight"]) > 100) == (off == {"output", "grad_weight"})


def test_second_derivatives_are_refused():
    model, x = mlp(), inputs()
    prepare_training_(model, min_size=1)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_transforms_of_torch_func_are_refused():
    prepare_training_(model := mlp(), min_size=1)
    for derive in (lambda f: torch.func.grad(lambda x: f(x).sum()), torch.vmap, torch.func.jacfwd):
        with pytest.raises(ValueError, match="not inside of torch.func .* finish_training_ the model before these"):
            derive(model)(inputs().detach())


def test_without_gradients_nothing_is_kept():
    model, x = mlp(), inputs().detach()
    prepare_training_(model, min_size=1)
    for p in model.parameters():
        p.requires_grad_(False)
    with Calls() as calls:
        model(x)
        x.requires_grad_()
        model(x).sum().backward()
    assert calls.products() == (6, 0) and x.grad is not None  # 2 products, then 2, and 2 gradients of inputs


WINDOWS = {"int8": (28, 60), "fp8_row": (26, 40), "fp8_tensor": (22, 40)}


@pytest.mark.parametrize("recipe", WINDOWS)
def test_products_of_trained_weights_and_their_activations(recipe):
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 400, (2, 128), generator=generator)
    seen: dict[str, list[Tensor]] = {}
    names = ["model.layers.2.self_attn.q_proj", "model.layers.3.mlp.gate_proj", "model.layers.3.mlp.down_proj"]
    for name in names:
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, args, y, name=name: seen.update({name: [args[0].detach()]}))
        layer.register_full_backward_hook(lambda _, gx, gy, name=name: seen[name].append(gy[0].detach()))
    model(input_ids=ids, labels=ids).loss.backward()
    low, high = WINDOWS[recipe]
    for name in names:
        x, grad = seen[name]
        layers = [nn.Linear(x.shape[-1], grad.shape[-1], bias=False) for _ in range(2)]
        for layer in layers:
            layer.weight.data.copy_(model.get_submodule(name).weight)
        prepare_training_(layers[1], recipe, min_size=1)
        found = []
        for layer in layers:
            own = x.clone().requires_grad_()
            y = layer(own)
            y.backward(grad)
            found.append((y, own.grad, layer.weight.grad))
        for plain, own in zip(*found):
            assert low < sqnr(own, plain) < high, (name, sqnr(own, plain))


def test_scales_of_the_wrong_dimension_are_far_away(monkeypatch):
    plain = results(mlp(), inputs())

    def swapped(x, **options):
        codes, row_scale, codes_t, column_scale = quantize_two_way(x, **options)
        return codes, row_scale.roll(1, 0) * 3, codes_t, column_scale

    monkeypatch.setattr(products, "quantize_two_way", swapped)
    model = mlp()
    prepare_training_(model, min_size=1)
    assert sqnr(results(model, inputs())["y"], plain["y"]) < 10


@pytest.mark.parametrize("recipe", EIGHT_BITS)
def test_compiled_as_one_graph(recipe):
    model, x = mlp(), inputs()
    prepare_training_(model, recipe, min_size=1)
    expected = results(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = results(compiled, x)
    for name, wanted in expected.items():
        assert sqnr(found[name if name in found else f"_orig_mod.{name}"], wanted) > 60, name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_that_are_computed_again_make_the_codes_of_weights_once(use_reentrant, monkeypatch):
    counted: Counter[str] = Counter()

    def counting(weight, recipe):
        counted["weights"] += 1
        return products.weight_codes(weight, recipe)

    monkeypatch.setattr(low_bit, "weight_codes", counting)
    model = mlp()
    prepare_training_(model, min_size=1)
    expected = results(model, inputs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(model, x, use_reentrant=use_reentrant)

    for _ in range(3):
        found = results(Checkpointed(), inputs())
        assert all(torch.equal(found[n] if n in found else found[f"inner.{n}"], expected[n]) for n in expected)
        optimizer.step()
    # Twice, the first step knows nothing of it; by the reentrant kind the first forward has no gradients.
    assert counted["weights"] == (6 if use_reentrant else 2 + 4)


def test_accumulated_gradients_make_the_codes_of_weights_once_and_never_stale_ones(monkeypatch):
    counted: Counter[str] = Counter()

    def counting(weight, recipe):
        counted["kept"] += 1
        return products.weight_codes(weight, recipe)

    monkeypatch.setattr(low_bit, "weight_codes", counting)
    model, twin = mlp(torch.bfloat16), mlp(torch.bfloat16)
    prepare_training_(model, min_size=1)
    prepare_training_(twin, min_size=1)
    optimizers = [AdamW8bit(each.parameters(), lr=1e-2, min_size=1) for each in (model, twin)]
    for step in range(3):
        before = counted["kept"]
        for number in range(3):
            x = inputs(torch.bfloat16, seed=number)
            model(x).float().square().mean().backward()
        assert counted["kept"] - before == 2  # at the second batch of the first step, then at the first
        # The twin's layers know of no earlier call.
        for number in range(3):
            for layer in twin:
                if isinstance(layer, LowBitModule):
                    layer._reuses, layer._kept = False, {}
            for parameter in twin.parameters():
                kept, parameter.grad = parameter.grad, None
                parameter.kept_grad = kept
            twin(inputs(torch.bfloat16, seed=number)).float().square().mean().backward()
            for parameter in twin.parameters():
                if parameter.kept_grad is not None:
                    parameter.grad = parameter.kept_grad.add_(parameter.grad)
        for ours, theirs in zip(model.parameters(), twin.parameters()):
            assert torch.equal(ours.grad, theirs.grad), step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # What a change past the version count, as by the averages of diffusers, gives after a step is not stale.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    fresh = mlp(torch.bfloat16)
    fresh.load_state_dict(model.state_dict())
    prepare_training_(fresh, min_size=1)
    x = inputs(torch.bfloat16)
    assert torch.equal(model(x), fresh(x))


def test_autocast_and_shared_codes_of_one_input(monkeypatch):
    calls: list[tuple] = []
    monkeypatch.setattr(
        products, "quantize_two_way", lambda x, **o: calls.append(tuple(x.shape)) or quantize_two_way(x, **o)
    )
    layers = nn.ModuleList(nn.Linear(96, 80) for _ in range(3))
    plain = copy.deepcopy(layers)
    prepare_training_(layers, min_size=1)
    x = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = [layer(x) for layer in layers]
        expected = [layer(x) for layer in plain]
    assert [each.dtype for each in y] == [torch.bfloat16] * 3
    assert calls.count((40, 96)) == 1  # beside three weights
    sum(each.float().square().sum() for each in y).backward()
    sum(each.float().square().sum() for each in expected).backward()
    for own, other in zip(layers.parameters(), plain.parameters()):
        assert own.grad.dtype == torch.float32 and sqnr(own.grad, other.grad) > 28
    with torch.no_grad():
        x.mul_(2)
        assert sqnr(layers[0](x), plain[0](x)) > 28  # changed in place: other codes


def test_activations_are_kept_in_one_byte():
    def kept(model: nn.Module) -> int:
        storages: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            if not isinstance(x, nn.Parameter) and x.dim() and x.numel() >= 64 * 128:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        x = torch.randn(1, 256, 256, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        with saved_tensors_hooks(pack, lambda x: x):
            q, k, v = (model[name](x) for name in ("q", "k", "v"))
            y = model["o"]((q + k + v) * 1.0)
        weights = 4 * 256 * 256 if isinstance(model["q"], LowBitModule) else 0  # their codes for the gradient of x
        y.sum().backward()
        return sum(storages.values()) - weights

    model = nn.ModuleDict({name: nn.Linear(256, 256, bias=False) for name in "qkvo"}).bfloat16()
    plain = kept(model)
    prepare_training_(model)
    assert 0 < kept(model) <= 0.55 * plain


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("recipe", ["int8", "fp8_row", "bitnet"])
def test_experts(host, recipe):
    module = plain_experts(host)
    plain, (index, weights) = copy.deepcopy(module), routing(33)
    if recipe == "bitnet":  # beside a module whose weights are ternary already
        prepare_training_(plain, recipe, min_size=1)
        finish_training_(plain)
    prepare_training_(module, recipe, min_size=1)
    found = []
    for each in (plain, module):
        x = tokens(33).requires_grad_()
        with Calls() as calls:
            y = each(x, index, weights)
            y.square().sum().backward()
        found.append((y, x.grad, *(p.grad for p in each.parameters())))
    biases = 2 if host == "gpt_oss" else 0  # their gradients are sums
    assert calls.products() == (0, biases) and [calls.counts[name] for name in GROUPED] == [2 * 2, 2]
    for own, wanted in zip(found[1], found[0]):
        assert 20 < sqnr(own, wanted) < 60


@pytest.mark.parametrize("recipe", [name for name in EIGHT_BITS if RECIPES[name].grad_weight])
def test_grouped_products_are_those_of_each_expert(recipe):
    """Experts have no, one and many rows, and some rows are of no expert, as expert parallelism leaves them."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) for size in ((45, 96), (4, 80, 96), (4, 80))]
    offsets, both = torch.tensor([1, 1, 33, 40], dtype=torch.int32), ([], [])
    for found, is_grouped in zip(both, (True, False)):
        x, weight, bias = (each.clone().requires_grad_() for each in given)
        own = CodedWeight.of(weight.detach()).requires_grad_() if RECIPES[recipe].is_stored else weight
        if is_grouped:
            y = grouped_product(x, own, bias, offsets, recipe)
            assert not y[40:].any()
        else:
            ends, each = [0, *offsets.tolist()], own.unbind()
            parts = [slice(*ends[e : e + 2]) for e in range(4)]
            y = torch.cat([product(x[p], each[e], bias[e], recipe, (True,) * 3) for e, p in enumerate(parts)])
            y = torch.cat([y, y.new_zeros(5, 80)])
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin())
        found += [y.detach(), x.grad, bias.grad, own.grad]
    for own, wanted in zip(*both):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    assert not both[0][3][1].any() and not both[0][1][40:].any()  # an expert without rows, and rows without one


def test_experts_compiled_as_one_graph():
    module, (index, weights), x = plain_experts("qwen3_moe"), routing(33), tokens(33).requires_grad_()
    prepare_training_(module, min_size=1)
    expected = module(x, index, weights)
    expected.square().sum().backward()
    wanted = [p.grad.clone() for p in (x, *module.parameters())]
    x.grad = None
    module.zero_grad()
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x, index, weights)
    y.square().sum().backward()
    for own, eager in zip((y, x.grad, *(p.grad for p in module.parameters())), (expected, *wanted)):
        assert sqnr(own, eager) > 60


def test_the_plan_says_which_layers_and_why_not():
    model = llama()
    found = prepare_training_(model, "int8", min_size=1, modules={"*.down_proj": None, "*.o_proj": "fp8_row_gw16"})
    text = str(found)
    assert "model.layers.*.self_attn.q_proj  2      64x64" in text
    assert "int8: output, grad_input, grad_weight" in text and "fp8_row_gw16: output, grad_input" in text
    assert f"{len(found.layers)} of {len(found.shapes)} modules train in low bits" in text
    assert found.reasons["lm_head"] and not isinstance(model.lm_head, LowBitModule)
    assert "model.layers.0.mlp.down_proj" in found.reasons
    assert isinstance(model.model.layers[0].self_attn.o_proj, LowBitModule)
    finish_training_(model)
    with pytest.raises(ValueError, match="would train in low bits: .*smaller than min_size=256"):
        prepare_training_(model)
    found = prepare_training_(model, min_size=1, modules={"lm_head": "int8"})
    assert isinstance(model.lm_head, LowBitModule) and "lm_head" in found.layers


def test_conv1d_of_gpt2():
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64)).eval()
    ids = torch.randint(64, (2, 16))
    plain = model(input_ids=ids, labels=ids)
    plain.loss.backward()
    expected = model.transformer.h[0].mlp.c_fc.weight.grad.clone()
    model.zero_grad()
    prepare_training_(model, min_size=1)
    with Calls() as calls:
        model(input_ids=ids, labels=ids).loss.backward()
    assert calls.products() == (12, 3)  # the head's are in 16 bit
    assert 20 < sqnr(model.transformer.h[0].mlp.c_fc.weight.grad, expected) < 60


def test_copies_pickles_and_the_end():
    model = mlp(torch.bfloat16)
    before, state = type(model[0]), copy.deepcopy(model.state_dict())
    prepare_training_(model, min_size=1)
    x = inputs(torch.bfloat16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[0], LowBitModule) and torch.equal(other(x), model(x))
    assert list(model.state_dict()) == list(state)
    assert isinstance(model[0], nn.Linear)
    with pytest.raises(ValueError, match="prepared for training: convert_qat_ makes .* finish_training_"):
        quantize_(model, "int4")
    finish_training_(model)
    assert type(model[0]) is before and all(map(torch.equal, model.state_dict().values(), state.values()))
    assert not {"low_bit", "_kept", "_reuses"} & set(vars(model[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitnet_weights_become_codes_of_int2_without_loss(dtype):
    layer, x = nn.Linear(256, 192).to(dtype), inputs(dtype, 256)
    prepare_training_(layer, "bitnet", min_size=1)
    y = layer(x)
    finish_training_(layer)
    assert len(layer.weight.unique()) == 3
    exported = {"weights": "int2", "activations": "int8", "input_transform": "none"}
    assert sqnr(quantize_(copy.deepcopy(layer), exported)(x), y) > 38
    for fields in ("int2", {"weights": "int2", "group_size": 128, "scale_dtype": "float32"}):
        assert torch.equal(dequantize_(quantize_(copy.deepcopy(layer), fields)).weight, layer.weight)
    with torch.no_grad():
        layer.weight[0, 0] = 1.5 * layer.weight.abs().max()  # one weight of another size: the default
    assert not torch.equal(dequantize_(quantize_(copy.deepcopy(layer), "int2")).weight, layer.weight)


def test_bitnet_trains_layers_of_every_size():
    """int2 of a small layer that has trained in 16 bit would not be what was trained."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 32))
    assert set(prepare_training_(model, "bitnet").layers) == {"0", "1"}
    assert set(prepare_training_(finish_training_(model), "bitnet", min_size=256).layers) == {"0"}
    assert set(prepare_training_(finish_training_(model), modules={"1": "bitnet"}).layers) == {"0", "1"}
    assert [len(layer.weight.unique()) for layer in finish_training_(model)] == [3, 3]


def test_a_small_model_learns_as_in_16_bit():
    def losses(recipe: str | None) -> list[float]:
        torch.manual_seed(0)
        model = llama()
        if recipe is not None:
            prepare_training_(model, recipe, min_size=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids = torch.randint(0, 30, (4, 32), generator=torch.Generator().manual_seed(3))
        found = []
        for _ in range(25):
            loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = losses(None)
    assert plain[-1] < 0.7 * plain[0]
    for recipe in ("int8", "fp8_row"):
        assert losses(recipe)[-1] == pytest.approx(plain[-1], rel=0.05)


class Multiplies(nn.Linear):
    def forward(self, input):
        return input @ self.weight.T


def test_layers_that_would_not_be_called_are_not_planned():
    model = nn.ModuleDict({"block": nn.TransformerEncoderLayer(64, 4, 64), "own": Multiplies(64, 64)})
    block = ["block.linear1", "block.linear2"]
    for recipe, planned in (("int8", block), ("bitnet", [])):
        model["out"] = nn.Linear(64, 64)
        found = prepare_training_(model, recipe, min_size=1)
        assert list(found.layers) == [*planned, "out"]
        assert found.reasons["block.self_attn.out_proj"] == "torch's attention multiplies with its weight by itself"
        assert found.reasons["own"] == "the forward of Multiplies multiplies with its weight by itself"
        finish_training_(model)
    for name in ("block.self_attn.out_proj", "block.linear1", "own"):
        rules = {pattern: None for pattern in (*found.reasons, "out") if pattern != name}
        with pytest.raises(ValueError, match=f"{name} would not compute in training .* by itself"):
            prepare_qat_(model, QuantizerConfig("int4", modules=rules))


def test_what_cannot_be_trained_so():
    with pytest.raises(ValueError, match="recipe is 'int9'; allowed: int8, int8_weights, bitnet"):
        prepare_training_(mlp(), "int9")
    with pytest.raises(ValueError, match="recipe is \\['int8'\\]; allowed"):
        prepare_training_(mlp(), ["int8"])
    with pytest.raises(ValueError, match="recipe is 'int4'; allowed"):
        prepare_training_(mlp(), modules={"0": "int4"})
    with pytest.raises(ValueError, match="computes no product in low bits"):
        prepare_training_(mlp(), output=False, grad_input=False, grad_weight=False)
    with pytest.raises(ValueError, match="computes no product in low bits"):
        prepare_training_(mlp(), "fp8_row_gw16", output=False, grad_input=False)
    model = mlp()
    with pytest.raises(ValueError, match="trains in low bits: call prepare_training_ first"):
        finish_training_(model)
    prepare_training_(model, min_size=1)
    with pytest.raises(ValueError, match="0 is in training already"):
        prepare_training_(model, min_size=1)
    with pytest.raises(ValueError, match="no layer of this Sequential is prepared"):
        convert_qat_(model)
    with pytest.raises(ValueError, match="prepared for training"):
        prepare_qat_(model, "int4")
    with pytest.raises(ValueError, match="0 is quantized: train the 16-bit model"):
        prepare_training_(quantize_(mlp(), "int8"), min_size=1)
