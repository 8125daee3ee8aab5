"""Codes: how low-bit numbers sit in words, and what value each one has.

The kernels know a format only by its `CodeSpec`, which `hf_quant.formats` derives and registers: one truth per fact.

Byte layout (the same on disk and on every device): codes of a row are packed along K into little-endian int32 words,
low bits first. A format of 3 or 6 bits is split into planes whose widths are powers of two (3 = 2 + 1, 6 = 4 + 2), low
bits in the first plane; the planes alternate every 32 codes, so that any slice of a row at a multiple of 32 is
contiguous. K is padded with code 0 to a multiple of 32.
"""

from typing import NamedTuple

import torch
from torch import Tensor


PACK = 32  # codes per packing unit: the least common multiple for every width


class CodeSpec(NamedTuple):
    """What kernels must know of a format.

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


CODES: dict[str, CodeSpec] = {}


def register_codes(spec: CodeSpec) -> CodeSpec:
    """Make a format known to the kernels; called once per format by `hf_quant.formats`."""
    if spec.name in CODES:
        raise ValueError(f"format {spec.name!r} is registered already")
    CODES[spec.name] = spec
    return spec


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
    parts, shift = [], 0
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


def expand_scale(scale: Tensor, N: int, K: int, group_size: int) -> Tensor:
    """[N | 1 | ceil(N/128), ceil(K/group_size)] -> the value for each weight, broadcastable to [..., N, K]."""
    if scale.shape[-1] != 1:
        scale = scale.repeat_interleave(group_size, -1)[..., :K]
    if scale.shape[-2] not in (1, N):
        scale = scale.repeat_interleave(128, -2)[..., :N, :]
    return scale
