"""The kernels of quantized KV caches in Triton's interpreter, against the specification: branches, edges, targets."""

import pytest
import torch

from hf_quant.formats import FORMATS
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.kv_attention import gpu, gpu_append
from hf_quant.kernels.kv_attention.gpu import kv_attention_gpu
from hf_quant.kernels.kv_attention.gpu_append import kv_append_gpu
from hf_quant.kernels.kv_attention.gpu_places import place_ptx, places
from hf_quant.kernels.kv_attention.op import CACHE_FORMATS, kv_append_reference, kv_attention_reference
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.interpreter import install, run_ptx
from hf_quant.tests.kernels.test_kv_append import frame, new_cache, states
from hf_quant.tests.kernels.test_kv_attention import CAUSAL, PLAIN, cache, in_frame, queries


install()
pytestmark = pytest.mark.usefixtures("poison_empty")
# Weights of softmax have 8 bits for bf16 queries, 16 for others, but 11 for many fp16 ones, as have their values.
RMS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
DECODE, PREFILL = "_kv_decode_kernel", "_kv_prefill_kernel"


def paired(shape, format, groups, dtype=torch.bfloat16, seed=0):
    """(codes, scale, offset), scale and offset side by side; no offset for 8 bits."""
    codes, scale, offset = cache(shape, format, groups, offset=True, scale_dtype=dtype, seed=seed)
    if FORMATS[format].spec.bits == 8:
        return codes, scale, None
    pairs = torch.stack([scale, offset], -1)
    return codes, pairs[..., 0], pairs[..., 1]


def caches(shape, format, groups, **options):
    return [paired(shape, format, groups, seed=seed, **options) for seed in (1, 2)]


def kernels(q, parts, mask=None, target="sm90", **options):
    """(kernel's name, splits) of a call's attention, None if torch ops serve; and whether it adds splits."""
    meta = [
        None
        if x is None
        else torch.empty_strided(
            (x.storage_offset() + x.untyped_storage().size(),), (1,), dtype=x.dtype, device="meta"
        )[: x.untyped_storage().size() // x.element_size()].as_strided(x.shape, x.stride(), x.storage_offset())
        for x in (q, *parts[0], *parts[1], mask)
    ]
    with pretend(TARGETS[target]), record_launches() as launches:
        kv_attention_gpu(*meta, None, **options)
    names = [x.kernel.fn.__name__ for x in launches]
    mine = next((x for x in launches if x.kernel.fn.__name__ in (DECODE, PREFILL)), None)
    return None if mine is None else (mine.kernel.fn.__name__, mine.grid[1] > 1, "_kv_merge_kernel" in names)


def compare(q, parts, mask=None, length=None, target="sm90", rms=None, **options):
    expected, expected_lse = kv_attention_reference(q, *parts[0], *parts[1], mask, length, **options)
    with pretend(TARGETS[target]):
        y, lse = kv_attention_gpu(q, *parts[0], *parts[1], mask, length, **options)
    assert y.dtype == q.dtype and y.stride() == expected.stride() and lse.dtype == torch.float32
    assert_close(y, expected, rms=rms or RMS[q.dtype])
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite) and torch.equal(lse.isnan(), expected_lse.isnan())
    assert torch.allclose(lse[finite], expected_lse[finite], atol=1e-2 if q.dtype == torch.bfloat16 else 1e-3)
    return y, lse


