"""RMSNorm and LayerNorm as one native call."""

import re
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import (
    LINEAR,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    difference,
    host_class,
    random_rows,
    rows_given,
)
from hf_quant.kernels.native.blocks import Block


_NAMES = re.compile(r"(RMS|Layer)Norm(1P)?$")
_EPS = ("variance_epsilon", "eps", "epsilon")
_OPTIONS = ("plus_one", "rounds_weight", "rounds", "centers")
_SIZES = (1e-3, 0.03, 1.0, 30.0)  # of the rows of a trial: eps counts for the small ones


def is_norm(module: nn.Module, linear: Classes = LINEAR) -> bool:
    """True if a module may be an RMSNorm or a LayerNorm of rows; a trial shows what it computes.

    It has a weight and a bias at most.
    """
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    is_named = bool(_NAMES.search(type(module).__name__)) or getattr(module, "kernel_layer_name", None) == "RMSNorm"
    is_named = is_named and set(parameters) <= {"weight", "bias"} and not module._modules
    return is_named and all(p.dim() == 1 for p in parameters.values())


def is_slow_norm(module: nn.Module, linear: Classes = LINEAR) -> bool:
    """True for a norm, unless torch computes it in one call."""
    return is_norm(module, linear) and not isinstance(module, nn.LayerNorm)


def _eps_of(module: nn.Module) -> float:
    found = [value for name in _EPS if isinstance(value := getattr(module, name, None), float)]
    return found[0] if found else 1e-5  # OLMo's has it in its code


class NormBlock:
    """The native block of a norm of rows of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, width: int) -> None:
        self.watch, self.width, self.dtype = Watch(module), width, dtype
        self.weight, self.bias = (module._parameters.get(name) for name in ("weight", "bias"))
        self.eps = _eps_of(module)
        probe = torch.cat([random_rows(1, 1, width, dtype=dtype, seed=i) * size for i, size in enumerate(_SIZES)])
        probe = probe.to(dtype)
        expected = host_class(module).forward(module, probe)
        weights = ((False, False), (True, False), (True, True))  # plus_one, rounds_weight
        ways = [dict(zip(_OPTIONS, (*w, *way))) for w, *way in product(weights, (True, False), (False, True))]
        errors = []
        for self.options in ways:
            self._make()
            errors.append(max(difference(own, row) for own, row in zip(self(probe).unbind(), expected.unbind())))
        best = min(errors)
        self.options = ways[errors.index(best)]
        if not best <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} is no norm that hf_quant knows: off by {best:.3g} roundings")
        self._make()

    def _make(self) -> None:
        self.block = Block(self.dtype, self.width, self.width)
        self.add_to(self.block, 0, 1)
        self.block.finish()

    def add_to(self, block: Block, x: int, to: int) -> None:
        """Add the norm to a block."""
        block.norm(x, to, self.weight, self.bias, self.eps, **self.options)

    def __call__(self, x: Tensor) -> Tensor:
        return self.block.of_rows(x, torch.empty_like(x))


def run_norm(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The norm of x [..., width], None where the host has to compute it."""
    x = rows_given(args, kwargs)
    if x is None:
        return None
    width = x.shape[-1]
    block = state.block(module, x.dtype, lambda: NormBlock(module, x.dtype, width))
    return None if block is None or block.width != width else block(x)
