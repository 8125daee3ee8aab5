"""`quantize_two_way` on CPUs: int8 by the native kernel, fp8, which no CPU multiplies, as the reference does it."""

from functools import partial

from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.two_way import op


@implements(op.quantize_two_way, "CPU")
def quantize_two_way_cpu(
    x: Tensor, offsets: Tensor | None = None, *, format: str, scaling: str = "row", columns: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `quantize_two_way_reference`, bit for bit."""
    op.check(x, offsets, format, scaling)
    if offsets is not None:
        quantize = partial(quantize_two_way_cpu, format=format, scaling=scaling, columns=columns)
        return op.by_groups(x, offsets, quantize, format=format, columns=columns)
    found = native.quantize_two_way(x.detach(), columns=columns) if format == "int8" and scaling == "row" else None
    return (
        op.quantize_two_way_reference(x, format=format, scaling=scaling, columns=columns) if found is None else found
    )
