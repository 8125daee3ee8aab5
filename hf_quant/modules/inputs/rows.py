"""The codes of an input that several layers read: computed once.

Layers with quantized activations that are called with the same tensor (query, key and value projections; in the single
blocks of Flux the MLP, too) share one `quantize_rowwise`. The bits are the same as if each computed alone.

Each thread remembers the codes of its last input for as long as that tensor lives: the same object, unchanged since
(its version counter), on the same stream. Each layer gets them once: one that asks again is called anew, maybe after a
write that counts no version (NumPy, `.data`, the replay of a CUDA graph). Not inside of a CUDA graph that is being
captured, whose memory is its own.

This is for eager code; under torch.compile, where versions cannot be seen, see `shared_rows`.
"""

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant import kernels
from hf_quant.kernels.codes import MIN_SHARED_ROWS
from hf_quant.kernels.dispatch import direct, is_transformed


_local = threading.local()
_quantize = direct(kernels.quantize_rowwise)


class _Last(NamedTuple):
    x: weakref.ref
    state: tuple
    rows: tuple[Tensor, Tensor]
    readers: set[int]


def quantized_rows(x: Tensor, format: str, qdata: Tensor) -> tuple[Tensor, Tensor] | None:
    """(codes [..., K], row_scale [..., 1]) of x as by `quantize_rowwise`; None if the product quantizes x itself.

    `qdata`, the weight that they are multiplied with, identifies the layer.
    """
    if type(x) is not Tensor or x.shape[-1] == 0 or x.numel() // x.shape[-1] < MIN_SHARED_ROWS or x.is_inference():
        return None
    if is_transformed():  # what is remembered must not leave the transform
        return None
    device, stream = x.device, None
    if device.type == "cpu" and format == "int8":  # native products quantize rows as they read them
        return None
    if device.type in ("cuda", "xpu"):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.accelerator.current_stream(device)
    state, reader = (x._version, format, stream), qdata.data_ptr()
    last: _Last | None = getattr(_local, "last", None)
    if last is not None and last.x() is x and last.state == state and reader not in last.readers:
        last.readers.add(reader)
        return last.rows
    rows = _quantize(x, format=format)
    _local.last = _Last(weakref.ref(x, _forget), state, rows, {reader})
    return rows


def _forget(x: weakref.ref) -> None:
    last = getattr(_local, "last", None)
    if last is not None and last.x is x:
        _local.last = None
