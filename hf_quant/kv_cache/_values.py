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


class Values:
    """Room behind the tokens of a layer, and the place of its next ones.

    The host makes new tensors for each token (`torch.cat`). Here `layer.keys` and `layer.values` are views of larger
    tensors, and grow in them. A view that somebody holds keeps what it has. Where the layer has other tensors than
    those views (after beams, `crop` or its own `update`), or no more room, they are copied to new ones.

    Attributes:
        cache: as `Block.with_cache` takes it.
    """

    def __init__(self, layer: Any, held: tuple[Tensor, ...], count: int) -> None:
        """Copy tokens [B, heads, tokens, channels] of keys and of values, with room for `count` more at least."""
        used = held[0].shape[2]
        capacity = used + count + max(_ROOM, used // 8)
        self._layer = weakref.ref(layer)
        self._room = tuple(x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in held)
        for room, x in zip(self._room, held):
            room[:, :, :used] = x
        self._start, self._end = 0, used  # columns in use
        self._views = layer.keys, layer.values  # what the layer has
        if used:
            self._show(layer)
        keys, values = ((room, None, None) for room in self._room)
        self.cache = prepare_cache(keys, values, None, (keys[0].shape[3], values[0].shape[3]))

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the layer begins without

    @staticmethod
    def of(layer: Any, B: int, count: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> "Values | None":
        """Make room for `count` more tokens of a layer of B sequences, with heads of these channels.

        None if the layer is of another kind, or its tokens are.
        """
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
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
        """True if the layer has these views, and there is room for more tokens behind."""
        is_own = layer.keys is self._views[0] and layer.values is self._views[1] and self._layer() is layer
        return is_own and self._end + count <= self._room[0].shape[2]

    def _show(self, layer: Any) -> None:
        """Let the layer have the tokens in use."""
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
        window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else 0
        return max(self._start, self._end - window + 1) if window else self._start

    def _count(self, tokens: int) -> None:
        """Count tokens that were written into the columns of the next ones."""
        layer = self._layer()
        if not layer.is_initialized:
            layer.lazy_initialization(*self._room)
        self._end += tokens
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length += tokens
            if not layer.record_past:
                self._start = self._start_of_next(layer)
        self._show(layer)


def _is_served(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cpu and x.dtype == dtype and x.dim() == 4 and is_plain(x) and not x.requires_grad
