"""Make `model.generate` use a quantized KV cache if the model's `QuantizerConfig` has a `kv_cache`.

`attach` replaces one method of the model: the method by which transformers makes a cache for a generation. A cache
that the caller passes, and a `cache_implementation` that selects another kind ("dynamic", "quantized", ...), are used
as they are; "static", "offloaded" and "offloaded_static" select the memory of the cache, which then holds codes.
"""

import inspect
import logging
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from hf_quant.integrations.methods import ModelMethod
from hf_quant.kv_cache import (
    KVCacheConfig,
    QuantizedCache,
    QuantizedLayer,
    cache_in,
    check_generates,
    host_cache_name,
    is_quantized,
    quantized_layers,
    register_attention,
)
from hf_quant.quantize import stored_config


logger = logging.getLogger(__name__)

_METHOD = "_prepare_cache_for_generation"
_BATCHING = "init_continuous_batching"
_STATIC = ("static", "offloaded_static")
_GENERAL = "transformers.generation.utils"  # the module of methods that models inherit
_PLACES = (None, "offloaded", *_STATIC)
_AT_ONCE = ("jamba",)  # model types whose states of linear attention would start anew with each part of a prompt
_IN_PARTS = ("greedy_search", "sample", "beam_search", "beam_sample")  # modes that read the prompt once, at the start
_TEXT = ("attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep")


def kv_cache_of(model: nn.Module) -> KVCacheConfig | None:
    """Return the KV cache that the model's config asks for, or None."""
    config = stored_config(model)
    return None if config is None or config.kv_cache is None else KVCacheConfig.of(config.kv_cache)


def attach(model: nn.Module) -> None:
    """Make `generate` use the KV cache that the model's config asks for.

    Raises ValueError if the model does not generate, or has no layer whose cache can be quantized.
    """
    config = kv_cache_of(model)
    if config is None:
        detach(model)  # an earlier config may have asked for a cache
        return
    check_generates(model, config)
    register_attention()
    if not _asks_for_cache(type(model).generate, type(model), set()):
        logger.warning(
            "kv_cache is %r, but the `generate` of a %s makes its own cache, which stays in 16 bit: leave it out",
            config.format,
            type(model).__name__,
        )
    text = model.config.get_text_config(decoder=True)
    # "hf_quant" attention passes masks on: it caps no scores, and models that select tokens by an indexer add the
    # selection to masks made for "sdpa".
    caps_scores = getattr(text, "attn_logit_softcapping", None) is not None
    if not caps_scores and not any(hasattr(m, "update_indexer") for m in DynamicCache(config=model.config).layers):
        _set_attention(model, "sdpa", "hf_quant")
    if not isinstance(model.__dict__.get(_METHOD), CacheMethod):
        setattr(model, _METHOD, CacheMethod(model, _METHOD))
        if hasattr(type(model), _BATCHING):
            setattr(model, _BATCHING, BatchingMethod(model, _BATCHING))
    _detach_parts(model)
    for part in _parts(model):
        if type(part.config.get_text_config(decoder=True)) is type(text) and _METHOD not in part.__dict__:
            setattr(part, _METHOD, PartCacheMethod(part, config))


def _asks_for_cache(function: Any, model_class: type, seen: set[Any]) -> bool:
    """Return True if a `generate` calls the method that makes caches, or another `generate`.

    The functions of the model's own file that it calls are read, too: SpeechT5's loop is one, MusicGen's is not.
    """
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) or function in seen:
        return False
    if function.__module__ == _GENERAL:
        return function.__name__ == "generate"
    seen.add(function)
    names = function.__code__.co_names
    called = (getattr(model_class, name, None) or function.__globals__.get(name) for name in names)
    return not {_METHOD, "generate"}.isdisjoint(names) or any(_asks_for_cache(f, model_class, seen) for f in called)


def _parts(model: nn.Module) -> list[Any]:
    """The models inside of a model that generate: BLIP-2, Kosmos-2 and others call the `generate` of one."""
    return [m for m in model.modules() if m is not model and getattr(m, "can_generate", lambda: False)()]


def _detach_parts(model: nn.Module) -> None:
    for part in _parts(model):
        if isinstance(part.__dict__.get(_METHOD), PartCacheMethod):
            del part.__dict__[_METHOD]


