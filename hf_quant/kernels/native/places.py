"""The check that all a block was made from is still there, made before each token, for all layers of a model."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_quant.kernels.native.extension import module


_IMPL_BYTES = 256  # of a tensor in memory, about
Place = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], bytes, bytes]


def _unchanged(*places: Place) -> bool:
    for entries, numbers, empty, *_ in places:
        if any(of.get(key) is not value for of, key, value in zip(entries[::3], entries[1::3], entries[2::3])):
            return False
        if any(read() != number for read, number in zip(numbers[::2], numbers[1::2])) or any(empty):
            return False
    return True


# True if nothing has changed in any of the places (`place_of`).
unchanged: Callable[..., bool] = getattr(module, "unchanged", None) or _unchanged


def _offset_of_pointer() -> int | None:
    """Bytes from the begin of a tensor's object in Python to the pointer to torch's own; None: not to be found."""
    if module is None:
        return None
    tensor = torch.zeros(3, dtype=torch.float32, device="cpu")
    probes = (tensor, torch.nn.Parameter(tensor.clone()))
    words = [struct.unpack("6Q", ctypes.string_at(id(probe), 48)) for probe in probes if probe.__sizeof__() >= 48]
    found = {i for i in range(6) if all(word[i] == probe._cdata for word, probe in zip(words, probes))}
    try:
        read = ctypes.CDLL(torch._C.__file__).aoti_torch_get_data_ptr
    except (OSError, AttributeError):  # a torch without it
        return None
    if len(words) != len(probes) or len(found) != 1:
        return None
    module.read_tensors_by(ctypes.cast(read, ctypes.c_void_p).value)
    return found.pop() * 8


_offset = _offset_of_pointer()


def entries_of(values: dict[str, Any]) -> list[Any]:
    """The `entries` of a place for all that a dict holds now."""
    return [part for name, value in values.items() for part in (values, name, value)]


def place_of(entries: Sequence[Any], numbers: Sequence[Any], empty: Sequence[Any], tensors: Sequence[Tensor]) -> Place:
    """A place for `unchanged`, which keeps all of this alive.

    It is unchanged if dict.get(key) is the value for each three of `entries`, each function of `numbers` returns the
    number behind it, all of `empty` are empty, and the data of `tensors`, which are values of entries, is where it is.
    """
    entries, memory = tuple(entries), []
    if _offset is None:
        numbers = (*numbers, *(part for tensor in tensors for part in (tensor.data_ptr, tensor.data_ptr())))
    else:  # the call of a tensor's method takes longer than the read
        memory = [part for tensor in tensors for part in (id(tensor) + _offset, tensor.data_ptr())]
    read = [id(part) for part in (*entries[::3], *numbers, *empty, *tensors)]
    for tensor in tensors:  # what `data_ptr` reads
        impl, storage = tensor._cdata, tensor.untyped_storage()._cdata
        read += [*range(impl, impl + _IMPL_BYTES, 64), storage]
    return entries, tuple(numbers), tuple(empty), _words(memory), _words(dict.fromkeys(read))


def _words(numbers: Any) -> bytes:
    return struct.pack(f"{len(numbers)}Q", *numbers)
