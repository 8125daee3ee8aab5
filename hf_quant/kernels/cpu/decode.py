"""Codes -> weights on CPU with stock torch ops, a block of rows at a time into buffers that are reused.

What the parts cost on one core with AVX-512 (Zen 5, torch 2.13, ns per weight): a table look-up by `index_select` 0.5
per index, so 0.14 where one 16-bit index yields four weights; integer ops 0.02 to 0.05; fp32 multiply 0.055; int8 to
fp32 0.06; fp32 to bf16 0.085; multiply in bf16 0.145 (torch converts in software); `.to()` from float8 3. Hence tables
for what is not an integer, and fp32 in between where that is cheaper than bf16. A call from Python costs some 3 us,
0.003 per weight of a block: buffers and views are made once per weight, not per block.

Every decoder is a `Block`: a tensor, and the function that fills it with the next rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.kernels.codes import PACK, CodeSpec, expand_rows
from hf_quant.kernels.cpu.scratch import scratch
from hf_quant.kernels.weight import Weight


class Block(NamedTuple):
    """Rows start..start+n of something, decoded into scratch by `fill(start)`; valid until the next fill."""

    rows: Tensor  # [n, ...]
    fill: Callable[[int], object]


# Of the types of 8 bytes float64 is the quickest to look up.
_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.float64}

_tables: dict[tuple, Tensor] = {}


# Tables


def code_values(spec: CodeSpec) -> Tensor:
    """fp32 value of each code, in the order of the codes' bit patterns (8-bit floats: of their bytes)."""
    if spec.is_packed:
        return torch.tensor(spec.levels, dtype=torch.float32)
    return torch.arange(256, dtype=torch.uint8).view(spec.dtype).float()


def _table(key: tuple, values: Callable[[], Tensor], bits: int, index_bits: int) -> Tensor:
    """[2**index_bits] words; word i holds values()[code] of all the `bits`-wide codes in i, low bits first.

    Made once per `key`; at most 512 KB each, which stay in the L2 cache of a core.
    """
    found = _tables.get(key)
    if found is None:
        with torch.inference_mode(False):
            entries, count = values(), index_bits // bits
            index = torch.arange(2**index_bits, dtype=torch.int32)
            codes = (index[:, None] >> (torch.arange(count, dtype=torch.int32) * bits)) & (2**bits - 1)
            found = _tables[key] = entries[codes].view(_WIDE[count * entries.element_size()]).view(-1)
    return found


def _lookup(table: Tensor, out: Tensor) -> Callable[[Tensor], object]:
    """A function of words (uint8 or uint16) [n, ...] that fills `out` [n, ...], contiguous, with table[words]."""
    index, look_up = _index(table, out)

    def fill(words: Tensor) -> None:
        index.copy_(words)
        look_up()

    return fill


