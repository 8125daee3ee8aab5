"""`QuantConv1d`, `QuantConv2d`, `QuantConv3d`: weight-only, the kernel as a matrix [out, in/groups * window]."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from hf_quant.kernels.dispatch import is_transformed
from hf_quant.modules._flattened import ConvWeight
from hf_quant.modules._registry import register_module
from hf_quant.modules.products import needs_grad


class _Convolution(torch.autograd.Function):
    """Convolution with a frozen quantized weight: backward dequantizes again instead of keeping a 16-bit copy."""

    @staticmethod
    def forward(ctx, x, bias, module, padding):
        ctx.module, ctx.padding, ctx.x_shape = module, padding, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return module.convolve(x, bias, padding)

    @staticmethod
    def backward(ctx, grad):
        module, grad_x, grad_bias = ctx.module, None, None
        if ctx.needs_input_grad[0]:
            weight = module.dequantize_weight(dtype=grad.dtype)
            x = torch.empty(1, dtype=grad.dtype, device=grad.device).expand(ctx.x_shape)
            no_output_padding = [0] * len(module.stride)
            geometry = (module.stride, ctx.padding, module.dilation, False, no_output_padding, module.groups)
            grad_x = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, (True, False, False))[0]
        if ctx.needs_input_grad[1]:
            dims = [0, *range(2, grad.dim())]
            grad_bias = grad.sum(dims, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_bias, None, None


class _QuantConvNd(ConvWeight):
    kind = "conv"

    def convolve(self, x: Tensor, bias: Tensor | None, padding: tuple[int, ...]) -> Tensor:
        """The plain convolution of an already padded x."""
        weight = self.dequantize_weight(dtype=x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        zeros = [0] * len(self.stride)
        return torch.convolution(x, weight, bias, self.stride, padding, self.dilation, False, zeros, self.groups)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            return self.call_in_graph(input)
        if self.is_normed:
            y = super().forward(input)  # torch's, with the weight that the hook has made
            self.drop_normed()
            return y
        if input.dim() == len(self.stride) + 1:  # unbatched, as nn.Conv2d and its kind take it
            return self.forward(input.unsqueeze(0)).squeeze(0)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=mode), (0,) * len(self.stride)
        else:
            padding = self.padding
        bias = self._parameters["bias"]
        # In transforms torch's own rules for a convolution serve, with the 16-bit weight.
        if needs_grad(input, bias) and not is_transformed():
            return _Convolution.apply(input, bias, self, padding)
        return self.convolve(input, bias, padding)


class QuantConv1d(_QuantConvNd, nn.Conv1d):
    """nn.Conv1d, weight-only; differentiable in its input and bias."""


class QuantConv2d(_QuantConvNd, nn.Conv2d):
    """nn.Conv2d, weight-only; differentiable in its input and bias."""


class QuantConv3d(_QuantConvNd, nn.Conv3d):
    """nn.Conv3d, weight-only; differentiable in its input and bias."""


register_module(nn.Conv1d, QuantConv1d)
register_module(nn.Conv2d, QuantConv2d)
register_module(nn.Conv3d, QuantConv3d)
