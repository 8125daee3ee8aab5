"""`QuantLinear` is an nn.Linear with the dequantized weight: values, gradients, copies, casts, compilation."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.autograd.functional import hessian
from transformers.pytorch_utils import Conv1D

import hf_quant.integrations.transformers.conv1d  # noqa: F401  (makes Conv1D quantizable)
from hf_quant import QuantLinear, dequantize_, fuse_projections_, quantize_
from hf_quant.modules.inputs.lazy import LazyAct
from hf_quant.modules.rotation import rotated, rotated_back
from hf_quant.scheme import InputTransform
from hf_quant.testing import PRODUCT_RMS, all_scheme_fields, assert_close, assert_sqnr, rms_error


SCHEMES = all_scheme_fields()
WITH_ACTIVATIONS = {
    f"{name}-{activations}": {**fields, "activations": activations}
    for name, fields in SCHEMES.items()
    for activations in ("int8", "fp8")
    if name.endswith(("-row", "-group", "-group-asym", "-block"))
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# dB that a product keeps when its input N(0, 1) is rounded to 8 bits per row; an infinity would mean that it is not.
ACTIVATION_SQNR = {"int8": (36, 48), "fp8": (28, 36)}


class Scaled(nn.Linear):
    """A host's subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Normalized(nn.Linear):
    """A host's subclass that computes on its weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


def linear(fields, dtype=torch.float32, K: int = 160, N: int = 136, bias: bool = True, cls=nn.Linear) -> QuantLinear:
    torch.manual_seed(0)
    return quantize_(cls(K, N, bias=bias, dtype=dtype), fields)


def exact(layer: QuantLinear, x: Tensor) -> Tensor:
    """F.linear with the dequantized weight, in fp64."""
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.dequantize_weight(dtype=torch.float32).double(), bias)


def quantized_rows(x: Tensor, activations: str) -> Tensor:
    """x [..., K] rounded to int8 or fp8_e4m3 with one scale per row, in fp64; int8 in the rotated basis."""
    transform = InputTransform(32) if activations == "int8" and x.shape[-1] % 32 == 0 else None
    return rotated_back(rounded_rows(rotated(x.double(), transform), activations), transform)


def rounded_rows(x: Tensor, activations: str) -> Tensor:
    limit = 127.0 if activations == "int8" else 448.0
    scale = x.float().abs().amax(-1, keepdim=True) / limit
    values = x.float() / scale
    codes = values.round() if activations == "int8" else values.to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_forward_is_that_of_the_dequantized_weight(fields, dtype):
    layer = linear(fields, dtype)
    for M in (1, 33):
        x = rows(M, 160, dtype=dtype)
        assert layer(x).dtype == dtype
        assert_close(layer(x), exact(layer, x), rms=PRODUCT_RMS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", WITH_ACTIVATIONS.values(), ids=WITH_ACTIVATIONS)
def test_forward_with_quantized_activations(fields, dtype):
    layer = linear(fields, dtype)
    for M in (1, 33):
        x = rows(M, 160, dtype=dtype)
        y = layer(x)
        assert y.dtype == dtype
        # A value halfway between two codes may round to either.
        assert_close(y, exact(layer, quantized_rows(x, fields["activations"])), rms=max(PRODUCT_RMS[dtype], 2e-3))
        low, high = ACTIVATION_SQNR[fields["activations"]]
        if M > 1:
            assert_sqnr(y, exact(layer, x), at_least=low, at_most=high)


@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_K_and_N_that_nothing_divides(fields):
    layer = linear(fields, K=70, N=61, bias=False)
    x = rows(5, 70)
    assert_close(layer(x), exact(layer, x), rms=1e-5)
    assert layer.bias is None


def test_the_tolerance_notices_one_missing_group_and_one_missing_row():
    layer = linear("int4")
    x = rows(33, 160)
    shortened = exact(layer, x * (torch.arange(160) < 128))
    assert rms_error(shortened, exact(layer, x)) > 100 * PRODUCT_RMS[torch.bfloat16] / 2
    wrong = exact(layer, x)
    wrong[7] = 0
    with pytest.raises(AssertionError):
        assert_close(wrong, exact(layer, x), rms=PRODUCT_RMS[torch.bfloat16])
    swapped = copy.deepcopy(layer)
    swapped.qdata.data = (layer.qdata >> 4 & 0x0F0F0F0F) | (layer.qdata & 0x0F0F0F0F) << 4
    assert rms_error(swapped(x), exact(layer, x)) > 0.5


@pytest.mark.parametrize("fields", ["int4", {"weights": "int8", "activations": "int8"}], ids=["W4A16", "W8A8"])
@pytest.mark.parametrize("shape", [(160,), (2, 3, 160), (2, 1, 3, 160), (0, 160), (2, 0, 160)])
def test_inputs_of_any_shape(fields, shape):
    layer = linear(fields)
    x = rows(*shape).requires_grad_()
    y = layer(x)
    assert y.shape == (*shape[:-1], 136)
    flat = x.detach().reshape(-1, 160)
    torch.testing.assert_close(y, layer(flat).view(y.shape) if flat.shape[0] else y, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    assert x.grad.shape == x.shape and layer.bias.grad.shape == (136,)
    assert torch.equal(layer.bias.grad, torch.full((136,), float(flat.shape[0])))
    strided = rows(4, 320)[:, ::2]
    assert_close(layer(strided), layer(strided.contiguous()), rms=1e-6)


def test_wrong_inputs_are_refused():
    layer = linear("int4")
    with pytest.raises(ValueError, match="needs .*fp16, bf16 or fp32"):
        layer(torch.ones(3, 160, dtype=torch.int64))


@pytest.mark.parametrize("fields", [*SCHEMES.values(), *WITH_ACTIVATIONS.values()], ids=[*SCHEMES, *WITH_ACTIVATIONS])
def test_inputs_of_another_width_are_refused(fields):
    """Packed rows of 129 to 160 codes take as many words; before and after the first call has prepared the product."""
    layer = linear(fields)
    for _ in range(2):
        for K in (128, 129, 159, 161, 192, 320):
            for x in (rows(3, K), rows(1, K).bfloat16(), rows(2, 3, K).requires_grad_()):
                with pytest.raises(ValueError, match=rf"{K} wide; this QuantLinear needs \[..., 160\]"):
                    layer(x)
        layer(rows(3, 160)), layer(rows(1, 160).bfloat16())


def test_every_way_into_a_layer_refuses_another_width():
    conv = Conv1D(136, 160)
    layers = {"int4": linear("int4"), "W4A8": linear("W4A8"), "Conv1D": quantize_(conv, "int4")}
    pair = fuse_projections_(quantize_(nn.ModuleDict({n: nn.Linear(160, 64) for n in ("q_proj", "k_proj")}), "int4"))
    calls = {
        **layers,
        "fused": pair.eval()["q_proj"],
        "F.linear": lambda x: F.linear(x, layers["int4"].weight),
        "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(layers["int4"])(x),
        "compiled": torch.compile(layers["int4"], backend="eager"),
        "lazy": lambda x: layers["W4A8"](LazyAct(x, None, "silu", lambda: F.silu(x))),
    }
    for name, call in calls.items():
        with torch.no_grad():
            assert call(rows(3, 160)).shape[0] == 3, name
            with pytest.raises(ValueError, match="159 wide"):
                call(rows(3, 159))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", [*SCHEMES.values(), *WITH_ACTIVATIONS.values()], ids=[*SCHEMES, *WITH_ACTIVATIONS])
def test_gradients_are_exact(fields, dtype):
    layer = linear(fields, dtype)
    x, grad = rows(2, 5, 160, dtype=dtype).requires_grad_(), rows(2, 5, 136, dtype=dtype)
    layer(x).backward(grad)
    weight = layer.dequantize_weight(dtype=torch.float32).double()
    assert x.grad.dtype == dtype and layer.bias.grad.dtype == dtype
    assert_close(x.grad, grad.double() @ weight, rms=PRODUCT_RMS[dtype], name="grad of x")
    assert_close(layer.bias.grad, grad.double().sum((0, 1)), rms=PRODUCT_RMS[dtype], name="grad of bias")
    assert not any(p.requires_grad for n, p in layer.named_parameters() if n != "bias")


@pytest.mark.parametrize("of", ["x", "bias"])
def test_gradients_of_one_of_the_two(of):
    layer = linear("int4")
    layer.bias.requires_grad_(of == "bias")
    x = rows(3, 160).requires_grad_(of == "x")
    layer(x).sum().backward()
    assert (x.grad is not None) == (of == "x") and (layer.bias.grad is not None) == (of == "bias")


def test_no_graph_without_grad():
    layer = linear("int4")
    x = rows(3, 160).requires_grad_()
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        assert_close(layer(x), exact(layer, x), rms=1e-5)


def test_quantized_in_inference_mode_and_trained_outside():
    model = nn.Sequential(nn.Linear(160, 136))
    with torch.inference_mode():
        quantize_(model, "int4")
    model(rows(3, 160)).sum().backward()
    assert model[0].bias.grad is not None
    with torch.inference_mode():
        dequantize_(model)
    model(rows(3, 160)).sum().backward()
    assert model[0].weight.grad is not None


class StraightThrough(nn.Module):
    """What a quantized layer is to autograd: `F.linear` with its weight, plus the error of rounding the input."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.register_buffer("dense", layer.dequantize_weight())
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.dense, self.bias)
        with torch.no_grad():
            error = self.layer(x.detach()) - y.detach()
        return y + error


