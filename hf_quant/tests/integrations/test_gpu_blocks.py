"""Blocks of transformers on GPUs, on CPU tensors by Triton's interpreter: results of the host in fewer launches."""

import copy
import importlib
import pickle
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_quant import QuantizedCache, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons, fuse_blocks_, gpu
from hf_quant.kernels import dispatch, native
from hf_quant.kernels.gpu import launch
from hf_quant.kernels.native import places
from hf_quant.modules import products
from hf_quant.modules.ready import ReadyProduct
from hf_quant.tests.integrations.test_fused_blocks import FAMILIES, SMALL, decode, prompt
from hf_quant.tests.kernels.interpreter import install


install()
STEPS = ("rms_norm", "add_rms_norm", "gate", "rotary")
CONFIG = {"weights": "int4", "modules_to_not_convert": ["lm_head"]}


def implement(monkeypatch, *ops: str) -> None:
    """Let CPU tensors take the GPU implementations of ops."""
    for op in ops:
        importlib.import_module(dispatch._LAZY[op, "CUDA"])
        monkeypatch.setitem(dispatch._IMPLEMENTATIONS[op], "cpu", dispatch._IMPLEMENTATIONS[op]["cuda"])


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """CPU tensors take the blocks of GPUs."""
    implement(monkeypatch, *STEPS)
    monkeypatch.setattr(gpu, "_DEVICES", ("cpu",))
    with native.using(None):
        yield


def plain(kind: str = "llama", dtype: torch.dtype = torch.float32, **fields):
    torch.manual_seed(0)
    fields = {**SMALL, "num_hidden_layers": 1, **FAMILIES.get(kind, ({},))[0], **fields}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) / 4
    return model


def blocks_of(model) -> dict:
    """{name of a module: its block}."""
    found = {name: base.state_of(module) for name, module in model.named_modules() if base.is_fused(module)}
    return {name: block for name, state in found.items() for block in state.found.values()}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize(
    ("kind", "config", "dtype", "fields", "kinds"),
    [
        ("llama", {}, torch.float32, {}, ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]),
        ("qwen3", {}, torch.bfloat16, {}, ["self_attn", "mlp"]),
        ("gemma3_text", {"weights": "W8A8"}, torch.float32, {"layer_types": ["full_attention"]}, ["self_attn", "mlp"]),
        ("phi3", {"weights": "W8A8"}, torch.bfloat16, {}, ["self_attn", "mlp"]),
        ("glm4", {}, torch.float32, {}, ["self_attn", "mlp", "post_mlp_layernorm"]),
        ("olmo2", {}, torch.float32, {}, ["self_attn", "mlp", "post_feedforward_layernorm"]),
        ("cohere", {}, torch.float16, {}, ["self_attn", "mlp"]),
    ],
)
def test_logits_of_the_host(kind, config, dtype, fields, kinds):
    model = quantize_(plain(kind, dtype, **fields), {**CONFIG, **config})
    ids, caches = prompt(2, 4), [QuantizedCache(model.config, "int8") for _ in range(2)]
    found = decode(model, ids, caches[0])
    prefix = "model.layers.0."
    names = {prefix + name for name in kinds} | ({"model.layers.0", "model.norm"} if kind != "cohere" else set())
    assert names <= blocks_of(model).keys() and (block_reasons(model)["model.layers.0"] is None) == (kind != "cohere")
    attention = blocks_of(model)[prefix + "self_attn"]
    expected = decode(unfuse_activations_(model), ids, caches[1])
    # The last bits of a norm may move codes of inputs, and of the cache.
    limit = {torch.float32: 1e-2 if config else 2e-3, torch.float16: 0.02, torch.bfloat16: 0.05}[dtype]
    assert error(found, expected) < limit
    x, angles = torch.randn(1, 3, attention.K).to(dtype), torch.randn(1, 3, attention.sizes.turned).to(dtype)
    with torch.no_grad():
        right = attention.project(x, (angles, angles))[0]
        attention.turn = ("neighbors" if attention.turn[0] == "halves" else "halves", True)
        assert error(attention.project(x, (angles, angles))[0], right) > 0.3


NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "unsafe_split_with_sizes"}
NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "detach", "split_with_sizes"}