def detach(model: nn.Module) -> None:
    """Undo `attach`."""
    _detach_parts(model)
    if isinstance(model.__dict__.get(_METHOD), CacheMethod):
        del model.__dict__[_METHOD]
        model.__dict__.pop(_BATCHING, None)  # models of older pickles have none
        _set_attention(model, "hf_quant", "sdpa")


def _set_attention(model: nn.Module, before: str, after: str) -> bool:
    """Switch the submodel that has the cache from attention `before` to `after`; return True if it had the first."""
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation != before:
        return False
    name = next((n for n in model.config.sub_configs if getattr(model.config, n, None) is text), None)
    model.set_attn_implementation(after if name is None else {name: after})
    return True


class CacheMethod(ModelMethod):
    """The method of one model that makes its cache."""

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        register_attention()  # a model that is unpickled names it
        self.static: QuantizedCache | None = None  # the last generation's; compiled code refers to its memory
        self.lent: weakref.ref | None = None  # to the config that `generate` made: it lives as long as the generation
        self.lock = threading.Lock()

    @property
    def __func__(self) -> Any:  # Kyutai's speech-to-text binds the host's function to its codec
        return getattr(type(self.model()), self.name)

    def kv_cache(self) -> KVCacheConfig | None:
        return kv_cache_of(self.model())

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        **more: Any,
    ) -> None:
        model = self.model()
        config = self.kv_cache()
        if config is None or not _is_ours(model, config, generation_config, model_kwargs, max_cache_length):
            arguments = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
            return self.call_host(model, *arguments, **more)
        place = generation_config.cache_implementation
        if place in _STATIC:
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            length = _static_length(generation_config, max_cache_length)
            with self.lock:
                cache = self._static(model, config, rows, length, generation_config)
        else:
            cache = QuantizedCache(model.config, config, offloading=place == "offloaded")
        if model.config.is_encoder_decoder:
            from transformers.cache_utils import EncoderDecoderCache

            cross = QuantizedCache(model.config, config)
            cross.layers = [QuantizedLayer(cross.kv_cache) for _ in cross.layers]  # no window: all of the encoder's
            cache = EncoderDecoderCache(cache, cross)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        # A `generate` of the model's own file may name no mode (MusicGen Melody, RAG).
        in_parts = generation_mode is not None and generation_mode.value in _IN_PARTS
        in_parts = in_parts and not model.config.is_encoder_decoder
        in_parts = in_parts and model.config.get_text_config(decoder=True).model_type not in _AT_ONCE
        prompt = max_cache_length + 1 - (generation_config.max_new_tokens or 0)  # at most
        if in_parts and prompt > (config.prefill_chunk_size or prompt):
            is_asked = generation_config.prefill_chunk_size is not None
            # Reading in parts would return the layers' outputs of the last part alone, and tokens alone have parts.
            is_traced = generation_config.output_hidden_states or generation_config.output_attentions
            is_text = not any(isinstance(v, Tensor) and name not in _TEXT for name, v in model_kwargs.items())
            if is_text and not (is_asked or is_traced):
                generation_config.prefill_chunk_size = config.prefill_chunk_size
        model_kwargs[host_cache_name()] = cache
        # Under autocast the dtype of keys is not known yet, nor is the device of offloaded weights. For
        # "get_compiled_call" see `_static`.
        device = model.device
        is_free = device.type == "meta" or "get_compiled_call" in model.__dict__
        if place in _STATIC and not is_free and not torch.is_autocast_enabled(device.type):
            # Otherwise compiled code would allocate the memory, and a cache that is used again, with its memory
            # allocated, would need another compilation.
            text = model.config.get_text_config(decoder=True)  # 5.17 has no shapes for layers that differ
            shape = None if getattr(text, "is_heterogeneous", False) else model._get_static_cache_init_shape()
            if shape is not None:
                _allocate(cache, rows, shape, model.dtype, device, generation_config.prefill_chunk_size is not None)
        return None

    def _static(
        self, model: nn.Module, config: KVCacheConfig, rows: int, length: int, generation_config: Any
    ) -> QuantizedCache:
        """Return the last static cache, emptied, if it fits and nobody else can hold it, else a new one.

        Code that has replaced the compiled call (`capture_generate`) provides memory of its own for each cache.
        """
        offloading = generation_config.cache_implementation == "offloaded_static"
        last, is_free = self.static, self.lent is None or self.lent() is None
        self.static = self.lent = None
        fits = is_free and last is not None and last.kv_cache == config and last.offloading == offloading
        if not fits or last.get_max_length() < length or last.batch_size not in (-1, rows):
            last = QuantizedCache(model.config, config, max_cache_len=length, offloading=offloading)
        else:
            last.reset()
        if not generation_config.return_dict_in_generate and "get_compiled_call" not in model.__dict__:
            self.static, self.lent = last, weakref.ref(generation_config)
        return last


