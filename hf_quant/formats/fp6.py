"""fp6_e3m2 and fp6_e2m3 (OCP Microscaling formats v1.0): no inf, no NaN; a 4-bit plane and a 2-bit plane."""

import torch

from hf_quant.formats._format import Format
from hf_quant.formats._minifloat import minifloat_levels, minifloat_round, minifloat_snap
from hf_quant.kernels.codes import CodeSpec


def _fp6(exponent_bits: int, mantissa_bits: int) -> Format:
    bias = 2 ** (exponent_bits - 1) - 1
    levels = minifloat_levels(exponent_bits, mantissa_bits, bias)
    return Format(
        spec=CodeSpec(
            f"fp6_e{exponent_bits}m{mantissa_bits}",
            6,
            torch.int32,
            (4, 2),
            levels,
            (exponent_bits, mantissa_bits, bias),
        ),
        max=max(levels),
        round=minifloat_round(max(levels), mantissa_bits, bias, sign=32),
        snap=minifloat_snap(max(levels), mantissa_bits, bias),
        scale_dtype="float32",
    )


FP6_E3M2 = _fp6(3, 2)
FP6_E2M3 = _fp6(2, 3)
