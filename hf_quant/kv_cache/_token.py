"""`next_token`: a growing layer of a cache, for a native block that writes one token into it and attends to all."""

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
        self.cache: object = None

    def __reduce__(self) -> tuple:
        return _Prepared, ()


def next_token(layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype) -> NextToken | None:
    """Make room in a layer for one token of each of B sequences, with `num_heads` keys and values of D channels.

    None if this layer takes new tokens only through its `update`: it is of another kind, empty, keeps tokens in
    16 bit, or its sequences, heads or dtype are others.
    """
    if type(layer) not in _SERVED:
        return None
    kind, prepared = (B, num_heads, D, dtype), layer.__dict__.get("_prepared")
    if prepared is None or prepared.kind != kind or prepared.codes is not layer.k_codes:
        if not _is_served(layer, *kind):
            return None
        prepared = layer.__dict__["_prepared"] = _Prepared()
        prepared.kind = kind
    if not layer._end:
        return None
    layer._reserve(1)
    if prepared.codes is not layer.k_codes:
        prepared.cache, prepared.codes = _prepare(layer), layer.k_codes
    if prepared.cache is None:
        return None
    start = layer._start_of_next()
    place = (layer._first + start - layer._start, layer._end + 1 - start, start == 0 and layer.k_first is not None)
    return NextToken(prepared.cache, place, layer)


def _is_served(layer: Any, B: int, num_heads: int, D: int, dtype: torch.dtype) -> bool:
    if not layer.is_initialized or layer.k_window is not None:
        return False
    if layer.k_codes.shape[:2] != (B, num_heads) or not layer.k_codes.is_cpu:
        return False
    keys, values = layer.key_kind, layer.value_kind
    return keys.D == values.D == D and keys.dtype == values.dtype == dtype


def _prepare(layer: GrowingStorage) -> object:
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
