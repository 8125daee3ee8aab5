"""Blocks of selective state spaces on CPUs: the results of the host, prompts in parts, and what is refused."""

from itertools import product

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from hf_quant import unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons
from hf_quant.tests.integrations.test_fused_blocks import generate, make, needs_native, prompt, states


pytestmark = needs_native
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "num_hidden_layers": 3}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
# {model type: (further fields, mixers)}.
FAMILIES = {
    "mamba": ({"state_size": 16}, 2),
    "falcon_mamba": ({"state_size": 16}, 2),  # norms without weights
    "jamba": ({"num_hidden_layers": 4, "attn_layer_offset": 1, "num_experts": 2}, 3),
    "mamba2": ({"state_size": 32, "num_heads": 8, "head_dim": 32, "n_groups": 2}, 2),
    "bamba": (_HYBRID | {"attn_layer_indices": [1]}, 2),
    "granitemoehybrid": (
        _HYBRID | {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"},
        2,
    ),
    "nemotron_h": (_NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]}, 2),
}


def mixers(model) -> list[nn.Module]:
    return [module for module in model.modules() if base.is_fused(module) and hasattr(module, "A_log")]


def read(model, ids, *parts: int) -> tuple[torch.Tensor, DynamicCache]:
    """(Logits of the tokens in parts, one call each; the cache)."""
    cache = DynamicCache(config=model.config)
    name = "cache_params" if model.config.model_type in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"
    with torch.no_grad():
        logits = [model(part, use_cache=True, **{name: cache}).logits for part in ids.split(parts, 1)]
    return torch.cat(logits, 1), cache


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).float().norm() / expected.float().norm()).item()


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_of_the_host(kind):
    fields, count = FAMILIES[kind]
    model, ids, mask = make(kind, "int4", **fields), prompt(3, 20), torch.ones(3, 20, dtype=torch.long)
    mask[0, :5] = mask[2, :1] = 0
    calls = ((ids[:1], {}), (ids, {"attention_mask": mask}), (ids[:1], {"num_beams": 3}))
    found = [generate(model, given, **options) for given, options in calls]
    assert len(mixers(model)) == count and all(base.state_of(m).found for m in mixers(model))
    assert block_reasons(model) == dict.fromkeys(block_reasons(model))
    logits, cache = read(model, ids, 17, 1, 1, 1)
    unfuse_activations_(model)
    assert all(torch.equal(own, generate(model, given, **options)) for own, (given, options) in zip(found, calls))
    of_host, cache_of_host = read(model, ids, 17, 1, 1, 1)
    assert off(logits, of_host) < 1e-4
    for own, theirs in zip(cache.layers, cache_of_host.layers):
        for name in ("conv_states", "recurrent_states"):
            for place, state in getattr(own, name, {}).items():
                torch.testing.assert_close(state, getattr(theirs, name)[place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "activations"),
    [*product(("mamba", "mamba2"), (torch.bfloat16,), (None, "int8")), ("bamba", torch.float16, None)],
)
def test_inputs_of_every_kind(kind, dtype, activations):
    model = make(kind, {"weights": "int4", "cpu_activations": activations}, dtype, **FAMILIES[kind][0])
    logits, _ = read(model, prompt(2, 30), 27, 1, 1, 1)
    assert all(base.state_of(m).found for m in mixers(model))
    expected, _ = read(unfuse_activations_(model), prompt(2, 30), 27, 1, 1, 1)
    assert off(logits, expected) < (0.1 if activations else 0.04)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_prompts_in_parts(kind, monkeypatch):
    model, ids = make(kind, "int4", **FAMILIES[kind][0]), prompt(3, 27)
    whole, _ = read(model, ids, 27)
    for rows in (60, 5):  # two sequences at once, and parts of one
        monkeypatch.setattr("hf_quant.integrations.transformers.blocks.recurrent.CHUNK", rows)
        torch.testing.assert_close(read(model, ids, 27)[0], whole, rtol=1e-4, atol=1e-4)
    later, _ = read(model, ids, 17, 10)  # whose states Mamba's host forgets
    expected, _ = read(unfuse_activations_(model), ids, 17, 10)
    assert off(later, expected) < 1e-4


def test_what_the_kernel_does_not_serve_is_left_to_the_host():
    model = make("mamba2", "int4", **{**FAMILIES["mamba2"][0], "state_size": 24})
    y, names = generate(model, prompt()), [name for name, module in model.named_modules() if module in mixers(model)]
    assert names and all("its heads are of other sizes: 32 x 24" in block_reasons(model)[name] for name in names)
    assert torch.equal(y, generate(unfuse_activations_(model), prompt())) and not states(model)


def test_limits_of_time_steps_count_in_prompts_only():
    model = make("mamba2", "int4", **{**FAMILIES["mamba2"][0], "time_step_limit": (0.5, 1.0)})
    found, _ = read(model, prompt(2, 20), 17, 1, 1, 1)
    assert all(base.state_of(module).found for module in mixers(model))
    assert off(found, read(unfuse_activations_(model), prompt(2, 20), 17, 1, 1, 1)[0]) < 1e-4
