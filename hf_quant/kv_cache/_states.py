"""`QuantizedStates`: the keys or values of one layer, as the cache passes them to the attention of a model."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_quant.kernels.codes import CODES
from hf_quant.kernels.kv_attention.op import add_first, decode_heads, rotate


logger = logging.getLogger(__name__)

_TENSORS = ("codes", "pairs", "window", "length", "exact", "frame", "first", "starts")
_noted: list[bool] = []
_BLOCK = 2**21  # values decoded at once: 8 MB in fp32


class Kind(NamedTuple):
    """Interpretation of the codes of states."""

    format: str
    D: int
    rotated: bool  # the values were rotated before they were quantized
    sinks: int  # number of first tokens that `window` holds
    recents: int  # number of last tokens that `window` holds
    dtype: torch.dtype  # of the states


class Span(NamedTuple):
    """Positions of the tokens that growing states hold, one token for each column."""

    start: int
    end: int  # behind the last
    recent: int  # the first position that `window` holds of the last tokens


class QuantizedStates(Tensor):
    """Keys or values [B, H_kv, T, D] stored as codes; every op outside of hf_quant dequantizes them."""

    codes: Tensor  # [B, H_kv, T, width]
    pairs: Tensor  # scales with or without offsets [B, H_kv, T, groups, 1 or 2]
    # [B, H_kv, sinks + recents + 1, D] in 16 bit: the first tokens, then a ring of the last ones (position p at
    # sinks + p % recents), then one that means nothing.
    window: Tensor | None
    length: Tensor | None  # one int64 on the device: how many of the T tokens there are, in a cache of fixed size
    exact: Tensor | None  # the first tokens of a cache of fixed size as they came, [B, H_kv, length, D]
    frame: Tensor | None  # of keys: their means and spreads, fp32 [B, H_kv, 2, D]
    first: Tensor | None  # what the codes of the first key lack, fp32 [B, H_kv, D]; None if that token is not there
    starts: Tensor | None  # the column of each sequence's first token, int64 [B]; None: those before it are no padding
    kind: Kind
    span: Span | None  # None where length is not

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        pairs: Tensor,
        window: Tensor | None,
        length: Tensor | None,
        exact: Tensor | None,
        frame: Tensor | None,
        first: Tensor | None,
        starts: Tensor | None,
        kind: Kind,
        span: Span | None,
    ) -> "QuantizedStates":
        shape = (*codes.shape[:3], kind.D)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=kind.dtype, device=codes.device)
        self.codes, self.pairs, self.window, self.length, self.exact = codes, pairs, window, length, exact
        self.frame, self.first, self.starts, self.kind, self.span = frame, first, starts, kind, span
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in _TENSORS if getattr(self, name) is not None], (self.kind, self.span)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Sequence[int], stride: Any) -> Tensor:
        kind, span = meta
        return QuantizedStates(*(inner.get(name) for name in _TENSORS), kind, span)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        plain = lambda x: x.noted().dequantize() if isinstance(x, QuantizedStates) else x  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:
        return f"QuantizedStates({tuple(self.shape)}, {self.kind.format}, dtype={self.dtype}, device={self.device})"

    def dequantize(self) -> Tensor:
        """Dequantize to [B, H_kv, T, D], with the tokens of `window` in 16 bit. Behind `length`: undefined."""
        B, H, T = self.shape[:3]
        spec, kind = CODES[self.kind.format], self.kind
        out = torch.empty(B, H, T, kind.D, dtype=kind.dtype, device=self.codes.device)
        step = T if torch.compiler.is_compiling() else _BLOCK // max(B * H * kind.D, 1)
        for start in range(0, T, max(step, 1)):
            tokens = slice(start, min(start + max(step, 1), T))
            values = decode_heads(*(p if p is None else p[:, :, tokens] for p in parts_of(self)), spec, kind.D)
            if self.first is not None:
                add_first(values, self.first, self.starts, start)
            values = rotate(values) if kind.rotated else values
            if self.frame is not None:
                values = values * self.frame[:, :, 1:] + self.frame[:, :, :1]
            out[:, :, tokens] = values
        if self.window is not None:
            _put_window(out, self)
        if self.exact is not None:
            out[:, :, : self.exact.shape[2]] = self.exact
        return out  # contiguous like the wrapper: ops are decomposed by its strides

    def noted(self) -> "QuantizedStates":
        """Return self; warn once that an op dequantizes whole states."""
        if not _noted and not torch.compiler.is_compiling():
            _noted.append(True)
            logger.warning(
                "the attention of this model cannot read the codes of the quantized cache: the cache of each layer is "
                "dequantized when it is read, which costs time and the memory of one layer"
            )
        return self


# Functions, not methods: code that torch.compile traces may only read attributes of states.


def parts_of(states: QuantizedStates) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (codes, scale, offset), the arguments of `kv_attention`."""
    pairs = states.pairs
    return states.codes, pairs[..., 0], pairs[..., 1] if pairs.shape[-1] == 2 else None


def window_positions(states: QuantizedStates) -> Tensor:
    """Return the positions of the tokens in `window`, -1 for an empty slot: int64 [B or 1, sinks + recents]."""
    sinks, recents, device, span = states.kind.sinks, states.kind.recents, states.codes.device, states.span
    end: int | Tensor = states.length if span is None else span.end
    starts = _starts_of(states)
    first = torch.arange(sinks, device=device) + starts
    found = [torch.where(first < end, first, -1)]
    if recents:
        last = torch.arange(recents, device=device)
        last = (end - 1) - ((end - 1) - last) % recents
        is_held = last >= starts + sinks
        found.append(torch.where(is_held if span is None else is_held & (last >= span.recent), last, -1))
    return torch.atleast_2d(torch.cat(found, -1))


def _starts_of(states: QuantizedStates) -> int | Tensor:
    """The first position of each sequence, int64 [B, 1]; 0 for all."""
    if states.starts is None:
        return 0
    return states.starts[:, None] + (0 if states.span is None else states.span.start)


def _put_window(out: Tensor, states: QuantizedStates) -> None:
    """Write the tokens of `window` over their columns of `out` [B, H_kv, T, D]."""
    B, H, T, D = out.shape
    sinks, recents = states.kind.sinks, states.kind.recents
    first = 0 if states.span is None else states.span.start
    positions = window_positions(states)
    columns = torch.arange(T, device=out.device)
    some, last = columns[:sinks], columns[:recents]
    of_some = (some + (_starts_of(states) - first)) % max(T, 1)
    for own, slots in ((of_some, some), (last, sinks + (last + first) % max(recents, 1))):
        held = positions[:, slots]
        # An empty slot rewrites the old values of a column that no other slot writes.
        column = torch.where(held >= first, held - first, own)[:, None, :, None].expand(B, H, -1, D)
        values = states.window.index_select(2, slots)
        values = torch.where((held >= first)[:, None, :, None], values, out.gather(2, column))
        out.scatter_(2, column, values)
