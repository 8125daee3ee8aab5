"""`kv_append`: what it writes into a cache, where, and how near that is to keys and values."""

import pytest
import torch
from torch.library import opcheck

from hf_quant.formats import FORMATS
from hf_quant.kernels import kv_append
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.kernels.kv_attention.op import (
    CACHE_FORMATS,
    code_width,
    decode_heads,
    kv_append_reference,
    rotate,
)
from hf_quant.testing import sqnr
from hf_quant.tests.kernels.test_unaligned_weights import unaligned


pytestmark = pytest.mark.usefixtures("poison_empty", "cpu_kernels")
# Shapes of heads: keys, values; of usual sizes, no powers of two, of different sizes.
HEADS = [(64, 64), (128, 128), (80, 80), (96, 96), (256, 256), (192, 128), (48, 16)]
MIN_SQNR = {"int8": 40.0, "fp8_e4m3": 30.0, "int4": 19.0, "int2": 8.0}  # dB, normal values, groups of up to 64


def states(B, H, S, D, dtype=torch.float32, seed=0):
    """[B, H, S, D], in memory [B, S, H, D] as the projections of a model leave them."""
    return torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(seed)).to(dtype).transpose(1, 2)


def new_cache(B, H, C, D, format, groups=1, dtype=torch.bfloat16):
    """(codes, scale, offset) full of what nobody wrote; scale and offset side by side."""
    spec = FORMATS[format].spec
    codes = torch.full((B, H, C, code_width(spec, D)), 7, dtype=torch.int32).to(spec.dtype)
    pairs = torch.full((B, H, C, groups, 2), 3.0, dtype=dtype)
    return codes, pairs[..., 0], pairs[..., 1] if spec.is_packed else None


def frame(B, H, D, seed=0):
    """A frame fp32 [B, H, 2, D]: means of any sign and size, spreads of 1/4 to 4."""
    generator = torch.Generator().manual_seed(seed)
    mean, spread = torch.randn(2, B, H, D, generator=generator)
    return torch.stack([mean * 10, spread.clamp(-1.3, 1.3).exp()], 2)


