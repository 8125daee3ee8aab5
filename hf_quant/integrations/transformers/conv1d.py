"""GPT-2's `Conv1D`: a linear layer whose weight is stored [in, out]."""

from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from hf_quant.modules import PackedLinear, register_module


class QuantConv1D(PackedLinear, Conv1D):
    """transformers' Conv1D with packed weights; the codes are those of the transposed weight [out, in]."""

    _input_dim = 0

    @classmethod
    def matrix_shape_of(cls, module: Module, shape: tuple[int, ...], name: str = "weight") -> tuple[int, ...]:
        return shape[::-1]

    def to_matrix(self, name: str, weight: Tensor) -> Tensor:
        return weight.t()

    def from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        return matrix.t().contiguous()


register_module(Conv1D, QuantConv1D)
