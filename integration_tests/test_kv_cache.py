"""The quantized KV cache in use: `generate` in every mode, kinds of models, save and reload, memory."""

import copy
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import psutil
import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache

import hf_quant
from hf_quant import KVCacheConfig, QuantizedCache, QuantizerConfig
from hf_quant.checkpoint import inspect_checkpoint
from hf_quant.evaluate import read_ids
from hf_quant.kv_cache import _interface, bytes_per_token, is_quantized
from hf_quant.testing import sqnr
from integration_tests.support.tiny_models import VOCAB, build, inputs


LM = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


def ids(rows=2, length=20):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def padded(rows=2, length=20):
    """Inputs of which the first row is padded on the left."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :5] = 0
    return {"input_ids": ids(rows, length), "attention_mask": mask}


@pytest.fixture(scope="module")
def asset(asset_model_dir):
    """The trained model, and 16 prompts of 80 tokens."""
    model = AutoModelForCausalLM.from_pretrained(asset_model_dir, dtype=torch.float32).eval()
    tokens = read_ids(asset_model_dir / "val_ids.npy")
    return model, torch.stack([tokens[400 * i : 400 * i + 80] for i in range(16)])


def test_int8_generates_what_16_bit_generates(asset):
    model, prompts = asset
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    mask = torch.ones_like(prompts)
    expected = model.generate(prompts, attention_mask=mask, **options)[:, 80:]
    cache = QuantizedCache(model.config, "int8")
    found = model.generate(prompts, attention_mask=mask, past_key_values=cache, **options)[:, 80:]
    assert (found == expected).float().mean() >= 0.95
    assert cache.get_seq_length() == 143 and cache.nbytes > 0


@pytest.mark.parametrize(("format", "most"), [("int8", 2e-4), ("fp8", 2e-3), ("int4", 1e-2), ("int2", 3e-2)])
@torch.no_grad()
def test_predictions_through_the_cache_stay_near(asset, format, most):
    """KL per token, read in steps of 16 behind a prompt."""
    model, prompts = asset
    scores = []
    for cache in (DynamicCache(config=model.config), QuantizedCache(model.config, format)):
        parts = [model(prompts[:, :32], past_key_values=cache).logits[:, -1:]]
        parts += [model(prompts[:, i : i + 16], past_key_values=cache).logits for i in range(32, 80, 16)]
        scores.append(torch.cat(parts, 1).log_softmax(-1))
    kl = (scores[0].exp() * (scores[0] - scores[1])).sum(-1).mean()
    assert 0 < kl < most


@pytest.fixture(scope="module")
def llama():
    return build("llama", torch.float32)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3},
    "beams, several of them": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "static": {"cache_implementation": "static"},
    "static beams": {"cache_implementation": "static", "num_beams": 2},
    "in parts": {"prefill_chunk_size": 7},
    "static, in parts": {"cache_implementation": "static", "prefill_chunk_size": 7},
}
ALONE = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "assisted": {"assistant_model": None}}


@pytest.mark.parametrize("mode", [*MODES, *ALONE])
@pytest.mark.parametrize("kv_cache", ["int8", {"format": "int4", "sink_tokens": 2, "recent_tokens": 4}], ids=str)
def test_every_way_to_generate(llama, mode, kv_cache):
    """Outputs have the length that transformers' cache gives, are finite, and int8 is close where nothing is drawn."""
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache=kv_cache))
    alone = mode in ALONE
    options = {**GREEDY, **(ALONE if alone else MODES)[mode], "return_dict_in_generate": True, "output_logits": True}
    if "assistant_model" in options:
        options["assistant_model"] = model
    inputs = {"input_ids": ids(1)} if alone else padded()
    found = model.generate(**inputs, **options)
    assert is_quantized(found.past_key_values.layers[0])
    if "assistant_model" in options:
        options["assistant_model"] = llama
    expected = llama.generate(**inputs, **options)
    assert found.sequences.shape == expected.sequences.shape
    assert all(step.isfinite().all() for step in found.logits)
    assert sqnr(expected.logits[0], found.logits[0]) > (20 if kv_cache == "int8" else 8)


