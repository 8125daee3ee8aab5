"""Steps of AdamW by the extension, and int8 weights that they change: `adam_step_` and `requantize_rows_`."""

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from hf_quant.kernels.native.arguments import DTYPES
from hf_quant.kernels.native.extension import active, module


_STATES = ("fp32", "bf16", "int8", "fp8", "int4")  # in the order of AdamStates


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    origins: Tensor,
    *,
    states: str,
    factors: Tensor,
    step: int,
    seed: int | None,
) -> None:
    """Make a step of each parameter, checked by the caller; factors: fp32 [8], the op's `Coefficients`."""
    threads = torch.get_num_threads()
    all_scales = zip(exp_avg_scales, exp_avg_sq_scales) if exp_avg_scales else repeat(None)
    for p, g, m, v, scales, (stream, row, column) in zip(
        params, grads, exp_avgs, exp_avg_sqs, all_scales, origins.tolist()
    ):
        module.adam_step(
            *p.shape,
            *(p.data_ptr(), DTYPES[p.dtype], g.data_ptr(), DTYPES[g.dtype], _STATES.index(states)),
            *(m.data_ptr(), v.data_ptr(), *((0, 0) if scales is None else (s.data_ptr() for s in scales))),
            *(row, column, seed is not None, ((seed or 0) + stream) & 0xFFFFFFFF, step & 0xFFFFFFFF),
            *(factors.data_ptr(), threads),
        )


def requantize_rows_(codes: Tensor, scale: Tensor, values: Tensor, *, low: int | None, high: int, row: int) -> bool:
    """Write values into codes and scales, checked by the caller, as `requantize_rows_` does; False: not here."""
    if active() is None or not hasattr(module, "requantize_rows"):
        return False
    key = ((low or 0) & 0xFFFFFFFF, high & 0xFFFFFFFF)
    addresses = (codes.data_ptr(), scale.data_ptr(), values.data_ptr())
    module.requantize_rows(*codes.shape, *addresses, row, low is not None, *key, torch.get_num_threads())
    return True