def penalty(net: nn.Module, first: nn.Linear, bias: nn.Parameter, x: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a gradient penalty, as WGAN-GP has it."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net(torch.tanh(first(x))).tanh().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), (x, first.weight, bias))


@pytest.mark.parametrize("fields", ["int8", "int4", "nf4", "fp8", "int3", "mxfp4", "W8A8", "W4A8", "W8A8_FP8"])
def test_second_derivatives_are_exact(fields):
    layer = linear(fields)
    torch.manual_seed(3)
    first, reference, x = nn.Linear(32, 160), StraightThrough(layer), rows(5, 32)
    found = penalty(layer, first, layer.bias, x)
    for gradient, expected in zip(found, penalty(reference, first, reference.bias, x)):
        assert_close(gradient, expected, rms=1e-5)
    # And once more by `.backward`, into the leaves.
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(layer(torch.tanh(first(x))).tanh().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert_close(layer.bias.grad, found[2], rms=1e-6)


TRANSFORMS = {
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x.cos(),))[1],
    "vmap": lambda net, x: torch.vmap(net)(x),
    "vmap of columns": lambda net, x: torch.vmap(net, in_dims=1)(x.view(5, 1, 160).expand(5, 3, 160)),
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "jacfwd": lambda net, x: torch.func.jacfwd(net)(x),
    "hessian": lambda net, x: torch.func.hessian(lambda z: net(z).tanh().sum())(x[:1, None, :])[0, 0, :4, 0, 0, :4],
    "hessian at once": lambda net, x: hessian(lambda z: net(z).tanh().sum(), x[:1], vectorize=True),
    "vmap(grad)": lambda net, x: torch.vmap(torch.func.grad(lambda z: net(z).tanh().sum()))(x),
    "gradient of the bias": lambda net, x: torch.func.grad(
        lambda bias: torch.func.functional_call(net, {"bias": bias}, (x,)).tanh().sum()
    )(net.bias.detach()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fields", ["int4", "W8A8"])
def test_transforms_of_torch_func(fields, transform):
    layer, x = linear(fields).eval(), rows(5, 160)
    found, expected = TRANSFORMS[transform](layer, x), TRANSFORMS[transform](StraightThrough(layer), x)
    assert_close(found, expected, rms=1e-5)
    with torch.no_grad():
        if transform in ("jvp", "vmap"):
            assert_close(TRANSFORMS[transform](layer, x), expected, rms=1e-5)


def test_forward_mode_beside_reverse_mode():
    layer, x = linear("int4"), rows(5, 160)
    expected = x.cos() @ layer.dequantize_weight().t()
    for leaf in (x, x.clone().requires_grad_()):
        with forward_ad.dual_level():
            y = forward_ad.unpack_dual(layer(forward_ad.make_dual(leaf, x.cos())))
        assert_close(y.tangent, expected, rms=1e-5)


def test_siblings_keep_nothing_of_a_transform():
    pair = quantize_(nn.ModuleDict({n: nn.Linear(160, 64) for n in ("q_proj", "k_proj")}), "int4").eval()
    fuse_projections_(pair)
    with torch.no_grad():
        x = rows(20, 160)
        expected = pair["q_proj"](x), pair["k_proj"](x)
        found = torch.vmap(lambda z: (pair["q_proj"](z), pair["k_proj"](z)))(x)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, (pair["q_proj"](x), pair["k_proj"](x)), expected))


