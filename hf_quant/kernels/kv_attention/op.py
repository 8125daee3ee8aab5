"""`kv_append` and `kv_attention`: a cache of keys and values as codes, written once, and attention that reads them.

The references are the specification: in fp32. Not differentiable.

A value is the level of its code times the scale of its group plus, where there are offsets, the offset. Keys and
values may be rotated before they are quantized, queries and results then are, too: an orthogonal matrix leaves their
products as they are, and spreads channels that are much larger than the others, as many models have them (QuaRot,
https://arxiv.org/abs/2404.00456).

A frame, fp32 [B, H_kv, 2, D], holds a mean and a spread of each channel of the keys. A key is (key - mean) / spread
before it is rotated, and a query is query * spread. The scores q @ (k - mean) of a query differ from q @ k by
q @ mean, a number that is the same for all tokens, so the softmax is the same (SageAttention takes the mean off, too,
https://arxiv.org/abs/2410.02367). They differ in the log-sum-exp: what is merged must have the same frame. Scores that
are capped get q @ mean back before. The spread
gives channels of large keys coarser steps and channels of small keys finer ones (SmoothQuant divides inputs so,
https://arxiv.org/abs/2211.10438).

The key of the first token, to which many models give most of their attention, is unlike all others: `k_first`, fp32
[B, H_kv, D], is what its codes lack, in the space of the codes (framed, rotated). Behind padding the first token of a
sequence is a later one: `starts`, int64 [B], says which.
"""

import math

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, CodeSpec, decode_codes, pack_codes, row_max, unpack_codes
from hf_quant.kernels.dispatch import define_op


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
    length: Tensor | None,
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
    _check_position("length", length)
    if window < 0 or (window and not is_causal):
        raise ValueError(f"window is {window} and is_causal {is_causal}; needs 0, or a number of tokens if causal")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale is {scale}; must be above 0, or None for 1 / sqrt(D)")


def check_more(
    q: Tensor,
    k_codes: Tensor,
    k_frame: Tensor | None,
    k_first: Tensor | None,
    starts: Tensor | None,
    softcap: float | None,
) -> None:
    """Raise ValueError unless the last four are as `kv_attention_reference` wants them."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; must be above 0, or None for scores as they are")
    B, H_kv, D = q.shape[0], k_codes.shape[1], q.shape[3]
    _check_fp32("k_frame", k_frame, (B, H_kv, 2, D))
    _check_fp32("k_first", k_first, (B, H_kv, D))
    if starts is not None and (starts.shape != (B,) or starts.dtype != torch.int64):
        raise ValueError(f"starts is {tuple(starts.shape)} {starts.dtype}; needs {(B,)} in int64, or None")


def _check_fp32(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and (tensor.shape != shape or tensor.dtype != torch.float32):
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; needs {shape} in fp32, or None")


def _check_position(name: str, position: Tensor | None) -> None:
    if position is not None and (position.dtype != torch.int64 or position.numel() != 1):
        raise ValueError(f"{name} is {tuple(position.shape)} {position.dtype}; needs one int64, or None")


def rotation_block(D: int) -> int:
    """Channels that are rotated together: the largest power of two that divides D."""
    return D & -D


def rotate(x: Tensor) -> Tensor:
    """x fp32 [..., D] times the orthonormal Hadamard matrix of each block of channels; its own inverse.

    By sums and differences in a fixed order, so that a token's codes do not depend on how many come with it.
    """
    D = x.shape[-1]
    size, half = rotation_block(D), 1
    y = x
    while half < size:
        low, high = y.unflatten(-1, (D // (2 * half), 2, half)).unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return y * (1 / math.sqrt(size))


def framed(k: Tensor, frame: Tensor | None) -> Tensor:
    """Keys [B, H_kv, S, D] -> (k - mean) * (1 / spread) in fp32."""
    return k.float() if frame is None else (k.float() - frame[:, :, :1]) * (1 / frame[:, :, 1:])


def query_rows(q: Tensor, frame: Tensor | None, *, rotates: bool) -> Tensor:
    """Queries [B, H, S, D] that meet keys in a frame, rotated or not: in the dtype of q, and in memory as q."""
    if frame is None and not rotates:
        return q
    rows = q.float()
    if frame is not None:
        rows = rows * frame[:, :, 1:].repeat_interleave(q.shape[1] // frame.shape[1], 1)
    return torch.empty_like(q).copy_(rotate(rows) if rotates else rows)


def mean_scores(q: Tensor, frame: Tensor | None, scale: float) -> Tensor:
    """The scores of the means of a frame, which keys lack: fp32 [B, H, S], or [] zero without a frame."""
    if frame is None:
        return q.new_zeros((), dtype=torch.float32)
    mean = frame[:, :, :1].repeat_interleave(q.shape[1] // frame.shape[1], 1)
    return (q.float() * mean).sum(-1) * scale


def capped(scores: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(scores / softcap), as Gemma 2 caps scores (https://arxiv.org/abs/2408.00118)."""
    return torch.tanh(scores / softcap) * softcap


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


