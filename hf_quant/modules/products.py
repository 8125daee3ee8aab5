"""Differentiable products with quantized weights: the ops, and the exact gradients to their input, of any order.

The weight is frozen. With quantized activations the gradient passes through their rounding unchanged
(straight-through): grad_x = grad_y @ dequant(w). Autograd sits outside the ops: an op call costs 5 us, one with
registered autograd 15.

A product is linear in its input, and so is its gradient in the gradient of the output: one is the derivative of the
other. Forward mode (torch.func.jvp) and torch.vmap work in the same way. torch.compile traces no Function with a rule
for forward mode, so there are two classes of each.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_quant import kernels
from hf_quant.algorithms import PackedWeight
from hf_quant.kernels import grouped_mm, grouped_mm_backward, weight_only_mm_backward
from hf_quant.kernels.cpu import find_ready
from hf_quant.kernels.dispatch import direct, is_plain
from hf_quant.kernels.gpu.ready import ready_product as ready_product_on_gpu
from hf_quant.modules._stored import STORED_NAMES
from hf_quant.modules.inputs.rows import quantized_rows, shared_rotation
from hf_quant.modules.ready import make_ready
from hf_quant.modules.rotation import signs


if TYPE_CHECKING:
    from hf_quant.modules._base import QuantizedModule


weight_only_mm = direct(kernels.weight_only_mm)
dynamic_mm = direct(kernels.dynamic_mm)
quantized_mm = direct(kernels.quantized_mm)
# Names of this module are found faster than attributes of others.
_is_compiling, _is_any_autocast = torch.compiler.is_compiling, torch._C._is_any_autocast_enabled
_OPTIONAL_PARTS = STORED_NAMES[2:]  # zero_point, global_scale, input_scale


def needs_grad(x: Tensor, bias: Tensor | None) -> bool:
    """True if autograd, in reverse or forward mode, has to see a product of x and frozen codes."""
    if forward_ad._current_level >= 0:  # a tangent does not show in requires_grad
        return True
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    offsets: Tensor | None = None,
    diagonal: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    activation: str | None,
    format: str,
    group_size: int,
) -> Tensor:
    """x [..., K] @ dequant(packed [N, K]).T + bias [N] -> [..., N] in x's dtype; differentiable in x and bias.

    With `offsets`: x [M, K] sorted by expert, packed [E, N, K], bias [E, N] -> [M, N], see `grouped_mm`. With
    `diagonal` [K / b, b] x is rotated first, see `rotation`; with `input_scale` [1] quantized with that scale. Without
    a gradient x is rotated and quantized once for all layers that read it, see `inputs.rows`.
    """
    if needs_grad(x, bias):
        function = _Linear if torch.compiler.is_compiling() else _ForwardLinear
        return function.apply(x, bias, offsets, diagonal, *packed, input_scale, activation, format, group_size)
    return _product(x, packed, bias, offsets, diagonal, input_scale, activation, format, group_size)


def _product(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    offsets: Tensor | None,
    diagonal: Tensor | None,
    input_scale: Tensor | None,
    activation: str | None,
    format: str,
    group_size: int,
) -> Tensor:
    """Compute `linear` without a gradient."""
    options = {"format": format, "group_size": group_size}
    if offsets is not None:
        return grouped_mm(x, *packed, bias, offsets, diagonal, input_scale, activation=activation, **options)
    shares = not torch.compiler.is_compiling()
    if activation is None:
        found = shared_rotation(x, diagonal, packed.qdata) if shares and diagonal is not None else None
        if found is not None:
            return weight_only_mm(found, *packed, bias, **options)
        return weight_only_mm(x, *packed, bias, diagonal, **options)
    rows = quantized_rows(x, activation, diagonal, input_scale, packed.qdata) if shares else None
    if rows is not None:
        return quantized_mm(*rows, *packed, bias, out_dtype=x.dtype, **options)
    return dynamic_mm(x, *packed, bias, diagonal, input_scale, activation=activation, **options)


def layer_product(
    module: "QuantizedModule", x: Tensor, bias: Tensor | None, parameters: dict[str, Tensor | None]
) -> Tensor:
    """x [..., K] @ weight.T + bias, under autocast in its dtype; `parameters` hold the weight, its own or another.

    Without gradients, subclasses or tracers in sight a product that an earlier call has made ready is used: on a CPU
    a small layer takes as long as nn.Linear then (`bench_overhead.py`).
    """
    is_compiling = _is_compiling()
    is_autocast = is_compiling or _is_any_autocast()
    is_eager = not is_compiling and is_plain(x) and not needs_grad(x, bias)
    if is_eager and not is_autocast:
        ready = module._ready.get(x.dtype)
        if ready is not None and (y := ready(x, bias, parameters)) is not None:
            return y
    K, scheme = x.shape[-1], module.scheme
    # Packed codes cannot tell: rows of 161 to 192 take as many words.
    if K != module._weight_shapes["weight"][module._input_dim]:
        module.refuse_width(x)
    format, transform = scheme.weight.format, scheme.input_transform
    if is_autocast and torch.is_autocast_enabled(x.device.type):
        x = autocast(x, x.device.type)
    diagonal = None if transform is None else signs(transform, K, x.device)
    activation = scheme.activation_on(x.device.type)
    if is_eager:
        held = dict(parameters) if x.is_cpu else parameters  # another thread may replace them meanwhile
        weight = (held["qdata"], held["scale"], *map(held.get, _OPTIONAL_PARTS))
        y = None
        if x.is_cpu:
            found = find_ready(x.dtype, weight, format, activation, diagonal)
            y = None if found is None else found.product(x, weight[0], bias)
            if y is not None and found.is_native and parameters is module._parameters:
                make_ready(module, x, held, found.run)
        elif activation is None and diagonal is None:
            y = ready_product_on_gpu(x, bias, weight, format)
        if y is not None:
            return y
    packed, group_size = module.typed("weight", parameters), scheme.weight.columns_per_scale(K)
    options = {"activation": activation, "format": format, "group_size": group_size}
    return linear(x, packed, bias, None, diagonal, module.static_scale("weight", parameters), **options)


def rows_product(module: "QuantizedModule", codes: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`layer_product` for an input [..., K] that is rotated and quantized, its result in `dtype`."""
    quant = module.scheme.weight
    options = {"format": quant.format, "group_size": quant.columns_per_scale(codes.shape[-1]), "out_dtype": dtype}
    return quantized_mm(codes, row_scale, *module.packed(), module._parameters["bias"], **options)


