"""The quantized KV cache: `QuantizedCache`, its `KVCacheConfig`, and the attention that reads its codes.

The names are resolved at first use, like the names of `hf_quant`: `KVCacheConfig`, which every `QuantizerConfig`
needs, is imported without the layers and without transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from hf_quant.kv_cache._attention import attend
    from hf_quant.kv_cache._cache import QuantizedCache, is_quantized, quantized_layers, register_attention
    from hf_quant.kv_cache._config import KVCacheConfig
    from hf_quant.kv_cache._eager import IGNORED_OPTIONS, wants_weights
    from hf_quant.kv_cache._interface import (
        NATIVE_SDPA,
        computes_prompts,
        is_recorded,
        latent_mask,
        reads_codes,
        recorded_attention,
    )
    from hf_quant.kv_cache._latents import (
        LatentStates,
        attend_to_latents,
        attend_to_latents_by_products,
        attend_to_narrow,
    )
    from hf_quant.kv_cache._layers import QuantizedLayer
    from hf_quant.kv_cache._names import CACHES, cache_in, cache_name, host_cache_name
    from hf_quant.kv_cache._places import NEW_TOKENS, NextTokens, Places, held_tokens, next_tokens, takes_tokens
    from hf_quant.kv_cache._sizes import bytes_per_token, check_generates, describe
    from hf_quant.kv_cache._states import QuantizedStates

_HOME = {
    "CACHES": "_names",
    "IGNORED_OPTIONS": "_eager",
    "KVCacheConfig": "_config",
    "LatentStates": "_latents",
    "NATIVE_SDPA": "_interface",
    "NEW_TOKENS": "_places",
    "NextTokens": "_places",
    "Places": "_places",
    "QuantizedCache": "_cache",
    "QuantizedLayer": "_layers",
    "QuantizedStates": "_states",
    "attend": "_attention",
    "attend_to_latents": "_latents",
    "attend_to_latents_by_products": "_latents",
    "attend_to_narrow": "_latents",
    "bytes_per_token": "_sizes",
    "cache_in": "_names",
    "cache_name": "_names",
    "check_generates": "_sizes",
    "computes_prompts": "_interface",
    "describe": "_sizes",
    "held_tokens": "_places",
    "host_cache_name": "_names",
    "is_quantized": "_cache",
    "is_recorded": "_interface",
    "latent_mask": "_interface",
    "next_tokens": "_places",
    "quantized_layers": "_cache",
    "reads_codes": "_interface",
    "recorded_attention": "_interface",
    "takes_tokens": "_places",
    "wants_weights": "_eager",
    "register_attention": "_cache",
}

__all__ = [
    "CACHES",
    "IGNORED_OPTIONS",
    "KVCacheConfig",
    "LatentStates",
    "NATIVE_SDPA",
    "NEW_TOKENS",
    "NextTokens",
    "Places",
    "QuantizedCache",
    "QuantizedLayer",
    "QuantizedStates",
    "attend",
    "attend_to_latents",
    "attend_to_latents_by_products",
    "attend_to_narrow",
    "bytes_per_token",
    "cache_in",
    "cache_name",
    "check_generates",
    "computes_prompts",
    "describe",
    "held_tokens",
    "host_cache_name",
    "is_quantized",
    "is_recorded",
    "latent_mask",
    "next_tokens",
    "quantized_layers",
    "reads_codes",
    "recorded_attention",
    "register_attention",
    "takes_tokens",
    "wants_weights",
]


if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts every name

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
