"""Caches of keys and values as codes, in C++: attention over a cache, and the append of new tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels.codes import CodeSpec
from hf_quant.kernels.native.arguments import DTYPES, INPUTS, UNIT, bits, layout, layout_arguments
from hf_quant.kernels.native.extension import active, module, unavailable_reason


NO_LAYOUT = (6, 0, False)  # of values, which are no codes


def attention_unsupported_reason(
    dtype: torch.dtype, D: int, group_size: int, scale_dtype: torch.dtype | None
) -> str | None:
    """The reason why attention over codes of heads of D channels is not computed here, None if it is."""
    if active() is None:
        return unavailable_reason()
    if dtype not in INPUTS:
        return f"only bf16, fp16 and fp32 queries, not {dtype}"
    if group_size % UNIT:
        return f"groups of {group_size} are no multiple of {UNIT}"
    if scale_dtype is not None and scale_dtype not in DTYPES:
        return f"scales of {scale_dtype}, which the extension does not know"
    most = module.max_head_dim()
    return f"heads of {D} channels; at most {most}" if D > most else None


def attention(
    q: Tensor,
    keys: tuple[Tensor, Tensor, Tensor | None],
    values: tuple[Tensor, Tensor, Tensor | None],
    mask: Tensor | None,
    spec: CodeSpec,
    *,
    is_causal: bool,
    window: int,
    scale: float,
    softcap: float | None,
    rotates_keys: bool,
    rotates_values: bool,
    k_frame: Tensor | None,
    k_first: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`kv_attention`; keys and values are (codes, scale, offset). The caller has checked that they are supported."""
    B, H, S, D = q.shape
    H_kv, T, groups = *keys[0].shape[1:3], keys[1].shape[3]
    result, lse = torch.empty_like(q), torch.empty(B, H, S, dtype=torch.float32, device="cpu")
    q = q if q.stride(3) == 1 else q.contiguous()
    y = result if result.stride(3) == 1 else torch.empty(q.shape, dtype=q.dtype, device="cpu")
    keys, values = _rows_of_cache(*keys), _rows_of_cache(*values)  # referred to until the end of the call
    lacking = [part if part is None else part.contiguous() for part in (k_frame, k_first, starts)]
    mask, mask_arguments = _mask_arguments(mask, (B, H, S, T))
    module.attention(
        *(B, H, H_kv, S, T, DTYPES[q.dtype], *layout_arguments(spec)),
        *(D, groups, D // groups, q.data_ptr(), *q.stride()[:3], rotates_keys, rotates_values),
        *(0 if part is None else part.data_ptr() for part in lacking),
        *(y.data_ptr(), *y.stride()[:3], lse.data_ptr()),
        *_cache_arguments(*keys),
        *_cache_arguments(*values),
        *mask_arguments,
        *(is_causal, window, *bits(scale, softcap or 0.0), 0, 0, torch.get_num_threads(), False),
    )
    return (y if y is result else result.copy_(y)), lse


def attention_of_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """softmax(q @ k.T * scale + mask) @ v in fp32 -> [B, S, H, D] in q's dtype; None if it is not computed here.

    q [B, H, S, D] and k, v [B, H_kv, T, D] of one dtype; values, and the result, may have fewer channels. mask: bool
    or floating-point [B|1, H|1, S|1, T]. With `is_causal` position i sees tokens up to T - S + i. softcap: scores
    become softcap * tanh(score / softcap). sinks [H]: one more score for each head, with no value.
    """
    (B, H, S, D), (H_kv, T) = q.shape, k.shape[1:3]
    wide = -(-D // UNIT) * UNIT  # further channels of zeros: SigLIP has 72
    if attention_unsupported_reason(q.dtype, wide, UNIT, None) is not None or H % H_kv:
        return None
    if k.shape[0] != B or v.shape[:3] != k.shape[:3] or k.shape[3] != D or v.shape[3] > D:
        return None
    if mask is not None and (mask.dim() != 4 or mask.shape[3] != T):
        return None
    if k.dtype is not q.dtype or v.dtype is not q.dtype or (sinks is not None and sinks.dtype not in DTYPES):
        return None
    D, D_v = wide, v.shape[3]
    q, k, v = (x if x.shape[3] == D else F.pad(x, (0, D - x.shape[3])) for x in (q, k, v))
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    y = torch.empty(B, S, H, D, dtype=q.dtype, device="cpu")
    lse = torch.empty(B, H, S, dtype=torch.float32, device="cpu")
    mask, mask_arguments = _mask_arguments(mask, (B, H, S, T))
    sinks = None if sinks is None else sinks.contiguous()
    sinks_arguments = (0, 0) if sinks is None else (sinks.data_ptr(), DTYPES[sinks.dtype])
    module.attention(
        *(B, H, H_kv, S, T, DTYPES[q.dtype], *NO_LAYOUT, D, 1, D, q.data_ptr(), *q.stride()[:3], False),
        *(False, 0, 0, 0, y.data_ptr(), y.stride(0), y.stride(2), y.stride(1), lse.data_ptr()),
        *_cache_arguments(k),
        *_cache_arguments(v),
        *mask_arguments,
        *(is_causal, 0, *bits(scale, softcap or 0.0), *sinks_arguments, torch.get_num_threads(), False),
    )
    return y[..., :D_v]


class Latents(NamedTuple):
    """The latents of all tokens, or the part of their keys that is turned, [B, 1, T, D].

    Attributes:
        parts: the values alone, or (codes, scale, offset) of a cache.
        rotates: those of a cache were rotated.
        frame, first, starts: of a cache, see `kv_attention`.
    """

    parts: tuple[Tensor, ...] | tuple[Tensor, Tensor, Tensor | None]
    rotates: bool = False
    frame: Tensor | None = None
    first: Tensor | None = None
    starts: Tensor | None = None


def latent_attention(
    q: Tensor,
    q_turned: Tensor,
    latents: Latents,
    turned: Latents,
    mask: Tensor | None,
    spec: CodeSpec | None,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """softmax((q @ latents.T + q_turned @ turned.T) * scale + mask) @ latents -> [B, S, H, K] in q's dtype.

    q [B, H, S, K], q_turned [B, H, S, D]; of latents and turned that are no codes, spec is None. mask: bool or
    floating-point [B|1, H|1, S|1, T]. The caller has checked that all is supported (`attention_unsupported_reason`).
    """
    (B, H, S, K), T = q.shape, latents.parts[0].shape[2]
    y = torch.empty(B, S, H, K, dtype=q.dtype, device="cpu")
    lse = torch.empty(B, H, S, dtype=torch.float32, device="cpu")
    mask, mask_arguments = _mask_arguments(mask, (B, H, S, T))
    queries, caches, held = [], [], []  # referred to until the end of the call
    for x, of in ((q, latents), (q_turned, turned)):
        x, parts = x if x.stride(3) == 1 else x.contiguous(), _rows_of_cache(*of.parts)
        groups, D = 1 if spec is None else parts[1].shape[3], x.shape[3]
        queries.append((D, groups, D // groups, x.data_ptr(), *x.stride()[:3], of.rotates))
        caches.append(_cache_arguments(*parts))
        held += [x, *parts]
    lacking = [part if part is None else part.contiguous() for part in (latents.frame, latents.first, latents.starts)]
    module.attention(
        *(B, H, 1, S, T, DTYPES[q.dtype], *(NO_LAYOUT if spec is None else layout_arguments(spec)), *queries[0]),
        *(latents.rotates, *(0 if part is None else part.data_ptr() for part in lacking)),
        *(y.data_ptr(), y.stride(0), y.stride(2), y.stride(1), lse.data_ptr()),
        *(*caches[0], *caches[0], *mask_arguments),
        *(is_causal, 0, *bits(scale, 0.0), 0, 0, torch.get_num_threads(), True, *queries[1], *caches[1]),
    )
    return y


def _mask_arguments(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor | None, tuple[int, ...]]:
    """(a mask as the extension reads it, to be held, its arguments)."""
    if mask is None:
        return None, (0, 0, 0, 0, 0)
    mask = mask if mask.dtype == torch.bool else mask.float()
    mask = (mask if mask.stride(3) == 1 else mask.contiguous()).expand(shape)
    return mask, (mask.data_ptr(), DTYPES[torch.int8 if mask.dtype == torch.bool else mask.dtype], *mask.stride()[:3])


def _rows_of_cache(
    codes: Tensor, scale: Tensor | None = None, offset: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same with the codes of a token in one piece, and scales and offsets at equal distances."""
    codes = codes if codes.stride(3) == 1 else codes.contiguous()
    if offset is not None and offset.stride() != scale.stride():
        scale, offset = scale.contiguous(), offset.contiguous()
    return codes, scale, offset


def _cache_arguments(codes: Tensor, scale: Tensor | None = None, offset: Tensor | None = None) -> tuple[int, ...]:
    size = codes.element_size()
    codes_arguments = (codes.data_ptr(), *(stride * size for stride in codes.stride()[:3]))
    if scale is None:  # values
        return (*codes_arguments, 0, 0, 0, 0, 0, 0, 0)
    return (
        *codes_arguments,
        *(scale.data_ptr(), 0 if offset is None else offset.data_ptr(), DTYPES[scale.dtype], *scale.stride()),
    )


def append_unsupported_reason(dtype: torch.dtype, D: int, scale_dtype: torch.dtype | None) -> str | None:
    """The reason why new keys or values of D channels are not written into a cache here, None if they are."""
    if active() is None:
        return unavailable_reason()
    if dtype not in INPUTS:
        return f"only bf16, fp16 and fp32 input, not {dtype}"
    if scale_dtype is not None and scale_dtype not in INPUTS:
        return f"scales of {scale_dtype}, which the extension does not know"
    most = module.max_head_dim()
    return f"heads of {D} channels; at most {most}" if D > most else None


def append(
    k: Tensor,
    v: Tensor,
    start: int,
    keys: tuple[Tensor, Tensor, Tensor | None],
    values: tuple[Tensor, Tensor, Tensor | None],
    spec: CodeSpec,
    *,
    rotates_keys: bool,
    rotates_values: bool,
    k_frame: Tensor | None,
    begins: bool = False,
    first_lacks: Tensor | None = None,
    starts: Tensor | None = None,
) -> None:
    """`kv_append`; keys and values are (codes, scale, offset). The caller has checked that they are supported.

    begins: the tokens are the first ones of a cache: k_frame is found and written, and what the codes of the first
    key lack is written to first_lacks [B, H, D], fp32, if it is given. Both are contiguous. starts: as in
    `kv_attention`; what lies before belongs to no frame.
    """
    B, H, S, _ = k.shape
    skipped, end = max(-start, 0), min(S, keys[0].shape[2] - start)
    if end <= skipped:
        return
    if skipped:
        k, v, start = k[:, :, skipped:], v[:, :, skipped:], 0
    k = k if k.stride(3) == 1 else k.contiguous()  # referred to until the end of the call
    v = v if v.stride(3) == 1 else v.contiguous()
    k_frame = None if k_frame is None else k_frame.contiguous()
    module.append(
        *(B, H, end - skipped, start, layout(spec), DTYPES[k.dtype]),
        *(begins, *(0 if part is None else part.data_ptr() for part in (first_lacks, starts))),
        *appended_arguments(k, rotates_keys, k_frame, *keys),
        *appended_arguments(v, rotates_values, None, *values),
        torch.get_num_threads(),
    )


def appended_arguments(
    x: Tensor | int, rotates: bool, frame: Tensor | None, codes: Tensor, scale: Tensor | None, offset: Tensor | None
) -> tuple[int, ...]:
    """Arguments of the extension for new keys or values x [B, H, S, D] and their cache; x may be D alone.

    A cache without scales has values instead of codes.
    """
    return (
        x if isinstance(x, int) else x.shape[3],
        1 if scale is None else scale.shape[3],
        rotates,
        0 if frame is None else frame.data_ptr(),
        *((0, 0, 0, 0, 0) if isinstance(x, int) else (x.data_ptr(), *x.stride())),
        codes.element_size(),
        codes.data_ptr(),
        *codes.stride(),
        *((0, 0, 0, 0, 0, 0) if scale is None else (DTYPES[scale.dtype], scale.data_ptr(), *scale.stride())),
        *((0, 0, 0, 0, 0) if offset is None else (offset.data_ptr(), *offset.stride())),
    )
