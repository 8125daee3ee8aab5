"""`LatentStates`: keys or values of latent attention, which are read without being expanded; attention to latents."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_quant import machine
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.native import attention as native
from hf_quant.kv_cache._states import QuantizedStates, parts_of


class LatentStates(Tensor):
    """Keys or values [B, H, T, D] of all heads that are products of one latent; every op expands them.

    Attributes:
        expand_states: makes the plain tensor.
        attend: computes the attention of queries [B, H, S, D] to them -> [B, S, H, D of the values], from
            (q, mask, is_causal, scale, count); None if it cannot. mask: bool or additive [B|1, H|1, S|1, T]; count:
            of the first tokens, the others are not seen; is_causal: the positions of q are the last ones of these.
    """

    expand_states: Callable[[], Tensor]
    attend: Callable[[Tensor, Tensor | None, bool, float, int], Tensor | None]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        like: Tensor,
        expand_states: Callable[[], Tensor],
        attend: Callable[[Tensor, Tensor | None, bool, float, int], Tensor | None],
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
    widths = q.shape[3], q_turned.shape[3]
    reason = native.attention_unsupported_reason(q.dtype, max(widths), native.UNIT, None)
    if reason is not None or any(width % native.UNIT for width in widths):
        return None
    reads_codes = all(isinstance(x, QuantizedStates) and _are_read(x) for x in (latents, turned))
    spec = CODES[latents.kind.format] if reads_codes else None
    if not reads_codes:
        latents, turned = (x.dequantize() if isinstance(x, QuantizedStates) else x for x in (latents, turned))
    if not latents.dtype == turned.dtype == q.dtype:
        return None
    parts = _parts(latents), _parts(turned)
    return native.latent_attention(q, q_turned, *parts, mask, spec, is_causal=is_causal, scale=scale)


def attend_to_latents_by_products(
    q: Tensor,
    q_turned: Tensor,
    latents: Tensor,
    turned: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor | None:
    """`attend_to_latents` of one token of each sequence by ops of torch, scores in fp32; None for several tokens."""
    if q.shape[2] != 1:
        return None
    latents, turned = (x.dequantize() if isinstance(x, QuantizedStates) else x for x in (latents, turned))
    latents, turned = (x.squeeze(1).to(q.dtype) for x in (latents, turned))
    scores = _scores(q.squeeze(2), latents).add_(_scores(q_turned.squeeze(2), turned)).mul_(scale)  # [B, H, T]
    if mask is not None:
        mask = mask.squeeze(2)
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
    return torch.bmm(scores.softmax(-1).to(q.dtype), latents).unsqueeze(1)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """q [B, H, D] times keys [B, T, D] -> [B, H, T] in fp32."""
    if q.is_cuda and torch.version.hip is None and q.dtype != torch.float32:
        return torch.bmm(q, keys.mT, out_dtype=torch.float32)
    return torch.bmm(q.float(), keys.float().mT)


def attend_to_narrow(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> Tensor | None:
    """`attend_to_latents` to keys and narrower values of all heads, [B, H, T, D] -> [B, S, H, channels of values].

    None if it is not computed.
    """
    if is_fast_in_prompts(q.dtype):
        return native.attention_of_values(q, k, v, mask, is_causal=is_causal, scale=scale)
    if is_causal and q.shape[2] != k.shape[2]:
        return None
    wide = F.pad(v, (0, k.shape[3] - v.shape[3]))  # torch is fast with equal widths alone
    y = F.scaled_dot_product_attention(q, k, wide, mask, is_causal=is_causal, scale=scale)
    return y[..., : v.shape[3]].transpose(1, 2)


def is_fast_in_prompts(dtype: torch.dtype) -> bool:
    """True if torch's attention inside of prompts is not faster than the native one on this CPU."""
    return not (dtype == torch.bfloat16 and _has_amx())


@cache
def _has_amx() -> bool:
    return "amx_bf16" in machine.cpu()[1]


def _parts(states: Tensor) -> native.Latents:
    if not isinstance(states, QuantizedStates):
        return native.Latents((states,))
    return native.Latents(parts_of(states), states.kind.rotated, states.frame, states.first, states.starts)


def _are_read(states: QuantizedStates) -> bool:
    """True if a native kernel reads the codes: no token is held in 16 bit."""
    D, pairs = states.kind.D, states.pairs
    if states.window is not None or states.exact is not None:
        return False
    return native.attention_unsupported_reason(states.dtype, D, D // pairs.shape[3], pairs.dtype) is None
