"""The attention kernels in Triton's interpreter, against the specification: branches, edges, targets."""

import importlib

import pytest
import torch
from triton.runtime.errors import InterpreterError

from hf_quant.kernels.dispatch import Problem
from hf_quant.kernels.gpu import launch
from hf_quant.kernels.gpu.launch import TARGETS, Target, pretend, record_launches
from hf_quant.kernels.int8_attention.gpu import int8_attention_gpu, supports_int8_attention
from hf_quant.kernels.int8_attention.op import int8_attention_reference
from hf_quant.testing import assert_close, rms_error
from hf_quant.tests.kernels.interpreter import install
from hf_quant.tests.kernels.test_int8_attention import PLAIN, heads


gpu = importlib.import_module("hf_quant.kernels.int8_attention.gpu")
install()
pytestmark = pytest.mark.usefixtures("poison_empty")
# The weights of softmax have 8 bits in bf16, 11 in fp16, 4 in fp8; the result is rounded, too.
RMS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 3e-3, "fp8_e4m3": 4e-2}


def _tolerance(dtype, value_format):
    return RMS[value_format or dtype]


def _kinds(q, k, v, target, **options):
    """Which attention kernels a call launches: [(bounded, by the copy engine)]."""
    meta = [torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta") for part in (q, k, v)]
    with pretend(TARGETS[target]), record_launches() as launches:
        int8_attention_gpu(*meta, **{**PLAIN, **options})
    return [(x.options["BOUNDED"], x.options["TMA"]) for x in launches if "BOUNDED" in x.options]


@pytest.mark.parametrize(
    "dtype,value_format", [*((t, None) for t in RMS if t != "fp8_e4m3"), (torch.bfloat16, "fp8_e4m3")]
)
@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
def test_branches(target, dtype, value_format):
    fused = value_format is None or TARGETS[target].has_fp8_dot
    for shape, is_causal in (
        ((1, 1, 1, 140, 140, 64), True),
        ((1, 4, 2, 40, 200, 32), False),
        ((1, 1, 1, 40, 70, 128), False),
        ((2, 1, 1, 70, 130, 40), True),
        ((1, 1, 1, 1, 1, 64), False),
    ):
        D = shape[-1]
        q, k, v = heads(*shape, dtype=dtype, outliers=3.0)
        options = {"is_causal": is_causal, "scale": None, "value_format": value_format}
        kinds = _kinds(q, k, v, target, **options)
        bounded = [(True, target == "sm90")] if dtype != torch.float16 and value_format is None else []
        assert kinds == ([*bounded, (False, False)] if fused else [])
        expected = int8_attention_reference(q, k, v, **options)
        with pretend(TARGETS[target]):
            y = int8_attention_gpu(q, k, v, **options)
        assert y.dtype == dtype and y.shape == q.shape
        rms = _tolerance(dtype, value_format)
        assert_close(y, expected, rms=rms)
        if D == 32:
            with pretend(TARGETS[target]), pytest.raises(AssertionError):
                assert_close(int8_attention_gpu(q, k, v.roll(1, 2), **options), expected, rms=rms)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_with_and_without_a_bound(is_causal):
    """A head whose scores may be too far apart takes online softmax; the others do not wait for it."""
    q, k, v = heads(1, 4, 2, 70, 90, 64, dtype=torch.bfloat16)
    q[:, :2] *= 30
    options = {**PLAIN, "is_causal": is_causal}
    expected = int8_attention_reference(q, k, v, **options)
    with pretend(TARGETS["sm90"]):
        y = int8_attention_gpu(q, k, v, **options)
    for head in range(4):
        assert_close(y[:, head], expected[:, head], rms=RMS[torch.bfloat16])


@pytest.mark.parametrize("is_causal,bound", [(False, 155.0), (True, 82.0)])
def test_the_largest_bounds_keep_all_bits(is_causal, bound):
    """One key far from all queries makes the bound large; the scores that count are as far below as they can be."""
    q, k, v = heads(1, 1, 1, 64, 64, 32, dtype=torch.bfloat16)
    q, k = q * 0.2, k * 0.2
    q[..., 0], k[..., 0] = 3.0, 0.0
    k[0, 0, 63] = 0.0
    k[0, 0, 63, 0] = -1.0  # its score is -bound, those of the others about 0 without the mean
    options = {**PLAIN, "is_causal": is_causal}
    smooth = k.float() - k.float().mean(2, keepdim=True)
    norms = q.float().norm(dim=3).max() * smooth.norm(dim=3).max() * 1.4427
    options["scale"] = (bound / norms).item()
    limit = gpu._LIMITS[is_causal]
    assert bound < limit
    expected = int8_attention_reference(q, k, v, **options)
    with pretend(TARGETS["sm80"]):
        y = int8_attention_gpu(q, k, v, **options)
    assert_close(y, expected, rms=RMS[torch.bfloat16])


def test_strides_layouts_and_scale():
    wide = torch.randn(2, 70, 3, 4, 32).bfloat16()  # [B, S, qkv, H, D], as a fused projection gives it
    q, k, v = (wide[:, :, i].transpose(1, 2) for i in range(3))
    options = {**PLAIN, "scale": 0.3}
    expected = int8_attention_reference(q, k, v, **options)
    with pretend(TARGETS["sm90"]):
        y = int8_attention_gpu(q, k, v, **options)
        assert_close(y, expected, rms=RMS[torch.bfloat16])
        assert y.stride() == torch.empty_like(q).stride()
        # Rows of v that the copy engine cannot take: online softmax with pointers serves all heads.
        odd = torch.randn(2, 4, 70, 33).bfloat16()[..., :32]
        assert _kinds(q, k, odd, "sm90") == [(False, False)]
        y = int8_attention_gpu(q, k, odd, **options)
        assert_close(y, int8_attention_reference(q, k, odd, **options), rms=RMS[torch.bfloat16])
        q, k, v = (part.transpose(2, 3).contiguous().transpose(2, 3) for part in (q, k, v))
        y = int8_attention_gpu(q, k, v, **options)
        assert_close(y, expected, rms=RMS[torch.bfloat16])
        assert y.stride() == torch.empty_like(q).stride()


def test_nan_stays_in_its_row():
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = heads(1, 2, 2, 40, 40, 32, dtype=dtype)
        q[0, 1, 5, 3] = float("nan")
        with pretend(TARGETS["sm90"]):
            y = int8_attention_gpu(q, k, v, **PLAIN)
        assert y[0, 1, 5].isnan().all() and y.isnan().sum() == 32
        k[0, 0, 2, 2] = float("nan")
        with pretend(TARGETS["sm90"]):
            y = int8_attention_gpu(q, k, v, **PLAIN)
        assert y[0, 0].isnan().all() and y[0, 1].isnan().sum() == 32


def test_blocks_of_keys_share_one_scale(monkeypatch):
    """A tuned table cannot take more keys at once than have one scale."""
    q, k, v = heads(1, 1, 1, 40, 300, 32, dtype=torch.float16)
    tuned = [(128, gpu.ONLINE, 64, 2 * gpu.KEY_BLOCK, 4, 1)]
    monkeypatch.setitem(launch._tables, ("int8_attention", TARGETS["sm90"]), tuned)
    monkeypatch.setattr(gpu, "attention_plan", gpu.attention_plan.__wrapped__)  # the cache would outlive the test
    with pretend(TARGETS["sm90"]), pytest.raises(InterpreterError, match="share one scale"):
        int8_attention_gpu(q, k, v, **PLAIN)


def test_zeros():
    q, k, v = heads(1, 2, 2, 40, 50, 32, dtype=torch.bfloat16)
    q[0, 0], k[0, 1] = 0, 0
    with pretend(TARGETS["sm90"]):
        y = int8_attention_gpu(q, k, v, **PLAIN)
        assert_close(y, v.float().mean(2, keepdim=True).expand_as(y), rms=RMS[torch.bfloat16])
        assert int8_attention_gpu(q[:, :, :0], k, v, **PLAIN).shape == (1, 2, 0, 32)


def test_what_the_kernels_do_not_serve():
    problem = Problem("int8", 128, 24, 128, torch.bfloat16)
    assert supports_int8_attention(problem) is None
    assert "heads of 160" in supports_int8_attention(problem._replace(K=160))
    q, k, v = heads(1, 1, 1, 10, 10, 160)
    for target, part in (("sm90", (q, k, v)), ("sm75", (q[..., :64], k[..., :64], v[..., :64]))):
        assert not _kinds(*part, target)
        with pretend(TARGETS[target]):
            y = int8_attention_gpu(*part, **PLAIN)
        assert rms_error(y, int8_attention_reference(*part, **PLAIN)) < 1e-5
    # gfx950 multiplies fp8, and takes the table of gfx942, which does not.
    with pretend(Target("gfx950", 256, 163840)), record_launches() as launches:
        q, k, v = (torch.empty(1, 1, 10, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
        assert int8_attention_gpu(q, k, v, **{**PLAIN, "value_format": "fp8_e4m3"}).shape == q.shape
        assert not launches
        int8_attention_gpu(q, k, v, **PLAIN)
        assert len(launches) == 4
    with pytest.raises(ValueError, match="above 0"):
        int8_attention_gpu(q, k, v, **{**PLAIN, "scale": -1.0})


@pytest.mark.parametrize("target", [name for name in TARGETS if name not in ("xpu", "sm75")])
def test_lengths_share_their_kernels(target):
    options = set()
    for S, T in ((1, 1), (77, 4096), (512, 77), (4608, 4608), (17776, 17776)):
        q, k, v = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="meta") for n in (S, T, T))
        with pretend(TARGETS[target]), record_launches() as launches:
            int8_attention_gpu(q, k, v, **PLAIN)
        assert len(launches) == 4
        options |= {(x.kernel, str(x.options)) for x in launches}
    assert len(options) == 4
