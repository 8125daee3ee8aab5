"""The cache of prepacked weights of the CPU backends, and of what is found out once about a tensor.

Some fast kernels want a weight in a layout of their own. That copy belongs to no module: it is in this process-wide
cache, keyed by the identity of the weight's memory, and `state_dict`, deepcopy, pickle and `.to()` never see it. It
costs memory on top of the weight (per weight: 4 bits for int4, int3 and int2; 8 bits for int8, fp6, nf4, mxfp4 and
nvfp4; per group 32 bits for floating-point zero points) and is made at the first use at an M where it pays. Not at the
second, which would spare one-off calls: then the same model would give other bits at its first call than later, and
than when reloaded. `set_prepack_limit` bounds the memory, by default to a quarter of the machine's; 0 suits a model
whose weights are streamed in anew for each forward.
"""

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class _Source:
    """The memory that a prepacked weight was made from: storage, address, shape and count of in-place changes.

    The storage is one Python object for as long as it lives; when it dies, a weak reference drops the entry. Its
    address alone would not do: FSDP frees the memory of a living storage, and another weight's may take it.
    """

    __slots__ = ("address", "shape", "storage", "version")

    def __init__(self, tensor: Tensor, forget: Callable[[weakref.ref], None]):
        self.storage = weakref.ref(tensor.untyped_storage(), forget)
        self.address, self.shape = tensor.data_ptr(), tensor.shape
        self.version = None if tensor.is_inference() else tensor._version

    def is_same(self, tensor: Tensor) -> bool:
        if tensor.untyped_storage() is not self.storage():
            return False
        if tensor.data_ptr() != self.address or tensor.shape != self.shape:
            return False
        # Inference tensors, and views made in inference mode, have no count: whoever changes one in place calls
        # `clear_prepacked`.
        try:
            return self.version is None or tensor._version == self.version
        except RuntimeError:
            return True


class _Entry:
    __slots__ = ("nbytes", "sources", "value")

    def __init__(self, sources: tuple[Tensor, ...], key: tuple[Hashable, int], value: Any, nbytes: int):
        # It must not refer to the entry: a cycle would keep the prepacked weight until the next garbage collection.
        def forget(ref: weakref.ref) -> None:
            entry = _entries.get(key)
            if entry is not None and any(source.storage is ref for source in entry.sources):
                _replace(key, None)

        self.sources = tuple(_Source(tensor, forget) for tensor in sources)
        self.value, self.nbytes = value, nbytes


_entries: dict[tuple[Hashable, int], _Entry] = {}
_nbytes = 0  # of all entries
_lock = threading.RLock()
# {"era": an object that lives until `clear_prepacked`}: whoever keeps what was found, elsewhere, keeps it as long.
era: dict[str, object] = {"era": object()}
# A share of all memory, not of what happens to be free: the paths, and with them the bits, must not depend on that.
_limit: int | None = None
if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
    _limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def get_or_build(kind: Hashable, sources: tuple[Tensor, ...], make: Callable[..., Any], *args: Any) -> Any:
    """The result of `make(*args)` for these very tensors, made now if need be; None if the limit forbids that.

    `sources` are all the tensors that the result depends on, the codes first; `kind` tells apart what is built from
    the same codes. `make` returns a tensor or a tuple with tensors. A change in place of a source, or its
    replacement, drops the entry; so does the end of a source's memory.
    """
    key = (kind, sources[0].data_ptr())
    entry = _entries.get(key)
    if entry is not None:
        for known, tensor in zip(entry.sources, sources):
            if not known.is_same(tensor):
                break
        else:
            return entry.value
    if _limit is not None and _nbytes >= _limit:
        return None
    return _build(key, sources, make, args)


def get(kind: Hashable, sources: tuple[Tensor | None, ...]) -> Any:
    """The value that `get_or_build` or `put` has stored for these very tensors, else None; sources may be None."""
    entry = _entries.get((kind, sources[0].data_ptr()))
    if entry is None:
        return None
    i, known_sources = 0, entry.sources
    for tensor in sources:
        if tensor is not None:
            if i == len(known_sources) or not known_sources[i].is_same(tensor):
                return None
            i += 1
    return entry.value if i == len(known_sources) else None


def put(kind: Hashable, sources: tuple[Tensor, ...], value: Any) -> None:
    """Let `get` return `value`, which holds none of the sources, for these very tensors; no memory is counted."""
    key = (kind, sources[0].data_ptr())
    _replace(key, _Entry(sources, key, value, nbytes=0))


def constant(kind: Hashable, source: Tensor, find: Callable[..., Any], *args: Any) -> Any:
    """The result of `find(*args)` for this very tensor: it takes no memory, so that the limit does not apply."""
    key = (kind, source.data_ptr())
    entry = _entries.get(key)
    if entry is not None and entry.sources[0].is_same(source):
        return entry.value
    return _build(key, (source,), find, args)


def _build(key: tuple[Hashable, int], sources: tuple[Tensor, ...], make: Callable[..., Any], args: tuple) -> Any:
    with _lock:  # two threads that see a new weight at once must not both pay its memory
        entry = _entries.get(key)
        if entry is None or not all(known.is_same(tensor) for known, tensor in zip(entry.sources, sources)):
            with torch.inference_mode(False), torch.no_grad():
                value = make(*args)
            parts = value if isinstance(value, tuple) else (value,)
            nbytes = sum(part.numel() * part.dtype.itemsize for part in parts if isinstance(part, Tensor))
            entry = _Entry(sources, key, value, nbytes)
            _replace(key, entry)
        return entry.value


def _replace(key: tuple[Hashable, int], entry: _Entry | None) -> None:
    """Set or, with None, drop an entry; keep the sum."""
    global _nbytes
    with _lock:
        old = _entries.pop(key, None)
        if entry is not None:
            _entries[key] = entry
        _nbytes += (0 if entry is None else entry.nbytes) - (0 if old is None else old.nbytes)


def prepacked_bytes() -> int:
    """Memory that prepacked weights take in this process, in bytes."""
    return _nbytes


def clear_prepacked() -> None:
    """Drop every prepacked weight; those still in use are made again when they are next used."""
    era["era"] = object()
    for key in list(_entries):
        _replace(key, None)


def limit() -> int | None:
    """The limit that `set_prepack_limit` has set, in bytes; None if there is none."""
    return _limit


def set_prepack_limit(nbytes: int | None) -> None:
    """Build no prepacked weight once `nbytes` are taken; 0 builds none, None sets no limit.

    Prepacked weights that exist stay; `clear_prepacked` drops them. Weights without one take slower paths, whose
    results may differ in the last bits.
    """
    global _limit
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; needs None or a number of bytes >= 0")
    _limit = nbytes
