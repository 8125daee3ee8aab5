"""`QuantLinear`: nn.Linear with packed weights."""

import torch
from torch import Tensor, nn

from hf_quant.modules._base import QuantizedModule, register_module, weight_property
from hf_quant.modules._functional import linear, ready_linear


class QuantLinear(QuantizedModule, nn.Linear):
    """nn.Linear whose weight is stored in the scheme's format; made by `quantize_` or on load.

    Parameters: `qdata`, `scale`, `zero_point` (asymmetric), `global_scale` (nvfp4), all integer and frozen; `bias` as
    it was. `weight` is a proxy (see `hf_quant.weight_proxy`). Differentiable in its input and bias.
    """

    kind = "linear"
    weight = weight_property("weight")

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input, self._parameters["bias"])

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] @ weight.T + bias, under autocast in its dtype."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        scheme = self.scheme
        quant = scheme.weight
        if scheme.activation is None:
            y = ready_linear(x, self._parameters, bias)
            if y is not None:
                return y
        return linear(
            x,
            self.packed(),
            bias,
            activation=None if scheme.activation is None else scheme.activation.format,
            format=quant.format,
            group_size=quant.group_size or (128 if quant.granularity == "block" else x.shape[-1]),
        )


register_module(nn.Linear, QuantLinear)
