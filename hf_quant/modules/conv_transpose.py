"""`QuantConvTranspose1d`, `2d`, `3d`: weight-only, the kernel as a matrix [in, out/groups * window]."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.modules._flattened import ConvWeight
from hf_quant.modules._registry import register_module


class _QuantConvTransposeNd(ConvWeight):
    # torch's forward is given the proxy of the weight: autograd keeps that, and the backward pass dequantizes again.
    kind = "conv_transpose"

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, Proxy):
            return self.call_in_graph(input)
        y = super().forward(input, *args, **kwargs)
        if self.is_normed:
            self.drop_normed()
        return y


class QuantConvTranspose1d(_QuantConvTransposeNd, nn.ConvTranspose1d):
    """nn.ConvTranspose1d, weight-only; differentiable in its input and bias."""


class QuantConvTranspose2d(_QuantConvTransposeNd, nn.ConvTranspose2d):
    """nn.ConvTranspose2d, weight-only; differentiable in its input and bias."""


class QuantConvTranspose3d(_QuantConvTransposeNd, nn.ConvTranspose3d):
    """nn.ConvTranspose3d, weight-only; differentiable in its input and bias."""


register_module(nn.ConvTranspose1d, QuantConvTranspose1d)
register_module(nn.ConvTranspose2d, QuantConvTranspose2d)
register_module(nn.ConvTranspose3d, QuantConvTranspose3d)
