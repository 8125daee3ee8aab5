"""`requantize_rows_` on CPUs, by the native kernel."""

from torch import Tensor

from hf_quant.kernels import native
from hf_quant.kernels.dispatch import implements
from hf_quant.kernels.requantize import op


@implements(op.requantize_rows_, "CPU")
def requantize_rows__cpu(
    codes: Tensor, scale: Tensor, values: Tensor, *, low: int | None = None, high: int = 0, row: int = 0
) -> None:
    """Compute `requantize_rows__reference`, bit for bit."""
    op.check(codes, scale, values)
    if not native.requantize_rows_(codes, scale, values, low=low, high=high, row=row):
        op.requantize_rows__reference(codes, scale, values, low=low, high=high, row=row)
