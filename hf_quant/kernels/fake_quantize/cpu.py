"""`fake_quantize` and its backward on CPUs, by the native kernels."""

from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.codes import CODES
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.fake_quantize import op


@implements(op.fake_quantize, "CPU")
def fake_quantize_cpu(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, *, format: str, group_size: int
) -> Tensor:
    """Compute `fake_quantize_reference`, bit for bit."""
    options = {"format": format, "group_size": group_size}
    op.check(weight, scale, zero_point, **options)
    if not native.fake_quantizes(weight, None, CODES[format]):
        return op.fake_quantize_reference(weight, scale, zero_point, **options)
    return native.fake_quantize(weight, scale, zero_point, None, CODES[format], group_size, op.bounds(format))[0]


@implements(op.fake_quantize_backward, "CPU")
def fake_quantize_backward_cpu(
    grad: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, *, format: str, group_size: int
) -> tuple[Tensor, Tensor]:
    """Compute `fake_quantize_backward_reference`, bit for bit."""
    options = {"format": format, "group_size": group_size}
    op.check(weight, scale, zero_point, **options, grad=grad)
    if not native.fake_quantizes(weight, grad, CODES[format]):
        return op.fake_quantize_backward_reference(grad, weight, scale, zero_point, **options)
    gradients = native.fake_quantize(weight, scale, zero_point, grad, CODES[format], group_size, op.bounds(format))
    assert gradients[1] is not None  # grad was given
    return gradients[0], gradients[1]
