"""`QuantExperts` computes what the host does with the dequantized experts: Mixtral, Qwen3-MoE, gpt-oss."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeForCausalLM

from hf_quant import QuantExperts, QuantizerConfig, dequantize_, plan, quantize_
from hf_quant.modules import packed_key
from hf_quant.testing import PRODUCT_RMS, all_scheme_fields, assert_close, assert_sqnr, sqnr


SCHEMES = all_scheme_fields()
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
HOSTS = {
    "mixtral": (
        MixtralExperts,
        MixtralForCausalLM,
        MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=4),
    ),
    "qwen3_moe": (
        Qwen3MoeExperts,
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, intermediate_size=96, moe_intermediate_size=48, num_experts=4),
    ),
    "gpt_oss": (
        GptOssExperts,
        GptOssForCausalLM,
        GptOssConfig(**SIZES, intermediate_size=48, num_local_experts=4),
    ),
}


def plain_experts(host: str) -> nn.Module:
    """The host's class with random weights; 4 experts, 64 -> 48 -> 64."""
    torch.manual_seed(0)
    cls, _, config = HOSTS[host]
    module = cls(copy.deepcopy(config))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def experts(host: str, fields="int4", dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """(quantized, the host's class with the dequantized weights)."""
    module = plain_experts(host)
    quantize_(module.to(dtype), fields)
    return module, dequantize_(copy.deepcopy(module))


def tokens(num: int, dtype=torch.float32) -> Tensor:
    return torch.randn(num, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def routing(num: int, dtype=torch.float32, num_experts: int = 4) -> tuple[Tensor, Tensor]:
    """(top_k_index, top_k_weights) [num, 2]: two different experts for each token."""
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(num)])
    return index, torch.rand(num, 2, generator=generator).to(dtype)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("num", [1, 2, 33])
def test_forward_is_that_of_the_dequantized_experts(host, num):
    module, reference = experts(host)
    assert isinstance(module, QuantExperts) and isinstance(module, HOSTS[host][0])
    x, (index, weights) = tokens(num), routing(num)
    assert_close(module(x, index, weights), reference(x, index, weights), rms=1e-5)
    # The check is not blind: other experts, or the order of the top k, change the result.
    assert sqnr(module(x, (index + 1) % 4, weights), reference(x, index, weights)) < 10
    assert sqnr(module(x, index.flip(1), weights), reference(x, index, weights)) < 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_every_scheme(fields, dtype):
    for host in ("mixtral", "gpt_oss"):
        module, reference = experts(host, fields, dtype)
        x, (index, weights) = tokens(9, dtype), routing(9, dtype)
        y = module(x, index, weights)
        assert y.dtype == dtype
        assert_close(y, reference.float()(x.float(), index, weights.float()), rms=2.5 * PRODUCT_RMS[dtype])


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_quantized_activations(host, activations):
    module, reference = experts(host, {"weights": "int8", "activations": activations})
    x, (index, weights) = tokens(33), routing(33)
    low, high = {"int8": (32, 48), "fp8": (23, 36)}[activations]
    assert_sqnr(module(x, index, weights), reference(x, index, weights), at_least=low, at_most=high)


def test_experts_without_tokens_and_one_expert_for_all():
    module, reference = experts("mixtral")
    x, weights = tokens(5), routing(5)[1]
    for index in (torch.tensor([[3, 1]] * 5), torch.tensor([[0, 0]] * 5)):
        assert_close(module(x, index, weights), reference(x, index, weights), rms=1e-5)


def test_no_tokens():
    module, _ = experts("gpt_oss")
    index, weights = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    assert module(tokens(0), index, weights).shape == (0, 64)


def test_ids_past_the_last_expert_belong_to_another_rank():
    module, reference = experts("mixtral")
    x, (index, weights) = tokens(9), routing(9)
    elsewhere = index == 3
    y = module(x, index.masked_fill(elsewhere, 4), weights)
    assert_close(y, reference(x, index, weights.masked_fill(elsewhere, 0)), rms=1e-5)


@pytest.mark.parametrize("fields", ["int4", "W4A16_ASYM", "W8A8"])
@pytest.mark.parametrize("host", HOSTS)
def test_gradients(host, fields):
    module, reference = experts(host, fields)
    x, (index, weights) = tokens(9), routing(9)
    grads = []
    for experts_module in (module, reference):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        experts_module(inputs[0], index, inputs[1]).square().sum().backward()
        grads.append([t.grad for t in inputs] + [p.grad for n, p in experts_module.named_parameters() if "bias" in n])
    # With quantized activations the gradient passes through their rounding, but the activations are not the same.
    rms = 5e-2 if fields == "W8A8" else 1e-5
    for found, expected in zip(*grads, strict=True):
        assert_close(found, expected, rms=rms)
    assert len(grads[0]) == (4 if host == "gpt_oss" else 2)


