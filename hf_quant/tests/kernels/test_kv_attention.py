"""`kv_attention`: its specification against exact attention, the CPU paths, parts of a cache, what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from hf_quant.formats import FORMATS
from hf_quant.kernels import hadamard, kv_attention
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.kernels.kv_attention import cpu
from hf_quant.kernels.kv_attention.op import (
    code_width,
    decode_heads,
    kv_attention_reference,
    merge,
    rotate,
    rotation_block,
)
from hf_quant.kernels.native import attention as native
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.test_unaligned_weights import unaligned


pytestmark = pytest.mark.usefixtures("poison_empty", "cpu_kernels")
PLAIN = {"is_causal": False, "window": 0, "scale": None, "rotates_keys": False}
CAUSAL = {"is_causal": True, "window": 0, "scale": None, "rotates_keys": False}
FORMATS_OF_CACHES = ("int8", "int4", "int2", "nf4", "fp8_e4m3")
RMS = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 2e-6}


def cache(shape, format, groups=1, *, offset=False, scale_dtype=torch.float16, seed=0):
    """Random (codes, scale, offset) of shape [B, H_kv, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    spec, (*lead, D) = FORMATS[format].spec, shape
    if spec.dtype in (torch.int32, torch.int8):
        codes = torch.empty(*lead, code_width(spec, D), dtype=spec.dtype)
        codes.random_(torch.iinfo(spec.dtype).min, torch.iinfo(spec.dtype).max + 1, generator=generator)
    else:
        codes = torch.randn(shape, generator=generator).to(spec.dtype)
    scale = (torch.rand(*lead, groups, generator=generator) + 0.5) / FORMATS[format].max
    offsets = torch.randn(*lead, groups, generator=generator).mul_(0.2).to(scale_dtype) if offset else None
    return codes, scale.to(scale_dtype), offsets


def queries(B, H, S, D, dtype=torch.float32):
    """[B, H, S, D], in memory [B, S, H, D] as the projections of a model leave them."""
    return torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(7)).to(dtype).transpose(1, 2)


def assert_matches(q, keys, values, mask, *, length=None, **options):
    y, lse = kv_attention(q, *keys, *values, mask, length, **options)
    expected, expected_lse = kv_attention_reference(q, *keys, *values, mask, length, **options)
    assert y.dtype == q.dtype and y.stride() == expected.stride()
    assert_close(y, expected, rms=RMS[q.dtype])
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert torch.allclose(lse[finite], expected_lse[finite], rtol=1e-5, atol=2e-5)
    return y, lse


@pytest.mark.parametrize("format", FORMATS_OF_CACHES)
def test_the_reference_is_attention_over_decoded_values(format):
    spec, D = FORMATS[format].spec, 64
    q, keys, values = (
        queries(2, 6, 5, D),
        cache((2, 3, 40, D), format, 2, offset=True),
        cache((2, 3, 40, D), format, 2),
    )
    k, v = decode_heads(*keys, spec, D).double(), decode_heads(*values, spec, D).double()
    y, lse = kv_attention_reference(q, *keys, *values, None, None, format=format, **PLAIN)
    expected = F.scaled_dot_product_attention(q.double(), k, v, enable_gqa=True)
    assert_close(y, expected, rms=1e-6)
    scores = q.double() @ k.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(D)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-5)
    # Positions are the last ones: the last sees everything, the one before all but the last token.
    y, _ = kv_attention_reference(q, *keys, *values, None, None, format=format, **CAUSAL)
    assert_close(y[:, :, -1], expected[:, :, -1], rms=1e-6)
    before = F.scaled_dot_product_attention(q.double()[:, :, -2:-1], k[:, :, :-1], v[:, :, :-1], enable_gqa=True)
    assert_close(y[:, :, -2:-1], before, rms=1e-6)


def test_values_of_codes():
    spec = FORMATS["int4"].spec
    codes = torch.tensor([0x76543210, -0x01234568], dtype=torch.int64).to(torch.int32).view(1, 1, 1, 2)
    scale, offset = torch.tensor([2.0]).view(1, 1, 1, 1), torch.tensor([0.5]).view(1, 1, 1, 1)
    expected = [2.0 * (code - 8) + 0.5 for code in (*range(8), *range(8, 16))]
    assert decode_heads(codes, scale, offset, spec, 16).flatten().tolist() == expected


# Heads of 80 and 96 channels, one head for all queries, a head each; up to 4 rows of queries meet a head, and more. A
# test takes every second one.
HEADS = [(4, 4, 64), (8, 2, 128), (6, 1, 80), (4, 2, 96), (2, 2, 256), (12, 2, 48)]


