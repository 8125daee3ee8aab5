"""Tensors that last on a GPU, and the counters of blocks that have finished a tile, for sums in a fixed order."""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor


def lasting(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """`make()`, a tensor of a device that is kept for the life of the process and may be used on every stream.

    While a CUDA graph is captured, or warmed up by inductor, what a thread allocates belongs to the graph's memory,
    which is used again; so it is made in a thread and on a stream of its own, and complete when this returns.
    """
    if device.type != "cuda":
        return make()

    def work() -> Tensor:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            made = make()
        stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


# Zero at launch, and left so.
_COUNTERS = 2**20  # one pool per device: 4 MB
_PER_STREAM = 2**14
_pools: dict[torch.device, "_CounterPool"] = {}
_pools_lock = threading.Lock()


class _CounterPool:
    """Zeroed int32 counters: one slice for each stream, as launches on a stream follow each other.

    So do the launches that a CUDA graph captures from one stream, but graphs may be replayed side by side: those of
    `counters_of` get a slice each, which comes back when the graph is gone. In other captures every launch gets
    counters of its own, which never come back; when the pool is used up, such a launch zeroes fresh memory (a memset
    of 1 to 2 us).
    """

    def __init__(self, device: torch.device) -> None:
        self.counters = lasting(lambda: torch.zeros(_COUNTERS, dtype=torch.int32, device=device), device)
        self.taken = 0
        self.by_stream: dict[int, Tensor] = {}
        self.returned: list[Tensor] = []  # slices; without a lock, as graphs are collected at any time

    def take(self, count: int) -> Tensor | None:
        """Return unused counters, None if too few are left. The caller holds `_pools_lock`."""
        if self.taken + count > _COUNTERS:
            return None
        self.taken += count
        return self.counters[self.taken - count : self.taken]


class _Lent:
    """The slice of the graph that this thread captures, and the stream that uses it: that of its first launch."""

    def __init__(self, counters: Tensor, device: torch.device) -> None:
        self.counters, self.device, self.stream = counters, device, None

    def serves(self, device: torch.device, stream: int) -> bool:
        if self.stream is None and device == self.device:
            self.stream = stream
        return device == self.device and stream == self.stream


_capture = threading.local()


@contextmanager
def counters_of(graph: object, device: torch.device) -> Iterator[None]:
    """Give the launches that `graph` captures in this block one slice of counters, which comes back with the graph.

    Enter before the capture begins: a slice that another graph had is used once that graph's last replay has ended.
    """
    pool, counters = _pools.get(device), None
    if pool is not None:  # made by the first launch of a kernel that counts, which a warm-up makes
        if pool.returned:
            torch.cuda.synchronize(device)
        try:
            counters = pool.returned.pop()
        except IndexError:
            with _pools_lock:
                counters = pool.take(_PER_STREAM)
    before = getattr(_capture, "lent", None)
    if counters is not None:
        weakref.finalize(graph, pool.returned.append, counters)
        _capture.lent = _Lent(counters, device)
    try:
        yield
    finally:
        _capture.lent = before


def is_capturing(device: torch.device) -> bool:
    """True if the current stream of a CUDA device, which need not be the current device, is captured into a graph."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def tile_counters(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 counters that are zero when the next kernel on the device's current stream starts.

    The kernel leaves them at zero.
    """
    found = None
    if device.type == "cuda" and count <= _PER_STREAM:
        stream, pool = torch.cuda.current_stream(device).cuda_stream, _pools.get(device)
        if is_capturing(device):
            lent = getattr(_capture, "lent", None)
            if lent is not None and lent.serves(device, stream):
                found = lent.counters
            elif pool is not None:
                with _pools_lock:
                    found = pool.take(count)
        else:
            found = None if pool is None else pool.by_stream.get(stream)
            if found is None:
                with _pools_lock:
                    found = _slice_of(stream, device)
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


def _slice_of(stream: int, device: torch.device) -> Tensor | None:
    """The slice of the device's pool for a stream, None if there is none left."""
    pool = _pools.get(device)
    if pool is None:
        pool = _pools[device] = _CounterPool(device)
    if stream not in pool.by_stream:
        found = pool.take(_PER_STREAM)
        if found is None:
            return None
        pool.by_stream[stream] = found
    return pool.by_stream[stream]
