"""Blocks of layers whose attention is code of its own: the logits and tokens of the host, and what stays with it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.gptj import modeling_gptj

from hf_quant import QuantizedCache, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons
from hf_quant.integrations.transformers.blocks.own_code import OwnLayer
from hf_quant.kernels.native import active
from hf_quant.testing import assert_close


pytestmark = pytest.mark.skipif(active() is None, reason="the native kernels are not built")
_SMALL = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_OLD = {"vocab_size": 96, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 16}
# {model type: fields}.
FAMILIES = {
    "falcon": _SMALL,  # a key that heads share, angles that are given, linear layers with a forward of their own
    "bloom": _SMALL,  # biases of distances; residuals are added inside of attention and feed-forward
    "xglm": {"d_model": 128, "num_layers": 2, "attention_heads": 4, "ffn_dim": 192, "vocab_size": 96},
}
HAS_TABLES = hasattr(modeling_gptj.GPTJAttention, "_attn")  # before 5.24
if HAS_TABLES:
    FAMILIES |= {
        "gptj": _OLD,  # angles from a table, of half of the channels
        "codegen": _OLD,  # projections joined in four parts, angles in fp32
    }


def make(kind: str, dtype: torch.dtype = torch.float32, **options) -> PreTrainedModel:
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields = {**FAMILIES[kind], **special, **options.pop("fields", {})}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 8
    model.generation_config.eos_token_id = None
    return quantize_(model, {"weights": "int4", "modules_to_not_convert": ["lm_head"], **options})


def generate(model: PreTrainedModel, rows: int = 1, padding: int = 0, **options):
    ids = torch.randint(3, 96, (rows, 9), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, **options)


def logits(model: PreTrainedModel, **options) -> torch.Tensor:
    return torch.stack(generate(model, output_logits=True, return_dict_in_generate=True, **options).logits).float()


def forced(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a prompt with padding and of the tokens that follow it, which are given."""
    ids, mask = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1)), torch.ones(2, 12)
    mask[0, :4], cache, found = 0, DynamicCache(config=model.config), []
    with torch.no_grad():
        for begin, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
            of = model(ids[:, begin:end], attention_mask=mask[:, :end].long(), past_key_values=cache)
            found.append(of.logits[:, -1].float())
    return torch.stack(found)


def layers(model: PreTrainedModel) -> list[OwnLayer]:
    found = [block for m in model.modules() if base.is_fused(m) for block in base.state_of(m).found.values()]
    return [block for block in found if isinstance(block, OwnLayer)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_tokens_of_the_host(kind):
    model = make(kind)
    cases = [{}, {"rows": 3}, {"rows": 2, "padding": 4}]
    found, beams = [logits(model, **case) for case in cases], generate(model, 2, num_beams=3)
    coded = logits(model, rows=2, padding=4, past_key_values=QuantizedCache(model.config, "int8"))
    assert len(layers(model)) == 2 and not any(block_reasons(model).values())
    unfuse_activations_(model)
    for case, ours in zip(cases, found):
        assert_close(ours, logits(model, **case), rms=1e-4)
    assert torch.equal(generate(model, 2, num_beams=3), beams)
    expected = logits(model, rows=2, padding=4, past_key_values=QuantizedCache(model.config, "int8"))
    assert_close(coded, expected, rms=0.01)


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", FAMILIES)
def test_inputs_of_every_kind(kind, dtype, activations):
    model = make(kind, dtype, cpu_activations=activations)
    found = forced(model)
    assert not any(block_reasons(model).values()) and len(layers(model)) == 2
    assert_close(found, forced(unfuse_activations_(model)), rms=0.1 if activations else 0.05)


def scores_of(change):
    """GPT-J's attention with other queries, or a part of its result."""
    host = modeling_gptj.GPTJAttention._attn
    return lambda module, query, key, value, mask=None: host(module, *change(query, key, value), mask)


@pytest.mark.skipif(not HAS_TABLES, reason="transformers 5.24 gives GPT-J an attention function of the registry")
@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, v: (q * 1.2, k, v), "another attention"),
        (lambda q, k, v: (q.roll(1, -1), k, v), "another attention"),
        (lambda q, k, v: (q, k, v * 1.2), "puts its parts together otherwise"),
    ],
)
def test_attention_that_differs_stays_with_the_host(change, reason, dtype, activations, monkeypatch):
    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", scores_of(change))
    model = make("gptj", dtype, cpu_activations=activations)
    found = generate(model, 2)
    assert all(reason in block_reasons(model)[name] for name in ("transformer.h.0", "transformer.h.1"))
    assert torch.equal(generate(unfuse_activations_(model), 2), found)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False}, "another attention"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "puts its parts together otherwise"),
    ],
)
def test_what_is_computed_otherwise_stays_with_the_host(kind, fields, reason):
    model = make(kind, fields=fields)
    found = generate(model, 2)
    assert reason in block_reasons(model)["transformer.h.0"]
    assert torch.equal(generate(unfuse_activations_(model), 2), found)


def test_weights_that_are_asked_for():
    model, ids = make("bloom"), torch.randint(3, 96, (1, 9))
    with torch.no_grad():
        weights = [model(ids, output_attentions=asked).attentions for asked in (None, True)]
    assert len(layers(model)) == 2 and not weights[0] and weights[1][0].shape == (1, 4, 9, 9)
