"""`KVCacheConfig`: what it accepts, what it stores, what a token takes."""

import json
from functools import wraps

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from hf_quant import KVCacheConfig, QuantizedCache, QuantizerConfig, plan, quantize_
from hf_quant.kv_cache import CACHES, cache_in, cache_name, host_cache_name


def test_defaults_depend_on_the_format():
    assert KVCacheConfig("INT8").format == "int8" and KVCacheConfig("fp8").format == "fp8_e4m3"
    int4 = KVCacheConfig("int4").resolved()
    assert (int4.group_size, int4.rotate_keys, int4.sink_tokens, int4.recent_tokens) == (64, True, 0, 0)
    assert int4.rotate_values and not KVCacheConfig("fp8").resolved().rotate_values
    # Positional arguments mean what they meant before values were rotated, and stored fields are read.
    assert KVCacheConfig("int4", 64, False, 1, 2, 3) == KVCacheConfig.of(
        {
            "format": "int4",
            "group_size": 64,
            "rotate_keys": False,
            "sink_tokens": 1,
            "recent_tokens": 2,
            "prefill_chunk_size": 3,
        }
    )
    int2 = KVCacheConfig("int2", recent_tokens=8).resolved()
    assert (int2.group_size, int2.sink_tokens, int2.recent_tokens) == (32, 4, 8)
    assert int2.resolved() == int2


@pytest.mark.parametrize("value", ["int4", {"format": "int4"}, {"format": "int4", "recent_tokens": 32}])
def test_a_config_is_stored_as_it_was_written(value):
    config = QuantizerConfig("int4", kv_cache=value)
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["kv_cache"] == ("int4" if value == {"format": "int4"} else value)
    assert QuantizerConfig.from_dict(stored) == config
    assert QuantizerConfig("int4", kv_cache=KVCacheConfig.of(value)) == config


def test_only_the_cache_may_be_quantized():
    assert QuantizerConfig(None, kv_cache="int8").quantizes_no_weights
    with pytest.raises(ValueError, match="nothing to quantize"):
        QuantizerConfig(None)


# Bits per element: codes, and 16 bits for each scale and offset.
@pytest.mark.parametrize(
    ("format", "D", "bits"),
    [
        ("int8", 128, 8.125),
        ("int8", 64, 8.25),
        ("fp8", 128, 8.125),
        ("int4", 128, 4.5),
        ("int4", 80, 4.4),  # one group: 64 does not divide 80
        ("int4", 96, 4 + 32 / 96),
        ("int2", 128, 3.0),
        ("int2", 80, 2.4),
        ("int2", 96, 3.0),
    ],
)
def test_bytes_per_token(format, D, bits):
    assert KVCacheConfig(format).bytes_per_token(D) == bits * D / 8


def test_groups_are_chosen_or_given():
    assert KVCacheConfig("int4", group_size=128).layout(256).groups == 2
    assert KVCacheConfig("int8", group_size=32).layout(128) == (128, 128, 4, 1)
    assert KVCacheConfig("int4").layout(8).groups == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "int3"}, "'int3'; allowed: int8, fp8_e4m3, int4, int2, fp8"),
        ({"format": None}, "None; allowed"),
        ({"format": "int4", "group_size": 24}, "a multiple of 16"),
        ({"format": "int4", "group_size": 0}, "group_size of a cache is 0"),
        ({"format": "int4", "recent_tokens": -1}, "recent_tokens of a cache is -1"),
        ({"format": "int4", "sink_tokens": True}, "sink_tokens of a cache is True"),
        ({"format": "int4", "prefill_chunk_size": 0}, "prefill_chunk_size of a cache is 0"),
        ({"format": "int4", "rotate_keys": 1}, "rotate_keys is 1"),
        ({"format": "int4", "rotate_values": "no"}, "rotate_values is 'no'"),
        ({"format": "int4", "sink_tokens": 10**12}, "sink_tokens of a cache is 1000000000000; needs .* to 4096"),
        ({"format": "int4", "bits": 4}, "any of"),
        ({"group_size": 64}, "needs a format"),
        (7, "kv_cache is 7"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig.of(fields)
    with pytest.raises(ValueError, match=message):
        QuantizerConfig("int4", kv_cache=fields)


def test_heads_that_do_not_fill_words():
    with pytest.raises(ValueError, match="heads of 20 channels: their int4 codes .* allowed: int8, fp8_e4m3$"):
        KVCacheConfig("int4").layout(20)


def test_a_model_in_place_of_its_config():
    with pytest.raises(ValueError, match="config is a Linear; needs the config of a model .*: give model.config"):
        QuantizedCache(nn.Linear(1, 1), "int8")


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_has_the_name_of_the_hosts_version(name):
    """transformers 5.24 renamed the arguments; code from elsewhere may have the old names under it, too."""
    hosts = {
        "cache": lambda ids, cache=None: None,
        "past_key_values": lambda ids, past_key_values=None: None,
        "cache_params": lambda ids, cache_params=None, **kwargs: None,
        "layer_past": lambda ids, layer_past=None: None,
    }
    host = hosts[name]
    assert cache_name(host) == name and cache_name(wraps(host)(lambda **kwargs: host(**kwargs))) == name
    assert cache_in({"use_cache": True, name: 1}) == 1 and cache_in(dict.fromkeys(CACHES)) is None
    assert cache_name(lambda **kwargs: kwargs) == host_cache_name() == cache_name(LlamaForCausalLM.forward)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_no_older_name_is_given_to_a_model():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).eval()
    quantize_(model, QuantizerConfig(None, kv_cache="int8"))
    found = model.generate(torch.arange(3, 9)[None], max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(found[host_cache_name()], QuantizedCache)


def test_a_plan_refuses_a_cache_without_layers_to_quantize():
    """Before any weight is read."""
    config = MambaConfig(hidden_size=64, num_hidden_layers=1, state_size=16, vocab_size=64)
    with pytest.raises(ValueError, match="no layer of a MambaConfig has a cache that can be quantized"):
        plan(MambaForCausalLM(config), QuantizerConfig("int4", kv_cache="int8"))
