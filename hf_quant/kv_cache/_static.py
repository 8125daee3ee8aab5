"""The cache layer of transformers that stores codes in memory of fixed size, for compiled and captured code."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from hf_quant.kernels.dispatch import is_plain
from hf_quant.kv_cache._config import KVCacheConfig
from hf_quant.kv_cache._layers import CodeStorage, differentiable, lasting
from hf_quant.kv_cache._states import QuantizedStates


class QuantizedStaticLayer(CodeStorage, StaticLayer):
    """Layer with up to `max_cache_len` tokens in memory of fixed address, for compiled code."""

    def __init__(self, config: KVCacheConfig, max_cache_len: int, is_sliding: bool = False) -> None:
        with lasting():
            super().__init__(max_cache_len)
        self._begin(config)
        self.is_sliding = is_sliding  # its window is no shorter than the cache: the masks of the model apply it
        self.is_empty = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._allocate(key_states, value_states, self.max_cache_len)
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        with lasting():
            self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*(t for _, t in self._tensors()), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _fits(self, key_states: Tensor, value_states: Tensor) -> bool:
        """True if the layer was allocated for as many heads of the same sizes."""
        held = (self.k_codes.shape[1], self.k_head_dim, self.v_head_dim)
        return held == (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])

    def _states(self, *exact: Tensor) -> tuple[QuantizedStates, QuantizedStates]:
        parts = (slice(None), self.cumulative_length, None)
        keys, values = exact or (None, None)
        return self._get("k", *parts, keys), self._get("v", *parts, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add states [B, H_kv, S, D]; return all states of the layer, [B, H_kv, max_cache_len, D]."""
        # Memory of the sizes that a config names does not fit a model that has others: Falcon with one head of keys,
        # MiMo-V2 with other heads in layers with a window.
        if not self.is_initialized or (self.is_empty and not self._fits(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        self._check_room(key_states.shape[2])
        new, start = (key_states, value_states), self.cumulative_length
        is_first, self.is_empty = self.is_empty, False
        exact = new if is_first else ()
        keys, values = self._own(*new)
        self._append(keys, values, start, is_first=is_first)
        self._noted = None
        if self.k_window is not None:
            self._keep(keys, values, start)
        self.cumulative_length.add_(key_states.shape[2])
        states = self._states(*exact)
        return states if exact else differentiable(states, new, self.cumulative_length - key_states.shape[2])

    def _check_room(self, count: int) -> None:
        """Raise ValueError if `count` more tokens do not fit, unless the length is unknown here.

        A length on a GPU, or in code that is compiled or captured, is not read: there the caller checks it, as with
        the static caches of transformers.
        """
        length = self.cumulative_length
        is_read = length.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(length)
        if not (self.is_empty or is_read):
            return
        used = 0 if self.is_empty else int(length)
        if used + count > self.max_cache_len:
            raise ValueError(
                f"{count} tokens more than the {used} in it do not fit into a cache of max_cache_len="
                f"{self.max_cache_len}: make it longer, or leave max_cache_len out"
            )

    @property
    def is_croppable(self) -> bool:
        """True if `crop` can put the layer back as it was: recent tokens in 16 bit take the places of earlier ones."""
        return not self.config.recent_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens. Raises RuntimeError for other numbers, and for recent tokens."""
        if tokens_to_remove > 0:
            raise RuntimeError("a cache of fixed size is cropped by a negative number: how many tokens to remove")
        if not self.is_croppable:
            raise RuntimeError(
                f"a cache of fixed size with recent_tokens={self.config.recent_tokens} cannot be cropped: choose "
                "recent_tokens=0, or a cache that grows (leave max_cache_len and cache_implementation out)"
            )
        self.cumulative_length.add_(tokens_to_remove)

    def reset(self) -> None:
        self.is_empty = True
        self.note_starts(None)
        if self.is_initialized:
            self.cumulative_length.zero_()