@pytest.mark.parametrize("host", HOSTS)
def test_weights_in_the_hosts_shape_and_names_of_the_packed_tensors(host):
    module, reference = experts(host)
    for name in ("gate_up_proj", "down_proj"):
        assert getattr(module, name).shape == getattr(reference, name).shape
        assert torch.equal(module.dequantize_weight(name), getattr(reference, name))
        assert getattr(module, packed_key("qdata", name)).shape[0] == 4
    assert {n for n in module.state_dict() if "bias" not in n} == {
        f"{part}_{name}" for part in ("qdata", "scale", "global_scale") for name in ("gate_up_proj", "down_proj")
    }
    assert not hasattr(module, "up_proj")  # it has a gate


@pytest.mark.parametrize("host", HOSTS)
def test_assigned_weights_are_quantized(host):
    module, _ = experts(host, "int8")
    weight = torch.randn(module.down_proj.shape)
    module.down_proj = weight
    assert_sqnr(module.dequantize_weight("down_proj"), weight, at_least=38, at_most=50)
    module.gate_up_proj.data += 1.0
    assert module.dequantize_weight("gate_up_proj").mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("host", HOSTS)
def test_copies_and_state_dict(host):
    module, _ = experts(host)
    x, (index, weights) = tokens(9), routing(9)
    expected = module(x, index, weights)
    for found in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(found) is type(module) and torch.equal(found(x, index, weights), expected)
    other, _ = experts(host)
    other.down_proj = torch.zeros(other.down_proj.shape)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x, index, weights), expected)


@pytest.mark.parametrize("host", HOSTS)
def test_whole_models(host):
    torch.manual_seed(0)
    _, cls, config = HOSTS[host]
    model = cls(copy.deepcopy(config)).eval()
    found = plan(model, "int8")
    kinds = [entry.kind for entry in found.quantized.values()]
    assert kinds.count("experts") == 2 and kinds.count("linear") == 8
    assert found.entries["lm_head"].reason == "output embedding"
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        before = model(ids).logits
        quantize_(model, "int8")
        after = model(ids).logits
        exact = dequantize_(copy.deepcopy(model))(ids).logits
    assert_close(after, exact, rms=1e-4)
    assert_sqnr(after, before, at_least=25, at_most=60)


@pytest.mark.parametrize("host", HOSTS)
def test_only_the_experts(host):
    _, cls, config = HOSTS[host]
    model = cls(copy.deepcopy(config))
    quantize_(model, QuantizerConfig(None, modules={"*.experts": "int4"}))
    assert sum(isinstance(m, QuantExperts) for m in model.modules()) == 2
    assert type(model.lm_head) is nn.Linear


def test_compiles_to_one_graph_for_every_number_of_tokens():
    module, _ = experts("gpt_oss")
    counters.clear()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for num in (3, 5, 7, 8, 13, 17, 31, 64, 65, 100):
        x, (index, weights) = tokens(num).requires_grad_(), routing(num)
        y, expected = compiled(x, index, weights), module(x, index, weights)
        assert_close(y, expected, rms=1e-5)
        assert_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0], rms=1e-5)
    # Not the backend's calls: torch 2.15 calls it again to make the host's `limit`, a float, a constant.
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("host", HOSTS)
def test_hidden_states_of_another_width_are_refused(host):
    module, _ = experts(host)
    for width in (63, 33, 65):  # rows of 33 to 64 codes take as many words
        with pytest.raises(ValueError, match=rf"{width} wide; this Quant\w+Experts needs \[..., 64\]"):
            module(torch.ones(3, width), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2))


@pytest.mark.parametrize("host", HOSTS)
def test_second_derivatives_and_forward_mode(host):
    layer, reference = experts(host)
    chosen = torch.randint(0, 4, (6, 2), generator=torch.Generator().manual_seed(0))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))

    def derivatives(module: nn.Module) -> tuple[Tensor, ...]:
        leaf, weights = x.clone().requires_grad_(), torch.full((6, 2), 0.5, requires_grad=True)
        (grad,) = torch.autograd.grad(module(leaf, chosen, weights).tanh().sum(), leaf, create_graph=True)
        of = (leaf, weights, *(p for n, p in module.named_parameters() if n.endswith("bias")))
        second = torch.autograd.grad(grad.square().sum(), of)
        return *second, torch.func.jvp(lambda z: module(z, chosen, weights.detach()), (x,), (x.cos(),))[1]

    for ours, expected in zip(derivatives(layer), derivatives(reference)):
        assert_close(ours, expected, rms=1e-5)


def test_a_norm_behind_each_expert_is_computed_before_the_experts_are_weighted():
    class Normed(MixtralExperts):
        def __init__(self, config):
            super().__init__(config)
            self.post_expert_norm, self.has_post_expert_norm = nn.LayerNorm(64), True

    torch.manual_seed(0)
    module = Normed(copy.deepcopy(HOSTS["mixtral"][2]))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    reference = dequantize_(copy.deepcopy(quantize_(module, "int4")))
    index, weights = routing(9)
    expected = torch.zeros(9, 64)
    for token, chosen in enumerate(index.tolist()):
        for place, expert in enumerate(chosen):
            gate, up = (reference.gate_up_proj[expert] @ tokens(9)[token]).chunk(2)
            out = reference.post_expert_norm(reference.down_proj[expert] @ (nn.functional.silu(gate) * up))
            expected[token] += weights[token, place] * out
    assert_close(module(tokens(9), index, weights), expected, rms=1e-5)
