"""8-bit attention on Hopper by the Gluon kernel of attention_kernel.py: its conditions, and its launch.

It serves heads whose scores are bounded, values in bf16, and rows at multiples of 16 bytes, as the Triton kernel whose
place it takes. Compiled, a score takes 6.2 instructions, one of them an exponential (`make aot`). No GPU has
run it yet, see `plan.UNTRIED`; `int8_attention.gpu` has its modelled bounds, and the times of the Triton kernel.
"""

from functools import cache
from typing import Any

from torch import Tensor

from hf_quant.kernels.gpu.hopper import plan
from hf_quant.kernels.gpu.hopper.plan import descriptor, has_kernels, layout, tiles_of
from hf_quant.kernels.gpu.launch import Target, launch, triton


_ROWS, _KEYS = 128, 128  # of a program, and of a step
_STAGES = {64: 4, 128: 3}  # by the width of codes, heads padded to it


def serves(width: int, target: Target) -> bool:
    """True if the kernel takes the bounded heads of codes of that width."""
    return plan.UNTRIED and target.name == "sm90" and width in _STAGES and has_kernels()


@cache
def _kernel() -> Any:
    from hf_quant.kernels.gpu.hopper.attention_kernel import _hopper_attention_kernel

    return _hopper_attention_kernel


def bounded_attention(
    y: Tensor,
    q_codes: Tensor,
    q_stats: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    v: Tensor,
    norms: Tensor,
    *,
    is_causal: bool,
    limit: float,
) -> None:
    """Write y [B, H, S, D] of the heads whose scores `limit` bounds, from what `int8_attention.gpu` has prepared.

    q_codes [B * H, S, width], k_codes [B * H_kv, blocks of 128 keys, width] int8; q_stats [2, B * H, S] and k_scale
    [B * H_kv, blocks] fp32; v [B, H_kv, T, D] bf16; norms [2, B * H_kv] int32.
    """
    (B, H, S, D), (_, kv_heads, T, _), width = y.shape, v.shape, q_codes.shape[2]

    def tiles(codes: Tensor, rows: int) -> Any:
        flat = codes.view(-1, width)
        return tiles_of(flat, flat.shape, width, (rows, width))

    v = v if all(v.stride()) else v.contiguous()  # values that are expanded
    block = (1, 1, _KEYS, width)
    v_tiles = descriptor()(v, list(v.shape), list(v.stride()), list(block), layout(block, v.dtype))
    launch(
        _kernel(),
        (triton.cdiv(S, _ROWS), B * H),
        *(y, tiles(q_codes, _ROWS // 2), tiles(k_codes, _KEYS), v_tiles, q_stats, k_scale, norms),
        *(S, T, H, kv_heads, B * kv_heads, k_scale.shape[1], *y.stride()[:3]),
        D=D,
        KEYS=_KEYS,
        CAUSAL=is_causal,
        LIMIT=limit,
        STAGES=_STAGES[width],
        num_warps=4,
        maxnreg=168,
    )