class Kind(NamedTuple):
    """A model of transformers: class, config, whether its attention reads codes, with what the others are compared."""

    model: str
    config: str
    fields: dict
    reads_codes: bool | None = True  # None: depends on the version of transformers
    static: bool = True  # has layers of fixed size that can be quantized


ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_GPT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_LINEAR = {f"linear_{which}_head_dim": 16 for which in ("key", "value")}
_NEXT = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_NO_CAPS = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}
KINDS = {
    "heads of 80": Kind("LlamaForCausalLM", "LlamaConfig", {**LM, "head_dim": 80}),
    "heads of 96, one for keys": Kind(
        "LlamaForCausalLM", "LlamaConfig", {**LM, "head_dim": 96, "num_key_value_heads": 1}
    ),
    "heads of 128": Kind("Qwen3ForCausalLM", "Qwen3Config", {**LM, "head_dim": 128}),
    "heads of 256": Kind("GemmaForCausalLM", "GemmaConfig", {**LM, "head_dim": 256, "num_key_value_heads": 4}),
    "GPT-2": Kind("GPT2LMHeadModel", "GPT2Config", _GPT),
    "sliding": Kind("MistralForCausalLM", "MistralConfig", {**LM, "sliding_window": 8}, static=False),
    "sliding and full": Kind("Gemma3ForCausalLM", "Gemma3TextConfig", {**LM, "head_dim": 16, **_ALTERNATING}),
    "layers of different heads": Kind(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **LM,
            **_ALTERNATING,
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        },
    ),
    "capped scores": Kind("Gemma2ForCausalLM", "Gemma2Config", {**LM, "head_dim": 16, **_ALTERNATING}),
    "learned sinks": Kind(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**LM, "head_dim": 16, **_ALTERNATING, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "values of its own": Kind("DiffLlamaForCausalLM", "DiffLlamaConfig", {**LM, "head_dim": 16}, False),
    # Before 5.18 the model cannot use a static cache, whoever makes it.
    "ALiBi": Kind("BloomForCausalLM", "BloomConfig", {**LM, "n_layer": 2, "n_head": 4}, False, False),
    "attention of its own": Kind("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 8}, None),
    "linear attention": Kind(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **LM,
            **_LINEAR,
            **_NEXT,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "latent attention": Kind(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **LM,
            **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32},
            **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "first_k_dense_replace": 2},
        },
        None,
    ),
    "linear attention in every layer": Kind(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**LM, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
        static=False,
    ),
    "T5": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {**ENCODER_DECODER, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        None,
        False,
    ),
    "T5Gemma": Kind(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {
            "vocab_size": VOCAB,
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **{which: {**LM, **_ALTERNATING, "head_dim": 16, **_NO_CAPS} for which in ("encoder", "decoder")},
        },
        None,  # newer versions choose "eager" for it
        False,
    ),
    "BART": Kind(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **ENCODER_DECODER,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
        },
        static=False,
    ),
}


