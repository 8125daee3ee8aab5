"""`prepare_qat_` and `convert_qat_`: from the codes of `quantize_`, by training, to those that were trained."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_quant import QuantizerConfig, QuantPlan, convert_qat_, prepare_qat_, quantize_
from hf_quant.calibration import Calibration
from hf_quant.kernels import dequantize
from hf_quant.modules import QuantizedModule, rotated
from hf_quant.testing import all_scheme_fields, sqnr
from hf_quant.training import QatModule
from hf_quant.training.functions import input_as_seen


ROTATED = {"weights": "int4", "input_transform": "hadamard"}
SCHEMES = {**all_scheme_fields(), "rotated": ROTATED, "rotated int2": {**ROTATED, "weights": "int2"}}
SCHEMES |= {"W4A8, rotated": {"weights": "W4A8", "input_transform": "hadamard"}}
SCHEMES = {name: fields for name, fields in SCHEMES.items() if "STATIC" not in name.upper()}


def mlp(dtype: torch.dtype = torch.float32, K: int = 160) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, 96), nn.ReLU(), nn.Linear(96, 160, bias=False)).to(dtype)


def inputs(dtype: torch.dtype = torch.float32, K: int = 160) -> Tensor:
    return torch.randn(24, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def same_bytes(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(
        torch.equal(first[k].contiguous().view(torch.uint8), second[k].contiguous().view(torch.uint8)) for k in first
    )


def correlated(count: int, K: int = 192) -> Tensor:
    """Inputs [count, K] whose columns GPTQ can use to correct each other."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(K, K, generator=generator) * 0.1 + torch.eye(K)
    return torch.randn(count, K, generator=generator) @ mixed


