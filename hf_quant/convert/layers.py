"""Helpers of the readers of other libraries' layers: their tensors, checked, and scales that are 0."""

from collections.abc import Iterable
from math import gcd

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight, unused_scale
from hf_quant.checkpoint import TensorInfo
from hf_quant.convert.files import TensorFiles
from hf_quant.kernels.codes import BLOCK_SIZE, packed_words
from hf_quant.resolve import GROUP_SIZES


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def modules_with(files: TensorFiles, leaf: str) -> list[str]:
    """Return the names of the layers that have a tensor `leaf`. Raises ValueError if there are none."""
    found = [key.removesuffix(f".{leaf}") for key in files.tensors if key.endswith(f".{leaf}")]
    if not found:
        raise ValueError(f"it holds no tensor named `{leaf}`: no layer of it is quantized")
    return found


def tensor_info(
    files: TensorFiles,
    name: str,
    dtypes: Iterable[torch.dtype],
    shapes: Iterable[tuple[int, ...]] = (),
    dims: int | None = None,
) -> TensorInfo:
    """Return the dtype and shape of a tensor. Raises ValueError unless it is there, and of one of those given."""
    info, dtypes, shapes = files.tensors.get(name), tuple(dtypes), tuple(shapes)
    wanted = " or ".join(str(list(shape)) for shape in shapes) or (
        "a tensor" if dims is None else f"{dims} dimensions"
    )
    if info is not None and info.dtype in dtypes and 0 not in info.shape:
        if (not shapes or info.shape in shapes) and (dims is None or len(info.shape) == dims):
            return info
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(f"{name} is {info or 'missing'}; needs {wanted} of {names}")


def groups_of(module: str, K: int, block: int) -> tuple[str, int | None, int]:
    """Return (granularity, group_size, columns of a scale) for blocks of consecutive values of rows of K.

    Where a block does not divide a row, has more than one, or is larger than hf_quant's groups, the largest group that
    divides both serves: the same scale is stored several times. Raises ValueError if there is none.
    """
    common = gcd(K, block)
    if common == K:
        return "row", None, K
    columns = max((size for size in GROUP_SIZES if common % size == 0), default=None)
    if columns is None:
        raise ValueError(
            f"{module} has one scale for {block} values and {K} columns, which have the common divisor {common}; "
            f"hf_quant has groups of {', '.join(map(str, GROUP_SIZES))}"
        )
    return "group", columns, columns


def without_zero_scales(
    codes: Tensor, scale: Tensor, columns: int, zero: int | Tensor = 0, *, rows: int = 1, float_zeros: bool = False
) -> tuple[Tensor, Tensor]:
    """Return codes [..., N, K] and scales [..., N / rows, ceil(K / columns)] of the same weights, no scale being 0.

    A scale of 0 makes weights of 0; hf_quant has none, so these get the code `zero` (one for all, or one for each
    scale) and the scale 1. The codes have one byte each. With floating-point zero points, which are added to them, the
    scale is `unused_scale`.
    """
    empty = scale.view(torch.uint8) == 0 if scale.dtype == torch.float8_e4m3fn else scale == 0
    if not bool(empty.any()):
        return codes, scale
    N, K = codes.shape[-2:]

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(columns, -1)[..., :K].repeat_interleave(rows, -2)[..., :N, :]

    mask = spread(empty).expand(codes.shape)
    found, kind = codes.contiguous().view(torch.uint8).clone(), codes.dtype
    fill = spread(zero).expand(codes.shape)[mask] if isinstance(zero, Tensor) else zero
    found[mask] = fill
    unused = unused_scale(scale.dtype) if float_zeros else 1.0
    return found.view(kind), torch.where(empty, unused, scale.float()).to(scale.dtype)


def float_zero_points(zeros: Tensor, scale: Tensor, middle: int = 0) -> Tensor:
    """Return the value of code 0, in fp32: weights are (code - zero) * scale, and codes are stored less `middle`."""
    return (middle - zeros.double()).mul_(scale).float()


def rows_of_scale(N: int, granularity: str) -> int:
    """Return the number of rows that share a scale."""
    return {"block": BLOCK_SIZE, "tensor": N}.get(granularity, 1)


def fp4_words(pairs: Tensor) -> Tensor:
    """Return bytes [..., K / 2] of two 4-bit codes each, the first in the low half, as int32 words of hf_quant."""
    K = pairs.shape[-1] * 2
    padded = torch.nn.functional.pad(pairs, (0, packed_words(K, 4) * 4 - K // 2))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def nvfp4_weight(pairs: Tensor, scale: Tensor, total: Tensor) -> PackedWeight:
    """Return an nvfp4 weight of e2m1 codes [N, K / 2], e4m3 scales [N, K / 16] and one fp32 scale."""
    pairs, scale = without_zero_scales(pairs, scale, 8)
    return PackedWeight(fp4_words(pairs), scale, None, total.float().reshape(1))
