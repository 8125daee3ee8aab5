"""Averages of quantized models: torch's `AveragedModel` averages all parameters, and the mean of two codes is no code.

So integers of such a model, its codes and the bits of its scales, are copied from the model that is averaged.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import swa_utils

from hf_quant.modules._base import QuantizedModule


def copy_codes_in_averages() -> None:
    """Wrap `AveragedModel.update_parameters`. Further calls do nothing."""
    found = swa_utils.AveragedModel.update_parameters
    if not hasattr(found, "_copies_codes"):
        swa_utils.AveragedModel.update_parameters = _with_codes(found)


def _with_codes(host: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(host)
    def update_parameters(self: Any, model: nn.Module) -> None:
        host(self, model)
        if any(isinstance(m, QuantizedModule) or getattr(m, "is_in_training", False) for m in model.modules()):
            for mean, own in zip(self.module.parameters(), model.parameters()):
                if not own.is_floating_point():
                    mean.detach().copy_(own.detach())

    update_parameters._copies_codes = True  # pyrefly: ignore[missing-attribute]
    return update_parameters


copy_codes_in_averages()
