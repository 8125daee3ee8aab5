"""Codes of weights of which two in each four of a row are zero, stored as the other two and their places.

A row of K weights becomes K / 2 codes, in order, packed as the format packs them, and after them a byte for each eight
weights: for each four, in its low half first, the place of the first code in 2 bits, then that of the second.
That is 5 bits a weight of 8-bit formats and 3 of int4, scales apart. Kernels multiply with the whole codes.
"""

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight, empty_packed
from hf_quant.formats import FORMATS
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.prepack import get_or_build
from hf_quant.scheme import LinearScheme, TensorQuant


def mask_24(scores: Tensor) -> Tensor:
    """scores [..., K], K a multiple of 4 -> bool, True for the two largest of each four in a row; of equals the first.

    NaN is taken for the smallest.
    """
    a, b, c, d = scores.nan_to_num(-1.0).unflatten(-1, (-1, 4)).unbind(-1)
    pairs = ((a, b), (a, c), (a, d), (b, c), (b, d), (c, d))
    ab, ac, ad, bc, bd, cd = ((first >= second).to(torch.int8) for first, second in pairs)
    wins = (ab + ac + ad, 1 - ab + bc + bd, 2 - ac - bc + cd, 3 - ad - bd - cd)  # of each over the three others
    return torch.stack([count >= 2 for count in wins], -1).flatten(-2)


def pruned(matrix: Tensor) -> Tensor:
    """matrix [..., N, K] with the smaller two of each four as zeros; itself if it has these."""
    zeros = matrix == 0
    if bool((zeros.unflatten(-1, (-1, 4)).sum(-1) >= 2).all()):
        return matrix
    return matrix * mask_24(matrix.abs())


def width(quant: TensorQuant, K: int) -> int:
    """Bytes of a row of K weights."""
    format = FORMATS[quant.format]
    return format.packed_width(K // 2) * format.spec.dtype.itemsize + -(-K // 8)


def empty_stored(shape: tuple[int, ...], scheme: LinearScheme, device: torch.device | str) -> PackedWeight:
    """Uninitialized tensors as a module stores a weight of `shape` [..., N, K]."""
    packed = empty_packed(shape, scheme.weight, device)
    if scheme.sparsity is None:
        return packed
    stored = torch.empty((*shape[:-1], width(scheme.weight, shape[-1])), dtype=torch.uint8, device=device)
    return packed._replace(qdata=stored)


def compressed(qdata: Tensor, quant: TensorQuant, K: int) -> Tensor:
    """Whole codes of a weight [..., N, K] as they are stored: uint8 [..., N, width]."""
    format = FORMATS[quant.format]
    codes = format.unpack(qdata, K)
    kept = mask_24((format.decode(codes) != 0).float()).unflatten(-1, (-1, 4))
    places = kept.nonzero()[:, -1].view(*kept.shape[:-1], 2)  # ascending, two in each four
    bits = codes if format.spec.is_packed else codes.view(torch.int8)
    chosen = bits.unflatten(-1, (-1, 4)).gather(-1, places).flatten(-2)
    values = format.pack(chosen if format.spec.is_packed else chosen.view(codes.dtype)).contiguous()
    halves = places[..., 0] | places[..., 1] << 2
    halves = torch.nn.functional.pad(halves, (0, halves.shape[-1] % 2))
    meta = (halves[..., ::2] | halves[..., 1::2] << 4).to(torch.uint8)
    return torch.cat([values.view(torch.uint8), meta], -1)


def parts_of(stored: Tensor, quant: TensorQuant, K: int) -> tuple[Tensor, Tensor]:
    """The codes [..., N, K / 2] of stored ones, packed by the format, and their places [..., N, K / 4, 2], 0 to 3."""
    size = width(quant, K) - -(-K // 8)
    meta = stored[..., size:].int()
    places = torch.stack([meta & 3, meta >> 2 & 3, meta >> 4 & 3, meta >> 6], -1).flatten(-2)[..., : K // 2]
    return stored[..., :size].contiguous().view(FORMATS[quant.format].spec.dtype), places.unflatten(-1, (-1, 2))


def expanded(stored: Tensor, quant: TensorQuant, K: int) -> Tensor:
    """Inverse of `compressed`: whole codes, `qdata` of the format."""
    format = FORMATS[quant.format]
    values, places = parts_of(stored, quant, K)
    chosen = format.unpack(values, K // 2)
    zero = format.encode(torch.zeros(1, dtype=torch.float32, device=stored.device))
    if not format.spec.is_packed:  # no op takes fp8
        chosen, zero = chosen.view(torch.int8), zero.view(torch.int8)
    whole = zero.expand(*stored.shape[:-1], K // 4, 4).clone()
    whole.scatter_(-1, places.long(), chosen.unflatten(-1, (-1, 2)))
    codes = whole.flatten(-2)
    return format.pack(codes) if format.spec.is_packed else codes.view(format.spec.dtype)


def whole_codes(stored: Tensor, quant: TensorQuant, K: int) -> Tensor:
    """`expanded`, kept beside the stored tensor as other tensors that are derived from weights are, unless traced."""
    found = None
    if not torch.compiler.is_compiling() and is_plain(stored):
        found = get_or_build("sparse24", (stored,), expanded, stored, quant, K)
    return expanded(stored, quant, K) if found is None else found


def columns_of(quant: TensorQuant, width_: int) -> int:
    """The largest K, a multiple of 4, whose rows take so many bytes. Raises ValueError if there is none."""
    most = 16 * width_ // (FORMATS[quant.format].bits + 2)  # of whole words and bytes
    for K in range(most - most % 4, 0, -4):
        if width(quant, K) == width_:
            return K
    raise ValueError(f"no row of sparse {quant.format} weights takes {width_} bytes")
