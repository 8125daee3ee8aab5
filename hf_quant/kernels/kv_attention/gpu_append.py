"""`kv_append` in Triton: one launch that rotates, quantizes and writes keys and values of all new tokens.

A program takes `_TOKENS` tokens of one head, of the keys or of the values: a tile [tokens, channels] in registers. The
rotation is the butterfly of the reference, with its order of sums, so keys are the same to the bit: products with a
sign matrix on the matrix units would round 24-bit values to 16, and a decoding step has one token for each head. The
tile has the same shape for one token as for many: the sums of a token, hence its codes, never depend on what comes
with it. `start` is read on the device.

Traffic: Llama-3.1-8B, 2048 tokens, int4: 8.4 MB of bf16 in, 2.4 MB out, 2.5 us on an H200 (4.3 TB/s; modelled). One
token: 4 KB; the launch is all there is.
"""

import torch
from torch import Tensor

from hf_quant.kernels.codes import CODES, row_max
from hf_quant.kernels.dispatch import Path, Problem, implements
from hf_quant.kernels.gpu.launch import (
    HAS_TRITON,
    Target,
    cached_plan,
    launch,
    target_of,
    tl,
    triton,
    unavailable_reason,
)
from hf_quant.kernels.gpu.row_codes import encode
from hf_quant.kernels.kv_attention import op
from hf_quant.kernels.kv_attention.gpu_parts import butterfly


_TOKENS = 8  # of a program
_MAX_D = 256


