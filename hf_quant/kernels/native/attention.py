"""Caches of keys and values as codes, in C++: attention over a cache, and the append of new tokens."""

import struct

import torch
from torch import Tensor

from hf_quant.kernels.codes import CodeSpec
from hf_quant.kernels.native.arguments import DTYPES, INPUTS, UNIT, layout, levels
from hf_quant.kernels.native.extension import active, module, unavailable_reason


_VALUES = 6  # a layout: no codes


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
) -> tuple[Tensor, Tensor]:
    """`kv_attention`; keys and values are (codes, scale, offset). The caller has checked that they are supported."""
    B, H, S, D = q.shape
    H_kv, T, groups = *keys[0].shape[1:3], keys[1].shape[3]
    result, lse = torch.empty_like(q), torch.empty(B, H, S, dtype=torch.float32, device="cpu")
    q = q if q.stride(3) == 1 else q.contiguous()
    y = result if result.stride(3) == 1 else torch.empty(q.shape, dtype=q.dtype, device="cpu")
    keys, values = _rows_of_cache(*keys), _rows_of_cache(*values)  # referred to until the end of the call
    k_frame, k_first = (part if part is None else part.contiguous() for part in (k_frame, k_first))
    mask, mask_arguments = _mask_arguments(mask, (B, H, S, T))
    module.attention(
        *(B, H, H_kv, S, T, D, layout(spec), levels(spec.name, False).data_ptr(), spec.is_integer),
        *(groups, D // groups),
        *(q.data_ptr(), DTYPES[q.dtype], *q.stride()[:3], rotates_keys, rotates_values),
        *(0 if part is None else part.data_ptr() for part in (k_frame, k_first)),
        *(y.data_ptr(), *y.stride()[:3], lse.data_ptr()),
        *_cache_arguments(*keys),
        *_cache_arguments(*values),
        *mask_arguments,
        *(
            is_causal,
            window,
            *struct.unpack("2I", struct.pack("2f", scale, softcap or 0.0)),
            0,
            0,
            torch.get_num_threads(),
        ),
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

    q [B, H, S, D] and k, v [B, H_kv, T, D] of one dtype. mask: bool or floating-point [B|1, H|1, S|1, T]. With
    `is_causal` position i sees tokens up to T - S + i. softcap: scores become softcap * tanh(score / softcap). sinks
    [H]: one more score for each head, with no value.
    """
    (B, H, S, D), (H_kv, T) = q.shape, k.shape[1:3]
    if attention_unsupported_reason(q.dtype, D, UNIT, None) is not None or D % UNIT or H % H_kv or v.shape != k.shape:
        return None
    if mask is not None and (mask.dim() != 4 or mask.shape[3] != T):
        return None
    if k.dtype is not q.dtype or v.dtype is not q.dtype or (sinks is not None and sinks.dtype not in DTYPES):
        return None
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    y = torch.empty(B, S, H, D, dtype=q.dtype, device="cpu")
    lse = torch.empty(B, H, S, dtype=torch.float32, device="cpu")
    mask, mask_arguments = _mask_arguments(mask, (B, H, S, T))
    strides = [[stride * x.element_size() for stride in x.stride()[:3]] for x in (k, v)]
    sinks = None if sinks is None else sinks.contiguous()
    sinks_arguments = (0, 0) if sinks is None else (sinks.data_ptr(), DTYPES[sinks.dtype])
    module.attention(
        *(B, H, H_kv, S, T, D, _VALUES, 0, False, 1, D),
        *(q.data_ptr(), DTYPES[q.dtype], *q.stride()[:3], False, False, 0, 0),
        *(y.data_ptr(), y.stride(0), y.stride(2), y.stride(1), lse.data_ptr()),
        *(k.data_ptr(), *strides[0], 0, 0, 0, 0, 0, 0, 0),
        *(v.data_ptr(), *strides[1], 0, 0, 0, 0, 0, 0, 0),
        *mask_arguments,
        *(is_causal, 0, *struct.unpack("2I", struct.pack("2f", scale, softcap or 0.0)), *sinks_arguments),
        torch.get_num_threads(),
    )
    return y


def scores(
    q: Tensor, keys: tuple[Tensor, Tensor, Tensor | None], spec: CodeSpec, *, scale: float, rotates: bool
) -> Tensor:
    """q [B, S, D] fp32 contiguous @ keys.T * scale, of keys (codes, scale, offset) of one head -> fp32 [B, S, T].

    rotates: the keys were rotated. The caller has checked that they are supported (`attention_unsupported_reason`).
    """
    (B, S, D), (T, groups) = q.shape, keys[1].shape[2:4]
    y = torch.empty(B, S, T, dtype=torch.float32, device="cpu")
    of_heads = tuple(part if part is None else part.transpose(0, 1) for part in _rows_of_cache(*keys))  # one each
    module.head_products(
        *(False, rotates, B, S, T, D, layout(spec), levels(spec.name, False).data_ptr(), spec.is_integer),
        *(groups, D // groups, q.data_ptr(), DTYPES[q.dtype], q.stride(1), q.stride(0)),
        *(y.data_ptr(), y.stride(1), y.stride(0), *_cache_arguments(*of_heads)),
        *(*struct.unpack("I", struct.pack("f", scale)), torch.get_num_threads()),
    )
    return y


def _mask_arguments(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor | None, tuple[int, ...]]:
    """(a mask as the extension reads it, to be held, its arguments)."""
    if mask is None:
        return None, (0, 0, 0, 0, 0)
    mask = mask if mask.dtype == torch.bool else mask.float()
    mask = (mask if mask.stride(3) == 1 else mask.contiguous()).expand(shape)
    return mask, (mask.data_ptr(), DTYPES[torch.int8 if mask.dtype == torch.bool else mask.dtype], *mask.stride()[:3])


def _rows_of_cache(codes: Tensor, scale: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same with the codes of a token in one piece, and scales and offsets at equal distances."""
    codes = codes if codes.stride(3) == 1 else codes.contiguous()
    if offset is not None and offset.stride() != scale.stride():
        scale, offset = scale.contiguous(), offset.contiguous()
    return codes, scale, offset


def _cache_arguments(codes: Tensor, scale: Tensor, offset: Tensor | None) -> tuple[int, ...]:
    size = codes.element_size()
    return (
        *(codes.data_ptr(), *(stride * size for stride in codes.stride()[:3])),
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
) -> None:
    """`kv_append`; keys and values are (codes, scale, offset). The caller has checked that they are supported.

    begins: the tokens are the first ones of a cache: k_frame is found and written, and what the codes of the first
    key lack is written to first_lacks [B, H, D], fp32, if it is given. Both are contiguous.
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
        *(begins, 0 if first_lacks is None else first_lacks.data_ptr()),
        *appended_arguments(k, rotates_keys, k_frame, *keys),
        *appended_arguments(v, rotates_values, None, *values),
        torch.get_num_threads(),
    )


def appended_arguments(
    x: Tensor | int, rotates: bool, frame: Tensor | None, codes: Tensor, scale: Tensor, offset: Tensor | None
) -> tuple[int, ...]:
    """Arguments of the extension for new keys or values x [B, H, S, D] and their cache; x may be D alone."""
    return (
        x if isinstance(x, int) else x.shape[3],
        scale.shape[3],
        rotates,
        0 if frame is None else frame.data_ptr(),
        *((0, 0, 0, 0, 0) if isinstance(x, int) else (x.data_ptr(), *x.stride())),
        codes.element_size(),
        codes.data_ptr(),
        *codes.stride(),
        DTYPES[scale.dtype],
        scale.data_ptr(),
        *scale.stride(),
        *((0, 0, 0, 0, 0) if offset is None else (offset.data_ptr(), *offset.stride())),
    )
