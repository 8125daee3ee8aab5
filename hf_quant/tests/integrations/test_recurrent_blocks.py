"""Blocks of layers with a state on CPUs: the results of the host, batches, states of other kinds, and beams."""

import pytest
import torch
from transformers import DynamicCache

from hf_quant import QuantizedCache, capture_generate, unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons, decoder, layer, recurrent
from hf_quant.tests.integrations.test_fused_blocks import generate, make, needs_native, prompt, states


pytestmark = needs_native
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
# {model type: (further fields, modules that have a block)}.
FAMILIES = {
    "qwen3_5_text": (_LINEAR, 24),  # gated delta nets, and attention with gates
    "qwen3_next": (_LINEAR | _EXPERTS, 28),  # whose products are joined
    "qwen3_5_moe_text": (_LINEAR | _EXPERTS, 28),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}, 19),
    "olmo": ({}, 12),  # norms without weights, and no state
}


def but(model) -> list:
    """Norms of queries that lie apart, which have no blocks of their own."""
    return [module for name, module in model.named_modules() if name.endswith("q_norm")]


def per_token(model, ids) -> tuple[torch.Tensor, DynamicCache]:
    """(Logits of the last of three tokens after the others, one by one; the cache)."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-3], past_key_values=cache)
        return [model(one, past_key_values=cache).logits for one in ids[:, -3:].split(1, 1)][-1], cache


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_of_the_host(kind):
    fields, count = FAMILIES[kind]
    model = make(kind, **fields)
    ids, mask = prompt(3), torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = mask[2, :1] = 0
    calls = ((ids[:1], {}), (ids, {"attention_mask": mask}), (ids[:1], {"num_beams": 3}))
    found = [generate(model, given, **options) for given, options in calls]
    assert block_reasons(model) == dict.fromkeys(block_reasons(model)) and len(states(model)) == count
    assert all(state.found for state in states(model, *but(model)))
    with capture_generate(model) as steps:
        captured = [generate(model, given, **options) for given, options in calls[:2]]
    assert all(map(torch.equal, captured, found))
    assert steps.num_replays > 10 and not steps.reasons
    logits, cache = per_token(model, ids)
    unfuse_activations_(model)
    assert all(torch.equal(own, generate(model, given, **options)) for own, (given, options) in zip(found, calls))
    of_host, cache_of_host = per_token(model, ids)
    assert ((logits - of_host).norm() / of_host.norm()) < 1e-4
    for own, theirs in zip(cache.layers, cache_of_host.layers):
        for name in ("conv_states", "recurrent_states"):
            for state, same in zip(getattr(own, name, None) or (), getattr(theirs, name, None) or ()):
                if isinstance(state, torch.Tensor):
                    torch.testing.assert_close(state, same, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_inputs_of_every_kind(kind, activations, dtype):
    config = {"weights": "int4", "kv_cache": "int8", "cpu_activations": activations}
    model = make(kind, config, dtype, **FAMILIES[kind][0])
    logits, _ = per_token(model, prompt(2, 30))
    assert all(state.found for state in states(model, model.model, *but(model))) and logits.dtype == dtype
    expected, _ = per_token(unfuse_activations_(model), prompt(2, 30))
    assert ((logits - expected).float().norm() / expected.float().norm()) < (0.1 if activations else 0.03)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_prompts_in_parts(kind, monkeypatch):
    model, ids, found = make(kind, **FAMILIES[kind][0]), prompt(3, 27), []
    for rows in (layer.CHUNK, 60, 5):  # all sequences at once, two of them, and parts of one
        monkeypatch.setattr(recurrent, "CHUNK", rows)
        found.append(per_token(model, ids)[0])
        torch.testing.assert_close(found[-1], found[0], rtol=1e-4, atol=1e-4)
    expected, _ = per_token(unfuse_activations_(model), ids)
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "lfm2"])
def test_prompts_without_the_python_of_the_host(kind, monkeypatch):
    """Tokens of an empty cache, and of one in use."""
    model, ids, counts = make(kind, **FAMILIES[kind][0]), prompt(2, 30), []
    real = decoder.DecoderBlock.states

    def noted(self, inputs):
        y = real(self, inputs)
        counts.append(None if y is None else inputs.sizes)
        return y

    monkeypatch.setattr(decoder.DecoderBlock, "states", noted)

    def read() -> torch.Tensor:
        cache = QuantizedCache(model.config, "int8")
        with torch.no_grad():
            return torch.cat([model(part, past_key_values=cache).logits for part in ids.split([17, 13], 1)], 1)

    results = [read() for _ in range(3)]
    assert counts[-2:] == [(2, 17), (2, 13)]
    unfuse_activations_(model)
    expected = read()
    assert torch.equal(results[1], results[2])
    assert (results[2] - expected).norm() / expected.norm() < 1e-3


def test_states_that_lie_otherwise_are_left_to_the_host():
    model = make("qwen3_5_text", **FAMILIES["qwen3_5_text"][0])
    mixer = next(module for module in model.modules() if type(module).__name__ == "Qwen3_5GatedDeltaNet")
    _, cache = per_token(model, prompt(2))
    own, x, found = cache.layers[mixer.layer_idx], torch.randn(2, 1, 128), []
    conv, recurrent = own.conv_states[0].clone(), own.recurrent_states[0].clone()
    for given in (recurrent.clone(), recurrent.mT.contiguous().mT):
        own.conv_states[0], own.recurrent_states[0] = conv.clone(), given
        with torch.no_grad():
            found.append((mixer(hidden_states=x, cache_params=cache), own.conv_states[0], own.recurrent_states[0]))
    assert base.state_of(mixer).found and not found[1][2].is_contiguous()
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0][2], recurrent, rtol=1e-2)
