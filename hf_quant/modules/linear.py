"""`QuantLinear`: nn.Linear with packed weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.modules._base import QuantizedModule, register_module, weight_property
from hf_quant.modules.inputs.lazy import LazyInput
from hf_quant.modules.inputs.rule import ALONE, InputRule
from hf_quant.modules.inputs.shared_product import FusedProjections, SharedProduct
from hf_quant.modules.products import layer_product, rows_product


_NO_TENSORS = (LazyInput, Proxy)


class PackedLinear(QuantizedModule):
    """A product with a packed weight, as part of the quantized counterparts of nn.Linear and its kind.

    Attributes:
        rule: the way of the input to the product, see `inputs.rule`.
    """

    kind = "linear"
    weight = weight_property("weight")
    rule: InputRule = ALONE
    _input_dim = -1  # of the host's weight: the one that is as long as the input is wide

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
        if activation is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self(x.tensor())
        return rows_product(self, *x.rows(activation), x.dtype)

    def parameters_changed(self) -> None:
        self.rule.parameters_changed(self)

    def leave_siblings_(self) -> None:
        self.rule.leave()
        self.__dict__.pop("rule", None)


class QuantLinear(PackedLinear, nn.Linear):
    """nn.Linear whose weight is stored in the scheme's format; made by `quantize_` or on load.

    Parameters: `qdata`, `scale`, `zero_point` (asymmetric), `global_scale` (nvfp4), all integer and frozen; `bias` as
    it was. `weight` is a proxy (see `hf_quant.weight_proxy`). Differentiable in its input and bias.
    """

    @property
    def fused(self) -> FusedProjections | None:
        """The product that it shares with the layers that read the same input, None if it computes alone."""
        return self.rule.group if isinstance(self.rule, SharedProduct) else None

    def __reduce_ex__(self, protocol: int) -> Any:
        rebuild, arguments, state = super().__reduce_ex__(protocol)
        if self.fused is not None:  # a row would take the whole common tensor along
            own = {
                k: p if p is None else nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                for k, p in self._parameters.items()
            }
            state = {**state, "_parameters": own}
        return rebuild, arguments, state

    def __copy__(self) -> "QuantLinear":
        rebuild, arguments, _ = super().__reduce_ex__(4)
        copy = rebuild(*arguments)
        copy.__dict__.update(self.__dict__)
        return copy

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.fused is None or self.fused.common is None:
            return text
        names, index = self.fused.names, self.rule.index
        others = ", ".join(names[:index] + names[index + 1 :])
        return f"{text}, one product with {others}"


register_module(nn.Linear, QuantLinear)
