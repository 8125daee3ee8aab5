"""Products of each head with rows of its own of a quantized weight, from either side, computed by the extension."""

import struct

import torch
from torch import Tensor

from hf_quant.kernels import prepack
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
        groups, bytes_of_row = w.scale.shape[1], w.qdata.shape[1] * w.qdata.element_size()
        self._first, self._rows = first, w.N // heads
        self._codes = (
            *(layout(w.spec), levels(w.format, False).data_ptr(), w.spec.is_integer),
            *(groups, w.K if groups == 1 else w.group_size),
        )
        self._places = (w.qdata.data_ptr() + first * bytes_of_row, 0, self._rows * bytes_of_row, bytes_of_row)

    def scores(self, x: Tensor) -> Tensor:
        """x [M, H, K] times each head's rows -> [M, H, count], in x's dtype."""
        return self._run(x, False, self.count)

    def sums(self, x: Tensor) -> Tensor:
        """The sums of each head's rows times x [M, H, count] -> [M, H, K], in x's dtype."""
        return self._run(x, True, self._w.K)

    def _run(self, x: Tensor, sums: bool, width: int) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        y = torch.empty(*x.shape[:2], width, dtype=x.dtype, device="cpu")
        # The weight may be written in place.
        scale, offset, factor = prepack.get_or_build("rows", self._w.tensors, _factors, self._w) or _factors(self._w)
        step = 0 if len(scale) == 1 else scale.shape[1]
        first = self._first * step * scale.element_size()
        module.head_products(
            *(sums, False, self.heads, len(x), self.count, self._w.K, *self._codes),
            *(x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.stride(1)),
            *(y.data_ptr(), y.stride(0), y.stride(1)),
            *(*self._places, scale.data_ptr() + first, 0 if offset is None else offset.data_ptr() + first),
            *(DTYPES[scale.dtype], 0, self._rows * step, step, 1),
            *(*struct.unpack("I", struct.pack("f", factor)), torch.get_num_threads()),
        )
        return y


def _factors(w: Weight) -> tuple[Tensor, Tensor | None, float]:
    """(scales of one or of all rows, what is added to a level times its scale, a factor of the whole weight)."""
    scale = w.scale if len(w.scale) in (1, w.N) else w.scale.repeat_interleave(BLOCK_SIZE, 0)[: w.N]
    factor = 1.0 if w.global_scale is None else w.global_scale.item()
    if w.zero_point is None:
        return scale, None, factor
    scale = scale.float()  # value = (code - zero point) * scale
    return scale, (2.0 ** (w.spec.bits - 1) - w.zero_point.float()) * scale, factor


def unsupported_reason(w: Weight) -> str | None:
    """The reason why `HeadRows` does not take a weight [N, K] that `products.serves`, None if it does."""
    most = module.max_head_dim()
    if w.K > most or w.K % UNIT:
        return f"K={w.K}; it must be a multiple of {UNIT} up to {most}"
    groups = w.scale.shape[1]
    return None if groups == 1 or groups * w.group_size == w.K else f"groups of {w.group_size} do not divide K={w.K}"