def make(kind, dtype=torch.float32):
    """A model with random weights, large enough that every layer matters."""
    torch.manual_seed(0)
    config = getattr(transformers, kind.config)(**kind.fields)
    model = getattr(transformers, kind.model)(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith("A_log"):
            parameter.data.normal_(std=0.12)
    return model


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model(name, caplog, monkeypatch):
    """Against the same model without: the first steps are near, and codes are read, or a warning says that not."""
    kind = KINDS[name]
    plain, model = make(kind), make(kind)
    hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    for cache_implementation in (None, "static") if kind.static else (None,):
        monkeypatch.setattr("hf_quant.kv_cache._states._noted", [])
        caplog.clear()
        options["cache_implementation"] = cache_implementation
        with caplog.at_level(logging.WARNING, logger="hf_quant"):
            found, expected = (m.generate(**padded(), **options) for m in (model, plain))
        if kind.reads_codes is not None:
            assert ("cannot read the codes" not in caplog.text) == kind.reads_codes
        cache = found.past_key_values
        caches = (
            [cache.self_attention_cache, cache.cross_attention_cache] if model.config.is_encoder_decoder else [cache]
        )
        for cache in caches:
            assert any(is_quantized(layer) for layer in cache.layers)
        assert found.sequences.shape == expected.sequences.shape
        assert sqnr(expected.logits[0], found.logits[0]) > 30
        assert sqnr(expected.logits[1], found.logits[1]) > 20


def test_whisper_transcribes_from_a_quantized_cache():
    plain, model = build("whisper", torch.float32), build("whisper", torch.float32)
    hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
    features = inputs("whisper", torch.float32)["input_features"]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found, expected = (m.generate(features, **options) for m in (model, plain))
    assert found.shape == expected.shape


def test_a_model_that_generates_by_a_model_in_it():
    text = {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "eos_token_id": 1, "pad_token_id": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Blip2Config(
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        qformer_config={**sizes, "encoder_hidden_size": 64},
        text_config={**LM, **text},
        num_query_tokens=2,
        image_token_index=90,
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    given = {"pixel_values": torch.randn(1, 3, 16, 16), "input_ids": torch.tensor([[90, 90, 5, 7]])}
    options = {**GREEDY, **given, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**options)
    for kv_cache in ("int8", "int4"):
        hf_quant.quantize_(model, QuantizerConfig(None, kv_cache=kv_cache))
        for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            found = again.generate(**options)
            assert found.past_key_values.kv_cache.format == kv_cache
            assert 20 < sqnr(found.logits[1], expected.logits[1]) < 100
    assert type(model.dequantize().generate(**options).past_key_values) is DynamicCache


def test_a_model_whose_own_generate_names_no_mode():
    """RAG, like MusicGen Melody, asks for a cache itself, and passes no mode."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    layers = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "init_std": 0.3}
    bart = transformers.BartConfig(vocab_size=VOCAB, **layers, **heads)
    config = transformers.RagConfig.from_question_encoder_generator_configs(
        transformers.DPRConfig(**sizes, intermediate_size=64), bart, n_docs=2, bos_token_id=1, decoder_start_token_id=1
    )
    torch.manual_seed(0)
    model = transformers.RagTokenForGeneration(config).eval()
    given = {"context_input_ids": ids(), "context_attention_mask": torch.ones_like(ids())}
    options = {**GREEDY, **given, "doc_scores": torch.tensor([[1.0, 2.0]]), "return_dict_in_generate": True}
    expected = model.generate(ids(1), **options, output_logits=True)
    hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
    found = model.generate(ids(1), **options, output_logits=True)
    assert is_quantized(found.past_key_values.self_attention_cache.layers[0])
    assert 20 < sqnr(expected.logits[1], found.logits[1]) < 100


def test_a_model_that_makes_its_own_cache_is_named(caplog):
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    speech = transformers.SpeechT5Config(vocab_size=VOCAB, hidden_size=32, encoder_ffn_dim=32, **heads)
    speech = transformers.SpeechT5ForTextToSpeech(speech)
    for model in (build("t5"), speech):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_quant"):
            hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
        assert ("a SpeechT5ForTextToSpeech makes its own cache" in caplog.text) == (model is speech)


def test_the_method_of_the_host_is_bound_to_another_model():
    """Kyutai's speech-to-text does so in `generate`, for the cache of its codec, which raised."""
    model, other = build("llama"), build("llama")
    hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
    name = "_prepare_cache_for_generation"
    setattr(other, name, types.MethodType(getattr(model, name).__func__, other))
    found = [m.generate(ids(), **GREEDY, return_dict_in_generate=True).past_key_values for m in (model, other)]
    assert [type(cache) for cache in found] == [QuantizedCache, DynamicCache]


def test_a_cache_of_the_caller_has_the_states_of_the_decoder_alone():
    model, options = build("t5", torch.float32), {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    own, others = QuantizedCache(model.config, "int8"), DynamicCache(config=model.config)
    cache = transformers.EncoderDecoderCache(own, others)
    found, expected = (model.generate(ids(), **options, **more) for more in ({"past_key_values": cache}, {}))
    assert sqnr(found.logits[1], expected.logits[1]) > 30


def test_a_conversation_goes_on_with_its_cache(asset):
    """Several calls of generate with one cache; tokens are taken back at the end."""
    (model, prompts), outputs = asset, []
    tokens, options = prompts[1:2], {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for cache in (DynamicCache(config=model.config), QuantizedCache(model.config, "int8")):
        text = tokens[:, :20]
        for turn in range(3):
            text = model.generate(text, past_key_values=cache, **options)
            text = torch.cat([text, tokens[:, 20 + 10 * turn : 30 + 10 * turn]], 1)
        cache.crop(-5)
        length = cache.get_seq_length()
        with torch.no_grad():
            outputs.append((length, text, model(text[:, length : length + 3], past_key_values=cache).logits))
    assert outputs[0][0] == outputs[1][0] == 20 + 16 * 2 + 6 - 1 - 5
    assert torch.equal(outputs[0][1], outputs[1][1]) and sqnr(outputs[0][2], outputs[1][2]) > 30


def test_the_cache_of_the_caller_wins(llama, caplog):
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig("int8", kv_cache="int4"))
    options = {**GREEDY, "return_dict_in_generate": True}

    def kind(**more):
        return type(model.generate(ids(), **options, **more).past_key_values)

    assert kind() is QuantizedCache and not caplog.records
    assert kind(past_key_values=StaticCache(config=model.config, max_cache_len=40)) is StaticCache
    static = StaticCache(config=model.config, max_cache_len=40)
    found = model(ids(), past_key_values=static).logits
    assert sqnr(found, model(ids()).logits) > 100  # the empty places behind the prompt are not read
    assert kind(cache_implementation="dynamic") is DynamicCache
    assert "In place of the int4 cache" in caplog.text and "'dynamic' is used" in caplog.text
    assert model.generate(ids(), **options, use_cache=False).past_key_values is None
    assert model(ids()).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "llava"])  # "hf_quant" attention in the whole model, and in a part of it
def test_continuous_batching_has_its_own_cache(kind, caplog):
    model = hf_quant.quantize_(build(kind, torch.float32), QuantizerConfig(None, kv_cache="int8"))
    options, prompts = {**GREEDY, "cache_implementation": "dynamic"}, ids(3, 12)
    expected = [model.generate(row[None], **options)[0, 12:].tolist() for row in prompts]
    for _ in range(2):
        caplog.clear()
        found = model.generate_batch(
            prompts.tolist(),
            generation_config=transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1),
            continuous_batching_config=transformers.ContinuousBatchingConfig(page_size=16, num_blocks=16),
            warmup=False,
        )
        assert [result.generated_tokens for result in found.values()] == expected
        assert "In place of the int8 cache" in caplog.text and "continuous batching" in caplog.text
        assert model.config.get_text_config()._attn_implementation == "hf_quant"
    hf_quant.dequantize_(model)
    assert "init_continuous_batching" not in model.__dict__


def test_a_static_cache_of_the_model_itself_wins(llama, caplog):
    class Own(type(llama)):  # as Mllama, whose layers for images have another length
        def _prepare_static_cache(self, *args, **kwargs):
            return super()._prepare_static_cache(*args, **kwargs)

    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig("int8", kv_cache="int4"))
    model.__class__ = Own
    options = {**GREEDY, "return_dict_in_generate": True}
    assert type(model.generate(ids(), **options).past_key_values) is QuantizedCache
    assert type(model.generate(ids(), **options, cache_implementation="static").past_key_values) is StaticCache
    assert "the one that a Own makes for cache_implementation='static' is used" in caplog.text


