"""Weights whose zero points are floating-point numbers, as weights without any and the rest.

Such a weight is code * scale + zero_point, which is (code - middle) * scale + offset, where offset = zero_point +
middle * scale is one number for each group. Kernels of GPUs, which decode a weight to 16 bit, compute it so. On CPUs
the product with x is the product with the symmetric codes, plus the sums of x over each group times the offsets: of
groups of 32 columns one 32nd of the work.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_quant.kernels import prepack
from hf_quant.kernels.codes import expand_rows
from hf_quant.kernels.weight import Weight


def symmetric(w: Weight) -> Weight:
    """The weight of the same codes less the middle one, without floating-point zero points; others as they are."""
    return w._replace(zero_point=None) if w.has_float_zeros else w


def offsets_of(w: Weight) -> Tensor:
    """Return what the symmetric weight lacks in each group, fp32 [..., N, groups]."""
    assert w.zero_point is not None
    middle = 2.0 ** (w.spec.bits - 1) if w.spec.is_packed else 0.0
    return expand_rows(torch.add(w.zero_point, w.scale.float(), alpha=middle), w.N)


def kept_offsets(w: Weight) -> Tensor:
    """`offsets_of`, made once for a weight."""
    made = prepack.get_or_build("offsets", w.tensors, offsets_of, w)
    return offsets_of(w) if made is None else made


def group_sums(x: Tensor, w: Weight) -> Tensor:
    """The sums of x [..., K] over the columns of each group of w, fp32 [..., groups]."""
    groups = w.scale.shape[-1]
    if x.dtype.itemsize == 1:
        x = x.float()
    if groups == 1:
        return x.sum(-1, keepdim=True, dtype=torch.float32)
    x = pad(x, (0, groups * w.group_size - w.K)) if w.K % w.group_size else x
    return x.unflatten(-1, (groups, w.group_size)).sum(-1, dtype=torch.float32)
