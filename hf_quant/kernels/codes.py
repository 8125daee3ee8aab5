"""Codes: how low-bit numbers sit in words, and what value each one has.

The kernels know a format only by its `CodeSpec`. Those of the package are below; `register_codes` adds another
format, which the paths that read any layout then compute.

Byte layout (the same on disk and on every device): codes of a row are packed along K into little-endian int32 words,
low bits first. A format of 3 or 6 bits is split into planes whose widths are powers of two (3 = 2 + 1, 6 = 4 + 2), low
bits in the first plane; the planes alternate every 32 codes, so that any slice of a row at a multiple of 32 is
contiguous. K is padded with code 0 to a multiple of 32.
"""

from typing import NamedTuple

import torch
from torch import Tensor


BLOCK_SIZE = 128  # rows, and columns, of a block of weights that has one scale
PACK = 32  # codes per packing unit: the least common multiple for every width


# Of activations, which have one scale for each row.
MIN_SHARED_ROWS = 16  # fewer are quantized by each product itself, where that is one launch or one loop less
ROW_FORMATS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
# Rows whose scale would be smaller count as zeros, so that no step of a division has a subnormal result, which devices
# treat differently: a remainder of x / scale is a multiple of 2**-23 times the last place of x.
SMALLEST_SCALE = 2.0**-90


class CodeSpec(NamedTuple):
    """A format as kernels know it.

    Attributes:
        name: the format's name.
        bits: bits per code.
        dtype: of `qdata`: int32 for packed codes, else one element per code (int8, float8).
        planes: widths of the bit planes, low bits first; () if not packed.
        levels: value of each code, len 2**bits; () if the element's own value counts. With a zero point the value of
            code q is q - zero_point instead (integer formats only).
        minifloat: (exponent bits, mantissa bits, exponent bias) if a code is a sign and these; else None.
    """

    name: str
    bits: int
    dtype: torch.dtype
    planes: tuple[int, ...] = ()
    levels: tuple[float, ...] = ()
    minifloat: tuple[int, int, int] | None = None

    @property
    def is_packed(self) -> bool:
        return bool(self.planes)

    @property
    def is_integer(self) -> bool:
        """Codes are equally spaced: value = code - 2**(bits - 1)."""
        return self.dtype == torch.int8 or (self.is_packed and self.levels[0] == -(2 ** (self.bits - 1)))


def integer_codes(bits: int, planes: tuple[int, ...]) -> CodeSpec:
    """Packed integers from -2**(bits - 1) to 2**(bits - 1) - 1."""
    low = -(2 ** (bits - 1))
    return CodeSpec(f"int{bits}", bits, torch.int32, planes, tuple(float(low + q) for q in range(2**bits)))


def minifloat_codes(name: str, exponent_bits: int, mantissa_bits: int, planes: tuple[int, ...]) -> CodeSpec:
    """Packed floats of a sign, an exponent and a mantissa, without inf and NaN (OCP MX v1.0, section 5.3)."""
    bias = 2 ** (exponent_bits - 1) - 1
    levels: list[float] = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        levels.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    levels += [-value for value in levels]
    fields = (exponent_bits, mantissa_bits, bias)
    return CodeSpec(name, 1 + exponent_bits + mantissa_bits, torch.int32, planes, tuple(levels), fields)


def _nf4_levels() -> tuple[float, ...]:
    """The 16 levels of QLoRA (https://arxiv.org/abs/2305.14314, appendix E), quantiles of a normal distribution.

    The published recipe in numbers: 8 positive and 7 negative quantiles, evenly spaced in probability between 0.5 and
    0.9677083, the mean of 1 - 1/(2*15) and 1 - 1/(2*16), and zero; normalized to [-1, 1].
    """

    def quantiles(count: int) -> Tensor:
        # Probabilities in fp32, as in the published table: the same levels, bit for bit.
        return torch.special.ndtri(
            torch.linspace(0.9677083, 0.5, count + 1, dtype=torch.float32, device="cpu")[:-1].double()
        )

    # On the CPU also where this module is imported under `torch.device("meta")`.
    positive, negative = quantiles(8), -quantiles(7)
    levels = torch.cat([negative, torch.zeros(1, dtype=torch.float64, device="cpu"), positive]).sort().values.float()
    return tuple((levels / levels.max()).tolist())


CODES: dict[str, CodeSpec] = {
    spec.name: spec
    for spec in (
        CodeSpec("int8", 8, torch.int8),
        integer_codes(4, (4,)),
        integer_codes(3, (2, 1)),
        integer_codes(2, (2,)),
        CodeSpec("fp8_e4m3", 8, torch.float8_e4m3fn, minifloat=(4, 3, 7)),
        CodeSpec("fp8_e5m2", 8, torch.float8_e5m2, minifloat=(5, 2, 15)),
        minifloat_codes("fp6_e3m2", 3, 2, (4, 2)),
        minifloat_codes("fp6_e2m3", 2, 3, (4, 2)),
        CodeSpec("nf4", 4, torch.int32, (4,), _nf4_levels()),
        minifloat_codes("mxfp4", 2, 1, (4,)),
        minifloat_codes("nvfp4", 2, 1, (4,)),
    )
}


