"""The product of a linear layer in low-bit training, and its two gradients, each in 8 bits or in 16.

y = Q(x) Q(w)', the gradient of x is Q(g) Q(w), that of w is Q(g)' Q(x); the three sum over K, N and M, and Q has one
scale for each row of its operand (column, where the operand is transposed) or one for all. Gradients pass through the
roundings unchanged. The codes of x by columns, not x, are kept for the backward pass. Fused experts are the same with
one matrix for each group of rows, in grouped products.
"""

import threading
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_quant.coded_weight import CodedWeight
from hf_quant.kernels import (
    fp8_scaled_mm,
    grouped_scaled_mm,
    grouped_scaled_sums,
    int8_scaled_mm,
    quantize_two_way,
)
from hf_quant.kernels.dispatch import is_plain, is_transformed
from hf_quant.kernels.two_way.op import filled_up


Codes = tuple[Tensor, Tensor, Tensor, Tensor]  # as `quantize_two_way` returns them


class Recipe(NamedTuple):
    """Formats and scales of the products.

    Attributes:
        format: of inputs and weights; None: 16 bit.
        gradient: format of the gradients of outputs.
        scaling: as in `quantize_two_way`.
        grad_weight: False: the gradient of the weight is always computed in 16 bits.
        is_ternary: weights are -1, 0 or 1 times the mean of their magnitudes.
        is_sparse: two weights in each four of a row are zero.
        is_stored: weights are int8 codes, which the optimizer changes; there are no 16-bit ones.
    """

    format: str | None
    gradient: str = ""
    scaling: str = ""
    grad_weight: bool = True
    is_ternary: bool = False
    is_stored: bool = False
    is_sparse: bool = False


RECIPES = {
    "int8": Recipe("int8", "int8", "row"),
    "int8_weights": Recipe("int8", "int8", "row", is_stored=True),
    "bitnet": Recipe("int8", "int8", "row", is_ternary=True),
    "fp8_tensor": Recipe("fp8_e4m3", "fp8_e5m2", "tensor"),
    "fp8_row": Recipe("fp8_e4m3", "fp8_e4m3", "power_of_two"),
    "fp8_row_gw16": Recipe("fp8_e4m3", "fp8_e4m3", "power_of_two", grad_weight=False),
    "sparse24": Recipe(None, is_sparse=True),
}


@torch.no_grad()
def weight_codes(weight: Tensor, recipe: Recipe) -> Codes:
    """The codes of a weight [N, K], or of experts' [E, N, K], under a recipe.

    Ternary ones are as in https://arxiv.org/abs/2402.17764, 2.
    """
    if isinstance(weight, CodedWeight):
        codes, scale = weight.codes, weight.scale
    elif recipe.is_ternary:
        scale = ternary_scale(weight.float().abs().mean((-2, -1), keepdim=True))
        codes, scale = ternary_codes(weight, scale), scale.expand(*weight.shape[:-1], 1).contiguous()
    else:
        return _two_way(weight, recipe)
    if recipe.is_ternary or recipe.scaling == "tensor":
        columns = codes.mT.contiguous()
        return codes, scale, columns, scale[..., :1, :].expand(*columns.shape[:-1], 1).contiguous()
    return codes, scale, *_two_way(weight.dequantized(), recipe)[2:]


def _two_way(weight: Tensor, recipe: Recipe) -> Codes:
    """`quantize_two_way` of a weight [N, K], or of each expert's in [E, N, K]."""
    options = {"format": recipe.format, "scaling": recipe.scaling}
    if weight.dim() == 2:
        return quantize_two_way(weight, **options)
    E, N, K = weight.shape
    ends, rows = torch.arange(N, E * N + 1, N, dtype=torch.int32, device=weight.device), filled_up(N)
    codes, scale, codes_t, scale_t = quantize_two_way(weight.reshape(-1, K), ends, **options)
    columns = codes_t[: E * K * rows].view(E, K, rows)[..., :N]
    return codes.view(E, N, K), scale.view(E, N, 1), columns, scale_t


