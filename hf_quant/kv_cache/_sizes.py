"""Memory per token of a model's cache, and the check that a model has a cache."""

import copy
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from hf_quant.kv_cache._cache import check_layers, quantized_layers
from hf_quant.kv_cache._config import KVCacheConfig


_GROWING = (DynamicLayer, LinearAttentionAndFullAttentionLayer)  # layers that grow with the sequence


def bytes_per_token(config: Any, kv_cache: KVCacheConfig | None) -> int:
    """Return the bytes that one more token of a sequence adds to the cache, over all layers.

    kv_cache: None for a cache in 16 bit. Layers with a sliding window or linear attention stop growing and are not
    counted, and neither is an encoder. Raises ValueError if the config has no number or size of heads.
    """
    text = _decoder(config)
    layers = DynamicCache(config=text).layers
    each = text.per_layer_config  # sizes may differ between layers
    return sum(_layer_bytes(each[i], kv_cache) for i, layer in enumerate(layers) if type(layer) in _GROWING)


def _decoder(config: Any) -> Any:
    """Return the config of what generates, with the numbers of layers and heads of its decoder.

    A decoder that is a model of its own (BartForCausalLM, the MBart of Donut) has the config of one with an encoder:
    its `num_hidden_layers` and `num_attention_heads` are those of the encoder.
    """
    text = config.get_text_config(decoder=True)
    if text.is_encoder_decoder or not hasattr(text, "decoder_layers"):
        return text
    text = copy.deepcopy(text)
    text.is_encoder_decoder = True  # transformers then takes the fields of the decoder
    return text.get_text_config(decoder=True)


def _layer_bytes(text: Any, kv_cache: KVCacheConfig | None) -> int:
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    D = getattr(text, "head_dim", None)
    if D is None and getattr(text, "hidden_size", None) and heads:
        D = text.hidden_size // text.num_attention_heads
    if not isinstance(heads, int) or not isinstance(D, int):
        raise ValueError(
            f"a {type(text).__name__} does not say how many heads of which size its cache has; leave kv_cache out"
        )
    return heads * 2 * (2 * D if kv_cache is None else kv_cache.bytes_per_token(D))


def check_generates(model: Any, kv_cache: KVCacheConfig) -> None:
    """Raise ValueError if a model has no cache, or one that cannot be replaced.

    It does not generate, its config has no number of layers, transformers says that it makes its own (MiniMax), or no
    layer of it can be quantized (those with an indexer).
    """
    config: Any = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", lambda: False)
    if not can_generate() or not hasattr(config.get_text_config(decoder=True), "num_hidden_layers"):
        raise ValueError(
            f"kv_cache is {kv_cache.format!r}, but a {type(model).__name__} does not generate with a cache: leave it "
            "out"
        )
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        raise ValueError(
            f"kv_cache is {kv_cache.format!r}, but a {type(model).__name__} has a cache of its own, which cannot be "
            "quantized: leave it out"
        )
    check_layers(config, quantized_layers(config, kv_cache, None))


def describe(model: Any, kv_cache: KVCacheConfig) -> str:
    """Describe the memory of a model's cache in one line; the model may be on the meta device.

    Raises ValueError if the model has no cache.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return f"KV cache: {kv_cache.format}"
    check_generates(model, kv_cache)
    before, after = (bytes_per_token(config, cache) for cache in (None, kv_cache))
    bits = f"{16 * after / before:.3f} bits per element, " if before else ""
    return f"KV cache: {kv_cache.format}, {bits}{before:,} -> {after:,} bytes per token of a sequence"
