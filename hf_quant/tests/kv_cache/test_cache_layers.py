"""The layers of a quantized cache: what they hold after every way to fill and change them."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig

from hf_quant import KVCacheConfig, QuantizedCache
from hf_quant.kernels.kv_attention.op import CACHE_FORMATS
from hf_quant.kv_cache import QuantizedStates
from hf_quant.kv_cache._layers import BLOCK, QuantizedLayer, QuantizedSlidingWindowLayer
from hf_quant.kv_cache._static import QuantizedStaticLayer
from hf_quant.testing import sqnr


pytestmark = pytest.mark.usefixtures("poison_empty")
B, H, D = 2, 3, 64


def states(S, seed=0, dtype=torch.bfloat16):
    """Keys and values [B, H, S, D], in memory as the projections of a model leave them."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, S, H, D, generator=generator).to(dtype).transpose(1, 2) for _ in range(2))


def filled(layer, keys, values, parts):
    """What the layer returns last after it was filled in parts of so many tokens."""
    start = 0
    for size in parts:
        found = layer.update(keys[:, :, start : start + size], values[:, :, start : start + size])
        start += size
    return found


def tensors(layer, end=None):
    """Copies of the codes and numbers that a layer holds of its tokens, in order."""
    parts = (part[:, :, :end] for found in (layer.keys, layer.values) for part in (found.codes, found.pairs))
    return [part.clone() for part in parts]


CONFIGS = [*CACHE_FORMATS, {"format": "int4", "sink_tokens": 3, "recent_tokens": 7, "group_size": 16}]
PARTS = [[7, 33], [7, *[1] * 33], [7, 1, 1, 20, 11], [7, 32, 1]]  # the first part sets the frame


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_does_not_matter_how_a_layer_was_filled(config):
    """Every growing layer and every layer of fixed size holds the same bytes."""
    keys, values = states(40)
    expected = None
    for parts in PARTS:
        growing, static = QuantizedLayer(KVCacheConfig.of(config)), QuantizedStaticLayer(KVCacheConfig.of(config), 50)
        found = [filled(layer, keys, values, parts) for layer in (growing, static)]
        held = tensors(growing)
        expected = expected or held
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(held, expected))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors(static, 40), expected))
        dequantized = [[x.dequantize()[:, :, :40] for x in pair] for pair in found]
        assert all(torch.equal(a, b) for a, b in zip(*dequantized))
        assert growing.get_seq_length() == static.get_seq_length() == 40


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_codes_never_change_after_they_were_written(format):
    layer, (keys, values) = QuantizedLayer(KVCacheConfig(format)), states(2 * BLOCK + 40)
    filled(layer, keys, values, [30])
    before = tensors(layer)
    for start in range(30, keys.shape[2], 37):
        layer.update(keys[:, :, start : start + 37], values[:, :, start : start + 37])
        assert all(torch.equal(a.float(), b.float()[:, :, :30]) for a, b in zip(before, tensors(layer)))


def test_the_first_tokens_come_back_as_they_were():
    keys, values = states(20)
    found = QuantizedLayer(KVCacheConfig("int4")).update(keys, values)
    assert found[0] is keys and found[1] is values
    found = QuantizedStaticLayer(KVCacheConfig("int4"), 30).update(keys, values)
    assert found[0].shape == (B, H, 30, D) and found[0].exact is keys
    assert torch.equal(found[1].dequantize()[:, :, :20], values)


@pytest.mark.parametrize(("format", "least"), [("int8", 40), ("fp8", 30), ("int4", 19), ("int2", 9)])
def test_what_comes_back_is_near(format, least):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys, values = states(300, dtype=dtype)
        layer = QuantizedLayer(KVCacheConfig(format, sink_tokens=0, recent_tokens=0))
        found = filled(layer, keys, values, [100, 150, 50])
        for x, exact in zip(found, (keys, values)):
            assert isinstance(x, QuantizedStates) and x.shape == exact.shape and x.dtype == dtype
            assert least < sqnr(exact.float(), x.dequantize().float()) < least + 12


def test_the_first_and_the_last_tokens_are_kept():
    keys, values = states(60)
    config = KVCacheConfig("int2", sink_tokens=4, recent_tokens=16)
    for layer in (QuantizedLayer(config), QuantizedStaticLayer(config, 64)):
        for parts in ([50, 10], [1] * 60, [10, 50]):
            layer.reset()
            found = filled(layer, keys, values, parts)
            for x, exact in zip(found, (keys, values)):
                dequantized = x.dequantize()[:, :, :60]
                same = (dequantized == exact).flatten(0, 1).all(-1).all(0)
                assert same[:4].all() and same[44:].all() and not same[4:44].any()