def assert_same_bits(k, v, start, caches, *, format, **options):
    """What the op and the reference write into two copies of (keys, values): the same bits, of NaN any."""
    for op, (keys, values) in zip((kv_append, kv_append_reference), caches):
        op(k, v, start, *keys, *values, format=format, **options)
    for found, expected in zip((*caches[0][0], *caches[0][1]), (*caches[1][0], *caches[1][1])):
        if found is not None:
            torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def decoded(parts, format, D, rotated=False):
    values = decode_heads(*parts, FORMATS[format].spec, D)
    return rotate(values) if rotated else values


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_what_is_written_is_near_and_as_the_reference_says(format, heads):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rotates in (False, True):
            groups = [max(D // 64, 1) for D in heads]
            k, v = (states(2, 3, 5, D, dtype, seed) for seed, D in enumerate(heads))
            caches = [[new_cache(2, 3, 9, D, format, g) for D, g in zip(heads, groups)] for _ in range(2)]
            for op, (keys, values) in zip((kv_append, kv_append_reference), caches):
                op(k, v, torch.tensor([3]), *keys, *values, format=format, rotates_keys=rotates)
            for x, D, parts, expected in zip((k, v), heads, *caches):
                assert all(a is b is None or torch.equal(a.float(), b.float()) for a, b in zip(parts, expected))
                found = decoded(parts, format, D, rotates and x is k)
                assert sqnr(x.float(), found[:, :, 3:8]) > MIN_SQNR[format]
                assert (parts[0][:, :, :3].float() == 7).all() and (parts[0][:, :, 8:].float() == 7).all()
                assert (parts[1][:, :, :3] == 3).all() and (parts[1][:, :, 8:] == 3).all()


@pytest.mark.parametrize("size", [1, 3, 7, 16, 24, 32, 48, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_the_bits_are_those_of_the_reference(format, size):
    """Groups of any size, every dtype, values of any magnitude: what is fused or summed up otherwise would show."""
    D, unit = size, 32 // FORMATS[format].spec.bits if FORMATS[format].spec.is_packed else 1
    while D % unit or D < 48:
        D *= 2
    scales = (torch.float32, torch.bfloat16, torch.float16)
    for i, magnitude in enumerate((1.0, 1e-3, 3e4, 1e-7, 1e-38, 1e30, 2e38)):
        dtype, scale_dtype = scales[i % 3], scales[(i + i // 3) % 3]
        k, v = (states(1, 2, 9, D, seed=10 * i + seed).mul(magnitude) for seed in (1, 2))
        k[..., : D // 2].round_(decimals=1)  # ties
        k, v = k.to(dtype), (v + magnitude).to(dtype)
        caches = [[new_cache(1, 2, 9, D, format, D // size, scale_dtype) for _ in "kv"] for _ in "ab"]
        assert_same_bits(k, v, None, caches, format=format, rotates_keys=i % 2 == 1)


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_memory_of_keys_and_caches(format):
    """Transposed, overlapping, off their alignment; caches whose every dimension has a stride."""
    room = torch.randn(1, 2, 2 * 80, generator=torch.Generator().manual_seed(5))
    wide = states(2, 3, 7, 2 * 64, torch.bfloat16)
    inputs = (wide[..., ::2], wide.mT.contiguous().mT[..., 64:], unaligned(wide)[..., 3:67], room.unfold(-1, 64, 1))
    for x in (*inputs, states(2, 1, 7, 64, torch.float16).expand(2, 3, 7, 64)):
        B, H, S, D = x.shape
        for layout in range(3):
            caches = []
            for _ in "ab":
                parts = [new_cache(B, H, S + 5, D, format, 2, torch.float16) for _ in "kv"]
                if layout == 0:
                    parts = [[part if part is None else unaligned(part.contiguous()) for part in p] for p in parts]
                elif layout == 1:
                    parts = [[part if part is None else part.mT.contiguous().mT for part in p] for p in parts]
                else:  # every other token, head and element of a larger one
                    parts = [[part if part is None else spaced(part) for part in p] for p in parts]
                caches.append(parts)
            assert_same_bits(x, x.flip(0), torch.tensor([4]), caches, format=format, rotates_keys=True)


def spaced(part):
    room = part.repeat_interleave(2, 3).repeat_interleave(2, 2).repeat_interleave(2, 1)
    return room[:, 1::2, ::2, 1::2]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_keys_in_a_frame_and_rotated_values(format, heads):
    """To the bit; and what is read back through the frame is near, which keys with a mean are not without it."""
    in_frame = frame(2, 3, heads[0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        groups = [max(D // 64, 1) for D in heads]
        k, v = (states(2, 3, 5, D, torch.float32, seed) for seed, D in enumerate(heads))
        k = (k * in_frame[:, :, 1:] + in_frame[:, :, :1]).to(dtype)
        caches = [[new_cache(2, 3, 9, D, format, g) for D, g in zip(heads, groups)] for _ in "ab"]
        options = {"format": format, "rotates_keys": True, "rotates_values": True}
        assert_same_bits(k, v.to(dtype), torch.tensor([3]), caches, **options, k_frame=in_frame)
        (keys, values), plain = caches[0], [new_cache(2, 3, 9, D, format, g) for D, g in zip(heads, groups)]
        assert sqnr(v, decoded(values, format, heads[1], True)[:, :, 3:8]) > MIN_SQNR[format]
        moving = k.float() - in_frame[:, :, :1]
        found = decoded(keys, format, heads[0], True)[:, :, 3:8] * in_frame[:, :, 1:]
        assert sqnr(moving, found) > MIN_SQNR[format] - 2
        kv_append(k, v.to(dtype), torch.tensor([3]), *plain[0], *plain[1], **options)
        without = decoded(plain[0], format, heads[0], True)[:, :, 3:8] - in_frame[:, :, :1]
        assert sqnr(moving, without) < sqnr(moving, found) - 6


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_many_tokens_and_threads(format):
    k, v = states(2, 3, 301, 96, torch.bfloat16), states(2, 3, 301, 128, torch.bfloat16, 1)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            caches = [[new_cache(2, 3, 310, D, format, 2) for D in (96, 128)] for _ in "ab"]
            assert_same_bits(k, v, torch.tensor([8]), caches, format=format, rotates_keys=True)
    finally:
        torch.set_num_threads(threads)


def test_what_is_computed_where(cpu_kernels):
    taken = explain(kv_append, "cpu", Problem("int4", 64, 1, 128, torch.bfloat16))
    assert (taken[0][2] is None) == (cpu_kernels != "torch")
    refused = explain(kv_append, "cpu", Problem("int4", 64, 1, 1024, torch.bfloat16))
    assert refused[0][2] is not None and refused[-1] == ("reference", "any M", None)
    # Heads, input and scales that the native kernels do not know.
    for dtype, D, scale_dtype in ((torch.bfloat16, 1024, torch.bfloat16), (torch.float64, 64, torch.float64)):
        k = states(1, 2, 3, D, dtype)
        caches = [[new_cache(1, 2, 4, D, "int4", 2, scale_dtype) for _ in "kv"] for _ in "ab"]
        assert_same_bits(k, k, None, caches, format="int4", rotates_keys=True)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_the_codes_of_a_token_depend_on_the_token_alone(format, rotates):
    """All at once, one by one, in parts, in another batch: the same bytes."""
    k, v = states(2, 3, 70, 80, torch.bfloat16), states(2, 3, 70, 80, torch.bfloat16, 1)
    whole = [new_cache(2, 3, 70, 80, format, 5) for _ in range(2)]
    kv_append(k, v, None, *whole[0], *whole[1], format=format, rotates_keys=rotates)
    parts = [new_cache(2, 3, 70, 80, format, 5) for _ in range(2)]
    for start, end in ((0, 33), (33, 34), (34, 35), (35, 70)):
        new = (k[:, :, start:end], v[:, :, start:end], torch.tensor([start]))
        kv_append(*new, *parts[0], *parts[1], format=format, rotates_keys=rotates)
    alone = [new_cache(1, 3, 70, 80, format, 5) for _ in range(2)]
    kv_append(k[1:].contiguous(), v[1:].contiguous(), None, *alone[0], *alone[1], format=format, rotates_keys=rotates)
    for a, b, c in zip((*whole[0], *whole[1]), (*parts[0], *parts[1]), (*alone[0], *alone[1])):
        assert a is b is None or (torch.equal(a.float(), b.float()) and torch.equal(a[1:].float(), c.float()))


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_zeros_constants_and_what_is_not_finite(format):
    x = torch.zeros(1, 1, 4, 64)
    x[0, 0, 1] = 0.7265625  # in bf16
    x[0, 0, 2] = torch.linspace(-1, 1, 64)
    x[0, 0, 3] = x[0, 0, 2]
    x[0, 0, 2, 5], x[0, 0, 3, 40] = float("nan"), float("inf")
    for y in (x, x * -3e38):
        caches = [[new_cache(1, 1, 4, 64, format, 2) for _ in "kv"] for _ in "ab"]
        assert_same_bits(y, y, None, caches, format=format, rotates_keys=False)
    parts = [new_cache(1, 1, 4, 64, format, 2) for _ in range(2)]
    kv_append(x, x, None, *parts[0], *parts[1], format=format, rotates_keys=False)
    found = decoded(parts[1], format, 64)[0, 0]
    assert (found[0] == 0).all() and torch.allclose(found[1], x[0, 0, 1], rtol=4e-3)
    assert not found[2, :32].isfinite().any() and found[2, 32:].isfinite().all()
    assert not found[3, 32:].isfinite().any() or format in ("int8", "fp8_e4m3")
    assert not found[3, 40].isfinite() and found[3, :32].isfinite().all()


def test_int2_spends_its_levels_on_the_middle():
    """Of the squared error that the range of the values alone gives, a third is gone."""
    x = states(1, 4, 500, 64)
    parts = [new_cache(1, 4, 500, 64, "int2", 2) for _ in range(2)]
    kv_append(x, x, None, *parts[0], *parts[1], format="int2", rotates_keys=False)
    groups = x.unflatten(-1, (2, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 3
    naive = (((groups - low) / step).round() * step + low).flatten(-2)
    error = (decoded(parts[1], "int2", 64) - x).square().sum()
    assert error < 0.67 * (naive - x).square().sum()


def test_positions_and_empty_inputs():
    k = states(1, 2, 3, 64)
    parts = [new_cache(1, 2, 4, 64, "int4") for _ in range(2)]
    before = parts[0][0].clone()
    kv_append(k[:, :, :0], k[:, :, :0], None, *parts[0], *parts[1], format="int4", rotates_keys=True)
    kv_append(k, k, torch.tensor([4]), *parts[0], *parts[1], format="int4", rotates_keys=True)  # behind the end
    assert torch.equal(parts[0][0], before)
    kv_append(k, k, torch.tensor([2]), *parts[0], *parts[1], format="int4", rotates_keys=True)  # the last one is lost
    assert torch.equal(parts[0][0][:, :, :2], before[:, :, :2]) and (parts[0][0][:, :, 2:] != 7).any()
    for start in (-1, -3, 3, 2**62, -(2**62)):
        caches = [[new_cache(1, 2, 4, 64, "int4") for _ in "kv"] for _ in "ab"]
        assert_same_bits(k, k, torch.tensor([start]), caches, format="int4", rotates_keys=False)


def test_opcheck():
    k, parts = states(1, 2, 3, 64), [new_cache(1, 2, 9, 64, "int4", 2) for _ in range(2)]
    parts = [tuple(part.contiguous() for part in tensors) for tensors in parts]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = {"format": "int4", "rotates_keys": True}
    for more in ({}, {"rotates_values": True, "k_frame": frame(1, 2, 64)}):
        arguments = (k, k, torch.tensor([2]), *parts[0], *parts[1])
        opcheck(kv_append, arguments, {**options, **more}, test_utils=tests)


def test_wrong_arguments_are_refused():
    k, keys, values = states(1, 2, 3, 64), new_cache(1, 2, 9, 64, "int4", 2), new_cache(1, 2, 9, 64, "int4", 2)
    good = [k, k, None, *keys, *values]
    for at, bad, message in (
        (0, k[0], r"k is \(2, 3, 64\)"),
        (0, k.int(), "int32"),
        (1, k.half(), "of one floating-point dtype"),
        (1, k[:, :, 1:], "of which only D may differ"),
        (1, k[..., :20], "words of 32 bits"),
        (2, torch.tensor(1.0), "start is"),
        (3, keys[0][:, :, :2], "room for 3 tokens"),
        (3, keys[0][..., :4], "k_codes is"),
        (4, keys[1][..., :1], "k_scale is"),
        (5, None, "need offsets"),
        (6, values[0].float(), "v_codes is"),
        (8, values[2].half(), "v_offset"),
    ):
        with pytest.raises(ValueError, match=message):
            kv_append(*good[:at], bad, *good[at + 1 :], format="int4", rotates_keys=False)
    for bad in (frame(1, 2, 64)[:, :1], frame(1, 2, 64).half()):
        with pytest.raises(ValueError, match="k_frame is"):
            kv_append(*good, format="int4", rotates_keys=False, k_frame=bad)
    with pytest.raises(ValueError, match="allowed: int8, fp8_e4m3, int4, int2"):
        kv_append(*good, format="nf4", rotates_keys=False)