def test_a_static_cache_that_cannot_be_quantized(caplog):
    model = hf_quant.quantize_(make(KINDS["sliding"]), QuantizerConfig(None, kv_cache="int4"))
    options = {**GREEDY, "return_dict_in_generate": True}
    assert type(model.generate(ids(), cache_implementation="static", **options).past_key_values) is StaticCache
    assert "no layers of fixed size" in caplog.text


def test_static_caches_of_layers_with_other_heads_than_the_config_names():
    falcon = {name: LM[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    moe = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    mimo = {**LM, **moe, "head_dim": 16, "v_head_dim": 16, "sliding_window": 8}
    mimo["layer_types"] = ["full_attention", "sliding_attention"]  # which has twice as many heads of keys
    for name, fields in (("Falcon", falcon), ("MiMoV2Flash", mimo)):
        config = getattr(transformers, f"{name}Config")(**fields)
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
        expected = model.generate(ids(), **GREEDY)
        for _ in range(2):
            assert torch.equal(model.generate(ids(), cache_implementation="static", **GREEDY), expected)


def test_a_static_cache_is_used_again(llama):
    """The memory of the cache does not move, so that nothing compiled for it is compiled again."""
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int4"))
    options = {**GREEDY, "cache_implementation": "static"}
    first = model.generate(ids(), **options)
    cache = model._prepare_cache_for_generation.static
    memory = cache.layers[0].k_codes.data_ptr()
    assert torch.equal(model.generate(ids(), **options), first)
    assert model._prepare_cache_for_generation.static.layers[0].k_codes.data_ptr() == memory
    longer = model.generate(ids(), **{**options, "max_new_tokens": 30})
    assert torch.equal(longer[:, :32], first) and model._prepare_cache_for_generation.static is not cache
    model.generate(ids(3), **options)
    kept = model.generate(ids(), return_dict_in_generate=True, **options).past_key_values
    model.generate(ids(), **options)
    assert int(kept.get_seq_length()) == 31 and model._prepare_cache_for_generation.static is not kept


def test_the_choice_is_saved_and_comes_back(asset_model_dir, tmp_path):
    """In a new process, the same tokens."""
    prompt = torch.arange(20, 60)[None]
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    lines = []
    for weights in (None, "int4"):
        config = QuantizerConfig(weights, kv_cache={"format": "int4", "recent_tokens": 8})
        model = AutoModelForCausalLM.from_pretrained(asset_model_dir, dtype=torch.float32, quantization_config=config)
        expected = model.generate(prompt, **options)
        lines.append(f"8 {expected[0].tolist()}")
        model.save_pretrained(tmp_path / str(weights))
    code = (
        "import torch, sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "for path in sys.argv[1:]:\n"
        "    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)\n"
        f"    out = model.generate(torch.arange(20, 60)[None], return_dict_in_generate=True, **{options})\n"
        "    print(out.past_key_values.kv_cache.recent_tokens, out.sequences[0].tolist())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "None"), str(tmp_path / "int4")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    assert printed.splitlines() == lines
    # Another format at load time; what the checkpoint holds of weights is as it was.
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "int4", dtype=torch.float32, quantization_config=QuantizerConfig(None, kv_cache="int8")
    )
    cache = other.generate(prompt, return_dict_in_generate=True, **options).past_key_values
    assert cache.kv_cache == KVCacheConfig("int8")
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    assert all(torch.equal(m.generate(prompt, **options), expected) for m in copies)
    model.dequantize()
    assert type(model.generate(prompt, return_dict_in_generate=True, **options).past_key_values) is DynamicCache
    headless = transformers.AutoModel.from_pretrained(tmp_path / "int4", dtype=torch.float32)
    assert headless(prompt).last_hidden_state.isfinite().all()


def test_an_unpickled_model_brings_its_attention(monkeypatch):
    model = hf_quant.quantize_(build("llama"), QuantizerConfig("int8", kv_cache="int8"))
    assert model.config._attn_implementation == "hf_quant"
    stored = pickle.dumps(model)
    monkeypatch.delitem(AttentionInterface._global_mapping, "hf_quant")  # as in a new process
    monkeypatch.setattr(_interface, "register", _interface.register.__wrapped__)
    monkeypatch.setattr(AttentionInterface, "get_interface", AttentionInterface.get_interface)
    for name in _interface._WRAPPED:
        monkeypatch.setitem(AttentionInterface._global_mapping, name, AttentionInterface._global_mapping[name])
    assert torch.equal(pickle.loads(stored)(ids()).logits, model(ids()).logits)


def test_what_has_no_cache_is_refused():
    layers = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    parakeet = transformers.ParakeetCTCConfig(
        encoder_config={**layers, "num_mel_bins": 16}, vocab_size=64, pad_token_id=0
    )
    for model in (build("bert"), transformers.ParakeetForCTC(parakeet)):
        for function in (hf_quant.plan, hf_quant.quantize_):
            with pytest.raises(ValueError, match="does not generate with a cache: leave it out"):
                function(model, QuantizerConfig("int8", kv_cache="int8"))
    with pytest.raises(ValueError, match="is no model of transformers"):
        hf_quant.quantize_(torch.nn.Linear(64, 64), QuantizerConfig("int8", kv_cache="int8"))
    with pytest.raises(ValueError, match="no layer of a MambaConfig has a cache .* leave kv_cache out"):
        QuantizedCache(build("mamba").config, "int8")
    minimax = transformers.MiniMaxConfig(**layers, num_key_value_heads=2, num_local_experts=2, vocab_size=64)
    with pytest.raises(ValueError, match="MiniMaxForCausalLM has a cache of its own"):
        hf_quant.quantize_(transformers.MiniMaxForCausalLM(minimax), QuantizerConfig(None, kv_cache="int8"))


def test_a_decoder_inside_a_composite_that_is_deeper_than_its_encoder():
    """Florence-2 nests the config of BART, whose number of layers is the encoder's."""
    bart = transformers.BartConfig(d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2)
    assert len(QuantizedCache(transformers.Florence2Config(text_config=bart.to_dict()), "int8").layers) == 2


def test_weights_on_disk(asset_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        asset_model_dir,
        device_map={"": "disk"},
        offload_folder=tmp_path,
        quantization_config=QuantizerConfig("int4", kv_cache="int8"),
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        asset_model_dir, quantization_config=QuantizerConfig("int4", kv_cache="int8")
    )
    for cache in (None, "static"):
        found, expected = (
            each.generate(ids(), max_new_tokens=4, do_sample=False, cache_implementation=cache, disable_compile=True)
            for each in (model, loaded)
        )
        assert torch.equal(found, expected)


def test_calls_in_one_expression(tmp_path):
    """`.to` of a model that nothing else holds gives a model with all of its methods; its end frees the memory."""
    hf_quant.quantize_(build("llama"), QuantizerConfig("int8", kv_cache="int4")).save_pretrained(tmp_path)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path)
    expected = load().generate(ids(), **GREEDY)
    gc.collect()
    gc.disable()
    try:
        model = load().to("cpu").to(device="cpu")
        result = model.generate(ids(), return_dict_in_generate=True, **GREEDY)
        assert torch.equal(result.sequences, expected) and isinstance(result.past_key_values, QuantizedCache)
        del result
        with pytest.raises(ValueError, match="casting it to"):
            model.to(torch.float64)
        assert "_upload_modified_files" in model.__dict__  # writes the card of a push
        with hf_quant.capture_generate(load().to("cpu")):
            pass
        gone = weakref.ref(model.model.layers[0].mlp.up_proj.qdata)
        copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        del model
        assert gone() is None
    finally:
        gc.enable()
    for model in copies:
        assert torch.equal(model.generate(ids(), **GREEDY), expected)


def test_compiled_generate_settles_on_as_many_graphs_as_in_16_bit():
    """Two lengths in turn: after the first call of each nothing is compiled any more."""
    found = []
    for config in (None, {"weights": "int4", "kv_cache": "int8"}):
        torch._dynamo.reset()
        counters.clear()
        model = build("llama")
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
        if config is not None:
            hf_quant.quantize_(model, config)
        model.generation_config.cache_implementation = "static"
        model.forward = torch.compile(model.forward, dynamic=False, backend="eager")
        graphs = []
        for length in (4, 16) * 2:
            before = counters["stats"]["unique_graphs"]
            model.generate(ids(1), **{**GREEDY, "max_new_tokens": length, "min_new_tokens": length})
            graphs.append(counters["stats"]["unique_graphs"] - before)
        found.append(graphs)
    assert found == [[2, 2, 0, 0]] * 2


def test_a_captured_model_in_one_expression(llama):
    def captured():
        model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig("int8", kv_cache="int8"))
        graphs.append(hf_quant.capture_generate(model))
        return model

    graphs = []
    model = captured().to("cpu")
    assert graphs[0].model() is model
    with graphs[0]:
        model.generate(ids(), **GREEDY)
        assert graphs[0].num_replays and not graphs[0].reasons
    assert "get_compiled_call" not in model.__dict__


