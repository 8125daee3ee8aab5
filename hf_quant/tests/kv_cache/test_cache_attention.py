"""Attention over quantized states against attention over what they stand for, and how transformers gets to it."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from hf_quant import KVCacheConfig, QuantizedCache
from hf_quant.kernels.kv_attention.op import CACHE_FORMATS, visible
from hf_quant.kv_cache import _interface, _states, attend, register_attention
from hf_quant.kv_cache._attention import mean_scores
from hf_quant.kv_cache._layers import QuantizedLayer, QuantizedSlidingWindowLayer
from hf_quant.kv_cache._static import QuantizedStaticLayer
from hf_quant.testing import assert_close


pytestmark = pytest.mark.usefixtures("poison_empty")
H, H_KV, D = 6, 2, 64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(layer, total, S):
    """(keys, values) that a layer of `total` tokens returns, the last S of which it got at last."""
    keys, values = randn(2, H_KV, total, D), randn(2, H_KV, total, D, seed=1)
    layer.update(keys[:, :, : total - S], values[:, :, : total - S])
    return layer.update(keys[:, :, total - S :], values[:, :, total - S :])


def exact(q, keys, values, mask, scale=None):
    """softmax(q @ k.T + mask) @ v in fp64."""
    k, v = (x.repeat_interleave(H // H_KV, 1).double() for x in (keys, values))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask, scale=scale)


LAYERS = {
    "growing": lambda config: QuantizedLayer(config),
    "static": lambda config: QuantizedStaticLayer(config, 90),
    "sliding": lambda config: QuantizedSlidingWindowLayer(config, 30),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_it_is_attention_over_what_the_states_stand_for(format, layer):
    for S in (1, 3, 12):
        for sinks, recents in ((0, 0), (3, 16)):
            config = KVCacheConfig(format, sink_tokens=sinks, recent_tokens=recents)
            keys, values = filled(LAYERS[layer](config), 70, S)
            q, T = randn(2, H, S, D, seed=2), 70 if layer == "static" else keys.shape[2]
            plain = [x.dequantize()[:, :, :T] for x in (keys, values)]
            width = keys.shape[2]
            padding = torch.ones(2, 1, 1, width, dtype=torch.bool)
            padding[0, ..., :7] = False
            window = 30 if layer == "sliding" else 0
            causal = visible(S, T, T, window, q.device)
            y, lse = attend(q, keys, values, padding, is_causal=True, window=window, scale=0.2)
            assert_close(y, exact(q, *plain, causal & padding[..., :T], 0.2), rms=1e-5)
            scores = (q @ plain[0].repeat_interleave(H // H_KV, 1).mT * 0.2).masked_fill(
                ~(causal & padding[..., :T]), -torch.inf
            )
            assert torch.allclose(lse + mean_scores(q, keys, 0.2), scores.logsumexp(-1), atol=1e-4)
            bias = randn(1, H, S, width, seed=3)
            y, _ = attend(q, keys, values, bias, is_causal=False, window=0, scale=None)
            assert_close(y, exact(q, *plain, bias[..., :T]), rms=1e-5)


def test_more_positions_than_recent_tokens_read_codes():
    """All positions of a pass read the same: 16-bit tokens if all of them see those, else codes (and sinks)."""
    q = randn(2, H, 20, D, seed=2)
    for make in (LAYERS["growing"], LAYERS["static"]):
        with_recents = filled(make(KVCacheConfig("int4", sink_tokens=2, recent_tokens=8)), 70, 20)
        without = filled(make(KVCacheConfig("int4", sink_tokens=2)), 70, 20)
        found = [
            attend(q, *states, None, is_causal=True, window=0, scale=None)[0] for states in (with_recents, without)
        ]
        assert torch.equal(*found)


def test_a_cache_that_holds_less_than_its_window():
    """Everything is in 16 bit then."""
    for make in LAYERS.values():
        keys, values = filled(make(KVCacheConfig("int2", sink_tokens=0, recent_tokens=32)), 9, 2)
        q = randn(2, H, 2, D, seed=2)
        y, _ = attend(q, keys, values, None, is_causal=True, window=0, scale=None)
        plain = randn(2, H_KV, 9, D), randn(2, H_KV, 9, D, seed=1)
        assert_close(y, exact(q, *plain, visible(2, 9, 9, 0, q.device)), rms=1e-5)


# The interface of transformers.


class Module(torch.nn.Module):
    is_causal, num_key_value_groups = True, H // H_KV


@pytest.fixture
def forward():
    """The attention function that a name stands for in transformers."""
    register_attention()
    return lambda name: AttentionInterface._global_mapping[name]


@pytest.mark.parametrize("name", ["sdpa", "hf_quant"])
def test_plain_tensors_go_where_they_went(forward, name):
    q, k, v = randn(2, H, 5, D), randn(2, H_KV, 5, D, seed=1), randn(2, H_KV, 5, D, seed=2)
    y, _ = forward(name)(Module(), q, k, v, None, scaling=0.3)
    assert_close(y.transpose(1, 2), exact(q, k, v, visible(5, 5, 5, 0, q.device), 0.3), rms=1e-5)


def test_plain_tensors_of_a_longer_past(forward):
    """ "hf_quant" aligns on the right, takes padding alone, and the scores of sinks."""
    q, k, v = randn(2, H, 3, D), randn(2, H_KV, 9, D, seed=1), randn(2, H_KV, 9, D, seed=2)
    causal, padding = visible(3, 9, 9, 0, q.device), torch.ones(2, 9, dtype=torch.bool)
    padding[0, :4] = False
    forward = forward("hf_quant")
    y, _ = forward(Module(), q, k, v, None)
    assert_close(y.transpose(1, 2), exact(q, k, v, causal), rms=1e-5)
    y, _ = forward(Module(), q, k, v, padding, sliding_window=4)
    seen = visible(3, 9, 9, 4, q.device) & padding[:, None, None]
    assert_close(y.transpose(1, 2)[1], exact(q, k, v, seen)[1], rms=1e-5)
    sinks = randn(H, seed=3)
    zeros = torch.zeros(2, H_KV, 1, D)
    longer = [torch.cat([x, zeros], 2) for x in (k, v)]
    for mask in (
        None,
        causal[None, None].expand(2, 1, -1, -1),
        torch.zeros(2, 1, 3, 9).masked_fill(~causal, -torch.inf),
    ):
        y, _ = forward(Module(), q, k, v, mask, s_aux=sinks)
        scores = torch.zeros(2, H, 3, 10).masked_fill(~F.pad(causal, (0, 1), value=True), -torch.inf)
        scores[..., 9] = sinks.view(1, H, 1)
        assert_close(y.transpose(1, 2), exact(q, *longer, scores), rms=1e-5)
    with pytest.raises(ValueError, match="caps its scores"):
        forward(Module(), q, k, v, None, softcap=5.0)


@pytest.mark.parametrize("name", ["sdpa", "hf_quant", "flash_attention_2"])
def test_quantized_states_are_read_as_codes(forward, name, monkeypatch):
    monkeypatch.setattr(_states.QuantizedStates, "dequantize", None)
    states = filled(QuantizedLayer(KVCacheConfig("int8")), 70, 4)
    monkeypatch.undo()
    q, plain = randn(2, H, 4, D, seed=2), [x.dequantize() for x in states]
    monkeypatch.setattr(_states.QuantizedStates, "dequantize", None)
    causal, padding = visible(4, 70, 70, 0, q.device), torch.ones(2, 70, dtype=torch.bool)
    padding[1, :9] = False
    forward = forward(name)
    y, _ = forward(Module(), q, *states, None, scaling=0.2)
    assert_close(y.transpose(1, 2), exact(q, *plain, causal, 0.2), rms=1e-5)
    y, _ = forward(Module(), q, *states, padding, sliding_window=20)
    seen = visible(4, 70, 70, 20, q.device) & padding[:, None, None]
    assert_close(y.transpose(1, 2), exact(q, *plain, seen), rms=1e-5)
    y, _ = forward(Module(), q, *states, seen)
    assert_close(y.transpose(1, 2), exact(q, *plain, seen), rms=1e-5)
    y, _ = forward(Module(), q, *states, None, is_causal=False)
    assert_close(y.transpose(1, 2), exact(q, *plain, None), rms=1e-5)
    bias = randn(1, H, 4, 70, seed=5)
    for mask, total in ((None, bias.masked_fill(~causal, -torch.inf)), (seen, bias.masked_fill(~seen, -torch.inf))):
        y, _ = forward(Module(), q, *states, mask, position_bias=bias)
        assert_close(y.transpose(1, 2), exact(q, *plain, total), rms=1e-5)
    sinks = randn(H, seed=3)
    y, _ = forward(Module(), q, *states, None, s_aux=sinks)
    scores = torch.zeros(1, H, 4, 71).masked_fill(~F.pad(causal, (0, 1), value=True), -torch.inf)
    scores[..., 70] = sinks.view(1, H, 1)
    longer = [torch.cat([x, torch.zeros(2, H_KV, 1, D)], 2) for x in plain]
    assert_close(y.transpose(1, 2), exact(q, *longer, scores), rms=1e-5)


def test_what_codes_cannot_serve_is_dequantized(forward, caplog, monkeypatch):
    """Values of another size than keys; said once."""
    monkeypatch.setattr(_states, "_noted", [])
    layer = QuantizedLayer(KVCacheConfig("int8"))
    layer.update(randn(2, H_KV, 9, 48), randn(2, H_KV, 9, D, seed=1))
    states = layer.update(randn(2, H_KV, 1, 48), randn(2, H_KV, 1, D, seed=1))
    q, plain = randn(2, H, 1, 48, seed=2), [x.dequantize() for x in states]
    with caplog.at_level(logging.WARNING, logger="hf_quant"):
        for _ in range(2):
            y, _ = forward("sdpa")(Module(), q, *states, None)
    assert len(caplog.records) == 1 and "dequantized when it is read" in caplog.text
    assert_close(y.transpose(1, 2), exact(q, *plain, None), rms=1e-5)


def test_states_are_tensors_to_everybody_else():
    keys, _ = filled(QuantizedLayer(KVCacheConfig("int4")), 20, 1)
    plain = keys.dequantize()
    assert keys.shape == plain.shape and keys.dtype == plain.dtype and keys.device == plain.device
    for function in (
        lambda x: x + 1,
        lambda x: x.transpose(2, 3) @ x,
        lambda x: x[:, :, 3:5],
        lambda x: torch.cat([x, x], 2),
    ):
        found = function(keys)
        assert type(found) is torch.Tensor and torch.equal(found, function(plain))
    assert torch.equal(keys.contiguous().view(2, -1), plain.view(2, -1)) and "int4" in repr(keys)


def test_masks_of_padding_alone_for_long_prompts(monkeypatch):
    padding = torch.ones(2, 40, dtype=torch.bool)
    sizes = {"batch_size": 2, "q_length": 8, "kv_length": 40, "q_offset": 32}
    small = _interface.padding_mask(**sizes, attention_mask=padding)
    assert small.shape == (2, 1, 8, 40) and torch.equal(small, sdpa_mask(**sizes, attention_mask=padding))
    monkeypatch.setattr(_interface, "LARGE_MASK", 0)
    assert (
        _interface.padding_mask(**sizes) is None and _interface.padding_mask(**sizes, attention_mask=padding) is None
    )
    padding[0, :3] = False
    assert torch.equal(_interface.padding_mask(**sizes, attention_mask=padding), padding)
    # All else as "sdpa" has it: one position, other patterns, positions that are not the last ones.
    for other in (
        {"q_length": 1, "q_offset": 39},
        {"mask_function": sliding_window_causal_mask_function(5)},
        {"q_offset": torch.tensor(2)},
        {"allow_is_causal_skip": False},
    ):
        arguments = {**sizes, "attention_mask": padding, "mask_function": causal_mask_function, **other}
        assert torch.equal(_interface.padding_mask(**arguments), sdpa_mask(**arguments))


def test_masks_hide_the_empty_places_of_a_static_cache():
    sizes = {"batch_size": 2, "q_length": 8, "q_offset": 0}
    mask = _interface.padding_mask(**sizes, kv_length=40)
    assert torch.equal(mask[0, 0], torch.ones(8, 40, dtype=torch.bool).tril())
    layer = QuantizedStaticLayer(KVCacheConfig("int8"), 40)
    assert _interface.padding_mask(**sizes, kv_length=layer.get_mask_sizes(8)[0]) is None  # it gives the prompt alone


def tiny(**fields):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, **sizes, **fields)).eval()


@pytest.mark.parametrize("config", ["int4", {"format": "int4", "sink_tokens": 2, "recent_tokens": 4}], ids=str)
@torch.no_grad()
def test_decoding_compiles_once_whatever_the_length(config):
    model, ids = tiny(), torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))
    caches = [QuantizedCache(model.config, config, max_cache_len=40) for _ in range(2)]
    for cache in caches:
        model(ids[:, :10], past_key_values=cache)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.forward, fullgraph=True, backend=counter)
    for index in range(10, 30):
        found = [call(ids[:, index : index + 1], past_key_values=c).logits for call, c in zip((model, step), caches)]
        assert torch.allclose(*found, atol=1e-5)
    assert counter.frame_count == 1 and caches[1].get_seq_length() == 30


@pytest.mark.parametrize("layer", LAYERS)
def test_more_positions_than_recent_tokens_without_sinks(layer):
    """No token is read in 16 bit then."""
    keys, values = filled(LAYERS[layer](KVCacheConfig("int8", recent_tokens=4)), 70, 9)
    q = randn(2, H, 9, D, seed=2)
    found, _ = attend(q, keys, values, None, is_causal=True, window=30 if layer == "sliding" else 0, scale=None)
    plain = [x.dequantize()[:, :, :70] for x in filled(LAYERS[layer](KVCacheConfig("int8")), 70, 9)]
    T = plain[0].shape[2]
    seen = visible(9, T, T, 30 if layer == "sliding" else 0, q.device)
    assert_close(found, exact(q, *plain, seen), rms=1e-5)


@pytest.mark.parametrize("S", (1, 3))
def test_a_window_that_is_no_shorter_than_a_cache_of_fixed_size(S):
    """Without a mask, as flash attention passes none; every token is inside the window."""
    config = KVCacheConfig("int2", sink_tokens=2, recent_tokens=16)
    states = filled(QuantizedStaticLayer(config, 90, is_sliding=True), 70, S)
    q = randn(2, H, S, D, seed=2)
    found = [attend(q, *states, None, is_causal=True, window=window, scale=None)[0] for window in (0, 90)]
    assert torch.equal(*found)


def test_several_positions_after_many_tokens_were_taken_back():
    """More than the ring holds: what comes next is seen by itself and by what follows only."""
    layer = QuantizedLayer(KVCacheConfig("int8", sink_tokens=2, recent_tokens=16))
    filled(layer, 60, 1)
    layer.crop(-30)
    keys, values = layer.update(randn(2, H_KV, 16, D, seed=3), randn(2, H_KV, 16, D, seed=4))
    q = randn(2, H, 16, D, seed=2)
    found, _ = attend(q, keys, values, None, is_causal=True, window=0, scale=None)
    assert_close(found, exact(q, keys.dequantize(), values.dequantize(), visible(16, 46, 46, 0, q.device)), rms=1e-5)
