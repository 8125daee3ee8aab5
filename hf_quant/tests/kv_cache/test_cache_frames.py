"""The frame of a head's keys: what sets it, what it leaves exact, what it gains, where it goes."""

import pytest
import torch

from hf_quant import KVCacheConfig
from hf_quant.kernels import native
from hf_quant.kv_cache import _layers, attend, next_tokens
from hf_quant.kv_cache._frames import frame_of
from hf_quant.kv_cache._layers import QuantizedLayer, QuantizedSlidingWindowLayer
from hf_quant.kv_cache._static import QuantizedStaticLayer
from hf_quant.testing import assert_close, sqnr


pytestmark = pytest.mark.usefixtures("poison_empty")
B, H, D = 2, 3, 64
WINDOWS = {"format": "int4", "sink_tokens": 2, "recent_tokens": 9}
CONFIGS = ["int8", "int4", "int2", WINDOWS]


def states(S, seed=0):
    """Keys as real models have them, with a mean, channels of other sizes and a first token of its own; values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, B, H, S, D, generator=generator)
    of_channels = torch.Generator().manual_seed(9)
    keys = keys * torch.rand(H, 1, D, generator=of_channels).mul(3).exp()
    keys = keys + 20 * torch.randn(H, 1, D, generator=of_channels)
    keys[:, :, 0] *= -3
    return keys, values


def layers(config):
    """A layer of each kind, with room for 60 tokens."""
    config = KVCacheConfig.of(config)
    return [QuantizedLayer(config), QuantizedStaticLayer(config, 60), QuantizedSlidingWindowLayer(config, 60)]


def fill(layer, keys, values, *sizes):
    for parts in zip(keys.split(sizes, 2), values.split(sizes, 2)):
        found = layer.update(*parts)
    return found


def error(layer, keys):
    """Of the keys that a layer returns, in relation to what of them differs between tokens."""
    found, moving = layer.keys.dequantize()[:, :, : keys.shape[2]], keys - keys[:, :, 1:].mean(2, keepdim=True)
    return ((found - keys)[:, :, 1:].square().sum() / moving[:, :, 1:].square().sum()).item()


def test_a_frame_is_the_mean_and_the_spread_of_all_tokens_but_the_first():
    keys, _ = states(50)
    mean, spread = frame_of(keys.bfloat16()).unbind(2)
    rest = keys.bfloat16().float()[:, :, 1:]
    assert torch.allclose(mean, rest.mean(2), atol=1e-4)
    deviation = rest.std(2, correction=0)
    relative = (deviation / deviation.square().mean(-1, keepdim=True).sqrt()).sqrt()
    assert torch.allclose(spread, relative, rtol=0.3) and not torch.allclose(spread, torch.ones(()), rtol=0.3)
    # A single token says nothing, nor does one that is repeated; few say less than many.
    assert torch.equal(frame_of(keys[:, :, :1])[:, :, 0], torch.zeros(B, H, D))
    assert torch.equal(frame_of(keys[:, :, :1])[:, :, 1], torch.ones(B, H, D))
    assert torch.equal(frame_of(keys[:, :, 3:4].expand(-1, -1, 9, -1))[:, :, 1], torch.ones(B, H, D))
    assert frame_of(keys[:, :, :3])[:, :, 1].log().abs().max() < spread.log().abs().max()
    assert frame_of(keys[:, :, :3])[:, :, 1].min() > 0.7


def test_what_is_not_finite_spoils_no_frame():
    keys, values = states(12)
    keys[0, 1, 4, 7] = float("inf")
    frame = frame_of(keys)
    assert frame.isfinite().all() and (frame[0, 1, 0] == 0).all() and (frame[0, 1, 1] == 1).all()
    assert torch.equal(frame[1], frame_of(keys[1:])[0])
    found = fill(QuantizedLayer(KVCacheConfig("int4")), keys, values, 10, 2)[0].dequantize()
    assert found.isfinite().all(-1).logical_not().nonzero().tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_first_states_set_it_and_later_ones_gain_by_it(config):
    """A second prompt, single tokens and several at once have the same frame; without a prompt there is none."""
    keys, values = states(50)
    for layer in layers(config):
        fill(layer, keys, values, 20, 1, 25, 4)
        assert_close(layer.k_frame, frame_of(keys[:, :, :20]), rms=1e-5)
        with_frame = error(layer, keys)
        layer.reset()
        fill(layer, keys, values, 1, 49)
        assert torch.equal(layer.k_frame, frame_of(keys[:, :, :1]))
        assert with_frame < 0.3 * error(layer, keys)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_first_key_is_exact(config):
    keys, values = states(50)
    for layer in layers(config):
        fill(layer, keys, values, 20, 30)
        found = layer.keys.dequantize()
        has_sinks = layer.config.sink_tokens > 0
        assert torch.allclose(found[:, :, 0], keys[:, :, 0], rtol=0, atol=0 if has_sinks else 1e-4)
        assert not torch.allclose(found[:, :, 8], keys[:, :, 8], rtol=0, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("S", [1, 4, 9])
def test_attention_is_that_over_the_keys_with_their_mean(config, S):
    """The mean, the spread and the 16-bit tokens agree in every part; not so if one of them had no mean."""
    keys, values = states(50)
    q = torch.randn(B, 2 * H, S, D, generator=torch.Generator().manual_seed(3)) / 8
    for layer in layers(config):
        found = fill(layer, keys, values, 50 - S, S)
        k, v = (x.dequantize()[:, :, :50].repeat_interleave(2, 1) for x in found)
        mask = torch.ones(S, 50, dtype=torch.bool).tril(50 - S)
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
        y, _ = attend(q, *found, None, is_causal=True, window=0, scale=None)
        assert_close(y, expected, rms=2e-5)


def test_it_goes_where_the_codes_go():
    """Beams, batches, copies on another device; and a layer that is emptied and filled again has a new one."""
    keys, values = states(30)
    for config in CONFIGS:
        for layer in layers(config):
            fill(layer, keys, values, 20, 10)
            before = layer.keys.dequantize()[:, :, :30]
            layer.reorder_cache(torch.tensor([1, 0]))
            assert torch.equal(layer.keys.dequantize()[:, :, :30], before[[1, 0]])
            layer.batch_repeat_interleave(2)
            layer.batch_select_indices(torch.tensor([3, 0]))
            assert torch.equal(layer.keys.dequantize()[:, :, :30], before)
            layer.offload()
            layer.prefetch()
            assert torch.equal(layer.keys.dequantize()[:, :, :30], before)
    other, _ = states(12, seed=5)
    layer.crop(-30)
    assert layer.get_seq_length() == 0
    layer.update(other, other)
    assert_close(layer.k_frame, frame_of(other), rms=1e-5)


@pytest.mark.parametrize("instructions", native.instruction_sets() or [None])
@pytest.mark.parametrize("format", ["int8", "int4", "int2", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_native_call_begins_a_cache_as_the_parts_do(instructions, format, dtype, monkeypatch):
    """The frame to a few roundings; of the same frame all else follows to the bit."""
    if instructions is None:
        pytest.skip("the extension is not built")
    for S in (1, 2, 60):
        keys, values = (x.to(dtype) for x in states(S))
        own, parts, other = (QuantizedLayer(KVCacheConfig(format)) for _ in range(3))
        with native.using(instructions):
            own.update(keys, values)
            monkeypatch.setattr(_layers, "begun", lambda *args, **options: False)
            parts.update(keys, values)
            monkeypatch.setattr(_layers, "frame_of", lambda *args, frame=own.k_frame: frame)
            other.update(keys, values)
        monkeypatch.undo()
        assert_close(own.k_frame, parts.k_frame, rms=1e-4)
        for name in ("k_codes", "v_codes", "k_pairs", "v_pairs"):
            assert torch.equal(getattr(own, name)[:, :, :S], getattr(other, name)[:, :, :S]), (name, S)
        assert (own.k_first is None) == (other.k_first is None)
        assert own.k_first is None or torch.equal(own.k_first, other.k_first), S


def test_tokens_that_are_taken_back_leave_it():
    """As in assisted generation: what replaces them is as if they had never been."""
    keys, values = states(40)
    layer, other = (QuantizedLayer(KVCacheConfig("int4")) for _ in range(2))
    fill(layer, *(x[:, :, :30] for x in (keys, values)), 20, 10)
    layer.crop(-7)
    layer.update(keys[:, :, 23:], values[:, :, 23:])
    fill(other, keys, values, 20, 20)
    assert torch.equal(layer.keys.dequantize(), other.keys.dequantize())


def test_a_window_that_the_first_token_has_left():
    keys, values = states(60)
    layer = QuantizedSlidingWindowLayer(KVCacheConfig("int4"), 16)
    for start in range(0, 60, 6):
        found = layer.update(keys[:, :, start : start + 6], values[:, :, start : start + 6])
        assert start in (0, 6, 12) or found[0].first is None
        assert start != 12 or found[0].first is not None
    assert found[0].first is None and found[0].shape[2] == 21
    assert sqnr(keys[:, :, 39:], found[0].dequantize()) > 15


def padded(x, pads):
    """States behind padding: garbage that is larger than they are."""
    return torch.cat([1e3 * torch.randn(*x.shape[:2], pads, D, generator=torch.Generator().manual_seed(7)), x], 2)


@pytest.mark.parametrize("native_begins", [True, False])
@pytest.mark.parametrize("config", [*CONFIGS, {"format": "int2", "sink_tokens": 4, "recent_tokens": 0}], ids=str)
@pytest.mark.parametrize("S", [1, 4, 12])
def test_padding_leaves_no_trace(config, S, native_begins, monkeypatch):
    """A sequence is stored, and attended to, behind padding as it is alone."""
    if not native_begins:
        monkeypatch.setattr(_layers, "begun", lambda *args, **options: False)
    keys, values = states(40)
    q = torch.randn(B, 2 * H, S, D, generator=torch.Generator().manual_seed(3)) / 8
    options = {"is_causal": S > 1, "window": 0, "scale": None}
    for layer, alone in zip(layers(config), layers(config)):
        for pads in (1, 9, 0):  # in the memory of the former
            fill(alone, keys, values, 26, 14 - S, S)
            layer.note_starts((0, pads) if pads else None)
            new = [torch.cat([torch.cat([x[:1], x[:1, :, :pads]], 2), padded(x[1:], pads)]) for x in (keys, values)]
            found = fill(layer, *new, 26 + pads, 14 - S, S)
            expected = alone._states()
            for x, y in zip(found, expected):
                assert torch.equal(x.dequantize()[1, :, pads : pads + 40], y.dequantize()[1, :, :40])
            mask = torch.ones(B, 1, 1, found[0].shape[2], dtype=torch.bool)
            mask[1, ..., :pads] = False
            y, lse = attend(q, *found, mask, **options)
            y_alone, lse_alone = attend(q, *expected, None, **options)
            assert_close(y[1], y_alone[1], rms=1e-5)
            assert_close(lse[1], lse_alone[1], rms=1e-5)
            layer.reset()
            alone.reset()


def test_a_window_that_the_first_token_behind_padding_has_not_left():
    keys, values = states(60)
    layer = QuantizedSlidingWindowLayer(KVCacheConfig("int4"), 16)
    layer.note_starts((0, 9))
    q, exact = torch.randn(B, H, 1, D, generator=torch.Generator().manual_seed(3)) / 8, []
    for start, end in ((0, 12), (12, 20), *((i, i + 1) for i in range(20, 30))):
        found = layer.update(keys[:, :, start:end], values[:, :, start:end])
        if start:
            before = end - found[0].shape[2]  # tokens that are gone
            k, v = (x.dequantize() for x in found)
            is_exact = torch.isclose(k, keys[:, :, before:end], rtol=0, atol=1e-4).all(-1).all(1)
            exact.append([(before + row.nonzero().squeeze(1)).tolist() for row in is_exact])
            expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
            assert_close(attend(q, *found, None, is_causal=False, window=0, scale=None)[0], expected, rms=2e-5)
    # A single token and the 15 before it: the one with index 24 is the last that sees the tenth.
    assert exact == [[[0], [9]], *[[[], [9]]] * 5, *[[[], []]] * 5]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_tokens_behind_padding_than_are_kept_in_16_bit(count):
    keys, values = states(count + 3)
    for layer in layers({"format": "int2", "sink_tokens": 4, "recent_tokens": 2})[:2]:
        layer.note_starts((0, 3))
        fill(layer, keys, values, 4, *[1] * (count - 1))
        for x, exact in zip((layer.keys, layer.values), (keys, values)):
            assert torch.equal(x.dequantize()[1, :, 3 : min(count, 4) + 3], exact[1, :, 3:7])
            assert torch.equal(x.dequantize()[0, :, :4], exact[0, :, :4])


def test_padding_is_forgotten_with_the_tokens():
    keys, values = states(20)
    for cut in (lambda layer: layer.crop(-20), lambda layer: layer.reset()):
        layer, other = (QuantizedLayer(KVCacheConfig("int4")) for _ in range(2))
        layer.note_starts((0, 7))
        layer.update(keys, values)
        assert layer.starts.tolist() == [0, 7]
        cut(layer)
        layer.update(keys, values)
        other.update(keys, values)
        assert torch.equal(layer.keys.dequantize(), other.keys.dequantize()) and layer.starts is None
    # Native blocks, which know addresses, ask before the padding is known, and again behind it.
    layer.reset()
    before = next_tokens(layer, B, 20, H, D, torch.float32)
    layer.note_starts((0, 7))
    after = next_tokens(layer, B, 20, H, D, torch.float32)
    assert before is None or after.cache is not before.cache
    layer.update(keys, values)
    assert layer.starts.tolist() == [0, 7]
    # What does not fit the first states is no padding of theirs.
    for starts in ((0, 20), (0,)):
        layer.reset()
        layer.note_starts(starts)
        layer.update(keys, values)
        assert torch.equal(layer.keys.dequantize(), other.keys.dequantize())