def ternary_scale(mean: Tensor) -> Tensor:
    """The scale of a ternary weight with this mean of magnitudes."""
    return mean.clamp(min=1e-5)


def ternary_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """-1, 0 and 1, the nearest to weight / scale: int8."""
    return (weight.float() / scale).round().clamp(-1, 1).to(torch.int8)


def _check_transforms() -> None:
    """Raise ValueError inside of transforms of torch.func and in forward mode, for which there are no rules."""
    if not torch.compiler.is_compiling() and is_transformed():
        raise ValueError(
            "layers that train by products in 8 bits have gradients by backward() and torch.autograd.grad alone, not "
            "inside of torch.func (grad, vmap, jvp, ...) or forward mode: finish_training_ the model before these"
        )


def may_keep(x: Tensor) -> bool:
    """True if what is computed from a tensor now may serve a later call: nothing traces or captures this one."""
    if torch.compiler.is_compiling() or not is_plain(x) or x.is_inference():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class _Shared(threading.local):
    """The codes of the last input, which the layers that read the same tensor share."""

    def __init__(self) -> None:
        self.source: weakref.ref[Tensor] | None = None
        self.key: tuple[Any, ...] = ()
        self.codes: Codes | None = None

    def forget(self, source: "weakref.ref[Tensor]") -> None:
        if self.source is source:
            self.source = self.codes = None


_shared = _Shared()