def test_taking_tokens_back():
    """What was overwritten in 16 bit is read as codes; a position that is filled again holds its new token."""
    keys, values = states(60)
    more = states(60, seed=1)
    layer = QuantizedLayer(KVCacheConfig("int4", sink_tokens=2, recent_tokens=16))
    filled(layer, keys, values, [40, 20])
    layer.crop(-10)
    assert layer.get_seq_length() == 50
    same = (layer.keys.dequantize() == keys[:, :, :50]).flatten(0, 1).all(-1).all(0)
    assert same[:2].all() and same[44:].all() and not same[2:44].any()
    layer.crop(0)
    found = layer.update(*(x[:, :, 50:53] for x in more))[0].dequantize()
    assert found.shape[2] == 53 and torch.equal(found[:, :, 50:], more[0][:, :, 50:53])
    other = QuantizedLayer(KVCacheConfig("int4", sink_tokens=2, recent_tokens=16))
    filled(other, *(torch.cat([x[:, :, :50], y[:, :, 50:53]], 2) for x, y in zip((keys, values), more)), [40, 13])
    assert all(torch.equal(a, b) for a, b in zip(tensors(layer), tensors(other)))
    layer.crop(20)  # older versions: what to keep
    assert layer.get_seq_length() == 20
    layer.crop(-30)
    assert layer.get_seq_length() == 0


def test_a_layer_of_fixed_size_is_cropped_unless_recent_tokens_took_places_of_others():
    keys, values = states(30)
    layer, other = (QuantizedStaticLayer(KVCacheConfig("int4", sink_tokens=2), 40) for _ in range(2))
    filled(layer, keys, values, [20, 10])
    assert layer.is_croppable
    layer.crop(-6)
    assert layer.get_seq_length() == 24
    found, expected = filled(layer, keys[:, :, 24:], values[:, :, 24:], [4]), filled(other, keys, values, [20, 8])
    assert all(torch.equal(a[:, :, :28], b[:, :, :28]) for a, b in zip(found, expected))
    with pytest.raises(RuntimeError, match="by a negative number"):
        layer.crop(4)
    layer = QuantizedStaticLayer(KVCacheConfig("int2"), 40)
    filled(layer, keys, values, [20, 10])
    assert not layer.is_croppable
    with pytest.raises(RuntimeError, match="recent_tokens=32 cannot be cropped"):
        layer.crop(-6)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sequences_are_reordered_repeated_and_selected(config):
    keys, values = states(30)
    for layer in (QuantizedLayer(KVCacheConfig.of(config)), QuantizedStaticLayer(KVCacheConfig.of(config), 40)):
        filled(layer, keys, values, [20, 10])
        before = layer.keys.dequantize()[:, :, :30], layer.values.dequantize()[:, :, :30]
        layer.reorder_cache(torch.tensor([1, 1]))
        assert torch.equal(layer.keys.dequantize()[:, :, :30], before[0][[1, 1]])
        layer.batch_repeat_interleave(2)
        assert layer.batch_size == 4 and layer.values.shape[0] == 4
        layer.batch_select_indices(torch.tensor([0, 3]))
        assert torch.equal(layer.values.dequantize()[:, :, :30], before[1][[1, 1]]) and layer.batch_size == 2
        layer.update(*(x[:, :, :1] for x in (keys, values)))
        layer.reset()
        assert layer.get_seq_length() == 0 and layer.is_initialized == isinstance(layer, QuantizedStaticLayer)
        filled(layer, keys, values, [20, 10])
        assert torch.equal(layer.keys.dequantize()[:, :, :30], before[0])


@pytest.mark.parametrize("parts", [[5], [30], [1] * 30, [3, 4, 20, 1, 1, 1], [9, 1, 12]], ids=str)
@pytest.mark.parametrize("recents", [0, 4])
def test_a_sliding_window_holds_what_the_hosts_does(parts, recents):
    """Lengths, masks and tokens, through many moves in memory."""
    keys, values = states(30)
    ours = QuantizedSlidingWindowLayer(KVCacheConfig("int8", recent_tokens=recents), 8)
    host = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=8)).layers[0]
    start = 0
    for size in parts:
        assert ours.get_mask_sizes(size) == host.get_mask_sizes(size)
        new = keys[:, :, start : start + size], values[:, :, start : start + size]
        start += size
        for a, b in zip(ours.update(*new), host.update(*new)):
            assert a.shape == b.shape
            a = a.dequantize() if isinstance(a, QuantizedStates) else a
            assert (a - b).abs().max() < 0.05
        assert ours.get_seq_length() == host.get_seq_length() == start
        assert ours.keys.shape[2] == min(start, 7)


