"""`QuantizedCache`: a cache of transformers whose layers keep codes."""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_quant.kv_cache._config import KVCacheConfig
from hf_quant.kv_cache._layers import (
    CodeStorage,
    FirstPrompt,
    QuantizedHybridLayer,
    QuantizedLayer,
    QuantizedSlidingWindowLayer,
)
from hf_quant.kv_cache._static import QuantizedStaticLayer


class QuantizedCache(DynamicCache):
    """A KV cache in 8, 4 or 2 bits for any model of transformers that takes a cache.

        model.generate(**inputs, past_key_values=QuantizedCache(model.config, "int4"))

    Each token is quantized once, when it is added. Attention reads the codes if its implementation is "sdpa" (the
    default of transformers), "flash_attention_2", "flash_attention_3", "flex_attention" or "hf_quant", or "eager"
    where a trial shows that the model's own function computes the same (Gemma 2, gpt-oss); any other implementation
    dequantizes the layer that it reads, with a warning. Inside a prompt that is read at once, which are the first
    states of an empty cache, attention is computed in 16 bit.

    Most encoder-decoder models take a pair of caches, for the decoder and for the encoder:
    `EncoderDecoderCache(QuantizedCache(model.config, "int8"), DynamicCache(config=model.config))`.

    Layers with full attention and, unless `max_cache_len` is given, sliding windows are quantized. All other states
    (linear attention, indexers, windows of fixed size) stay as transformers stores them.

    Args:
        config: config of the model.
        kv_cache: a format ("int8", "fp8", "int4", "int2"), a `KVCacheConfig`, or a dict of its fields.
        max_cache_len: None: the cache grows. A number of tokens: memory of fixed size and address, for
            `torch.compile` and CUDA graphs.
        offloading: True keeps the layers that are not in use in CPU memory.

    Raises:
        ValueError: if the config is none of a model, the format does not exist, or no layer of the model would be
            quantized.
    """

    def __init__(
        self,
        config: Any,
        kv_cache: KVCacheConfig | str | dict[str, Any] = "int8",
        *,
        max_cache_len: int | None = None,
        offloading: bool = False,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise ValueError(
                f"config is a {type(config).__name__}; needs the config of a model of transformers: give model.config"
            )
        register_attention()
        self.kv_cache = KVCacheConfig.of(kv_cache)
        layers = check_layers(config, quantized_layers(config, self.kv_cache, max_cache_len))
        Cache.__init__(self, layers=layers, offloading=offloading, offload_only_non_sliding=max_cache_len is not None)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (tokens, offset) for a mask; tokens is a `FirstPrompt` if there are none yet."""
        tokens, offset = super().get_mask_sizes(query_length, layer_idx)
        if isinstance(tokens, FirstPrompt):
            tokens.cache = self
        return tokens, offset

    def note_padding(self, mask: Tensor | None, count: int) -> None:
        """Tell empty layers the padding of the tokens that come next: a mask [B, `count` or more], None without any.

        Padding in front of a sequence is in no frame, and its first token is the one behind. A sequence of padding
        alone begins at 0.
        """
        starts = () if mask is None else tuple(mask[:, :count].to(torch.uint8).argmax(1).tolist())
        for layer in self.layers:
            if is_quantized(layer) and layer.is_empty:
                layer.note_starts(starts if any(starts) else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized layers: codes, scales, 16-bit tokens, and room to grow."""
        return sum(layer.nbytes for layer in self.layers if is_quantized(layer))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kv_cache.format}, layers={self.layers})"


def register_attention() -> None:
    """Register the attention "hf_quant" with transformers, and let its own implementations read quantized caches."""
    from hf_quant.kv_cache import _interface  # imports the modeling code of transformers

    _interface.register()


def quantized_layers(config: Any, kv_cache: KVCacheConfig, max_cache_len: int | None) -> list[Any]:
    """Create the cache layers of a model as transformers does, quantized ones for all that can be quantized."""
    config = config.get_text_config(decoder=True)  # of Florence-2 that is BART's, which has two numbers of layers
    if max_cache_len is None:
        return [_quantized(layer, kv_cache) for layer in DynamicCache(config=config).layers]
    layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
    for i, layer in enumerate(layers):
        is_sliding = type(layer) is StaticSlidingWindowLayer and layer.max_cache_len == max_cache_len
        if type(layer) is StaticLayer or is_sliding:
            layers[i] = QuantizedStaticLayer(kv_cache, max_cache_len, is_sliding)
    return layers


def check_layers(config: Any, layers: list[Any]) -> list[Any]:
    """Return the layers of a cache. Raises ValueError if none of them is quantized."""
    if not any(is_quantized(layer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ValueError(
            f"no layer of a {type(config).__name__} has a cache that can be quantized: {kinds}; leave kv_cache out"
        )
    return layers


def _quantized(layer: Any, config: KVCacheConfig) -> Any:
    kind = type(layer)
    if kind is DynamicLayer:
        return QuantizedLayer(config)
    if kind is DynamicSlidingWindowLayer:
        return QuantizedSlidingWindowLayer(config, layer.sliding_window)
    if kind is LinearAttentionAndFullAttentionLayer:
        return QuantizedHybridLayer(config, layer.number_of_states)
    return layer


def is_quantized(layer: Any) -> TypeGuard[CodeStorage]:
    """True if a layer of a cache stores codes."""
    return isinstance(layer, QuantizedLayer | QuantizedSlidingWindowLayer | QuantizedStaticLayer)