class Launches(TorchDispatchMode):
    """Counts what launches a kernel on a GPU: ops of torch, and kernels of hf_quant, which do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def run(self, kernel, *args) -> None:
        self.counts[kernel.fn.__name__] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func._schema.name.removeprefix("aten::") not in NO_KERNEL:
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    def of_layer(self, model, cache) -> Counter[str]:
        """Count the launches of a layer for one token; the calls before make the blocks."""
        layer, ids = model.model.layers[0], prompt(1, 4)
        host = layer.forward

        def counted(*args, **kwargs):
            self.counts.clear()
            with pytest.MonkeyPatch.context() as patch, self:
                implement(patch, *(op for op, key in dispatch._LAZY if key == "CUDA"))
                patch.setattr(products, "find_ready", lambda *_: None)
                patch.setattr(ReadyProduct, "__call__", lambda *_: None)
                patch.setitem(launch.RUNNERS, "cpu", self.run)
                patch.setattr(dispatch, "_num_dispatch_modes", lambda: 0)  # or this mode would be one that watches
                return host(*args, **kwargs)

        with torch.no_grad():
            model(ids[:, :3], past_key_values=cache)
            layer.__dict__["forward"] = counted
            model(ids[:, 3:], past_key_values=cache)
            del layer.__dict__["forward"]
        return Counter(self.counts)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # behind the layer, which computed nothing
def test_a_quantized_layer_needs_no_more_launches_than_one_in_16_bit():
    launches, model = Launches(), plain(dtype=torch.bfloat16)
    before = launches.of_layer(model, DynamicCache(config=model.config))
    # Norms 2 x 8, rotary embedding 10, products 7, cache 2, attention 1, silu and its product 2, sums 2.
    assert sum(before.values()) == 40
    for weights, products_alone in (("int4", 4), ("W8A8", 8)):
        config = {**CONFIG, "weights": weights, "fuse_projections": True}
        model = quantize_(plain(dtype=torch.bfloat16, intermediate_size=256), config)
        found = launches.of_layer(model, QuantizedCache(model.config, "int8"))
        unfuse_activations_(model)
        unfused = launches.of_layer(model, QuantizedCache(model.config, "int8"))
        print(f"launches a layer: 16 bit {sum(before.values())}, {weights} {sum(found.values())}: {dict(found)}")
        # Norms, rotary embedding, append, three of attention, gate, a sum.
        assert sum(found.values()) == products_alone + 9 and sum(unfused.values()) == products_alone + 34
        assert found["_rms_norm_kernel"] == 2 and found["_gate_kernel"] == found["_rotary_kernel"] == 1
        assert sum(found.values()) <= sum(before.values())


@pytest.fixture
def llama():
    return quantize_(plain(), CONFIG)


def test_what_watches_gets_the_host(llama):
    mlp, norm, x = llama.model.layers[0].mlp, llama.model.norm, torch.randn(1, 2, 128)
    y = x.clone().requires_grad_()
    mlp(norm(y)).sum().backward()
    assert y.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mlp(norm(x))
        norm(x.double())
        norm(x.transpose(0, 1).expand(2, 3, 128))
        replica = norm._replicate_for_data_parallel()
        replica._parameters = dict(norm._parameters)
        replica(x)
        assert mlp(torch.zeros(0, 128)).shape == (0, 128) and not blocks_of(llama)
        found = torch.compile(norm, backend="eager", fullgraph=True)(x)
        assert not blocks_of(llama)
        torch.testing.assert_close(norm(x), found)
        assert blocks_of(llama).keys() == {"model.norm"}


@pytest.mark.parametrize("has_extension", [True, False])
def test_hooks_and_replaced_parameters(llama, monkeypatch, has_extension):
    if not has_extension:
        monkeypatch.setattr(places, "_offset", None)
        monkeypatch.setattr(base, "unchanged", places._unchanged)
    mlp, norm, x = llama.model.layers[0].mlp, llama.model.norm, torch.randn(1, 2, 128)
    with torch.no_grad():
        expected, seen = mlp(x), []
        handle = mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(mlp(x), expected)
        handle.remove()
        assert torch.equal(mlp(x), expected) and len(seen) == 1
        norm(x)
        norm.weight = torch.nn.Parameter(torch.ones(128) * 3)
        assert norm(x).square().mean().sqrt() == pytest.approx(3, rel=0.05)
        mlp.down_proj.weight = torch.zeros(128, 192)
        assert not mlp(x).any()


def test_no_trial_while_a_graph_is_captured(llama, monkeypatch):
    norm, x = llama.model.norm, torch.randn(1, 2, 128)
    with torch.no_grad():
        monkeypatch.setattr(gpu, "is_capturing", lambda x: True)
        expected = norm(x)
        assert not blocks_of(llama) and base.state_of(norm).trials == 0
        monkeypatch.setattr(gpu, "is_capturing", lambda x: False)
        norm(x)
        monkeypatch.setattr(gpu, "is_capturing", lambda x: True)
        calls, real = [], gpu.rms_norm
        monkeypatch.setattr(gpu, "rms_norm", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1])
        torch.testing.assert_close(norm(x), expected)
        assert calls


def test_reasons():
    tables = quantize_(plain("gptj", n_positions=64, n_embd=128, n_head=4, n_layer=1, rotary_dim=16), CONFIG)
    other = quantize_(plain(hidden_act="tanh"), CONFIG)
    attention = tables.transformer.h[0].attn
    with torch.no_grad():
        if "embed_positions" in attention._buffers:  # before transformers 5.24
            attention(hidden_states=torch.randn(1, 3, 128), position_ids=torch.arange(3)[None])
        other(prompt())
    found = {**block_reasons(tables), **block_reasons(other)}
    if "embed_positions" in attention._buffers:
        assert "look up its positions in a table" in found["transformer.h.0.attn"]
    assert "activation function" in found["model.layers.0.mlp"]
    assert "has no block" in found["model.layers.0"] and found["model.layers.0.self_attn"] is None


def test_without_triton(llama, monkeypatch):
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    with torch.no_grad():
        llama.model.norm(torch.randn(1, 2, 128))
    assert block_reasons(llama)["model.norm"] == "triton is not installed"


def test_copies_and_pickles(llama):
    x = torch.randn(1, 2, 128)
    with torch.no_grad():
        expected = llama.model.norm(x)
        for other in (copy.deepcopy(llama.model.norm), pickle.loads(pickle.dumps(llama.model.norm))):
            assert not base.state_of(other).found and torch.equal(other(x), expected) and base.state_of(other).found
    assert fuse_blocks_(llama) == 7 and not blocks_of(llama)


def test_joined_projections_of_another_order_stay_with_the_host():
    model = quantize_(plain("gpt_neox"), CONFIG)
    with torch.no_grad():
        found = model(prompt()).logits
        reasons = block_reasons(model)
        assert error(found, unfuse_activations_(model)(prompt()).logits) < 1e-5
    assert "other queries or keys" in reasons["gpt_neox.layers.0.attention"]