class BatchingMethod(ModelMethod):
    """The method of one model that begins continuous batching, whose cache and attention are its own, in 16 bit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        config = kv_cache_of(model)
        if config is not None:
            message = "In place of the %s cache of the model's QuantizerConfig, that of continuous batching is used"
            logger.warning(message, config.format)
        parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
        before = {"": model.config} | {name: part for name, part in parts.items() if part is not None}
        before = {name: part._attn_implementation for name, part in before.items()}
        is_changed = _set_attention(model, "hf_quant", "sdpa")
        manager = self.call_host(model, *args, **kwargs)
        if is_changed and hasattr(manager, "_original_attn_impl"):
            manager._original_attn_impl = before  # set when it stops
        return manager


class PartCacheMethod(CacheMethod):
    """The method of a model inside of another, whose config asks for the cache."""

    def __init__(self, model: nn.Module, config: KVCacheConfig) -> None:
        self.config = config
        super().__init__(model, _METHOD)

    def kv_cache(self) -> KVCacheConfig:
        return self.config

    def __getstate__(self) -> tuple[Any, ...]:
        return *super().__getstate__(), self.config

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        *rest, self.config = state
        super().__setstate__(tuple(rest))


def _allocate(
    cache: Any, rows: int, shape: tuple[Any, Any], dtype: torch.dtype, device: torch.device, in_parts: bool
) -> None:
    """Allocate a static cache for heads of the shape that a config names, of which some layers may have others.

    Quantized layers allocate again where it does not fit. Those in 16 bit cannot: they wait for the first states, as
    in transformers, unless a prompt is read in parts.
    """
    if in_parts:
        cache.early_initialization(rows, *shape, dtype, device)
        return
    for layer, heads, D in zip(cache.layers, *(n if isinstance(n, list) else [n] * len(cache.layers) for n in shape)):
        if is_quantized(layer) and not layer.is_initialized:
            nothing = torch.empty(rows, heads, 0, D, dtype=dtype, device=device)
            layer.lazy_initialization(nothing, nothing)


def _static_length(generation_config: Any, max_cache_length: int) -> int:
    return max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)


def _module_of(model: nn.Module, method: str) -> str:
    """The module that defines a method of a model's class; transformers' general one if there is no such method."""
    return getattr(getattr(type(model), method, None), "__module__", _GENERAL)


def _is_ours(
    model: nn.Module,
    config: KVCacheConfig,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    max_cache_length: int,
) -> bool:
    """Return True if this generation gets the quantized cache; else warn where the caller may expect it."""
    place = generation_config.cache_implementation
    if cache_in(model_kwargs) is not None or generation_config.use_cache is False:
        return False
    if not model._supports_default_dynamic_cache():
        return False
    why = None
    made_by = _module_of(model, _METHOD)  # transformers' general method, T5Gemma's, or another
    if made_by != _GENERAL and "t5gemma" not in made_by:
        why = f"a {type(model).__name__} makes its own: give generate a QuantizedCache as {host_cache_name()}"
    elif place not in _PLACES:
        why = f"cache_implementation={place!r} is used: leave it out to get that"
    elif place in _STATIC and _module_of(model, "_prepare_static_cache") != _GENERAL:  # Mllama: layers of images
        why = f"the one that a {type(model).__name__} makes for cache_implementation={place!r} is used"
    elif place in _STATIC and model.config.is_encoder_decoder:
        why = f"cache_implementation={place!r} of an encoder-decoder model has no quantized layers"
    elif place in _STATIC:
        layers = quantized_layers(model.config, config, _static_length(generation_config, max_cache_length))
        if not any(is_quantized(layer) for layer in layers):
            why = f"cache_implementation={place!r} has no layers of fixed size for this model that can be quantized"
    if why is not None:
        logger.warning("In place of the %s cache of the model's QuantizerConfig, %s", config.format, why)
    return why is None
