"""Input transforms: their signs, weights in the host's basis, plans and checkpoints, and what siblings share."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs

from hf_quant import QuantizerConfig, dequantize_, load_quantized_, plan, quantize_, save_quantized
from hf_quant.checkpoint import config_of
from hf_quant.kernels.sign_matrices import hadamard_matrix
from hf_quant.modules.inputs import rows as rows_module
from hf_quant.modules.inputs.lazy import LazyAct
from hf_quant.modules.rotation import rotated, rotated_back, signs
from hf_quant.planning import resolved
from hf_quant.scheme import InputTransform, LinearScheme
from hf_quant.testing import sqnr


CPU = torch.device("cpu")
# W8A8 as it was written before inputs were rotated, an input, and the output of the references of that time.
UNROTATED = Path(__file__).parent / "golden_w8a8"
ROTATED = {"weights": "int4", "input_transform": "hadamard"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(fields, K: int = 192, N: int = 64, cls=nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return quantize_(cls(K, N).bfloat16(), fields)


def test_the_signs_are_the_bits_of_pi():
    """By Machin's formula, in integers."""

    def arctan(x: int) -> int:
        term = total = (1 << 1100) // x
        for k in range(1, 1000):
            term //= x * x
            total += (-1) ** k * (term // (2 * k + 1))
        return total

    fraction = 4 * (4 * arctan(5) - arctan(239)) - (3 << 1100)
    bits = [fraction >> (1099 - i) & 1 for i in range(1024)]
    found = signs(InputTransform(1024), 2048, CPU)
    assert found.dtype == torch.float32 and found.shape == (2, 1024)
    assert found.tolist() == [[1.0 - 2 * bit for bit in bits]] * 2
    assert torch.equal(signs(InputTransform(64), 192, CPU), found[:1, :64].repeat(3, 1))
    assert signs(InputTransform(64), 192, CPU) is signs(InputTransform(64), 192, CPU)


def test_the_rotation_is_orthonormal_and_undone():
    transform, matrix = InputTransform(64), normal(5, 192).double()
    turned = rotated(matrix, transform)
    factors = signs(transform, 192, CPU).double().view(-1)
    exact = ((matrix * factors).view(5, 3, 64) @ hadamard_matrix(64)).view(5, 192)
    assert torch.allclose(turned, exact) and torch.allclose(turned.norm(dim=1), matrix.norm(dim=1))
    assert torch.allclose(rotated_back(turned, transform), matrix)
    assert not torch.allclose(rotated_back(turned, InputTransform(32)), matrix)
    assert rotated(matrix, None) is matrix
    with pytest.raises(ValueError, match="96 input features cannot be rotated in blocks of 64: split the layer"):
        signs(transform, 96, CPU)


@pytest.mark.parametrize("fields", [ROTATED, "W8A8", {"weights": "nf4", "input_transform": {"block_size": 32}}])
def test_weights_are_seen_in_the_basis_of_the_host(fields):
    quantized, x = layer(fields), normal(3, 192, seed=1).bfloat16()
    torch.manual_seed(0)
    plain = nn.Linear(192, 64).bfloat16()
    assert sqnr(quantized.dequantize_weight(), plain.weight) > 18
    assert torch.equal(quantized.weight + 0, quantized.dequantize_weight())
    back = dequantize_(copy.deepcopy(quantized))
    assert sqnr(quantized(x).float(), back(x).float()) > 32
    straight = layer({"input_transform": "none", "weights": fields if isinstance(fields, str) else fields["weights"]})
    assert not torch.equal(straight.qdata, quantized.qdata)  # in its own basis the weight is another
    quantized.weight = plain.weight * 2
    assert sqnr(quantized.dequantize_weight(), plain.weight * 2) > 18


@pytest.mark.parametrize("fields", [ROTATED, "W8A8", {"weights": "W8A8_FP8", "input_transform": "hadamard"}])
def test_gradients_are_those_of_the_weight_in_the_basis_of_the_host(fields):
    quantized = layer(fields)
    weight = quantized.dequantize_weight(dtype=torch.float32)
    x = normal(5, 192, seed=1).requires_grad_()
    y = quantized(x)
    grad = torch.autograd.grad(y, x, normal(5, 64, seed=2), create_graph=True)[0]
    assert sqnr(grad.detach(), normal(5, 64, seed=2) @ weight) > 50
    with torch.no_grad():
        assert torch.equal(quantized(x), y)
    _, tangent = torch.func.jvp(quantized, (x.detach(),), (normal(5, 192, seed=3),))
    assert sqnr(tangent.detach(), normal(5, 192, seed=3) @ weight.t()) > 50
    assert sqnr(torch.vmap(quantized)(x.detach()), y.detach()) > 50


def test_outliers_of_the_input_cost_less():
    x = normal(40, 192, seed=1)
    x[:, 7] *= 100
    torch.manual_seed(0)
    plain = nn.Linear(192, 64)
    y = plain(x)
    turned, straight = (
        quantize_(copy.deepcopy(plain), f)
        for f in ({"weights": "W8A8"}, {"weights": "W8A8", "input_transform": "none"})
    )
    without_outlier = x.clone()
    without_outlier[:, 7] = 0
    plain_rest = plain(without_outlier)
    rest = [m(x) - (y - plain_rest) for m in (turned, straight)]
    assert sqnr(rest[0], plain_rest) > sqnr(rest[1], plain_rest) + 10


def test_the_plan_picks_blocks_by_the_width():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(K, 64) for K in (576, 1536, 96, 1200))

    model = Model()
    found = plan(model, "W8A8")
    blocks = {n: e.scheme.input_transform and e.scheme.input_transform.block_size for n, e in found.entries.items()}
    assert blocks == {"a": 64, "b": 128, "c": 32, "d": None}
    assert "input not rotated: 1200 has no power of two from 32 on" in str(found) and "rotated by 64" in str(found)
    assert all(e.scheme.input_transform is None for e in plan(model, "W8A8_FP8").entries.values())
    none = plan(model, QuantizerConfig("W8A8", input_transform="none"))
    assert all(e.scheme.input_transform is None for e in none.entries.values())
    with pytest.raises(ValueError, match="a: input_transform has blocks of 512, which do not divide 576 input"):
        plan(model, QuantizerConfig("int4", input_transform={"block_size": 512}))
    for wrong in ("hadamrd", {"block_size": 48}, {"block": 64}, True, 64):
        with pytest.raises(ValueError, match="input.transform"):
            QuantizerConfig("int4", input_transform=wrong)


