"""PTX that decodes two neighbouring codes of a row into the register that wgmma reads them from.

A register of wgmma's left operand holds columns 2t and 2t + 1 of a chunk of eight, where t is the thread's place among
the four that share a row (https://docs.nvidia.com/cuda/parallel-thread-execution, "Register Fragments for
wgmma.mma_async.m64nNk16"). So thread t reads the 32-bit word that holds its two codes and picks them by a selector of
`prmt` that depends on t alone: no code moves to another thread, and x lies in shared memory as in global memory.
"""

from functools import cache

import torch

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.gpu.decode import AND_OR, AND_XOR, SELECT, table_words


def undecodable_reason(spec: CodeSpec) -> str | None:
    """The reason why there is no PTX for pairs of these codes, None if there is."""
    if spec.is_packed and spec.planes != (4,):
        return f"{spec.name}, whose codes are in planes of {spec.planes} bits"
    if not spec.is_packed and spec.minifloat is None and spec.dtype != torch.int8:
        return f"{spec.name}, which is neither an integer nor a float of a sign, an exponent and a mantissa"
    return None


def selectors(spec: CodeSpec) -> tuple[int, int, int, int]:
    """The selector of thread t = 0, 1, 2, 3: of `prmt`, or for a table of levels the bits to shift by."""
    if spec.is_packed:
        if _is_table(spec):
            return 0, 8, 16, 24
        return tuple(t | 4 + t << 8 for t in range(4))  # byte t, and byte t of the word shifted by 4
    # A float's byte goes to the upper half of 16 bits.
    halves = (0x1404, 0x3424) if spec.minifloat else (0x4140, 0x4342)
    return halves * 2


def _is_table(spec: CodeSpec) -> bool:
    return not spec.is_integer and spec.minifloat is None


def _hex(half: int) -> str:
    return f"0x{half * 0x10001:08X}"


def _both(value: float, dtype: torch.dtype) -> str:
    return _hex(table_words([value], dtype)[0])


@cache
def pair_ptx(name: str, dtype: torch.dtype, scaling: str) -> str:
    """PTX of one pair: $0 the result, $1 and $2 the word, $3 and $4 the selector, $5 the scale, $6 the offset.

    The scale and the offset are there twice, in both halves of a register. scaling: "" leaves the value of the code;
    "*" multiplies it by $5; "*+" also adds $6; "-*" takes $6 from 128 + code (bf16; 1024 + code in fp16), then
    multiplies by $5; "fma" multiplies 128 + code by $5 and adds $6. The last two are of integers of 4 bits.
    """
    spec = CODES[name]
    kind, mantissa = ("bf16x2", 7) if dtype == torch.bfloat16 else ("f16x2", 10)
    one = 0x4300 if dtype == torch.bfloat16 else 0x6400  # 128, 1024: a code is added by an or
    lines = [".reg .b32 s, u;"]
    if _is_table(spec):
        lines += _table_lines(spec.levels, dtype)
    elif spec.is_packed:
        lines += ["shr.u32 s, $1, 4;", "prmt.b32 u, $1, s, $3;"]
    else:
        lines += ["mov.b32 s, 0;", "prmt.b32 u, $1, s, $3;"]
    if spec.is_integer and spec.is_packed:
        lines.append(f"lop3.b32 u, u, 0x000F000F, {_hex(one)}, 0x{AND_OR:X};")
        if scaling in ("", "*", "*+"):
            lines += [f"mov.b32 s, {_both(-(2**mantissa + 8), dtype)};", f"add.rn.{kind} u, u, s;"]
    elif spec.is_integer and dtype == torch.bfloat16:  # 128 + the low 7 bits, less 128, or 256 for negative ones
        lines.append(f"lop3.b32 s, u, 0x00800080, {_hex(one)}, 0x{AND_OR:X};")
        lines.append(f"lop3.b32 u, u, 0x007F007F, {_hex(one)}, 0x{AND_OR:X};")
        lines.append(f"sub.rn.{kind} u, u, s;")
    elif spec.is_integer:  # two's complement: the flipped sign bit adds 128
        lines.append(f"lop3.b32 u, u, 0x00FF00FF, {_hex(one | 0x80)}, 0x{AND_XOR:X};")
        lines += [f"mov.b32 s, {_both(-(1024 + 128), dtype)};", f"add.rn.{kind} u, u, s;"]
    elif spec.minifloat:
        lines += _minifloat_lines(spec, mantissa, kind, dtype)
    if scaling in ("*+", "fma"):
        lines.append(f"fma.rn.{kind} u, u, $5, $6;")
    elif scaling:
        lines += [f"sub.rn.{kind} u, u, $6;"] if scaling == "-*" else []
        lines.append(f"mul.rn.{kind} u, u, $5;")
    return "{ " + " ".join(lines) + " mov.b32 $0, u; }"


def _minifloat_lines(spec: CodeSpec, mantissa: int, kind: str, dtype: torch.dtype) -> list[str]:
    """Sign and magnitude to their places in the larger format, whose exponent bias a factor then corrects."""
    exponent_bits, mantissa_bits, bias = spec.minifloat
    width = exponent_bits + mantissa_bits
    target = mantissa - mantissa_bits  # the lowest bit of the magnitude
    first = 0 if spec.is_packed else 8  # where it is now
    magnitude = (1 << width) - 1 << target
    lines = []
    if spec.is_packed:
        lines += [f"shl.b32 s, u, {target - first};", f"shl.b32 u, u, {15 - width};"]
    else:
        lines += [f"shr.u32 s, u, {first - target};"]
    lines.append(f"and.b32 s, s, {_hex(magnitude)};")
    lines.append(f"lop3.b32 u, u, 0x80008000, s, 0x{AND_OR:X};")
    multiplier = 2.0 ** ((127 if dtype == torch.bfloat16 else 15) - bias)
    if multiplier != 1.0:
        lines += [f"mov.b32 s, {_both(multiplier, dtype)};", f"mul.rn.{kind} u, u, s;"]
    return lines


def _table_lines(levels: tuple[float, ...], dtype: torch.dtype) -> list[str]:
    """Look both codes of a byte up: `prmt` takes bytes of levels by the low three bits, the fourth picks a half."""
    words = table_words(levels, dtype)

    def constant(shift: int, first: int) -> str:
        return "0x" + "".join(f"{words[first + i] >> shift & 0xFF:02X}" for i in (3, 2, 1, 0))

    # b: bytes 0 and 1 hold the codes at their upper ends, so that prmt's sign mode spreads the fourth bit over each.
    lines = [".reg .b32 c, b, l, h, f;", "shr.u32 c, $1, $3;", "shl.b32 b, c, 4;", "prmt.b32 b, b, c, 0x00C8;"]
    lines.append("and.b32 c, c, 0x77;")
    for byte, shift in (("l", 0), ("h", 8)):
        lines.append(f"prmt.b32 {byte}, {constant(shift, 0)}, {constant(shift, 4)}, c;")
        lines.append(f"prmt.b32 f, {constant(shift, 8)}, {constant(shift, 12)}, c;")
        lines.append(f"lop3.b32 {byte}, b, f, {byte}, 0x{SELECT:X};")
    return [*lines, "prmt.b32 u, l, h, 0x5140;"]
