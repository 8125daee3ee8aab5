"""Layers of a decoder computed ahead: one native call at the first of them, whose followers only hand out results.

What lies between two layers in Python costs as much as a product. When a host calls a layer with the result of the
one before and the very arguments of that one, the layers are remembered as followers. At the next token the first one
computes all of them. Each follower, when its host calls it, compares what it is given, counts its token in the cache
and returns its result. A host that goes another way (a hook that changes a result, a layer left out) finds the cache
without those tokens, and everything is computed anew.
"""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.attention import addresses_of, usable
from hf_quant.integrations.transformers.blocks.base import State, Watch, state_of
from hf_quant.kernels.native.blocks import run_in_turn


_PAST = "past_key_values"


class Row:
    """A layer and its followers, with the native blocks of all. The layer's state keeps it; it keeps no module."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.dtype, self.config, self.is_whole = dtype, module._modules["self_attn"].config, True
        self.modules: list[weakref.ref] = []
        self.blocks: list[Any] = []
        follower: nn.Module | None = module
        while follower is not None and self._add(follower, state_of(follower)):
            follower = state_of(follower).following()
        self.watch = Watch.of_all([block.watch for block in self.blocks])

    def _add(self, module: nn.Module, state: State | None) -> bool:
        block = None if state is None else state.found.get(self.dtype)
        if block is None or module._modules["self_attn"].config is not self.config:
            return False
        attention = block.attention
        if any(attention.index == known.attention.index for known in self.blocks):
            return False
        if self.blocks and (attention.sizes != self.blocks[0].attention.sizes or block.K != self.blocks[0].K):
            return False
        self.is_whole = block.watch.holds()  # else the block is made anew when the host calls its layer
        if self.is_whole:
            state.reason = None  # an adapter or a hook may be gone again
            self.modules.append(weakref.ref(module))
            self.blocks.append(block)
        return self.is_whole

    def run(self, state: State, x: Tensor, angles: Any, kwargs: dict[str, Any]) -> "Run | None":
        """Compute all layers, as far as their caches take the token; None if that is one layer or less."""
        mask, past, first = kwargs.get("attention_mask"), kwargs[_PAST], self.blocks[0].attention
        tokens: list[kv_cache.NextToken] = []
        for block in self.blocks:
            token = block.attention.next_token(past, len(x))
            if token is None or (mask is not None and tokens and token.place[1] != tokens[0].place[1]):
                break
            tokens.append(token)
        if len(tokens) < 2:
            return None
        if mask is not None and (mask := usable(mask, len(x), first.sizes.heads, tokens[0].place[1])) is None:
            return None
        with torch.inference_mode(False):  # in which tensors do not count their changes
            y = torch.empty((len(tokens), *x.shape), dtype=x.dtype)
            results = y.unbind(0)
        cos, sin, stride = addresses_of(angles, first.sizes.turned)
        blocks = [block.block for block in self.blocks[: len(tokens)]]
        caches, places = tuple([token.cache for token in tokens]), [token.place for token in tokens]
        run_in_turn(blocks, len(x), stride, caches, places, mask, x.data_ptr(), cos, sin, y.data_ptr())
        tokens[0].done()
        run = Run(state, results[0], kwargs)
        run.modules, run.ahead = self.modules, list(zip(tokens, results))
        return run


class Run:
    """A layer whose result its host has, with what it was given, and its followers that are computed already.

    A thread keeps its last one, which therefore keeps no model, and no cache once all followers were called.
    """

    def __init__(self, state: State, y: Tensor, kwargs: dict[str, Any]) -> None:
        self.leader = self.last = weakref.ref(state)
        self.y, self.version = y, _version_of(y)
        self.past = weakref.ref(kwargs[_PAST])
        self.kwargs = {name: value for name, value in kwargs.items() if name != _PAST}
        self.modules: list[weakref.ref] = []
        self.ahead: list[tuple[kv_cache.NextToken, Tensor]] = []
        self.index = 0

    def is_followed_by(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """True if a layer is called with the result of this one and its arguments."""
        if x is not self.y or _version_of(x) != self.version or len(kwargs) != len(self.kwargs) + 1:
            return False
        if kwargs.get(_PAST) is not self.past():
            return False
        return all([kwargs.get(name, self) is value for name, value in self.kwargs.items()])

    def next(self, module: nn.Module, state: State, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The result of the layer that is called now, None if it has to be computed."""
        index, follows, leader, last = self.index + 1, self.is_followed_by(x, kwargs), self.leader(), self.last()
        if leader is None or last is None:
            return None
        if index < len(self.ahead):
            token, y = self.ahead[index]
            if follows and self.modules[index]() is module and token.is_next():
                token.done()
                self.index, self.y, self.last = index, y, weakref.ref(state)
                if index + 1 == len(self.ahead):
                    self.modules, self.ahead = [], []
                return y
            leader.row = last.follower = None  # the others were computed in vain
        elif follows and state.found and last.following() is not module:
            last.follower, leader.row = weakref.ref(module), None
        return None


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Thread(threading.local):
    run: Run | None = None


thread = _Thread()


def row_of(module: nn.Module, state: State, dtype: torch.dtype) -> Row | None:
    """The row that begins with a module, None if nothing follows it or its own block has to be made anew."""
    row = state.row
    if row is None or row.dtype != dtype or not row.is_whole or not row.watch.holds():
        state.row = None
        if state.follower is None:
            return None
        row = state.row = Row(module, dtype)
    return row if row.blocks and row.config is module._modules["self_attn"].config else None