@pytest.mark.parametrize(
    "config", ["int8", "int4", "int2", {"format": "int2", "sink_tokens": 0, "recent_tokens": 0}], ids=str
)
def test_left_padding_changes_nothing(asset, config):
    """A row gives what it gives alone, by every attention, also in memory that an unpadded prompt had before."""
    model, prompts = copy.deepcopy(asset[0]), asset[1]
    pads, new = 30, 12

    def logits(ids, mask, cache):
        """Read a prompt, several tokens at once and single ones."""
        positions, start, found = (mask.cumsum(1) - 1).clamp(min=0), 0, []
        for end in (ids.shape[1] - new, ids.shape[1] - 2, ids.shape[1] - 1, ids.shape[1]):
            part = {"position_ids": positions[:, start:end], "past_key_values": cache}
            found.append(model(ids[:, start:end], attention_mask=mask[:, :end], **part).logits)
            start = end
        return torch.cat(found, 1)

    short = prompts[:1, pads:]
    rows = torch.cat([torch.cat([torch.zeros(1, pads, dtype=torch.long), short], 1), prompts[1:2]])
    mask = torch.ones_like(rows)
    mask[0, :pads] = 0
    with torch.no_grad():
        alone = logits(short, torch.ones_like(short), QuantizedCache(model.config, config))
        for implementation, length in (
            ("sdpa", None),
            ("sdpa", 96),
            ("eager", None),
            ("hf_quant", None),
            ("hf_quant", 96),
        ):
            cache = QuantizedCache(model.config, config, max_cache_len=length)
            model.set_attn_implementation(implementation)
            logits(prompts[2:4], torch.ones_like(rows), cache)
            cache.reset()
            together = logits(rows, mask, cache)
            assert sqnr(alone, together[:1, pads:]) > 50, (implementation, length)