@pytest.mark.parametrize("heads", HEADS[::2], ids=str)
@pytest.mark.parametrize("format", FORMATS_OF_CACHES)
def test_it_matches_the_reference(format, heads):
    H, H_kv, D = heads
    for S, T, groups, offset in ((1, 1, 1, True), (1, 300, D // 16, True), (3, 70, 1, False), (37, 130, 1, True)):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[T % 3]
        q = queries(2, H, S, D, dtype)
        parts = [cache((2, H_kv, T, D), format, groups, offset=offset, seed=seed) for seed in (1, 2)]
        mask = torch.rand(2, 1, 1, T, generator=torch.Generator().manual_seed(3)) > 0.3
        assert_matches(q, *parts, None, format=format, **PLAIN)
        assert_matches(q, *parts, mask, format=format, **CAUSAL)
        bias = torch.randn(1, H, S, T, generator=torch.Generator().manual_seed(4))
        assert_matches(q, *parts, bias, format=format, is_causal=True, window=50, scale=0.3, rotates_keys=True)


@pytest.mark.parametrize("rotates_keys", [False, True])
@pytest.mark.parametrize("S", [1, 7])
def test_a_cache_that_is_not_full(S, rotates_keys):
    """Nothing behind `length` counts, and positions end there."""
    q, parts = queries(2, 4, S, 64), [cache((2, 2, 90, 64), "int4", 2, offset=True, seed=seed) for seed in (1, 2)]
    mask = torch.rand(2, 1, S, 90, generator=torch.Generator().manual_seed(3)) > 0.3
    for length in (0, 3, 40, 90, 200, -5):
        end = min(max(length, 0), 90)
        shorter = [tuple(part[:, :, :end] for part in tensors) for tensors in parts]
        for options in (PLAIN, CAUSAL, {**CAUSAL, "window": 9}):
            options = {**options, "format": "int4", "rotates_keys": rotates_keys}
            y, lse = assert_matches(q, *parts, mask, length=torch.tensor([length]), **options)
            expected = kv_attention(q, *shorter[0], *shorter[1], mask[..., :end], None, **options)
            assert torch.equal(y, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_queries_are_rotated_as_the_reference_does(dtype):
    """To the bit, the rounding to their dtype included."""
    for S, D in ((1, 64), (3, 80), (20, 128), (1, 48), (60, 16), (2, 512)):
        q, parts = queries(2, 4, S, D, dtype), [cache((2, 2, 70, D), "int4", seed=seed) for seed in (1, 2)]
        y, lse = kv_attention(q, *parts[0], *parts[1], None, None, format="int4", **{**PLAIN, "rotates_keys": True})
        rotated = torch.empty_like(q).copy_(rotate(q.float()))
        expected, expected_lse = kv_attention(rotated, *parts[0], *parts[1], None, None, format="int4", **PLAIN)
        assert torch.equal(y, expected) and torch.equal(lse, expected_lse)


def in_frame(B, H_kv, D, seed=0):
    """(k_frame, k_first): means, spreads of 1/4 to 4, and what the first key lacks."""
    generator = torch.Generator().manual_seed(seed)
    mean, spread, first = torch.randn(3, B, H_kv, D, generator=generator)
    return torch.stack([mean * 10, spread.clamp(-1.3, 1.3).exp()], 2), first


@pytest.mark.parametrize("heads", HEADS[1::2], ids=str)
@pytest.mark.parametrize("format", FORMATS_OF_CACHES)
def test_keys_in_a_frame_and_rotated_values(format, heads):
    H, H_kv, D = heads
    for S, T, groups, offset in ((1, 1, 1, True), (1, 300, D // 16, True), (3, 70, 1, False), (37, 130, 1, True)):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[T % 3]
        q = queries(2, H, S, D, dtype)
        parts = [cache((2, H_kv, T, D), format, groups, offset=offset, seed=seed) for seed in (1, 2)]
        k_frame, k_first = in_frame(2, H_kv, D)
        mask = torch.rand(2, 1, 1, T, generator=torch.Generator().manual_seed(3)) > 0.3
        for rotates, window in ((True, 0), (False, 9)):
            options = {**CAUSAL, "format": format, "window": window, "rotates_keys": rotates}
            options |= {"rotates_values": rotates, "k_frame": k_frame, "k_first": k_first}
            found = assert_matches(q, *parts, None, **options)
            starts = torch.tensor([T // 3, -1])
            assert_matches(q, *parts, mask, length=torch.tensor([T // 2]), **options, starts=starts)
            if not window:  # each of the three is needed
                for name, other in (("rotates_values", False), ("k_frame", None), ("k_first", None)):
                    changed = kv_attention(q, *parts[0], *parts[1], None, None, **{**options, name: other})
                    assert not torch.allclose(changed[0] if name[0] == "r" else changed[1], found[name[0] == "k"])


@pytest.mark.parametrize("S,starts", [(1, (0, 0)), (1, (64, 7)), (20, (0, 0)), (20, (3, 89))])
def test_the_softmax_does_not_need_the_mean(S, starts):
    """Attention over keys in a frame, rotated, is that over the keys; the log-sum-exp lacks the score of the mean."""
    q, parts = queries(2, 4, S, 64), [cache((2, 2, 90, 64), "int8", seed=seed) for seed in (1, 2)]
    k_frame, k_first = in_frame(2, 2, 64)
    codes = decode_heads(*parts[0], FORMATS["int8"].spec, 64)
    for b, start in enumerate(starts):
        codes[b, :, start] += k_first[b]
    keys = rotate(codes) * k_frame[:, :, 1:] + k_frame[:, :, :1]
    values = rotate(decode_heads(*parts[1], FORMATS["int8"].spec, 64))
    expected = F.scaled_dot_product_attention(q.double(), keys.double(), values.double(), enable_gqa=True)
    options = {**PLAIN, "rotates_keys": True, "rotates_values": True, "k_frame": k_frame, "k_first": k_first}
    options |= {"starts": torch.tensor(starts)} if any(starts) else {}
    y, lse = kv_attention(q, *parts[0], *parts[1], None, None, format="int8", **options)
    assert_close(y, expected, rms=1e-5)
    scores = q.double() @ keys.repeat_interleave(2, 1).mT.double() / 8
    mean = (q * k_frame[:, :, :1].repeat_interleave(2, 1)).sum(-1) / 8
    assert torch.allclose((lse + mean).double(), scores.logsumexp(-1), atol=1e-4)


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("S", [1, 20])
def test_capped_scores(S, framed, monkeypatch):
    """Scores are capped of keys as they are, the mean of a frame included; masks, windows and the end come after."""
    monkeypatch.setattr(cpu, "_BLOCK", 2**13)
    for format, D, T, dtype in (("int8", 64, 300, torch.float32), ("int4", 128, 90, torch.bfloat16)):
        q, parts = queries(2, 4, S, D, dtype), [cache((2, 2, T, D), format, seed=seed) for seed in (1, 2)]
        frame, first = in_frame(2, 2, D)
        options = {**CAUSAL, "format": format, "softcap": 4.0, "rotates_keys": True, "rotates_values": True}
        if framed:
            frame[:, :, 0] *= 0.1
            options |= {"k_frame": frame, "k_first": first}
        bias = torch.randn(1, 4, S, T, generator=torch.Generator().manual_seed(4))
        assert_matches(q, *parts, bias, length=torch.tensor(T - 9), **{**options, "window": 50})
        y, _ = assert_matches(q, *parts, bias, **{**options, "is_causal": False})
        keys = decode_heads(*parts[0], FORMATS[format].spec, D)
        keys[:, :, 0] += first if framed else 0
        keys = rotate(keys) * frame[:, :, 1:] + frame[:, :, :1] if framed else rotate(keys)
        values = rotate(decode_heads(*parts[1], FORMATS[format].spec, D)).repeat_interleave(2, 1).double()
        scores = q.double() @ keys.double().repeat_interleave(2, 1).mT / math.sqrt(D)
        expected = ((scores / 4).tanh() * 4 + bias).softmax(-1) @ values
        assert_close(y, expected, rms=1e-5 if dtype == torch.float32 else 4e-3)
        with pytest.raises(AssertionError):
            assert_close(y, (scores + bias).softmax(-1) @ values, rms=2e-2)


def test_rotating_keys_and_queries_leaves_the_scores():
    q, k = queries(1, 2, 3, 80), queries(1, 2, 9, 80)
    assert torch.allclose(rotate(q) @ rotate(k).mT, q @ k.mT, atol=1e-4)
    assert torch.allclose(rotate(rotate(k)), k, atol=1e-5) and rotation_block(80) == 16
    assert torch.allclose(rotate(k), hadamard(k, block_size=16), atol=1e-5)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_long_contexts_are_split_and_merged(format, monkeypatch):
    monkeypatch.setattr(cpu, "_BLOCK", 2**17)
    q = queries(1, 4, 2, 64)
    parts = [cache((1, 2, 2500, 64), format, offset=True, scale_dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
    y, lse = assert_matches(q, *parts, None, format=format, **CAUSAL)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            again = kv_attention(q, *parts[0], *parts[1], None, None, format=format, **CAUSAL)
            assert torch.equal(y, again[0]) and torch.equal(lse, again[1])
    finally:
        torch.set_num_threads(threads)
    first, second = ([[p if p is None else p[:, :, s] for p in part] for part in parts] for s in _halves(1100))
    before = kv_attention(q, *first[0], *first[1], None, None, format=format, **PLAIN)
    after = kv_attention(q, *second[0], *second[1], None, None, format=format, **CAUSAL)
    merged, merged_lse = merge(*before, *after)
    assert_close(merged, y, rms=2e-6)
    assert torch.allclose(merged_lse, lse, atol=1e-5)


def _halves(at):
    return slice(0, at), slice(at, None)


def test_caches_that_grow_in_place():
    """Slices of larger buffers, scale and offset side by side, addresses that are no multiple of anything."""
    q = queries(2, 4, 1, 64)
    for format in ("int4", "int8"):
        whole = [cache((2, 2, 200, 64), format, 2, offset=True, seed=seed) for seed in (1, 2)]
        plain = [tuple(part[:, :, 30:120].contiguous() for part in parts) for parts in whole]
        views = []
        for codes, scale, offset in whole:
            pairs = torch.stack([scale, offset], -1)
            views.append((codes[:, :, 30:120], pairs[:, :, 30:120, :, 0], pairs[:, :, 30:120, :, 1]))
        expected = kv_attention(q, *plain[0], *plain[1], None, None, format=format, **CAUSAL)[0]
        assert torch.equal(kv_attention(q, *views[0], *views[1], None, None, format=format, **CAUSAL)[0], expected)
        odd = [[part if part is None else unaligned(part) for part in parts] for parts in plain]
        assert torch.equal(kv_attention(q, *odd[0], *odd[1], None, None, format=format, **CAUSAL)[0], expected)


def test_memory_of_queries():
    """Transposed, and overlapping: the result has the strides that the reference, and tracing, promise."""
    parts = [cache((1, 2, 9, 64), "int8", seed=seed) for seed in (1, 2)]
    sliding = torch.randn(1, 2, 80).unfold(-1, 64, 1)[:, :, :10]
    for q in (torch.randn(1, 2, 64, 8).transpose(2, 3), sliding, torch.randn(1, 1, 3, 64).expand(1, 2, 3, 64)):
        assert_matches(q, *parts, None, format="int8", **PLAIN)


def test_the_tolerances_would_notice():
    q, parts = queries(1, 2, 3, 64), [cache((1, 2, 40, 64), "int4", seed=seed) for seed in (1, 2)]
    expected = kv_attention_reference(q, *parts[0], *parts[1], None, None, format="int4", **PLAIN)[0]
    fewer = [[part if part is None else part[:, :, :-1] for part in tensors] for tensors in parts]
    y = kv_attention(q, *fewer[0], *fewer[1], None, None, format="int4", **PLAIN)[0]
    with pytest.raises(AssertionError):
        assert_close(y, expected, rms=RMS[torch.bfloat16])


def test_positions_that_see_nothing():
    q, parts = queries(2, 2, 3, 64), [cache((2, 2, 65, 64), "int4", seed=seed) for seed in (1, 2)]
    mask = torch.ones(2, 1, 1, 65, dtype=torch.bool)
    mask[0] = False
    mask[1, ..., :40] = False  # padded on the left
    y, lse = assert_matches(q, *parts, mask, format="int4", **PLAIN)
    assert (y[0] == 0).all() and lse[0].isneginf().all() and lse[1].isfinite().all()
    empty = [tuple(part if part is None else part[:, :, :0] for part in parts[0])] * 2
    y, lse = kv_attention(q, *empty[0], *empty[1], None, None, format="int4", **PLAIN)
    assert (y == 0).all() and lse.isneginf().all()
    many = queries(2, 2, 64, 64)  # more rows than meet a panel at once
    y, lse = kv_attention(many, *empty[0], *empty[1], None, None, format="int4", **PLAIN)
    assert (y == 0).all() and lse.isneginf().all()
    none = queries(0, 2, 1, 64), [cache((0, 2, 5, 64), "int4")] * 2
    assert kv_attention(none[0], *none[1][0], *none[1][1], None, None, format="int4", **PLAIN)[0].shape == (
        0,
        2,
        1,
        64,
    )


def test_what_is_not_finite_stays_where_it_is():
    q, (keys, values) = queries(1, 2, 2, 64), [cache((1, 2, 90, 64), "int8", seed=seed) for seed in (1, 2)]
    expected = kv_attention(q, *keys, *values, None, None, format="int8", **PLAIN)[0]
    keys[1][0, 0, 70] = float("nan")
    y, _ = kv_attention(q, *keys, *values, None, None, format="int8", **PLAIN)
    assert y[0, 0].isnan().all() and torch.equal(y[0, 1], expected[0, 1])
    only = torch.zeros(1, 1, 1, 90, dtype=torch.bool)
    only[..., 70] = True  # the rest is not seen
    y, lse = kv_attention(q, *keys, *values, only, None, format="int8", **PLAIN)
    assert y[0, 0].isnan().all() and lse[0, 0].isnan().all() and y[0, 1].isfinite().all()
    large = kv_attention(q * 1e4, *cache((1, 2, 90, 64), "int8", seed=1), *values, None, None, format="int8", **PLAIN)[
        0
    ]
    assert large.isfinite().all()


def test_opcheck():
    q, parts = queries(1, 4, 3, 64), [cache((1, 2, 20, 64), "int4", 2, offset=True, seed=seed) for seed in (1, 2)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    k_frame, k_first = in_frame(1, 2, 64)
    for more in ({}, {"rotates_values": True, "k_frame": k_frame, "k_first": k_first, "softcap": 9.0}):
        arguments = (q, *parts[0], *parts[1], None, torch.tensor([13]))
        opcheck(kv_attention, arguments, {"format": "int4", **CAUSAL, **more}, test_utils=tests)


def test_the_plan_can_explain_it(cpu_kernels):
    rows = explain(kv_attention, "cpu", Problem("int4", 64, 1, 128, torch.bfloat16))
    assert (rows[0][2] is None) == (cpu_kernels != "torch") and rows[1][2] is None
    reason = native.attention_unsupported_reason(torch.float32, 64, 8, torch.float16)
    assert "multiple of 16" in reason or cpu_kernels == "torch"


def test_wrong_arguments_are_refused():
    q, keys, values = queries(1, 4, 2, 64), cache((1, 2, 9, 64), "int4", 2), cache((1, 2, 9, 64), "int4", 2, seed=1)
    good = [q, *keys, *values, None, None]
    for at, bad, message in (
        (0, q[0], r"q is \(4, 2, 64\)"),
        (0, q.int(), "int32"),
        (0, q[..., :0], "D above 0"),
        (0, queries(1, 3, 2, 64), "divides H=3"),
        (1, keys[0][..., :4], "k_codes is"),
        (1, keys[0].view(torch.float32), "k_codes is"),
        (2, keys[1][..., :1], "v_scale is"),
        (2, keys[1].repeat(1, 1, 1, 24)[..., :48], "that divide D=64"),
        (4, values[0][:, :, 1:], "v_codes is"),
        (5, values[1].float(), "dtype of k_scale"),
        (6, values[1].float(), "v_offset is"),
        (7, torch.zeros(1, 1, 2, 8), "mask is"),
        (7, torch.zeros(1, 1, 2, 9, dtype=torch.int32), "int32"),
        (8, torch.tensor([5], dtype=torch.int32), "length is"),
        (8, torch.tensor([5, 5]), "length is"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_attention(*good[:at], bad, *good[at + 1 :], format="int4", **PLAIN)
    for options, message in (
        ({"format": "int5"}, "int5"),
        ({"format": "fp6_e3m2"}, "fp6_e3m2"),
        ({"window": 4}, "window is 4"),
        ({"window": -1, "is_causal": True}, "window is -1"),
        ({"scale": 0.0}, "scale is 0"),
        ({"softcap": 0.0}, "softcap is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_attention(*good, **{"format": "int4", **PLAIN, **options})
    for name, bad in (("k_frame", torch.ones(1, 2, 3, 64)), ("k_frame", torch.ones(1, 2, 2, 64).half())):
        with pytest.raises(ValueError, match=f"{name} is"):
            kv_attention(*good, format="int4", **PLAIN, **{name: bad})
    with pytest.raises(ValueError, match="k_first is"):
        kv_attention(*good, format="int4", **PLAIN, k_first=torch.ones(1, 4, 64))
    with pytest.raises(ValueError, match="starts is"):
        kv_attention(*good, format="int4", **PLAIN, starts=torch.ones(2))
    with pytest.raises(ValueError, match="words of 32 bits"):
        kv_attention(q[..., :20], *good[1:], format="int4", **PLAIN)