def test_only_checkpoints_with_transforms_need_format_version_2():
    model = nn.Sequential(nn.Linear(192, 64))
    straight = {"weights": "W8A8", "input_transform": "none"}
    for fields, version in (("int8", 1), ("W8A8_FP8", 1), (straight, 1), ("W8A8", 2), (ROTATED, 2)):
        config = QuantizerConfig(**fields) if isinstance(fields, dict) else QuantizerConfig(fields)
        stored = resolved(config, plan(model, config).schemes).to_dict()
        assert stored["format_version"] == version
        assert ("input_transform" in stored["plan"][0]["scheme"]) == (version == 2)
        assert QuantizerConfig(**stored).to_dict() == stored
        assert QuantizerConfig(**stored).input_transform == config.input_transform
        made = config_of(quantize_(copy.deepcopy(model), config))
        assert (made.to_dict()["format_version"], made.input_transform == "none") == (version, fields == straight)
    assert "input_transform" not in QuantizerConfig("W8A8").to_dict()
    scheme = LinearScheme.from_dict(stored["plan"][0]["scheme"])
    assert scheme.input_transform == InputTransform(64)
    for wrong in (
        {"block_size": 48, "kind": "hadamard"},
        {"block_size": 64},
        {"block_size": 64, "kind": "a"},
        64,
    ):
        with pytest.raises(ValueError, match="input transform"):
            LinearScheme.from_dict({**stored["plan"][0]["scheme"], "input_transform": wrong})


def test_a_checkpoint_from_before_transforms_stays_as_it_was(tmp_path):
    found = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    load_quantized_(found, UNROTATED)
    tensors = load_file(UNROTATED / "expected.safetensors")
    with torch.no_grad():
        assert sqnr(found(tensors["x"]), tensors["y"]) > 45
        save_quantized(found, tmp_path)
        for module in (found[0], found[2]):
            module.scheme = replace(module.scheme, input_transform=InputTransform(64))
        assert sqnr(found(tensors["x"]), tensors["y"]) < 10
    for name in ("model.safetensors", "hf_quant_config.json"):  # format version 1
        assert (tmp_path / name).read_bytes() == (UNROTATED / name).read_bytes()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(192, 64) for _ in range(3))

    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x) * self.v_proj(x)


@pytest.mark.parametrize("activations", ["fp8", "int8"])
def test_siblings_rotate_and_quantize_once(activations, monkeypatch):
    torch.manual_seed(0)
    model = quantize_(Attention(), {"weights": "int8", "activations": activations, "input_transform": "hadamard"})
    x = normal(20, 192)
    with torch.no_grad():
        expected = model(x)
        graphs = EagerAndRecordGraphs()
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        assert torch.equal(compiled(x), expected) and torch.equal(compiled(x * 2), model(x * 2))
    targets = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
    assert len(graphs.graphs) == 1 and sum("hadamard_quantize_rowwise" in t for t in targets) == 1
    if activations == "fp8":
        calls, make = [], rows_module._rotate_and_quantize
        monkeypatch.setattr(rows_module, "_rotate_and_quantize", lambda *a, **k: calls.append(0) or make(*a, **k))
        with torch.no_grad():
            assert torch.equal(model(x.clone()), expected) and len(calls) == 1


def test_a_lazy_input_is_rotated():
    quantized, x = layer("W8A8"), normal(20, 192).bfloat16()
    with torch.no_grad():
        lazy = quantized(LazyAct(x, None, "silu", lambda: nn.functional.silu(x)))
        assert sqnr(lazy.float(), quantized(nn.functional.silu(x)).float()) > 35


def test_an_exported_program_holds_its_signs(tmp_path):
    quantized, x = layer(ROTATED), normal(3, 192).bfloat16()
    torch.export.save(torch.export.export(quantized, (x,)), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    assert torch.equal(loaded(x), quantized(x))
