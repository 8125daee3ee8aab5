"""`torch.ops.hf_quant` for programs that torch.export has saved: the ops are registered when one is looked up.

torch.compile imports torch's code for saved programs, too, in processes that never see a quantized layer: so that
import (see `_boot`) puts no more than this object there.
"""

from importlib import import_module
from typing import Any

import torch


class LazyOps:
    """Stands in for the namespace of our ops until the first look-up, which imports `hf_quant.kernels`."""

    def __getattr__(self, name: str) -> Any:
        vars(torch.ops).pop("hf_quant", None)  # torch makes its own at the next look-up
        import_module("hf_quant.kernels")
        return getattr(torch.ops.hf_quant, name)


def register() -> None:
    """Put the stand-in there, unless the namespace is in use already."""
    vars(torch.ops).setdefault("hf_quant", LazyOps())
