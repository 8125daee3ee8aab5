"""Codes of weights, and the one quantization that holds weights of several types of GGUF.

Experts of a layer are one module here, of one scheme, and their gate and up projections one weight. Files mix types:
those in Q4_K_M have Q4_K for gate and up, and Q6_K for the down projection of half of the layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.formats import FORMATS
from hf_quant.scheme import TensorQuant


class Codes(NamedTuple):
    """The codes of a weight [N, K], its scales [N, K / size] in their true dtype, and zero points of the same shape.

    Codes are uint8 for packed formats, else int8.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None


def common_quant(quants: set[TensorQuant]) -> TensorQuant:
    """Return the quantization that holds weights of each of these exactly. Raises Inexpressible if there is none.

    Integers of several widths become int8; zero points, where only some have them, fp32 numbers. The smallest groups
    serve for all.
    """
    first = next(iter(quants))
    if len(quants) == 1:
        return first
    if any(not quant.format.startswith("int") or quant.group_size is None for quant in quants):
        raise Inexpressible(f"no format holds {' and '.join(sorted(map(str, quants)))}")
    formats, symmetric = {quant.format for quant in quants}, all(quant.symmetric for quant in quants)
    dtype = "float16" if all(quant.scale_dtype == "float16" for quant in quants) and symmetric else "float32"
    return TensorQuant(
        formats.pop() if len(formats) == 1 else "int8",
        "group",
        min(quant.group_size for quant in quants if quant.group_size is not None),
        symmetric,
        dtype,
        zero_point_dtype="uint8" if symmetric else dtype,
    )


def converted(found: Codes, own: TensorQuant, quant: TensorQuant) -> Codes:
    """Return the codes of the same weights in a `common_quant` of their own quantization and others."""
    if own == quant:
        return found
    assert own.group_size is not None and quant.group_size is not None  # see common_quant
    dtype, times = getattr(torch, quant.scale_dtype), own.group_size // quant.group_size
    codes, scale = found.codes, found.scale.to(dtype).repeat_interleave(times, 1)
    zero = 0 if codes.dtype == torch.int8 or own.has_float_zeros else 2 ** (FORMATS[own.format].bits - 1)
    zeros = None if found.zero_point is None else found.zero_point.to(dtype).repeat_interleave(times, 1)
    if zeros is not None and not own.has_float_zeros:
        zero, zeros = 0, -scale * zeros  # exact: 11 digits times 4
    if quant.format != own.format:
        codes, zero = codes.view(torch.int8) - zero, 0
    if not quant.symmetric and zeros is None:
        zeros = -zero * scale + 0.0  # 0 without a sign
    return Codes(codes, scale, zeros)


def joined(parts: list[PackedWeight], join: Callable[[list[Tensor]], Tensor]) -> PackedWeight:
    """Return the weight whose codes, scales and zero points `join` makes of those of its parts."""
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    qdata, scale = join([part.qdata for part in parts]), join([part.scale for part in parts])
    return PackedWeight(qdata, scale, join(zero_points) if zero_points else None, None)
