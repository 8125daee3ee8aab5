"""`kv_append` and `kv_attention` on CPU: the native kernels, or torch's ops (attention: on blocks of tokens)."""

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.kv_attention import op
from hf_quant.kernels.native import attention as native


_BLOCK = 2**21  # codes decoded at once: 8 MB in fp32


def _supports_native(problem: Problem) -> str | None:
    return native.attention_unsupported_reason(problem.dtype, problem.K, problem.group_size, None)


PATHS = (
    Path("native kernel (C++)", "any length", _supports_native),
    Path("decoded blocks of tokens", "any length", lambda problem: None),
)


@implements(op.kv_attention, "CPU", PATHS)
def kv_attention_cpu(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor | None,
    mask: Tensor | None,
    length: Tensor | None,
    *,
    format: str,
    is_causal: bool,
    window: int,
    scale: float | None,
    rotates_keys: bool,
    rotates_values: bool = False,
    k_frame: Tensor | None = None,
    k_first: Tensor | None = None,
    starts: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `kv_attention_reference`."""
    op.check(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, length, format, is_causal, window, scale)
    op.check_more(q, k_codes, k_frame, k_first, starts, softcap)
    spec, D = CODES[format], q.shape[3]
    q = q.detach()
    scale = D**-0.5 if scale is None else scale
    keys, values = (k_codes, k_scale, k_offset), (v_codes, v_scale, v_offset)
    if length is not None:
        end = min(max(int(length), 0), k_codes.shape[2])
        keys, values = ([part if part is None else part[:, :, :end] for part in parts] for parts in (keys, values))
        mask = None if mask is None else mask[..., :end]
    how = {"is_causal": is_causal, "window": window, "scale": scale}
    how |= {"rotates_values": rotates_values, "k_first": k_first, "starts": starts, "softcap": softcap}
    if native.attention_unsupported_reason(q.dtype, D, D // k_scale.shape[-1], k_scale.dtype) is None:
        return native.attention(q, keys, values, mask, spec, rotates_keys=rotates_keys, k_frame=k_frame, **how)
    shift = None if softcap is None else op.mean_scores(q, k_frame, scale)
    q = op.query_rows(q, k_frame, rotates=rotates_keys)
    return attend_in_blocks(q, keys, values, mask, None, spec, shift=shift, **how)


def attend_in_blocks(
    q: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    mask: Tensor | None,
    length: Tensor | None,
    spec: CodeSpec,
    *,
    is_causal: bool,
    window: int,
    scale: float,
    rotates_values: bool,
    k_first: Tensor | None,
    starts: Tensor | None,
    softcap: float | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`kv_attention` by torch's ops on blocks of tokens, on any device; keys and values are (codes, scale, offset).

    Queries are those of `op.query_rows`; shift is what `op.mean_scores` gives, if scores are capped. `length` is not
    read on the host.
    """
    y = torch.zeros_like(q, dtype=torch.float32)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    T = keys[0].shape[2]
    # All positions end at one place: a block that ends earlier is met without its future by the mask of the block.
    step = max(_BLOCK // max(q.shape[0] * keys[0].shape[1] * q.shape[3], 1), 1)
    end = T if length is None else length.clamp(0, T)
    seen = op.visible(q.shape[2], T, end, window, q.device) if is_causal else None
    exists = None if length is None else torch.arange(T, device=q.device).unsqueeze(0) < end
    for start in range(0, T, step):
        tokens = slice(start, start + step)
        cuts = [[part if part is None else part[:, :, tokens] for part in parts] for parts in (keys, values)]
        visible = None if seen is None else seen[:, tokens]
        if exists is not None:
            here = exists[:, tokens]
            visible = here if visible is None else visible & here
            # Nobody has written behind the end: a weight of 0 times NaN is NaN.
            cuts[1][1:] = [part if part is None else part.masked_fill(~here.t(), 0) for part in cuts[1][1:]]
        cut = None if mask is None else mask[..., tokens]
        part = _attend(q, *cuts, cut, visible, spec, scale, k_first, starts, start, softcap, shift)
        y, lse = op.merge(y, lse, *part)
    return torch.empty_like(q).copy_(op.rotate(y) if rotates_values else y), lse


def _attend(q, keys, values, mask, seen, spec, scale, k_first, starts, token, softcap, shift) -> tuple[Tensor, Tensor]:
    """Attention over a block of tokens from `token` on, in fp32."""
    (B, H, S, D), H_kv = q.shape, keys[0].shape[1]
    rows = H // H_kv * S  # that see the same keys
    k, v = op.decode_heads(*keys, spec, D), op.decode_heads(*values, spec, D)
    if k_first is not None:
        op.add_first(k, k_first, starts, token)
    scores = ((q.float() * scale).reshape(B, H_kv, rows, D) @ k.transpose(2, 3)).view(B, H, S, k.shape[2])
    if softcap is not None:
        scores = op.capped(scores + shift.unsqueeze(-1), softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp_()
    return (weights.view(B, H_kv, rows, k.shape[2]) @ v).view(B, H, S, D), lse


def _supports_append(problem: Problem) -> str | None:
    return native.append_unsupported_reason(problem.dtype, problem.K, None)


@implements(op.kv_append, "CPU", (Path("native kernel (C++)", "any length", _supports_append),))
def kv_append_cpu(
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor | None,
    *,
    format: str,
    rotates_keys: bool,
    rotates_values: bool = False,
    k_frame: Tensor | None = None,
) -> None:
    """Compute `kv_append_reference`: by the native kernel where that supports it, else by the reference."""
    keys, values = (k_codes, k_scale, k_offset), (v_codes, v_scale, v_offset)
    how = {"rotates_keys": rotates_keys, "rotates_values": rotates_values, "k_frame": k_frame}
    for x, scale in ((k, k_scale), (v, v_scale)):
        if native.append_unsupported_reason(x.dtype, x.shape[-1], scale.dtype) is not None:
            op.kv_append_reference(k, v, start, *keys, *values, format=format, **how)
            return
    op.check_append(k, v, start, *keys, *values, format, k_frame)
    if k.numel() != 0:
        first = 0 if start is None else int(start)
        native.append(k, v, first, keys, values, CODES[format], **how)
