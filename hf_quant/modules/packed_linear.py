"""`PackedLinear`: a product with a packed weight, as part of the quantized counterparts of nn.Linear and its kind."""

import torch
from torch import Tensor
from torch.fx import Proxy

from hf_quant.modules._base import QuantizedModule, weight_property
from hf_quant.modules.inputs.lazy import LazyInput
from hf_quant.modules.inputs.rule import ALONE, InputRule
from hf_quant.modules.products import layer_product, rows_product


_NO_TENSORS = (LazyInput, Proxy)


class PackedLinear(QuantizedModule):
    """Base of the layers that multiply their input with a packed weight.

    Attributes:
        rule: the way of the input to the product, see `inputs.rule`.
    """

    kind = "linear"
    weight = weight_property("weight")
    rule: InputRule = ALONE

    def forward(self, input: Tensor | LazyInput | Proxy) -> Tensor:
        if isinstance(input, _NO_TENSORS):
            return self.call_in_graph(input) if isinstance(input, Proxy) else self._lazy_product(input)
        return self.rule.product(self, input)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] @ weight.T + bias, under autocast in its dtype."""
        return layer_product(self, x, bias, self._parameters)

    def _lazy_product(self, x: LazyInput) -> Tensor:
        """`forward` for an input that is computed together with its quantization."""
        activation = self.scheme.activation_on(x.device.type)
        if x.shape[-1] != self._weight_shapes["weight"][self._input_dim]:
            self.refuse_width(x)
        if (
            activation is None
            or self.scheme.is_static
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(x.device.type)
        ):
            return self(x.tensor())
        return rows_product(self, *x.rows(activation, self.input_diagonal(x)), x.dtype)

    def parameters_changed(self) -> None:
        self.rule.parameters_changed(self)

    def leave_siblings_(self) -> None:
        self.rule.leave()
        self.__dict__.pop("rule", None)