def add_first(k: Tensor, first: Tensor, start: Tensor | None, token: int = 0) -> None:
    """Add `first` [B, H, D] to keys [B, H, T, D] of the tokens from `token` on, in place: to the start [B] of each."""
    if start is not None:
        tokens = torch.arange(token, token + k.shape[2], device=k.device)
        k += torch.where(tokens[:, None] == start[:, None, None, None], first.unsqueeze(2), 0.0)
    elif token == 0:
        k[:, :, :1] += first.unsqueeze(2)


def visible(S: int, T: int, end: int | Tensor, window: int, device: torch.device) -> Tensor:
    """The tokens of T that each position sees in causal attention, bool [S, T]; positions are the S before `end`."""
    positions = torch.arange(S, device=device).unsqueeze(1) + (end - S)
    tokens = torch.arange(T, device=device)
    seen = tokens <= positions  # compared as they are: nothing of S * T numbers is made
    return seen & (tokens > positions - window) if window else seen


def kv_attention_reference(
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
    """softmax(q @ k.T * scale + mask) @ v -> (y [B, H, S, D] in memory as q, lse [B, H, S] fp32).

    q [B, H, S, D] fp16, bf16, fp32. Keys and values: codes [B, H_kv, T, width] of a format without or with one bit
    plane (packed along D, without padding), scale and offset [B, H_kv, T, groups] of equal groups of D: a value is the
    level of its code times scale plus offset. Heads h * H / H_kv to (h + 1) * H / H_kv of q belong to head h.
    All may have any strides, as a cache grows in place.

    mask: boolean (True is seen) or to be added, [B|1, H|1, S|1, T]. length: one int64 on the device: how many of the T
    tokens there are, in a cache that is as long as it may become; a negative one counts as 0. is_causal: position i
    sees tokens up to length - S + i, with a window only the last ones of them. scale: by default 1 / sqrt(D).
    k_frame: q is multiplied by the spread; see above. rotates_keys: q is rotated then, as `kv_append` rotates keys.
    Behind both q is rounded to its dtype. k_first is added to the key of token starts[b], by default 0; one
    that is not there, such as a negative one, gets nothing. rotates_values: the result is rotated, as `kv_append`
    rotates values. A position that sees nothing gives zeros and -inf. lse is the log-sum-exp
    of the scores, by which attention over several parts of a cache is put together; q @ mean * scale is not in it.
    softcap: scores become softcap * tanh(score / softcap) before the mask is added; here the softmax does need the
    mean, so that q @ mean * scale is in each score, and in lse.
    """
    check(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, length, format, is_causal, window, scale)
    check_more(q, k_codes, k_frame, k_first, starts, softcap)
    spec, D, repeats = CODES[format], q.shape[3], q.shape[1] // k_codes.shape[1]
    k = decode_heads(k_codes, k_scale, k_offset, spec, D)
    if k_first is not None:
        add_first(k, k_first, starts)
    k = k.repeat_interleave(repeats, 1)
    v = decode_heads(v_codes, v_scale, v_offset, spec, D).repeat_interleave(repeats, 1)
    queries = query_rows(q, k_frame, rotates=rotates_keys).float()
    scale = D**-0.5 if scale is None else scale
    scores = (queries @ k.transpose(2, 3)) * scale
    if softcap is not None:
        scores = capped(scores + mean_scores(q, k_frame, scale).unsqueeze(-1), softcap)
    T = scores.shape[3]
    end = T if length is None else length.clamp(0, T)
    if length is not None:
        scores = scores.masked_fill(torch.arange(T, device=q.device) >= end, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    if is_causal:
        scores = scores.masked_fill(~visible(q.shape[2], T, end, window, q.device), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(lse.isneginf().unsqueeze(-1), 0.0, (scores - lse.unsqueeze(-1)).exp())
    y = weights @ v
    return torch.empty_like(q).copy_(rotate(y) if rotates_values else y), lse


def _kv_attention_fake(
    q,
    k_codes,
    k_scale,
    k_offset,
    v_codes,
    v_scale,
    v_offset,
    mask,
    length,
    *,
    format,
    is_causal,
    window,
    scale,
    rotates_keys,
    rotates_values=False,
    k_frame=None,
    k_first=None,
    starts=None,
    softcap=None,
):
    check(q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, mask, length, format, is_causal, window, scale)
    check_more(q, k_codes, k_frame, k_first, starts, softcap)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


kv_attention = define_op("kv_attention", kv_attention_reference, _kv_attention_fake)


def merge(y: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two parts of the tokens -> over both: y [B, H, S, D], log-sum-exp [B, H, S], all fp32."""
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total.isneginf(), 0.0)
    return y * (lse - safe).exp().unsqueeze(-1) + more * (more_lse - safe).exp().unsqueeze(-1), total


# The range of a group of asymmetric codes is this part of that of its values, before `_fitted` moves it: few levels
# serve the many values of the middle better than the two at the ends.
FIRST_RANGE = {4: 1.0, 2: 0.75}  # by bits
FITS = 2  # the second takes 3 to 7 % off the error of a trained model's attention, a third 1 to 2 % more
CACHE_FORMATS = ("int8", "fp8_e4m3", "int4", "int2")


def check_append(
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor | None,
    format: str,
    k_frame: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments are as `kv_append_reference` wants them."""
    spec = CODES.get(format)
    if spec is None or format not in CACHE_FORMATS:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(CACHE_FORMATS)}")
    _check_position("start", start)
    # Shapes are asked for once: this runs for every token of every layer.
    k_shape, v_shape, is_packed = k.shape, v.shape, spec.is_packed
    if len(k_shape) != 4 or k_shape[:3] != v_shape[:-1] or v.dtype != k.dtype or not k.is_floating_point():
        raise ValueError(
            f"k is {tuple(k_shape)} {k.dtype} and v {tuple(v_shape)} {v.dtype}; needs [B, H_kv, S, D] of one "
            "floating-point dtype, of which only D may differ"
        )
    B, H, S, _ = k_shape
    _check_fp32("k_frame", k_frame, (B, H, 2, k_shape[3]))
    for name, D, codes, scale, offset in (
        ("k", k_shape[3], k_codes, k_scale, k_offset),
        ("v", v_shape[3], v_codes, v_scale, v_offset),
    ):
        if D == 0 or (is_packed and D * spec.bits % 32):
            raise ValueError(f"{name} has D={D}: codes of {spec.bits} bits of a head must fill words of 32 bits")
        shape, scales = codes.shape, scale.shape
        C, groups = shape[2] if len(shape) == 4 else 0, scales[-1] if scales else 0
        if shape != (B, H, C, code_width(spec, D)) or codes.dtype != spec.dtype or C < S:
            raise ValueError(
                f"{name}_codes is {tuple(shape)} {codes.dtype}; {format} of {name} {(B, H, S, D)} needs "
                f"{(B, H, C, code_width(spec, D))} {spec.dtype}, room for {S} tokens at least"
            )
        fits = scales == (B, H, C, groups) and groups and D % groups == 0 and scale.is_floating_point()
        if not fits or (offset is not None and (offset.shape != scales or offset.dtype != scale.dtype)):
            have = None if offset is None else (tuple(offset.shape), offset.dtype)
            raise ValueError(
                f"{name}_scale is {tuple(scales)} {scale.dtype} and {name}_offset {have}; needs "
                f"{(B, H, C, 'groups')}, groups dividing D={D}, in one floating-point dtype; the offset may be None"
            )
        if is_packed != (offset is not None):
            raise ValueError(f"{name}_offset is {offset}; int4 and int2 need offsets, int8 and fp8 have none")


def _sum(x: Tensor) -> Tensor:
    """Sums over the last dimension [..., 1], in an order that its size alone decides: halves onto halves."""
    while x.shape[-1] > 1:
        n = x.shape[-1]
        half = (n + 1) // 2
        x = torch.cat([x[..., : n - half] + x[..., half:], x[..., n - half : half]], -1)
    return x


def _fitted(values: Tensor, spec: CodeSpec) -> tuple[Tensor, Tensor]:
    """values [..., G] -> (distance of two levels, value of the lowest one), each [..., 1].

    From the range of the values, then `FITS` times by least squares: the line that goes best through the values and
    their codes. A third (int2, in groups of 32) to a twentieth (int4, of 64) less squared error than the range alone,
    on normal values.
    """
    G, most = values.shape[-1], 2**spec.bits - 1
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    span = (high - low) * FIRST_RANGE[spec.bits]
    low = (low + high) * 0.5 - span * 0.5
    step = span * (1 / most)
    mean = _sum(values) * (1 / G)
    for _ in range(FITS):
        codes = ((values - low) / step.masked_fill(step == 0, 1.0)).round().clamp(0, most)
        mean_code = _sum(codes) * (1 / G)
        spread = codes - mean_code
        square = _sum(spread * spread)
        fits = square > 0
        step = torch.where(fits, _sum(spread * (values - mean)) / square.masked_fill(~fits, 1.0), step)
        low = torch.where(fits, mean - step * mean_code, low)
    return step, low


def quantize_heads(
    x: Tensor, groups: int, scale_dtype: torch.dtype, spec: CodeSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x fp32 [..., D] -> codes [..., width], scale and offset [..., groups] of scale_dtype; int8 and fp8: no offset.

    Scale and offset are rounded before the codes are chosen. A group whose scale would be 0 gets 1. What is not finite
    makes its group NaN or infinite.
    """
    values = x.unflatten(-1, (groups, x.shape[-1] // groups))
    if spec.is_packed:
        step, low = _fitted(values, spec)
        offset = (low + step * 2 ** (spec.bits - 1)).to(scale_dtype)
    else:
        step, offset = values.abs().amax(-1, keepdim=True) * (1 / row_max(spec.name)), None
    scale = step.to(scale_dtype)
    scale = scale.masked_fill(scale == 0, 1.0)
    levels = ((values if offset is None else values - offset.float()) / scale.float()).flatten(-2)
    if spec.is_packed:
        zero = 2 ** (spec.bits - 1)
        codes = (levels.round().clamp(-zero, zero - 1) + zero).nan_to_num(0.0).to(torch.uint8)
        codes = pack_codes(codes, spec.planes)[..., : code_width(spec, x.shape[-1])]
    elif spec.is_integer:
        codes = levels.round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
    else:
        most = row_max(spec.name)
        codes = levels.clamp(-most, most).to(spec.dtype)
    return codes, scale.squeeze(-1), None if offset is None else offset.squeeze(-1)


def kv_append_reference(
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
    """Quantize keys and values [B, H_kv, S, D] fp16, bf16, fp32 and write them into a cache, from token `start` on.

    Written are codes [B, H_kv, C, width], scale and offset [B, H_kv, C, groups] of any strides: see
    `kv_attention_reference`. D, width and groups of v may differ from those of k. format: int8 and fp8 (by the largest
    magnitude of each group, without offsets), or int4 and int2 (with offsets). start: one int64 on the device; None is
    0. The caller makes sure that start + S is at most C; tokens that would be written behind, or before 0, are lost.
    k_frame: the mean is taken off k, which is then divided by the spread; see above. rotates_keys, rotates_values: k
    and v are rotated, see `rotate`, before they are quantized. The codes of a token depend on nothing but the token
    and the frame.
    """
    check_append(k, v, start, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, format, k_frame)
    spec, C, S = CODES[format], k_codes.shape[2], k.shape[2]
    first = 0 if start is None else int(start)
    new = slice(max(-first, 0), min(S, C - first))
    tokens = slice(first + new.start, first + new.stop)
    if new.stop <= new.start or k.numel() == 0:
        return
    for x, codes, scale, offset, rotates, frame in (
        (k, k_codes, k_scale, k_offset, rotates_keys, k_frame),
        (v, v_codes, v_scale, v_offset, rotates_values, None),
    ):
        values = framed(x[:, :, new], frame)
        parts = quantize_heads(rotate(values) if rotates else values, scale.shape[-1], scale.dtype, spec)
        for part, value in zip((codes, scale, offset), parts):
            if part is not None:
                part[:, :, tokens] = value


def _kv_append_fake(
    k,
    v,
    start,
    k_codes,
    k_scale,
    k_offset,
    v_codes,
    v_scale,
    v_offset,
    *,
    format,
    rotates_keys,
    rotates_values=False,
    k_frame=None,
):
    check_append(k, v, start, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, format, k_frame)


kv_append = define_op(
    "kv_append",
    kv_append_reference,
    _kv_append_fake,
    mutates=("k_codes", "k_scale", "k_offset", "v_codes", "v_scale", "v_offset"),
)
