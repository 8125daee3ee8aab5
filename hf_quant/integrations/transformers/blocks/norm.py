"""RMSNorm as one native call."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import (
    TOLERANCE,
    State,
    Unproven,
    Watch,
    difference,
    is_served,
    random_rows,
)
from hf_quant.kernels.native.blocks import Block


_EPS = ("variance_epsilon", "eps", "epsilon")
_SIZES = (1e-3, 0.03, 1.0, 30.0)  # of the rows of a trial: eps counts for the small ones


def is_norm(module: nn.Module, linear: type[nn.Module] = nn.Linear) -> bool:
    """True if a module may be an RMSNorm: one weight at most, and an epsilon; a trial shows what it computes."""
    is_named = type(module).__name__.endswith("RMSNorm") or getattr(module, "kernel_layer_name", None) == "RMSNorm"
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    return is_named and names <= {"weight"} and not module._modules and _eps_of(module) is not None


def _eps_of(module: nn.Module) -> float | None:
    found = [value for name in _EPS if isinstance(value := getattr(module, name, None), float)]
    return found[0] if found else None


class NormBlock:
    """The native block of a norm of rows of one dtype."""

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype) -> None:
        self.watch, self.width, self.dtype = Watch(module), width, dtype
        self.weight, self.eps = getattr(module, "weight", None), _eps_of(module)
        host = type(module)._hf_quant_block_of if hasattr(type(module), "_hf_quant_block_of") else type(module)
        probe = torch.cat([random_rows(1, 1, width, dtype=dtype, seed=i) * size for i, size in enumerate(_SIZES)])
        probe = probe.to(dtype)
        expected = host.forward(module, probe)
        ways = [{"plus_one": plus_one, "rounds": rounds} for plus_one in (False, True) for rounds in (True, False)]
        errors = []
        for self.options in ways:
            self._make()
            errors.append(max(difference(own, row) for own, row in zip(self(probe).unbind(), expected.unbind())))
        best = min(errors)
        self.options = ways[errors.index(best)]
        if not best <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} is no RMSNorm that hf_quant knows: off by {best:.3g} roundings")
        self._make()

    def _make(self) -> None:
        self.block = Block(self.dtype, self.width, self.width)
        self.add_to(self.block, 0, 1)
        self.block.finish()

    def add_to(self, block: Block, x: int, to: int) -> None:
        """Add the norm to a block."""
        block.norm(x, to, self.weight, self.eps, **self.options)

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        self.block(x.numel() // self.width, x.data_ptr(), y.data_ptr())
        return y


def run_norm(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The norm of x [..., width], None where the host has to compute it."""
    if len(args) != 1 or kwargs:
        return None
    x = args[0]
    if not is_served(x) or not x.numel() or x.dtype not in TOLERANCE:
        return None
    width = x.shape[-1]
    block = state.block(module, x.dtype, lambda: NormBlock(module, width, x.dtype))
    return None if block is None or block.width != width else block(x)
