"""Linear layers that stay in 16 bit: their native product with few rows, and what else users do with them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_quant import plan, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import plain_linear
from hf_quant.integrations.transformers.blocks.base import is_fused, state_of
from hf_quant.modules import QuantLinear
from hf_quant.testing import assert_close
from hf_quant.tests.integrations.test_fused_blocks import SMALL, needs_native


pytestmark = needs_native


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of rows of each native product."""
    rows, run = [], plain_linear.PlainLinearBlock.__call__
    monkeypatch.setattr(
        plain_linear.PlainLinearBlock, "__call__", lambda self, x: (rows.append(x.numel() // self.K), run(self, x))[1]
    )
    return rows


def make(dtype: torch.dtype = torch.bfloat16, **fields):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SMALL, "vocab_size": 2**13, "tie_word_embeddings": False, **fields})
    return quantize_(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), "int4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_few_rows(calls, dtype, bias):
    model = make(dtype)
    model.lm_head.bias = nn.Parameter(torch.randn(2**13, dtype=dtype)) if bias else None
    host = copy.deepcopy(unfuse_activations_(copy.deepcopy(model)).lm_head)
    assert type(host) is nn.Linear
    for shape in ((1,), (1, 1), (2, 2), (5, 1), (1, 4)):
        x = torch.randn(*shape, 128, generator=torch.Generator().manual_seed(3)).to(dtype)
        calls.clear()
        with torch.no_grad():
            y = model.lm_head(x)
            assert (len(calls) > 0) == (x.numel() <= 4 * 128)
            exact = nn.functional.linear(x.double(), host.weight.double(), host.bias.double() if bias else None)
            assert y.dtype == dtype and y.shape == host(x).shape
            assert_close(y, exact, rms=4e-3 if dtype == torch.bfloat16 else 5e-4)


def test_what_is_left_to_torch(calls):
    """Rows of another dtype or layout, gradients, hooks, autocast; layers in fp32 or of few weights have no block."""
    head, x = make().lm_head, torch.randn(1, 128).bfloat16()
    assert head(x).requires_grad
    with torch.no_grad():
        head(torch.randn(128, 2).bfloat16().T)
        with torch.autocast("cpu", torch.bfloat16):
            head(x)
        with pytest.raises(RuntimeError):
            head(x.float())
        with pytest.raises(RuntimeError):
            head(x[:, :64].contiguous())
        assert 1 not in calls  # but for the trial
        seen = []
        handle = head.register_forward_hook(lambda *args: seen.append(args))
        y = head(x)
        handle.remove()
        assert len(seen) == 1
        weight = head.weight.detach().clone()
        head.weight.mul_(2)
        assert_close(head(x), 2 * y.double(), rms=4e-3)
        head.weight = nn.Parameter(weight)  # others: the block is made again
        assert torch.equal(head(x), y)
    assert calls
    assert not is_fused(make(torch.float32).lm_head) and not is_fused(make(vocab_size=96).lm_head)


def test_generation_copies_and_later_quantization(calls):
    model, ids = make(), torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(5))
    generate = lambda m: m.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)  # noqa: E731
    tokens = generate(model)
    assert calls.count(2) >= 8 and state_of(model.lm_head).reason is None
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        assert torch.equal(generate(other), tokens) and calls
    assert "Linear" not in str(plan(AutoModelForCausalLM.from_config(model.config), "int4").blocks)
    quantize_(nn.Sequential(model.lm_head), "int8")  # a part of a model
    assert type(model.lm_head) is QuantLinear
    calls.clear()
    generate(model)
    assert not calls
