"""The codes of an input that several layers read: computed once.

Layers with quantized activations that are called with the same tensor (query, key and value projections; in the single
blocks of Flux the MLP, too) share one `quantize_rowwise`, with an input transform also its rotation. The bits are the
same as if each computed alone.

Each thread remembers the codes of its last input for as long as that tensor lives: the same object, unchanged since
(its version counter), on the same stream. Each layer gets them once: one that asks again is called anew, maybe after a
write that counts no version (NumPy, `.data`, the replay of a CUDA graph). Not inside of a CUDA graph that is being
captured, whose memory is its own.

This is for eager code; under torch.compile, where versions cannot be seen, see `shared_rows`.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_quant import kernels
from hf_quant.kernels.codes import MIN_SHARED_ROWS
from hf_quant.kernels.dispatch import direct, is_transformed
from hf_quant.kernels.prepack import constant


_T = TypeVar("_T")
_local = threading.local()
_quantize = direct(kernels.quantize_rowwise)
_quantize_with = direct(kernels.quantize_static)
_rotate = direct(kernels.hadamard)
_rotate_and_quantize = direct(kernels.hadamard_quantize_rowwise)


class _Last(NamedTuple):
    x: weakref.ref
    state: tuple
    made: Any  # of x: what `_shared` has computed
    readers: set[int]


def quantized_rows(
    x: Tensor, format: str, diagonal: Tensor | None, input_scale: Tensor | None, qdata: Tensor
) -> tuple[Tensor, Tensor] | None:
    """(codes [..., K], row_scale [..., 1]) of x as by `quantize_rowwise`; None if the product quantizes x itself.

    With a diagonal x is rotated first, as by `hadamard_quantize_rowwise`, with an input_scale [1] quantized as by
    `quantize_static`. `qdata`, the weight that the codes are multiplied with, identifies the layer.
    """
    if x.shape[-1] == 0 or x.numel() // x.shape[-1] < MIN_SHARED_ROWS:
        return None
    # Native products rotate and quantize rows as they read them. Siblings that shared the codes were 1 to 13 % slower
    # at 16 and 128 rows of 576 columns, and as fast (3 % either way) at 512 rows or 4096 columns, rotated or not.
    if format == "int8" and x.device.type == "cpu":
        return None
    if input_scale is not None:
        if type(x) is not Tensor or x.is_meta:
            return None
        value = constant("value", input_scale, _value, input_scale)
        key = (format, None if diagonal is None else diagonal.shape[1], value)
        return _shared(x, key, qdata, lambda: _quantize_with(x, input_scale, diagonal, format=format))
    if diagonal is None:
        return _shared(x, (format,), qdata, lambda: _quantize(x, format=format))
    block = diagonal.shape[1]
    return _shared(
        x, (format, block), qdata, lambda: _rotate_and_quantize(x, diagonal, block_size=block, format=format)
    )


def shared_rotation(x: Tensor, diagonal: Tensor, qdata: Tensor) -> Tensor | None:
    """x [..., K] rotated by a diagonal [K / b, b], in x's dtype; None if the product rotates x itself."""
    if x.device.type == "cpu":  # in the native kernels a rotation costs less than an op
        return None
    block = diagonal.shape[1]
    return _shared(x, (block,), qdata, lambda: _rotate(x, diagonal, block_size=block))


def _shared(x: Tensor, key: tuple, qdata: Tensor, make: Callable[[], _T]) -> _T | None:
    """`make()`, computed once for the layers that read x; None if x cannot be remembered."""
    if type(x) is not Tensor or x.is_inference() or is_transformed():  # what is remembered must not leave a transform
        return None
    device, stream = x.device, None
    if device.type in ("cuda", "xpu"):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.accelerator.current_stream(device)
    state, reader = (x._version, key, stream), qdata.data_ptr()
    last: _Last | None = getattr(_local, "last", None)
    if last is not None and last.x() is x and last.state == state and reader not in last.readers:
        last.readers.add(reader)
        return last.made
    made = make()
    _local.last = _Last(weakref.ref(x, _forget), state, made, {reader})
    return made


def _value(input_scale: Tensor) -> float:
    return input_scale.item()


def _forget(x: weakref.ref) -> None:
    last = getattr(_local, "last", None)
    if last is not None and last.x is x:
        _local.last = None
