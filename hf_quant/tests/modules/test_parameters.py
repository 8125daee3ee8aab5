"""`QuantParameters`: modules that hold matrices themselves compute what they do with the dequantized ones."""

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.convbert.modeling_convbert import GroupedLinearLayer
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.moshi.modeling_moshi import MoshiFlexibleLinear

from hf_quant import QuantizerConfig, dequantize_, load_quantized_, plan, prepare_qat_, quantize_, save_quantized
from hf_quant.modules import Layout, QuantParameters, register_parameters
from hf_quant.testing import PRODUCT_RMS, all_scheme_fields, assert_close, sqnr


SCHEMES = all_scheme_fields()
E, H, F_SIZE = 4, 64, 96  # experts, their width, the width between their projections


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routing(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    return index, torch.rand(tokens, 2, generator=generator)


def llama4() -> nn.Module:
    return Llama4TextExperts(
        SimpleNamespace(num_local_experts=E, intermediate_size=F_SIZE, hidden_size=H, hidden_act="silu")
    )


def dbrx() -> nn.Module:
    sizes = {"hidden_size": H, "ffn_hidden_size": F_SIZE, "moe_num_experts": E, "ffn_act_fn": {"name": "silu"}}
    return DbrxExperts(SimpleNamespace(**sizes))


def longcat() -> nn.Module:
    sizes = {"expert_ffn_hidden_size": F_SIZE, "hidden_size": H, "n_routed_experts": E, "zero_expert_num": 2}
    return LongcatFlashExperts(SimpleNamespace(**sizes, hidden_act="silu"))


def gemma3() -> nn.Module:
    vision = SimpleNamespace(hidden_size=H, layer_norm_eps=1e-6, image_size=4, patch_size=1)
    text = SimpleNamespace(hidden_size=F_SIZE)
    return Gemma3MultiModalProjector(SimpleNamespace(vision_config=vision, text_config=text, mm_tokens_per_image=4))


class Grouped(nn.Module):
    """Experts that are given rows in their order and compute by torch's grouped product, as Nucleus-Image's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(E, H, F_SIZE))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([3, 3, 7, len(x)], dtype=torch.int32)
        if isinstance(self.up, nn.Parameter):  # torch's own needs bf16
            parts = torch.tensor_split(x, offsets[:-1].tolist())
            return torch.cat([part @ weight for part, weight in zip(parts, self.up)])
        return F.grouped_mm(x, self.up, offs=offsets)


register_parameters(f"{__name__}.Grouped", Layout({"up": True}))

# {name: (maker, input, call)}.
HOSTS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[nn.Module, Tensor], Tensor]]] = {
    "llama4": (llama4, values(E * 6, H), lambda m, x: m(x)),
    "dbrx": (dbrx, values(9, H), lambda m, x: m(x, *routing(9, E))),
    "longcat": (longcat, values(9, H), lambda m, x: m(x, *routing(9, E + 2))),
    "jetmoe": (lambda: JetMoeParallelExperts(E, H, F_SIZE), values(9, H), lambda m, x: m(x, [3, 0, 5, 1])),
    "grouped": (Grouped, values(9, H), lambda m, x: m(x)),
    "gemma3": (gemma3, values(2, 16, H), lambda m, x: m(x)),
    "convbert": (lambda: GroupedLinearLayer(2 * H, 2 * F_SIZE, 2), values(2, 5, 2 * H), lambda m, x: m(x)),
    "moshi": (
        lambda: MoshiFlexibleLinear(H, F_SIZE, E),
        values(2, 3, H),
        lambda m, x: m(x, torch.tensor([2, 0, 3])),
    ),
}
DEQUANTIZED = ("moshi",)


def plain(host: str) -> nn.Module:
    torch.manual_seed(0)
    module = HOSTS[host][0]()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def pair(host: str, fields="int4") -> tuple[nn.Module, nn.Module]:
    """(quantized, the host's class with the dequantized weights)."""
    module = quantize_(plain(host), fields)
    return module, dequantize_(copy.deepcopy(module))


def quantized_part(module: nn.Module) -> QuantParameters:
    (found,) = (m for m in module.modules() if isinstance(m, QuantParameters))
    return found


@pytest.mark.parametrize("host", HOSTS)
def test_values_and_gradients_are_those_of_the_dequantized_module(host):
    module, reference = pair(host)
    kind = "dequantized" if host in DEQUANTIZED else "parameters"
    assert {e.kind for e in plan(plain(host), "int4").quantized.values()} == {kind}
    _, x, call = HOSTS[host]
    given, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = call(module, given), call(reference, same)
    assert_close(y, expected, rms=1e-5)
    grad = values(*y.shape, seed=3)
    y.backward(grad)
    expected.backward(grad)
    assert_close(given.grad, same.grad, rms=1e-5)
    assert 5 < sqnr(y.detach(), call(plain(host), x)) < 40  # it is quantized


@pytest.mark.parametrize("host", [host for host in HOSTS if host not in DEQUANTIZED])
def test_no_weight_is_dequantized_as_a_whole(host, monkeypatch):
    module, reference = pair(host)
    _, x, call = HOSTS[host]
    with monkeypatch.context() as patch, torch.no_grad():
        for method in ("dequantize_weight", "dequantize_part"):
            patch.setattr(QuantParameters, method, lambda *_, **__: pytest.fail("dequantized"))
        y = call(module, x)
    assert_close(y, call(reference, x), rms=1e-5)


@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_every_scheme(fields):
    module, _ = pair("llama4", fields)
    reference = dequantize_(copy.deepcopy(module))
    x, call = HOSTS["llama4"][1:]
    scheme = quantized_part(module).scheme
    with torch.no_grad():
        y, expected = call(module, x), call(reference, x)
    rounded = scheme.activation is not None or scheme.cpu_activation is not None
    assert sqnr(y, expected) > (20 if rounded else 80)
    assert not scheme.is_static and scheme.sparsity is None


@pytest.mark.parametrize("host", HOSTS)
def test_saved_loaded_pickled_and_dequantized_to_the_bit(host, tmp_path):
    module, reference = pair(host)
    save_quantized(module, tmp_path)
    again = load_quantized_(plain(host), tmp_path)
    for other in (again, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert quantized_part(other).weight_names == quantized_part(module).weight_names
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert type(reference) is type(plain(host)) and reference.state_dict().keys() == plain(host).state_dict().keys()
    for name, p in plain(host).named_parameters():
        assert reference.get_parameter(name).shape == p.shape


def test_one_matrix_of_a_stack_and_its_views_are_those_of_the_whole():
    module = quantized_part(pair("dbrx")[0])
    whole = module.dequantize_weight("w1").view(E, F_SIZE, H)
    stack = module.w1.view(-1, F_SIZE, H)
    assert stack.shape == whole.shape and torch.equal(stack + 0, whole)
    for view, expected in ((stack[1], whole[1]), (stack[torch.tensor(-1)].T, whole[-1].T)):
        assert view.shape == expected.shape and view.dtype == torch.float32
        assert torch.equal(view * 1, expected)
        assert torch.equal(view.detach() * 1, expected)
    assert torch.equal(stack.transpose(1, 2) * 1, whole.transpose(1, 2)) and torch.equal(stack[1:3], whole[1:3])
    with pytest.raises(IndexError, match="4 matrices"):
        stack[4]
    x = values(3, F_SIZE)
    assert_close(x @ stack[2], x @ whole[2], rms=1e-6)  # not in the direction of the codes: dequantized
    with pytest.raises(ValueError, match="view of a quantized weight"):
        stack[0].add_(1.0)


def test_an_input_of_another_width_is_refused():
    module, _ = pair("jetmoe")
    with pytest.raises(ValueError, match=r"needs \[\.\.\., 64\]"):
        module(values(9, 48), [3, 0, 5, 1])


def test_activations_have_a_scale_per_token_where_others_are_static():
    entry = plan(plain("llama4"), {"weights": "W8A8", "activation_scale": "static"}).entries[""]
    assert entry.scheme.activation.dynamic and not entry.scheme.is_static and "int8" in str(entry.scheme)


def test_gptq_and_training_name_what_they_do_not_serve():
    entry = plan(plain("llama4"), QuantizerConfig("int4", algorithm="gptq")).entries[""]
    assert entry.algorithm is None and "needs inputs of a linear layer" in entry.reason
    with pytest.raises(ValueError, match="Llama4TextExperts multiplies with its weights by itself"):
        prepare_qat_(nn.Sequential(plain("llama4")), "int4")


def test_bf16_and_autocast():
    module, reference = pair("llama4")
    x = HOSTS["llama4"][1]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y, expected = module(x), reference(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_close(y, expected, rms=PRODUCT_RMS[torch.bfloat16])
    half = module.to(torch.bfloat16)
    assert half.gate_up_proj.dtype == torch.bfloat16 and half(x.bfloat16()).dtype == torch.bfloat16


def test_torch_compile_gives_the_same():
    module, reference = pair("llama4")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = HOSTS["llama4"][1]
    with torch.no_grad():
        assert_close(compiled(x), reference(x), rms=1e-5)


def test_attention_of_xlnet_and_funnel_reads_one_matrix_by_einsum():
    from transformers import XLNetConfig
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    torch.manual_seed(0)
    module = XLNetRelativeAttention(XLNetConfig(d_model=H, n_head=4, d_inner=H)).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    quantize_(module, "int4")
    assert quantized_part(module).kind == "dequantized" and module.matrix_shape("q") == (H, H)
    reference = dequantize_(copy.deepcopy(module))
    x, positions = values(5, 2, H), values(10, 2, H)
    call = {"h": x, "g": None, "attn_mask_h": None, "attn_mask_g": None, "r": positions, "seg_mat": None}
    with torch.no_grad():
        assert_close(module(**call)[0], reference(**call)[0], rms=1e-5)
