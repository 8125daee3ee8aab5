"""Codes -> weights on CPU with stock torch ops, a block of rows at a time into buffers that are reused.

What the parts cost on one core with AVX-512 (Zen 5, torch 2.13, ns per weight): a table look-up by `index_select` 0.5
per index, so 0.14 where one 16-bit index yields four weights; integer ops 0.02 to 0.05; fp32 multiply 0.055; int8 to
fp32 0.06; fp32 to bf16 0.085; multiply in bf16 0.145 (torch converts in software); `.to()` from float8 3. Hence tables
for everything that is not an integer, and fp32 in between where that is cheaper than bf16.
"""

import torch
from torch import Tensor

from hf_quant.kernels._cpu import scratch
from hf_quant.kernels.codes import PACK, CodeSpec


_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**18  # weights that pass through a chain of elementwise ops at once: 1 MB in fp32, the L2 cache of a core

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_tables: dict[tuple, Tensor] = {}


def padded(K: int, spec: CodeSpec) -> int:
    """Codes in a row of qdata, padding included."""
    return -(-K // PACK) * PACK if spec.is_packed else K


def code_values(spec: CodeSpec) -> Tensor:
    """fp32 value of each code, in the order of the codes' bit patterns (8-bit floats: of their bytes)."""
    if spec.is_packed:
        return torch.tensor(spec.levels, dtype=torch.float32)
    return torch.arange(256, dtype=torch.uint8).view(spec.dtype).float()


def table(key: tuple, values: Tensor, bits: int, index_bits: int) -> Tensor:
    """[2**index_bits] words; word i holds values[code] of all the `bits`-wide codes in i, low bits first.

    Made once per `key`; at most 512 KB each, which stay in the L2 cache of a core.
    """
    found = _tables.get(key)
    if found is None:
        with torch.inference_mode(False):
            count = index_bits // bits
            index = torch.arange(2**index_bits, dtype=torch.int32)
            codes = (index[:, None] >> (torch.arange(count, dtype=torch.int32) * bits)) & (2**bits - 1)
            wide = _WIDE[count * values.element_size()]
            found = _tables[key] = values[codes].view(wide).view(-1)
    return found


def lookup(words: Tensor, words_table: Tensor, out: Tensor) -> None:
    """out (contiguous) <- words_table[words]; words uint8 or uint16, contiguous."""
    index = scratch("index", (words.numel(),), torch.int32)
    index.copy_(words.view(-1))
    torch.index_select(words_table, 0, index, out=out.view(words_table.dtype).view(-1))


def _plane_bytes(plane: Tensor, width: int, shift: int, signed: bool, out: Tensor) -> None:
    """Codes of one plane, contiguous int32 words, as bytes (code << shift), minus 2**(width - 1) if `signed`."""
    index_bits = 16 if width == 4 else 8
    key = ("bytes", width, shift, signed)
    if key not in _tables:
        values = (torch.arange(2**width, dtype=torch.int16) << shift) - (2 ** (width - 1) if signed else 0)
        table(key, values.to(torch.int8), width, index_bits)
    lookup(plane.view(torch.uint16 if index_bits == 16 else torch.uint8), _tables[key], out)


def code_bytes(qdata: Tensor, spec: CodeSpec, *, signed: bool = False) -> Tensor:
    """Packed words [n, words], contiguous -> int8 codes [n, padded K] in scratch, minus 2**(bits - 1) if `signed`."""
    n, words = qdata.shape
    out = scratch("bytes", (n, words // spec.bits * PACK), torch.int8)
    if len(spec.planes) == 1:
        _plane_bytes(qdata, spec.bits, 0, signed, out)
        return out
    low, high = spec.planes
    high_bits = scratch("high", (n, out.shape[1]), torch.int8)
    _plane_bytes(_plane(qdata, spec, 0, low), low, 0, False, out)
    _plane_bytes(_plane(qdata, spec, low, high), high, low, False, high_bits)
    out.bitwise_or_(high_bits)
    return out.sub_(2 ** (spec.bits - 1)) if signed else out


def _plane(qdata: Tensor, spec: CodeSpec, start: int, width: int) -> Tensor:
    """One plane's words of all packing units, contiguous. Column by column: twice as fast as one strided copy."""
    dtype, words = (torch.int64, 2) if spec.bits % 2 == 0 else (torch.int32, 1)
    columns = qdata.view(dtype).view(-1, spec.bits // words)[:, start // words : (start + width) // words]
    plane = scratch("plane", tuple(columns.shape), dtype)
    for column in range(columns.shape[1]):
        plane[:, column].copy_(columns[:, column])
    return plane


def decode(qdata: Tensor, spec: CodeSpec, out: Tensor, *, signed: bool = True) -> None:
    """out [n, padded K] (bf16 or fp32, contiguous) <- the value of each code; of integer formats exactly.

    `signed=False` gives an integer format's codes without the offset of 2**(bits - 1), for a zero point. bf16 rounds
    the levels of nf4; every other format is exact in it.
    """
    dtype = out.dtype
    if spec.dtype == torch.int8:
        out.copy_(qdata)
        return
    if spec.is_integer and not (signed and dtype == torch.bfloat16 and len(spec.planes) == 1):
        out.copy_(code_bytes(qdata, spec, signed=signed))
        return
    # A word holds 8 bytes at most: four bf16 values or two of fp32.
    if spec.planes in ((4,), (2,)):
        index_bits = min(16, spec.bits * (8 // dtype.itemsize))
        words = qdata.view(torch.uint16 if index_bits == 16 else torch.uint8)
        bits = spec.bits
    else:
        source = code_bytes(qdata, spec) if spec.is_packed else qdata
        index_bits = 16 if source.shape[1] % 2 == 0 else 8  # an odd row starts in the middle of a word
        words, bits = source.view(torch.uint16 if index_bits == 16 else torch.uint8), 8
    key = (spec.name, dtype, index_bits)
    if key not in _tables:
        values = code_values(spec)
        if bits == 8 and spec.is_packed:
            values = values.repeat(2 ** (8 - spec.bits))
        table(key, values.to(dtype), bits, index_bits)
    lookup(words, _tables[key], out)


def scale_values(scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """Scales of any floating dtype, times global_scale: fp32, but bf16 ones without global_scale as they are."""
    if scale.dtype.itemsize == 1:  # e8m0, e4m3: `.to` takes 3 ns per element
        key = (scale.dtype, "scale")
        if key not in _tables:
            table(key, torch.arange(256, dtype=torch.uint8).view(scale.dtype).float(), 8, 8)
        values = torch.empty(scale.shape)
        lookup(scale.contiguous().view(torch.uint8), _tables[key], values)
        scale = values
    elif scale.dtype not in (torch.bfloat16, torch.float32):
        scale = scale.float()
    return scale if global_scale is None else scale.float() * global_scale


def expand_rows(scale: Tensor, N: int) -> Tensor:
    """Scales [N | 1 | ceil(N/128), G] -> [N, G]."""
    if scale.shape[0] == N:
        return scale
    return scale.expand(N, -1) if scale.shape[0] == 1 else scale.repeat_interleave(128, 0)[:N]


def scale_columns(out: Tensor, factor: Tensor, group_size: int, op=Tensor.mul_) -> None:
    """out [n, K] <- out (op) factor [n, G], group by group; the last group may be ragged."""
    K, groups = out.shape[1], factor.shape[1]
    if groups == 1:
        op(out, factor)
        return
    whole = K // group_size
    if whole:
        op(out[:, : whole * group_size].unflatten(1, (whole, group_size)), factor[:, :whole, None])
    if whole < groups:
        op(out[:, whole * group_size :], factor[:, whole:])


def dequantize_block(
    out: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, spec: CodeSpec, group_size: int
) -> None:
    """out [n, K] <- (value - zero_point) * scale for rows of qdata; scale (bf16 or fp32), zero_point (uint8) [n, G].

    In fp32 and rounded once to out's dtype, as the reference does it; but into bf16 from symmetric codes that a table
    decodes, in bf16 (the product of two rounded numbers instead of one rounding).
    """
    n, K = out.shape
    width = padded(K, spec)
    if out.dtype == scale.dtype == torch.bfloat16 and zero_point is None and is_table_decoded(spec):
        values = out if width == K and out.is_contiguous() else scratch("values", (n, width), torch.bfloat16)
        decode(qdata, spec, values)
        scale_columns(values[:, :K], scale, group_size)
        if values is not out:
            out.copy_(values[:, :K])
        return
    step = max(_CHUNK // width, 1)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        target = out[rows]
        in_place = target.dtype == torch.float32 and width == K and target.is_contiguous()
        values = target if in_place else scratch("values", (target.shape[0], width), torch.float32)
        decode(qdata[rows], spec, values, signed=zero_point is None)
        weights = values[:, :K]
        if zero_point is not None:
            scale_columns(weights, zero_point[rows].float(), group_size, Tensor.sub_)
        scale_columns(weights, scale[rows].float(), group_size)
        if not in_place:
            target.copy_(weights)


def is_table_decoded(spec: CodeSpec) -> bool:
    """Whether `decode` reaches bf16 by a single table."""
    return spec.dtype != torch.int8 and (len(spec.planes) == 1 or not spec.is_integer)


# Four-bit codes without a table: the columns come out in two halves, even ones first


def splits_in_halves(spec: CodeSpec, K: int, group_size: int) -> bool:
    """Whether `dequantize_halves` takes the format and shape."""
    if spec.planes != (4,) or K % PACK or K % group_size or group_size % PACK and group_size != 16:
        return False
    return spec.levels == _E2M1 or spec.is_integer and group_size >= PACK


def split_columns(x: Tensor) -> Tensor:
    """x [M, K] with its columns in the order of `dequantize_halves`."""
    return x.view(x.shape[0], -1, 2).transpose(1, 2).reshape(x.shape)


def dequantize_halves(
    out: Tensor, qdata: Tensor, scale: Tensor, zero_point: Tensor | None, spec: CodeSpec, group_size: int
) -> None:
    """out [n, K] bf16 <- dequantized 4-bit codes, first the even columns and then the odd ones.

    scale [n, G]: for integers fp32; for e2m1 bf16 and 2**63 times the scale, while out is 2**-63 times the weight.
    """
    n, K = out.shape
    step = max(_CHUNK // K, 1)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        target = out[rows].view(-1, 2, K // 2)
        count = target.shape[0]
        source = qdata[rows].view(torch.int8)
        nibbles = scratch("bytes", (count, 2, K // 2), torch.int8)
        if spec.is_integer:  # flipping its top bit makes a signed number of an offset code
            source = torch.bitwise_xor(source, -120, out=scratch("plane", (count, K // 2), torch.int8))
        torch.bitwise_left_shift(source, 4, out=nibbles[:, 0])
        torch.bitwise_and(source, -16, out=nibbles[:, 1])
        if spec.is_integer:
            values = scratch("values", (count, 2, K // 2), torch.float32).copy_(nibbles)
            groups = values.view(count, 2, -1, group_size // 2)
            factor = scale[rows].view(count, 1, -1, 1)
            groups.mul_(factor / 16)  # the codes stand in the upper half of their bytes
            if zero_point is not None:
                groups.add_(factor * (8 - zero_point[rows].float().view(factor.shape)))
            target.copy_(values)
        else:  # s eem 0000 -> s 000000 eem 000000: bf16 with an exponent too small by 126
            target.view(torch.int16).copy_(nibbles).bitwise_left_shift_(2).bitwise_and_(-0x7E40)
            target.mul_(_repeat(scale[rows], group_size // 2).unsqueeze(1))


def _repeat(scale: Tensor, times: int) -> Tensor:
    """bf16 [n, G] -> [n, G * times], times a multiple of 4; four at once as an int64, far faster than expand."""
    words = scale.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF).mul_(0x0001000100010001)
    repeated = scratch("high", (*scale.shape, times // 4), torch.int64)
    for i in range(times // 4):
        repeated[:, :, i] = words
    return repeated.view(torch.bfloat16).view(scale.shape[0], -1)
