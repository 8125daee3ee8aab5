"""`grouped_mm`: products of MoE experts. Rows of x are sorted by expert; each expert's rows go with its weight."""

import torch
from torch import Tensor

from hf_quant.kernels.codes import row_max
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.scaled_mm.op import dynamic_mm_reference
from hf_quant.kernels.weight import Weight, takes_weight
from hf_quant.kernels.weight_only.op import weight_only_mm_backward_reference, weight_only_mm_reference


def check(x: Tensor, w: Weight, bias: Tensor | None, offsets: Tensor, *, activation: str | None) -> None:
    """Raise ValueError unless x is [M, K], qdata [E, N, words], bias None or [E, N], offsets [E] int32."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}; needs [M, K] in fp16, bf16 or fp32")
    if w.qdata.dim() != 3:
        raise ValueError(f"qdata is {w.qdata.dim()}-D and scale {w.scale.dim()}-D; both must be 3-D")
    if activation is not None:
        row_max(activation)
    E, N, _ = w.qdata.shape
    if offsets.shape != (E,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"offsets is {tuple(offsets.shape)} {offsets.dtype}; needs [{E}] torch.int32, the end of each expert's "
            "rows"
        )
    if bias is not None and bias.shape != (E, N):
        raise ValueError(f"bias is {tuple(bias.shape)}; needs {(E, N)}")


def rows_of_experts(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) for each expert that has rows; `offsets` [E] is the end of each expert's rows."""
    ends = offsets.tolist()
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends], ends)) if end > start]


@takes_weight(check, transforms=True, quantizes=True)
def grouped_mm_reference(
    x: Tensor, w: Weight, bias: Tensor | None, offsets: Tensor, *, activation: str | None
) -> Tensor:
    """x [M, K], experts [E, N, K] -> [M, N] in x's dtype; rows offsets[e-1]..offsets[e] belong to expert e.

    `activation` quantizes each row of x first (None: not). Rows at or past offsets[-1] give zeros.
    `input_diagonal` transforms x as in `weight_only_mm`, `input_scale` [1] is the scale of every row as in
    `dynamic_mm`. Not differentiable: see `modules`.
    """
    y = x.new_zeros(x.shape[0], w.N)
    options = {"format": w.format, "group_size": w.group_size, "input_diagonal": w.input_diagonal}
    for e, rows in rows_of_experts(offsets):
        weight = (*w.expert(e).packed, None if bias is None else bias[e])
        if activation is None:
            y[rows] = weight_only_mm_reference(x[rows], *weight, **options)
        else:
            scale = {"activation": activation, "input_scale": w.input_scale}
            y[rows] = dynamic_mm_reference(x[rows], *weight, **scale, **options)
    return y


@takes_weight(check, transforms=True, quantizes=True)
def _grouped_mm_fake(x: Tensor, w: Weight, bias: Tensor | None, offsets: Tensor, *, activation: str | None):
    return x.new_empty((x.shape[0], w.N))


grouped_mm = define_op("grouped_mm", grouped_mm_reference, _grouped_mm_fake)


@takes_weight(K_is_option=True)
def grouped_mm_backward_reference(grad: Tensor, w: Weight, offsets: Tensor) -> Tensor:
    """Gradient of `grouped_mm` with respect to x: grad [M, N] -> [M, K] in grad's dtype."""
    grad_x = grad.new_zeros(grad.shape[0], w.K)
    options = {"format": w.format, "group_size": w.group_size, "K": w.K}
    for e, rows in rows_of_experts(offsets):
        grad_x[rows] = weight_only_mm_backward_reference(grad[rows], *w.expert(e).packed, **options)
    return grad_x


@takes_weight(K_is_option=True)
def _grouped_mm_backward_fake(grad: Tensor, w: Weight, offsets: Tensor):
    return grad.new_empty((grad.shape[0], w.K))


grouped_mm_backward = define_op("grouped_mm_backward", grouped_mm_backward_reference, _grouped_mm_backward_fake)
