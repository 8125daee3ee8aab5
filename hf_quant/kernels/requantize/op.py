"""`requantize_rows_`: new values of a weight that is stored as int8 codes with a scale for each row.

An update is a small part of a step between two codes. Rounded to the nearest code it would be lost; rounded at random,
without bias, it moves a few codes by one. Each row keeps its scale as long as that fits: under a new scale all of its
codes would be drawn again, and the noise of that would add up to more than what is learned at small learning rates.
"""

import torch
from torch import Tensor

from hf_quant.kernels.adam_step.op import key_of
from hf_quant.kernels.codes import SMALLEST_SCALE, divided
from hf_quant.kernels.dispatch import define_op
from hf_quant.kernels.rowwise.op import random_bits, round_stochastically


LARGEST = 127.0
NEW_LARGEST = 120.0  # that of a row under a new scale, so that it may grow by a twentieth under this
LEAST = 60.0  # below which a row gets a new scale, as it wastes a bit


def check(codes: Tensor, scale: Tensor, values: Tensor) -> None:
    """Raise ValueError unless codes are int8 [N, K], scale fp32 [N, 1], values fp32 [N, K], all contiguous."""
    shape = tuple(codes.shape)
    if codes.dim() != 2 or codes.dtype != torch.int8:
        raise ValueError(f"codes are {shape} {codes.dtype}; needs [N, K] in torch.int8")
    for name, tensor, wanted in (("scale", scale, (shape[0], 1)), ("values", values, shape)):
        if tensor.shape != wanted or tensor.dtype != torch.float32 or tensor.device != codes.device:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; needs {wanted} in torch.float32 "
                f"on {codes.device}"
            )
    if not (codes.is_contiguous() and scale.is_contiguous() and values.is_contiguous()):
        raise ValueError("codes, scale and values must be contiguous")


def requantize_rows__reference(
    codes: Tensor, scale: Tensor, values: Tensor, *, low: int | None = None, high: int = 0, row: int = 0
) -> None:
    """Write values [N, K] fp32 into codes [N, K] int8 and scale [N, 1] fp32, in place; values ~ codes * scale.

    A row keeps its scale while its largest magnitude is from 60 to 127 scales; else its scale becomes that magnitude /
    120, or 1 if this is below 2**-90. A value that is that of its code under a kept scale leaves it as it is. Others
    are divided by their scale and rounded: to one of the two codes beside them, at random and without bias, by
    `random_bits` with the key (low, high) from `row` on, which is the first row's number in the whole weight; without
    `low` to the nearest, half to even. A row with NaN (inf) gets that as its scale, and codes that mean nothing.
    Not differentiable.
    """
    check(codes, scale, values)
    if values.numel() == 0:
        return
    amax = values.abs().amax(1, keepdim=True)
    stays = (amax >= scale * LEAST) & (amax <= scale * LARGEST)
    fresh = divided(amax, NEW_LARGEST)
    new = torch.where(stays, scale, torch.where(fresh < SMALLEST_SCALE, 1.0, fresh))
    found = (values / new).clamp(-LARGEST, LARGEST)
    if low is None:
        found = found.round()
    else:
        key = torch.tensor(key_of(low, high), dtype=torch.int64, device=values.device)
        found = round_stochastically(found, random_bits(key, *values.shape, row), format="int8")
    is_same = stays & (values == codes.float() * scale)
    codes.copy_(torch.where(is_same, codes, found.nan_to_num(0).clamp(-LARGEST, LARGEST).to(torch.int8)))
    scale.copy_(new)


def _requantize_rows__fake(codes, scale, values, *, low=None, high=0, row=0):
    check(codes, scale, values)


requantize_rows_ = define_op(
    "requantize_rows_", requantize_rows__reference, _requantize_rows__fake, mutates=("codes", "scale")
)