def test_vmap_over_weights_says_what_it_needs():
    layer, x = linear("int4"), rows(3, 160)
    with pytest.raises(ValueError, match="must be the same for all elements. Give them in_dims=None"):
        torch.vmap(lambda bias: torch.func.functional_call(layer, {"bias": bias}, (x,)))(torch.ones(2, 136))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    layer = linear("int4")
    x, again = rows(3, 160).requires_grad_(), rows(3, 160).requires_grad_()
    layer(x).square().sum().backward()
    y = torch.utils.checkpoint.checkpoint(layer, again, use_reentrant=reentrant)
    y.square().sum().backward()
    assert torch.equal(x.grad, again.grad)


@pytest.mark.parametrize("fields", ["int4", {"weights": "int8", "activations": "int8"}], ids=["W4A16", "W8A8"])
def test_autocast_computes_in_its_dtype(fields):
    layer = linear(fields)
    x = rows(3, 160).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, layer(x), rms=2e-2)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rows(3, 160).double()).dtype == torch.float64  # as nn.Linear has it


@pytest.mark.parametrize("fields", ["int4", "W4A16_ASYM", "fp8", "nvfp4", "W8A8"])
def test_copies_are_equal_and_independent(fields, tmp_path):
    layer = linear(fields, torch.bfloat16)
    x = rows(3, 160, dtype=torch.bfloat16)
    expected = layer(x)
    torch.save(layer, tmp_path / "layer.pt")
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(tmp_path / "layer.pt", weights_only=False),
    ]
    for found in copies:
        assert type(found) is QuantLinear and found.scheme == layer.scheme
        assert found.compute_dtype == torch.bfloat16 and torch.equal(found(x), expected)
        found.qdata.data.zero_()
    assert torch.equal(layer(x), expected)


