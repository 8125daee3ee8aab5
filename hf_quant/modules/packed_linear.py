"""`PackedLinear`: a product with a packed weight, as part of the quantized counterparts of nn.Linear and its kind."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy

from hf_quant.modules._base import QuantizedModule, weight_property
from hf_quant.modules.inputs.lazy import LazyInput
from hf_quant.modules.inputs.rule import ALONE, InputRule
from hf_quant.modules.products import layer_product, rows_product
from hf_quant.weight_proxy import WeightProxy


EXCHANGES = (Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__)
_TRANSPOSES = (Tensor.transpose, torch.transpose)
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_NO_TENSORS = (LazyInput, Proxy)


class LinearProxy(WeightProxy):
    """Stand-in for the weight of a `PackedLinear`, or for the transposed weight.

    Code that goes around the layer's forward meets the kernels: nn.MultiheadAttention, Falcon's `x @ self.weight.T`,
    Mamba's `self.weight @ x`.

    Attributes:
        is_swapped: it stands for the transposed weight.
    """

    @staticmethod
    def __new__(
        cls, module: "PackedLinear", name: str, is_data: bool = False, is_swapped: bool = False
    ) -> "LinearProxy":
        shape = module.weight_shape(name)
        return torch.Tensor._make_wrapper_subclass(
            cls, shape[::-1] if is_swapped else shape, dtype=module.compute_dtype, device=module.packed_device(name)
        )

    def __init__(self, module: "PackedLinear", name: str, is_data: bool = False, is_swapped: bool = False) -> None:
        super().__init__(module, name, is_data)
        self.is_swapped = self.is_view = is_swapped

    def dequantize(self) -> Tensor:
        """The weight, or the transposed weight, as a plain tensor in the module's compute dtype."""
        weight = super().dequantize()
        return weight.t() if self.is_swapped else weight

    def alias(self) -> "LinearProxy":
        """Another proxy of the same."""
        return type(self)(self.module, self.name_in_module, self.is_data, self.is_swapped)

    def _has_inputs_first(self) -> bool:
        """True if its shape is [K, N], to be multiplied from the left: x @ weight."""
        return (self.module._input_dim == 0) != self.is_swapped

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = (*args, *(kwargs[k] for k in ("input", "weight", "bias") if k in kwargs), None)[:3]
            if isinstance(weight, cls) and not isinstance(x, cls) and not weight._has_inputs_first():
                return weight.module.linear(x, bias)
        elif func in MATMULS and len(args) == 2:
            x, weight = args
            if isinstance(weight, cls) and not isinstance(x, cls) and weight._has_inputs_first():
                return weight.module.linear(x, None)
            if isinstance(x, cls) and not isinstance(weight, cls) and not x._has_inputs_first() and weight.dim() > 1:
                return x.module.linear(weight.mT, None).mT  # weight @ columns
        elif args and isinstance(args[0], cls) and not args[0].is_data and _exchanges(func, args[1:]):
            proxy = args[0]
            return cls(proxy.module, proxy.name_in_module, False, not proxy.is_swapped)
        return super().__torch_function__(func, types, args, kwargs)


def _exchanges(func: Callable, dims: tuple[Any, ...]) -> bool:
    """True for a call that exchanges the dimensions of a matrix."""
    return func in EXCHANGES or (func in _TRANSPOSES and dims in ((0, 1), (1, 0), (-1, -2), (-2, -1)))


class PackedLinear(QuantizedModule):
    """Base of the layers that multiply their input with a packed weight.

    Attributes:
        rule: the way of the input to the product, see `inputs.rule`.
    """

    kind = "linear"
    proxy_class = LinearProxy
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
        super().parameters_changed()
        self.rule.parameters_changed(self)

    def leave_siblings_(self) -> None:
        self.rule.leave()
        self.__dict__.pop("rule", None)
