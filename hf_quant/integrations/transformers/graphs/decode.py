"""The memory of caches, which generations take over from each other, and the steps that are captured on it."""

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


if TYPE_CHECKING:
    from hf_quant.integrations.transformers.graphs.capture import DecodeGraphs

T = TypeVar("T")

MAX_GRAPHS = 16  # of one cache: more kinds of steps than that never repeat


class Backend(Protocol):
    """How a step is captured; `CudaGraphs`, or what a test puts in its place."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why nothing can be captured on a device, None if it can."""

    def warm_up(self, step: Callable[[], T], device: torch.device) -> T:
        """Run a step for the first time, where it will be captured."""

    def capture(self, step: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        """Record a step without running it: (its outputs, which every replay writes anew; the replay)."""


class CudaGraphs:
    """torch.cuda.CUDAGraph, each with memory of its own: graphs may be replayed side by side."""

    def __init__(self) -> None:
        self._local = threading.local()  # what others launch on a stream that captures would become part of the graph
        self._lock = threading.Lock()  # a capture begins with waiting for the device, which no other capture survives

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

        def used(value: Any) -> Any:  # here, so that its memory is not given to another step before that is done
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(current)
            return value

        return map_leaves(outputs, used)

    def capture(self, step: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        """See `Backend`."""
        with self._lock, torch.cuda.device(device), _no_autocast_cache():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream(device), capture_error_mode="thread_local"):
                outputs = step()
        return outputs, graph.replay


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Cast weights anew: a graph would go on reading casts that are freed at the end of the caller's autocast."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class Layer:
    """The memory of one cache layer: the attributes that its lazy initialization made, and for which arguments."""

    def __init__(self, arguments: tuple, layer: Any, names: list[str]) -> None:
        self.arguments = arguments
        for name, value in tensors_of(layer).items():
            if value.is_inference():  # made with the layer; it could not be changed outside of inference mode
                setattr(layer, name, value.clone())
        self.state = {name: layer.__dict__[name] for name in names}
        self.tensors = [(name, value) for name, value in self.state.items() if isinstance(value, Tensor)]
        self.initial = {n: t.clone() for n, t in self.tensors if bool((t != 0).any())}  # mostly none: all is zero

    def give(self, layer: Any) -> None:
        """Make a layer that is not initialized an empty one with this memory."""
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
    """The cache memory for one batch size and cache structure, and the graphs that read and write it.

    Attributes:
        layers: of each cache layer; None where nothing has been initialized.
        user: the cache that has this memory now. While it lives, nobody else gets it.
        graphs: by what a step depends on.
        fingerprint: of the model that the graphs were captured from.
        reason: why steps with this cache are not captured.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers: list[Layer | None] = [None] * num_layers
        self.user: weakref.ref | None = None
        self.graphs: dict[tuple, Graph] = {}
        self.fingerprint: tuple | None = None
        self.reason: str | None = None

    @property
    def is_free(self) -> bool:
        return self.user is None or self.user() is None

    def lend_to(self, cache: Any) -> None:
        """Have the layers of a cache take this memory when they are initialized, by their first tokens."""
        self.user = weakref.ref(cache)
        for index, layer in enumerate(cache.layers):
            if hasattr(type(layer), "lazy_initialization"):
                layer.lazy_initialization = Initialize(self, index, layer)

    def initialize(self, index: int, layer: Any, lent: dict[str, Tensor], *args: Tensor) -> None:
        """Give a layer its memory, or let it make some; `lent` are the tensors that it had when it came."""
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
        """Whether the tensors of a cache are still those that were lent to it."""
        for known, layer in zip(self.layers, cache.layers):
            if known is not None:
                state = layer.__dict__
                for name, value in known.tensors:
                    if state.get(name) is not value:
                        return False
        return True

    def why_not_lent(self, cache: Any) -> str | None:
        """Why a cache holds more tensors than were lent to it, which the next one would not share; None if not."""
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
    """In the place of a layer's `lazy_initialization`, once; holds it weakly, as a cycle would keep the cache.

    Attributes:
        tensors: that the layer has without it.
    """

    def __init__(self, memory: Memory, index: int, layer: Any) -> None:
        self.memory, self.index, self.layer = memory, index, weakref.ref(layer)
        self.tensors = tensors_of(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        layer = self.layer()
        del layer.lazy_initialization
        if kwargs or not all(isinstance(a, Tensor) for a in args):  # memory that is not known: `why_not_lent` says so
            layer.lazy_initialization(*args, **kwargs)
        else:
            self.memory.initialize(self.index, layer, self.tensors, *args)


class Decoder:
    """What one `generate` calls in the place of the model: it replays steps of one token."""

    def __init__(self, graphs: "DecodeGraphs", memory: Memory, cache: Any) -> None:
        self.graphs, self.memory, self.cache = graphs, memory, weakref.ref(cache)
        # Windows count their tokens in Python: whether they are full decides, and the host has to make their masks.
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
        if self.state is None:  # once per generation, after its prompt, which may have changed what modules hold
            self.state, found_now = globals_of(model), fingerprint(model)
            if found_now != memory.fingerprint:
                memory.graphs.clear()
                memory.fingerprint = found_now
        tensors, spec = found
        key = (self.state, spec, tuple([is_full(layer()) for layer in self.windows]))
        with torch.inference_mode(False), torch.no_grad():  # nothing but tensors of inference mode could follow those
            return self.step(model, key, inputs, tensors, cache)

    def step(self, model: nn.Module, key: tuple, inputs: dict[str, Any], tensors: list[Tensor], cache: Any) -> Any:
        """One token: run, captured or replayed."""
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
                layer().cumulative_length_int += 1  # as the captured step did
        graph.replay()
        graphs.num_replays += 1
        return map_leaves(graph.outputs, lambda v: v.clone() if isinstance(v, Tensor) else cache if v is CACHE else v)

    def capture(self, graph: Graph, model: nn.Module, arguments: dict[str, Any], cache: Any) -> None:
        """Capture a step. Raises ValueError, with the cache as it was, if it does what no graph can hold."""
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
        """After the first step of a kind: say why it cannot be replayed, if it has changed anything in Python."""
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
    """What a layer holds in Python, as values that stay when it changes a dict or list in place."""
    return {name: frozen(value) for name, value in host_state(layer).items()}