def peak_while(call):
    """Bytes of anonymous memory that a call takes at most, beside what was taken before."""
    process, peak, done = psutil.Process(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss - process.memory_info().shared)

    before = process.memory_info().rss - process.memory_info().shared
    thread = threading.Thread(target=watch)
    thread.start()
    call()
    done.set()
    thread.join()
    return peak - before


def bytes_of_a_long_prompt(length):
    fields = {
        **LM,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16384,
    }
    model = make(Kind("LlamaForCausalLM", "LlamaConfig", fields))
    model.eval()
    prompt = ids(1, length)
    config = {"format": "int4", "prefill_chunk_size": 256}
    hf_quant.quantize_(model, QuantizerConfig(None, kv_cache=config))
    options = {**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2}
    model.generate(prompt[:, :600], **options)
    return peak_while(lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options))


def test_a_long_prompt_is_read_in_parts():
    """Only the codes and one part take memory: there is no mask and no 16-bit cache of the whole prompt."""
    length = 12288
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # no garbage of other tests
        taken = pool.submit(bytes_of_a_long_prompt, length).result()
    codes = 2 * 4 * length * KVCacheConfig("int4").bytes_per_token(128)
    plain = 2 * 4 * length * 128 * 4
    assert taken < 3 * codes + 24e6 < plain