def autocast(x: Tensor, device_type: str) -> Tensor:
    """Cast x to the dtype of autocast; float64 stays."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device_type))


def _transposed(
    grad: Tensor,
    packed: PackedWeight,
    offsets: Tensor | None,
    diagonal: Tensor | None,
    format: str,
    group_size: int,
    K: int,
) -> Tensor:
    """grad [..., N] @ dequant(packed [N, K]) -> [..., K] in grad's dtype, rotated back; differentiable in grad."""
    if needs_grad(grad, None):
        function = _Transposed if torch.compiler.is_compiling() else _ForwardTransposed
        return function.apply(grad, offsets, diagonal, *packed, format, group_size, K)
    return _transposed_product(grad, packed, offsets, diagonal, format, group_size, K)


def _transposed_product(
    grad: Tensor,
    packed: PackedWeight,
    offsets: Tensor | None,
    diagonal: Tensor | None,
    format: str,
    group_size: int,
    K: int,
) -> Tensor:
    """Compute `_transposed` without a gradient."""
    options = {"format": format, "group_size": group_size, "K": K}
    if offsets is not None:
        y = grouped_mm_backward(grad, *packed, offsets, **options)
    else:
        y = weight_only_mm_backward(grad, *packed, **options)
    if diagonal is None:
        return y
    return kernels.hadamard(y, block_size=diagonal.shape[1]) * diagonal.view(-1).to(y.dtype)


class _Linear(torch.autograd.Function):
    """`linear` as autograd sees it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, bias, offsets, diagonal, qdata, scale, zero_point, global_scale, *how):
        packed = PackedWeight(qdata, scale, zero_point, global_scale)
        y = _product(x, packed, bias, offsets, diagonal, *how)
        # A view that leaves a Function cannot be changed in place, as AdaLoRA does (`result += ...`).
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, bias, *tensors, _, _, ctx.format, ctx.group_size = inputs
        ctx.x_shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        offsets, diagonal, *packed = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            options = (ctx.format, ctx.group_size, ctx.x_shape[-1])
            grad_x = _transposed(grad, PackedWeight(*packed), offsets, diagonal, *options)
        if ctx.needs_input_grad[1]:
            grad_bias = _sum_rows(grad, offsets).to(ctx.bias_dtype)
        return grad_x, grad_bias, *[None] * 10


class _ForwardLinear(_Linear):
    """`_Linear` with a rule for forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _Linear.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[2:-4])

    @staticmethod
    def jvp(ctx, tangent, bias_tangent, *_):
        offsets, diagonal, *packed = ctx.saved_tensors
        if tangent is None:  # the bias alone has one
            tangent = bias_tangent.new_zeros(ctx.x_shape)
        options = {"activation": None, "format": ctx.format, "group_size": ctx.group_size}
        return linear(tangent, PackedWeight(*packed), bias_tangent, offsets, diagonal, **options)


class _Transposed(torch.autograd.Function):
    """`_transposed` as autograd sees it; its own gradient is `linear` without a bias."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad, offsets, diagonal, qdata, scale, zero_point, global_scale, format, group_size, K):
        packed = PackedWeight(qdata, scale, zero_point, global_scale)
        return _transposed_product(grad, packed, offsets, diagonal, format, group_size, K)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, *tensors, ctx.format, ctx.group_size, ctx.K = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        offsets, diagonal, *packed = ctx.saved_tensors
        options = {"activation": None, "format": ctx.format, "group_size": ctx.group_size}
        y = linear(grad, PackedWeight(*packed), None, offsets, diagonal, **options)
        return y, *[None] * 9


class _ForwardTransposed(_Transposed):
    """`_Transposed` with a rule for forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _Transposed.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:-3])

    @staticmethod
    def jvp(ctx, tangent, *_):
        offsets, diagonal, *packed = ctx.saved_tensors
        return _transposed(tangent, PackedWeight(*packed), offsets, diagonal, ctx.format, ctx.group_size, ctx.K)


def _sum_rows(grad: Tensor, offsets: Tensor | None) -> Tensor:
    """Gradient of a bias in fp32: [..., N] -> [N], or with `offsets` [M, N] -> [E, N]."""
    if offsets is None:
        return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
    rows = torch.arange(grad.shape[0], dtype=offsets.dtype, device=grad.device)
    expert = torch.searchsorted(offsets, rows, right=True)  # E for rows of no expert
    sums = grad.new_zeros(offsets.shape[0] + 1, grad.shape[1], dtype=torch.float32)
    return sums.index_add(0, expert, grad.float())[:-1]