def test_a_sliding_window_does_not_grow():
    layer, (keys, values) = QuantizedSlidingWindowLayer(KVCacheConfig("int4"), 100), states(4 * BLOCK)
    for start in range(0, keys.shape[2], 5):
        layer.update(keys[:, :, start : start + 5], values[:, :, start : start + 5])
    assert layer.k_codes.shape[2] <= 2 * BLOCK


def test_a_sliding_window_takes_tokens_back():
    keys, values = states(30)
    layer = QuantizedSlidingWindowLayer(KVCacheConfig("int8"), 8)
    filled(layer, keys, values, [20])
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-1)
    layer.activate_past_recording()
    layer.update(keys[:, :, 20:26], values[:, :, 20:26])
    layer.crop(-4)
    assert layer.get_seq_length() == 22 and layer.keys.shape[2] == 7
    assert (layer.keys.dequantize() - keys[:, :, 15:22]).abs().max() < 0.05


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_memory_to_the_byte(format):
    keys, values = states(1000)
    config = KVCacheConfig(format).resolved()
    layer = QuantizedLayer(config)
    filled(layer, keys, values, [900, 100])
    capacity = layer.k_codes.shape[2]
    assert 1000 <= capacity <= 1000 + 2 * BLOCK and capacity % BLOCK == 0
    window = config.sink_tokens + config.recent_tokens
    exact = 2 * B * H * (window + 1) * D * 2 if window else 0
    frame = B * H * D * 4 * (2 if config.sink_tokens else 3)
    assert layer.nbytes == 2 * B * H * capacity * config.bytes_per_token(D) + exact + frame
    held = layer.keys
    assert held.codes.nbytes + held.pairs.nbytes == B * H * 1000 * config.bytes_per_token(D)


def test_keys_and_values_of_different_sizes():
    layer = QuantizedLayer(KVCacheConfig("int4"))
    keys, values = torch.randn(1, 2, 9, 192), torch.randn(1, 2, 9, 128)
    layer.update(keys, values)
    found = layer.update(keys, values)
    assert found[0].shape == (1, 2, 18, 192) and found[1].shape == (1, 2, 18, 128)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("heads", "sizes"), [(1, (D, D)), (2 * H, (D, D)), (H, (32, D)), (H, (D, 32))])
def test_a_layer_of_fixed_size_takes_the_heads_that_come_not_those_it_was_allocated_for(config, heads, sizes):
    layer, other = (QuantizedStaticLayer(KVCacheConfig.of(config), 24) for _ in range(2))
    nothing = torch.zeros(B, H, 0, D, dtype=torch.bfloat16)
    layer.lazy_initialization(nothing, nothing)
    keys, values = (torch.cat([x] * 2, 1)[:, :heads, :, :size] for x, size in zip(states(20), sizes))
    for _ in range(2):
        for found in (layer, other):
            filled(found, keys, values, [12, 8])
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors(layer, 20), tensors(other, 20)))
        address = layer.k_codes.data_ptr()
        layer.reset()
        other.reset()
    assert layer.k_codes.data_ptr() == address


def test_wrong_states_are_refused():
    layer = QuantizedLayer(KVCacheConfig("int4"))
    with pytest.raises(ValueError, match="heads of 20 channels"):
        layer.update(*(x[..., :20] for x in states(3)))
    with pytest.raises(ValueError, match="torch.float64"):
        QuantizedLayer(KVCacheConfig("int8")).update(*states(3, dtype=torch.float64))
    for layer in (QuantizedLayer(KVCacheConfig("int8")), QuantizedStaticLayer(KVCacheConfig("int8"), 24)):
        keys, values = states(3)
        layer.update(keys, values)
        with pytest.raises(ValueError, match=f"the batch size {2 * len(keys)}, and those in the cache {len(keys)}"):
            layer.update(*(torch.cat([x, x]) for x in (keys, values)))
        assert layer.get_seq_length() == 3


