"""Static activation scales: schemes, the stored scale of an input, products, siblings and checkpoints."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_quant import (
    Calibration,
    QuantizerConfig,
    calibrate,
    dequantize_,
    fuse_projections_,
    load_quantized_,
    plan,
    quantize_,
    save_quantized,
)
from hf_quant.checkpoint import check_packed, config_of
from hf_quant.evaluate import bits_per_weight
from hf_quant.kernels.codes import row_max
from hf_quant.modules import QuantExperts, QuantLinear, convert_module_, uncounted_weights
from hf_quant.modules.inputs import rows as rows_module
from hf_quant.modules.rotation import rotated
from hf_quant.resolve import fields_of, resolve_scheme
from hf_quant.scheme import LinearScheme, TensorQuant
from hf_quant.testing import sqnr
from hf_quant.tests.test_default_dtype import default_dtype


STATIC = {"weights": "W8A8", "activation_scale": "static"}
STATIC_FP8 = {"weights": "W8A8_FP8", "activation_scale": "static"}
SCHEMES = (STATIC, STATIC_FP8, {**STATIC, "weights": "W4A8"}, {**STATIC, "input_transform": "none"})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Three layers that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(128, 128), nn.Linear(128, 64)
        self.v_proj, self.o_proj = nn.Linear(128, 64, bias=False), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(torch.cat([q, k, v], -1))


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().bfloat16().eval()


def data() -> list[Tensor]:
    return [normal(16, 128, seed=i).bfloat16() for i in range(3)]


def static_block(fields=STATIC) -> nn.Module:
    return quantize_(block(), fields, calibration=data())


def test_schemes_and_their_fields():
    for fields in SCHEMES:
        for dtype in (torch.bfloat16, torch.float32):
            scheme, _ = resolve_scheme({**fields}, dtype)
            assert scheme.is_static and scheme.activation == TensorQuant(
                scheme.activation.format, "tensor", dynamic=False
            )
            assert (
                fields_of(scheme)["activation_scale"] == "static"
                and LinearScheme.from_dict(scheme.to_dict()) == scheme
            )
    assert str(resolve_scheme(STATIC, torch.float32)[0]) == "int8 row, int8 activations, static, rotated by 128"
    assert str(resolve_scheme({"weights": "W8A8"}, torch.float32)[0]) == "int8 row, int8 activations, rotated by 128"
    row = LinearScheme(TensorQuant("int8", "row"), TensorQuant("int8", "row", dynamic=False))
    with pytest.raises(ValueError, match="this version has no scheme"):
        fields_of(row)
    assert "int8 activations, static" in str(plan(block(), STATIC))


def test_format_version_2_for_static_scales_only():
    static = QuantizerConfig(**{**STATIC, "input_transform": "none"})
    assert static.format_version == 2
    assert QuantizerConfig(modules={"*.o_proj": {**STATIC, "input_transform": "none"}}).format_version == 2
    assert QuantizerConfig("W8A8", input_transform="none", activation_scale="dynamic").to_dict()["format_version"] == 2
    assert QuantizerConfig("W8A8_FP8").format_version == 1
    only_in_plan = config_of(static_block({**STATIC, "input_transform": "none"}))
    only_in_plan.activation_scale = "dynamic"
    assert only_in_plan.format_version == 2
    assert config_of(quantize_(block(), {"weights": "W8A8_FP8"})).format_version == 1


@pytest.mark.parametrize("fields", SCHEMES, ids=str)
def test_the_largest_magnitude_becomes_the_largest_code(fields):
    plain, model, x = block(), static_block(fields), data()
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = model.get_submodule(name)
        seen = rotated(torch.cat(x).float(), layer.scheme.input_transform)
        want = seen.abs().max() / row_max(layer.scheme.activation.format)
        assert layer.input_scale.dtype == torch.int32 and tuple(layer.input_scale.shape) == (1,)
        assert not layer.input_scale.requires_grad
        assert torch.allclose(layer.static_scale(), want.view(1), rtol=1e-5)
    assert torch.equal(model.q_proj.input_scale, model.v_proj.input_scale)
    assert not torch.equal(model.q_proj.input_scale, model.o_proj.input_scale)
    y, exact = model(x[0]), plain(x[0])
    assert 15 < sqnr(y.float(), exact.float()) < 50
    # Values beyond the range saturate: a scale of a quarter loses the larger ones.
    for layer in model.children():
        layer.set_input_scale_("weight", layer.static_scale() / 4)
    assert sqnr(model(x[0]).float(), exact.float()) < 15


def test_a_layer_that_is_not_calibrated_computes_nothing():
    with pytest.raises(ValueError, match="cannot write its own text to be calibrated on: give calibration="):
        quantize_(block(), STATIC)
    scheme, _ = resolve_scheme({**STATIC, "input_transform": "none"}, torch.bfloat16)
    layer = convert_module_(nn.Linear(128, 64).bfloat16(), scheme)
    for x in (normal(3, 128).bfloat16(), normal(3, 128).bfloat16().requires_grad_()):
        with pytest.raises(
            ValueError, match="static activation scales, but none is set for weight: calibrate the mod"
        ):
            layer(x)
    with pytest.raises(ValueError, match="input_scale is corrupt"):
        check_packed(layer)
    assert torch.compile(layer, backend="eager")(normal(3, 128).bfloat16()).isnan().all()
    for wrong in (torch.tensor(torch.nan), torch.zeros(1), torch.tensor(-1.0), torch.ones(2), torch.tensor(1e-30)):
        with pytest.raises(ValueError, match="scale of weight's input is .*; needs one finite number of at least 2"):
            layer.set_input_scale_("weight", wrong)
    layer.calibrate_input_("weight", torch.zeros(128))
    assert layer.static_scale().item() == 1 and layer(torch.zeros(2, 128).bfloat16()).isfinite().all()
    with pytest.raises(ValueError, match="stores no scale of its input"):
        convert_module_(nn.Linear(8, 8), resolve_scheme({"weights": "int8"}, torch.float32)[0]).calibrate_input_(
            "weight", torch.ones(8)
        )
    layer._parameters["input_scale"] = nn.Parameter(layer.input_scale.float(), requires_grad=False)
    with pytest.raises(ValueError, match="was cast to torch.float32"):
        layer(torch.zeros(2, 128).bfloat16())


def test_gradients_are_straight_through():
    layer = static_block().q_proj
    x = normal(5, 128).bfloat16().requires_grad_()
    y = layer(x)
    grad = normal(*y.shape, seed=3).bfloat16()
    y.backward(grad)
    assert sqnr(x.grad, grad.float() @ layer.dequantize_weight().float()) > 40
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert torch.equal(torch.vmap(layer)(x.detach().unsqueeze(1)).squeeze(1), y)
    tangent = normal(5, 128, seed=4).bfloat16()
    _, moved = torch.func.jvp(layer, (x.detach(),), (tangent,))
    assert sqnr(moved, tangent.float() @ layer.dequantize_weight().float().t()) > 30


def test_compiled_without_a_break():
    model, x = static_block(), data()[0]
    with torch.no_grad():
        y = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), y)
        for layer in model.children():  # the scale is no constant of the graph
            layer.set_input_scale_("weight", 2 * layer.static_scale())
        assert torch.equal(compiled(x), model(x)) and not torch.equal(model(x), y)


def test_siblings_share_codes_of_one_scale(monkeypatch):
    model, x, calls = static_block(STATIC_FP8), normal(32, 128).bfloat16(), []
    quantize = rows_module._quantize_with
    monkeypatch.setattr(rows_module, "_quantize_with", lambda *args, **how: calls.append(1) or quantize(*args, **how))
    with torch.no_grad():
        y = model(x)
        assert len(calls) == 2  # q, k and v, and o
        calls.clear()
        model.k_proj.set_input_scale_("weight", 3 * model.k_proj.static_scale())
        assert not torch.equal(model(x), y)
        assert len(calls) == 4


def test_fused_projections():
    model, x = static_block(), data()[0]
    with torch.no_grad():
        y = model(x)
        fused = fuse_projections_(copy.deepcopy(model))
        assert fused.q_proj.fused is not None and torch.equal(fused(x), y)
        assert torch.equal(copy.deepcopy(fused)(x), y)
        assert fused.state_dict().keys() == model.state_dict().keys()
        for layer in fused.children():
            layer.set_input_scale_("weight", 2 * layer.static_scale())
        for layer in model.children():
            layer.set_input_scale_("weight", 2 * layer.static_scale())
        assert torch.equal(fused(x), model(x)) and not torch.equal(model(x), y)
    model.k_proj.set_input_scale_("weight", 2 * model.k_proj.static_scale())
    with pytest.raises(ValueError, match="static scales of their input differ"):
        fuse_projections_(model)


def test_the_scale_is_fp32_whatever_the_default_is():
    with default_dtype(torch.bfloat16):
        scheme, _ = resolve_scheme({**STATIC, "input_transform": "none"}, torch.bfloat16)
        layer = convert_module_(nn.Linear(128, 64), scheme)
        assert layer.input_scale.dtype == torch.int32
        layer.calibrate_input_("weight", torch.ones(128, dtype=torch.float32))
        assert layer.static_scale().dtype == torch.float32 and layer(normal(3, 128).bfloat16()).isfinite().all()


def test_the_scale_is_part_of_the_model(tmp_path):
    model, x = static_block(), data()[0]
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y) and torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    assert model.state_dict()["q_proj.input_scale"].dtype == torch.int32
    assert model.to(torch.float32).q_proj.input_scale.dtype == torch.int32
    model.to(torch.bfloat16)
    save_quantized(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["o_proj.input_scale"].dtype == torch.int32
    loaded = load_quantized_(block(), tmp_path)
    assert torch.equal(loaded(x), y) and config_of(loaded).activation_scale == "static"
    check_packed(loaded.q_proj)
    entry = plan(block(), STATIC).entries["q_proj"]
    assert entry.bytes_after == sum(loaded.q_proj._parameters[key].nbytes for key in ("qdata", "scale", "input_scale"))
    assert bits_per_weight(loaded) == pytest.approx(plan(block(), STATIC).bits_per_weight)
    assert uncounted_weights(loaded) == sum(p.numel() for p in block().parameters()) - sum(
        p.numel() for p in loaded.parameters()
    )
    scale = loaded.q_proj.input_scale.clone()
    loaded.q_proj.weight = normal(128, 128).bfloat16()  # a new weight keeps the scale of its input
    assert torch.equal(loaded.q_proj.input_scale, scale)
    restored = dequantize_(loaded)
    assert not any("input_scale" in key for key in restored.state_dict())
    torch.save({**model.state_dict(), "q_proj.input_scale": torch.tensor([7])}, tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert not torch.equal(model(x), y)


def test_a_corrupt_scale_is_refused(tmp_path):
    model = static_block()
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        broken = copy.deepcopy(model)
        broken.q_proj.input_scale.copy_(torch.tensor([bad]).view(torch.int32))
        save_quantized(broken, tmp_path)
        with pytest.raises(ValueError, match="q_proj.input_scale is corrupt"):
            load_quantized_(block(), tmp_path)


def test_tied_layers_have_the_larger_scale():
    model = nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 128)})
    model.b.weight = model.a.weight
    scheme, _ = resolve_scheme({**STATIC, "input_transform": "none"}, torch.float32)
    from hf_quant.quantize import share_codes_

    convert_module_(model.a, scheme)
    share_codes_(model.b, model.a)
    assert model.b.input_scale is model.a.input_scale
    for amax, want in ((1.0, 1.0), (3.0, 3.0), (2.0, 3.0)):
        model.b.calibrate_input_("weight", torch.full((128,), amax))
        assert model.a.static_scale().item() == pytest.approx(want / 127)
    x = normal(2, 128)
    first = model.a(x)
    model.a.set_input_scale_("weight", torch.tensor(0.5))
    assert model.b.static_scale().item() == 0.5 and not torch.equal(model.a(x), first)


class Gated(nn.Module):
    """Experts as transformers 5 has them, as far as quantization looks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = 3, True, False, False
        self.gate_up_proj = nn.Parameter(normal(3, 128, 128) / 11)
        self.down_proj = nn.Parameter(normal(3, 128, 64, seed=1) / 8)
        self.act_fn = nn.SiLU()

    def _apply_gate(self, up: Tensor) -> Tensor:
        gate, up = up.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for t, e in enumerate(top_k_index[:, 0].tolist()):
            up = hidden_states[t] @ self.gate_up_proj[e].t()
            y[t] = self._apply_gate(up) @ self.down_proj[e].t() * top_k_weights[t, 0]
        return y


