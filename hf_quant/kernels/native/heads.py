"""Products of each head with rows of its own of a quantized weight, from either side, computed by the extension."""

import struct

import torch
from torch import Tensor

from hf_quant.kernels.codes import BLOCK_SIZE
from hf_quant.kernels.native.arguments import DTYPES, UNIT, layout, levels
from hf_quant.kernels.native.extension import module
from hf_quant.kernels.weight import Weight


class HeadRows:
    """Rows `first` to `first` + `count` of each head of a weight [heads * rows, K] that the extension serves.

    Rows are those of the codes: of a weight for transformed input, in the basis of that.

    Attributes:
        heads: number of heads, H.
        count: rows of each head.
    """

    def __init__(self, w: Weight, heads: int, first: int, count: int) -> None:
        """Hold the weight. Raises ValueError where `unsupported_reason` gives a reason."""
        reason = unsupported_reason(w)
        if reason is not None:
            raise ValueError(f"rows of heads are not multiplied: {reason}")
        self.heads, self.count, self._w = heads, count, w
        rows, scale, zero_point, groups = w.N // heads, w.scale, w.zero_point, w.scale.shape[1]
        if len(scale) not in (1, w.N):
            scale = scale.repeat_interleave(BLOCK_SIZE, 0)[: w.N]
        step = 0 if len(scale) == 1 else groups
        offset = None
        if zero_point is not None:  # value = (code - zero point) * scale
            scale = scale.float()
            offset = (2.0 ** (w.spec.bits - 1) - zero_point.float()) * scale
        self._held = scale, offset
        size, bytes_of_row = scale.element_size(), w.qdata.shape[1] * w.qdata.element_size()
        factor = 1.0 if w.global_scale is None else w.global_scale.item()
        self._codes = (
            *(layout(w.spec), levels(w.format, False).data_ptr(), w.spec.is_integer),
            *(groups, w.K if groups == 1 else w.group_size),
        )
        self._cache = (
            *(w.qdata.data_ptr() + first * bytes_of_row, 0, rows * bytes_of_row, bytes_of_row),
            scale.data_ptr() + first * step * size,
            0 if offset is None else offset.data_ptr() + first * step * size,
            *(DTYPES[scale.dtype], 0, rows * step, step, 1),
            *struct.unpack("I", struct.pack("f", factor)),
        )

    def scores(self, x: Tensor) -> Tensor:
        """x [M, H, K] times each head's rows -> [M, H, count], in x's dtype."""
        return self._run(x, False, self.count)

    def sums(self, x: Tensor) -> Tensor:
        """The sums of each head's rows times x [M, H, count] -> [M, H, K], in x's dtype."""
        return self._run(x, True, self._w.K)

    def _run(self, x: Tensor, sums: bool, width: int) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        y = torch.empty(*x.shape[:2], width, dtype=x.dtype, device="cpu")
        module.head_products(
            *(sums, False, self.heads, len(x), self.count, self._w.K, *self._codes),
            *(x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.stride(1)),
            *(y.data_ptr(), y.stride(0), y.stride(1)),
            *self._cache,
            torch.get_num_threads(),
        )
        return y


def unsupported_reason(w: Weight) -> str | None:
    """The reason why `HeadRows` does not take a weight [N, K] that `products.serves`, None if it does."""
    most = module.max_head_dim()
    if w.K > most or w.K % UNIT:
        return f"K={w.K}; it must be a multiple of {UNIT} up to {most}"
    groups = w.scale.shape[1]
    return None if groups == 1 or groups * w.group_size == w.K else f"groups of {w.group_size} do not divide K={w.K}"
