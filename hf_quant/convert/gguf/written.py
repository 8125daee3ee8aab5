"""Write weights as blocks of GGUF's types, see `blocks`: no value is rounded."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.convert.gguf.blocks import OTHERWISE, TYPES, _rows_at_a_time, _viewed
from hf_quant.convert.gguf.codes import common_quant
from hf_quant.formats import FORMATS
from hf_quant.scheme import LinearScheme, TensorQuant


BLOCK = 32  # codes that share a scale in the types that are written
_SCALES = "its scales are no fp16 numbers: quantize it with scale_dtype='float16'"
_MINIMA = (
    "the products of its scales and zero points are no fp16 numbers: quantize it with symmetric=True, or with "
    "scale_dtype='float8_e4m3fn'"
)


def type_for(scheme: LinearScheme, K: int, blocks: Callable[[str], Tensor] | None = None) -> str:
    """Return the type that holds weights [N, K] of a scheme, if their scales fit it. Raises Inexpressible.

    `blocks` makes blocks of a type of the weights, or raises Inexpressible: it tells types apart that one quantization
    holds, see `common_quant`.
    """
    quant = scheme.weight
    if scheme == LinearScheme(_COMMON) and blocks is not None and K % 256 == 0:
        for kind in _IN_COMMON:
            with contextlib.suppress(Inexpressible):
                blocks(kind)
                return kind
        raise Inexpressible(f"{quant} are written as an import of {', '.join(_IN_COMMON)} has them only")
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
        return _WRITTEN_IN_256[kind](*_own(codes, packed, quant, TYPES[kind].quant))
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


def _own(codes: Tensor, packed: PackedWeight, quant: TensorQuant, own: TensorQuant) -> tuple[Tensor, PackedWeight]:
    """Return codes [N, K] and their weight in a type's own quantization, from that or from _COMMON.

    Raises Inexpressible if it is a weight of another type.
    """
    if quant == own:
        return codes, packed
    assert packed.zero_point is not None and own.group_size is not None and quant.group_size is not None
    others = "its weights are those of another type"
    zeros, times = packed.zero_point, own.group_size // quant.group_size
    groups = [values.unflatten(1, (-1, times)) for values in (packed.scale, zeros)]
    if any(bool((values != values[..., :1]).any()) for values in groups) or (own.symmetric and bool(zeros.any())):
        raise Inexpressible(others)
    scale, zero_point = (values[..., 0] for values in groups)
    if own.format == "int4":
        q, turn = _unturned(codes)
        if bool((q > 15).any()):
            raise Inexpressible(others)
        codes, scale = q.view(codes.shape), (scale.reshape(len(q), -1) * turn).view(scale.shape)
    return codes, PackedWeight(packed.qdata, scale, None if own.symmetric else zero_point, None)


def _to_q4_k(codes: Tensor, packed: PackedWeight) -> Tensor:
    q = codes.view(-1, 8, 32)
    heads = _heads(q, packed.scale.double().view(-1, 8), packed)
    pairs = q.view(-1, 4, 2, 32)
    return torch.cat([heads, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)], -1).view(len(codes), -1)


def _unturned(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes as (numbers from 0 [blocks, 256] uint8, signs of the scales [blocks, 1]).

    A block has codes from 0, or, turned, up to 0 with negative scales.
    """
    blocks = codes.view(-1, 256)
    turn = torch.where((blocks < 0).any(1), -1, 1).to(torch.int8)[:, None]
    return (blocks * turn).view(torch.uint8), turn


def _to_q5_k(codes: Tensor, packed: PackedWeight) -> Tensor:
    q, turn = _unturned(codes)
    q = q.view(-1, 8, 32)
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
_WRITTEN_IN_256: dict[str, Callable[[Tensor, PackedWeight], Tensor]] = {
    "Q4_K": _to_q4_k,
    "Q5_K": _to_q5_k,
    "Q6_K": _to_q6_k,
    "TQ2_0": _to_tq2_0,
}
# What one module has if its weights are of several of these types, as experts are in files of Q4_K_M.
_IN_COMMON = ("Q4_K", "Q5_K", "Q6_K")
_COMMON = common_quant({TYPES[kind].quant for kind in _IN_COMMON})


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