@pytest.mark.parametrize("fields", [STATIC, STATIC_FP8], ids=str)
def test_experts_have_one_scale_per_weight(fields, tmp_path):
    def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        return normal(9, 128, seed=seed), torch.arange(9).view(9, 1) % 3, torch.ones(9, 1)

    plain = Gated()
    root = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    quantize_(root, fields, calibration=lambda model: model["experts"](*inputs(1)))
    experts = root["experts"]
    assert isinstance(experts, QuantExperts)
    assert not torch.equal(experts.input_scale_gate_up_proj, experts.input_scale_down_proj)
    y = experts(*inputs(1))
    assert 15 < sqnr(y, plain(*inputs(1))) < 50
    save_quantized(root, tmp_path)
    loaded = load_quantized_(nn.ModuleDict({"experts": Gated()}), tmp_path)
    assert torch.equal(loaded["experts"](*inputs(1)), y)


def test_statistics_of_a_file_and_of_a_loop(tmp_path):
    want, path = static_block(), tmp_path / "amax.safetensors"
    calibrate(block(), data(), kind="amax", config=STATIC).save(path)
    by_file = quantize_(block(), STATIC, calibration=path)
    model = block()
    calibration = Calibration(model, STATIC)
    with calibration:
        for x in data():
            model(x)
    by_loop = quantize_(model, calibration.config, calibration=calibration)
    for found in (by_file, by_loop):
        assert isinstance(found.q_proj, QuantLinear)
        assert all(torch.equal(a, b) for a, b in zip(found.state_dict().values(), want.state_dict().values()))
