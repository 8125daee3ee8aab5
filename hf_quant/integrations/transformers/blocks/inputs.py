"""The arguments of a decoder's call for new tokens, and the key of the block that serves it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.integrations.transformers.blocks.angles import POSITIONS, ROTARY, THREE_TIMES
from hf_quant.integrations.transformers.blocks.base import MAX_ROWS
from hf_quant.integrations.transformers.blocks.layer import CHUNK
from hf_quant.kernels.kv_attention.op import visible
from hf_quant.kv_cache import CACHES, cache_in, takes_tokens


INPUTS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", *CACHES)
SETTINGS = (bool, int, float, str, type(None))


class Inputs(NamedTuple):
    """S new tokens of each of B sequences, as a decoder is given them.

    Attributes:
        ids: [B, S], or None if `x` is given.
        x: the embedding [B, S, K], or None.
        positions: [1 or B, S], or as the host makes them from the length of the cache, if `own_positions`.
        past: the cache.
        padding: a mask [B, tokens] that is not all ones, or None.
    """

    ids: Tensor | None
    x: Tensor | None
    positions: Tensor
    own_positions: bool
    past: Any
    padding: Tensor | None

    @property
    def sizes(self) -> tuple[int, int]:
        """(B, S)."""
        return tuple((self.x if self.ids is None else self.ids).shape[:2])

    def mask(self, tokens: int) -> Tensor | None:
        """The padding of the last tokens as a mask, bool [B, 1, S, tokens or fewer], None without padding."""
        if self.padding is None:
            return None
        return self.padding[:, None, None, -tokens:].bool().expand(-1, 1, self.sizes[1], -1)

    def seen(self, tokens: int, window: int | None) -> Tensor:
        """The last tokens that each new one sees, with a window or without: bool [1 or B, 1, S, tokens]."""
        causal = visible(self.sizes[1], tokens, tokens, window or 0, "cpu")[None, None]
        mask = self.mask(tokens)
        return causal if mask is None else causal & mask

    def place_of(self, value: Any) -> object | None:
        """The mark of positions that a host made, or passed on; None for all else."""
        positions = self.positions
        if value is positions:
            return POSITIONS
        if not isinstance(value, Tensor) or value.dtype != positions.dtype:
            return None
        if positions.dim() == 2 and value.dim() == 3:
            return THREE_TIMES if len(value) == 3 and bool((value == positions).all()) else None
        if self.own_positions:
            return POSITIONS if torch.equal(value, positions) else None
        rest = positions[1:]
        is_rest = positions.dim() == 3 and value.data_ptr() == rest.data_ptr()
        return ROTARY if is_rest and torch.equal(value, rest) else None


def _inputs_of(kwargs: dict[str, Any], is_whole: bool) -> Inputs | None:
    """Return the arguments of a decoder, None if they are not few tokens with a cache that blocks know.

    `is_whole`: the mask is known to be all ones.
    """
    ids, x, positions, mask = [kwargs.get(name) for name in INPUTS[:4]]
    past = cache_in(kwargs)
    if isinstance(mask, dict) and all([each is None for each in mask.values()]):
        mask = None  # a multimodal model (Gemma 3) makes the masks of all kinds of layers itself, and needs none
    given = x if ids is None else ids
    if past is None or (ids is not None and x is not None) or not isinstance(given, Tensor) or not given.is_cpu:
        return None
    if given.dim() != (3 if ids is None else 2) or not given.numel():
        return None
    if not hasattr(past, "layers") or type(past).__hash__ is None:  # blocks know a cache by its hash
        return None
    B, S = given.shape[:2]
    if B * S > (MAX_ROWS if S == 1 else CHUNK) or (S > 1 and not takes_tokens(past)):
        return None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != len(given):
            return None
        mask = None if is_whole or bool(mask.all()) else mask
    if positions is None:
        return Inputs(ids, x, past.get_seq_length() + torch.arange(S)[None], True, past, mask)
    return Inputs(ids, x, positions, False, past, mask) if isinstance(positions, Tensor) else None


def named_inputs(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a decoder by name, None if more than its ids has none."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        return None
    return {"input_ids": args[0], **kwargs} if args else kwargs


def _setting(name: str, value: Any) -> Any:
    """A value of a call as a part of its key: kinds of tokens (of text and of images) are 0 for a token of text."""
    is_kind = name.endswith("token_type_ids") and isinstance(value, Tensor)
    return 0 if is_kind and not bool(value.any()) else value


class NewTokens(NamedTuple):
    """A call of a decoder for new tokens of each sequence: its inputs, the key of the block that serves it."""

    inputs: Inputs
    key: tuple

    @classmethod
    def of(cls, kwargs: dict[str, Any], *, is_whole: bool = False) -> "NewTokens | None":
        """The call with these arguments, None if it is of another kind. `is_whole`: the mask is all ones for sure."""
        inputs = _inputs_of(kwargs, is_whole)
        if inputs is None:
            return None
        settings = tuple([(name, _setting(name, value)) for name, value in kwargs.items() if name not in INPUTS])
        if not all([isinstance(value, SETTINGS) for _, value in settings]):
            return None
        kind = (inputs.ids is None, inputs.own_positions, type(kwargs.get("attention_mask")), inputs.padding is None)
        return cls(inputs, (inputs.sizes[1] == 1, kind, settings))