def train(model: nn.Module, x: Tensor, *, steps: int = 4, lr: float = 1e-2) -> list[float]:
    """Train a model on a fixed task; returns its losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    target = torch.randn(24, 160, generator=torch.Generator().manual_seed(2)).to(x.dtype)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stored(module: nn.Module, name: str = "weight") -> Tensor:
    """The weight of a prepared or a quantized layer in the basis of its input, fp32."""
    if isinstance(module, QatModule):
        return module.weight_as_stored(name).detach().float()
    assert isinstance(module, QuantizedModule)
    K, quant = module.matrix_shape(name)[-1], module.scheme.weight
    options = {"format": quant.format, "group_size": quant.columns_per_scale(K), "K": K, "dtype": torch.float32}
    return dequantize(*module.packed(name), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_step_0_is_what_quantize_stores(fields, dtype):
    quantized, prepared = mlp(dtype, 192), mlp(dtype, 192)
    quantize_(quantized, fields)
    assert isinstance(prepare_qat_(prepared, fields), QuantPlan)
    assert isinstance(prepared[0], nn.Linear) and isinstance(prepared[0].weight, nn.Parameter)
    x = inputs(dtype, 192)
    with torch.no_grad():
        found, expected, plain = prepared(x), quantized(x), mlp(dtype, 192)(x)
    error = sqnr(found.float(), expected.float())
    assert error > (80 if dtype == torch.float32 else 25)
    if dtype == torch.float32:
        assert error > sqnr(expected, plain) + 20
    assert same_bytes(convert_qat_(prepared), quantized)


@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_what_is_converted_is_what_was_trained(fields):
    model, x = mlp(), inputs()
    prepare_qat_(model, fields)
    start = [stored(layer) for layer in (model[0], model[2])]
    losses = train(model, x, steps=8)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        expected = model(x)
    trained = [stored(layer) for layer in (model[0], model[2])]
    assert not any(map(torch.equal, trained, start))
    of_weights = quantize_(copy_of_host(model), fields)
    convert_qat_(model)
    assert not any(isinstance(module, QatModule) for module in model.modules())
    assert not [name for name in model.state_dict() if "qat" in name]
    assert [torch.equal(stored(layer), wanted) for layer, wanted in zip((model[0], model[2]), trained)] == [True] * 2
    with torch.no_grad():
        assert sqnr(model(x), expected) > 80
    if fields_learn(model[0]):  # another search finds other scales
        assert not same_bytes(model, of_weights)


def fields_learn(layer: nn.Module) -> bool:
    assert isinstance(layer, QuantizedModule)
    return layer.scheme.weight.scale_dtype not in ("float8_e8m0fnu", "float8_e4m3fn")


def copy_of_host(model: nn.Sequential) -> nn.Sequential:
    """A plain model with the 16-bit weights of a prepared one."""
    plain = mlp()
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields", ["int4", "int8", "int2", "mxfp4", "nf4", ROTATED, {**ROTATED, "weights": "int8"}], ids=str
)
def test_training_starts_from_the_codes_of_gptq(fields, dtype):
    plain = {"weights": fields, "input_transform": "none"}
    fields = {**(plain if isinstance(fields, str) else fields), "algorithm": "gptq"}
    quantized, prepared = mlp(dtype, 192), mlp(dtype, 192)
    data = [correlated(600).to(dtype)]
    before = prepared[0].weight.detach().clone()
    quantize_(quantized, fields, calibration=data)
    prepare_qat_(prepared, fields, calibration=data)
    moved = (prepared[0].weight != before).float().mean().item()
    assert 0.02 < moved < (0.6 if fields["input_transform"] == "none" else 1.01)
    train_free = copy.deepcopy(prepared)
    assert same_bytes(convert_qat_(prepared), quantized)
    assert not same_bytes(quantize_(mlp(dtype, 192), {**fields, "algorithm": None}), quantized)
    losses = train(train_free, inputs(dtype, 192))
    assert losses[-1] < losses[0]


def test_a_dtype_too_coarse_for_codes_in_another_basis_is_refused():
    """GPTQ's fp8 codes of small weights are nearer to each other than bf16 weights in the host's basis can tell."""
    fields = {"weights": "fp8", "algorithm": "gptq", "input_transform": "hadamard"}
    data = [correlated(600).bfloat16()]
    model = mlp(torch.bfloat16, 192)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="torch.bfloat16 is too coarse .* prepare the model in torch.float32"):
        prepare_qat_(model, fields, calibration=data)
    assert type(model[0]) is nn.Linear and list(model.state_dict()) == list(before)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_the_gradients_are_those_of_the_equations():
    """w_q = level * s, s = s0 * exp(10 p): dw_q/dw = 1 inside, ds/dp = 10 s."""
    model, x = mlp(), inputs()
    prepare_qat_(model, {"weights": "int4", "group_size": 32, "scale_dtype": "float32"})
    layer = model[0]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        layer.qat_log_scale.copy_(torch.randn(layer.qat_log_scale.shape, generator=generator) * 0.01)
    scale = layer.own_scale("weight").detach()
    assert torch.allclose(scale, layer.qat_scale.view(torch.float32) * (10 * layer.qat_log_scale).exp())
    layer(x).square().sum().backward()
    wide = scale.repeat_interleave(32, 1)
    relative = layer.weight.detach() / wide
    level = relative.round().clamp(-8, 7)
    of_stored = torch.autograd.functional.jacobian(lambda w: F.linear(x, w, layer.bias).square().sum(), level * wide)
    inside = (relative >= -8.5) & (relative <= 7.5)
    assert not inside.all()
    torch.testing.assert_close(layer.weight.grad, of_stored * inside)
    terms = of_stored * (level - inside * relative) * wide * 10
    torch.testing.assert_close(layer.qat_log_scale.grad, terms.view(96, -1, 32).sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fields", ["W4A16", "W4A8", ROTATED, {**ROTATED, "activations": "int8"}], ids=str)
def test_second_derivatives_are_those_of_the_equations(fields):
    """A gradient penalty; neither levels nor what is inside of the grid change with the weight or the scale."""
    model, start = mlp(), inputs()
    prepare_qat_(model, fields)
    layer, scheme = model[0], model[0].qat.scheme
    basis = rotated(torch.eye(160), scheme.input_transform)
    parameters = [layer.weight, layer.qat_log_scale]

    def product(x: Tensor) -> Tensor:
        turned, weight, scale = x @ basis, layer.weight @ basis, layer.scale_of_rows("weight", 96)[0]
        size = scheme.weight.columns_per_scale(160)
        scale = scale.repeat_interleave(size, -1)[:, :160]
        relative = (weight / scale).detach()
        level = relative.round().clamp(-8, 7)
        inside = (relative >= -8.5) & (relative <= 7.5)
        stored = scale * level + inside * (weight - scale * relative)
        return F.linear(turned + (input_as_seen(x, scheme) - turned).detach(), stored, layer.bias)

    def penalty(forward) -> tuple[Tensor, ...]:
        x = start.clone().requires_grad_()
        gradients = torch.autograd.grad(forward(x).tanh().square().sum(), [x, *parameters], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), [x, *parameters])

    for found, expected in zip(penalty(layer), penalty(product), strict=True):
        assert sqnr(found, expected) > 80
    loss, names = lambda p: torch.func.functional_call(layer, p, (start,)).tanh().sum(), ("weight", "qat_log_scale")
    found = torch.func.grad(loss)(dict(zip(names, parameters)))
    for name, expected in zip(names, torch.autograd.grad(product(start).tanh().sum(), parameters)):
        assert sqnr(found[name], expected) > 80


def test_scales_change_by_a_factor_of_e_at_most_and_stay_stored_values():
    model = mlp()
    prepare_qat_(model, {"weights": "int4", "group_size": 32, "scale_dtype": "bfloat16"})
    layer = model[0]
    start = layer.own_scale("weight").detach()
    with torch.no_grad():
        layer.qat_log_scale.fill_(-3.0)
    found = layer.own_scale("weight").detach()
    torch.testing.assert_close(found, start * torch.exp(torch.tensor(-1.0)), rtol=2**-8, atol=0)
    assert torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("fields", ["int4", "W4A8", ROTATED], ids=str)
def test_checkpointing_and_autocast_give_the_same_gradients(fields):
    model, x = mlp(), inputs()
    prepare_qat_(model, fields)
    for is_autocast in (False, True):
        found = []
        for is_checkpointed in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            y.float().square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert len(found[0]) == 5 and all(map(torch.equal, *found))


def test_which_scales_learn():
    for fields, options, learns in (
        ("int4", {}, True),
        ("int4", {"learn_scales": False}, False),
        ("mxfp4", {}, False),  # powers of two
    ):
        model = mlp()
        prepare_qat_(model, fields, **options)
        assert ("0.qat_log_scale" in dict(model.named_parameters())) is learns
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    prepare_qat_(frozen, "int4")
    assert not hasattr(frozen[0], "qat_log_scale") and hasattr(frozen[2], "qat_log_scale")


def test_a_prepared_model_is_unfrozen_as_a_whole():
    """Its scales, which are integers, stay as they are; also those of a copy and of a pickle."""
    model = mlp()
    prepare_qat_(model, "int3")
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one.requires_grad_(False)
        assert one.requires_grad_(True) is one
        for p in one.parameters():
            p.requires_grad = True
        frozen = {name for name, p in one.named_parameters() if not p.requires_grad}
        assert frozen == {f"{i}.{name}" for i in (0, 2) for name in ("qat_scale", "qat_global_scale")}
        train(one, inputs(), steps=1)
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
    assert torch.equal(nn.Parameter(model[0].qat_scale, requires_grad=False), model[0].qat_scale)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert model.to("cpu") is model
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_state_dict_copies_and_pickles():
    model, x = mlp(), inputs()
    prepare_qat_(model, "int3")
    train(model, x)
    again = mlp()
    prepare_qat_(again, "int3")
    assert list(model.state_dict()) == [
        *("0.weight", "0.bias", "0.qat_scale", "0.qat_global_scale", "0.qat_log_scale"),
        *("2.weight", "2.qat_scale", "2.qat_global_scale", "2.qat_log_scale"),
    ]
    again.load_state_dict(model.state_dict())
    for other in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        first, second = (train(copy.deepcopy(m), x) for m in (other, model))
        assert first == second
        assert same_bytes(convert_qat_(other), convert_qat_(copy.deepcopy(model)))


def test_it_can_be_compiled():
    model, x = mlp(), inputs()
    prepare_qat_(model, "W4A8")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == 5
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_rows_that_groups_do_not_divide():
    model, x = mlp(K=150), inputs(K=150)
    quantized = quantize_(mlp(K=150), {"weights": "int4", "group_size": 32})
    prepare_qat_(model, {"weights": "int4", "group_size": 32})
    model(x).sum().backward()
    assert same_bytes(convert_qat_(model), quantized)


def test_half_a_preparation_is_undone(monkeypatch):
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take, calls = QatModule.take_scales_, []

    def fail_at_the_second(self, *args, **options):
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        take(self, *args, **options)

    monkeypatch.setattr(QatModule, "take_scales_", fail_at_the_second)
    with pytest.raises(MemoryError):
        prepare_qat_(model, "int2")
    assert type(model[0]) is nn.Linear and type(model[2]) is nn.Linear
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    monkeypatch.undo()
    prepare_qat_(model, "int2")


def test_an_optimizer_from_before_is_found():
    model, x = mlp(), inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    prepare_qat_(model, "int4")
    model(x).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="made before prepare_qat_. Make it anew, or prepare with learn_scales=False"):
        model(x)


def test_refusals():
    model = mlp()
    with pytest.raises(ValueError, match="no layer of this Sequential is prepared: prepare_qat_ it"):
        convert_qat_(model)
    with pytest.raises(ValueError, match="nothing of Sequential would be trained"):
        prepare_qat_(model, QuantizerConfig(None, kv_cache="int8"))
    with pytest.raises(ValueError, match="nothing to quantize in Sequential"):
        prepare_qat_(nn.Sequential(nn.ReLU()), "int4")
    with pytest.raises(ValueError, match="is quantized already"):
        prepare_qat_(quantize_(mlp(), "int4"), "int4")
    static = QuantizerConfig("W8A8", activation_scale="static")
    with pytest.raises(ValueError, match="static scales of activations, which are not trained"):
        prepare_qat_(model, static, calibration=[inputs()])
    assert type(model[0]) is nn.Linear
    prepare_qat_(model, "int4")
    with pytest.raises(ValueError, match=r"prepared already \(0 is\): train it, or convert_qat_ it"):
        prepare_qat_(model, "int4")
    with pytest.raises(ValueError, match="is prepared for training: convert_qat_"):
        quantize_(model, "int4")
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="2.weight contains NaN or inf"):
        convert_qat_(model)
    assert isinstance(model[0], QatModule) and isinstance(model[2], QatModule)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("fields", ["int8", "int4", "nvfp4", {"weights": "int8", "granularity": "tensor"}], ids=str)
def test_a_table_that_is_tied_to_a_head(fields):
    config = QuantizerConfig(None, modules={"embed": fields})
    model, ids = Tied(), torch.arange(80).view(4, 20)
    quantized = quantize_(Tied(), config)
    prepare_qat_(model, config)
    assert model.head.weight is model.embed.weight and [n for n in model.state_dict() if "head" in n] == [
        "head.weight"
    ]
    with torch.no_grad():
        assert sqnr(model(ids), quantized(ids)) > 80
    assert same_bytes(convert_qat_(copy.deepcopy(model)), quantized)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = model(ids)
        convert_qat_(model)
        assert sqnr(model(ids), expected) > 80
    assert model.head._parameters["qdata"] is model.embed._parameters["qdata"]


def test_an_embedding_trains_the_rows_that_are_looked_up():
    model = nn.Sequential(nn.Embedding(80, 64, padding_idx=0))
    prepare_qat_(model, QuantizerConfig(None, modules={"0": "int4"}))
    model(torch.tensor([[0, 3, 3, 7]])).square().sum().backward()
    assert model[0].weight.grad.any(1).nonzero().flatten().tolist() == [3, 7]
    assert model[0].qat_log_scale.grad.any(1).nonzero().flatten().tolist() in ([0, 3, 7], [3, 7])


@pytest.mark.parametrize("conv", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions(conv):
    torch.manual_seed(0)
    model = nn.Sequential(conv(32, 48, 3, padding=1, groups=2), nn.ReLU())
    x = torch.randn(2, 32, *[5] * (model[0].weight.dim() - 2))
    config = QuantizerConfig(None, modules={"0": "int4"})
    quantized = quantize_(copy.deepcopy(model), config)
    prepare_qat_(model, config)
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 80
    model(x).square().sum().backward()
    assert model[0].weight.grad.any() and model[0].qat_log_scale.grad.any()
    assert same_bytes(convert_qat_(model), quantized)


def test_the_weight_moves_only_where_its_code_is_another():
    """norm, of 2 bits, divides by another number than the scale that it stores."""
    model, before = mlp(torch.bfloat16), mlp(torch.bfloat16)
    prepare_qat_(model, "int2")
    moved = model[0].weight != before[0].weight
    assert 0.002 < moved.float().mean() < 0.1
    values = stored(model[0]).bfloat16()
    assert torch.equal(model[0].weight[moved], values[moved])
    prepare_qat_(model_4 := mlp(torch.bfloat16), "int4")
    assert torch.equal(model_4[0].weight, before[0].weight)


def test_statistics_of_a_calibration_serve():
    """A `Calibration` of this model and config is data, too."""
    model, quantized = mlp(), mlp()
    config = QuantizerConfig("int4", algorithm="gptq")
    for one, use in ((model, prepare_qat_), (quantized, quantize_)):
        with Calibration(one, config) as calibration:
            one(correlated(500, 160))
        use(one, config, calibration=calibration)
    assert same_bytes(convert_qat_(model), quantized)
