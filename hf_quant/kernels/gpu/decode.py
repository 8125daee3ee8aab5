"""Quantized weights as Triton kernels read and decode them, in registers.

Packed codes are read as elements of `CODES` consecutive codes, and decoded into one tensor for each place in an
element (see `gpu.tile` for why that order is free). The decoding is written twice from one description: as PTX,
integer instructions only, on two elements of a register at a time (`ptx`), and in Triton for AMD and Intel. LLVM
shifts and masks the 16-bit halves of a register one by one: a K step of int4 (sm90, BLOCK_N 128, BLOCK_M 16, BLOCK_K
128, 4 warps; Triton 3.9) takes 494 instructions with Triton's decoding, 318 with the PTX.

A code becomes a float without a conversion: integers are or-ed into the mantissa of 128 (bf16) or 1024 (fp16) and the
offset is subtracted, exactly; minifloats get sign and magnitude at the places of the larger format and are multiplied
by a power of two; nf4 looks its bytes up with `prmt`, whose selectors the codes themselves are.
"""

from collections.abc import Sequence
from functools import cache

import torch

from hf_quant.kernels.codes import CODES, CodeSpec
from hf_quant.kernels.gpu.counters import lasting
from hf_quant.kernels.gpu.launch import tl, triton


ANY_GROUP = 2**30  # the constexpr GROUP where one scale serves the whole row
AND_OR, AND_XOR, SELECT = 0xEA, 0x6A, 0xCA  # lop3: (a & b) | c, (a & b) ^ c, a ? b : c


def undecodable_reason(spec: CodeSpec) -> str | None:
    """The reason why kernels cannot decode these codes in registers, None if they can."""
    if spec.is_packed and (len(spec.planes) > 2 or sum(spec.planes[1:]) * 2 not in (0, spec.planes[0])):
        return f"{spec.name}, whose codes are in planes of {spec.planes} bits"
    if not spec.is_integer and spec.minifloat is None and spec.planes != (4,):
        return f"{spec.name}, a table of {len(spec.levels)} levels"
    return None


def whole_element(spec: CodeSpec) -> int:
    """Codes of one element: 16 bits of the first plane, so that the second (of 3 and 6 bits) has 8."""
    return 16 // (spec.planes or (8,))[0]


def codes_per_element(spec: CodeSpec, K: int, alignment: int) -> int:
    """Codes that a kernel reads as one element: 1 if 8-bit codes do not pair up in every row.

    `alignment`: see `row_alignment`.
    """
    return 1 if not spec.is_packed and (K % 2 or alignment % 2) else whole_element(spec)


def row_alignment(qdata: torch.Tensor) -> int:
    """2 if all rows of the codes start at even addresses, else 1."""
    return 1 if (qdata.data_ptr() | qdata.stride(-2) * qdata.element_size()) % 2 else 2


def _mantissa_bits(dtype: torch.dtype) -> int:
    return 7 if dtype == torch.bfloat16 else 10


def _pieces(spec: CodeSpec, dtype: torch.dtype) -> list[tuple[int, int, int, int]]:
    """The places of a code's bits in a 16-bit float: (plane, first bit in it, width, bit of the float)."""
    pieces, bit = [], 0
    for plane, width in enumerate(spec.planes or (8,)):
        if spec.is_integer:
            pieces.append((plane, 0, width, bit))
        else:
            magnitude = min(width, spec.bits - 1 - bit)
            if magnitude:
                pieces.append((plane, 0, magnitude, _mantissa_bits(dtype) - spec.minifloat[1] + bit))
            if bit + width == spec.bits:
                pieces.append((plane, width - 1, 1, 15))
        bit += width
    return pieces


