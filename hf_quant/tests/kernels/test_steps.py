"""Norms, gates and rotary embeddings in Triton's interpreter, against their references."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from hf_quant import kernels
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.steps import gpu, op
from hf_quant.kernels.steps.op import ACTIVATIONS, PAIRS
from hf_quant.tests.kernels.test_rowwise import normal


pytestmark = pytest.mark.usefixtures("poison_empty")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NORM = {"eps": 1e-5, "plus_one": False, "rounds": True}


def ulps(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in roundings of the dtype, each of its own value or of 1."""
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    step = torch.finfo(expected.dtype).eps * expected.double().abs().clamp(min=2.0**-3)
    return ((found.double() - expected.double()).abs() / step).max().item()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """One rounding in 16 bits, in which sums in another order may end in the next value; in fp32 some."""
    return ulps(found, expected) <= (1.01 if found.dtype != torch.float32 else 32)


@pytest.mark.parametrize("target", ("sm90", "gfx942"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype, target):
    with pretend(TARGETS[target]):
        for i, (M, K) in enumerate(((1, 1), (3, 17), (3, 576), (1, 4097))):
            x, more, weight = (normal(*shape, seed=i).to(dtype) for shape in ((M, K), (M, K), (K,)))
            for plus_one, rounds in ((False, True), (True, False)):
                options = {"eps": 1e-5, "plus_one": plus_one, "rounds": rounds}
                expected = op.rms_norm_reference(x, weight, **options)
                found = gpu.rms_norm_gpu(x, weight, **options)
                assert close(found, expected)
                assert not close(found, op.rms_norm_reference(x, weight, **{**options, "plus_one": not plus_one}))
                assert K == 1 or not close(found.roll(1, -1), expected)
            total, found = gpu.add_rms_norm_gpu(x, more, None, **NORM)
            assert torch.equal(total, x + more) and close(found, op.rms_norm_reference(total, None, **NORM))


@pytest.mark.parametrize("K", (300, 1025))
def test_norms_in_a_loop(monkeypatch, K):
    gpu._norm_plan.cache_clear()
    monkeypatch.setattr("hf_quant.kernels.rowwise.gpu._IN_REGISTERS", 0)
    x, more, weight = normal(2, K).bfloat16(), normal(2, K, seed=1).bfloat16(), normal(K).bfloat16()
    total, found = gpu.add_rms_norm_gpu(x, more, weight, **NORM)
    gpu._norm_plan.cache_clear()
    assert torch.equal(total, x + more) and close(found, op.rms_norm_reference(total, weight, **NORM))


def test_norms_of_views_and_nothing():
    x = normal(4, 6, 40).bfloat16()
    for view in (x[:, ::2], x[..., 3:29], x.transpose(0, 1), x[..., ::2], x[0], x[0, 0], x[:1].expand(3, 6, 40)):
        weight = normal(2 * view.shape[-1])[::2].bfloat16()
        assert close(gpu.rms_norm_gpu(view, weight, **NORM), op.rms_norm_reference(view, weight, **NORM))
        assert close(gpu.gate_gpu(view, view, act="silu"), op.gate_reference(view, view, act="silu"))
    for shape in ((0, 8), (2, 0, 8)):
        assert gpu.rms_norm_gpu(torch.zeros(shape), None, **NORM).shape == shape
        assert gpu.gate_gpu(torch.zeros(shape), None, act="relu").shape == shape
    many = normal(300, 24).half()  # several rows a block, the last one not full
    assert close(gpu.rms_norm_gpu(many, None, **NORM), op.rms_norm_reference(many, None, **NORM))
    assert gpu.rms_norm_gpu(x.double(), None, **NORM).dtype == torch.float64  # no kernel: in torch ops


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # e**1e4, inf * 0, in numpy
@pytest.mark.parametrize("target", ("sm90", "gfx942"))
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gates(act, target):
    with pretend(TARGETS[target]):
        for i, (M, K) in enumerate(((1, 1), (3, 17), (1, 576), (2, 1025))):
            both = (normal(M, 2 * K, seed=i) * 3).to(DTYPES[i % 3])
            x, up = both.chunk(2, -1)
            for given in (up, None):
                expected = op.gate_reference(x, given, act=act)
                # The activation may be the next value. In fp32: 1e-6, times an `up` of 5.
                assert ulps(gpu.gate_gpu(x, given, act=act), expected) <= (2.01 if x.dtype != torch.float32 else 300)
            assert K == 1 or ulps(gpu.gate_gpu(x, up, act=act).roll(1, -1), op.gate_reference(x, up, act=act)) > 20
        found = gpu.gate_gpu(torch.tensor([[math.nan, math.inf, -1e4, 1e4, 0.0]]), None, act=act)[0]
        assert found[0].isnan() and not found[1].isfinite() and found[2] == found[4] == 0 and found[3] >= 1e4


def angles(B: int, S: int, turned: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make angles as models do, but of halves that differ."""
    found = normal(B, S, turned, seed=7)
    return found.cos().to(dtype), found.sin().to(dtype)


ROTARY = {"rounds": True, "eps": None, "plus_one": False, "norm_rounds": True}


@pytest.mark.parametrize("pairs", PAIRS)
def test_rotary(pairs):
    """q and k are parts of one product, as those of one token and of several."""
    shapes = ((1, 1, 5, 2, 16, 16), (2, 3, 3, 1, 40, 24), (1, 2, 9, 4, 64, 64), (3, 1, 1, 1, 2, 2))
    for i, (B, S, H, shared, D, turned) in enumerate(shapes):
        dtype = DTYPES[i % 3]
        joined = normal(B, S, (H + 2 * shared) * D, seed=i).to(dtype)
        q, k, _ = joined.split([H * D, shared * D, shared * D], -1)
        q, k = q.unflatten(-1, (H, D)), k.unflatten(-1, (shared, D))
        weights = [normal(D, seed=i + 2).to(dtype), normal(D, seed=i + 3).to(dtype)]
        for batch, has_norms in ((1, False), (B, True)):
            options = {**ROTARY, "pairs": pairs, "eps": 1e-6 if has_norms else None, "rounds": not has_norms}
            given = (q, k, *angles(batch, S, turned, dtype), *(weights if has_norms else (None, None)))
            found, expected = gpu.rotary_gpu(*given, **options), op.rotary_reference(*given, **options)
            # A value of the norm may be the next one, and both of a pair make the result.
            scale = 3 if has_norms else 1
            for own, wanted in zip(found, expected):
                assert ulps(own / scale, wanted / scale) <= (2.5 if dtype != torch.float32 else 64)
            if D > 2:
                assert ulps(found[0].roll(1, -1), expected[0]) > 8
            other = {**options, "pairs": "halves" if pairs != "halves" else "neighbors"}
            assert turned == 2 or ulps(found[0], op.rotary_reference(*given, **other)[0]) > 8


def test_rotary_without_angles_or_tokens():
    q, k, weight = normal(2, 3, 3, 24).bfloat16(), normal(2, 3, 1, 24).bfloat16(), normal(24).bfloat16()
    options = {**ROTARY, "pairs": "halves", "eps": 1e-5, "plus_one": True}
    found = gpu.rotary_gpu(q, k, None, None, weight, None, **options)
    expected = op.rotary_reference(q, k, None, None, weight, None, **options)
    assert all(close(*pair) for pair in zip(found, expected))
    strided = gpu.rotary_gpu(q.transpose(2, 3).contiguous().transpose(2, 3), k, None, None, weight, None, **options)
    assert torch.equal(strided[0], found[0])
    found = gpu.rotary_gpu(q[:0], k[:0], *angles(1, 3, 8, torch.bfloat16), None, None, pairs="halves", **ROTARY)
    assert found[0].shape == (0, 3, 3, 24) and found[1].shape == (0, 3, 1, 24)


def test_references_are_what_models_compute():
    q, k = normal(2, 5, 4, 16).bfloat16(), normal(2, 5, 2, 16).bfloat16()
    freqs = normal(2, 5, 8, seed=3)
    doubled, repeated = torch.cat([freqs, freqs], -1), freqs.repeat_interleave(2, -1)
    for module, pairs, angle, rounds in (
        (modeling_llama, "halves", doubled, True),
        (modeling_cohere, "neighbors", repeated, False),
        (modeling_glm, "neighbors_by_pair", doubled, True),
    ):
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        expected = module.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        found = kernels.rotary(q, k, cos, sin, None, None, **{**ROTARY, "pairs": pairs, "rounds": rounds})
        assert all(torch.equal(own.transpose(1, 2), wanted) for own, wanted in zip(found, expected))
    norm = modeling_llama.LlamaRMSNorm(16).bfloat16()
    assert torch.equal(
        norm(q), kernels.rms_norm(q, norm.weight, eps=norm.variance_epsilon, plus_one=False, rounds=True)
    )
    assert torch.equal(F.silu(q) * q, kernels.gate(q, q, act="silu"))


def test_errors():
    x = torch.zeros(2, 1, 3, 8)
    for call, text in (
        (lambda: kernels.rms_norm(x, torch.ones(7), **NORM), r"weight is \(7,\); needs \[8\]"),
        (lambda: kernels.add_rms_norm(x, x.half(), None, **NORM), "needs one shape"),
        (lambda: kernels.gate(x, None, act="tanh"), "allowed: silu"),
        (lambda: kernels.rotary(x, x, None, None, None, None, pairs="x", **ROTARY), "allowed: halves"),
        (
            lambda: kernels.rotary(x, x[0], None, None, None, None, pairs="halves", **ROTARY),
            "heads, D",
        ),
        (lambda: kernels.rotary(x, x, x[0], None, None, None, pairs="halves", **ROTARY), "both or neither"),
        (lambda: kernels.rotary(x, x, x[0], x[0], None, None, pairs="halves", **ROTARY), "1 or B, S, turned"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_one_launch_and_one_kernel_for_any_number_of_tokens():
    """On meta tensors, which hold nothing; parts of joined products are not copied."""
    found = set()
    for S in (300, 512, 999, 4608):
        qkv, joined = (torch.empty(1, S, N, dtype=torch.bfloat16, device="meta") for N in (6144, 28672))
        q, k, _ = qkv.split([4096, 1024, 1024], -1)
        turning = angles(1, S, 128, torch.bfloat16)
        turning = [part.to("meta") for part in turning]
        with record_launches() as recorded:
            gpu.rms_norm_gpu(qkv, None, **NORM)
            gpu.add_rms_norm_gpu(qkv, qkv, None, **NORM)
            gpu.gate_gpu(*joined.chunk(2, -1), act="silu")
            gpu.rotary_gpu(
                q.unflatten(-1, (32, 128)), k.unflatten(-1, (8, 128)), *turning, None, None, pairs="halves", **ROTARY
            )
        assert [one.grid for one in recorded] == [(S,), (S,), (14 * S,), (10 * S,)]
        found.add(tuple(tuple(sorted(one.options.items())) for one in recorded))
    assert len(found) == 1
