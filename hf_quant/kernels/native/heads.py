"""Products of each head with rows of its own of a quantized weight, from either side, computed by the extension."""

import torch
from torch import Tensor

from hf_quant.kernels import prepack
from hf_quant.kernels.codes import expand_rows
from hf_quant.kernels.float_zeros import offsets_of
from hf_quant.kernels.native.arguments import DTYPES, UNIT, layout_arguments
from hf_quant.kernels.native.extension import module
from hf_quant.kernels.weight import Weight


class HeadRows:
    """Rows `first` to `first` + `count` of each head of a weight [heads * rows, K] that the extension serves.

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
        groups, bytes_of_row, diagonal = w.scale.shape[1], w.qdata.shape[1] * w.qdata.element_size(), w.input_diagonal
        self._first, self._rows = first, w.N // heads
        self._codes = (
            *(heads, count, w.K, groups, w.K if groups == 1 else w.group_size),
            *((0, 0) if diagonal is None else (diagonal.data_ptr(), diagonal.shape[-1])),
            *layout_arguments(w.spec),
            *(w.qdata.data_ptr() + first * bytes_of_row, 0, self._rows * bytes_of_row, bytes_of_row),
        )

    def scores(self, x: Tensor) -> Tensor:
        """x [M, H, K] times each head's rows -> [M, H, count], in x's dtype."""
        return self._run(x, False, self.count)

    def sums(self, x: Tensor) -> Tensor:
        """The sums of each head's rows times x [M, H, count] -> [M, H, K], in x's dtype."""
        return self._run(x, True, self._w.K)

    def lasting_arguments(self, *, sums: bool) -> tuple[int, ...]:
        """Arguments of the extension that stay right when the weight is written in place.

        Raises ValueError if what codes are multiplied with is made of that of the weight.
        """
        w = self._w
        if w.zero_point is not None or len(w.scale) not in (1, w.N):
            raise ValueError(f"the scales and zero points of {w.format} are not read as they lie")
        return self._arguments(sums, w.scale, None)

    def _arguments(self, sums: bool, scale: Tensor, offset: Tensor | None) -> tuple[int, ...]:
        step, of_all = 0 if len(scale) == 1 else scale.shape[1], self._w.global_scale
        first = self._first * step * scale.element_size()
        return (
            *(sums, *self._codes, scale.data_ptr() + first, 0 if offset is None else offset.data_ptr() + first),
            *(DTYPES[scale.dtype], 0, self._rows * step, step, 1, 0 if of_all is None else of_all.data_ptr()),
        )

    def _run(self, x: Tensor, sums: bool, width: int) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        y = torch.empty(*x.shape[:2], width, dtype=x.dtype, device="cpu")
        # The weight may be written in place.
        factors = prepack.get_or_build("rows", self._w.tensors, _factors, self._w) or _factors(self._w)
        module.head_products(
            *self._arguments(sums, *factors),
            *(len(x), x.data_ptr(), DTYPES[x.dtype], x.stride(0), x.stride(1)),
            *(y.data_ptr(), y.stride(0), y.stride(1), torch.get_num_threads()),
        )
        return y


def _factors(w: Weight) -> tuple[Tensor, Tensor | None]:
    """(scales of one or of all rows, what is added to a level times its scale)."""
    scale = w.scale if len(w.scale) in (1, w.N) else expand_rows(w.scale, w.N)
    if w.zero_point is None:
        return scale, None
    scale = scale.float()
    if w.has_float_zeros:  # value = code * scale + zero point
        return scale, offsets_of(w)
    # value = (code - zero point) * scale
    return scale, (2.0 ** (w.spec.bits - 1) - w.zero_point.float()) * scale


def unsupported_reason(w: Weight) -> str | None:
    """The reason why `HeadRows` does not take a weight [N, K] that `products.serves`, None if it does."""
    most = module.max_head_dim()
    if w.K > most or w.K % UNIT:
        return f"K={w.K}; it must be a multiple of {UNIT} up to {most}"
    groups = w.scale.shape[1]
    return None if groups == 1 or groups * w.group_size == w.K else f"groups of {w.group_size} do not divide K={w.K}"
