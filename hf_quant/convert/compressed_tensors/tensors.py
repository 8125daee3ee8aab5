"""Convert the bytes of a weight to compressed-tensors and back: they are renamed, viewed and repacked, never rounded.

Layout: https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/compressors. Both sides
pack low bits first along K, so int4 codes are equal word by word; int8 codes are offset by 128 and packed four to a
word; zero points are packed along N. Those of int8 become the fp32 values of code 0: -zero_point * scale, exact unless
scales are fp32 numbers.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.compressed_tensors.schemes import MXFP4, NVFP4, PACKED, Inexpressible
from hf_quant.convert.layers import float_zero_points
from hf_quant.formats import FORMATS
from hf_quant.kernels.codes import packed_words
from hf_quant.scheme import TensorQuant


_SIGN = 0x80  # of a byte: int8 code ^ _SIGN is the code + 128, unsigned
_LARGEST_SCALE = 0x7E  # as bits of float8_e4m3fn
_NEIGHBOURS = 8  # divisors around 1 / global_scale that are tried


def to_compressed(
    packed: PackedWeight, format: str, quant: TensorQuant, K: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return {name in the module: tensor} of a weight [N, K] of a model in `dtype`, stored as `format`.

    Raises Inexpressible if the readers' arithmetic would give another weight.
    """
    qdata, scale, zero_point, global_scale = packed
    N = qdata.shape[0]
    if format == PACKED:
        bits = FORMATS[quant.format].bits
        if bits == 4:
            words = qdata[:, : math.ceil(K * bits / 32)]
        else:
            words = _words(pad(qdata.view(torch.uint8) ^ _SIGN, (0, -K % 4)))
        found = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
        if zero_point is not None:
            found["weight_zero_point"] = pack_nibbles(zero_point.T).T
    elif format in (NVFP4, MXFP4):
        found = {"weight_packed": qdata.view(torch.uint8)[:, : K // 2]}
        found["weight_scale"] = scale if format == NVFP4 else scale.view(torch.uint8)
        if global_scale is not None:
            found["weight_global_scale"] = divisor_of(global_scale, dtype)
    else:
        found = {"weight": qdata, "weight_scale": scale.reshape(1) if quant.granularity == "tensor" else scale}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_compressed(
    tensors: dict[str, Tensor], format: str, quant: TensorQuant, shape: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """Invert `to_compressed`: return the weight [N, K] in our bytes, scales in their true dtype."""
    N, K = shape
    scale, zero_point, global_scale = tensors["weight_scale"], None, None
    if format == PACKED:
        words = tensors["weight_packed"]
        if quant.format == "int4":
            qdata = pad(words, (0, packed_words(K, 4) - words.shape[1]))
        else:
            qdata = (words.contiguous().view(torch.uint8)[:, :K] ^ _SIGN).view(torch.int8)
    elif format in (NVFP4, MXFP4):
        qdata = _words(pad(tensors["weight_packed"], (0, packed_words(K, 4) * 4 - K // 2)))
        if format == NVFP4:
            global_scale = divisor_of(tensors["weight_global_scale"].float().reshape(1), dtype, back=True)
        else:
            scale = scale.view(torch.float8_e8m0fnu)
    else:
        qdata = tensors["weight"]
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    if not quant.symmetric:
        zeros = _signed_zeros(tensors["weight_zero_point"], quant, scale.shape)
        zero_point = float_zero_points(zeros, scale) if quant.has_float_zeros else (zeros + 8).view(torch.uint8)
    zero_point = None if zero_point is None else zero_point.contiguous()
    return PackedWeight(qdata.contiguous(), scale.contiguous(), zero_point, global_scale)


def _signed_zeros(stored: Tensor, quant: TensorQuant, shape: torch.Size) -> Tensor:
    """Return zero points int8 [N, groups]: stored as they are, or, in int32 words along N, offset as codes are."""
    if stored.dtype == torch.int8:  # packed since 0.9.4, beside packed codes
        return stored.reshape(shape)
    if quant.format == "int4":
        return unpack_nibbles(stored.T, shape[0]).T.view(torch.int8) - 8
    return (stored.T.contiguous().view(torch.uint8)[:, : shape[0]] ^ _SIGN).T.contiguous().view(torch.int8)


def with_global_scale(packed: PackedWeight, global_scale: float) -> PackedWeight:
    """Return the same nvfp4 weight with another global scale, a power of two times its own; raises Inexpressible."""
    assert packed.global_scale is not None  # every nvfp4 weight has one
    ratio = packed.global_scale.double() / global_scale
    exact = packed.scale.double() * ratio
    scale = exact.to(packed.scale.dtype)
    if not torch.equal(scale.double(), exact):
        raise Inexpressible(
            "its weights are so much smaller than its siblings' that one global scale rounds its scales"
        )
    return packed._replace(scale=scale, global_scale=torch.full_like(packed.global_scale, global_scale))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes [R, C] below 16 into int32 words [R, ceil(C / 8)], low bits first, padded with 0."""
    codes = pad(codes, (0, -codes.shape[1] % 8))
    return _words(codes[:, 0::2] | (codes[:, 1::2] << 4))


def unpack_nibbles(words: Tensor, count: int) -> Tensor:
    """Invert `pack_nibbles`: return uint8 codes [R, count]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)[:, :count].contiguous()


def _words(codes: Tensor) -> Tensor:
    """Copy bytes [R, C] to int32 words [R, C / 4]; a view fails on the strides that a tensor of one row may have."""
    return codes.clone(memory_format=torch.contiguous_format).view(torch.int32)


def divisor_of(factor: Tensor, dtype: torch.dtype, *, back: bool = False) -> Tensor:
    """Return the fp32 divisor [1] of nvfp4's scales that gives the same weights as the factor `factor` [1].

    compressed-tensors divides a group's scale by `weight_global_scale`, hf_quant multiplies it by `global_scale`; the
    reciprocal of one is rarely an fp32 number. Every product of a level and a possible scale is computed both ways,
    and one of the numbers closest to the reciprocal is taken with which all agree in the model's dtype.
    `back`: from a divisor to a factor. Raises Inexpressible if there is none.
    """
    levels = torch.tensor([level for level in FORMATS["nvfp4"].spec.levels if level > 0], dtype=torch.float32)
    scales = torch.arange(1, _LARGEST_SCALE + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]

    def products(number: Tensor, divides: bool) -> Tensor:
        return (levels * (scales / number if divides else scales * number)).to(dtype)

    wanted = products(factor, back)
    nearest = (1 / factor.double()).float()
    if bool((nearest.isfinite() & (nearest > 0)).all()):
        bits = nearest.view(torch.int32)
        for step in sorted(range(-_NEIGHBOURS, _NEIGHBOURS + 1), key=abs):
            candidate = (bits + step).view(torch.float32)
            if torch.equal(products(candidate, not back), wanted):
                return candidate
    raise Inexpressible(
        f"no fp32 reciprocal of its global scale {factor.item()} gives the same weights in {str(dtype)[6:]}"
    )
