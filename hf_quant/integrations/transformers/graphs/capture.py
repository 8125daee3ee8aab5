"""`capture_generate`: `model.generate` whose decoding step is captured once and replayed.

On a CPU a step is a few native calls, see `cpu`. On a GPU it is a CUDA graph: one token of a small batch is dozens of
launches per layer, each longer on the host than on the GPU. Llama-3.1-8B in 16 bit decodes at 41 tokens/s in eager
`generate` on an H100 (bitsandbytes, benchmarking/README.md), where its bytes allow 220. A replay is one launch.
Nothing is compiled, unlike with the way of transformers (`cache_implementation="static"` alone, which calls
torch.compile).

A step can be replayed if the addresses of its tensors are fixed and the decisions of its Python code do not change.
Therefore inputs are copied into buffers, and the static cache, which every `generate` creates anew, gets the memory of
an earlier one, zeroed. Everything else that a step depends on is compared, and a step that differs is captured anew:
shapes and values of the inputs, parameters, buffers and attributes of the modules (adapters, hooks), the attention
implementation, autocast. The first step of a kind runs without a graph (its kernels are compiled), the second is
captured. Meanwhile the cache is observed: a cache that changes anything in Python except the length of a sliding
window is not captured. What cannot be captured runs as before; `DecodeGraphs.reasons` records the reason.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from hf_quant.integrations.methods import ModelMethod
from hf_quant.integrations.transformers.graphs.cpu import TokenDecoder, TokenStep
from hf_quant.integrations.transformers.graphs.decode import Backend, CudaGraphs, Decoder, Memory
from hf_quant.integrations.transformers.graphs.state import frozen, host_state, tensors_of
from hf_quant.kv_cache import cache_in, host_cache_name


_MODES = ("greedy_search", "sample")
_DYNAMIC_ROPE = ("dynamic", "longrope")  # these read the length on the host
_MIN_UNIT = 256  # tokens; cache lengths are rounded up to a multiple


class DecodeGraphs:
    """The captured decoding of one model; see `capture_generate`. A context manager that releases it at the end.

    Attributes:
        num_captures, num_replays: number of steps that were captured, and replayed.
        reasons: {reason for running without a graph: number of generations or steps}.
    """

    def __init__(self, model: nn.Module, backend: Backend | None, max_caches: int) -> None:
        self.model, self.max_caches = weakref.ref(model), max_caches
        self.backend, self.serves_cpus = backend or CudaGraphs(), backend is None
        self.steps: list[TokenStep] = []  # on a CPU
        self.num_captures = self.num_replays = 0
        self.reasons: dict[str, int] = {}
        self._memories: OrderedDict[tuple, Memory] = OrderedDict()
        self._decoders: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by cache
        self._chosen = threading.local()
        self._lock = threading.Lock()
        for name in _METHODS:
            # A class that creates its own masks keeps its method.
            if name != "create_masks_for_generate" or not hasattr(model, name):
                setattr(model, name, _Method(model, name, self))

    def __enter__(self) -> "DecodeGraphs":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        lines = [f"{self.num_captures} captures, {self.num_replays} replays"]
        return "\n".join(lines + [f"without a graph, {count} x: {why}" for why, count in self.reasons.items()])

    def release(self) -> None:
        """Free graphs and cache memory; `generate` then runs as before."""
        model = self.model()
        for name in _METHODS:
            method = None if model is None else model.__dict__.get(name)
            if isinstance(method, _Method) and method.graphs is self:
                del model.__dict__[name]
                if method.host is not None:
                    model.__dict__[name] = method.host
        self._memories.clear()
        self._decoders.clear()
        self.steps = []

    def note(self, reason: str) -> None:
        """Count a generation or step that runs without a graph."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    # Replacements of the model's methods; `host` is the replaced method.

    def _prepare_cache_for_generation(
        self,
        host: Callable[..., Any],
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        model = self.model()
        reason = _unsupported_reason(model, generation_config, generation_mode)
        if reason is None and self.serves_cpus and model.device.type == "cpu":
            result = host(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
            cache = cache_in(model_kwargs)
            if getattr(cache, "is_compileable", True) or not hasattr(cache, "layers"):
                self.note("the cache has a fixed size")
            else:
                self._decoders[cache] = TokenDecoder(self, cache)
            return result
        reason = reason or _static_unsupported_reason(model, self.backend, generation_config, model_kwargs)
        if reason is None:
            given, longest = generation_config.cache_implementation, getattr(model, "_previous_max_cache_length", -1)
            generation_config.cache_implementation = "static"
            model._previous_max_cache_length = -1  # not the longest so far, because unfilled columns are read, too
            length = _rounded(max_cache_length)
            try:
                result = host(generation_config, model_kwargs, generation_mode, batch_size, length)
            finally:
                generation_config.cache_implementation = given
            cache = cache_in(model_kwargs)
            reason = _memory_unsupported_reason(cache)
            if reason is None:
                rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
                with self._lock:
                    memory = self._memory_for(rows, cache)
                    memory.lend_to(cache)
                self._decoders[cache] = Decoder(self, memory, cache)
                return result
            model_kwargs.pop(host_cache_name(), None)  # the host would compile the steps of a static cache
            model._previous_max_cache_length = longest
        self.note(reason)
        return host(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    def _valid_auto_compile_criteria(
        self, host: Callable[..., bool], model_kwargs: dict[str, Any], generation_config: Any
    ) -> bool:
        decoder = self._decoder_of(cache_in(model_kwargs))
        self._chosen.decoder = decoder  # `get_compiled_call` is called next, without the cache
        return decoder is not None or host(model_kwargs, generation_config)

    def get_compiled_call(self, host: Callable[..., Any], compile_config: Any) -> Callable[..., Any]:
        """Return the decoder that `_valid_auto_compile_criteria` has just found, or the compiled call of the host."""
        decoder = self._chosen.__dict__.pop("decoder", None)
        return host(compile_config) if decoder is None else decoder

    def _update_model_kwargs_for_generation(
        self, host: Callable[..., Any], outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        decoder = self._decoder_of(cache_in(model_kwargs))
        is_one = not args and kwargs.get("num_new_tokens", 1) == 1
        if isinstance(decoder, TokenDecoder) and is_one and decoder.moved_on(model_kwargs):
            return model_kwargs
        return host(outputs, model_kwargs, *args, **kwargs)

    def create_masks_for_generate(self, host: Callable[..., Any], **kwargs: Any) -> Any:
        """Leave the mask of a captured step to the model, which creates it inside the graph."""
        cache, mask = cache_in(kwargs), kwargs.get("attention_mask")
        decoder = self._decoder_of(cache)
        is_one = kwargs["inputs_embeds"].shape[1] == 1
        if not isinstance(decoder, Decoder) or decoder.windows or decoder.memory.reason or not is_one:
            return host(**kwargs)
        # The length must not grow. Only the prompt has padding; all later tokens are real.
        length = max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
        return mask if mask is None else F.pad(mask, (0, length - mask.shape[1]), value=1)

    def _decoder_of(self, cache: Any) -> Decoder | TokenDecoder | None:
        return self._decoders.get(cache) if hasattr(cache, "layers") else None

    def _memory_for(self, rows: int, cache: Any) -> Memory:
        """Return memory of this structure that no cache uses."""
        structure = tuple((type(layer), frozen(host_state(layer))) for layer in cache.layers)
        key = (rows, type(cache), structure)
        memory = self._memories.pop(key, None)
        if memory is None or not memory.is_free:  # the owner of that cache, a result or a thread, keeps the memory
            memory = Memory(len(cache.layers))
        self._memories[key] = memory
        while len(self._memories) > self.max_caches:
            self._memories.popitem(last=False)
        return memory


_METHODS = (
    "_prepare_cache_for_generation",
    "_valid_auto_compile_criteria",
    "get_compiled_call",
    "create_masks_for_generate",
    "_update_model_kwargs_for_generation",
)


class _Method(ModelMethod):
    """A method of one model that calls a `DecodeGraphs`. A copy of the model has the method of the host again."""

    def __init__(self, model: nn.Module, name: str, graphs: DecodeGraphs | None = None) -> None:
        self.graphs = graphs
        super().__init__(model, name)

    def bind(self, model: nn.Module) -> None:
        super().bind(model)
        if self.graphs is not None:
            self.graphs.model = self.model

    def __setstate__(self, state: tuple) -> None:
        self.graphs = None
        super().__setstate__(state)

    def call_host(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.host is None and self.name == "create_masks_for_generate":  # a function, unless the class has a method
            from transformers.masking_utils import create_masks_for_generate

            return create_masks_for_generate(*args, **kwargs)
        return super().call_host(model, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        host = partial(self.call_host, self.model())
        return host(*args, **kwargs) if self.graphs is None else getattr(self.graphs, self.name)(host, *args, **kwargs)


def capture_generate(model: nn.Module, *, backend: Backend | None = None, max_caches: int = 4) -> DecodeGraphs:
    """Let `model.generate` capture the decoding of one token, and replay it.

    On a GPU a captured step is a CUDA graph. From the third token of a generation on, greedy search and sampling make
    one launch per token; the results equal eager `generate` with a static cache. Each new batch size and cache length
    (rounded up to a multiple of 256 tokens, or of an eighth of the next power of two) is captured once. Supports any
    decoder-only model of transformers on one GPU, quantized or not.

    On a CPU a captured step calls the native blocks of the layers, of the last norm and of the head, without the code
    of the model; results are those of eager `generate`, to the bit. Parameters, layers, hooks and settings are
    compared once per generation instead of once per token. It needs quantized weights, a growing KV cache, and a
    model whose decoder has a native block (see `fuse_activations_`).

    What cannot be captured runs as before, and `print` of the result says why. Other threads must not change the
    model while it generates.

    Args:
        model: a transformers model, or a PEFT model around one.
        backend: implementation of the capture; default: CUDA graphs on GPUs, native blocks on CPUs.
        max_caches: number of batch sizes and cache lengths that are kept, each with its cache memory; the least
            recently used are freed.

    Returns:
        the captured decoding; `release()`, or the end of `with capture_generate(model):`, frees it.

    Raises:
        ValueError: if the model has no `generate` of transformers, or is captured already; later in `generate`, if a
            step does something that no graph can contain, such as waiting for the GPU.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not all(hasattr(type(model), name) for name in _METHODS[:3]):
        raise ValueError(f"{type(model).__name__} has no `generate` of transformers; pass a model that has")
    if isinstance(model.__dict__.get("get_compiled_call"), _Method) and model.get_compiled_call.graphs is not None:
        raise ValueError(f"this {type(model).__name__} is captured already; release() what the first call returned")
    if max_caches < 1:
        raise ValueError(f"max_caches is {max_caches}; needs at least 1")
    return DecodeGraphs(model, backend, max_caches)


def _unsupported_reason(model: nn.Module, config: Any, mode: Any) -> str | None:
    """Return the reason why the arguments or the model of a generation prevent its capture, or None."""
    reasons = (
        (model.training, "the model is in training mode"),
        (model.config.is_encoder_decoder, "it is an encoder-decoder model"),
        (mode.value not in _MODES, mode.value.replace("_", " ")),
        (config.use_cache is False, "use_cache is False"),
        (config.compile_config is not None, "compile_config asks for torch.compile"),
        (len(set(getattr(model, "hf_device_map", {}).values())) > 1, "the model is spread over devices"),
        (any(hasattr(p, "full_tensor") for p in model.parameters()), "the model is sharded"),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def _static_unsupported_reason(
    model: nn.Module, backend: Backend, config: Any, model_kwargs: dict[str, Any]
) -> str | None:
    """Return the reason why a generation cannot have a static cache whose steps a backend captures, or None."""
    text = model.config.get_text_config(decoder=True)
    ropes = getattr(text, "rope_parameters", None) or {}
    rope_types = {r.get("rope_type") for r in (ropes, *ropes.values()) if isinstance(r, dict)}
    attention = str(getattr(text, "_attn_implementation", None))
    reasons = (
        (backend.unavailable(model.device), backend.unavailable(model.device)),
        (not model._can_compile_fullgraph, f"transformers knows no static cache for {type(model).__name__}"),
        (cache_in(model_kwargs) is not None, "the cache is the caller's"),
        (config.cache_implementation not in (None, "static"), f"the cache is {config.cache_implementation!r}"),
        (rope_types.intersection(_DYNAMIC_ROPE), "its rotary embedding reads the length on the host"),
        ("flash" in attention, f"{attention} reads the lengths on the host"),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def _memory_unsupported_reason(cache: Any) -> str | None:
    """Return the reason why a cache cannot use the memory of an earlier one, or None."""
    kind = type(cache).__name__
    if not hasattr(cache, "layers") or not cache.is_compileable or getattr(cache, "offloading", False):
        return f"a {kind} has no static memory"
    for layer in cache.layers:
        is_empty = not getattr(layer, "is_initialized", True) and hasattr(type(layer), "lazy_initialization")
        if not is_empty and tensors_of(layer):
            return f"a {type(layer).__name__} is initialized at once"
        more = next((name for name in dir(type(layer)) if name.startswith("lazy_initialization_")), None)
        if more is not None:
            return f"a {type(layer).__name__} makes more in its `{more}`"
        if any(isinstance(value, dict | list) for value in host_state(layer).values()):
            return f"a {type(layer).__name__} keeps its states in dicts or lists"
    return None


def _rounded(length: int) -> int:
    """Round a cache length up to an eighth of the next power of two, so that few lengths are captured."""
    unit = max(_MIN_UNIT, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // unit) * unit
