"""Blocks on a GPU, in eager code: norms and activation functions in one launch each, products as they are.

Decoding on a GPU is bound by the host, which launches a kernel for each op of a module: eight for a norm. The ops of
`kernels.steps` take one. A block is made by a trial on the module's own device, and watched, as on CPUs (`base`); the
ways in which a host may round are told apart by the references of the ops, so that no kernel is compiled for the
others. While a CUDA graph is captured nothing is tried: the block that there is runs, or the host's module.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_quant import kernels
from hf_quant.integrations.transformers.blocks.base import (
    TOLERANCE,
    State,
    Unproven,
    Watch,
    difference,
    host_class,
    random_rows,
    width_of,
)
from hf_quant.integrations.transformers.blocks.mlp import _layers, activation_of
from hf_quant.integrations.transformers.blocks.norm import _SIZES, _eps_of
from hf_quant.kernels.dispatch import direct, is_plain
from hf_quant.kernels.steps.op import rms_norm_reference


_DEVICES = ("cuda", "xpu")
_Way = TypeVar("_Way")
rms_norm = direct(kernels.rms_norm)
add_rms_norm = direct(kernels.add_rms_norm)
gate = direct(kernels.gate)


def is_served(module: nn.Module, x: Any) -> bool:
    """True if a block may compute with x on its GPU: nothing records or changes what a host's ops do."""
    if "_is_replica" in module.__dict__:  # of nn.DataParallel, for one call, with the state of another module
        return False
    if not isinstance(x, Tensor) or x.device.type not in _DEVICES or x.dtype not in TOLERANCE or not is_plain(x):
        return False
    # Results of other inputs would lie in memory otherwise than the host's.
    return x.dim() > 0 and x.numel() > 0 and x.is_contiguous() and not torch.is_autocast_enabled(x.device.type)


def block_of(module: nn.Module, state: State, x: Tensor, make: Callable[[], Any]) -> Any:
    """The block of a module for x of its dtype and device, None if it has none; `make` as for `State.block`."""
    key = (x.device, x.dtype)
    found = state.held(key)
    return found if found is not None or is_capturing(x) else state.block(module, key, make)


def is_capturing(x: Tensor) -> bool:
    """True while a CUDA graph is captured, which no trial may be a part of."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_place(module: nn.Module, device: torch.device) -> None:
    """Raise Unproven unless kernels run on a device, and a module and its children have plain parameters there."""
    from hf_quant.kernels.gpu.launch import unavailable_reason

    reason = unavailable_reason(device)
    if reason is not None:
        raise Unproven(reason)
    for each in (module, *module.children()):
        for parameter in each._parameters.values():
            if parameter is not None and (parameter.device != device or not is_plain(parameter.data)):
                raise Unproven("a weight on another device, or a sharded one")


def closest(ways: list[_Way], error_of: Callable[[_Way], float]) -> _Way:
    """The first of the ways with the least error."""
    errors = [error_of(way) for way in ways]
    return ways[errors.index(min(errors))]


class GpuNorm:
    """The block of a norm of rows of one dtype and width."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, width: int, device: torch.device) -> None:
        self.watch, self.width = Watch(module), width
        self.weight, eps = getattr(module, "weight", None), _eps_of(module)
        check_place(module, device)
        rows = [random_rows(1, 1, width, dtype=torch.float32, seed=i) * size for i, size in enumerate(_SIZES)]
        probe = torch.cat(rows).to(device, dtype)
        expected = host_class(module).forward(module, probe)

        def error_of(found: Tensor) -> float:
            return max(difference(own, row) for own, row in zip(found.unbind(), expected.unbind()))

        ways = [{"plus_one": plus_one, "rounds": rounds} for plus_one in (False, True) for rounds in (True, False)]
        found = closest(ways, lambda way: error_of(rms_norm_reference(probe, self.weight, eps=eps, **way)))
        self.options = {"eps": eps, **found}
        error = error_of(self(probe))
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} is no RMSNorm that hf_quant knows: off by {error:.3g} roundings")

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, **self.options)

    def of_sum(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        """(x + more, its norm)."""
        return add_rms_norm(x, more, self.weight, **self.options)


class GpuMLP:
    """The block of a feed-forward block for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        found = _layers(module)
        if found is None:
            raise Unproven("its layers were replaced")
        self.watch, self.activation = Watch(module), activation_of(module)
        self.kind, self.layers = found
        self.K = width_of(self.layers[0])
        check_place(module, device)
        probe = random_rows(1, 2, self.K, dtype=dtype, device=device)
        error = difference(self(probe), host_class(module).forward(module, probe))
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} computes something else: off by {error:.3g} roundings")

    def __call__(self, x: Tensor) -> Tensor:
        layers, up = self.layers, None
        h = layers[0](x)
        if self.kind == "joined":
            h, up = h.chunk(2, -1)
        elif self.kind == "gated":
            up = layers[1](x)
        return layers[-1](gate(h, up, act=self.activation))


def run_norm(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The norm of x [..., width], None where the host has to compute it."""
    if len(args) != 1 or kwargs or not is_served(module, args[0]):
        return None
    x = args[0]
    width = x.shape[-1]
    block = block_of(module, state, x, lambda: GpuNorm(module, x.dtype, width, x.device))
    return None if block is None or block.width != width else block(x)


def run_mlp(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The output for x [..., K], None where the host has to compute it."""
    if len(args) != 1 or kwargs or module.training or not is_served(module, args[0]):
        return None
    x = args[0]
    block = block_of(module, state, x, lambda: GpuMLP(module, x.dtype, x.device))
    return None if block is None or block.K != x.shape[-1] else block(x)
