"""The scripts that measure quantized KV caches, on models that are small."""

import argparse

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import bench_generate
import cache_memory
from common import cache_quality, pages
from hf_quant import KVCacheConfig, QuantizedCache


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, **SIZES)).eval()


def test_the_table_in_the_docs_is_current():
    table = pages.markdown(cache_memory.rows_of(cache_memory.models(), cache_memory.CONTEXTS, 1))
    assert pages.is_current(cache_memory.SECTION, table), "run scripts/cache_memory.py --readme"


def test_memory_is_that_of_the_cache(model):
    rows = cache_memory.rows_of({"tiny": model.config}, [256], batch=3)
    cache = QuantizedCache(model.config, "int4")
    for layer in range(2):
        cache.update(torch.randn(3, 2, 256, 16).bfloat16(), torch.randn(3, 2, 256, 16).bfloat16(), layer)
    held = sum(x.codes.nbytes + x.pairs.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert rows[1][4] == f"{held / 1e9:.2f} GB"
    assert held == 256 * 3 * 2 * 2 * 2 * KVCacheConfig("int4").bytes_per_token(16)


def test_stretched_keys_leave_the_model_as_it_is(model):
    ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    before = model.model.layers[0].self_attn.k_proj.weight.clone()
    cache_quality.stretch_keys(model, 20.0, channels=1)
    assert torch.allclose(model(ids).logits, expected, atol=1e-4)
    assert (model.model.layers[0].self_attn.k_proj.weight / before).max() > 19
    cache_quality.stretch_keys(model, 1 / 20, channels=1)
    with pytest.raises(ValueError, match="leave --stretch-keys out"):
        cache_quality.stretch_keys(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96)), 2.0)


def test_quality_is_that_of_predictions_through_the_cache(model):
    ids = torch.randint(0, 96, (128,), generator=torch.Generator().manual_seed(0))
    args = argparse.Namespace(window=32, windows=3, prefill=8, step=5, padding=0)
    makes = {"16 bit": lambda: DynamicCache(config=model.config), "same": lambda: DynamicCache(config=model.config)}
    makes["int2"] = lambda: QuantizedCache(model.config, cache_quality.parse_cache("int2:recent_tokens=0"))
    found = cache_quality.measure(model, ids, makes, args)
    assert found["same"]["kl"] < 1e-9 and found["same"]["same_top_token"] == 1 and found["int2"]["kl"] > 1e-7
    windows = ids[:96].view(3, 32)
    scores = model(windows).logits[:, 7:-1].log_softmax(-1).gather(-1, windows[:, 8:, None])
    assert found["16 bit"]["perplexity"] == pytest.approx(scores.mean().neg().exp().item(), rel=1e-4)


def test_generation_is_measured_with_and_without_quantized_caches(model):
    args = argparse.Namespace(formats=["int8"], kv_cache=["int4"], only_both=False, head=None, rivals=None)
    args.unfused = False
    args.device, args.prompt_tokens, args.batch = "cpu", 12, 1
    models, _ = bench_generate.make_variants(model, args)
    assert list(models) == ["bf16", "int8", "int8, int4 cache", "bf16, int4 cache"]
    assert models["bf16, int4 cache"].lm_head.weight is model.lm_head.weight
    assert list(bench_generate.peaks(models, args)) == list(models)
    args.only_both = True
    assert list(bench_generate.make_variants(model, args)[0]) == ["bf16", "int8, int4 cache"]
