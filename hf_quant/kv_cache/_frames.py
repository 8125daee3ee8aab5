"""The frame of a head's keys: a mean and a spread of each channel, found in the first tokens of a cache.

`hf_quant.kernels.kv_attention.op` says what a frame does and why attention stays exact. It is set once, by the first
states of an empty layer (the prompt, or the part of it that is read first), and holds for all tokens that come later.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_quant.kernels import hadamard
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import direct, is_plain
from hf_quant.kernels.kv_attention.op import decode_heads, framed, rotate, rotation_block
from hf_quant.kernels.native.attention import append, append_unsupported_reason


_hadamard = direct(hadamard)
_TOKENS = 4096  # that a frame is found from, at most: 4 bytes a value meanwhile


def frame_of(keys: Tensor, starts: Sequence[int] | None = None) -> Tensor:
    """Compute the frame fp32 [B, H_kv, 2, D] of keys [B, H_kv, S, D]: the mean, and the spread, of each channel.

    The first token is left out, as many models make it unlike all others (attention sinks,
    https://arxiv.org/abs/2309.17453).
    The spread is the square root of the standard deviation, in relation to that of all channels, which is half-way
    between equal errors in all channels and errors in proportion to a channel: best on SmolLM2-135M, Gemma 3 270M and
    the small model of the tests together. One more token, of the variance of all channels, keeps few tokens from
    saying too much. A single token, and a head with NaN or infinity, has the mean 0 and the spread 1. `starts`: the
    first token of each sequence, those before it are padding.
    """
    if starts is not None:
        return torch.cat([frame_of(keys[b : b + 1, :, start:]) for b, start in enumerate(starts)])
    tokens = keys[:, :, 1:_TOKENS].to(torch.float32, copy=True)
    count = tokens.shape[2]
    if count == 0:
        return _neutral(keys)
    # torch.var_mean takes ten times as long on CPUs. Relative to one token equal tokens have no variance, as there.
    first = tokens[:, :, :1].clone()
    mean = tokens.sub_(first).mean(2, keepdim=True)
    variance, mean = tokens.sub_(mean).square_().mean(2), mean.add_(first).squeeze(2)
    whole = variance.mean(-1, keepdim=True)
    share = (count * variance + whole) / ((count + 1) * whole)
    frame = torch.stack([mean, torch.where(whole > 0, share, 1.0).pow_(0.25)], 2)
    is_finite = frame.isfinite()
    if _is_read(frame) and bool(is_finite.all()):
        return frame
    return torch.where(is_finite.all(-1, keepdim=True).all(-2, keepdim=True), frame, _neutral(keys))


def begun(
    keys: Tensor,
    values: Tensor,
    start: int | Tensor,
    parts: Sequence[Tensor | None],
    frame: Tensor,
    first: Tensor | None,
    starts: Tensor | None,
    *,
    format: str,
    rotates_keys: bool,
    rotates_values: bool,
) -> bool:
    """Write the first states of a cache, their frame and what the first key lacks, in one native call.

    False: it does not serve these states, and nothing is written. `parts` as `kv_append` takes them: codes, scales and
    offsets of keys and of values. starts: as in `kv_attention`.
    """
    if not (_is_read(keys) and _is_read(values) and frame.is_contiguous()):
        return False
    if any(append_unsupported_reason(x.dtype, x.shape[3], parts[1].dtype) is not None for x in (keys, values)):
        return False
    append(
        *(keys, values, int(start), tuple(parts[:3]), tuple(parts[3:]), CODES[format]),
        **{"rotates_keys": rotates_keys, "rotates_values": rotates_values},
        **{"k_frame": frame, "begins": True, "first_lacks": first, "starts": starts},
    )
    return True


def _neutral(keys: Tensor) -> Tensor:
    zeros = torch.zeros(*keys.shape[:2], keys.shape[3], dtype=torch.float32, device=keys.device)
    return torch.stack([zeros, zeros + 1], 2)


def _is_read(x: Tensor) -> bool:
    """True if Python may look at values of x: it is in the CPU's memory, and nothing traces."""
    return not torch.compiler.is_compiling() and x.is_cpu and is_plain(x)


def lacking(
    key: Tensor, frame: Tensor, codes: Tensor, scale: Tensor, offset: Tensor | None, *, format: str, rotated: bool
) -> Tensor:
    """Compute what the codes of one token's key [B, H_kv, 1, D] lack, in their space: fp32 [B, H_kv, D]."""
    exact = framed(key, frame)
    decoded = decode_heads(codes, scale, offset, CODES[format], key.shape[3])
    if rotated:
        exact = _hadamard(exact, block_size=rotation_block(key.shape[3])) if _is_read(exact) else rotate(exact)
    return (exact - decoded).squeeze(2)
