"""`QuantLinear`: nn.Linear with packed weights."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.modules._base import QuantizedModule, register_module, weight_property
from hf_quant.modules._functional import linear, needs_grad, quantized_mm, ready_linear
from hf_quant.modules._rows import SharedInput
from hf_quant.modules.lazy import LazyInput


if TYPE_CHECKING:
    from hf_quant.modules.fused import FusedProjections


_NO_TENSORS = (LazyInput, Proxy)


class QuantLinear(QuantizedModule, nn.Linear):
    """nn.Linear whose weight is stored in the scheme's format; made by `quantize_` or on load.

    Parameters: `qdata`, `scale`, `zero_point` (asymmetric), `global_scale` (nvfp4), all integer and frozen; `bias` as
    it was. `weight` is a proxy (see `hf_quant.weight_proxy`). Differentiable in its input and bias.

    Attributes:
        fused: what it shares with the layers that read the same input, see `fuse_projections_`; None: nothing.
        fused_index: its place among them.
        shared: with the layers that provably read the same input, see `_rows`; None: nothing.
        shared_index: its place among them.
    """

    kind = "linear"
    weight = weight_property("weight")
    fused: "FusedProjections | None" = None
    fused_index: int = 0
    shared: SharedInput | None = None
    shared_index: int = 0
    _input_dim = -1  # of the host's weight: the one that is as long as the input is wide

    def forward(self, input: Tensor | LazyInput) -> Tensor:
        if isinstance(input, _NO_TENSORS):
            return self.lazy_linear(input) if isinstance(input, LazyInput) else self.call_in_graph(input)
        if self.fused is not None:
            y = self.fused.product(self, input)
            if y is not None:
                return y
        return self.linear(input, self._parameters["bias"])

    def linear(self, x: Tensor, bias: Tensor | None, parameters: dict[str, Tensor | None] | None = None) -> Tensor:
        """x [..., K] @ weight.T + bias, under autocast in its dtype; `parameters` of another weight, if given."""
        source, device, K = x, x.device.type, x.shape[-1]
        # Packed codes cannot tell: rows of 161 to 192 take as many words.
        if K != self._weight_shapes["weight"][self._input_dim]:
            self.refuse_width(x)
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        shared = None
        if parameters is None:
            parameters, shared = self._parameters, self.shared
        scheme = self.scheme
        quant, activation = scheme.weight, scheme.activation_on(device)
        y = ready_linear(x, parameters, bias, activation, quant.format)
        if y is not None:
            return y
        if (
            activation is not None
            and shared is not None
            and shared.count
            and torch.compiler.is_compiling()
            and not torch.compiler.is_exporting()
            and not needs_grad(x, bias)
        ):
            return self._rows_linear(*shared.traced_rows(source, x, activation, self.shared_index), x.dtype)
        return linear(
            x,
            self._typed("weight", parameters),
            bias,
            activation=activation,
            format=quant.format,
            group_size=self._group_size(K),
        )

    def lazy_linear(self, x: LazyInput) -> Tensor:
        """`forward` for an input that is computed together with its quantization."""
        activation = self.scheme.activation_on(x.device.type)
        if x.shape[-1] != self.in_features:
            self.refuse_width(x)
        if activation is None or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return self(x.tensor())
        return self._rows_linear(*x.rows(activation), x.dtype)

    def _rows_linear(self, codes: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """`forward` for an input [..., K] that is quantized, its result in `dtype`."""
        options = {"format": self.scheme.weight.format, "group_size": self._group_size(codes.shape[-1])}
        return quantized_mm(codes, row_scale, *self.packed(), self._parameters["bias"], out_dtype=dtype, **options)

    def _group_size(self, K: int) -> int:
        quant = self.scheme.weight
        return quant.group_size or (128 if quant.granularity == "block" else K)

    # What gives it other parameters may leave them outside of the common tensor.

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        if self.fused is not None:
            self.fused.arrived(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.fused is not None:
            self.fused.arrived(self)

    def leave_siblings_(self) -> None:
        if self.shared is not None:
            self.shared.release()
            del self.shared, self.shared_index

    def requantize_weight_(self, name: str, weight: Tensor) -> None:
        super().requantize_weight_(name, weight)
        if self.fused is not None:
            self.fused.arrived(self)

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.fused is not None:
            self.fused.arrived(self)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.fused is None or self.fused.common is None:
            return text
        names = self.fused.names
        others = ", ".join(names[: self.fused_index] + names[self.fused_index + 1 :])
        return f"{text}, one product with {others}"


register_module(nn.Linear, QuantLinear)