def test_generation_under_autocast(llama):
    """With a cache of fixed size, too, which transformers' own cannot do; and what is filled there is read behind."""
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int8"))
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    with torch.autocast("cpu", torch.bfloat16):
        expected = llama.generate(**padded(), **options)
        for cache_implementation in ("static", None):
            found = model.generate(**padded(), cache_implementation=cache_implementation, **options)
            assert sqnr(expected.logits[1].float(), found.logits[1].float()) > 20
    with torch.no_grad():
        assert model(ids(2, 1), past_key_values=found.past_key_values).logits.isfinite().all()


@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_in_inference_mode_and_outside(llama, cache_implementation):
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int8"))
    options = {**GREEDY, "cache_implementation": cache_implementation}
    with torch.inference_mode():
        expected = model.generate(ids(), **options)
    assert torch.equal(model.generate(ids(), **options), expected)


def test_a_later_config_without_a_cache(llama):
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int8"))
    hf_quant.quantize_(model, QuantizerConfig("int8"))
    assert model.config._attn_implementation == "sdpa" and "_prepare_cache_for_generation" not in model.__dict__
    assert type(model.generate(ids(), return_dict_in_generate=True, **GREEDY).past_key_values) is DynamicCache


def test_a_long_prompt_is_read_at_once_where_parts_would_be_wrong():
    fields = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_experts": 2, "mamba_d_state": 8}
    plain = make(Kind("JambaForCausalLM", "JambaConfig", {**LM, **fields}))
    config = QuantizerConfig(None, kv_cache={"format": "int8", "prefill_chunk_size": 7})
    model = hf_quant.quantize_(copy.deepcopy(plain), config)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    found, expected = (m.generate(**padded(), **options) for m in (model, plain))
    assert sqnr(expected.logits[0], found.logits[0]) > 100 and sqnr(expected.logits[1], found.logits[1]) > 30


def test_bytes_per_token_where_layers_differ():
    config = KINDS["layers of different heads"]
    config = getattr(transformers, config.config)(**config.fields)
    last = config.per_layer_config[1]
    per_token = 2 * last.num_key_value_heads * last.head_dim
    assert bytes_per_token(config, None) == 2 * per_token
    assert bytes_per_token(config, KVCacheConfig("int8")) == per_token + 2 * 2 * last.num_key_value_heads


def test_bytes_per_token_of_a_decoder_whose_config_has_an_encoder_too():
    """BartForCausalLM, and the decoder of Donut: numbers of layers and heads are the decoder's."""
    layers = {"encoder_layers": 5, "decoder_layers": 2, "encoder_attention_heads": 16, "decoder_attention_heads": 4}
    alone = transformers.MBartConfig(d_model=64, **layers, is_decoder=True, is_encoder_decoder=False)
    donut = transformers.VisionEncoderDecoderConfig(
        encoder=transformers.DonutSwinConfig().to_dict(), decoder=alone.to_dict()
    )
    for config in (alone, donut, transformers.MBartConfig(d_model=64, **layers)):
        assert bytes_per_token(config, None) == 2 * 2 * 2 * 64
        assert bytes_per_token(config, KVCacheConfig("int4")) == 2 * 2 * 4 * KVCacheConfig("int4").bytes_per_token(16)


