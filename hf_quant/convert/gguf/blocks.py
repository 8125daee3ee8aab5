"""Convert the blocks of GGUF's types to codes and scales: no value is rounded. `written` converts them back.

A row of a weight is a sequence of blocks, each with its scales and codes; layout and values are those of
https://github.com/ggml-org/llama.cpp/tree/master/ggml/src: ggml-common.h, `dequantize_row_*` in ggml-quants.c.

    Q4_0    32 codes of 4 bits, one fp16 scale: int4
    Q4_1    the same with an fp16 minimum: int4 with zero points, which are codes if all minima are multiples of scales
    Q5_0    32 codes of 5 bits, one fp16 scale: int8
    Q5_1    the same with an fp16 minimum: int8 with zero points
    Q8_0    32 codes of 8 bits, one fp16 scale: int8
    MXFP4   32 codes e2m1, one e8m0 scale: mxfp4
    Q2_K    256 codes of 2 bits; scales and minima of 16: two fp16 numbers times 4-bit integers: int2 with fp32 scales
            and zero points
    Q3_K    256 codes of 3 bits; scales of 16: one fp16 number times 6-bit integers: int3 with fp32 scales
    Q4_K    256 codes of 4 bits; scales and minima of 32: two fp16 numbers times 6-bit integers: int4 with fp32 scales
            and zero points
    Q5_K    the same with codes of 5 bits: int8 with fp32 scales and zero points
    Q6_K    256 codes of 6 bits; scales of 16: one fp16 number times 8-bit integers: int8 with fp32 scales
    IQ4_NL  32 indices of a table of 8-bit integers, one fp16 scale: int8
    IQ4_XS  256 of these; scales of 32: one fp16 number times 6-bit integers: int8 with fp32 scales
    TQ2_0   256 codes of 2 bits, -1 to 2 times one fp16 scale: int2, which has -2 to 1, with the scale negated
    TQ1_0   the same with -1, 0 and 1, five to a byte
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight, unused_scale
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.convert.gguf.codes import Codes, converted, joined
from hf_quant.formats import FORMATS
from hf_quant.kernels.codes import expand_scale
from hf_quant.scheme import TensorQuant


_CHUNK = 2**20  # weights at a time, which bounds the temporaries
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl of ggml-common.h


class Type(NamedTuple):
    """A type of GGUF that is read: the geometry of its blocks, and the format that holds it."""

    size: int  # codes of a block
    nbytes: int  # of a block
    quant: TensorQuant
    decode: Callable[[Tensor], Codes]  # of blocks [N, blocks, nbytes] uint8


def unpack(known: Type, rows: Tensor, K: int, quant: TensorQuant | None = None) -> PackedWeight:
    """Return the weight [..., N, K] of rows of blocks of a type, uint8 [..., N, bytes]. Raises Inexpressible.

    `quant` is a `common_quant` of the type's own and others; None: the type's own.
    """
    parts = [_unpack(known, part, K, quant or known.quant) for part in rows.flatten(0, -2).split(_rows_at_a_time(K))]
    return joined(parts, lambda tensors: torch.cat(tensors).unflatten(0, rows.shape[:-1]))


def _rows_at_a_time(K: int) -> int:
    return max(_CHUNK // K, 1)


def _unpack(known: Type, rows: Tensor, K: int, quant: TensorQuant) -> PackedWeight:
    blocks = rows.view(rows.shape[0], -1, known.nbytes)
    codes, scale, zero_point = converted(known.decode(blocks), known.quant, quant)
    format = FORMATS[quant.format]
    zero = 0 if codes.dtype == torch.int8 else 2 ** (format.bits - 1)

    def expanded(values: Tensor) -> Tensor:
        return expand_scale(values, len(codes), K, quant.columns_per_scale(K)).expand_as(codes)

    if quant.format != "mxfp4" and bool((empty := scale == 0).any()):
        # All weights of the group are 0, or its minimum: so they are with codes of 0 and any scale; ours are never 0.
        filler = zero if zero_point is None else 0 if quant.has_float_zeros else expanded(zero_point)
        codes = torch.where(expanded(empty), filler, codes)
        scale = torch.where(empty, unused_scale(scale.dtype) if quant.has_float_zeros else 1.0, scale)
    if codes.dtype == torch.int8 and bool((negative := scale < 0).any()):  # which int8 has not
        negative = expanded(negative)
        if bool((codes[negative] == -128).any()):
            raise Inexpressible("a group with a negative scale has a code of -128, and int8 has no 128")
        codes, scale = torch.where(negative, -codes, codes), scale.abs()
    return PackedWeight(format.pack(codes), scale, zero_point, None)


def _viewed(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of bits as another dtype; a view fails on the strides that a tensor of one row may have."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at a byte of each block [N, blocks]."""
    return _viewed(blocks[..., at : at + 2], torch.float16).squeeze(-1)


