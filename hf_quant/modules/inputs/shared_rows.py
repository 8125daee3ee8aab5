"""`SharedRows`: layers with quantized activations that read one tensor quantize it once under torch.compile.

The compiler sees no versions of tensors: the source has to show that nothing changes the tensor between the calls (see
`siblings`). Eager code needs no rule for it, see `rows`.
"""

import torch
from torch import Tensor

from hf_quant import kernels
from hf_quant.kernels.dispatch import is_exporting
from hf_quant.modules.inputs.rule import InputRule
from hf_quant.modules.packed_linear import PackedLinear
from hf_quant.modules.products import autocast, needs_grad, rows_product


def quantized(x: Tensor, format: str, diagonal: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes [..., K], row_scale [..., 1]) of x, which a diagonal [K / b, b] rotates first."""
    if diagonal is None:
        return kernels.quantize_rowwise(x, format=format)
    return kernels.hadamard_quantize_rowwise(x, diagonal, block_size=diagonal.shape[1], format=format)


class SharedInput:
    """The state that the layers of one group share while torch.compile traces them.

    Attributes:
        count: how many they are; 0: one of them is no quantized layer any more, and the others share nothing.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.traced: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._waiting: tuple[int, ...] = ()  # siblings that have not been called with it

    def rows(
        self, source: Tensor, x: Tensor, format: str, diagonal: Tensor | None, index: int
    ) -> tuple[Tensor, Tensor]:
        """(codes, row_scale) of x for sibling `index`; once all siblings have been called, nothing is kept.

        `source` is the tensor that they are called with, x the same in the dtype of autocast.
        """
        traced = self.traced
        if traced is None or traced[0] is not source or index not in self._waiting:
            traced = self.traced = (source, quantized(x, format, diagonal))
            self._waiting = tuple(range(self.count))
        self._waiting = tuple(i for i in self._waiting if i != index)
        if not self._waiting:
            self.traced = None
        return traced[1]


class SharedRows(InputRule):
    """The rule of one of the layers that share a quantized input.

    Attributes:
        group: what they share.
        index: the place of the layer among them.
    """

    def __init__(self, group: SharedInput, index: int) -> None:
        self.group, self.index = group, index

    def product(self, module: PackedLinear, x: Tensor) -> Tensor:
        bias, activation = module._parameters["bias"], module.scheme.activation_on(x.device.type)
        is_traced = torch.compiler.is_compiling() and not is_exporting()
        if not is_traced or not self.group.count or activation is None or needs_grad(x, bias):
            return super().product(module, x)
        if x.shape[-1] != module.in_features:
            module.refuse_width(x)
        values = autocast(x, x.device.type) if torch.is_autocast_enabled(x.device.type) else x
        rows = self.group.rows(x, values, activation, module.input_diagonal(values), self.index)
        return rows_product(module, *rows, values.dtype)

    def leave(self) -> None:
        self.group.count, self.group.traced = 0, None
