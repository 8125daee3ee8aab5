"""Conversion of codes to bf16 in the attention kernel: two elements of 16 bits, so 16 or more bits of codes, at once.

All i-th codes of the elements form one tensor, called place i, as the order of channels inside a product is free.
A code is or-ed into the mantissa of 128, where it may stand anywhere: 128 + 2**p * code. So three codes of int2
share a shift. Queries take the factor 2**-p, and the sum of what 128 adds is known before the loop; for values one
fused multiply-add on a pair makes whole numbers around 0 again: sums of many weights times 128 would lose them.
"""

import struct
from functools import cache

from hf_quant.kernels.codes import CODES


def _twice(value: float) -> str:
    """A pair of bf16 of a value that is one, as a constant of PTX."""
    return f"0x{(struct.unpack('<I', struct.pack('<f', value))[0] >> 16) * 0x10001:08X}"


def _shifts(bits: int) -> tuple[tuple[int, int], ...]:
    """(shift to the right, bit of the mantissa) for each place."""
    if bits == 2:
        return tuple((6 * (i // 3), 2 * (i % 3)) for i in range(8))
    return tuple((bits * i, 0) for i in range(16 // bits))


def places(format: str, *, use_ptx: bool) -> tuple[int, ...]:
    """The p of each place of keys; without PTX they come centered, as values do."""
    bits = CODES[format].bits
    return tuple(p if use_ptx else 0 for _, p in _shifts(bits))


@cache
def place_ptx(format: str, *, centered: bool) -> tuple[str, ...]:
    """PTX for each place: from $1, two elements, to $0, two bf16. 8-bit formats are always centered."""
    spec = CODES[format]
    found = []
    for shift, p in _shifts(spec.bits):
        lines, source = [".reg .b32 t, u, v, w;"], "$1"
        if shift:
            lines.append(f"shr.b32 t, $1, {shift};")
            source = "t"
        if spec.minifloat:
            exponent, mantissa, bias = spec.minifloat
            lines += [
                f"lop3.b32 u, {source}, 0x00800080, 0, 0xC0;",
                "shl.b32 u, u, 8;",
                f"lop3.b32 v, {source}, 0x007F007F, 0, 0xC0;",
                f"shl.b32 v, v, {7 - mantissa};",
                "or.b32 u, u, v;",
                f"mov.b32 v, {_twice(2.0 ** (127 - bias))};",
                "mov.b32 w, 0x80008000;",
                "fma.rn.bf16x2 $0, u, v, w;",
            ]
        elif spec.bits == 8:  # 128 + the low 7 bits, minus 128 or, if negative, 256
            lines += [
                f"lop3.b32 u, {source}, 0x007F007F, 0x43004300, 0xEA;",
                f"lop3.b32 v, {source}, 0x00800080, 0x43004300, 0xEA;",
                f"mov.b32 w, {_twice(-1.0)};",
                "fma.rn.bf16x2 $0, v, w, u;",
            ]
        else:
            mask = ((2**spec.bits - 1) << p) * 0x10001
            lines.append(f"lop3.b32 {'u' if centered else '$0'}, {source}, 0x{mask:08X}, 0x43004300, 0xEA;")
            if centered:
                lines.append(f"mov.b32 v, {_twice(0.5**p)};")
                lines.append(f"mov.b32 w, {_twice(-128 * 0.5**p - 2 ** (spec.bits - 1))};")
                lines.append("fma.rn.bf16x2 $0, u, v, w;")
        found.append("{ " + " ".join(lines) + " }")
    return tuple(found)