# H, H_kv, D, groups of int4, groups of int2: heads of several sizes, all queries on one head of keys, a head each.
HEADS = [(8, 2, 128, 2, 4), (2, 2, 64, 1, 2), (2, 1, 80, 1, 5), (4, 2, 96, 1, 3), (2, 1, 256, 4, 8)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_few_queries(format, heads):
    H, H_kv, D, *packed = heads
    groups = dict(zip(("int4", "int2"), packed)).get(format, 1)
    for B, S, T, dtype, target in (
        (2, 1, 270, torch.bfloat16, "sm90"),
        (2, 2, 70, torch.float16, "gfx942"),
        (1, 1, 65, torch.float32, "sm80"),
    ):
        q, parts = queries(B, H, S, D, dtype), caches((B, H_kv, T, D), format, groups)
        assert kernels(q, parts, target=target, format=format, **CAUSAL) == (DECODE, T > 256, T > 256)
        compare(q, parts, format=format, target=target, **CAUSAL)


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_many_queries(format):
    """Tiles of queries, also with splits; causal blocks before, at and behind the diagonal."""
    for (H, H_kv, D, groups), S, T, dtype, target in (
        ((4, 2, 128, 2), 40, 150, torch.bfloat16, "sm90"),
        ((2, 2, 80, 1), 70, 90, torch.float16, "sm90"),
        ((2, 1, 64, 4), 35, 530, torch.bfloat16, "gfx942"),
    ):
        groups = groups if FORMATS[format].spec.is_packed else 1
        q, parts = queries(1, H, S, D, dtype), caches((1, H_kv, T, D), format, groups)
        assert kernels(q, parts, target=target, format=format, **CAUSAL) == (PREFILL, T > 256, T > 256)
        compare(q, parts, format=format, target=target, **CAUSAL)


@pytest.mark.parametrize("S", [1, 37])
def test_masks_windows_lengths(S):
    generator = torch.Generator().manual_seed(3)
    q, parts = queries(2, 2, S, 64, torch.bfloat16), caches((2, 1, 150, 64), "int4", 1)
    boolean = torch.rand(2, 1, S, 150, generator=generator) > 0.3
    added = torch.randn(1, 2, 1, 150, generator=generator)
    added[..., 40:100] = float("-inf")
    windowed = {**CAUSAL, "window": 50, "scale": 0.2}
    for mask, length, options in (
        *((None, length, CAUSAL) for length in (None, 0, 3, 130, 150, 999, -5)),
        *((None, None, PLAIN), (None, None, windowed), (None, 130, windowed)),
        *((boolean, None, CAUSAL), (boolean, 130, windowed)),
        *((boolean[:1, :, :1].expand(2, 2, S, 150), None, PLAIN), (added, 130, CAUSAL), (added, None, windowed)),
    ):
        end = None if length is None else torch.tensor([length])
        compare(q, parts, mask, end, format="int4", **options)


def test_what_lies_behind_the_end_is_not_read():
    for S in (1, 40):
        q, parts = queries(1, 4, S, 64, torch.bfloat16), caches((1, 2, 200, 64), "int4", 1)
        expected = kv_attention_reference(q, *parts[0], *parts[1], None, torch.tensor(130), format="int4", **CAUSAL)[0]
        for codes, scale, offset in parts:
            codes[:, :, 130:], scale[:, :, 130:], offset[:, :, 130:] = -1, float("nan"), float("inf")
        y, _ = kv_attention_gpu(q, *parts[0], *parts[1], None, torch.tensor(130), format="int4", **CAUSAL)
        assert_close(y, expected, rms=RMS[torch.bfloat16])
        with pretend(TARGETS["sm75"]):  # by torch ops
            y, _ = kv_attention_gpu(q, *parts[0], *parts[1], None, torch.tensor(130), format="int4", **CAUSAL)
        assert_close(y, expected, rms=RMS[torch.bfloat16])


def test_rotated_keys():
    for S, dtype, D in (
        (1, torch.bfloat16, 128),
        (1, torch.bfloat16, 80),
        (2, torch.float32, 80),
        (40, torch.float16, 96),
    ):
        q, parts = queries(1, 4, S, D, dtype), caches((1, 2, 90, D), "int4", 1)
        compare(q, parts, format="int4", rms=2e-2 if S == 40 else 8e-3, **{**CAUSAL, "rotates_keys": True})
        plain = q.contiguous()
        compare(plain, parts, format="int4", rms=2e-2 if S == 40 else 8e-3, **{**CAUSAL, "rotates_keys": True})


def test_strides():
    """Heads between tokens, slices of larger buffers, offsets elsewhere, queries and results of any layout."""
    for format in ("int4", "int8"):
        parts = []
        for codes, scale, offset in caches((2, 2, 200, 64), format, 1):
            swapped = [x if x is None else x.transpose(1, 2).contiguous().transpose(1, 2) for x in (codes, scale)]
            parts.append([x if x is None else x[:, :, 30:] for x in (*swapped, offset)])
        for q in (queries(2, 4, 1, 64, torch.bfloat16), torch.randn(2, 4, 64, 3).bfloat16().transpose(2, 3)):
            assert kernels(q, parts, format=format, **PLAIN)
            compare(q, parts, format=format, **PLAIN)
    odd = [[codes[..., :64], scale, offset] for codes, scale, offset in caches((1, 2, 70, 80), "int8", 1)]
    odd = [[torch.empty(1, 2, 70, 67, dtype=torch.int8)[..., :64].copy_(p[0]), *p[1:]] for p in odd]
    q = queries(1, 4, 1, 64, torch.bfloat16)
    assert kernels(q, odd, format="int8", **PLAIN) is None
    compare(q, odd, format="int8", **PLAIN)


def test_positions_that_see_nothing_and_nan():
    for S in (1, 40):
        q, parts = queries(1, 4, S, 64, torch.bfloat16), caches((1, 2, 90, 64), "int8", 1)
        mask = torch.ones(1, 4, 1, 90, dtype=torch.bool)
        mask[:, :2] = False
        y, lse = compare(q, parts, mask, format="int8", **PLAIN)
        assert (y[:, :2] == 0).all() and lse[:, :2].isneginf().all() and lse[:, 2:].isfinite().all()
        parts[0][1][0, 1, 70] = float("nan")
        y, lse = kv_attention_gpu(q, *parts[0], *parts[1], None, None, format="int8", **PLAIN)
        assert y[:, 2:].isnan().all() and lse[:, 2:].isnan().all() and y[:, :2].isfinite().all()
        mask[:, :2], mask[..., 70] = True, False
        y, _ = kv_attention_gpu(q, *parts[0], *parts[1], mask, None, format="int8", **PLAIN)
        assert y.isfinite().all()
        parts[1][1][0, 0, 3] = float("nan")
        y, _ = kv_attention_gpu(q, *parts[0], *parts[1], mask, None, format="int8", **PLAIN)
        assert y[:, :2].isnan().all() and y[:, 2:].isfinite().all()


def test_the_tolerances_would_notice():
    q, parts = queries(1, 4, 1, 128, torch.bfloat16), caches((1, 2, 500, 128), "int2", 4)
    y, lse = compare(q, parts, format="int2", **PLAIN)
    fewer = [[x[:, :, 64:] for x in part] for part in parts]
    short, short_lse = kv_attention_gpu(q, *fewer[0], *fewer[1], None, None, format="int2", **PLAIN)
    with pytest.raises(AssertionError):
        assert_close(short, y, rms=RMS[torch.bfloat16])
    assert not torch.allclose(short_lse, lse, atol=1e-2)


def test_empty_and_unserved():
    q, parts = queries(1, 4, 1, 64), caches((1, 2, 90, 64), "int4", 2)
    empty = [[x[:, :, :0] for x in part] for part in parts]
    compare(q, empty, format="int4", **PLAIN)
    wide = [cache((1, 2, 30, 272), "int8", seed=seed) for seed in (1, 2)]
    compare(queries(1, 4, 1, 272), wide, format="int8", **PLAIN)
    other = [cache((1, 2, 30, 64), "nf4", seed=seed) for seed in (1, 2)]
    assert kernels(q, other, format="nf4", **PLAIN) is None
    compare(q, other, format="nf4", **PLAIN)
    for problem, reason in (
        (Problem("nf4", 64, 1, 64, torch.bfloat16), "no kernel decodes nf4"),
        (Problem("int8", 272, 1, 272, torch.bfloat16), "heads of 272"),
        (Problem("int8", 8, 1, 64, torch.bfloat16), "groups of 8"),
        (Problem("int8", 64, 1, 64, torch.float64), "float64"),
    ):
        rows = explain(torch.ops.hf_quant.kv_attention.default, "cuda", problem)
        assert reason in rows[0][2] and reason in rows[1][2] and rows[2][2] is None
    fits = Problem("int4", 64, 1, 128, torch.bfloat16)
    assert [reason for *_, reason in explain(torch.ops.hf_quant.kv_attention.default, "cuda", fits)] == [None] * 3
    assert "fp32" in gpu.PATHS[1].supports(fits._replace(dtype=torch.float32))
    assert "power of two" in gpu.PATHS[1].supports(fits._replace(group_size=48, K=96))


def test_groups_that_no_tile_of_queries_spreads():
    q, parts = queries(1, 2, 40, 96, torch.bfloat16), caches((1, 1, 70, 96), "int4", 2)  # groups of 48
    assert kernels(q, parts, format="int4", **CAUSAL) == (DECODE, False, False)
    compare(q, parts, format="int4", **CAUSAL)


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_places(format):
    """Every code, at every place, as the reference decodes it; keys of integers with the rest of the magic number."""
    spec = FORMATS[format].spec
    count = 16 // spec.bits
    codes = torch.arange(2**spec.bits)
    for i in range(count):
        words = (codes << (spec.bits * i)) | (codes.flip(0) << (spec.bits * ((i + 1) % count)))
        pairs = (words | (words << 16)).to(torch.uint32).numpy()
        wanted = codes - 2 ** (spec.bits - 1) if spec.bits < 8 else codes.byte().view(spec.dtype).float()
        known = wanted == wanted  # fp8: 0x7F and 0xFF are NaN, which no cache holds but with a scale of NaN
        (found,) = run_ptx(place_ptx(format, centered=True)[i].replace("$1", "$1"), [pairs], 1)
        found = torch.from_numpy(found.copy().view("uint16").astype("int32")).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(found[::2].float()[known], wanted.float()[known])
        if spec.bits < 8:
            p = places(format, use_ptx=True)[i]
            (found,) = run_ptx(place_ptx(format, centered=False)[i], [pairs], 1)
            found = torch.from_numpy(found.copy().view("uint16").astype("int32")).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(found[::2].float(), 128 + 2.0**p * codes)


@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
def test_a_growing_cache_compiles_nothing_anew(target):
    for S in (1, 512):
        options = set()
        for T in (600, 1024, 8191, 32768, 131072):
            q = torch.empty(1, S, 32, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
            codes = torch.empty(1, 8, T, 16, dtype=torch.int32, device="meta")
            pairs = torch.empty(1, 8, T, 2, 2, dtype=torch.bfloat16, device="meta")
            part = (codes, pairs[..., 0], pairs[..., 1])
            with pretend(TARGETS[target]), record_launches() as launches:
                kv_attention_gpu(q, *part, *part, None, None, format="int4", **CAUSAL)
            options |= {(x.kernel.fn.__name__, str(x.options)) for x in launches}
        assert len(options) == len({name for name, _ in options})


@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize("S", [1, 17])  # 17 positions of two heads: more rows than the kernel for few takes
def test_keys_in_a_frame_and_rotated_values(S, format):
    """One split and several, blocks that are seen whole and in part, masks, ends, windows; by torch ops, too.

    Without rotated values no launch adds the splits, which takes a program for each row.
    """
    H = 2 if S == 1 else 1  # of keys
    for D, T, dtype, target in (  # fp32 has no kernel for many queries
        (64, 270 if S == 1 else 90, torch.bfloat16, "sm90"),
        (80, 50, torch.float16, "gfx942"),  # two sequences, which begin behind padding
        *([(128, 90, torch.float32, "sm90")] if S == 1 else []),
        (64, 70, torch.bfloat16, "sm75"),
    ):
        B = 2 if D == 80 else 1
        q, parts = queries(B, 2 * H, S, D, dtype) / 4, caches((B, H, T, D), format, 1)  # the spread is up to 4
        served = DECODE if S == 1 else PREFILL
        assert target == "sm75" or kernels(q, parts, target=target, format=format, **CAUSAL)[0] == served
        k_frame, k_first = in_frame(B, H, D)
        mask = torch.rand(B, 1, 1, T, generator=torch.Generator().manual_seed(3)) > 0.3
        options = {"format": format, "target": target, "k_frame": k_frame, "k_first": k_first}
        options |= {"starts": torch.tensor([35, -3][:B])} if D != 64 else {}
        options |= {"rms": {torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype)}
        cases = ((PLAIN, False, False), (CAUSAL, True, True), ({**CAUSAL, "window": 30}, True, S == 1))
        for causal, keys, values in cases if target == "sm90" and format in ("int4", "fp8_e4m3") else cases[2:]:
            compare(q, parts, **{**causal, **options, "rotates_keys": keys, "rotates_values": values})
        options |= {"rotates_keys": True, "rotates_values": True}
        compare(q, parts, mask, torch.tensor([T - 9]), **{**CAUSAL, **options})
        with pretend(TARGETS[target]):
            lacks = kv_attention_gpu(q, *parts[0], *parts[1], None, None, format=format, **PLAIN, k_frame=k_frame)
        has = kv_attention_reference(
            q, *parts[0], *parts[1], None, None, format=format, **PLAIN, k_frame=k_frame, k_first=30 * k_first
        )
        assert not torch.allclose(lacks[1], has[1], atol=1e-2)


@pytest.mark.parametrize("target,dtype", [("sm90", torch.bfloat16), ("sm80", torch.float16), ("sm75", torch.float32)])
def test_capped_scores(target, dtype):
    """With and without a frame, whose mean is in them; tokens before the window, and behind the end, stay out."""
    for S, T, format, framed in ((1, 300, "int8", True), (1, 70, "int4", False), (17, 90, "int4", True)):
        q, parts = queries(1, 4, S, 64, dtype), caches((1, 2, T, 64), format, 1)
        frame, first = in_frame(1, 2, 64)
        frame[:, :, 0] *= 0.1
        options = {**CAUSAL, "format": format, "scale": 0.3, "softcap": 5.0}
        options |= {"k_frame": frame, "k_first": first} if framed else {}
        served = None if target == "sm75" else DECODE if S == 1 else PREFILL
        assert served is None or kernels(q, parts, target=target, **options)[0] == served
        rms = {torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype)
        y, _ = compare(q, parts, None, torch.tensor([T - 9]), target, rms, **{**options, "window": 40})
        without = {**options, "window": 40, "softcap": None}
        y_without, _ = kv_attention_reference(q, *parts[0], *parts[1], None, torch.tensor([T - 9]), **without)
        with pytest.raises(AssertionError):
            assert_close(y, y_without, rms=4e-2)
        compare(q, parts, None, None, target, rms, **{**options, "rotates_keys": True, "rotates_values": True})


# Shapes of heads, keys and values, and groups of each.
APPENDED = [((64, 64), 2), ((128, 128), 2), ((80, 80), 1), ((96, 96), 3), ((256, 256), 8), ((192, 128), 1)]


@pytest.mark.parametrize("heads,groups", APPENDED, ids=str)
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_append_is_the_reference(format, heads, groups):
    """To the bit, where Triton's interpreter adds in the order of the reference; on a GPU codes may differ at ties."""
    for dtype, rotates, target in (
        (torch.float32, True, "sm90"),
        (torch.bfloat16, True, "sm80"),
        (torch.float16, False, "sm90"),
    ):
        k, v = (states(2, 2, 5, D, dtype, seed) for seed, D in enumerate(heads))
        written = [[new_cache(2, 2, 9, D, format, groups) for D in heads] for _ in range(2)]
        arguments, options = (k, v, torch.tensor([3])), {"format": format, "rotates_keys": rotates}
        if dtype != torch.float32:
            options |= {"rotates_values": not rotates, "k_frame": frame(2, 2, heads[0])}
        with pretend(TARGETS[target]):
            kv_append_gpu(*arguments, *written[0][0], *written[0][1], **options)
        kv_append_reference(*arguments, *written[1][0], *written[1][1], **options)
        for parts, expected in zip(*written):
            for found, wanted in zip(parts, expected):
                assert found is wanted is None or torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_append_one_by_one_and_at_once(format):
    # More tokens than a program takes.
    k, v = states(1, 2, 10, 80, torch.bfloat16), states(1, 2, 10, 80, torch.bfloat16, 1).contiguous()
    whole, parts = ([new_cache(1, 2, 12, 80, format, 5) for _ in range(2)] for _ in range(2))
    kv_append_gpu(k, v, None, *whole[0], *whole[1], format=format, rotates_keys=True)
    for at in range(10):
        one = (k[:, :, at : at + 1], v[:, :, at : at + 1], torch.tensor(at))
        kv_append_gpu(*one, *parts[0], *parts[1], format=format, rotates_keys=True)
    for a, b in zip((*whole[0], *whole[1]), (*parts[0], *parts[1])):
        assert a is b is None or torch.equal(a.float(), b.float())


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_append_zeros_nan_and_the_end(format):
    x = torch.zeros(1, 1, 4, 64)
    x[0, 0, 1], x[0, 0, 2:] = 0.7265625, torch.linspace(-1, 1, 64)
    x[0, 0, 2, 5], x[0, 0, 3, 40] = float("nan"), float("inf")
    written = [[new_cache(1, 1, 6, 64, format, 2) for _ in range(2)] for _ in range(2)]
    for append, parts in zip((kv_append_gpu, kv_append_reference), written):
        append(x, x, torch.tensor(3), *parts[0], *parts[1], format=format, rotates_keys=False)  # the last one is lost
        append(x, x, torch.tensor(9), *parts[0], *parts[1], format=format, rotates_keys=False)
    for found, wanted in zip(*([*parts[0], *parts[1]] for parts in written)):
        if found is not None:
            finite = wanted.float().isfinite()
            assert torch.equal(found.float().isfinite(), finite)
            assert torch.equal(found.float()[finite], wanted.float()[finite])


def test_append_paths():
    k, parts = states(1, 2, 3, 96), [new_cache(1, 2, 9, 96, "int4", 2) for _ in range(2)]  # groups of 48
    meta = [x.to("meta") for x in (k, k, *parts[0], *parts[1])]
    with record_launches() as launches:
        kv_append_gpu(*meta[:2], None, *meta[2:], format="int4", rotates_keys=True)
    assert not launches
    assert "groups of 48" in gpu_append.append_unsupported_reason(96, 48)
    assert "272" in gpu_append.append_unsupported_reason(272, 272)
    assert gpu_append.append_unsupported_reason(80, 80) is None
    op = torch.ops.hf_quant.kv_append.default
    assert explain(op, "cuda", Problem("nf4", 64, 1, 64, torch.bfloat16))[0][2] == "no kernel for nf4"
    assert explain(op, "cuda", Problem("int4", 64, 1, 128, torch.bfloat16))[0][2] is None
    kv_append_gpu(k[:, :, :0], k[:, :, :0], None, *parts[0], *parts[1], format="int4", rotates_keys=True)
