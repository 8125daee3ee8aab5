"""What the CPU backends share: scratch buffers and the cache of prepacked weights.

Scratch: a fresh 32 MB temporary costs 13 ms of page faults, the work done in it often less (torch 2.13, glibc). So the
backends compute in buffers that each thread keeps.

Prepacked weights: some fast kernels want a weight in a layout of their own. That copy belongs to no module: it sits
in this process-wide cache, keyed by the identity of the weight's memory, and `state_dict`, deepcopy, pickle and
`.to()` never see it. It costs memory on top of the weight (per weight: 4 bits for int4, int3 and int2; 8 bits for
int8, fp6, nf4, mxfp4 and nvfp4), so it is made only at the second use of a weight at an M where it pays: a one-off
call, or a weight that is streamed in anew for each forward, never pays. `set_prepack_limit` bounds it.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


_local = threading.local()


def scratch(slot: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized contiguous tensor in this thread's buffer `slot`; valid until the slot is asked for again."""
    buffers = _local.__dict__
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    buffer = buffers.get(slot)
    if buffer is None or buffer.numel() < nbytes:
        with torch.inference_mode(False):  # or it could never be written outside of inference mode
            buffer = buffers[slot] = torch.empty(max(nbytes, 1), dtype=torch.uint8)
    return buffer[:nbytes].view(dtype).view(shape)


class _Source(NamedTuple):
    """The memory that a prepacked weight was made from."""

    storage: weakref.ref  # of the UntypedStorage; it is one Python object for as long as the memory lives
    address: int
    version: int | None
    shape: torch.Size

    def is_same(self, tensor: Tensor) -> bool:
        return (
            tensor.data_ptr() == self.address
            and tensor.untyped_storage() is self.storage()
            and _version(tensor) == self.version
            and tensor.shape == self.shape
        )


class _Entry:
    __slots__ = ("nbytes", "sources", "value")

    def __init__(self, sources: tuple[_Source, ...]):
        self.sources, self.value, self.nbytes = sources, None, 0


_entries: dict[tuple[str, int], _Entry] = {}
_lock = threading.RLock()
_limit: int | None = None


def _version(tensor: Tensor) -> int | None:
    """Counts in-place changes; inference tensors have no counter (whoever changes one calls `clear_prepacked`)."""
    return None if tensor.is_inference() else tensor._version


def prepacked(kind: str, sources: tuple[Tensor, ...], build: Callable[..., Any], *args: Any) -> Any:
    """What `build(*args)` returned for these very tensors, or None while it has not paid to build it.

    `sources` are all the tensors that the result depends on, the codes first; `kind` tells apart what is built from
    the same codes. `build` returns a tensor, a tuple with tensors, or a number; it is called at the second use. A
    change in place of a source, or its replacement, drops the entry; so does the end of a source's memory.
    """
    key = (kind, sources[0].data_ptr())
    entry = _entries.get(key)
    if entry is not None:
        for known, tensor in zip(entry.sources, sources):
            if not known.is_same(tensor):
                break
        else:
            return entry.value if entry.value is not None else _fill(entry, build, args)
    _entries[key] = _Entry(tuple(_source(tensor, key) for tensor in sources))
    return None


def _source(tensor: Tensor, key: tuple[str, int]) -> _Source:
    def forget(ref: weakref.ref) -> None:
        entry = _entries.get(key)
        if entry is not None and any(source.storage is ref for source in entry.sources):
            del _entries[key]

    return _Source(weakref.ref(tensor.untyped_storage(), forget), tensor.data_ptr(), _version(tensor), tensor.shape)


def _fill(entry: _Entry, build: Callable[..., Any], args: tuple) -> Any:
    with _lock:  # two threads that meet a new weight at once must not both pay its memory
        if entry.value is None and (_limit is None or prepacked_bytes() < _limit):
            with torch.inference_mode(False), torch.no_grad():
                value = build(*args)
            parts = value if isinstance(value, tuple) else (value,)
            entry.nbytes = sum(part.numel() * part.dtype.itemsize for part in parts if isinstance(part, Tensor))
            entry.value = value
    return entry.value


def prepacked_bytes() -> int:
    """Memory that prepacked weights take in this process, in bytes."""
    return sum(entry.nbytes for entry in list(_entries.values()))


def clear_prepacked() -> None:
    """Drop every prepacked weight; those still in use are made again at their second use from now."""
    with _lock:
        _entries.clear()


def set_prepack_limit(nbytes: int | None) -> None:
    """Build no prepacked weight once `nbytes` are taken; 0 builds none, None (the default) sets no limit.

    Those already built stay; `clear_prepacked` drops them. Without them the CPU paths that need them are not taken.
    """
    global _limit
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; needs None or a number of bytes >= 0")
    _limit = nbytes