@cache
def ptx(name: str, dtype: torch.dtype) -> str:
    """PTX that decodes a pair of elements to pairs of bf16 or fp16, one for each code of an element.

    Outputs $0.. are codes 0, 1, .. of both elements; the inputs after them the planes, each as 16-bit elements.
    Integers come as 128 (bf16) or 1024 (fp16) + code, minifloats divided by a power of two (`MULTIPLIER`). int8 in
    bf16, whose mantissa has 7 bits, comes as 128 + the low 7 bits, followed by what to subtract: 128 or 256 by sign.
    """
    spec = CODES[name]
    count = whole_element(spec)
    if not spec.is_integer and spec.minifloat is None:
        return _ptx_table(spec.levels, dtype)
    lines = [".reg .b32 t, u;"]
    if spec.dtype == torch.int8 and dtype == torch.bfloat16:
        for i in range(count):
            lines.append(f"shr.b32 t, ${2 * count}, {8 * i};")
            lines.append(f"lop3.b32 ${i}, t, 0x007F007F, 0x43004300, 0x{AND_OR:X};")
            lines.append(f"lop3.b32 ${count + i}, t, 0x00800080, 0x43004300, 0x{AND_OR:X};")
        return "{ " + " ".join(lines) + " }"
    magic = (0x4300 if dtype == torch.bfloat16 else 0x6400) if spec.is_integer else 0
    table = AND_OR
    if spec.dtype == torch.int8:  # two's complement: the flipped sign bit adds 128
        magic, table = magic | 0x80, AND_XOR
    planes = spec.planes or (8,)
    pieces = _pieces(spec, dtype)
    for i in range(count):
        done = f"0x{magic * 0x10001:08X}"
        for p, (plane, first, width, target) in enumerate(pieces):
            shift = planes[plane] * i + first - target
            source = f"${count + plane}"
            if shift:
                lines.append(f"{'shr' if shift > 0 else 'shl'}.b32 t, {source}, {abs(shift)};")
                source = "t"
            mask = ((1 << width) - 1 << target) * 0x10001
            into = f"${i}" if p == len(pieces) - 1 else "u"
            lines.append(f"lop3.b32 {into}, {source}, 0x{mask:08X}, {done}, 0x{table:X};")
            done = "u"
    return "{ " + " ".join(lines) + " }"


def _ptx_table(levels: tuple[float, ...], dtype: torch.dtype) -> str:
    """PTX that looks 4-bit codes up: the bytes of the 16 levels are in 8 constants, codes are byte selectors.

    `prmt` selects by the low three bits among 8 levels; it is done for both halves of the table, and the fourth bit,
    spread over a byte by prmt's sign mode, picks one.
    """
    words = table_words(levels, dtype)

    def constant(shift: int, first: int) -> str:
        return "0x" + "".join(f"{words[first + i] >> shift & 0xFF:02X}" for i in (3, 2, 1, 0))

    lines = [".reg .b32 s, m, w, a, b, l, h, p0, q0, p1, q1;", "shl.b32 w, $4, 4;"]
    for element in (0, 1):
        lines.append(f"shr.b32 s, $4, {16 * element};" if element else "mov.b32 s, $4;")
        lines.append("and.b32 s, s, 0x7777;")
        lines.append(f"prmt.b32 m, $4, w, {'0xBFAE' if element else '0x9D8C'};")
        for byte, shift in (("l", 0), ("h", 8)):
            lines.append(f"prmt.b32 a, {constant(shift, 0)}, {constant(shift, 4)}, s;")
            lines.append(f"prmt.b32 b, {constant(shift, 8)}, {constant(shift, 12)}, s;")
            lines.append(f"lop3.b32 {byte}, m, b, a, 0x{SELECT:X};")
        lines.append(f"prmt.b32 p{element}, l, h, 0x5140;")
        lines.append(f"prmt.b32 q{element}, l, h, 0x7362;")
    for i, (pair, selector) in enumerate((("p", "0x5410"), ("p", "0x7632"), ("q", "0x5410"), ("q", "0x7632"))):
        lines.append(f"prmt.b32 ${i}, {pair}0, {pair}1, {selector};")
    return "{ " + " ".join(lines) + " }"


def table_words(levels: Sequence[float], dtype: torch.dtype) -> list[int]:
    """The 16 bits of each level in bf16 or fp16."""
    return [bits & 0xFFFF for bits in torch.tensor(levels, dtype=dtype, device="cpu").view(torch.int16).tolist()]


def decode_options(name: str, dtype: torch.dtype, codes: int, *, use_ptx: bool) -> dict:
    """The constexprs by which a kernel decodes a format, `codes` at a time, to `dtype`: bf16 or fp16."""
    spec = CODES[name]
    is_table = not spec.is_integer and spec.minifloat is None
    planes = spec.planes or (8,)
    multiplier = 1.0
    if spec.minifloat:  # from this format's exponent bias to that of dtype
        multiplier = 2.0 ** ((127 if dtype == torch.bfloat16 else 15) - spec.minifloat[2])
    return {
        "KIND": "integer" if spec.is_integer else "table" if is_table else "minifloat",
        "BITS": spec.bits,
        "PLANE0": planes[0],
        "PLANE1": planes[1] if len(planes) > 1 else 0,
        "CODES": codes,
        "MANTISSA": spec.minifloat[1] if spec.minifloat else 0,
        "MULTIPLIER": multiplier,
        "PTX": ptx(name, dtype) if use_ptx and codes > 1 else None,
    }


