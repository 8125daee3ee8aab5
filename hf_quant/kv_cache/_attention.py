"""Attention over quantized states: the kernel reads the codes, torch ops the 16-bit tokens; both are merged."""

import torch
from torch import Tensor

from hf_quant.kernels import kv_attention
from hf_quant.kernels.dispatch import direct
from hf_quant.kernels.kv_attention.op import capped, merge
from hf_quant.kernels.kv_attention.op import mean_scores as _mean_scores
from hf_quant.kv_cache._states import QuantizedStates, parts_of, window_positions


_kv_attention = direct(kv_attention)


def attend(
    q: Tensor,
    keys: QuantizedStates,
    values: QuantizedStates,
    mask: Tensor | None,
    *,
    is_causal: bool,
    window: int,
    scale: float | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q @ keys.T * scale + mask) @ values -> ([B, H, S, D] as q, log-sum-exp of the scores fp32 [B, H, S]).

    mask: boolean or additive, [B|1, H|1, S|1, T]. is_causal: the positions of q are the last ones of the states; with
    a window they see only that many positions. The recent 16-bit tokens are read if q has at most `recents` positions.
    The scores are those of the keys without the mean of their frame, in the log-sum-exp, too: see `mean_scores`. With
    a softcap they are softcap * tanh(score / softcap), mean included.
    """
    options = {"format": keys.kind.format, "scale": scale, "k_frame": keys.frame, "k_first": keys.first}
    options |= {} if keys.first is None else {"starts": keys.starts}
    options |= {"rotates_keys": keys.kind.rotated, "rotates_values": values.kind.rotated}
    options |= {} if softcap is None else {"softcap": softcap}
    S, sinks = q.shape[2], keys.kind.sinks
    reads_recents = 0 < S <= keys.kind.recents
    if not (sinks or reads_recents):
        causal = {"is_causal": is_causal, "window": window if is_causal else 0}
        return _kv_attention(q, *parts_of(keys), *parts_of(values), mask, keys.length, **causal, **options)
    # Behind padding each sequence has its first tokens elsewhere: a mask leaves them out.
    first = sinks if keys.starts is None else 0
    if keys.span is None:
        last, length = None, keys.length - first - (keys.kind.recents if reads_recents else 0)
    else:
        start, end, recent = keys.span
        first, length = max(first - start, 0), None
        last = max((recent if reads_recents else end) - start, first)
    tokens = slice(first, last)
    codes = [[part if part is None else part[:, :, tokens] for part in parts_of(states)] for states in (keys, values)]
    seen = None if mask is None else mask[..., tokens]
    if keys.starts is not None and sinks:
        behind = torch.arange(codes[0][0].shape[2], device=q.device) - keys.starts[:, None]
        seen = _and(seen, ((behind < 0) | (behind >= sinks))[:, None, None])
    # The codes end before the positions, which the kernel does not know. The window of a cache of fixed size is no
    # shorter than the cache: it holds every token.
    if keys.span is not None and is_causal and window and reads_recents:
        behind = torch.arange(end - S, end, device=q.device).unsqueeze(1) - torch.arange(first, last, device=q.device)
        seen = _and(seen, (behind - start < window)[None, None])
    causal = is_causal and not reads_recents
    causal = {"is_causal": causal, "window": window if causal else 0}
    y, lse = _kv_attention(q, *codes[0], *codes[1], seen, length, **causal, **options)
    more = _attend_window(q, keys, values, mask, is_causal, window, scale, softcap, reads_recents)
    y, lse = merge(y.float(), lse, *more)
    return torch.empty_like(q).copy_(y), lse


def mean_scores(q: Tensor, keys: QuantizedStates, scale: float | None) -> Tensor:
    """Compute the score of the mean key for each query: what the log-sum-exp of `attend` lacks, fp32 [B, H, S].

    The softmax over tokens does not need it, and capped scores have it. A score that is not a product with a key needs
    it: that of a learned sink.
    """
    return _mean_scores(q, keys.frame, q.shape[3] ** -0.5 if scale is None else scale)


def _and(mask: Tensor | None, seen: Tensor) -> Tensor:
    """Restrict a mask to the pairs in `seen`, bool [B or 1, 1, S or 1, T]."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _attend_window(
    q: Tensor,
    keys: QuantizedStates,
    values: QuantizedStates,
    mask: Tensor | None,
    is_causal: bool,
    window: int,
    scale: float | None,
    softcap: float | None,
    reads_recents: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the attention over the tokens in 16 bit -> (y fp32 [B, H, S, D], lse fp32 [B, H, S])."""
    (B, H, S, D), H_kv = q.shape, keys.shape[1]
    count = keys.kind.sinks + (keys.kind.recents if reads_recents else 0)
    positions = window_positions(keys)[:, None, None, :count]
    end: int | Tensor = keys.length if keys.span is None else keys.span.end
    first = 0 if keys.span is None else keys.span.start
    seen = positions >= first
    if is_causal:
        behind = (end - S + torch.arange(S, device=q.device)).unsqueeze(1) - positions
        seen = seen & (behind >= 0) & ((behind < window) if window else True)
    if mask is not None:
        columns = (positions - first).clamp(min=0)
        rows = max(mask.shape[0], columns.shape[0])
        columns = columns.expand(rows, *mask.shape[1:3], -1)
        seen = _and(mask.expand(rows, *mask.shape[1:]).gather(-1, columns), seen)
    k, v = (states.window[:, :, :count].float() for states in (keys, values))
    k = k if softcap is not None else k - keys.frame[:, :, :1]
    scores = q.float().reshape(B, H_kv, H // H_kv * S, D) @ k.mT * (D**-0.5 if scale is None else scale)
    scores = scores.view(B, H, S, count) if softcap is None else capped(scores.view(B, H, S, count), softcap)
    scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen.float()
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp()
    return (weights.view(B, H_kv, -1, count) @ v).view(B, H, S, D), lse
