"""Blocks of decoders beside an encoder: the tokens of the host, for any number of sequences, with masks and beams."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from hf_quant import quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import base, block_reasons
from hf_quant.integrations.transformers.blocks.cross import CrossLayer
from hf_quant.kernels.native import active
from hf_quant.testing import assert_close


pytestmark = pytest.mark.skipif(active() is None, reason="the native kernels are not built")
_SMALL = {
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 192,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
    "max_position_embeddings": 64,
}
KINDS = ["bart", "marian", "m2m_100", "pegasus", "whisper"]  # norms behind the sums, and before the parts


def make(kind: str, kv_cache: str | None = "int8", dtype: torch.dtype = torch.float32, **fields) -> nn.Module:
    torch.manual_seed(0)
    fields = {**_SMALL, **fields}
    if kind == "whisper":
        fields |= {"max_source_positions": 20, "num_mel_bins": 16, "suppress_tokens": None}
        fields |= {"begin_suppress_tokens": None, "max_target_positions": 64}
    config = AutoConfig.for_model(kind, **fields)
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    model = auto.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 4
    model.generation_config.eos_token_id = None
    return quantize_(
        model, {"weights": "int4", "kv_cache": kv_cache, "modules_to_not_convert": ["lm_head", "proj_out"]}
    )


def generate(model: nn.Module, rows: int = 1, padding: int = 0, **options) -> torch.Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    of_seed = torch.Generator().manual_seed(rows)
    if model.config.model_type == "whisper":
        features = torch.randn(rows, 16, 40, generator=of_seed).to(model.dtype)
        return model.generate(features, **options)
    ids = torch.randint(4, 96, (rows, 9), generator=of_seed)
    mask = torch.ones_like(ids)
    mask[0, 9 - padding :] = 0
    return model.generate(ids, attention_mask=mask, **options)


def layers(model: nn.Module) -> list[CrossLayer]:
    states = [base.state_of(layer) for layer in model.get_decoder().layers]
    return [block for state in states for block in state.found.values()]


def calls_in_parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The calls of layers that go by the attention of the host, which this list will hold."""
    calls, compute = [], CrossLayer._in_parts
    monkeypatch.setattr(CrossLayer, "_in_parts", lambda *args: (calls.append(args), compute(*args))[1])
    return calls


def logits(model: nn.Module, **options) -> torch.Tensor:
    return torch.stack(generate(model, output_logits=True, return_dict_in_generate=True, **options).logits).float()


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize("kv_cache", ["int8", None, "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_of_the_host(kind, kv_cache, monkeypatch):
    model, calls = make(kind, "int8" if kv_cache else None), calls_in_parts(monkeypatch)
    cases = [{}, {"rows": 3}, {"rows": 2, "padding": 4}]
    cases = [case | (STATIC if kv_cache == "static" else {}) for case in cases]
    found, beams = [logits(model, **case) for case in cases], generate(model, 2, num_beams=3)
    assert bool(calls) == (kv_cache == "static")
    assert len(layers(model)) == 2 and layers(model)[0].norms_first == (kind not in ("bart", "marian"))
    assert not any(reason for name, reason in block_reasons(model).items() if "decoder" in name)
    unfuse_activations_(model)
    for case, ours in zip(cases, found):
        assert_close(ours, logits(model, **case), rms=1e-4)
    assert torch.equal(generate(model, 2, num_beams=3), beams)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
def test_dtypes_and_caches(dtype, kv_cache):
    model = make("whisper", kv_cache, dtype)
    found = logits(model)
    assert len(layers(model)) == 2
    assert_close(found, logits(unfuse_activations_(model)), rms=0.05)


@pytest.mark.parametrize("kv_cache", ["int8", None])
@pytest.mark.parametrize("how", ["eager", "an activation function", "a hook"])
def test_what_is_left_to_the_host(how, kv_cache):
    fields = {"activation_function": "tanh"} if how == "an activation function" else {}
    model = make("bart", kv_cache, **fields)
    if how == "eager":
        model.set_attn_implementation("eager")
    calls = []
    if how == "a hook":
        model.get_decoder().layers[0].fc1.register_forward_hook(lambda *args: calls.append(args))
    found = generate(model, 2)
    assert bool(calls) == (how == "a hook")
    assert torch.equal(generate(unfuse_activations_(model), 2), found)


@pytest.mark.parametrize("kv_cache", ["int8", None, "static"])
@pytest.mark.parametrize(("kind", "feed_forward"), [("t5", "relu"), ("t5", "gated-gelu"), ("mt5", "gated-gelu")])
def test_layers_of_t5(kind, feed_forward, kv_cache, monkeypatch):
    fields = {"d_ff": 192, "d_kv": 32, "num_heads": 4, "num_layers": 3, "decoder_layers": 3}
    fields |= {"feed_forward_proj": feed_forward}
    model, calls = make(kind, "int8" if kv_cache else None, **fields), calls_in_parts(monkeypatch)
    cases = [{}, {"rows": 3}, {"rows": 2, "padding": 4}]
    cases = [case | (STATIC if kv_cache == "static" else {}) for case in cases]
    found, beams = [logits(model, **case) for case in cases], generate(model, 2, num_beams=3)
    assert bool(calls) == (kv_cache == "static")
    states = [base.state_of(layer) for layer in model.decoder.block]
    assert [len(state.found) for state in states] == [0, 1, 1]  # the first one makes the biases
    assert not any(block_reasons(model).values())
    unfuse_activations_(model)
    for case, ours in zip(cases, found):
        assert_close(ours, logits(model, **case), rms=1e-3)
    assert torch.equal(generate(model, 2, num_beams=3), beams)
