"""`Values`: a growing layer of transformers' own cache, in 16 bit, for native blocks that write tokens into it."""

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.native.arguments import UNIT
from hf_quant.kernels.native.attention import attention_unsupported_reason
from hf_quant.kernels.native.blocks import prepare_cache


_ROOM = 32  # tokens; room is made for at least this many, and for an eighth
NEW_TOKENS = -1  # of a place: there are none before the new ones
_ATTRIBUTE = "_hf_quant_values"  # of a layer


def _show(layer: Any) -> Any:
    layer.__dict__[_ATTRIBUTE].show(layer)
    return layer


class _Unread:
    """A layer whose tokens nobody has read since the last ones were written: it makes their views when somebody does.

    To make a view takes longer than to write a token, and a model reads those of its first layer only. A layer is of
    its own class again as soon as its keys or values are read or replaced, or it is copied.
    """

    keys = property(lambda self: _show(self).keys, lambda self, new: setattr(_show(self), "keys", new))
    values = property(lambda self: _show(self).values, lambda self, new: setattr(_show(self), "values", new))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _show(self).__reduce_ex__(protocol)


_SERVED = (DynamicLayer, DynamicSlidingWindowLayer)
_UNREAD = {
    kind: type(kind.__name__, (kind, _Unread), {"_layer_type": None, "__module__": kind.__module__})
    for kind in _SERVED
}


class Values:
    """Room behind the tokens of a layer, and the place of its next ones.

    The host makes new tensors for each token (`torch.cat`). Here `layer.keys` and `layer.values` are views of larger
    tensors, and grow in them (see `_Unread`). A view that somebody holds keeps what it has. Where the layer has other
    tensors than those views (after beams, `crop` or its own `update`), or no more room, they are copied to new ones.

    Attributes:
        cache: as `Block.with_cache` takes it.
    """

    def __init__(self, layer: Any, held: tuple[Tensor, ...], count: int) -> None:
        """Copy tokens [B, heads, tokens, channels] of keys and of values, with room for `count` more at least."""
        used = held[0].shape[2]
        capacity = used + count + max(_ROOM, used // 8)
        self._layer = weakref.ref(layer)
        self._kind = type(layer)
        self._room = tuple(x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in held)
        for room, x in zip(self._room, held):
            room[:, :, :used] = x
        self._start, self._end = 0, used  # columns in use
        self._views = layer.keys, layer.values  # what the layer has
        if used:
            self.show(layer)
        keys, values = ((room, None, None) for room in self._room)
        self.cache = prepare_cache(keys, values, None, (keys[0].shape[3], values[0].shape[3]))

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the layer begins without

    @staticmethod
    def of(layer: Any, B: int, count: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> "Values | None":
        """Make room for `count` more tokens of a layer of B sequences, with heads of these channels.

        None if the layer is of another kind, or its tokens are.
        """
        if isinstance(layer, _Unread):
            found = layer.__dict__[_ATTRIBUTE]
            shapes = [(room.shape[:2], room.shape[3], room.dtype) for room in found._room]
            if found._has_room(layer, count) and shapes == [((B, heads), D, dtype) for D in dims]:
                return found
            found.show(layer)
        if type(layer) not in _SERVED:
            return None
        held = (layer.keys, layer.values) if layer.is_initialized else (None, None)
        if held[0] is None or not held[0].numel():
            if count < 2:
                return None
            held = tuple(torch.empty(B, heads, 0, D, dtype=dtype, device="cpu") for D in dims)
        for x, D in zip(held, dims):
            if not _is_served(x, dtype) or x.shape != (B, heads, held[0].shape[2], D):
                return None
        found = layer.__dict__.get(_ATTRIBUTE)
        if found is None or not found._end or not found._has_room(layer, count):
            if any(D % UNIT or attention_unsupported_reason(dtype, D, UNIT, None) is not None for D in dims):
                return None
            found = layer.__dict__[_ATTRIBUTE] = Values(layer, held, count)
        return found

    def _has_room(self, layer: Any, count: int) -> bool:
        """True if the layer has these tokens, and there is room for more behind."""
        if isinstance(layer, _Unread):
            is_own = layer.__dict__[_ATTRIBUTE] is self
        else:
            is_own = layer.keys is self._views[0] and layer.values is self._views[1] and self._layer() is layer
        return is_own and self._end + count <= self._room[0].shape[2]

    def show(self, layer: Any) -> None:
        """Let the layer have views of the tokens in use."""
        layer.__class__ = self._kind
        self._views = layer.keys, layer.values = [room[:, :, self._start : self._end] for room in self._room]

    def next(self, most: float, count: int) -> tuple[int, int, int] | None:
        """The place of new tokens as `Block.with_cache` takes it, None if `of` has to look again.

        most: how many tokens a single new one may attend to.
        """
        layer = self._layer()
        if layer is None or not self._has_room(layer, count):
            return None
        start = self._start_of_next(layer)
        used = self._end - start
        if count == 1 and not 0 < used < most:
            return None
        return start, used + count, 0 if used else NEW_TOKENS

    def _start_of_next(self, layer: Any) -> int:
        window = layer.sliding_window if self._kind is DynamicSlidingWindowLayer else 0
        return max(self._start, self._end - window + 1) if window else self._start

    def _count(self, tokens: int) -> None:
        """Count tokens that were written into the columns of the next ones."""
        layer = self._layer()
        if not layer.is_initialized:
            layer.lazy_initialization(*self._room)
        self._end += tokens
        if self._kind is DynamicSlidingWindowLayer:
            layer.cumulative_length += tokens
            if not layer.record_past:
                self._start = self._start_of_next(layer)
        if type(layer) is self._kind:
            layer.__class__ = _UNREAD[self._kind]


def _is_served(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cpu and x.dtype == dtype and x.dim() == 4 and is_plain(x) and not x.requires_grad
