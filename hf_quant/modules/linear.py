"""`QuantLinear`: nn.Linear with packed weights."""

from typing import Any

from torch import nn

from hf_quant.modules._registry import register_module
from hf_quant.modules.inputs.shared_product import FusedProjections, group_of
from hf_quant.modules.packed_linear import PackedLinear


class QuantLinear(PackedLinear, nn.Linear):
    """nn.Linear whose weight is stored in the scheme's format; made by `quantize_` or on load.

    Parameters: `qdata`, `scale`, `zero_point` (asymmetric), `global_scale` (nvfp4), all integer and frozen; `bias` as
    it was. `weight` is a proxy (see `hf_quant.weight_proxy`). Differentiable in its input and bias.
    """

    @property
    def fused(self) -> FusedProjections | None:
        """The product that the layer shares with others that read the same input, None if it computes alone."""
        return group_of(self)

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
        rebuild, arguments, state = super().__reduce_ex__(4)
        copy = rebuild(*arguments)
        copy.__dict__.update(state)
        return copy

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.fused is None or self.fused.common is None:
            return text
        names, index = self.fused.names, self.rule.index
        others = ", ".join(names[:index] + names[index + 1 :])
        return f"{text}, one product with {others}"


register_module(nn.Linear, QuantLinear)
