"""Models whose attention is "eager", with capped scores or sinks, over a quantized cache: who reads codes, when."""

import copy
import logging
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from hf_quant import QuantizedCache, QuantizerConfig, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import block_reasons
from hf_quant.kernels import native
from hf_quant.kv_cache import _eager, _states
from hf_quant.testing import rms_error


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 96, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 128, "pad_token_id": 0}
KINDS = {
    "gemma2": {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16, "sliding_window": 12},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 2},
}
FILES = {"gemma2": modeling_gemma2, "gpt_oss": modeling_gpt_oss}
CACHES = ["int8", {"format": "int4", "sink_tokens": 2, "recent_tokens": 4}]


def make(kind, dtype=torch.float32, **fields):
    """A model whose scores come near the cap, and whose sinks are seen."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 15 if kind == "gemma2" else 5
        elif name.endswith("sinks"):
            parameter.data.uniform_(0.5, 2.0)
    assert model.config._attn_implementation == "eager"
    return model


def prompt(rows=2, length=20):
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def states_of(model, cache, ids, padding, parts=(9, 3, 1, 1, 1, 1, 4)):
    """Hidden states of the tokens behind the first part, which come in parts and go beyond the window."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    found, end = [], 0
    for part in parts:
        start, end = end, end + part
        more = {"attention_mask": mask[:, :end]} if padding else {}
        found.append(model.model(ids[:, start:end], past_key_values=cache, **more).last_hidden_state)
    return torch.cat(found[1:], 1)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_read(kind, cache, padding, monkeypatch):
    model, ids = make(kind), prompt()
    with monkeypatch.context() as patch:
        patch.setattr(_states.QuantizedStates, "dequantize", None)
        found = states_of(model, QuantizedCache(model.config, cache), ids, padding)
    with monkeypatch.context() as patch:
        patch.setattr(_eager, "is_attention", lambda *_: False)
        expected = states_of(model, QuantizedCache(model.config, cache), ids, padding)
    assert rms_error(found, expected) < 1e-4
    # What the options do is far above that.
    plain = make(kind, attn_logit_softcapping=None) if kind == "gemma2" else copy.deepcopy(model)
    for layer in plain.model.layers if kind == "gpt_oss" else ():
        layer.self_attn.sinks.data.fill_(-100)
    assert rms_error(states_of(plain, QuantizedCache(plain.config, cache), ids, padding), expected) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_somebody_wants(kind):
    model, ids = make(kind), prompt()
    cache = QuantizedCache(model.config, "int8")
    seen = []
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        for asked in (True, False, True):
            out = model(ids[:, 9:10], past_key_values=copy.deepcopy(cache), output_attentions=asked)
            assert (
                (len(out.attentions) == 2 and out.attentions[0].shape == (2, 4, 1, 10))
                if asked
                else not (out.attentions)
            )
        handle = model.model.layers[1].self_attn.register_forward_hook(lambda *call: seen.append(call[2][1]))
        hooked = model(ids[:, 9:10], past_key_values=copy.deepcopy(cache))
        assert rms_error(seen[0], out.attentions[1]) < 1e-4 and rms_error(hooked.logits, out.logits) < 1e-4
        handle.remove()
        generated = model.generate(
            ids, past_key_values=QuantizedCache(model.config, "int8"), max_new_tokens=3, do_sample=False,
            output_attentions=True, return_dict_in_generate=True, eos_token_id=None,
        )  # fmt: skip
    assert len(generated.attentions) == 3 and all(w is not None for step in generated.attentions for w in step)


@pytest.mark.parametrize("kind", KINDS)
def test_other_functions_get_the_dequantized_cache(kind, monkeypatch, caplog):
    """A function is judged by what it computes, not by its name."""
    host = FILES[kind].eager_attention_forward

    def other(module, query, *arguments, **options):
        return host(module, query * 1.2, *arguments, **options)

    monkeypatch.setattr(FILES[kind], "eager_attention_forward", other)
    monkeypatch.setattr(_states, "_noted", [])
    model, ids = make(kind), prompt()
    with caplog.at_level(logging.WARNING, logger="hf_quant"):
        found = states_of(model, QuantizedCache(model.config, "int8"), ids, 0)
    assert "dequantized when it is read" in caplog.text
    monkeypatch.setattr(_eager, "is_attention", lambda *_: False)
    assert torch.equal(found, states_of(model, QuantizedCache(model.config, "int8"), ids, 0))


def test_what_is_not_known_is_not_tried():
    attention = make("gemma2").model.layers[0].self_attn
    host, q = modeling_gemma2.eager_attention_forward, torch.randn(1, 4, 1, 32)
    options = {"softcap": 1.5, "position_ids": torch.arange(1)}
    assert _eager.is_attention(host, "a", attention, q, 2, 0.25, options)
    assert not _eager.is_attention(host, "a", attention, q, 2, 0.25, {**options, "position_bias": q})
    assert not _eager.is_attention(lambda *_, **__: None, "b", attention, q, 2, 0.25, options)
    assert not _eager.is_attention(lambda *_, **__: q, "c", attention, q, 2, 0.25, options)
    assert not _eager.is_attention(
        lambda *given, softcap, **more: host(*given, **more), "d", attention, q, 2, 0.25, options
    )
    again = pickle.loads(pickle.dumps(attention))  # with what is proven
    assert _eager.is_attention(None, "a", again, q, 2, 0.25, options)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_compiled_decoding_reads_codes(kind, monkeypatch):
    model, ids = make(kind, sliding_window=64), prompt(length=24)
    caches = [QuantizedCache(model.config, "int8", max_cache_len=40) for _ in range(2)]
    for cache in caches:
        model(ids[:, :10], past_key_values=cache)
    monkeypatch.setattr(_states.QuantizedStates, "dequantize", None)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.model.forward, fullgraph=True, backend=counter)
    for at in range(10, 13):
        arguments = [
            {"input_ids": ids[:, at : at + 1], "past_key_values": c, "position_ids": torch.tensor([[at]])}
            for c in caches
        ]
        found = [call(**given).last_hidden_state for call, given in zip((model.model, step), arguments)]
        assert torch.allclose(*found, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.skipif(not native.active(), reason="the native kernels are not built")
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_read_them_likewise(kind, padding, monkeypatch):
    """In one native call a layer or a module, up to the window; behind it by the functions of the cache."""
    parts = (9, *[1] * 8)
    config = QuantizerConfig("int8", kv_cache="int8", modules_to_not_convert=["lm_head"])
    model, ids = quantize_(make(kind), config), prompt()
    other = quantize_(make(kind, **({"attn_logit_softcapping": 3.0} if kind == "gemma2" else {})), config)
    for layer in other.model.layers if kind == "gpt_oss" else ():
        layer.self_attn.sinks.data -= 1
    with monkeypatch.context() as patch:
        patch.setattr(_states.QuantizedStates, "dequantize", None)
        found, others = [states_of(m, QuantizedCache(m.config, "int8"), ids, padding, parts) for m in (model, other)]
    assert block_reasons(model) == dict.fromkeys(block_reasons(model))
    expected = states_of(unfuse_activations_(model), QuantizedCache(model.config, "int8"), ids, padding, parts)
    assert rms_error(found, expected) < 1e-4 and rms_error(others, expected) > 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind, tmp_path):
    """In bf16, whose scores a host rounds; the tokens of blocks and of ops are the same."""
    model = quantize_(make(kind, torch.bfloat16), QuantizerConfig("int8", kv_cache="int8"))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt(), **options)
    assert model.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).generate(prompt(), **options), expected)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.bfloat16)
    assert torch.equal(found.generate(prompt(), **options), expected)