def _nibbles(pairs: Tensor) -> Tensor:
    """Return 4-bit codes [..., 2 n] of bytes [..., n]: all low halves, then all high ones."""
    return torch.cat([pairs & 15, pairs >> 4], -1)


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(_nibbles(blocks[..., 2:]).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Codes:
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    zeros = -minimum.double() / torch.where(scale == 0, 1.0, scale.double())
    is_constant = (scale == 0) & (minimum != 0)  # which a zero point times a scale is not
    if bool(((zeros != zeros.round()) | (zeros < 0) | (zeros > 15) | is_constant).any()):
        raise Inexpressible("the minimum of a group is no multiple of its scale, as a zero point of int4 is")
    return Codes(_nibbles(blocks[..., 4:]).flatten(1), scale, zeros.to(torch.uint8))


def _q4_1_with_minima(blocks: Tensor) -> Codes:
    return Codes(_nibbles(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _fives(blocks: Tensor, at: int) -> Tensor:
    """Return 5-bit codes [N, 32 blocks] int8 of four bytes of highest bits at a byte of each block, and nibbles."""
    high = (blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    return (_nibbles(blocks[..., at + 4 :]) | high << 4).view(torch.int8).flatten(1)


def _q5_0(blocks: Tensor) -> Codes:
    return Codes(_fives(blocks, 2) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    return Codes(_fives(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(_viewed(blocks[..., 2:], torch.int8).flatten(1), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Codes:
    return Codes(
        _nibbles(blocks[..., 1:]).flatten(1),
        _viewed(blocks[..., 0], torch.float8_e8m0fnu),
    )


def _q2_k(blocks: Tensor) -> Codes:
    both, pairs = blocks[..., :16], blocks[..., 16:80].unflatten(-1, (2, 1, 32))
    codes = (pairs >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(-3)
    return Codes(codes.flatten(1), _products(blocks, 80, both & 15), -_products(blocks, 82, both >> 4))


def _q4_k(blocks: Tensor) -> Codes:
    return Codes(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1), *_scales_and_minima(blocks))


def _q5_k(blocks: Tensor) -> Codes:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    high = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    return Codes((low | high << 4).view(torch.int8).flatten(1), *_scales_and_minima(blocks))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima [N, 8 blocks] of Q4_K and Q5_K, of two fp16 numbers and 16 integers of 6 bits."""
    first, second, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = torch.cat([first & 63, low & 15 | first >> 6 << 4], -1)
    of_minima = torch.cat([second & 63, low >> 4 | second >> 6 << 4], -1)
    return _products(blocks, 0, factors), -_products(blocks, 2, of_minima)


def _q3_k(blocks: Tensor) -> Codes:
    masks, pairs, packed = blocks[..., :32], blocks[..., 32:96].unflatten(-1, (2, 1, 32)), blocks[..., 96:108]
    places = torch.arange(4, dtype=torch.uint8)[:, None]
    low = (pairs >> 2 * places & 3).flatten(-3)
    high = (masks[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    fours = _nibbles(packed[..., :8])
    twos = (packed[..., None, 8:] >> 2 * places & 3).flatten(-2)
    # A code is its low bits - 4, or, with the high bit, its low bits.
    return Codes((low | high << 2).flatten(1), _products(blocks, 108, (fours | twos << 4).view(torch.int8) - 32))


def _q6_k(blocks: Tensor) -> Codes:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3).flatten(-2)
    codes = (low | high << 4).view(torch.int8) - 32
    return Codes(
        codes.flatten(1),
        _products(blocks, 208, _viewed(blocks[..., 192:208], torch.int8)),
    )


def _iq4_nl(blocks: Tensor) -> Codes:
    return Codes(torch.tensor(_IQ4, dtype=torch.int8)[_nibbles(blocks[..., 2:]).int()].flatten(1), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Codes:
    codes = torch.tensor(_IQ4, dtype=torch.int8)[_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).int()]
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    return Codes(codes.flatten(1), _products(blocks, 0, (low | high << 4).view(torch.int8) - 32))


def _tq2_0(blocks: Tensor) -> Codes:
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    codes = (blocks[..., :64].unflatten(-1, (2, 1, 32)) >> places & 3).flatten(-3)
    return Codes(3 - codes.flatten(1), -_half(blocks, 64))


def _tq1_0(blocks: Tensor) -> Codes:
    def digits(packed: Tensor, count: int) -> Tensor:
        """Return the leading digits, in base 3, of fractions of 256."""
        rest = packed[..., None, :] * torch.tensor([3**n for n in range(count)], dtype=torch.uint8)[:, None]  # wraps
        return (rest.short() * 3 >> 8).to(torch.uint8).flatten(-2)

    parts = [digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)]
    return Codes(3 - torch.cat(parts, -1).flatten(1), -_half(blocks, 52))


def _products(blocks: Tensor, at: int, factors: Tensor) -> Tensor:
    """Return the fp32 scales [N, blocks * factors]: an fp16 number of each block times its integers, exact in fp32."""
    return (_half(blocks, at).float()[..., None] * factors).flatten(1)


def _group(format: str, size: int, dtype: str, symmetric: bool = True) -> TensorQuant:
    return TensorQuant(format, "group", size, symmetric, dtype)


def _with_minima(format: str, size: int, dtype: str) -> TensorQuant:
    return TensorQuant(format, "group", size, False, dtype, zero_point_dtype=dtype)


TYPES = {
    "Q4_0": Type(32, 18, _group("int4", 32, "float16"), _q4_0),
    "Q4_1": Type(32, 20, _group("int4", 32, "float16", symmetric=False), _q4_1),
    "Q5_0": Type(32, 22, _group("int8", 32, "float16"), _q5_0),
    "Q5_1": Type(32, 24, _with_minima("int8", 32, "float16"), _q5_1),
    "Q8_0": Type(32, 34, _group("int8", 32, "float16"), _q8_0),
    "MXFP4": Type(32, 17, _group("mxfp4", 32, "float8_e8m0fnu"), _mxfp4),
    "Q2_K": Type(256, 84, _with_minima("int2", 16, "float32"), _q2_k),
    "Q3_K": Type(256, 110, _group("int3", 16, "float32"), _q3_k),
    "Q4_K": Type(256, 144, _with_minima("int4", 32, "float32"), _q4_k),
    "Q5_K": Type(256, 176, _with_minima("int8", 32, "float32"), _q5_k),
    "Q6_K": Type(256, 210, _group("int8", 16, "float32"), _q6_k),
    "IQ4_NL": Type(32, 18, _group("int8", 32, "float16"), _iq4_nl),
    "IQ4_XS": Type(256, 136, _group("int8", 32, "float32"), _iq4_xs),
    "TQ2_0": Type(256, 66, _group("int2", 256, "float16"), _tq2_0),
    "TQ1_0": Type(256, 54, _group("int2", 256, "float16"), _tq1_0),
}
# What holds the blocks of a type whose values are not those of its quantization above.
OTHERWISE = {"Q4_1": Type(32, 20, _with_minima("int4", 32, "float16"), _q4_1_with_minima)}
