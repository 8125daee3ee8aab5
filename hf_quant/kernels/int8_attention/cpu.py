"""`int8_attention` on CPU: the codes, multiplied by their scales, in torch's attention, which works in blocks.

Memory beside the result: fp32 copies of the heads that share keys; no matrix of all scores. int8 products would not be
faster here: softmax and the product with v take most of the time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant.kernels.dispatch import Path, implements
from hf_quant.kernels.int8_attention import op
from hf_quant.kernels.rowwise.op import quantize_rowwise


DENSE = (Path("decoded codes in torch's attention", "any length", lambda problem: None),)


@implements(op.int8_attention, "CPU", DENSE)
def int8_attention_dense(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None, value_format: str | None
) -> Tensor:
    """Compute `int8_attention_reference`; serves every device."""
    op.check(q, k, v, scale, value_format)
    q, k, v = (part.detach() for part in (q, k, v))
    y = torch.empty_like(q)
    repeats = q.shape[1] // k.shape[1]
    for head in range(k.shape[1]):
        queries, heads = slice(head * repeats, (head + 1) * repeats), slice(head, head + 1)
        codes, q_scale = quantize_rowwise(q[:, queries], format="int8")
        keys, k_scale = op.quantize_keys(k[:, heads], k[:, heads].float().mean(2, keepdim=True))
        y[:, queries] = F.scaled_dot_product_attention(
            codes.float() * q_scale,
            (keys.float() * k_scale).expand(-1, repeats, -1, -1),
            op.round_values(v[:, heads], value_format).expand(-1, repeats, -1, -1),
            is_causal=is_causal,
            scale=scale,
        )
    return y
