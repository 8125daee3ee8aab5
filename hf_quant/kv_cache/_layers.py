"""Cache layers of transformers that store codes: growing, and growing within a sliding window.

A token is quantized once, when it is added. The first states of an empty layer are returned unchanged (by a layer of
fixed size together with the codes), so that attention inside a prompt is computed in 16 bit. After that a layer
returns `QuantizedStates`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_quant.kernels import kv_append
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import direct
from hf_quant.kv_cache._config import KVCacheConfig, scale_dtype
from hf_quant.kv_cache._frames import begun, frame_of, lacking
from hf_quant.kv_cache._states import Kind, QuantizedStates, Span


def lasting() -> Any:
    """Context for tensors that are written to both inside and outside of `torch.inference_mode`."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


BLOCK = 256  # tokens; a growing layer grows by at least this many, and by a sixteenth
_kv_append = direct(kv_append)


class FirstPrompt(int):
    """Length of a mask for the first prompt of an empty layer, which returns the prompt's own states in 16 bit.

    Attributes:
        cache: of the layer. A mask tells it where the sequences begin.
    """

    cache: Any = None


class CodeStorage:
    """Base of the three kinds of layers: the tensors of codes, and the code that writes and reads them."""

    config: KVCacheConfig
    is_initialized: bool
    is_compileable: bool  # its tensors keep their addresses
    is_empty: Any  # True if no token was added, or all were removed
    _states: Callable[..., tuple[QuantizedStates, QuantizedStates]]  # all keys and all values

    def _begin(self, config: KVCacheConfig) -> None:
        self.config = config.resolved()
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = False
        self._noted: tuple[int, ...] | None = None  # starts of the sequences of the first states
        for name in _TENSORS:
            setattr(self, name, None)

    def _allocate(self, key_states: Tensor, value_states: Tensor, capacity: int) -> None:
        """Allocate `capacity` tokens for the heads of the states. Raises ValueError if their dtype is unsupported."""
        for what, states in (("keys", key_states), ("values", value_states)):
            if states.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                raise ValueError(f"{what} are {states.dtype}; a quantized cache takes float16, bfloat16 and float32")
        config = self.config
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        window = config.sink_tokens + config.recent_tokens
        spec = CODES[config.format]
        options = {"device": self.device}
        # Columns without tokens have scales of 0, so that integers there may be any.
        new_codes = torch.empty if spec.is_integer else torch.zeros
        first = (*key_states.shape[:2], key_states.shape[-1])
        with lasting():
            for which, states in (("k", key_states), ("v", value_states)):
                layout = config.layout(states.shape[-1])
                shape = (*states.shape[:2], capacity)
                pairs = (*shape, layout.groups, layout.numbers)
                kept = (*states.shape[:2], window + 1, layout.D)
                setattr(self, f"{which}_codes", new_codes(*shape, layout.width, dtype=spec.dtype, **options))
                setattr(self, f"{which}_pairs", torch.zeros(pairs, dtype=scale_dtype(self.dtype), **options))
                setattr(self, f"{which}_window", torch.zeros(kept, dtype=states.dtype, **options) if window else None)
            self.k_frame = torch.empty(*first[:2], 2, first[2], dtype=torch.float32, **options)
            if not key_states.shape[2]:  # else these states set it
                self.k_frame.copy_(frame_of(key_states))
            # What sinks are in 16 bit needs no exact first key.
            self.k_first = None if config.sink_tokens else torch.zeros(first, dtype=torch.float32, **options)
        self._place_starts(key_states)
        kept = (config.sink_tokens, config.recent_tokens)
        self.key_kind = Kind(config.format, key_states.shape[-1], config.rotate_keys, *kept, key_states.dtype)
        self.value_kind = Kind(config.format, value_states.shape[-1], config.rotate_values, *kept, value_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (tokens, offset) for a mask; tokens is a `FirstPrompt` if there are none yet."""
        tokens, offset = super().get_mask_sizes(query_length)  # pyrefly: ignore[missing-attribute]
        return FirstPrompt(tokens) if self.is_empty and not torch.compiler.is_compiling() else tokens, offset

    def note_starts(self, starts: tuple[int, ...] | None) -> None:
        """Take the first column of each sequence in the first states, which come next; None: 0, without padding."""
        self._noted = starts

    def _place_starts(self, states: Tensor) -> None:
        """Write to `starts` where the first states of each sequence begin; growing layers have it for padding."""
        noted = self._noted
        if noted is not None and (len(noted) != states.shape[0] or max(noted) >= states.shape[2]):
            noted = self._noted = None
        if self.starts is None and (noted is not None or self.is_compileable):
            with lasting():
                self.starts = torch.zeros(states.shape[0], dtype=torch.int64, device=self.device)
        if noted is not None:
            self.starts.copy_(torch.tensor(noted))
        elif self.starts is not None:
            self.starts.zero_()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            with lasting():
                for name, tensor in self._tensors():
                    setattr(self, name, function(tensor))

    def _own(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Convert states to the dtypes of the first ones: in a model they change where autocast begins or ends.

        Raises ValueError if they are of another number of sequences than the cache.
        """
        held, given = self.k_codes.shape[0], key_states.shape[0]
        if given != held:
            raise ValueError(
                f"the states have the batch size {given}, and those in the cache {held}: give them a cache of their "
                "own, or repeat the sequences of this one by batch_repeat_interleave"
            )
        return _as(key_states, self.key_kind.dtype), _as(value_states, self.value_kind.dtype)

    def _append(self, keys: Tensor, values: Tensor, start: int | Tensor, *, is_first: bool = False) -> None:
        """Write states into the columns from `start` on; the first ones set the frame."""
        is_first = is_first and keys.shape[2] > 0
        if is_first:
            self._place_starts(keys)
        values, format = _as(values, keys.dtype), self.config.format
        options = {
            "format": format,
            "rotates_keys": self.config.rotate_keys,
            "rotates_values": self.config.rotate_values,
        }
        whole = (self.k_codes, self.k_pairs, self.v_codes, self.v_pairs)
        if is_first and begun(keys, values, start, _parts(*whole), self.k_frame, self.k_first, self.starts, **options):
            return
        if is_first:
            self.k_frame.copy_(frame_of(keys, self._noted))
        if isinstance(start, int):
            whole, start = tuple(part[:, :, start : start + keys.shape[2]] for part in whole), None
        parts = _parts(*whole)
        _kv_append(keys, values, start, *parts, k_frame=self.k_frame, **options)
        if is_first and self.k_first is not None:
            key, *codes = (part if part is None else self._at_starts(part) for part in (keys, *parts[:3]))
            kind = {"format": format, "rotated": self.config.rotate_keys}
            self.k_first.copy_(lacking(key, self.k_frame, *codes, **kind))

    def _at_starts(self, x: Tensor) -> Tensor:
        """The first token of each sequence of x [B, H, S, ...], which begins with the first states."""
        if self._noted is None:
            return x[:, :, :1]
        return torch.stack([row[:, start : start + 1] for row, start in zip(x, self._noted)])

    def _keep(self, keys: Tensor, values: Tensor, start: int | Tensor) -> None:
        """Store the first and the last tokens in 16 bit; the states begin at position `start`."""
        sinks, recents, S = self.config.sink_tokens, self.config.recent_tokens, keys.shape[2]
        trash = sinks + recents
        is_behind = isinstance(start, int) and start >= sinks + max(self._noted or (0,))
        for window, states in ((self.k_window, keys), (self.v_window, values)):
            if sinks and not is_behind and self.starts is not None:
                # Each slot takes the token of its position, if that is among the new ones.
                slots = self.starts[:, None] + torch.arange(sinks, device=self.device) - start
                token = slots.clamp(0, S - 1)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                is_new = ((slots >= 0) & (slots < S))[:, None, :, None]
                window[:, :, :sinks] = torch.where(is_new, states.gather(2, token), window[:, :, :sinks])
            elif sinks and not is_behind:
                positions = start + torch.arange(min(S, sinks), device=self.device)
                slots = torch.where(positions < sinks, positions, trash)
                window.index_copy_(2, slots, states[:, :, :sinks])
            if recents:
                count = min(S, recents)
                positions = start + torch.arange(S - count, S, device=self.device)
                window.index_copy_(2, sinks + positions % recents, states[:, :, S - count :])

    def _get(
        self, which: str, tokens: slice, length: Tensor | None, span: Span | None, exact: Tensor | None = None
    ) -> QuantizedStates:
        codes, pairs = (getattr(self, f"{which}_{name}")[:, :, tokens] for name in ("codes", "pairs"))
        kind, frame, first = (
            (self.value_kind, None, None) if which == "v" else (self.key_kind, self.k_frame, self.k_first)
        )
        starts = self.starts
        if span is not None and span.start:
            first = None if starts is None else first  # that token has left the window
            starts = None if starts is None else starts - span.start
        window = getattr(self, f"{which}_window")
        return QuantizedStates(codes, pairs, window, length, exact, frame, first, starts, kind, span)

    @property
    def keys(self) -> QuantizedStates | None:
        """Keys of the whole layer, which ops dequantize; for transformers code that reads `layer.keys`."""
        return self._states()[0] if self.is_initialized else None

    @keys.setter
    def keys(self, value: None) -> None:
        """Ignore the None that the constructor of the host assigns."""

    @property
    def values(self) -> QuantizedStates | None:
        """Values of the whole layer; see `keys`."""
        return self._states()[1] if self.is_initialized else None

    @values.setter
    def values(self, value: None) -> None:
        """Ignore the None that the constructor of the host assigns."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of this layer."""
        return sum(tensor.nbytes for _, tensor in self._tensors()) if self.is_initialized else 0

    # Methods of the host, applied to all tensors.

    def offload(self) -> None:
        self._apply(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized and self.k_codes.device != self.device:
            self._apply(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._apply(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        self._count_batch()

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda tensor: tensor[indices, ...])
        self._count_batch()

    def _count_batch(self) -> None:
        if self.is_initialized:
            self.batch_size = self.k_codes.shape[0]


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype and not x.requires_grad else x.detach().to(dtype)


def _parts(k_codes: Tensor, k_pairs: Tensor, v_codes: Tensor, v_pairs: Tensor) -> tuple[Tensor | None, ...]:
    """(codes, scales, offsets or None) of keys, then of values."""
    k_offset, v_offset = (pairs.select(4, 1) if pairs.shape[4] == 2 else None for pairs in (k_pairs, v_pairs))
    return k_codes, k_pairs.select(4, 0), k_offset, v_codes, v_pairs.select(4, 0), v_offset


_TENSORS = ("k_codes", "k_pairs", "k_window", "k_frame", "k_first", "v_codes", "v_pairs", "v_window", "starts")


class GrowingStorage(CodeStorage):
    """Base of the layers without a fixed size. Columns [first, first + tokens) of the tensors are in use."""

    def _clear(self) -> None:
        super()._clear()
        self._first = 0  # column of the first token
        self._start = 0  # its position
        self._end = 0  # position behind the last one
        self._recent = 0  # first position that the ring of the last tokens holds

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(key_states, value_states, _whole_blocks(key_states.shape[2] + BLOCK))
        self.is_initialized = True

    def _states(self, start: int | None = None) -> tuple[QuantizedStates, QuantizedStates]:
        """Return the states from position `start` on; None: all."""
        start = self._start if start is None else start
        first = self._first + start - self._start
        tokens = slice(first, first + self._end - start)
        span = Span(start, self._end, self._recent)
        return self._get("k", tokens, None, span), self._get("v", tokens, None, span)

    def _reserve(self, count: int) -> None:
        """Make room for `count` more tokens: the used columns are moved, or copied into larger tensors."""
        used, capacity = self._end - self._start, self.k_codes.shape[2]
        if self._first + used + count <= capacity:
            return
        room = max(BLOCK, used // 16)
        if used + count + room // 2 > capacity:  # else there is room once the tokens of the past are gone
            capacity = _whole_blocks(used + count + room)
        for name in ("k_codes", "k_pairs", "v_codes", "v_pairs"):
            tensor = getattr(self, name)
            kept = tensor[:, :, self._first : self._first + used]
            if tensor.shape[2] == capacity:
                kept = kept.clone()  # overlaps
            else:
                with lasting():
                    tensor = tensor.new_zeros((*tensor.shape[:2], capacity, *tensor.shape[3:]))
                setattr(self, name, tensor)
            tensor[:, :, :used] = kept
        self._first = 0

    def _add(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        S = key_states.shape[2]
        keys, values = self._own(key_states, value_states)
        self._reserve(S)
        column = self._first + self._end - self._start
        self._append(keys, values, column, is_first=self._end == 0)
        if self.k_window is not None:
            self._keep(keys, values, self._end)
        self._end += S
        self._recent = max(self._recent, self._end - self.config.recent_tokens)

    def _start_of_next(self) -> int:
        """Return the position of the first token that the next one attends to."""
        return self._start

    def _count(self, tokens: int) -> None:
        """Count tokens that were written into the columns of the next ones."""
        self._end += tokens
        self._recent = max(self._recent, self._end - self.config.recent_tokens)

    @property
    def is_empty(self) -> bool:
        return self._end == 0

    def note_starts(self, starts: tuple[int, ...] | None) -> None:
        if starts != self._noted and self.is_initialized:  # native blocks know the addresses of its tensors
            self._clear()
        self._noted = starts

    def _remove(self, count: int) -> None:
        self._end = max(self._end - count, self._start)
        self._recent = min(self._recent, self._end)  # else the ring would begin behind tokens that come next
        if self.is_empty:
            self.note_starts(None)

    def reset(self) -> None:
        self._clear()
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def differentiable(
    states: tuple[QuantizedStates, ...], new: tuple[Tensor, ...], first: int | Tensor
) -> tuple[Tensor, ...]:
    """The states, of which `new` are those from column `first` on; plain tensors if these need a gradient."""
    if not (torch.is_grad_enabled() and any(own.requires_grad for own in new)):
        return states
    columns = first + torch.arange(new[0].shape[2], device=new[0].device)
    return tuple(x.dequantize().to(own.dtype).index_copy(2, columns, own) for x, own in zip(states, new))


class QuantizedLayer(GrowingStorage, DynamicLayer):
    """Layer with the keys and values of all tokens."""

    def __init__(self, config: KVCacheConfig) -> None:
        super().__init__()
        self._begin(config)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states [B, H_kv, S, D]; return all states of the layer, or the given ones if the layer was empty."""
        before, new = self._end, (key_states, value_states)
        self._add(*new)
        return differentiable(self._states(), new, before) if before else new

    def get_seq_length(self) -> int:
        return self._end

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a positive number says how many to keep (older versions)."""
        keep_at_most = tokens_to_remove > 0
        self._remove(max(self._end - tokens_to_remove, 0) if keep_at_most else -tokens_to_remove)


class QuantizedHybridLayer(QuantizedLayer, LinearAttentionAndFullAttentionLayer):
    """Layer with the keys and values of all tokens, and the linear attention states of transformers."""

    def __init__(self, config: KVCacheConfig, number_of_states: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._begin(config)

    def lazy_initialization(self, *args: Tensor, **kwargs: Any) -> None:
        """Initialize keys and values, which come as two arguments, or other states, which come by name."""
        if args:
            QuantizedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        QuantizedLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        QuantizedLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        QuantizedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        QuantizedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)  # refuses what it cannot take back
        QuantizedLayer.crop(self, tokens_to_remove)


class QuantizedSlidingWindowLayer(GrowingStorage, DynamicSlidingWindowLayer):
    """Layer with the last `sliding_window - 1` tokens, and with more while the host may remove tokens again."""

    def __init__(self, config: KVCacheConfig, sliding_window: int) -> None:
        super().__init__(sliding_window)
        # The first tokens leave the window, too.
        self._begin(replace(config.resolved(), sink_tokens=0))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states [B, H_kv, S, D]; return the states that they attend to, or themselves if the layer was empty."""
        before, seen = self._end, (key_states, value_states)
        self._add(*seen)
        self.cumulative_length = self._end
        if before:
            start = max(self._start, before - self.sliding_window + 1)
            seen = differentiable(self._states(start), seen, before - start)
        if not self.record_past:
            self._trim()
        return seen

    def _start_of_next(self) -> int:
        return max(self._start, self._end - self.sliding_window + 1)

    def _count(self, tokens: int) -> None:
        super()._count(tokens)
        self.cumulative_length = self._end
        if not self.record_past:
            self._trim()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens, and the tokens that have left the window."""
        is_full = self._end >= self.sliding_window
        if is_full and not self.record_past:
            raise RuntimeError(
                "crop was called, but tokens have left the sliding window: call activate_past_recording first"
            )
        if is_full and tokens_to_remove > 0:
            raise RuntimeError("a full sliding window is cropped by a negative number: how many tokens to remove")
        self._remove(max(self._end - tokens_to_remove, 0) if tokens_to_remove > 0 else -tokens_to_remove)
        self.cumulative_length = self._end
        self._trim()

    def _trim(self) -> None:
        start = max(self._start, self._end - self.sliding_window + 1)
        self._first += start - self._start
        self._start = start
