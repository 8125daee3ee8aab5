"""GPT-2's `Conv1D`: a linear layer whose weight is stored [in, out]."""

from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from hf_quant.modules import QuantizedModule, QuantLinear, register_module


class QuantConv1D(QuantizedModule, Conv1D):
    """transformers' Conv1D with packed weights; the codes are those of the transposed weight [out, in]."""

    kind = "linear"
    weight = QuantLinear.weight
    linear = QuantLinear.linear
    shared = None  # no two of them read one tensor: GPT-2 has one layer for query, key and value
    _group_size = QuantLinear._group_size
    _input_dim = 0

    @classmethod
    def matrix_shape_of(cls, module: Module, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def to_matrix(self, name: str, weight: Tensor) -> Tensor:
        return weight.t()

    def from_matrix(self, name: str, matrix: Tensor) -> Tensor:
        return matrix.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return self.call_in_graph(x)
        return self.linear(x, self._parameters["bias"])


register_module(Conv1D, QuantConv1D)
