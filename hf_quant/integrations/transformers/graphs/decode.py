"""Cache memory that generations take over from each other, and the steps that are captured on it."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.graphs.state import (
    CACHE,
    COUNTER,
    fingerprint,
    flatten,
    frozen,
    globals_of,
    holds_tensors,
    host_state,
    is_full,
    is_made,
    map_leaves,
    rebuild,
    tensors_of,
)
from hf_quant.kernels.gpu.counters import counters_of


if TYPE_CHECKING:
    from hf_quant.integrations.transformers.graphs.capture import DecodeGraphs

T = TypeVar("T")

MAX_GRAPHS = 16  # of one cache; more kinds of steps do not repeat


class Backend(Protocol):
    """Implementation of the capture of a step: `CudaGraphs`, or a replacement in tests."""

    def unavailable(self, device: torch.device) -> str | None:
        """Return the reason why nothing can be captured on a device, or None."""

    def warm_up(self, step: Callable[[], T], device: torch.device) -> T:
        """Run a step for the first time, on the stream that will capture it."""

    def capture(self, step: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        """Record a step without running it; return (its outputs, which every replay overwrites; the replay)."""


class CudaGraphs:
    """Capture into torch.cuda.CUDAGraph objects with separate memory: graphs may be replayed concurrently."""

    def __init__(self) -> None:
        self._local = threading.local()  # launches of other threads on a capturing stream would join the graph
        self._lock = threading.Lock()  # a capture begins with a synchronization, which breaks other captures

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        streams = self._local.__dict__.setdefault("streams", {})
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def unavailable(self, device: torch.device) -> str | None:
        """See `Backend`."""
        return None if device.type == "cuda" else f"the model is on {device.type}, which has no CUDA graphs"

    def warm_up(self, step: Callable[[], T], device: torch.device) -> T:
        """See `Backend`."""
        stream, current = self._stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _no_autocast_cache():
            outputs = step()
        current.wait_stream(stream)

        def used(value: Any) -> Any:  # keeps the allocator from reusing the memory before the stream is done
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(current)
            return value

        return map_leaves(outputs, used)

    def capture(self, step: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        """See `Backend`."""
        with self._lock, torch.cuda.device(device), _no_autocast_cache():
            graph = torch.cuda.CUDAGraph()
            with (
                counters_of(graph, device),
                torch.cuda.graph(graph, stream=self._stream(device), capture_error_mode="thread_local"),
            ):
                outputs = step()
        return outputs, graph.replay


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Cast weights again: a graph would read cached casts after the end of autocast, when they are freed."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class Layer:
    """The memory of one cache layer: attributes that its lazy initialization created, and the arguments."""

    def __init__(self, arguments: tuple, layer: Any, names: list[str]) -> None:
        self.arguments = arguments
        for name, value in tensors_of(layer).items():
            if value.is_inference():  # created with the layer; cannot be written outside of inference mode
                setattr(layer, name, value.clone())
        self.state = {name: layer.__dict__[name] for name in names}
        self.tensors = [(name, value) for name, value in self.state.items() if isinstance(value, Tensor)]
        # Mostly empty: the tensors are zero.
        self.initial = {name: value.clone() for name, value in self.tensors if bool((value != 0).any())}

    def give(self, layer: Any) -> None:
        """Initialize a layer as an empty one with this memory."""
        layer.__dict__.update(self.state)
        for name, value in self.tensors:
            value.copy_(self.initial[name]) if name in self.initial else value.zero_()


class Graph:
    """One kind of step: its input buffers and, from its second use on, its outputs and its replay."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.buffers = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs]
        self.outputs: Any = None
        self.replay: Callable[[], None] | None = None


class Memory:
    """The cache memory for one batch size and cache structure, and the graphs that read and write it."""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[Layer | None] = [None] * num_layers  # None before the layer's initialization
        self.user: weakref.ref | None = None  # the cache; no other cache gets this memory while that one exists
        self.graphs: dict[tuple, Graph] = {}  # by everything that a step depends on
        self.fingerprint: tuple | None = None  # state of the model from which the graphs were captured
        self.reason: str | None = None  # why steps with this cache are not captured

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None

    def lend_to(self, cache: Any) -> None:
        """Let the layers of a cache take this memory when their first tokens initialize them."""
        self.user = weakref.ref(cache)
        for index, layer in enumerate(cache.layers):
            if hasattr(type(layer), "lazy_initialization"):
                layer.lazy_initialization = Initialize(self, index, layer)

    def initialize(self, index: int, layer: Any, lent: dict[str, Tensor], *args: Tensor) -> None:
        """Give a layer its memory, or let it allocate; `lent` are the tensors that the layer had before."""
        arguments = tuple((t.shape[:-2], t.shape[-1], t.dtype, t.device) for t in args)
        with torch.inference_mode(False), torch.no_grad():
            known = self.layers[index]
            if known is not None and known.arguments == arguments:
                known.give(layer)
            else:
                before = dict(layer.__dict__)
                type(layer).lazy_initialization(layer, *args)
                after = layer.__dict__
                names = [n for n in after if n in lent or n not in before or before[n] is not after[n]]
                self.layers[index] = Layer(arguments, layer, names)
                self.graphs.clear()

    def is_in(self, cache: Any) -> bool:
        """True if the cache still has the tensors that were lent to it."""
        for known, layer in zip(self.layers, cache.layers):
            if known is not None:
                state = layer.__dict__
                for name, value in known.tensors:
                    if state.get(name) is not value:
                        return False
        return True

    def why_not_lent(self, cache: Any) -> str | None:
        """Return the reason why a cache has tensors that were not lent to it, or None."""
        for known, layer in zip(self.layers, cache.layers):
            hook = layer.__dict__.get("lazy_initialization")
            lent = hook.tensors if isinstance(hook, Initialize) else {} if known is None else known.state
            for name, value in layer.__dict__.items():
                if isinstance(value, Tensor) and lent.get(name) is not value:
                    return f"a {type(layer).__name__} makes its `{name}` in a way that is not known"
                if holds_tensors(value):
                    return f"a {type(layer).__name__} keeps tensors in its `{name}`"
        return None