def test_generations_at_the_same_time(llama):
    """Each has a cache of its own, though the last one is kept."""
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int8"))
    options, found = {**GREEDY, "cache_implementation": "static"}, {}
    prompts = [ids(2, length) for length in (20, 17, 20, 12)]
    expected = [model.generate(prompt, **options) for prompt in prompts]

    def generate(index):
        found[index] = model.generate(prompts[index], **options)

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[index], tokens) for index, tokens in enumerate(expected))


def test_only_long_prompts_are_read_in_parts(llama, monkeypatch):
    """And at once where the caller wants the hidden states of all positions."""
    model = hf_quant.quantize_(
        copy.deepcopy(llama), QuantizerConfig(None, kv_cache={"format": "int8", "prefill_chunk_size": 8})
    )
    lengths, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: lengths.append(k["input_ids"].shape[1]) or forward(*a, **k))
    options = {**GREEDY, "return_dict_in_generate": True}
    for cache_implementation in (None, "static"):
        options["cache_implementation"] = cache_implementation
        lengths.clear()
        model.generate(ids(2, 8), **options)
        assert lengths[:2] == [8, 1]
        lengths.clear()
        model.generate(ids(2, 20), **options)
        assert lengths[:4] == [8, 8, 4, 1]
    assert model.generate(ids(2, 20), output_hidden_states=True, **options).hidden_states[0][0].shape[1] == 20


def test_a_prompt_in_parts_that_is_compiled(llama, caplog):
    """The second generation compiles nothing, as with transformers' cache."""
    model = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int8"))
    compile_config = CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    compile_config._compile_all_devices = True
    options = {**GREEDY, "cache_implementation": "static", "prefill_chunk_size": 7, "compile_config": compile_config}
    first = model.generate(ids(), **options)
    memory, compiled = model._prepare_cache_for_generation.static.layers[0].k_codes.data_ptr(), dict(counters["stats"])
    assert compiled["unique_graphs"] > 0
    # Records of torch's trace, and cycles of its frames, may hold the cache: it would not be used again.
    caplog.clear()
    gc.collect()
    assert torch.equal(model.generate(ids(), **options), first)
    assert counters["stats"]["unique_graphs"] == compiled["unique_graphs"]
    assert model._prepare_cache_for_generation.static.layers[0].k_codes.data_ptr() == memory


def test_a_cache_is_added_to_a_quantized_model_and_taken_back(llama, tmp_path):
    model = hf_quant.quantize_(copy.deepcopy(llama), "int4")
    codes = model.model.layers[0].mlp.up_proj.qdata.clone()
    options = {**GREEDY, "return_dict_in_generate": True}
    before = model.generate(ids(), **options)
    hf_quant.quantize_(model, QuantizerConfig(None, kv_cache="int8"))
    assert type(model.generate(ids(), **options).past_key_values) is QuantizedCache
    assert torch.equal(model.model.layers[0].mlp.up_proj.qdata, codes)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again.generate(ids(), **options).past_key_values) is QuantizedCache
    summary = inspect_checkpoint(tmp_path)
    assert str(summary).endswith("KV cache int8") and summary.config.kv_cache == "int8"
    assert before.sequences.shape == (2, 32)
    alone = hf_quant.quantize_(copy.deepcopy(llama), QuantizerConfig(None, kv_cache="int8"))
    assert alone.config._attn_implementation == "hf_quant"
    hf_quant.dequantize_(alone)
    assert type(alone.generate(ids(), **options).past_key_values) is DynamicCache
    assert alone.config._attn_implementation == "sdpa" and not hasattr(alone.config, "quantization_config")
    with pytest.raises(ValueError, match="nothing in this"):
        hf_quant.dequantize_(alone)


def test_gradients_reach_what_reads_the_cache(llama):
    """Gradients flow through this pass and not into cached tokens, as with a cache in 16 bit."""
    model, grads = copy.deepcopy(llama), []
    static = functools.partial(QuantizedCache, max_cache_len=30)
    for make_cache in (DynamicCache, QuantizedCache, static):
        model.zero_grad()
        cache = make_cache(config=model.config)
        with torch.no_grad():
            model(ids(1), past_key_values=cache)
        model(ids(1)[:, :4], past_key_values=cache).logits.square().mean().backward()
        layer = model.model.layers[0].self_attn
        grads.append(torch.cat([layer.q_proj.weight.grad, layer.k_proj.weight.grad, layer.v_proj.weight.grad]))
    assert sqnr(*grads[:2]) > 20 and sqnr(grads[0], grads[2]) > 20
