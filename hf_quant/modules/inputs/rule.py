"""`InputRule`: the way of a layer's input to its product. A layer that shares nothing has `ALONE`.

The other rules are `rows.SharedRows` (layers that read one tensor quantize it once) and `shared_product.SharedProduct`
(they compute one product). Each layer has one rule; a rule that does not apply to a call passes it on to another.
"""

from torch import Tensor

from hf_quant.modules._base import QuantizedModule
from hf_quant.modules.products import layer_product


class InputRule:
    """The rule of a layer that reads its input alone, and the base of the others."""

    def product(self, module: QuantizedModule, x: Tensor) -> Tensor:
        """The layer's output for x [..., K]."""
        return layer_product(module, x, module._parameters["bias"], module._parameters)

    def parameters_changed(self, module: QuantizedModule) -> None:
        """Called when the layer's parameters may be new: copied, loaded, moved or quantized again."""

    def leave(self) -> None:
        """Called when the layer becomes the host's again: layers that share with it continue without it."""


ALONE = InputRule()
