"""`LatentStates`: keys or values of latent attention, which are read without being expanded; attention to latents."""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_quant.kernels import hadamard
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.kv_attention.op import decode_heads, rotation_block
from hf_quant.kernels.native import attention as native
from hf_quant.kv_cache._attention import attend
from hf_quant.kv_cache._states import QuantizedStates, parts_of


class LatentStates(Tensor):
    """Keys or values [B, H, T, D] of all heads that are products of one latent; every op expands them.

    Attributes:
        expand_states: makes the plain tensor.
        attend: computes the attention of queries [B, H, S, D] to them -> [B, S, H, D of the values], from
            (q, mask, is_causal, scale); None if it cannot. mask: bool or additive [B|1, H|1, S|1, T]; is_causal: the
            positions of q are the last ones.
    """

    expand_states: Callable[[], Tensor]
    attend: Callable[[Tensor, Tensor | None, bool, float], Tensor | None]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        like: Tensor,
        expand_states: Callable[[], Tensor],
        attend: Callable[[Tensor, Tensor | None, bool, float], Tensor | None],
    ) -> "LatentStates":
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self.expand_states, self.attend = expand_states, attend
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        plain = lambda x: x.expand_states() if isinstance(x, LatentStates) else x  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:
        return f"LatentStates({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def attend_to_latents(
    q: Tensor,
    q_turned: Tensor,
    latents: Tensor,
    turned: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor | None:
    """softmax((q @ latents.T + q_turned @ turned.T) * scale + mask) @ latents on a CPU -> [B, S, H, K] in q's dtype.

    q [B, H, S, K], q_turned [B, H, S, D]; latents [B, 1, T, K] and turned [B, 1, T, D]: tensors, or states of a
    quantized cache. mask: bool or additive [B|1, H|1, S|1, T]. With `is_causal` position i sees tokens up to
    T - S + i. None if the native kernels do not compute it.
    """
    B, H, S, K = q.shape
    if native.attention_unsupported_reason(q.dtype, K, native.UNIT, None) is not None or K % native.UNIT:
        return None
    added = _scores((q_turned.float() * scale).flatten(1, 2), turned).view(B, H, S, -1)
    if mask is not None:
        added = added.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else added + mask
    if isinstance(latents, QuantizedStates) and not _are_read(latents):
        latents = latents.dequantize()
    if latents.dtype != q.dtype:
        return None
    parts = gcd(H, torch.get_num_threads()) if B == 1 else 1  # tasks, as all heads read one
    if parts > 1:
        q, added = (x[0].unflatten(0, (parts, -1)) for x in (q, added))
        latents = _repeated(latents, parts)
    of = _attend_to_codes if isinstance(latents, QuantizedStates) else _attend_to_values
    y = of(q, latents, added, is_causal, scale)
    return y if y is None or parts == 1 else y.transpose(0, 1).reshape(1, S, H, K)


def _are_read(states: QuantizedStates) -> bool:
    """True if a native kernel reads the codes: no token is held in 16 bit."""
    D, pairs = states.kind.D, states.pairs
    if states.window is not None or states.exact is not None:
        return False
    return native.attention_unsupported_reason(states.dtype, D, D // pairs.shape[3], pairs.dtype) is None


def _scores(q: Tensor, turned: Tensor) -> Tensor:
    """q fp32 [B, R, D] @ turned.T -> fp32 [B, R, T]."""
    if not isinstance(turned, QuantizedStates):
        return q @ turned[:, 0].float().mT
    if not _are_read(turned):
        return q @ turned.dequantize()[:, 0].float().mT
    kind = turned.kind
    return native.scores(q.contiguous(), parts_of(turned), CODES[kind.format], scale=1.0, rotates=kind.rotated)


def _repeated(states: Tensor, count: int) -> Tensor:
    """States [1, 1, T, K] as those of `count` sequences, in the same memory."""
    if not isinstance(states, QuantizedStates):
        return states.expand(count, -1, -1, -1)
    codes, pairs, frame, first = (
        part if part is None else part.expand(count, *part.shape[1:])
        for part in (states.codes, states.pairs, states.frame, states.first)
    )
    return QuantizedStates(codes, pairs, None, states.length, None, frame, first, states.kind, states.span)


def _attend_to_values(q: Tensor, latents: Tensor, added: Tensor, is_causal: bool, scale: float) -> Tensor | None:
    return native.attention_of_values(q, latents, latents, added, is_causal=is_causal, scale=scale)


def _attend_to_codes(q: Tensor, keys: QuantizedStates, added: Tensor, is_causal: bool, scale: float) -> Tensor:
    """The same from the codes of keys: of values they lack what keys have in their frame, and their first token."""
    kind, first = keys.kind, keys.first
    values = QuantizedStates(keys.codes, keys.pairs, None, keys.length, None, None, None, kind, keys.span)
    y, log_sum = attend(q, keys, values, added, is_causal=is_causal, window=0, scale=scale)
    mean, spread = keys.frame[:, :, :1], keys.frame[:, :, 1:]
    y = y.float()
    if first is not None:
        codes = (part if part is None else part[:, :, :1] for part in parts_of(keys))
        lacking = first.unsqueeze(2)
        token = decode_heads(*codes, CODES[kind.format], kind.D) + lacking
        if kind.rotated:
            size = rotation_block(kind.D)
            token, lacking = (hadamard(x, block_size=size) for x in (token, lacking))
        score = (q.float() @ (token * spread).mT).squeeze(-1) * scale + added[..., 0]  # without the mean, as log_sum
        weight = (score - log_sum).exp().masked_fill(log_sum.isneginf(), 0.0)
        y = y + weight.unsqueeze(-1) * lacking
    return (y * spread + mean).to(q.dtype).transpose(1, 2)