def register_codes(spec: CodeSpec) -> None:
    """Register a format with the kernels; nothing happens if it is registered already.

    Raises ValueError if other codes have its name, or if its planes are not `bits` wide in all, each 1, 2, 4 or 8.
    """
    if spec.is_packed and (sum(spec.planes) != spec.bits or not {1, 2, 4, 8}.issuperset(spec.planes)):
        raise ValueError(
            f"{spec.name} has planes of {spec.planes} bits; needs widths of 1, 2, 4 or 8, together {spec.bits}"
        )
    if CODES.setdefault(spec.name, spec) != spec:
        raise ValueError(f"the kernels know other codes by the name {spec.name!r}; give the format another name")


def packed_words(K: int, bits: int) -> int:
    """int32 words that K codes of a row take."""
    return -(-K // PACK) * bits


def pack_codes(codes: Tensor, planes: tuple[int, ...]) -> Tensor:
    """uint8 codes [..., K] -> int32 words [..., ceil(K / 32) * bits].

    Neighbouring codes are folded in whole words: two w-bit codes in the bytes of an int16 become one 2w-bit code by
    `x | x >> (8 - w)`, which vectorizes where strided byte access does not.
    """
    *lead, K = codes.shape
    if K % PACK:
        codes = torch.nn.functional.pad(codes, (0, -K % PACK))
    parts: list[Tensor] = []
    shift = 0
    for width in planes:
        plane = codes if len(planes) == 1 else (codes >> shift) & (2**width - 1)
        plane = plane.contiguous()
        shift += width
        while width < 8:
            words = plane.view(torch.int16)
            plane = (words | (words >> (8 - width))).to(torch.uint8)
            width *= 2
        parts.append(plane.view(torch.int32).view(*lead, codes.shape[-1] // PACK, -1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).flatten(-2)


def unpack_codes(qdata: Tensor, planes: tuple[int, ...], K: int) -> Tensor:
    """Inverse of `pack_codes`: int32 words [..., ceil(K / 32) * bits] -> uint8 codes [..., K]."""
    *lead, words = qdata.shape
    bits = sum(planes)
    units = qdata.reshape(*lead, words // bits, bits)
    codes, shift = None, 0
    for width in planes:
        plane = units[..., shift : shift + width].contiguous().view(torch.uint8)
        step = 8
        while step > width:
            step //= 2
            mask = (2**step - 1) * 0x0101
            spread = plane.to(torch.int16)
            plane = ((spread | (spread << (8 - step))) & mask).view(torch.uint8)
        plane = plane.flatten(-2)
        codes = plane if codes is None else codes | (plane << shift)
        shift += width
    assert codes is not None  # there is no format without a plane
    return codes[..., :K]


def decode_codes(qdata: Tensor, spec: CodeSpec, K: int) -> Tensor:
    """Codes -> their values in fp32 [..., K], before scale; an integer format without its zero point."""
    if not spec.is_packed:
        return qdata.float()
    codes = unpack_codes(qdata, spec.planes, K)
    if spec.is_integer:
        return codes.float() - 2 ** (spec.bits - 1)
    levels = torch.tensor(spec.levels, dtype=torch.float32, device=qdata.device)
    return levels[codes.int()]


def expand_rows(scale: Tensor, N: int) -> Tensor:
    """Scales or zero points [..., N | 1 | ceil(N/128), G] -> [..., N, G]."""
    if scale.shape[-2] == N:
        return scale
    if scale.shape[-2] == 1:
        return scale.expand(*scale.shape[:-2], N, -1)
    return scale.repeat_interleave(BLOCK_SIZE, -2)[..., :N, :]


def expand_scale(scale: Tensor, N: int, K: int, group_size: int) -> Tensor:
    """[N | 1 | ceil(N/128), ceil(K/group_size)] -> the value for each weight, broadcastable to [..., N, K]."""
    if scale.shape[-1] != 1:
        scale = scale.repeat_interleave(group_size, -1)[..., :K]
    return scale if scale.shape[-2] == 1 else expand_rows(scale, N)


def divided(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once: on a GPU torch multiplies by the reciprocal of a Python number, which rounds twice."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def row_max(format: str) -> float:
    """Largest magnitude of a row format: 127 for int8 (symmetric), 448 for fp8_e4m3."""
    if format not in ROW_FORMATS:
        raise ValueError(f"activation format is {format!r}; allowed: {', '.join(ROW_FORMATS)}")
    dtype = ROW_FORMATS[format]
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
