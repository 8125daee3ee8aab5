"""`kv_attention`: scaled dot product attention whose keys and values are codes of a quantized cache.

The reference is the specification: decode in fp32, multiply, add up and take the softmax in fp32. Not differentiable.
"""

import torch
from torch import Tensor

from hf_quant.kernels._op import define_op
from hf_quant.kernels.codes import CODES, CodeSpec, decode_codes, unpack_codes


def code_width(spec: CodeSpec, D: int) -> int:
    """Elements of `spec.dtype` that the codes of a head take: D, or int32 words without padding."""
    return D * spec.bits // 32 if spec.is_packed else D


def check(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor | None,
    mask: Tensor | None,
    format: str,
    is_causal: bool,
    window: int,
    scale: float | None,
) -> None:
    """Raise ValueError unless the arguments are as `kv_attention_reference` wants them."""
    if not q.is_floating_point() or q.dim() != 4 or q.shape[3] == 0:
        raise ValueError(f"q is {tuple(q.shape)} {q.dtype}; needs [B, H, S, D] in fp16, bf16 or fp32, D above 0")
    spec = CODES.get(format)
    if spec is None or len(spec.planes) > 1:
        allowed = ", ".join(name for name, known in CODES.items() if len(known.planes) < 2)
        raise ValueError(f"format is {format!r}; allowed: {allowed}")
    B, H, S, D = q.shape
    if spec.is_packed and D * spec.bits % 32:
        raise ValueError(f"D={D}: codes of {spec.bits} bits of a head must fill words of 32 bits")
    if k_codes.dim() != 4 or k_codes.shape[1] == 0 or H % k_codes.shape[1]:
        raise ValueError(f"k_codes is {tuple(k_codes.shape)}; needs [B, H_kv, T, width], where H_kv divides H={H}")
    shape = (B, *k_codes.shape[1:3], code_width(spec, D))
    scale_shape = (*shape[:3], k_scale.shape[-1] if k_scale.dim() else 0)
    groups = scale_shape[-1]
    for name, codes, scales, offset in (("k", k_codes, k_scale, k_offset), ("v", v_codes, v_scale, v_offset)):
        if codes.shape != shape or codes.dtype != spec.dtype:
            raise ValueError(
                f"{name}_codes is {tuple(codes.shape)} {codes.dtype}; {format} with q {tuple(q.shape)} needs "
                f"{shape} {spec.dtype}"
            )
        if scales.shape != scale_shape or not scales.is_floating_point() or not groups or D % groups:
            raise ValueError(
                f"{name}_scale is {tuple(scales.shape)} {scales.dtype}; needs {shape[:3]} and groups, as many for k"
                f" as for v, that divide D={D}, in a floating-point dtype"
            )
        if scales.dtype != k_scale.dtype:
            raise ValueError(f"v_scale is {v_scale.dtype}; needs {k_scale.dtype}, the dtype of k_scale")
        if offset is not None and (offset.shape != scales.shape or offset.dtype != scales.dtype):
            raise ValueError(
                f"{name}_offset is {tuple(offset.shape)} {offset.dtype}; needs {tuple(scales.shape)} {scales.dtype}"
            )
    if mask is not None:
        full = (B, H, S, shape[2])
        fits = mask.dim() == 4 and all(have in (1, need) for have, need in zip(mask.shape[:3], full))
        if not fits or mask.shape[3] != full[3] or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ValueError(
                f"mask is {tuple(mask.shape)} {mask.dtype}; needs a boolean or floating-point [B|1, H|1, S|1, T] of "
                f"{full}"
            )
    if window < 0 or (window and not is_causal):
        raise ValueError(f"window is {window} and is_causal {is_causal}; needs 0, or a number of tokens if causal")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale is {scale}; must be above 0, or None for 1 / sqrt(D)")


def decode_heads(codes: Tensor, scale: Tensor, offset: Tensor | None, spec: CodeSpec, D: int) -> Tensor:
    """Codes [..., width], scale and offset [..., groups] -> level * scale + offset, fp32 [..., D]."""
    if spec.is_packed:
        words = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % spec.bits))  # whole units of 32 codes
        levels = torch.tensor(spec.levels, dtype=torch.float32, device=codes.device)
        values = levels[unpack_codes(words, spec.planes, D).int()]
    else:
        values = decode_codes(codes, spec, D)
    values = values.unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)
    return (values if offset is None else values + offset.float().unsqueeze(-1)).flatten(-2)


def visible(S: int, T: int, window: int, device: torch.device) -> Tensor:
    """Which tokens a position sees in causal attention, bool [S, T]: the positions are the last ones of T."""
    past = torch.arange(T - S, T, device=device).unsqueeze(1) - torch.arange(T, device=device)
    return (past >= 0) & (past < window) if window else past >= 0


def kv_attention_reference(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor | None,
    mask: Tensor | None,
    *,
    format: str,
    is_causal: bool,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """softmax(q @ k.T * scale + mask) @ v -> (y [B, H, S, D] in memory as q, lse [B, H, S] fp32).

    q [B, H, S, D] fp16, bf16, fp32. Keys and values: codes [B, H_kv, T, width] of a format without or with one bit
    plane (packed along D, without padding), scale and offset [B, H_kv, T, groups] of equal groups of D: a value is the
    level of its code times scale plus offset. Heads h * H / H_kv to (h + 1) * H / H_kv of q meet head h. All may have
    any strides, as a cache grows in place.

    mask: boolean (True is seen) or to be added, [B|1, H|1, S|1, T]. is_causal: position i sees tokens up to T - S + i,
    with a window only the last ones of them. scale: by default 1 / sqrt(D). A position that sees nothing gives zeros
    and -inf. lse is the log-sum-exp of the scores, by which attention over several parts of a cache is put together.
    """
    check(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, format, is_causal, window, scale)
    spec, D, repeats = CODES[format], q.shape[3], q.shape[1] // k_codes.shape[1]
    k = decode_heads(k_codes, k_scale, k_offset, spec, D).repeat_interleave(repeats, 1)
    v = decode_heads(v_codes, v_scale, v_offset, spec, D).repeat_interleave(repeats, 1)
    scores = (q.float() @ k.transpose(2, 3)) * (D**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    if is_causal:
        scores = scores.masked_fill(~visible(*scores.shape[2:], window, scores.device), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(lse.isneginf().unsqueeze(-1), 0.0, (scores - lse.unsqueeze(-1)).exp())
    return torch.empty_like(q).copy_(weights @ v), lse


def _kv_attention_fake(
    q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, *, format, is_causal, window, scale
):
    check(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, format, is_causal, window, scale)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


kv_attention = define_op("kv_attention", kv_attention_reference, _kv_attention_fake)
