"""Triton functions that make the values which `_quantize_rowwise_kernel` quantizes: norms, activations, rotations."""

from hf_quant.kernels.gpu.launch import tl, triton
from hf_quant.kernels.gpu.rows import activated, load


@triton.jit
def _value(x, up, x_rows, up_rows, columns, mask, PROLOGUE: tl.constexpr, PTX: tl.constexpr, POLICY: tl.constexpr):
    """The values to quantize, or to norm first: x, or act(x) * up, in fp32."""
    v = load(x, x_rows, columns, mask, POLICY)
    if PROLOGUE == "silu" or PROLOGUE == "gelu" or PROLOGUE == "gelu_tanh":
        v = activated(v, PROLOGUE, PTX)
    if up is not None:
        v *= load(up, up_rows, columns, mask, POLICY)
    return v


@triton.jit
def _deviation(v, mean, columns, K, EVEN_K: tl.constexpr):
    """v - mean; 0 beyond K. The mean of an RMS norm is None."""
    if mean is None:
        return v
    elif EVEN_K:
        return v - mean
    else:
        return tl.where(columns < K, v - mean, 0.0)


@triton.jit
def _normed(v, rstd, weight, bias, mod_scale, mod_shift, scale_rows, shift_rows, columns, K, EVEN_K: tl.constexpr):
    """(v * rstd * weight + bias) * (1 + mod_scale) + mod_shift."""
    v *= rstd
    mask = tl.full([1, 1], True, tl.int1) if EVEN_K else columns < K
    # The vectors of one row are those of the next: they stay in the L1 cache, while x passes through it.
    if weight is not None:
        v *= load(weight, 0, columns, mask, "evict_last")
    if bias is not None:
        v += load(bias, 0, columns, mask, "evict_last")
    if mod_scale is not None:
        v *= 1.0 + load(mod_scale, scale_rows, columns, mask, "evict_last")
    if mod_shift is not None:
        v += load(mod_shift, shift_rows, columns, mask, "evict_last")
    return v


@triton.jit
def _rotated(v, diagonal, columns, K, EVEN_K: tl.constexpr, LOG_B: tl.constexpr):
    """v [R, C] times the diagonal, then butterflies in each 2**LOG_B columns, without their factor.

    Sums of pairs are reductions (shuffles, if in two lanes): a + b in both places, less 2 * b in the second.
    """
    mask = tl.full([1, 1], True, tl.int1) if EVEN_K else columns < K
    v *= load(diagonal, 0, columns, mask, "evict_last")
    second = (tl.arange(0, 2) * -2).to(tl.float32)[None, None, :, None]
    for stage in tl.static_range(LOG_B):
        pairs = tl.reshape(v, (v.shape[0], v.shape[1] // (2 << stage), 2, 1 << stage))
        v = tl.reshape(tl.sum(pairs, 2, keep_dims=True) + pairs * second, v.shape)
    return v
