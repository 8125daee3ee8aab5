"""Quantized caches whose first and last tokens are in 16 bit, too: a new token is one native call there as well."""

import pytest
import torch

from hf_quant import QuantizedCache, unfuse_activations_
from hf_quant.kv_cache import next_tokens
from hf_quant.testing import assert_close
from hf_quant.tests.integrations import test_plain_caches
from hf_quant.tests.integrations.test_fused_blocks import CONFIG, FAMILIES, make, needs_native, prompt


pytestmark = needs_native
CACHES = (
    {"format": "int2"},  # 4 first and 32 last ones
    {"format": "int8", "sink_tokens": 4, "recent_tokens": 8},
    {"format": "int4", "recent_tokens": 8},
    {"format": "fp8_e4m3", "sink_tokens": 3},
)
ENDS = (5, 30, *range(31, 41), 43, *range(44, 51))  # of the parts in which the tokens come


def forced(model, cache, mask, ends=ENDS, removed=0) -> torch.Tensor:
    """Logits of tokens that come in parts, some of which are removed and come again behind token 38."""
    past, coming = QuantizedCache(model.config, cache), [removed] * (removed > 0)
    for layer in past.layers if removed else ():
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()

    def change(past, at):
        if at == 38 and coming:
            past.crop(-coming.pop())
        return past

    return test_plain_caches.forced(model, mask, ends, change, past).float()


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma2", "gpt_oss"])  # windows, capped scores, sinks
def test_logits_of_the_host(parts, kind, cache):
    """One sequence, and several with padding, whose first tokens lie elsewhere; shorter than the ring, and longer."""
    fields = FAMILIES[kind][0] | ({"sliding_window": 20} if kind == "gemma3_text" else {})
    model, whole, padded = make(kind, CONFIG | {"kv_cache": cache}, **fields), torch.ones(1, 50), torch.ones(3, 50)
    padded[0, :9] = padded[2, :1] = 0
    found = []
    for is_fused in (True, False):
        for mask in (whole, padded):
            forced(model, cache, mask.long(), ENDS[:8])  # makes the blocks
            parts.clear()
            found.append(forced(model, cache, mask.long())[mask.bool()])
            assert (sum(parts) >= 16 * len(model.model.layers)) == is_fused
        unfuse_activations_(model)
    for ours, host in zip(found[:2], found[2:]):
        assert_close(ours, host, rms=1e-3)  # a last bit may change a code
        assert (ours - host).abs().median() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    model, mask = make(config=CONFIG | {"kv_cache": CACHES[1]}, dtype=dtype), torch.ones(2, 50).long()
    found = forced(model, CACHES[1], mask)
    assert_close(found, forced(unfuse_activations_(model), CACHES[1], mask), rms=0.02)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("removed", [2, 12])
def test_the_ring_is_read_once_it_is_full_again(parts, kind, removed):
    """Removed tokens may have taken the places of earlier ones, which only the codes still have."""
    cache = CACHES[1]
    model, mask = make(kind, CONFIG | {"kv_cache": cache}, **FAMILIES[kind][0]), torch.ones(2, 50).long()
    forced(model, cache, mask, ENDS[:8])
    ends = (5, 30, *range(31, 39), *range(39 - removed, 51))
    parts.clear()
    found = forced(model, cache, mask, ends, removed)
    layers = len(model.model.layers)
    assert sum(parts) == layers * (8 + 12 + removed - (min(removed, 8) - 1))  # until the ring has 8 tokens
    assert_close(found, forced(unfuse_activations_(model), cache, mask, ends, removed), rms=1e-3)


def test_places():
    model = make(config=CONFIG | {"kv_cache": CACHES[1]})
    past, sizes = QuantizedCache(model.config, CACHES[1]), (2, 32, torch.float32)
    layer = past.layers[0]
    assert next_tokens(layer, 2, 5, *sizes) is None  # the first ones, and several, go through `update`
    with torch.no_grad():
        model(prompt(2, 20), past_key_values=past)
    assert next_tokens(layer, 2, 2, *sizes) is None and next_tokens(layer, 2, 1, *sizes, value_dim=32) is None
    assert next_tokens(layer, 2, 1, *sizes).place == (0, 21, 0)
    past.crop(-3)
    assert next_tokens(layer, 2, 1, *sizes) is None