@torch.no_grad()
def input_codes(source: Tensor, x: Tensor, recipe: Recipe, *, columns: bool) -> Codes:
    """The codes of an input x [..., K], made of `source` by a cast; one call for all that read it in a row."""

    def quantized() -> Codes:
        options = {"format": recipe.format, "scaling": recipe.scaling, "columns": columns}
        return quantize_two_way(x.reshape(-1, x.shape[-1]), **options)

    if not may_keep(source):
        return quantized()
    key = source._version, x.dtype, recipe.format, recipe.scaling, columns
    if _shared.source is None or _shared.source() is not source or _shared.key != key or _shared.codes is None:
        _shared.codes = quantized()
        _shared.source, _shared.key = weakref.ref(source, _shared.forget), key
    return _shared.codes


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: str,
    in_low_bits: tuple[bool, bool, bool],
    codes: Codes | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] -> [..., N] in x's dtype; differentiable, once, in all three.

    in_low_bits: whether the output, the gradient of x and the gradient of the weight are. `codes`: those of the weight
    now; None: they are computed. source: the tensor that x was cast from, by which products share the codes of x.
    """
    _check_transforms()
    output, grad_input, grad_weight = in_low_bits
    grad_weight = grad_weight and RECIPES[recipe].grad_weight
    columns = grad_weight and weight.requires_grad and torch.is_grad_enabled()
    of_x = None
    if output or columns:
        of_x = input_codes(x if source is None else source, x, RECIPES[recipe], columns=columns)
    return _Product.apply(x, weight, bias, recipe, output, grad_input, grad_weight, codes, of_x)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, name, output, grad_input, grad_weight, codes, of_x):
        recipe = RECIPES[name]
        rows = x.reshape(-1, x.shape[-1])
        needs_weight = ctx.needs_input_grad[1]
        if codes is None and (output or grad_input or recipe.is_ternary):
            codes = weight_codes(weight, recipe)
        columns = grad_weight and needs_weight
        dense = codes[0].to(x.dtype) * codes[1].to(x.dtype) if recipe.is_ternary else weight
        if output:
            y = _multiply(of_x[0], codes[0], of_x[1], codes[1], bias, x.dtype)
        else:
            y = F.linear(rows, dense.to(x.dtype), None if bias is None else bias.to(x.dtype))
        kept_weight = codes[2:] if grad_input else (dense,)
        kept_x = () if not needs_weight else of_x[2:] if columns else (rows,)
        ctx.save_for_backward(*kept_weight, *kept_x)
        ctx.recipe, ctx.grad_input, ctx.columns, ctx.shape = name, grad_input, columns, x.shape
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        # Not a view, of which `fully_shard` warns.
        return torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        recipe, saved = RECIPES[ctx.recipe], list(ctx.saved_tensors)
        of_weight = [saved.pop(0) for _ in range(2 if ctx.grad_input else 1)]
        rows = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_grad = None
        if (needs_x and ctx.grad_input) or ctx.columns:
            options = {"format": recipe.gradient, "scaling": recipe.scaling, "columns": ctx.columns}
            of_grad = quantize_two_way(rows, **options)
        grad_x = grad_weight = grad_bias = None
        if needs_x and ctx.grad_input:
            grad_x = _multiply(of_grad[0], of_weight[0], of_grad[1], of_weight[1], None, grad.dtype)
        elif needs_x:
            grad_x = rows @ of_weight[0].to(grad.dtype)
        if ctx.columns:
            grad_weight = _multiply(of_grad[2], saved[0], of_grad[3], saved[1], None, ctx.dtypes[0])
        elif needs_weight:
            grad_weight = (rows.t() @ saved[0]).to(ctx.dtypes[0])
        if needs_bias:
            grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.dtypes[1])
        return None if grad_x is None else grad_x.view(ctx.shape), grad_weight, grad_bias, *(None,) * 6


def grouped_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, recipe: str, codes: Codes | None = None
) -> Tensor:
    """x [M, K], sorted by expert, @ weight [E, N, K] of each -> [M, N] in x's dtype; differentiable as `product`.

    Rows offsets[e - 1] to offsets[e] belong to expert e; those behind the last give zeros. bias: [E, N]. All three
    products are in low bits, and the host does not read how many rows an expert has.
    """
    _check_transforms()
    return _GroupedProduct.apply(x, weight, bias, offsets, recipe, codes)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, offsets, name, codes):
        recipe = RECIPES[name]
        codes = weight_codes(weight, recipe) if codes is None else codes
        options = {"format": recipe.format, "scaling": recipe.scaling, "columns": ctx.needs_input_grad[1]}
        of_x = quantize_two_way(x, offsets, **options)
        y = grouped_scaled_mm(of_x[0], codes[0], of_x[1], codes[1], bias, offsets, out_dtype=x.dtype)
        ctx.save_for_backward(offsets, *codes[2:], *of_x[2:])
        ctx.recipe, ctx.dtypes = name, (weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        recipe, (offsets, *saved), M = RECIPES[ctx.recipe], ctx.saved_tensors, len(grad)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x or needs_weight:
            options = {"format": recipe.gradient, "scaling": recipe.scaling, "columns": needs_weight}
            of_grad = quantize_two_way(grad, offsets, **options)
        if needs_x:
            grad_x = grouped_scaled_mm(of_grad[0], saved[0], of_grad[1], saved[1], None, offsets, out_dtype=grad.dtype)
        if needs_weight:
            how = {"M": M, "out_dtype": ctx.dtypes[0]}
            grad_weight = grouped_scaled_sums(of_grad[2], saved[2], of_grad[3], saved[3], offsets, **how)
        if needs_bias:
            expert = torch.searchsorted(offsets, torch.arange(M, dtype=torch.int32, device=grad.device), right=True)
            of_expert = expert == torch.arange(len(offsets), device=grad.device)[:, None]
            grad_bias = (of_expert.float() @ grad.float()).to(ctx.dtypes[1])
        return grad_x, grad_weight, grad_bias, None, None, None


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    multiply = int8_scaled_mm if a.dtype == torch.int8 else fp8_scaled_mm
    return multiply(a, b, a_scale, b_scale, bias, out_dtype=dtype)
