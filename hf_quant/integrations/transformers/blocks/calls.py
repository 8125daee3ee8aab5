"""Calls of a host's attention and layers: the arguments that blocks know, and how they read them."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import MAX_ROWS, TOLERANCE, is_served
from hf_quant.kv_cache import CACHES, IGNORED_OPTIONS, cache_in


# Arguments of a call that blocks know. All else is left to the host.
TAKEN = {"hidden_states", *CACHES, "position_embeddings", "attention_mask", *IGNORED_OPTIONS}


def usable(mask: Any, B: int, heads: int, S: int, tokens: int) -> Tensor | None:
    """A mask [B, 1 or heads, S, tokens] as the block reads it, None if it is of another kind."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2] != S or mask.shape[3] < tokens:
        return None
    mask = mask[..., :tokens]
    mask = mask if mask.dtype == torch.bool else mask.float()
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    return mask.expand(B, heads, S, tokens) if mask.shape[0] in (1, B) and mask.shape[1] in (1, heads) else None


def implementation_of(module: nn.Module) -> str | None:
    """The name of the attention function that a module's config asks for."""
    config = getattr(module, "config", None)
    if config is None:
        return None  # its attention is code of its own
    attributes = config.__dict__  # its own access to attributes takes microseconds
    key = "_attn_implementation_internal"
    return attributes[key] if key in attributes else config._attn_implementation


def is_one_token(x: Any, kwargs: dict[str, Any]) -> bool:
    """True if a module is called for one token of each sequence, with a cache and nothing that blocks do not know."""
    if past_of(kwargs) is None or not are_tokens(x, kwargs):
        return False
    return x.shape[1] == 1 and x.shape[0] <= MAX_ROWS


def are_tokens(x: Any, kwargs: dict[str, Any]) -> bool:
    """True if a module is called for tokens x [B, S, K], with nothing that blocks do not know."""
    if not is_served(x) or x.dim() != 3 or x.dtype not in TOLERANCE or not x.numel():
        return False
    return all([name in TAKEN or value is None or value is False for name, value in kwargs.items()])


def length_of(past: Any, index: int) -> int:
    """The number of tokens that a layer of a cache holds, 0 without a cache."""
    length = getattr(past, "get_seq_length", None)
    return 0 if length is None else length(index)


def past_of(kwargs: dict[str, Any]) -> Any:
    """The cache of self-attention that a module is given, None without one."""
    past = cache_in(kwargs)
    return getattr(past, "self_attention_cache", past)  # of a decoder with an encoder
