"""Averages of quantized models: torch's `AveragedModel` averages all parameters, and the mean of two codes is no code.

So integers of such a model, its codes and the bits of its scales, are copied from the model that is averaged.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import swa_utils

from hf_quant.coded_weight import CodedWeight
from hf_quant.modules._base import QuantizedModule


def copy_codes_in_averages() -> None:
    """Wrap `AveragedModel.update_parameters`. Further calls do nothing."""
    found = swa_utils.AveragedModel.update_parameters
    if not hasattr(found, "_copies_codes"):
        swa_utils.AveragedModel.update_parameters = _with_codes(found)


def _with_codes(host: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(host)
    def update_parameters(self: Any, model: nn.Module) -> None:
        if not any(isinstance(m, QuantizedModule) or getattr(m, "is_in_training", False) for m in model.modules()):
            host(self, model)
            return
        given = self.avg_fn, self.multi_avg_fn
        if self.multi_avg_fn is not None:
            self.multi_avg_fn = functools.partial(_average_floats, self.multi_avg_fn)
        elif self.avg_fn is None:  # which is faster by lists on accelerators, where integers cannot be divided
            self.avg_fn = swa_utils.get_swa_avg_fn()
        try:
            host(self, model)
        finally:
            self.avg_fn, self.multi_avg_fn = given
        for mean, own in zip(self.module.parameters(), model.parameters()):
            if not own.is_floating_point():
                mean.detach().copy_(own.detach())

    update_parameters._copies_codes = True  # pyrefly: ignore[missing-attribute]
    return update_parameters


def _average_floats(average: Callable[..., Any], means: list[Tensor], owns: list[Tensor], count: Any) -> None:
    """Average lists of one dtype by a function of the user's; of weights of int8 codes it gets the values."""
    if not means[0].is_floating_point():
        return
    values = [m.dequantized() if isinstance(m, CodedWeight) else m for m in means]
    average(values, [o.dequantized() if isinstance(o, CodedWeight) else o for o in owns], count)
    for mean, value in zip(means, values):
        if mean is not value:
            mean.copy_(value)


copy_codes_in_averages()
