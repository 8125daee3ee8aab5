"""`next_token`: a growing layer of a cache, for a native block that writes one token into it and attends to all."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.native.attention import append_unsupported_reason, attention_unsupported_reason
from hf_quant.kernels.native.blocks import prepare_cache
from hf_quant.kv_cache._config import scale_dtype
from hf_quant.kv_cache._layers import GrowingStorage, QuantizedHybridLayer, QuantizedLayer, QuantizedSlidingWindowLayer


_SERVED = (QuantizedLayer, QuantizedHybridLayer, QuantizedSlidingWindowLayer)


class NextToken(NamedTuple):
    """The place of one new token of each sequence, there but not yet counted.

    Attributes:
        cache, place: as `Block.with_cache` takes them.
        layer: of the cache.
    """

    cache: object
    place: tuple[int, int, bool]
    layer: GrowingStorage

    def done(self) -> None:
        """Count the token, once it is written."""
        self.layer._count_token()


class _Prepared:
    """Addresses of the tensors of a layer, for tokens of a kind; a copy of the layer begins without."""

    def __init__(self) -> None:
        self.kind: tuple | None = None
        self.codes: torch.Tensor | None = None
        self.capacity = 0  # tokens
        self.cache: object = None

    def __reduce__(self) -> tuple:
        return _Prepared, ()


def next_token(layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype) -> NextToken | None:
    """Make room in a layer for one token of each of B sequences, with `num_heads` keys and values of D channels.

    None if this layer takes new tokens only through its `update`: it is of another kind, empty, keeps tokens in
    16 bit, or its sequences, heads or dtype are others.
    """
    kind = (B, num_heads, D, dtype)
    prepared = _prepared_of(layer, kind)
    if prepared is None:
        return None
    state = layer.__dict__
    first, begin, end = state["_first"], state["_start"], state["_end"]
    if not end:
        return None
    if first + end - begin >= prepared.capacity:
        layer._reserve(1)
        first = state["_first"]
        if prepared.codes is not state["k_codes"]:
            prepared = _prepare(layer, kind)
    if prepared.cache is None:
        return None
    start = layer._start_of_next()
    place = (first + start - begin, end + 1 - start, start == 0 and state["k_first"] is not None)
    return NextToken(prepared.cache, place, layer)


def held_tokens(
    layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype
) -> tuple[object, tuple[int, int, bool]] | None:
    """(cache, place) of all tokens in a layer, as `Block.with_cache` takes them, for a block that adds none.

    None as from `next_token`, and for layers with windows.
    """
    prepared = _prepared_of(layer, (B, num_heads, D, dtype)) if type(layer) is QuantizedLayer else None
    if prepared is None or prepared.cache is None or not layer._end:
        return None
    count, is_whole = layer._end - layer._start, layer._start == 0
    return prepared.cache, (layer._first, count, is_whole and layer.k_first is not None)


def _prepared_of(layer: Any, kind: tuple) -> _Prepared | None:
    if type(layer) not in _SERVED:
        return None
    state = layer.__dict__
    prepared = state.get("_prepared")
    if prepared is None or prepared.codes is not state["k_codes"] or prepared.kind != kind:
        return _prepare(layer, kind) if _is_served(layer, *kind) else None
    return prepared


class NextTokens:
    """The places of the tokens that follow those for which `next_token` has found places, in several layers."""

    def __init__(self, tokens: Sequence[NextToken], windows: Sequence[int | None]) -> None:
        """`windows`: how many tokens a place of each layer may have; None: any number."""
        layers = [token.layer for token in tokens]
        self.caches = [token.cache for token in tokens]
        self._counts = [layer._count_token for layer in layers]
        self._known = [
            (layer.__dict__, layer._prepared, layer._start_of_next, most or math.inf)
            for layer, most in zip(layers, windows)
        ]

    def places(self) -> list[int] | None:
        """The next `NextToken.place` of each layer, one after the other; None: `next_token` has to look again."""
        places = []
        for state, prepared, start_of_next, most in self._known:
            first, begin, end = state["_first"], state["_start"], state["_end"]
            start = start_of_next()
            is_full = first + end - begin >= prepared.capacity
            if not end or is_full or state["k_codes"] is not prepared.codes or end - start >= most:
                return None
            places += (first + start - begin, end + 1 - start, start == 0 and state["k_first"] is not None)
        return places

    def done(self) -> None:
        """Count the tokens, once they are written."""
        for count in self._counts:
            count()


def _is_served(layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype) -> bool:
    if not layer.is_initialized or layer.k_window is not None:
        return False
    if layer.k_codes.shape[:2] != (B, num_heads) or not layer.k_codes.is_cpu:
        return False
    keys, values = layer.key_kind, layer.value_kind
    return keys.D == values.D == D and keys.dtype == values.dtype == dtype


def _prepare(layer: GrowingStorage, kind: tuple) -> _Prepared:
    found = layer.__dict__["_prepared"] = _Prepared()
    found.kind, found.codes, found.capacity, found.cache = kind, layer.k_codes, layer.k_codes.shape[2], _cache(layer)
    return found


def _cache(layer: GrowingStorage) -> object:
    """A layer's tensors as native blocks read them, None if they cannot."""
    keys, values = layer.key_kind, layer.value_kind
    spec, group_size = CODES[keys.format], keys.D // layer.k_pairs.shape[3]
    numbers = scale_dtype(keys.dtype)
    reasons = (
        attention_unsupported_reason(keys.dtype, keys.D, group_size, numbers),
        append_unsupported_reason(keys.dtype, keys.D, numbers),
    )
    tensors = (layer.k_codes, layer.v_codes, layer.k_pairs, layer.v_pairs, layer.k_frame)
    if any(reasons) or layer.k_pairs.shape != layer.v_pairs.shape or not all(t.is_contiguous() for t in tensors):
        return None
    parts = [
        (codes, pairs[..., 0], pairs[..., 1] if pairs.shape[-1] == 2 else None)
        for codes, pairs in ((layer.k_codes, layer.k_pairs), (layer.v_codes, layer.v_pairs))
    ]
    rotates = {"rotates_keys": keys.rotated, "rotates_values": values.rotated}
    return prepare_cache(*parts, spec, (keys.D, values.D), **rotates, k_frame=layer.k_frame, k_first=layer.k_first)