class Initialize:
    """Replacement of a layer's `lazy_initialization`, used once; the reference is weak, as a cycle keeps the cache."""

    def __init__(self, memory: Memory, index: int, layer: Any) -> None:
        self.memory, self.index, self.layer = memory, index, weakref.ref(layer)
        self.tensors = tensors_of(layer)  # before its initialization

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        layer = self.layer()
        del layer.lazy_initialization
        if kwargs or not all(isinstance(a, Tensor) for a in args):  # unknown memory: `why_not_lent` returns the reason
            layer.lazy_initialization(*args, **kwargs)
        else:
            self.memory.initialize(self.index, layer, self.tensors, *args)


class Decoder:
    """Callable that one `generate` uses instead of the model: it replays steps of one token."""

    def __init__(self, graphs: "DecodeGraphs", memory: Memory, cache: Any) -> None:
        self.graphs, self.memory, self.cache = graphs, memory, weakref.ref(cache)
        # Windows count their tokens in Python: a full window changes the step, and the host must create the masks.
        self.windows = [weakref.ref(layer) for layer in cache.layers if hasattr(layer, COUNTER)]
        self.state: tuple | None = None

    def __call__(self, **inputs: Any) -> Any:
        model, memory, cache = self.graphs.model(), self.memory, self.cache()
        ids = inputs.get("input_ids")
        if not (isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1):
            return model(**inputs)
        found = flatten(inputs, cache)
        reason = memory.reason
        if found is None:
            reason = "the model is given what cannot be copied into buffers"
        elif not memory.is_in(cache):
            reason = "the tensors of the cache were replaced"
        elif self.windows and not is_made(inputs.get("attention_mask")):
            reason = "this version of transformers leaves the mask of a sliding window to the model"
        elif self.state is None:
            reason = memory.reason = memory.reason or memory.why_not_lent(cache)
        if reason is not None:
            self.graphs.note(reason)
            return model(**inputs)
        if self.state is None:  # once per generation, after the prompt, which may have changed the modules
            self.state, found_now = globals_of(model), fingerprint(model)
            if found_now != memory.fingerprint:
                memory.graphs.clear()
                memory.fingerprint = found_now
        tensors, spec = found
        key = (self.state, spec, tuple([is_full(layer()) for layer in self.windows]))
        with torch.inference_mode(False), torch.no_grad():  # results of inference mode could not be used outside of it
            return self.step(model, key, inputs, tensors, cache)

    def step(self, model: nn.Module, key: tuple, inputs: dict[str, Any], tensors: list[Tensor], cache: Any) -> Any:
        """Run, capture or replay one token."""
        graphs, memory = self.graphs, self.memory
        graph = memory.graphs.get(key)
        is_new = graph is None
        if is_new:
            graph = Graph(tensors)
        for buffer, value in zip(graph.buffers, tensors):
            buffer.copy_(value)
        if is_new:
            before = [_seen(layer) for layer in cache.layers]
            arguments = rebuild(inputs, iter(graph.buffers))
            outputs = graphs.backend.warm_up(partial(model, **arguments), graph.buffers[0].device)
            self.watch(cache, before)
            if len(memory.graphs) >= MAX_GRAPHS:
                memory.graphs.clear()
            memory.graphs[key] = graph
            return outputs
        if graph.replay is None:
            self.capture(graph, model, rebuild(inputs, iter(graph.buffers)), cache)
        else:
            for layer in self.windows:
                layer().cumulative_length_int += 1  # as in the captured step
        graph.replay()
        graphs.num_replays += 1
        return map_leaves(graph.outputs, lambda v: v.clone() if isinstance(v, Tensor) else cache if v is CACHE else v)

    def capture(self, graph: Graph, model: nn.Module, arguments: dict[str, Any], cache: Any) -> None:
        """Capture a step. Raises ValueError, with an unchanged cache, if the step cannot be part of a graph."""
        before = [host_state(layer) for layer in cache.layers]
        try:
            outputs, replay = self.graphs.backend.capture(partial(model, **arguments), graph.buffers[0].device)
        except BaseException as error:
            for layer, state in zip(cache.layers, before):
                layer.__dict__.update(state)
            if not isinstance(error, RuntimeError):
                raise
            raise ValueError(
                f"a decoding step of this {type(model).__name__} cannot be captured into a graph: {error}. Call "
                "`release()` on what capture_generate returned: generate then runs as before"
            ) from error
        graph.outputs, graph.replay = map_leaves(outputs, lambda v: CACHE if v is cache else v), replay
        self.graphs.num_captures += 1

    def watch(self, cache: Any, before: list[dict[str, Any]]) -> None:
        """Check, after the first step of a kind, that it changed nothing in Python; else record the reason."""
        memory = self.memory
        for layer, old in zip(cache.layers, before):
            new = _seen(layer)
            changed = next((n for n in new if n != COUNTER and (n not in old or old[n] != new[n])), None)
            if changed is not None:
                memory.reason = f"a {type(layer).__name__} changes its `{changed}` in Python"
        if not memory.is_in(cache):
            memory.reason = f"a {type(cache).__name__} does not keep its tensors"
        memory.reason = memory.reason or memory.why_not_lent(cache)


def _seen(layer: Any) -> dict[str, Any]:
    """Return the Python state of a layer as values that do not follow changes in place."""
    return {name: frozen(value) for name, value in host_state(layer).items()}
