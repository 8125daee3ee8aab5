"""Convert the blocks of GGUF's types to codes and scales and back: no value is rounded.

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
from hf_quant.scheme import LinearScheme, TensorQuant


_CHUNK = 2**20  # weights at a time, which bounds the temporaries
BLOCK = 32  # codes that share a scale in the types that are written
_SCALES = "its scales are no fp16 numbers: quantize it with scale_dtype='float16'"
_MINIMA = (
    "the products of its scales and zero points are no fp16 numbers: quantize it with symmetric=True, or with "
    "scale_dtype='float8_e4m3fn'"
)
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


def type_for(scheme: LinearScheme, K: int) -> str:
    """Return the type that holds weights [N, K] of a scheme, if their scales fit it. Raises Inexpressible."""
    quant = scheme.weight
    if scheme.input_transform is not None:
        raise Inexpressible(
            'its input is rotated, which llama.cpp does not compute: quantize with input_transform="none"'
        )
    if scheme.sparsity is not None:
        raise Inexpressible(f"{scheme.sparsity} sparsity has no type in GGUF")
    for kind in _WRITTEN_IN_256:
        if quant == TYPES[kind].quant and K % TYPES[kind].size == 0:  # as an import has them
            return kind
    if quant.has_float_zeros and quant != OTHERWISE["Q4_1"].quant:
        raise Inexpressible(f"{quant} are written as an import of Q4_1, Q4_K or Q5_K has them only")
    kind = {"int4": "Q4_0" if quant.symmetric else "Q4_1", "int8": "Q8_0", "mxfp4": "MXFP4"}.get(quant.format)
    if kind is None:
        raise Inexpressible(f"{quant.format} is not written: quantize it to int4, int8 or mxfp4")
    if K % BLOCK:
        raise Inexpressible(f"blocks of {BLOCK} do not divide its {K} columns")
    if quant.granularity == "block" or quant.columns_per_scale(K) % BLOCK:
        raise Inexpressible(
            f"{quant} has scales for other weights than the {BLOCK} of a block: take group_size={BLOCK}"
        )
    return kind


def pack(kind: str, packed: PackedWeight, quant: TensorQuant, K: int, chosen: Tensor | None = None) -> Tensor:
    """Return a weight [N, K] as rows of blocks, uint8 [N, bytes], of the type that `type_for` gives.

    `chosen` are the numbers of the rows to return; None: all. Raises Inexpressible if a scale, or a zero point times
    it, is no number of that type.
    """
    N = packed.qdata.shape[0]
    parts: list[Tensor] = []
    for numbers in (torch.arange(N) if chosen is None else chosen).split(_rows_at_a_time(K)):

        def rows(stored: Tensor, at: Tensor = numbers) -> Tensor:
            return stored[at] if len(stored) == N else stored  # of one scale for all rows

        zero_point = None if packed.zero_point is None else rows(packed.zero_point)
        part = PackedWeight(rows(packed.qdata), rows(packed.scale), zero_point, packed.global_scale)
        parts.append(_pack(kind, part, quant, K))
    return torch.cat(parts)


def _pack(kind: str, packed: PackedWeight, quant: TensorQuant, K: int) -> Tensor:
    codes = FORMATS[quant.format].unpack(packed.qdata, K)
    if kind in _WRITTEN_IN_256:
        return _WRITTEN_IN_256[kind](codes, packed)
    N, scale = codes.shape[0], packed.scale
    codes = codes.reshape(N, K // BLOCK, BLOCK)

    def of_blocks(values: Tensor) -> Tensor:
        if values.shape[1] > 1:  # the last group of a row may be shorter
            values = values.repeat_interleave(quant.columns_per_scale(K) // BLOCK, 1)[:, : K // BLOCK]
        return values.expand(N, K // BLOCK)

    if kind == "MXFP4":
        heads = [of_blocks(scale.view(torch.uint8))[..., None]]
    else:
        exact = scale.double() if packed.global_scale is None else scale.double() * packed.global_scale.double()
        heads = [_halves(of_blocks(exact))]
        if packed.zero_point is not None:
            minima = packed.zero_point.double() if quant.has_float_zeros else -exact * packed.zero_point
            heads.append(_halves(of_blocks(minima), _MINIMA))
    body = codes.view(torch.uint8) if kind == "Q8_0" else codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([*heads, body], -1).flatten(1)


def _halves(exact: Tensor, reason: str = _SCALES) -> Tensor:
    """Return fp16 numbers [N, blocks] as bytes [N, blocks, 2]. Raises Inexpressible(reason) if one is rounded."""
    stored = exact.half()
    if not torch.equal(stored.double(), exact):
        raise Inexpressible(reason)
    return _viewed(stored, torch.uint8).view(*exact.shape, 2)


def _to_q4_k(codes: Tensor, packed: PackedWeight) -> Tensor:
    q = codes.view(-1, 8, 32)
    heads = _heads(q, packed.scale.double().view(-1, 8), packed)
    pairs = q.view(-1, 4, 2, 32)
    return torch.cat([heads, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)], -1).view(len(codes), -1)


def _to_q5_k(codes: Tensor, packed: PackedWeight) -> Tensor:
    # A block has codes from 0 to 31, or, turned, from -31 to 0 with negative scales.
    turn = torch.where((codes.view(-1, 256) < 0).any(1), -1, 1).to(torch.int8)[:, None]
    q = (codes.view(-1, 256) * turn).view(torch.uint8).view(-1, 8, 32)
    if bool((q > 31).any()):
        raise Inexpressible("its codes have more than 5 bits: with zero points they are written as Q5_K only")
    heads = _heads(q, packed.scale.double().view(-1, 8) * turn, packed)
    pairs, high = (q & 15).view(-1, 4, 2, 32), (q >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]
    body = [high.sum(1, dtype=torch.uint8), (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)]
    return torch.cat([heads, *body], -1).view(len(codes), -1)


def _heads(q: Tensor, scale: Tensor, packed: PackedWeight) -> Tensor:
    """Return the first 16 bytes of blocks of Q4_K or Q5_K with codes [blocks, 8, 32] and scales [blocks, 8]."""
    assert packed.zero_point is not None
    unit, scales = _factored(torch.where((q == 0).all(-1), 0.0, scale), 63)
    least, minima = _factored(-packed.zero_point.double().view(-1, 8), 63)
    scales, minima = scales.to(torch.uint8), minima.to(torch.uint8)
    first, second = (part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima))
    low = scales[:, 4:] & 15 | minima[:, 4:] << 4
    return torch.cat([_halves(unit), _halves(least), first, second, low], -1)


def _to_q6_k(codes: Tensor, packed: PackedWeight) -> Tensor:
    """Return int8 codes [N, K] with fp32 scales of 16 as rows of Q6_K. Raises Inexpressible if they are others."""
    N, K = codes.shape
    q, s = codes.view(-1, 16, 16), packed.scale.double().view(-1, 16)
    s = torch.where((q == 0).all(-1), 0.0, s)
    unit, factors = _factored(s, 128)
    # A group has codes from -32 to 31, or, turned, from -31 to 32 with a negative factor. Factors end at -128 and 127.
    is_low, is_high, is_largest = (q == -32).any(-1), (q == 32).any(-1), factors == 128
    unit = torch.where((is_largest & is_low).any(-1), -unit, unit)
    is_turned = is_high | (is_largest & (unit > 0)[:, None])
    q = torch.where(is_turned[..., None], -q, q)
    factors = torch.where(is_turned, -factors, factors) * unit.sign()[:, None]
    if bool(((q < -32) | (q > 31)).any() | (factors > 127).any()):
        raise Inexpressible("its codes have more than 6 bits: groups of 16 are written as Q6_K only")
    factors = factors.to(torch.int8)
    unsigned = (q + 32).view(torch.uint8).view(-1, 2, 128)
    low, high = unsigned & 15, (unsigned >> 4).view(-1, 2, 4, 32)
    pairs = (low[..., :64] | low[..., 64:] << 4).flatten(1)
    fours = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).flatten(1)
    return torch.cat([pairs, fours, factors.view(torch.uint8), _halves(unit)], -1).view(N, -1)


def _to_tq2_0(codes: Tensor, packed: PackedWeight) -> Tensor:
    fours = (3 - codes).view(-1, 2, 4, 32) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return torch.cat(
        [fours.sum(2, dtype=torch.uint8).flatten(1), _halves(-packed.scale.double().view(-1, 1))[:, 0]], -1
    ).view(len(codes), -1)


# Types with blocks of 256 weights.
_WRITTEN_IN_256 = {"Q4_K": _to_q4_k, "Q5_K": _to_q5_k, "Q6_K": _to_q6_k, "TQ2_0": _to_tq2_0}


def _factored(scale: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return fp64 scales [blocks, n] as (fp16 numbers in fp64 [blocks], integers from 0 to `most`).

    Raises Inexpressible if there are none: the largest scale is such a number times an integer, which is searched. All
    scales of a block have one sign.
    """
    sign = torch.where((scale < 0).any(1), -1.0, 1.0)
    scale = scale * sign[:, None]
    largest, found, factors = scale.amax(1), torch.zeros(len(scale), dtype=torch.float64), torch.zeros_like(scale)
    left = torch.nonzero((scale != 0).any(1)).flatten()
    for factor in range(most, 0, -1):
        if left.numel() == 0:
            break
        unit = (largest[left] / factor).half().double()
        times = scale[left] / torch.where(unit == 0, 1.0, unit)[:, None]
        exact = (unit > 0) & (times == times.round()).all(1) & (times.amax(1) == factor) & (times >= 0).all(1)
        found[left[exact]], factors[left[exact]] = unit[exact], times[exact]
        left = left[~exact]
    if left.numel():
        raise Inexpressible("the scales of 256 weights are no fp16 number times integers: they would be rounded")
    return found * sign, factors