def test_a_layer_of_fixed_size_refuses_what_does_not_fit():
    """And holds what it held."""
    keys, values = states(30)
    layer = QuantizedStaticLayer(KVCacheConfig("int8"), 24)
    with pytest.raises(ValueError, match="30 tokens more than the 0 in it .* max_cache_len=24"):
        layer.update(keys, values)
    filled(layer, keys, values, [20])
    before = tensors(layer)
    with pytest.raises(ValueError, match="5 tokens more than the 20 in it"):
        layer.update(keys[:, :, :5], values[:, :, :5])
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(layer))) and layer.get_seq_length() == 20
    filled(layer, keys[:, :, 20:], values[:, :, 20:], [4])
    assert layer.get_seq_length() == 24


def test_nan_and_inf_stay_where_they_are():
    keys, values = states(12)
    keys[0, 0, 5, 3], values[1, 1, 6, 2] = float("nan"), float("inf")
    layer = QuantizedLayer(KVCacheConfig("int4"))
    found = [x.dequantize() for x in filled(layer, keys, values, [8, 4])]
    assert found[0].isfinite().all(-1).logical_not().nonzero().tolist() == [[0, 0, 5]]
    assert found[1].isfinite().all(-1).logical_not().nonzero().tolist() == [[1, 1, 6]]


def test_a_cache_can_be_copied_and_knows_its_kind():
    config = LlamaConfig(num_hidden_layers=2)
    cache = QuantizedCache(config, "int2")
    keys, values = states(9)
    for index in range(2):
        cache.update(keys, values, index)
    other = copy.deepcopy(cache)
    cache.update(keys, values, 0)
    assert other.get_seq_length() == 9 and cache.get_seq_length() == 18 and other.nbytes > 0
    assert "int2" in repr(cache) and not cache.is_compileable
    assert QuantizedCache(config, max_cache_len=16).is_compileable


@pytest.mark.parametrize("total", [1, 3, 9, 30])
def test_what_states_stand_for_is_laid_out_as_they_say(total):
    """Ops that look at strides are taken apart before they meet the values."""
    keys, values = states(total)
    config = KVCacheConfig("int2", sink_tokens=4, recent_tokens=6, group_size=16)
    for layer in (QuantizedLayer(config), QuantizedStaticLayer(config, 32), QuantizedSlidingWindowLayer(config, 9)):
        filled(layer, keys, values, [1] * total)
        found = layer.keys
        plain, T = found.dequantize(), min(total, found.shape[2])
        assert plain.is_contiguous() and plain.shape == found.shape
        weight = torch.ones(5, D, dtype=found.dtype)
        assert torch.equal(torch.nn.functional.linear(found, weight), torch.nn.functional.linear(plain, weight))
        sinks = 0 if isinstance(layer, QuantizedSlidingWindowLayer) else 4
        same = plain[:, :, :T] == keys[:, :, total - T : total] if not layer.is_sliding else plain == keys[:, :, -T:]
        same = same.flatten(0, 1).all(-1).all(0)
        assert same[:sinks].all() and same[-6:].all() and not same[sinks : max(T - 6, sinks)].any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_keys_and_values_of_different_dtypes(config):
    """As under autocast: rotated keys are fp32 there, values are not; and behind it all are."""
    (keys, _), (_, values) = states(30, dtype=torch.float32), states(30)
    config = KVCacheConfig.of(config)
    for layer in (QuantizedLayer(config), QuantizedStaticLayer(config, 40), QuantizedSlidingWindowLayer(config, 40)):
        filled(layer, keys[:, :, :20], values[:, :, :20], [10, 10])
        found = filled(layer, keys[:, :, 20:], values[:, :, 20:].float(), [10])
        assert [x.dtype for x in found] == [torch.float32, torch.bfloat16]
        for x, exact in zip(found, (keys, values)):
            assert x.dequantize().dtype == x.dtype
            assert sqnr(exact.float(), x.dequantize()[:, :, :30].float()) > 8


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_layer_that_was_filled_in_inference_mode(config):
    keys, values = states(BLOCK + 40)
    config = KVCacheConfig.of(config)
    outside = QuantizedLayer(config)
    filled(outside, keys, values, [20, BLOCK + 20])
    with torch.inference_mode():
        keys, values = keys.clone(), values.clone()
        layers = [QuantizedLayer(config), QuantizedStaticLayer(config, BLOCK + 40)]
        for layer in layers:
            filled(layer, keys, values, [20, BLOCK])
            layer.reorder_cache(torch.tensor([0, 1]))
    for layer in layers:
        layer.update(keys[:, :, BLOCK + 20 :], values[:, :, BLOCK + 20 :])
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(tensors(layer), tensors(outside)))
        layer.reset()