@cache
def levels_tensor(name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The levels of a table format for the portable decoding [2**bits]; one element for other formats."""
    spec = CODES[name]
    is_table = spec.is_packed and not spec.is_integer and spec.minifloat is None
    levels = spec.levels if is_table else (0.0,)
    return lasting(lambda: torch.tensor(levels, dtype=dtype, device=device), device)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Codes and scales as a kernel reads them: float8 as uint8, which every GPU knows."""
    is_float8 = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if is_float8 else tensor


def scale_kind(dtype: torch.dtype) -> str:
    """The constexpr SCALE for scales of a dtype."""
    return {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(dtype, "float")


def scale_rows(shape: tuple[int, ...], N: int) -> int:
    """Rows of the weight that share a row of scales [..., rows, groups]; 0: all do."""
    return 0 if shape[-2] == 1 else 1 if shape[-2] == N else 128


def group_in_block(group_size: int, K: int, block: int) -> int:
    """The constexpr GROUP: such that a block of columns holds whole groups or is inside of one; 0 for other sizes."""
    if group_size >= K:
        return ANY_GROUP
    return group_size if block % group_size == 0 or group_size % block == 0 else 0


def row_elements(qdata: torch.Tensor, codes: int) -> int:
    """Stride of the rows of `qdata` in the elements that a kernel reads: int16, or int8 if codes is 1."""
    return qdata.stride(-2) * qdata.element_size() // (1 if codes == 1 else 2)


def common_unit(*strides: int) -> int:
    """The unit that strides are counted in: the largest of 8, 4, 2, 1 that divides all; 1 if 16 does.

    Triton itself sees only multiples of 16 in an argument, and reads other rows element by element.
    """
    sizes = 16
    for stride in strides:
        sizes |= stride
    return sizes & -sizes if sizes % 16 else 1


_2 = tl.constexpr((tl.int16,) * 2)
_4 = tl.constexpr((tl.int16,) * 4)
_8 = tl.constexpr((tl.int16,) * 8)


@triton.jit
def _load(pointers, mask, CHECK: tl.constexpr):
    if CHECK:
        return tl.load(pointers, mask=mask, other=0)
    else:  # weights are read once: they need not stay in the cache
        return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def load_planes(
    qdata,
    rows,
    element,
    limit,
    PLANE0: tl.constexpr,
    PLANE1: tl.constexpr,
    CODES: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Elements [BLOCK_N, n] of both planes as int16, the first as int8 if CODES is 1; of one plane, that twice.

    rows [BLOCK_N] are offsets in elements of int16 (int8 if CODES is 1); `element` [n] counts from the start of a row,
    those at or past `limit` are 0 if CHECK.
    """
    mask = element[None, :] < limit
    if CODES == 1:
        first = _load(qdata.to(tl.pointer_type(tl.int8)) + rows[:, None] + element[None, :], mask, CHECK)
        return first, first
    else:
        base = qdata.to(tl.pointer_type(tl.int16)) + rows[:, None]
        if PLANE1 == 0:
            first = _load(base + element[None, :], mask, CHECK)
            return first, first
        else:
            # 32 codes are a unit of PLANE0 + PLANE1 words: first those of plane 0, then those of plane 1.
            UNIT: tl.constexpr = 32 // CODES
            unit = element // UNIT
            inner = element % UNIT
            first = _load(base + (unit * ((PLANE0 + PLANE1) * 2) + inner)[None, :], mask, CHECK)
            base = qdata.to(tl.pointer_type(tl.uint8)) + (rows * 2)[:, None]
            second = _load(base + (unit * ((PLANE0 + PLANE1) * 4) + PLANE0 * 4 + inner)[None, :], mask, CHECK)
            return first, second.to(tl.int16)


@triton.jit
def decode_portable(
    first,
    second,
    levels,
    INDEX: tl.constexpr,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANE0: tl.constexpr,
    PLANE1: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """The INDEX-th code of each element in DOT, in the form that `ptx` gives it; int8 codes in bf16 as they are."""
    code = (first.to(tl.int16) >> (PLANE0 * INDEX)) & (2**PLANE0 - 1)
    if PLANE1 > 0:
        code = code | (((second >> (PLANE1 * INDEX)) & (2**PLANE1 - 1)) << PLANE0)
    if KIND == "table":
        return tl.load(levels + code)
    elif KIND == "integer":
        if DOT == tl.float16:
            return (code ^ (0x6480 if BITS == 8 else 0x6400)).to(tl.float16, bitcast=True)
        elif BITS == 8:
            low = ((code & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
            return low - ((code & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
        else:
            return (code | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        WIDE: tl.constexpr = 7 if DOT == tl.bfloat16 else 10
        magnitude = (code & (2 ** (BITS - 1) - 1)) << (WIDE - MANTISSA)
        sign = (code & (2 ** (BITS - 1))) << (16 - BITS)
        return (magnitude | sign).to(DOT, bitcast=True)


@triton.jit
def _decode_ptx(first, second, PLANE1: tl.constexpr, OUTPUTS: tl.constexpr, PTX: tl.constexpr):
    """A tuple of OUTPUTS (2, 4, 8) tensors of int16: the bits that `ptx` gives."""
    if OUTPUTS == 2:
        return tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [first], dtype=_2, is_pure=True, pack=2)
    elif OUTPUTS == 4:
        if PLANE1 == 0:
            return tl.inline_asm_elementwise(PTX, "=&r,=&r,=&r,=&r,r", [first], dtype=_4, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(
                PTX, "=&r,=&r,=&r,=&r,r,r", [first, second], dtype=_4, is_pure=True, pack=2
            )
    else:
        if PLANE1 == 0:
            return tl.inline_asm_elementwise(
                PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [first], dtype=_8, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [first, second], dtype=_8, is_pure=True, pack=2
            )


@triton.jit
def _joined2(a, b):
    return tl.interleave(a, b)


@triton.jit
def _joined4(a, b, c, d):
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _joined(
    first,
    second,
    levels,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANE0: tl.constexpr,
    PLANE1: tl.constexpr,
    CODES: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """The codes of all elements in their order, decoded by Triton."""
    c0 = decode_portable(first, second, levels, 0, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
    if CODES == 1:
        return c0
    else:
        c1 = decode_portable(first, second, levels, 1, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
        if CODES == 2:
            return _joined2(c0, c1)
        else:
            c2 = decode_portable(first, second, levels, 2, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
            c3 = decode_portable(first, second, levels, 3, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
            if CODES == 4:
                return _joined4(c0, c1, c2, c3)
            else:
                c4 = decode_portable(first, second, levels, 4, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
                c5 = decode_portable(first, second, levels, 5, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
                c6 = decode_portable(first, second, levels, 6, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
                c7 = decode_portable(first, second, levels, 7, DOT, KIND, BITS, PLANE0, PLANE1, MANTISSA)
                return _joined2(_joined4(c0, c2, c4, c6), _joined4(c1, c3, c5, c7))


@triton.jit
def decode_in_order(
    first,
    second,
    levels,
    DOT: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PLANE0: tl.constexpr,
    PLANE1: tl.constexpr,
    CODES: tl.constexpr,
    MANTISSA: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    PTX: tl.constexpr,
):
    """Elements [R, n] -> the values of their codes [R, n * CODES] in DOT; packed integers with the offset of `ptx`."""
    if PTX is None:
        values = _joined(first, second, levels, DOT, KIND, BITS, PLANE0, PLANE1, CODES, MANTISSA)
    else:
        INT8: tl.constexpr = KIND == "integer" and BITS == 8 and DOT == tl.bfloat16
        parts = _decode_ptx(first, second, PLANE1, CODES * 2 if INT8 else CODES, PTX)
        if CODES == 2:
            values = _joined2(parts[0], parts[1]).to(DOT, bitcast=True)
            if INT8:
                values = values - _joined2(parts[2], parts[3]).to(DOT, bitcast=True)
        elif CODES == 4:
            values = _joined4(parts[0], parts[1], parts[2], parts[3]).to(DOT, bitcast=True)
        else:
            even = _joined4(parts[0], parts[2], parts[4], parts[6])
            odd = _joined4(parts[1], parts[3], parts[5], parts[7])
            values = _joined2(even, odd).to(DOT, bitcast=True)
    if KIND == "integer" and BITS == 8 and DOT == tl.float16:
        values = values - tl.full((1, 1), 1024 + 128, DOT)
    elif MULTIPLIER != 1.0:
        values = values * tl.full((1, 1), MULTIPLIER, DOT)
    return values


@triton.jit
def scale_in(raw, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """A stored scale in DTYPE: floating-point, or the bits of e8m0 (a power of two) or e4m3 as uint8."""
    if SCALE == "e8m0":
        # 2**-127 is a subnormal; 255, NaN, becomes infinity.
        # Triton 3.6 widens the maximum with a constant to 32 bits.
        word = tl.maximum(raw.to(tl.int16) << 7, 0x40).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return word.to(DTYPE)
    elif SCALE == "e4m3":
        bits = raw.to(tl.int16)
        word = (((bits & 0x7F) << 4) | ((bits & 0x80) << 8)).to(tl.bfloat16, bitcast=True)
        return (word.to(tl.float32) * 1.329227995784916e36).to(DTYPE)  # 2**120
    else:
        return raw.to(DTYPE)


@triton.jit
def offset_in(zero, factor, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The number that is added to a scale (`factor`, fp32) times a code less the middle one, see `float_zeros`.

    zero: the value of code 0.
    """
    MIDDLE: tl.constexpr = 0 if BITS == 8 else 2 ** (BITS - 1)
    return (zero.to(tl.float32) + factor * MIDDLE).to(DTYPE)


def e4m3_ptx(dtype: torch.dtype) -> str:
    """PTX of four e4m3 numbers in a word ($2) as two pairs of bf16 or fp16, exactly; NaN becomes 480.

    The bits of each number go to their places in the larger format: those of its upper byte in one word for all four,
    those of its lower byte in another. A factor then corrects the exponent.
    """
    upper, shift, factor, kind = (7, 4, 0x7B80, "bf16") if dtype == torch.bfloat16 else (0x3F, 7, 0x5C00, "f16")
    return (
        "{ .reg .b32 h, l, m, z; "
        f"shr.b32 h, $2, {8 - shift}; lop3.b32 h, h, 0x{upper * 0x01010101:08X}, 0, 0xC0; "
        f"lop3.b32 h, $2, 0x80808080, h, 0x{AND_OR:X}; "
        f"shl.b32 l, $2, {shift}; lop3.b32 l, l, 0x{(0xFF << shift & 0xFF) * 0x01010101:08X}, 0, 0xC0; "
        "prmt.b32 $0, l, h, 0x5140; prmt.b32 $1, l, h, 0x7362; "
        f"mov.b32 m, 0x{factor * 0x10001:08X}; mov.b32 z, 0x80008000; "
        f"fma.rn.{kind}x2 $0, $0, m, z; fma.rn.{kind}x2 $1, $1, m, z; }}"
    )


_E4M3_BF16 = tl.constexpr(e4m3_ptx(torch.bfloat16))
_E4M3_FP16 = tl.constexpr(e4m3_ptx(torch.float16))


@triton.jit
def e4m3_by_ptx(raw, DOT: tl.constexpr):
    """Bits of e4m3 as uint8 -> their values in DOT, as `scale_in` gives them: 9 instructions for four of them."""
    PTX: tl.constexpr = _E4M3_BF16 if DOT == tl.bfloat16 else _E4M3_FP16
    bits = tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [raw], dtype=tl.int16, is_pure=True, pack=4)
    return bits.to(DOT, bitcast=True)


@triton.jit
def spread(values, ROWS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """values [ROWS, GROUPS] -> [ROWS, COLUMNS], each repeated COLUMNS / GROUPS times."""
    wide = tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, COLUMNS // GROUPS))
    return tl.reshape(wide, (ROWS, COLUMNS))


@triton.jit
def decoded_once(values, DOT: tl.constexpr):
    """The values of an operand of a product whose rows are split among the warps; see `Target.has_warp_dot`.

    Each warp would decode the whole operand for itself: Triton moves what lies before a product behind the exchange of
    its operand (most of it in 3.6, less in 3.9), but no instruction with a side effect.
    """
    bits = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=tl.int16, is_pure=False, pack=2)
    return bits.to(DOT, bitcast=True)
