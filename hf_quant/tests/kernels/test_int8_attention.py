"""`int8_attention`: its specification against exact attention, the CPU path, what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from hf_quant.kernels import int8_attention
from hf_quant.kernels.int8_attention import op
from hf_quant.kernels.int8_attention.op import KEY_BLOCK, int8_attention_reference, quantize_keys, round_values
from hf_quant.testing import assert_close, assert_sqnr, sqnr


pytestmark = pytest.mark.usefixtures("poison_empty")
PLAIN = {"is_causal": False, "scale": None, "value_format": None}


def heads(B, H, H_kv, S, T, D, dtype=torch.float32, outliers=0.0):
    """Random q, k, v; `outliers`: what some channels of all keys have in common, as in real models."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, *shape, D, generator=generator) for shape in ((H, S), (H_kv, T), (H_kv, T)))
    k[..., :: max(D // 4, 1)] += outliers
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact(q, k, v, is_causal=False, scale=None):
    q, k, v = (part.double() for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 2, 300, 300, 64), (2, 4, 2, 70, 200, 128), (1, 3, 1, 150, 40, 72)], ids=str)
def test_it_is_close_to_exact_attention(shape, is_causal):
    for outliers in (0.0, 20.0):
        q, k, v = heads(*shape, outliers=outliers)
        expected = exact(q, k, v, is_causal)
        for value_format, at_least, at_most in ((None, 37, 52), ("fp8_e4m3", 29, 38)):
            y = int8_attention_reference(q, k, v, is_causal=is_causal, scale=None, value_format=value_format)
            assert_sqnr(y, expected, at_least=at_least, at_most=at_most)
            cosine = F.cosine_similarity(y.double().flatten(), expected.flatten(), dim=0)
            assert cosine > (0.9999 if value_format is None else 0.999)


def test_without_the_mean_keys_quantize_better():
    q, k, v = heads(1, 2, 2, 256, 256, 64, outliers=20.0)
    expected = exact(q, k, v)

    def quality(mean):
        codes, scale = quantize_keys(k, mean)
        return sqnr(exact(q, codes.float() * scale, v), expected)

    smooth, plain = quality(k.mean(2, keepdim=True)), quality(torch.zeros(1))
    assert smooth > 40 and plain < 27
    random, _, _ = heads(1, 2, 2, 256, 256, 64)
    codes, scale = quantize_keys(random, torch.zeros(1))
    assert codes.abs().amax((2, 3)).min() == 127 and scale.shape == (1, 2, 256, 1)
    assert (scale[:, :, :KEY_BLOCK] == scale[:, :, :1]).all() and (scale[:, :, -1] != scale[:, :, 0]).all()


def test_values():
    v = torch.randn(1, 2, 50, 16)
    assert torch.equal(round_values(v, None), v.bfloat16().float())
    assert torch.equal(round_values(v.half(), None), v.half().float())
    decoded = round_values(v, "fp8_e4m3")
    assert_sqnr(decoded, v, at_least=28, at_most=36)
    assert torch.allclose(decoded.abs().amax(2), v.abs().amax(2))  # a scale of its own for each channel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value_format", [None, "fp8_e4m3"])
def test_cpu_matches_the_reference(dtype, value_format):
    rms = {torch.bfloat16: 3e-3, torch.float16: 3e-4, torch.float32: 1e-5}[dtype]
    for shape in ((1, 2, 2, 130, 130, 64), (2, 4, 2, 1, 300, 32), (1, 2, 1, 33, 5, 40)):
        q, k, v = heads(*shape, dtype=dtype, outliers=5.0)
        for is_causal, scale in ((False, None), (True, 0.3)):
            options = {"is_causal": is_causal, "scale": scale, "value_format": value_format}
            expected = int8_attention_reference(q, k, v, **options)
            y = int8_attention(q, k, v, **options)
            assert y.dtype == dtype
            assert_close(y, expected, rms=rms)
            with pytest.raises(AssertionError):
                assert_close(int8_attention(q, k, v.roll(1, 2), **options), expected, rms=rms)


def test_strides_stay_and_nothing_is_empty_by_luck():
    q, k, v = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in heads(2, 4, 4, 60, 60, 32))
    y = int8_attention(q, k, v, **PLAIN)
    assert y.stride() == q.stride() and not y.isnan().any()
    assert int8_attention_reference(q, k, v, **PLAIN).stride() == q.stride()
    assert int8_attention(q[:, :, :0], k, v, **PLAIN).shape == (2, 4, 0, 32)
    assert int8_attention(q[:0], k[:0], v[:0], **PLAIN).shape == (0, 4, 60, 32)
    q[1, 2, 7, 3] = float("nan")
    y = int8_attention(q, k, v, **PLAIN)
    assert y[1, 2, 7].isnan().all() and y.isnan().sum() == 32


def test_opcheck():
    q, k, v = heads(1, 2, 1, 20, 30, 16)
    opcheck(int8_attention, (q, k, v), {"is_causal": True, "scale": 0.2, "value_format": "fp8_e4m3"})
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    opcheck(int8_attention, (strided, k, v), PLAIN, test_utils=("test_schema", "test_faketensor"))


def test_wrong_arguments_are_refused():
    q, k, v = heads(1, 4, 2, 8, 8, 16)
    for bad, options, message in (
        ((q.half(), k, v), {}, "q is torch.float16"),
        ((q.long(), k.long(), v.long()), {}, "must be fp16, bf16 or fp32"),
        ((q[0], k, v), {}, "needs"),
        ((q, k, v[..., :8]), {}, "1, 2, 8, 8"),
        ((q[:, :3], k, v), {}, "q has 3 heads, k has 2"),
        ((q, k[:, :, :0], v[:, :, :0]), {}, "at least one key"),
        ((q, k, v), {"scale": 0.0}, "above 0"),
        ((q, k, v), {"value_format": "int8"}, "allowed: None"),
    ):
        with pytest.raises(ValueError, match=message):
            int8_attention(*bad, **{**PLAIN, **options})
        with pytest.raises(ValueError, match=message):
            op.int8_attention_reference(*bad, **{**PLAIN, **options})