@triton.jit
def _rounded(x):
    """To the nearest whole number, half to even; |x| up to 2**22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _fitted(values, inside, SIZE: tl.constexpr, MOST: tl.constexpr, RANGE: tl.constexpr, FITS: tl.constexpr):
    """`op._fitted` of the values [R, G, N] `inside`, SIZE of each group -> (step, low) [R, G, 1]."""
    low = tl.min(tl.where(inside, values, float("inf")), 2, keep_dims=True)
    high = tl.max(tl.where(inside, values, float("-inf")), 2, keep_dims=True)
    span = (high - low) * RANGE
    low = (low + high) * 0.5 - span * 0.5
    step = span * (1 / MOST)
    mean = tl.sum(tl.where(inside, values, 0.0), 2, keep_dims=True) * (1 / SIZE)
    for _ in tl.static_range(FITS):
        codes = tl.div_rn(values - low, tl.where(step == 0, 1.0, step))
        codes = _rounded(tl.minimum(tl.maximum(codes, 0.0), MOST))
        mean_code = tl.sum(tl.where(inside, codes, 0.0), 2, keep_dims=True) * (1 / SIZE)
        spread = tl.where(inside, codes - mean_code, 0.0)
        square = tl.sum(spread * spread, 2, keep_dims=True)
        product = tl.sum(tl.where(inside, spread * (values - mean), 0.0), 2, keep_dims=True)
        fits = square > 0
        step = tl.where(fits, tl.div_rn(product, tl.where(fits, square, 1.0)), step)
        low = tl.where(fits, mean - step * mean_code, low)
    # NaN or infinity in the group: minimum and maximum ignore NaN.
    wrong = tl.sum(tl.where(inside, values * 0.0, 0.0), 2, keep_dims=True)
    return step + wrong, low + wrong


@triton.jit
def _append(
    x,
    frame,
    start,
    codes,
    scale,
    offset,
    S,
    C,
    heads,
    block,
    b,
    h,
    x_batch,
    x_head,
    x_token,
    codes_batch,
    codes_head,
    codes_token,
    scale_batch,
    scale_head,
    scale_token,
    scale_group,
    offset_batch,
    offset_head,
    offset_token,
    offset_group,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    LOG_ROTATION: tl.constexpr,
    NORM: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    LIMIT: tl.constexpr,
    RANGE: tl.constexpr,
    FITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Quantize TOKENS tokens of a head of keys or values and write them."""
    G: tl.constexpr = BLOCK_D // GROUP_PAD
    s, d, g = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D), tl.arange(0, G)
    x += b.to(tl.int64) * x_batch + h.to(tl.int64) * x_head
    inside = (s < S)[:, None] & (d < D)[None, :]
    values = tl.load(x + s.to(tl.int64)[:, None] * x_token + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if frame is not None:
        mean = frame + (b * heads + h).to(tl.int64) * 2 * D + d
        # One division a channel: one a value takes a stack (Triton 3.6, sm90, int8).
        inverse = tl.div_rn(1.0, tl.load(mean + D, mask=d < D, other=1.0))
        values = (values - tl.load(mean, mask=d < D, other=0.0)[None, :]) * inverse[None, :]
        values = tl.where(inside, values, 0.0)
    if LOG_ROTATION > 0:
        values = butterfly(values, TOKENS, BLOCK_D, LOG_ROTATION, NORM)
    values = tl.reshape(values, (TOKENS, G, GROUP_PAD))
    ZERO: tl.constexpr = 2 ** (BITS - 1)
    if BITS < 8:
        counts = (tl.arange(0, GROUP_PAD) < GROUP)[None, None, :]
        step, low = _fitted(values, counts, GROUP, 2**BITS - 1, RANGE, FITS)
        shift = (low + step * ZERO).to(offset.dtype.element_ty)
    else:
        # As integers they have the same order, NaN last.
        bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), 2, keep_dims=True)
        step = bits.to(tl.float32, bitcast=True) * (1 / LIMIT)
    unit = step.to(scale.dtype.element_ty)
    unit = tl.where(unit.to(tl.float32) == 0, 1.0, unit.to(tl.float32)).to(scale.dtype.element_ty)
    if BITS < 8:
        levels = tl.div_rn(values - shift.to(tl.float32), unit.to(tl.float32))
        levels = tl.minimum(tl.maximum(levels, -ZERO), ZERO - 1)
    else:
        levels = tl.div_rn(values, unit.to(tl.float32))
    levels = tl.reshape(levels, (TOKENS, BLOCK_D))
    t = s.to(tl.int64)
    if start is not None:
        t += tl.load(start)
    writes = ((s < S) & (t >= 0) & (t < C))[:, None]
    codes += b.to(tl.int64) * codes_batch + h.to(tl.int64) * codes_head + t[:, None] * codes_token
    if BITS < 8:
        # NaN, which clamping ignored, is a group's own step: code 0.
        known = tl.reshape(tl.broadcast_to(step == step, (TOKENS, G, GROUP_PAD)), (TOKENS, BLOCK_D))
        found = tl.where(known, _rounded(levels) + ZERO, 0.0).to(tl.int32)
        COUNT: tl.constexpr = 32 // BITS
        found = tl.reshape(found, (TOKENS, BLOCK_D // COUNT, COUNT)) << (tl.arange(0, COUNT) * BITS)[None, None, :]
        w = tl.arange(0, BLOCK_D // COUNT)
        tl.store(codes + w[None, :], tl.sum(found, 2), mask=writes & (w < D // COUNT)[None, :])
    else:
        is_nan = levels != levels
        levels = tl.where(is_nan, 0.0, tl.minimum(tl.maximum(levels, -LIMIT), LIMIT))
        found = encode(levels, IS_FLOAT, CONVERTS)
        if IS_FLOAT:
            found = tl.where(is_nan, 0x7F, found).to(tl.uint8)
        tl.store(codes + d[None, :], found, mask=writes & (d < D)[None, :])
    writes = writes & (g < D // GROUP)[None, :]
    scale += b.to(tl.int64) * scale_batch + h.to(tl.int64) * scale_head + t[:, None] * scale_token
    tl.store(scale + g[None, :] * scale_group, tl.reshape(unit, (TOKENS, G)), mask=writes)
    if BITS < 8:
        offset += b.to(tl.int64) * offset_batch + h.to(tl.int64) * offset_head + t[:, None] * offset_token
        tl.store(offset + g[None, :] * offset_group, tl.reshape(shift, (TOKENS, G)), mask=writes)


# Nothing that the length of a cache, or the number of tokens, changes may compile the kernel anew.
_SIZES = (
    *("S", "C", "heads", "kc_batch", "kc_head", "ks_batch", "ks_head", "ko_batch", "ko_head"),
    *("vc_batch", "vc_head", "vs_batch", "vs_head", "vo_batch", "vo_head"),
)


# Where a sliding window has grown to, scales begin at any multiple of their size, whose stores are as narrow anyway.
_UNALIGNED = ("k_scale", "k_offset", "v_scale", "v_offset")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def _kv_append_kernel(
    k,
    v,
    frame,
    start,
    k_codes,
    k_scale,
    k_offset,
    v_codes,
    v_scale,
    v_offset,
    S,
    C,
    heads,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    kc_batch,
    kc_head,
    kc_token,
    ks_batch,
    ks_head,
    ks_token,
    ks_group,
    ko_batch,
    ko_head,
    ko_token,
    ko_group,
    vc_batch,
    vc_head,
    vc_token,
    vs_batch,
    vs_head,
    vs_token,
    vs_group,
    vo_batch,
    vo_head,
    vo_token,
    vo_group,
    K_D: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_GROUP_PAD: tl.constexpr,
    V_D: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_GROUP_PAD: tl.constexpr,
    K_ROTATION: tl.constexpr,
    K_NORM: tl.constexpr,
    V_ROTATION: tl.constexpr,
    V_NORM: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    CONVERTS: tl.constexpr,
    LIMIT: tl.constexpr,
    RANGE: tl.constexpr,
    FITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program: a block of tokens of a head of keys or of values; first all heads of keys, then all heads of values.

    In one dimension of the grid: the second has 65,535 places only, and a batch of 1024 with 32 heads has more.
    """
    blocks = tl.cdiv(S, TOKENS)
    block, head, both = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0) // blocks // 2
    b, h = head % both // heads, head % both % heads
    if head < both:
        _append(
            *(k, frame, start, k_codes, k_scale, k_offset, S, C, heads, block, b, h, k_batch, k_head, k_token),
            *(kc_batch, kc_head, kc_token, ks_batch, ks_head, ks_token, ks_group),
            *(ko_batch, ko_head, ko_token, ko_group, K_D, K_BLOCK, K_GROUP, K_GROUP_PAD, K_ROTATION, K_NORM),
            *(BITS, IS_FLOAT, CONVERTS, LIMIT, RANGE, FITS, TOKENS),
        )
    else:
        _append(
            *(v, None, start, v_codes, v_scale, v_offset, S, C, heads, block, b, h, v_batch, v_head, v_token),
            *(vc_batch, vc_head, vc_token, vs_batch, vs_head, vs_token, vs_group),
            *(vo_batch, vo_head, vo_token, vo_group, V_D, V_BLOCK, V_GROUP, V_GROUP_PAD, V_ROTATION, V_NORM),
            *(BITS, IS_FLOAT, CONVERTS, LIMIT, RANGE, FITS, TOKENS),
        )


def append_unsupported_reason(D: int, group_size: int) -> str | None:
    """The reason why the kernel does not quantize heads of D channels, None if it does."""
    if not HAS_TRITON:
        return "triton is not installed"
    if D > _MAX_D:
        return f"heads of {D} channels; at most {_MAX_D}"
    if group_size != D and group_size & (group_size - 1):
        return f"groups of {group_size}: a power of two, or one group"
    return None


def _supports(problem: Problem) -> str | None:
    if problem.format not in op.CACHE_FORMATS:
        return f"no kernel for {problem.format}"
    return append_unsupported_reason(problem.K, problem.group_size)


PATHS = (
    Path("Triton, one launch", "any number of tokens", _supports),
    Path("torch ops, `start` read on the host", "any number of tokens", lambda problem: None),
)


@cached_plan
def _options(
    format: str, key: tuple[int, int], value: tuple[int, int], rotates: tuple[bool, bool], target: Target
) -> dict:
    """The options of the kernel for keys and values of (channels, groups)."""
    spec, options = CODES[format], {}
    for name, (D, groups), rotated in zip("KV", (key, value), rotates):
        rotation, block = op.rotation_block(D) if rotated else 1, max(triton.next_power_of_2(D), 16)
        options |= {f"{name}_D": D, f"{name}_BLOCK": block, f"{name}_GROUP": D // groups}
        options |= {f"{name}_GROUP_PAD": block if groups == 1 else D // groups}
        options |= {f"{name}_ROTATION": rotation.bit_length() - 1, f"{name}_NORM": rotation**-0.5}
    is_float = spec.dtype.is_floating_point
    options |= {"BITS": spec.bits, "IS_FLOAT": is_float, "FITS": op.FITS}
    options |= {"CONVERTS": is_float and target.has_fp8_dot, "RANGE": op.FIRST_RANGE.get(spec.bits, 0.0)}
    return options | {"LIMIT": row_max(format) if spec.bits == 8 else 0.0, "TOKENS": _TOKENS, "num_warps": 4}


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


@implements(op.kv_append, "XPU", PATHS)
@implements(op.kv_append, "CUDA", PATHS)
def kv_append_gpu(
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
    """Compute `kv_append_reference`."""
    op.check_append(k, v, start, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, format, k_frame)
    (B, H, S, K_D), V_D, spec = k.shape, v.shape[3], CODES[format]
    heads = ((K_D, k_scale.shape[-1]), (V_D, v_scale.shape[-1]))
    refused = unavailable_reason(k.device) or next(
        filter(None, (append_unsupported_reason(D, D // groups) for D, groups in heads)), None
    )
    if refused or (k_codes.stride(3), v_codes.stride(3)) != (1, 1):
        op.kv_append_reference(
            *(k, v, start, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset),
            **{"format": format, "rotates_keys": rotates_keys, "rotates_values": rotates_values, "k_frame": k_frame},
        )
        return
    if k.numel() == 0:
        return
    k, v = (x.detach() if x.stride(3) == 1 else x.detach().contiguous() for x in (k, v))
    frame = None if k_frame is None else k_frame.contiguous()
    codes = [part.view(torch.uint8) if spec.dtype.is_floating_point else part for part in (k_codes, v_codes)]
    launch(
        *(_kv_append_kernel, (triton.cdiv(S, _TOKENS) * 2 * B * H,), k, v, frame, start, codes[0], k_scale, k_offset),
        *(codes[1], v_scale, v_offset, S, k_codes.shape[2], H, *_strides(k, 3), *_strides(v, 3)),
        *(*_strides(k_codes, 3), *_strides(k_scale, 4), *_strides(k_offset, 4)),
        *(*_strides(v_codes, 3), *_strides(v_scale, 4), *_strides(v_offset, 4)),
        shared=_options(format, *heads, (rotates_keys, rotates_values), target_of(k.device)),
    )
