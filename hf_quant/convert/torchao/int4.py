"""Read torchao's int4 weights with floating-point zero points, in either order of their codes.

Weights are code * scale + zero_point with codes from -8 to 7. torchao rounds the product and the sum, each to bf16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import TensorInfo, shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.layers import FLOATS, groups_of, tensor_info, without_zero_scales
from hf_quant.convert.torchao.records import Record
from hf_quant.formats import INT4
from hf_quant.resolve import GROUP_SIZES
from hf_quant.scheme import TensorQuant


PAIRS = "Int4Tensor"
TILES = ("Int4TilePackedTo4dTensor", "TensorCoreTiledAQTTensorImpl")
Found = tuple[TensorQuant, tuple[int, int], Callable[[], PackedWeight]]  # (quantization, (N, K), reader)


def int4_pairs(files: TensorFiles, record: Record) -> Found:
    """A weight of `qdata` [N, K / 2], the first of two codes in the lower half of its byte; scales [groups, N]."""
    stored = tensor_info(files, record.key("qdata"), [torch.int8, torch.uint8], dims=2)
    N, K = stored.shape[0], 2 * stored.shape[1]
    block = _columns_of(record)
    numbers = [record.key(part) for part in ("scale", "zero_point")]
    infos = [tensor_info(files, key, FLOATS, [(-(-K // block), N)]) for key in numbers]

    def codes() -> Tensor:
        pairs = files.read(record.key("qdata")).contiguous().view(torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1) ^ 8

    return _found(record, infos[0], (N, K), block, codes, lambda: tuple(files.read(key) for key in numbers))


def int4_tiles(files: TensorFiles, record: Record) -> Found:
    """A weight of words [N / 8, K / 32 J, 32, J], padded; `scale_and_zero` [groups, N, 2].

    The lane t = 4 n + c of a tile holds, in word j, the columns 32 j + 8 p + 2 c + b of row n in its bits from 16 b +
    4 p on (`_convert_weight_to_int4pack` of
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/int4mm.cu).
    """
    key = record.key("qdata")
    stored = tensor_info(files, key, [torch.int32], dims=4)
    rows, tiles, lanes, words = stored.shape
    (N, K), padded = _two_sizes(record, "shape"), (8 * rows, 32 * words * tiles)
    if lanes != 32 or N > padded[0] or K > padded[1]:
        raise ValueError(f"{key} is {stored}, of the shape [{N}, {K}]; needs [N / 8, K / 32 J, 32, J]")
    block, both = _columns_of(record), record.key("scale_and_zero")
    info = tensor_info(files, both, FLOATS, [(-(-padded[1] // block), padded[0], 2)])

    def codes() -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        found = (files.read(key)[..., None] >> shifts & 15).to(torch.uint8)
        found = found.view(rows, tiles, 8, 4, words, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)  # of n, c, j, b, p
        return found.reshape(padded)[:N, :K]

    return _found(record, info, (N, K), block, codes, lambda: files.read(both).unbind(-1))


def _two_sizes(record: Record, field: str) -> tuple[int, int]:
    found = record.fields.get(field)
    sizes = [size for size in found if type(size) is int and size > 0] if isinstance(found, list) else []
    if len(sizes) != 2 or found != sizes:
        raise ValueError(f"{record.module} has the {field} {shorten(str(found))}; needs two positive integers")
    return sizes[0], sizes[1]


def _columns_of(record: Record) -> int:
    """Return the columns that share a scale."""
    rows, columns = _two_sizes(record, "block_size")
    if rows != 1:
        raise ValueError(f"{record.module} has one scale for {rows} rows; needs one for each")
    return columns


def _found(
    record: Record,
    scales: TensorInfo,
    shape: tuple[int, int],
    block: int,
    codes: Callable[[], Tensor],
    numbers: Callable[[], tuple[Tensor, ...]],
) -> Found:
    """Return the weight of codes [N, K] from 0 on, and of scales and zero points [groups, N], with padding behind."""
    N, K = shape
    if block in GROUP_SIZES and block < K:  # the last one may be shorter
        granularity, size, columns = "group", block, block
    else:
        granularity, size, columns = groups_of(record.module, K, block)
    dtype = str(scales.dtype).removeprefix("torch.")
    quant = TensorQuant("int4", granularity, size, False, dtype, zero_point_dtype="float32")

    def unpack() -> PackedWeight:
        whole = [part.T[:N].repeat_interleave(max(block // columns, 1), 1) for part in numbers()]
        scale, zeros = (part[:, : -(-K // columns)].contiguous() for part in whole)
        offsets = (zeros.double() - 8 * scale.double()).float()
        unsigned, scale = without_zero_scales(codes(), scale, columns, float_zeros=True)
        return PackedWeight(INT4.pack(unsigned), scale, offsets, None)

    return quant, shape, unpack
