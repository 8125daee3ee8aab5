"""8-bit attention on Hopper in the interpreter for Gluon, against the specification and against the Triton kernel."""

import pytest
import torch

from hf_quant.kernels.gpu.hopper import attention, plan
from hf_quant.kernels.gpu.launch import TARGETS, pretend, record_launches
from hf_quant.kernels.int8_attention.gpu import int8_attention_gpu
from hf_quant.kernels.int8_attention.op import int8_attention_reference
from hf_quant.testing import assert_close
from hf_quant.tests.kernels.test_int8_attention import PLAIN, heads
from hf_quant.tests.kernels.test_int8_attention_gpu import RMS


if not plan.HAS_GLUON:
    pytest.skip("triton has no Gluon", allow_module_level=True)

from hf_quant.tests.kernels.gluon_interpreter import interpreted


pytestmark = pytest.mark.usefixtures("poison_empty", "untried")


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(plan, "UNTRIED", True)


def _attend(q, k, v, *, seed=0, edit=None, **options):
    with interpreted(seed, edit), pretend(TARGETS["sm90"]):
        y = int8_attention_gpu(q, k, v, **PLAIN | options)
    assert_close(y, int8_attention_reference(q, k, v, **PLAIN | options), rms=RMS[q.dtype])
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 300, 700, 64), (2, 2, 2, 40, 90, 128), (1, 1, 1, 200, 385, 80), (1, 1, 1, 1, 1, 64)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_lengths_heads_and_widths(shape, dtype):
    """The keys are 1, 4 and 6 steps of 128; the rings have 3 and 4 places."""
    for seed in range(2):
        _attend(*heads(*shape, dtype=dtype, outliers=3.0), seed=seed)


@pytest.mark.parametrize("lengths", [(300, 300), (300, 140), (40, 700)], ids=str)
def test_causal_masks(lengths):
    _attend(*heads(1, 2, 1, *lengths, 64, dtype=torch.bfloat16), is_causal=True)


def test_heads_without_a_bound_are_left_to_the_other_kernel():
    q, k, v = heads(1, 4, 2, 70, 290, 64, dtype=torch.bfloat16)
    q[:, :2] *= 30
    _attend(q, k, v)
    meta = [part.to("meta") for part in (q, k, v)]
    with interpreted(), pretend(TARGETS["sm90"]), record_launches() as launches:
        int8_attention_gpu(*meta, **PLAIN)
    assert [one.kernel.__name__ for one in launches][2:] == ["_hopper_attention_kernel", "_int8_attention_kernel"]
    assert launches[2].grid == (1, 4) and not launches[3].options["BOUNDED"]


def test_values_of_any_strides():
    """They are [B, S, H, D] in memory, as in diffusers: copies leave the values of other heads and batches alone."""
    q, k, v = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in heads(2, 3, 3, 150, 150, 64))
    q, k, v = (part.bfloat16() for part in (q, k, v))
    y = _attend(q, k, v)
    v[1] = float("nan")
    with interpreted(), pretend(TARGETS["sm90"]):
        assert torch.equal(int8_attention_gpu(q, k, v, **PLAIN)[0], y[0])


def test_other_widths_and_gpus_keep_their_kernel():
    with interpreted():
        served = [(D, name) for name in TARGETS for D in (32, 64, 128) if attention.serves(D, TARGETS[name])]
    assert served == [(64, "sm90"), (128, "sm90")]


def test_values_that_are_expanded():
    """Copies take no stride of 0."""
    q, k, v = heads(1, 3, 3, 150, 150, 64, dtype=torch.bfloat16)
    _attend(q, k, v[:, :1].expand(v.shape))


TWICE = "_barriers(STAGES, 2), _barriers(STAGES, 2)"
BROKEN = (
    (("mbarrier.arrive(v_empty.index(last))", "pass"), "deadlock"),
    (("mbarrier.arrive(k_empty.index(slot))", "pass"), "deadlock"),
    (("warpgroup_mma_wait(1, deps=[scores])", "warpgroup_mma_wait(2, deps=[scores])"), "used before its product"),
    (("hopper.warpgroup_mma_wait(0, deps=[total, p])\n            mb", "total, p\n            mb"), "in flight reads"),
    ((TWICE, TWICE.replace("2", "1", 1)), "in flight reads|has landed"),
    (("            mbarrier.wait(v_full.index(before), before_phase)\n", ""), "used before a copy has landed"),
)


@pytest.mark.parametrize(("edit", "found"), BROKEN, ids=lambda part: part if isinstance(part, str) else None)
def test_what_a_wrong_kernel_does_is_found(edit, found):
    q, k, v = heads(1, 1, 1, 100, 900, 128, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=found):
        for seed in range(8):
            _attend(q, k, v, seed=seed, edit=edit)
