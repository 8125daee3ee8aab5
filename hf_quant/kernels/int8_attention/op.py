"""`int8_attention`: scaled dot product attention whose scores are products of int8 codes.

After SageAttention (https://arxiv.org/abs/2410.02367, https://arxiv.org/abs/2411.10958): the mean of the keys over the
tokens is subtracted first, which shifts all scores of a query alike, so that softmax does not see it, and takes the
outliers that keys share with it. Not differentiable.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.rowwise.op import quantize_rowwise_reference


KEY_BLOCK = 128  # keys that share a scale
VALUE_FORMATS = (None, "fp8_e4m3")


def check(q: Tensor, k: Tensor, v: Tensor, scale: float | None, value_format: str | None) -> None:
    """Raise ValueError unless q is [B, H, S, D], k and v are [B, H_kv, T, D] of its dtype, T > 0, H_kv divides H."""
    if not q.is_floating_point() or q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; all must be fp16, bf16 or fp32")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}; needs [B, H, S, D] and twice "
            "[B, H_kv, T, D]"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or k.shape[2] == 0:
        raise ValueError(
            f"q has {q.shape[1]} heads, k has {k.shape[1]} heads of {k.shape[2]} keys; q needs a multiple of the "
            "heads of k, and k at least one key"
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"scale is {scale}; must be above 0, or None for 1 / sqrt(D)")
    if value_format not in VALUE_FORMATS:
        raise ValueError(f"value_format is {value_format!r}; allowed: None (the dtype of v), 'fp8_e4m3'")


def quantize_keys(k: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """k [B, H, T, D], mean [B, H, 1, D] -> codes [B, H, T, D] int8 of k - mean, fp32 scale of each key [B, H, T, 1].

    KEY_BLOCK keys have one scale: their D * KEY_BLOCK values are a row of `quantize_rowwise`.
    """
    B, H, T, D = k.shape
    num_blocks = -(-T // KEY_BLOCK)
    blocks = F.pad(k.float() - mean, (0, 0, 0, -T % KEY_BLOCK)).reshape(B, H, num_blocks, KEY_BLOCK * D)
    codes, scale = quantize_rowwise_reference(blocks, format="int8")
    return codes.view(B, H, num_blocks * KEY_BLOCK, D)[:, :, :T], scale.repeat_interleave(KEY_BLOCK, 2)[:, :, :T]


def round_values(v: Tensor, value_format: str | None) -> Tensor:
    """The values of v in the product: bf16 for fp32, else v itself; "fp8_e4m3": one scale per channel of a head."""
    if value_format is None:
        return (v.bfloat16() if v.dtype == torch.float32 else v).float()
    codes, scale = quantize_rowwise_reference(v.transpose(2, 3), format=value_format)
    return (codes.float() * scale).transpose(2, 3)


def int8_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None, value_format: str | None
) -> Tensor:
    """softmax(q @ k.T * scale) @ v; q [B, H, S, D], k, v [B, H_kv, T, D] -> [B, H, S, D], in memory as q.

    Heads h * H / H_kv to (h + 1) * H / H_kv of q belong to head h of k and v. scale: by default 1 / sqrt(D).
    is_causal: query i sees keys 0 to i, as in torch, also if S and T differ. Each row of q and KEY_BLOCK rows of k
    without their mean over T are quantized to int8, v as `round_values` says. Faster code rounds the weights of
    softmax to 16 bits, or to fp8_e4m3 if v is (in units of 1 / 448 of the row's largest so far), but not their sum.
    """
    check(q, k, v, scale, value_format)
    repeats = q.shape[1] // k.shape[1]
    q_codes, q_scale = quantize_rowwise_reference(q, format="int8")
    k_codes, k_scale = quantize_keys(k, k.float().mean(2, keepdim=True))
    k_codes, k_scale, values = (
        part.float().repeat_interleave(repeats, 1) for part in (k_codes, k_scale, round_values(v, value_format))
    )
    # Sums of up to 1040 * 127 * 127 are exact in fp32.
    scores = (q_codes.float() @ k_codes.transpose(2, 3)) * q_scale * k_scale.transpose(2, 3)
    scores *= q.shape[3] ** -0.5 if scale is None else scale
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.empty_like(q).copy_(scores.softmax(-1) @ values)


def _int8_attention_fake(q, k, v, *, is_causal, scale, value_format):
    check(q, k, v, scale, value_format)
    return torch.empty_like(q)


int8_attention = define_op("int8_attention", int8_attention_reference, _int8_attention_fake)
