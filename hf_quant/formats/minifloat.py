"""Small floating-point formats: sign, exponent, mantissa (OCP MX v1.0, section 5.3), in whole-tensor integer steps."""

from collections.abc import Callable

import torch
from torch import Tensor


_EXPONENT_MASK = 0x7F800000  # of an fp32 word
_MANTISSA_BITS = 23


def minifloat_snap(limit: float, mantissa_bits: int, bias: int) -> Callable[[Tensor, Tensor], Tensor]:
    """fp32 -> the nearest values of the format, ties to even mantissas, saturating at `limit`."""
    smallest_normal = 2.0 ** (1 - bias)

    def snap(values: Tensor, out: Tensor) -> Tensor:
        torch.clamp(values, -limit, limit, out=out)
        # 1.5 * 2**23 quanta of the value's binade: adding it drops the digits below a quantum,
        # rounding to nearest even in fp32's own addition.
        magic = out.abs().clamp_(min=smallest_normal)
        magic.view(torch.int32).bitwise_and_(_EXPONENT_MASK)
        magic.mul_(1.5 * 2.0 ** (_MANTISSA_BITS - mantissa_bits))
        return out.add_(magic).sub_(magic)

    return snap


def minifloat_round(limit: float, mantissa_bits: int, bias: int, sign: int) -> Callable[[Tensor], Tensor]:
    """fp32 -> uint8 codes of the format, rounded as by `minifloat_snap`; `sign` is the code's sign bit.

    A value that rounds to zero keeps its sign.
    """
    smallest_normal = 2.0 ** (1 - bias)
    drop = _MANTISSA_BITS - mantissa_bits
    snap = minifloat_snap(limit, mantissa_bits, bias)

    def encode(values: Tensor) -> Tensor:
        negative = values.view(torch.int32).bitwise_right_shift(31).bitwise_and_(sign)
        magnitude = snap(values, values).abs_()
        # A subnormal counts from the code of the smallest normal downwards, in steps of its quantum.
        below = magnitude.clamp(max=smallest_normal).sub_(smallest_normal).mul_(2.0**mantissa_bits / smallest_normal)
        word = magnitude.clamp_(min=smallest_normal).view(torch.int32)
        code = word.bitwise_right_shift_(drop).sub_((127 - bias) << mantissa_bits).add_(below.to(torch.int32))
        return code.bitwise_or_(negative).to(torch.uint8)

    return encode