def _index(table: Tensor, out: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """(integers [n, ...] in scratch, function that fills `out` [n, ...], contiguous, with table[integers])."""
    n, target = out.shape[0], out.view(table.dtype)
    if torch.get_num_threads() > 1:  # `index_select` runs in one thread; `gather` takes int64 and 0.1 ns longer
        target = target.view(n, -1)
        index, tables = scratch("index", tuple(target.shape), torch.int64), table.expand(n, -1)
        return index, lambda: torch.gather(tables, 1, index, out=target)
    target = target.view(-1)
    index = scratch("index", (target.numel(),), torch.int32)
    return index.view(n, -1), lambda: torch.index_select(table, 0, index, out=target)


def _rows_of(words: Tensor, n: int) -> Callable[[int], Tensor]:
    return lambda start: words[start : start + n]


# Packed codes as bytes


def code_bytes(qdata: Tensor, spec: CodeSpec) -> Tensor:
    """Packed words [n, words], contiguous -> int8 codes [n, padded K] in scratch."""
    block = _byte_block(qdata, spec, qdata.shape[0], signed=False)
    block.fill(0)
    return block.rows


def mapped_codes(qdata: Tensor, spec: CodeSpec, number: int, values: Tensor) -> Tensor:
    """Packed 4-bit words [n, words], contiguous -> values[code] [n, padded K] int8; `number` names the values."""
    out = torch.empty(qdata.shape[0], qdata.shape[1] * 8, dtype=torch.int8)
    _lookup(_table((spec.name, "map", number), lambda: values, 4, 16), out)(qdata.view(torch.uint16))
    return out


def _byte_block(qdata: Tensor, spec: CodeSpec, n: int, signed: bool) -> Block:
    """int8 codes [n, padded K] of packed words, minus 2**(bits - 1) if `signed`."""
    out = scratch("bytes", (n, qdata.shape[1] // spec.bits * PACK), torch.int8)
    if len(spec.planes) == 1:
        dtype, lookup = _plane_lookup(spec.bits, 0, signed, out)
        words = _rows_of(qdata.view(dtype), n)
        return Block(out, lambda start: lookup(words(start)))
    low, high = spec.planes
    upper = scratch("high", tuple(out.shape), torch.int8)
    steps = []
    for first, width, target in ((0, low, out), (low, high, upper)):
        plane = _plane_block(qdata, spec, first, width, n)
        dtype, lookup = _plane_lookup(width, first, False, target)
        steps.append((plane.fill, lookup, plane.rows.view(dtype).view(n, -1)))

    def fill(start: int) -> None:
        for read, lookup, words in steps:
            read(start)
            lookup(words)
        out.bitwise_or_(upper)
        if signed:
            out.sub_(2 ** (spec.bits - 1))

    return Block(out, fill)


def _plane_lookup(width: int, shift: int, signed: bool, out: Tensor) -> tuple[torch.dtype, Callable[[Tensor], object]]:
    """(dtype of the words, function that makes bytes of them): code << shift, minus 2**(width - 1) if `signed`."""
    index_bits = 16 if width == 4 else 8

    def values() -> Tensor:
        return ((torch.arange(2**width) << shift) - (2 ** (width - 1) if signed else 0)).to(torch.int8)

    table = _table(("bytes", width, shift, signed), values, width, index_bits)
    return (torch.uint16 if index_bits == 16 else torch.uint8), _lookup(table, out)


def _plane_block(qdata: Tensor, spec: CodeSpec, first: int, width: int, n: int) -> Block:
    """One plane's words of n rows, contiguous. Column by column: twice as fast as one strided copy."""
    dtype, words = (torch.int64, 2) if spec.bits % 2 == 0 else (torch.int32, 1)
    units = qdata.view(dtype).view(qdata.shape[0], -1, spec.bits // words)
    columns = units[:, :, first // words : (first + width) // words].unbind(-1)
    plane = scratch(f"plane {first}", (n, units.shape[1], len(columns)), dtype)
    targets = plane.unbind(-1)

    def fill(start: int) -> None:
        for target, column in zip(targets, columns):
            target.copy_(column[start : start + n])

    return Block(plane, fill)


# Scales


def scale_values(scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """Scales of any floating dtype, times global_scale: fp32, but bf16 ones without global_scale as they are."""
    if scale.dtype.itemsize == 1:  # e8m0, e4m3: `.to` takes 3 ns per element
        dtype = scale.dtype
        table = _table((dtype, "scale"), lambda: torch.arange(256, dtype=torch.uint8).view(dtype).float(), 8, 8)
        values = torch.empty(scale.shape, dtype=torch.float32)
        _lookup(table, values)(scale.view(torch.uint8))
        scale = values
    elif scale.dtype not in (torch.bfloat16, torch.float32):
        scale = scale.float()
    return scale if global_scale is None else scale.float() * global_scale


def column_scaler(out: Tensor, factor: Tensor, group_size: int, op=Tensor.mul_) -> Callable[[int], object]:
    """A function of start: out [n, K] <- out (op) factor[start : start + n], group by group, the last may be ragged.

    factor [N, G] in out's dtype.
    """
    (n, K), groups = out.shape, factor.shape[1]
    if groups == 1:
        return lambda start: op(out, factor[start : start + n])
    whole = K // group_size
    by_group = out[:, : whole * group_size].unflatten(1, (whole, group_size)) if whole else None
    main, rest = factor[:, :whole, None], factor[:, whole:]
    tail = out[:, whole * group_size :]

    def run(start: int) -> None:
        rows = slice(start, start + n)
        if by_group is not None:
            op(by_group, main[rows])
        if whole < groups:
            op(tail, rest[rows])

    return run


# Weights


def is_table_decoded(spec: CodeSpec) -> bool:
    """True if a single table leads to bf16."""
    return spec.dtype != torch.int8 and (len(spec.planes) == 1 or not spec.is_integer)


def level_block(qdata: Tensor, spec: CodeSpec, K: int, dtype: torch.dtype, n: int, *, signed: bool = True) -> Block:
    """Values of the codes [n, K] in bf16 or fp32: exact but for the levels of nf4, which bf16 rounds.

    `signed=False` gives an integer format's codes without the offset of 2**(bits - 1), for a zero point.
    """
    width = qdata.shape[1] // spec.bits * PACK if spec.is_packed else K
    out = scratch("levels", (n, width), dtype)
    result = out if width == K else out[:, :K]
    by_table = signed and dtype == torch.bfloat16 and len(spec.planes) == 1
    if spec.dtype == torch.int8:
        codes = _rows_of(qdata, n)
        return Block(result, lambda start: out.copy_(codes(start)))
    if spec.is_integer and not by_table:
        packed = _byte_block(qdata, spec, n, signed)

        def convert(start: int) -> None:
            packed.fill(start)
            out.copy_(packed.rows)

        return Block(result, convert)
    two_planes = len(spec.planes) == 2
    if len(spec.planes) == 1:  # a word of the table holds 8 bytes at most: four bf16 values or two of fp32
        bits, index_bits = spec.bits, min(16, spec.bits * (8 // dtype.itemsize))
    else:
        bits, index_bits = 8, 16 if width % 2 == 0 else 8  # an odd row starts in the middle of a word

    def values() -> Tensor:
        levels = code_values(spec)
        return levels.repeat(2**bits // levels.numel()).to(dtype)

    lookup = _lookup(_table((spec.name, dtype, index_bits), values, bits, index_bits), out)
    word = torch.uint16 if index_bits == 16 else torch.uint8
    if two_planes:
        packed = _byte_block(qdata, spec, n, signed=False)
        words_in_scratch = packed.rows.view(word)

        def translate(start: int) -> None:
            packed.fill(start)
            lookup(words_in_scratch)

        return Block(result, translate)
    words = _rows_of(qdata.view(word), n)
    return Block(result, lambda start: lookup(words(start)))


def weight_block(w: Weight, factor: Tensor, dtype: torch.dtype, n: int) -> Block:
    """(value - zero point) * factor [n, K] in bf16, fp32 (fp16); factor (bf16 or fp32) [N, G] is w's scales, expanded.

    A floating-point zero point is added to code * factor instead.

    In fp32 and rounded once, as the reference does it; but in bf16 if factor is bf16 (the product of two rounded
    numbers instead of one rounding), for symmetric codes only.
    """
    compute = dtype if factor.dtype == dtype and w.zero_point is None else torch.float32
    levels = level_block(w.qdata, w.spec, w.K, compute, n, signed=w.zero_point is None)
    steps = [levels.fill]
    zero_point = None if w.zero_point is None else expand_rows(w.zero_point, w.N).float()
    if zero_point is not None and not w.has_float_zeros:
        steps.append(column_scaler(levels.rows, zero_point, w.group_size, Tensor.sub_))
    steps.append(column_scaler(levels.rows, factor.to(compute), w.group_size))
    if zero_point is not None and w.has_float_zeros:
        steps.append(column_scaler(levels.rows, zero_point, w.group_size, Tensor.add_))
    out = levels.rows
    if compute != dtype:
        out = scratch("block", (n, w.K), dtype)
        steps.append(lambda start: out.copy_(levels.rows))

    def fill(start: int) -> None:
        for step in steps:
            step(start)

    return Block(out, fill)


# Faster ways for two kinds of 4-bit codes, into bf16


def half_block(w: Weight, factor: Tensor, n: int) -> Block:
    """int4 weights [n, K] in bf16 without a table, first the even columns and then the odd ones.

    factor [N, G] fp32; K a multiple of 32 and of group_size, which is even.
    """
    K, half, groups = w.K, w.K // 2, factor.shape[1]
    source = w.qdata.view(torch.int8)
    flipped = scratch("high", (n, half), torch.int8)
    nibbles = scratch("bytes", (n, 2, half), torch.int8)
    upper = nibbles.unbind(1)
    values = scratch("levels", (n, 2, half), torch.float32)
    by_group = values.view(n, 2, groups, -1)
    out = scratch("block", (n, 2, half), torch.bfloat16)
    scale = (factor / 16).view(-1, 1, groups, 1)  # the codes stand in the upper half of their bytes
    offset = None
    if w.zero_point is not None:
        offset = (factor * (8 - expand_rows(w.zero_point, w.N).float())).view(scale.shape)

    def fill(start: int) -> None:
        rows = slice(start, start + n)
        torch.bitwise_xor(source[rows], -120, out=flipped)  # the top bit flipped, offset codes are signed numbers
        torch.bitwise_left_shift(flipped, 4, out=upper[0])
        torch.bitwise_and(flipped, -16, out=upper[1])
        values.copy_(nibbles)
        by_group.mul_(scale[rows])
        if offset is not None:
            by_group.add_(offset[rows])
        out.copy_(values)

    return Block(out.view(n, K), fill)


def split_columns(x: Tensor) -> Tensor:
    """x [M, K] with its columns in the order of `half_block`."""
    return x.view(x.shape[0], -1, 2).transpose(1, 2).reshape(x.shape)


def exponent_block(w: Weight, exponents: Tensor, n: int) -> Block:
    """mxfp4 weights times 2**64 [n, K] in bf16; exponents [N, G] int16 of the scales, see `scale_exponents`.

    A power of two is multiplied by adding to the exponent, an integer addition: a third of the time of a product. Zero
    has no exponent to add to; 2**-127 of the group's scale stands for it.
    """

    def values() -> Tensor:
        levels = code_values(w.spec)
        return torch.where(levels == 0, 2.0**-63, levels * 2.0**64).bfloat16()

    out = scratch("levels", (n, w.qdata.shape[1] * 8), torch.bfloat16)
    lookup = _lookup(_table((w.format, "exponents"), values, 4, 16), out)
    words = _rows_of(w.qdata.view(torch.uint16), n)
    add = column_scaler(out.view(torch.int16)[:, : w.K], exponents, w.group_size, Tensor.add_)

    def fill(start: int) -> None:
        lookup(words(start))
        add(start)

    return Block(out[:, : w.K], fill)


def doubled_block(w: Weight, factor: Tensor, n: int) -> Block:
    """e2m1 weights [n, K] in bf16, rounded once: twice the values are small integers, which a table gives as bytes.

    factor [N, G] fp32. In groups of 16 torch multiplies bf16 by scalar code, at ten times the cost of fp32.
    """
    doubled = scratch("bytes", (n, w.qdata.shape[1] * 8), torch.int8)
    table = _table((w.format, "doubled"), lambda: (code_values(w.spec) * 2).to(torch.int8), 4, 16)
    lookup, words = _lookup(table, doubled), _rows_of(w.qdata.view(torch.uint16), n)
    values = scratch("levels", (n, w.K), torch.float32)
    multiply = column_scaler(values, factor / 2, w.group_size)
    out = scratch("block", (n, w.K), torch.bfloat16)

    def fill(start: int) -> None:
        lookup(words(start))
        values.copy_(doubled[:, : w.K])
        multiply(start)
        out.copy_(values)

    return Block(out, fill)


def scale_exponents(scale: Tensor) -> Tensor:
    """e8m0 scales [N, G] -> int16 to add to the bits of a bf16 number."""
    return (scale.view(torch.uint8).to(torch.int16) - 127).bitwise_left_shift_(7)