def test_replicas_of_data_parallel_are_quantized_layers():
    layer = linear("int4")
    replica = layer._replicate_for_data_parallel()
    replica._parameters = dict(layer._parameters)
    assert type(replica) is QuantLinear and replica is not layer
    assert torch.equal(replica(rows(3, 160)), layer(rows(3, 160)))


def test_state_dict_round_trip():
    layer, other = linear("int4"), linear("int4")
    other.weight = rows(136, 160)
    assert list(layer.state_dict()) == ["bias", "qdata", "scale", "global_scale"]
    assert all(not t.is_floating_point() for k, t in layer.state_dict().items() if k != "bias")
    x = rows(3, 160)
    assert not torch.equal(other(x), layer(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    assert torch.equal(other(x), layer(x))
    with pytest.raises(RuntimeError, match="size mismatch for qdata"):
        linear("int4", K=192).load_state_dict(layer.state_dict())
    with pytest.warns(UserWarning, match="16-bit weights for layers that hold codes: load it into the 16-bit model"):
        assert layer.load_state_dict(nn.Linear(160, 136).state_dict(), strict=False).unexpected_keys == ["weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        nn.Linear(160, 136).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("fields", ["int8", "W4A16_ASYM", "fp8", "fp6", "mxfp4", "nvfp4", "W8A8"])
def test_casts_leave_codes_and_scales_alone(fields):
    layer = linear(fields)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for cast in (
        nn.Module.half,
        nn.Module.bfloat16,
        nn.Module.double,
        lambda m: m.to(torch.bfloat16),
        nn.Module.float,
    ):
        cast(layer)
        assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items() if k != "bias")
        assert layer.weight.dtype == layer.bias.dtype == layer.compute_dtype
        x = rows(3, 160, dtype=layer.compute_dtype)
        assert layer(x).dtype == x.dtype
    layer.to("meta")
    assert all(p.is_meta for p in layer.parameters()) and layer.weight.is_meta
    layer.to_empty(device="cpu")
    assert layer.weight.device.type == "cpu"


def test_it_stays_the_object_that_it_was():
    layer = nn.Linear(160, 136)
    layer.note, calls = "kept", []
    layer.register_forward_hook(lambda *args: calls.append(1))
    layer.eval()
    assert quantize_(layer, "int4") is layer
    assert isinstance(layer, nn.Linear) and layer.note == "kept" and not layer.training
    assert (layer.in_features, layer.out_features) == (160, 136)
    layer(rows(3, 160))
    assert calls == [1]
    assert repr(layer) == "QuantLinear(in_features=160, out_features=136, bias=True, int4 g32)"
    assert type(type(layer)(4, 2)) is nn.Linear  # as adapters build their own


@pytest.mark.parametrize("cls", [Scaled, Normalized])
def test_a_subclass_keeps_its_own_forward(cls):
    layer, plain = linear("int8", cls=cls), linear("int8")
    x = rows(3, 160).requires_grad_()
    weight = plain.dequantize_weight()
    reference = cls(160, 136)
    reference.weight.data, reference.bias.data = weight, plain.bias.data
    assert isinstance(layer, cls) and isinstance(layer, QuantLinear) and type(layer).__name__ == f"Quant{cls.__name__}"
    assert_close(layer(x), reference(x), rms=1e-5)
    layer(x).sum().backward()
    grad, x.grad = x.grad, None
    reference(x).sum().backward()
    assert_close(grad, x.grad, rms=1e-5)
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is type(layer) and torch.equal(again(x), layer(x))


@pytest.mark.parametrize("training", [True, False])
def test_attention_that_takes_the_weight_instead_of_calling_the_layer(training):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(64, 4, batch_first=True).train(training)
    reference = copy.deepcopy(attention)
    quantize_(attention, "int8")
    assert isinstance(attention.out_proj, QuantLinear)
    reference.out_proj.weight.data = attention.out_proj.dequantize_weight()
    reference.in_proj_weight.data = attention.dequantize_weight("in_proj_weight")
    x = rows(2, 5, 64)
    with torch.set_grad_enabled(training):  # without grad, in eval mode, it tries a fused path
        assert_close(attention(x, x, x)[0], reference(x, x, x)[0], rms=1e-5)
    x.requires_grad_()
    attention(x, x, x)[0].sum().backward()
    assert x.grad.abs().sum() > 0


def test_an_encoder_layer_with_its_fused_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    reference = copy.deepcopy(layer)
    quantize_(layer, "int8")
    for name in ("linear1", "linear2", "self_attn.out_proj"):
        reference.get_submodule(name).weight.data = layer.get_submodule(name).dequantize_weight()
    reference.self_attn.in_proj_weight.data = layer.self_attn.dequantize_weight("in_proj_weight")
    x = rows(2, 5, 64)
    with torch.inference_mode():
        assert_close(layer(x), reference(x), rms=1e-5)


@pytest.mark.parametrize(
    ("fields", "training"),
    [("int8", False), ("W4A16_ASYM", False), ("nvfp4", False), ("W4A16", True), ("W8A8", False), ("W8A8", True)],
)
def test_compiles_to_one_graph_for_every_length(fields, training):
    torch.manual_seed(0)
    model = quantize_(nn.Sequential(nn.Linear(160, 136), nn.GELU(), nn.Linear(136, 64, bias=False)), fields)
    counter = CompileCounterWithBackend("aot_eager")

    def forward(x: Tensor) -> Tensor:
        return model(x.to(model[0].weight.dtype))  # T5 and others read the dtype of a weight

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counter)
    for length in (2, 3, 5, 8, 13, 17, 31, 64, 65, 100):
        x = rows(length, 160).requires_grad_(training)
        assert_close(compiled(x), forward(x), rms=1e-5)
        if training:
            (grad,) = torch.autograd.grad(compiled(x).sum(), x)
            (expected,) = torch.autograd.grad(forward(x).sum(), x)
            assert_close(grad, expected, rms=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("weights", "scales"), [("int4", "float8_e4m3fn"), ("int8", "bfloat16")])
def test_cpu_activations_compute_what_activations_do(weights, scales):
    plain = linear({"weights": weights, "input_transform": "hadamard"}, torch.bfloat16)
    on_cpu = linear({"weights": weights, "cpu_activations": "int8"}, torch.bfloat16)
    always = linear({"weights": weights, "activations": "int8", "scale_dtype": scales}, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), on_cpu.parameters()))
    x = torch.randn(5, 160).bfloat16()
    assert torch.equal(on_cpu(x), always(x)) and not torch.equal(on_cpu(x), plain(x))
    x.requires_grad_()
    on_cpu(x).sum().backward()
    gradient, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(gradient, x.grad)
