"""Latent attention on GPUs, on CPU tensors: logits of the host, whose keys and values are not expanded for a token."""

import pytest
import torch
import torch.nn.functional as F

from hf_quant import QuantizedCache, dequantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons, gpu
from hf_quant.integrations.transformers.blocks.gpu_latent import GpuLatentBlock
from hf_quant.kernels import native
from hf_quant.kernels.gpu import launch
from hf_quant.kv_cache import attend_to_latents_by_products
from hf_quant.testing import assert_close, rms_error
from hf_quant.tests.integrations.test_latent_blocks import _SMALL, FAMILIES, expanded, forced, generate, make  # noqa: F401


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """CPU tensors take the blocks of GPUs, of which these alone need no kernel."""
    monkeypatch.setattr(gpu, "_DEVICES", ("cpu",))
    monkeypatch.setattr(launch, "unavailable_reason", lambda device: None)
    with native.using(None):
        yield


def are_blocks(model) -> bool:
    """True if all modules with latent attention have their block."""
    found = [block for m in model.modules() if base.is_fused(m) for block in base.state_of(m).found.values()]
    reasons = {reason for name, reason in block_reasons(model).items() if name.endswith("self_attn")}
    count = sum(isinstance(block, GpuLatentBlock) for block in found)
    return count == model.config.num_hidden_layers and reasons == {None}


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_tokens_of_the_host(kind, expanded):  # noqa: F811
    model = make(kind)
    ours, fixed = forced(model), generate(model, 2, cache_implementation="static")
    assert are_blocks(model) and not expanded
    host = forced(unfuse_activations_(model))
    assert_close(ours, host, rms=1e-5)
    assert not torch.equal(ours, host), "another order of sums"
    assert torch.equal(generate(model, 2, cache_implementation="static"), fixed)


@pytest.mark.parametrize("cache", ["int8", {"format": "int4", "sink_tokens": 2, "recent_tokens": 3}], ids=str)
def test_quantized_caches(cache, expanded):  # noqa: F811
    model = make("minicpm3", kv_cache=cache)
    ours, fixed = forced(model, QuantizedCache(model.config, cache)), generate(model, cache_implementation="static")
    assert are_blocks(model) and not expanded
    unfuse_activations_(model)
    assert_close(ours, forced(model, QuantizedCache(model.config, cache)), rms=1e-4)
    assert torch.equal(generate(model, cache_implementation="static"), fixed)


@pytest.mark.parametrize(
    "options",
    [{"weights": "nf4"}, {"weights": "fp8"}, {"weights": "int4", "symmetric": False}],
    ids=str,
)
def test_formats_in_bf16(options, expanded):  # noqa: F811
    model = make("minicpm3", torch.bfloat16, **options)
    ours = forced(model)
    assert are_blocks(model) and not expanded
    assert_close(ours, forced(unfuse_activations_(model)), rms=0.02)


@pytest.mark.parametrize("kind", ["minicpm3", "deepseek_v2"])
def test_latents_are_not_rounded_to_int8(kind, expanded, monkeypatch):  # noqa: F811
    """Latents in W8A8 are rounded as the host's: one layer and many prompts, or other roundings would hide it."""
    monkeypatch.setitem(_SMALL, "num_hidden_layers", 1)
    model = make(kind, torch.bfloat16, weights="W8A8")

    def logits() -> torch.Tensor:
        return torch.cat([forced(model, seed=seed) for seed in range(16)])

    ours = logits()
    assert are_blocks(model) and not expanded
    unfuse_activations_(model)
    host = logits()
    dequantize_(model)
    exact = logits()
    assert rms_error(ours, exact) <= rms_error(host, exact)


def test_weights_written_in_place(expanded):  # noqa: F811
    model, other = make("minicpm3"), make("minicpm3", weights="int4")
    for parameter in other.parameters():
        if parameter.is_floating_point():
            parameter.data *= 1.1
    before = forced(model)
    model.load_state_dict(other.state_dict())
    after = forced(model)
    assert are_blocks(model) and not expanded and rms_error(after, before) > 0.05
    assert_close(after, forced(unfuse_activations_(model)), rms=1e-5)


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_by_products(mask, dtype):
    B, H, T, K, D = 2, 4, 70, 64, 16
    generator = torch.Generator().manual_seed(0)
    q, q_turned, latents, turned = (
        torch.randn(B, heads, length, width, generator=generator).to(dtype)
        for heads, length, width in ((H, 1, K), (H, 1, D), (1, T, K), (1, T, D))
    )
    seen = None if mask is None else torch.rand(B, 1, 1, T, generator=generator) > 0.3
    given = seen if mask in (None, torch.bool) else torch.zeros(B, 1, 1, T, dtype=mask).masked_fill(~seen, -1e9)
    options = {"is_causal": False, "scale": 0.2}
    y = attend_to_latents_by_products(q, q_turned, latents, turned, given, **options)
    keys, queries = torch.cat([latents, turned], -1), torch.cat([q, q_turned], -1)
    states = (x.double().expand(-1, H, -1, -1) for x in (keys, latents))
    exact = F.scaled_dot_product_attention(queries.double(), *states, attn_mask=seen, scale=0.2).transpose(1, 2)
    assert y.shape == (B, 1, H, K) and y.dtype == dtype
    assert_close(y.double(), exact, rms=1e-6 if dtype == torch.float32 else 5e-3)
    several = (x.expand(-1, -1, 2, -1) for x in (q, q_turned))
    assert attend_to_latents_by_products(*several, latents, turned, given, **options) is None
