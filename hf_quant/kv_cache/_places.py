"""`next_tokens`: a growing layer of a cache, for a native block that writes tokens into it and attends to all."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.native.attention import append_unsupported_reason, attention_unsupported_reason
from hf_quant.kernels.native.blocks import prepare_cache
from hf_quant.kv_cache._cache import QuantizedCache
from hf_quant.kv_cache._config import scale_dtype
from hf_quant.kv_cache._layers import GrowingStorage, QuantizedHybridLayer, QuantizedLayer, QuantizedSlidingWindowLayer
from hf_quant.kv_cache._values import NEW_TOKENS, Values


_SERVED = (QuantizedLayer, QuantizedHybridLayer, QuantizedSlidingWindowLayer)


class NextTokens(NamedTuple):
    """The place of new tokens of each sequence, there but not yet counted.

    Attributes:
        cache, place: as `Block.with_cache` takes them.
        layer: of the cache, which counts them.
        count: of the new tokens.
    """

    cache: object
    place: tuple[int, int, int]
    layer: GrowingStorage | Values
    count: int

    def done(self) -> None:
        """Count the tokens, once they are written."""
        self.layer._count(self.count)


class _Prepared:
    """Addresses of the tensors of a layer, for tokens of a kind; a copy of the layer begins without."""

    def __init__(self) -> None:
        self.kind: tuple | None = None
        self.codes: torch.Tensor | None = None
        self.capacity = 0  # tokens
        self.recents: int | None = None  # last tokens that are kept in 16 bit; None: the layer keeps none
        self.cache: object = None

    def __reduce__(self) -> tuple:
        return _Prepared, ()


def next_tokens(
    layer: Any, B: int, count: int, num_heads: int, D: int, dtype: torch.dtype, value_dim: int | None = None
) -> NextTokens | None:
    """Make room in a layer for new tokens of each of B sequences, with `num_heads` keys and values of D channels.

    `value_dim`: channels of values, if these have others. None if this layer takes new tokens only through its
    `update`: it is of another kind, its sequences, heads or dtype are others, it is empty and gets one token, or it
    keeps some tokens in 16 bit and gets several.
    """
    kind = (B, num_heads, D, dtype, value_dim or D)
    values = Values.of(layer, B, count, num_heads, (D, kind[-1]), dtype)
    if values is not None:
        place = values.next(math.inf, count)
        return None if place is None else NextTokens(values.cache, place, values, count)
    if count > 1 and type(layer) in _SERVED and not layer.is_initialized:
        state = torch.empty((), dtype=dtype, device="cpu").expand(B, num_heads, count, 1)
        layer.lazy_initialization(state.expand(-1, -1, -1, D), state.expand(-1, -1, -1, kind[-1]))  # shape and dtype
    prepared = _prepared_of(layer, kind)
    if prepared is None or (value_dim is not None and prepared.recents is not None):
        return None
    state = layer.__dict__
    if state["_first"] + state["_end"] - state["_start"] + count > prepared.capacity:
        layer._reserve(count)
        if prepared.codes is not state["k_codes"]:
            prepared = _prepare(layer, kind)
    place = None if prepared.cache is None else _next_place(layer, prepared, math.inf, count)
    return None if place is None else NextTokens(prepared.cache, place, layer, count)


def _place(state: dict[str, Any], start: int, count: int) -> tuple[int, int, int]:
    """`NextTokens.place` of new tokens in a layer of this state, which attend to those from position `start` on."""
    end = state["_end"]
    return state["_first"] + start - state["_start"], end + count - start, start if end else NEW_TOKENS


def held_tokens(
    layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype
) -> tuple[object, tuple[int, int, int]] | None:
    """(cache, place) of all tokens in a layer, as `Block.with_cache` takes them, for a block that adds none.

    None as from `next_tokens`, and for layers with windows, or with tokens in 16 bit.
    """
    is_plain = isinstance(layer, DynamicLayer) and not layer.is_sliding
    values = Values.of(layer, B, 0, num_heads, (D, D), dtype) if is_plain else None
    if values is not None:
        place = values.next(math.inf, 0)
        return None if place is None else (values.cache, place)
    prepared = _prepared_of(layer, (B, num_heads, D, dtype, D)) if type(layer) is QuantizedLayer else None
    if prepared is None or prepared.cache is None or prepared.recents is not None or not layer._end:
        return None
    return prepared.cache, _place(layer.__dict__, layer._start, 0)


def _prepared_of(layer: Any, kind: tuple) -> _Prepared | None:
    if type(layer) not in _SERVED:
        return None
    state = layer.__dict__
    prepared = state.get("_prepared")
    if prepared is None or prepared.codes is not state["k_codes"] or prepared.kind != kind:
        return _prepare(layer, kind) if _is_served(layer, *kind) else None
    return prepared


def takes_tokens(past: Any) -> bool:
    """True if the tokens of a cache are those of its layers: its class has no `update` of its own."""
    return (isinstance(past, QuantizedCache) or type(past) is DynamicCache) and not past.offloading


class Places:
    """The places of the tokens that follow those for which `next_tokens` has found places, in several layers."""

    def __init__(self, tokens: Sequence[NextTokens], windows: Sequence[int | None]) -> None:
        """`windows`: how many tokens a single new one may attend to in each layer; None: any number."""
        self.caches = [token.cache for token in tokens]
        self._counts = [token.layer._count for token in tokens]
        self._nexts = [_next_of(token.layer, most or math.inf) for token, most in zip(tokens, windows)]

    def next(self, count: int) -> list[int] | None:
        """The next `NextTokens.place` of each layer, one after the other; None: `next_tokens` has to look again."""
        places: list[int] = []
        for next_place in self._nexts:
            place = next_place(count)
            if place is None:
                return None
            places += place
        return places

    def done(self, count: int) -> None:
        """Count the tokens, once they are written."""
        for add in self._counts:
            add(count)


def _next_of(layer: GrowingStorage | Values, most: float) -> Callable[[int], tuple[int, int, int] | None]:
    """A function that finds the place of so many next tokens, of which a single one may attend to `most`."""
    is_plain = isinstance(layer, Values)
    return partial(layer.next, most) if is_plain else partial(_next_place, layer, layer._prepared, most)


def _next_place(layer: GrowingStorage, prepared: _Prepared, most: float, count: int) -> tuple[int, int, int] | None:
    """The place of new tokens, of which a single one may attend to `most`; None: `next_tokens` has to look again."""
    state, recents = layer.__dict__, prepared.recents
    start, end = layer._start_of_next(), state["_end"]
    if state["_first"] + end - state["_start"] + count > prepared.capacity:
        return None
    if state["k_codes"] is not prepared.codes or (count == 1 and (not end or end - start >= most)):
        return None
    # All the last tokens that are to be read in 16 bit have to be there.
    if recents is not None and (count > 1 or state["_recent"] > max(end + 1 - recents, 0)):
        return None
    return _place(state, start, count)


def _is_served(layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype, value_dim: int) -> bool:
    if not layer.is_initialized:
        return False
    if layer.k_codes.shape[:2] != (B, num_heads) or not layer.k_codes.is_cpu:
        return False
    keys, values = layer.key_kind, layer.value_kind
    return (keys.D, values.D) == (D, value_dim) and keys.dtype == values.dtype == dtype


def _prepare(layer: GrowingStorage, kind: tuple) -> _Prepared:
    found = layer.__dict__["_prepared"] = _Prepared()
    found.kind, found.codes, found.capacity, found.cache = kind, layer.k_codes, layer.k_codes.shape[2], _cache(layer)
    found.recents = None if layer.k_window is None else layer.config.recent_tokens
    return found


def _cache(layer: GrowingStorage) -> object:
    """A layer's tensors as native blocks read them, None if they cannot."""
    keys, values = layer.key_kind, layer.value_kind
    spec, numbers, pairs = CODES[keys.format], scale_dtype(keys.dtype), (layer.k_pairs, layer.v_pairs)
    reasons = []
    for of, D in zip(pairs, (keys.D, values.D)):
        reasons.append(attention_unsupported_reason(keys.dtype, D, D // of.shape[3], numbers))
        reasons.append(append_unsupported_reason(keys.dtype, D, numbers))
    tensors = (layer.k_codes, layer.v_codes, *pairs, layer.k_frame, layer.k_window, layer.v_window)
    has_other_groups = keys.D == values.D and pairs[0].shape != pairs[1].shape
    if any(reasons) or has_other_groups or not all(t is None or t.is_contiguous() for t in tensors):
        return None
    parts = [
        (codes, pairs[..., 0], pairs[..., 1] if pairs.shape[-1] == 2 else None)
        for codes, pairs in ((layer.k_codes, layer.k_pairs), (layer.v_codes, layer.v_pairs))
    ]
    rotates = {"rotates_keys": keys.rotated, "rotates_values": values.rotated}
    lacking = {"k_frame": layer.k_frame, "k_first": layer.k_first, "starts": layer.starts}
    kept = None if layer.k_window is None else (layer.k_window, layer.v_window, keys.sinks)
    return prepare_cache(*parts, spec, (keys.D, values.D), **rotates, **lacking, kept=kept)
