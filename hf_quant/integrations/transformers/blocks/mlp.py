"""A feed-forward block as one native call: down(act(gate(x)) * up(x)), or down(act(up(x)))."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    QUANTIZED,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    add_product,
    as_part,
    check_read,
    difference,
    host_class,
    outputs_of,
    random_rows,
    rows_given,
    width_of,
)
from hf_quant.integrations.transformers.blocks.norm import NormBlock
from hf_quant.kernels.native.blocks import Block


_FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
_ACTS = ("act_fn", "activation_fn", "act", "activation", "hidden_act_fn", "gelu_impl")
_LAST_NORM = "ffn_sub_norm"  # before the last layer (BitNet)
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_JOINED = (("gate_up_proj", "down_proj"),)
_PLAIN = (
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("fc_in", "fc_out"),
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("wi", "wo"),
)


def is_mlp(module: nn.Module, linear: Classes = QUANTIZED) -> bool:
    """True if a module has layers of a class, named as in a feed-forward block; a trial shows what it computes."""
    found = _layers(module, linear)
    return found is not None and (found[0] == "gated" or _act_of(module) is not None)


def is_only_mlp(module: nn.Module, linear: Classes = QUANTIZED) -> bool:
    """True if a module may be no more than a feed-forward block: nothing else in it has parameters."""
    others = {name: child for name, child in module._modules.items() if not isinstance(child, linear)}
    rest = [child for name, child in others.items() if child is not None and name != _LAST_NORM]
    return is_mlp(module, linear) and not any(True for child in rest for _ in child.parameters())


def _layers(module: nn.Module, linear: Classes = QUANTIZED) -> tuple[str, tuple[nn.Module, ...]] | None:
    linears = {name: child for name, child in module._modules.items() if isinstance(child, linear)}
    for kind, found in (("gated", _GATED), ("joined", _JOINED), ("plain", _PLAIN)):
        for names in found:
            if set(names) == set(linears):
                return kind, tuple(linears[name] for name in names)
    return None


def _act_of(module: nn.Module) -> Any:
    return next((act for name in _ACTS if callable(act := getattr(module, name, None))), None)


def activation_of(module: nn.Module) -> str:
    """The name of the activation function of a module. Raises Unproven."""
    return named(_act_of(module) or F.silu, type(module).__name__)  # LFM2's has none


def named(act: Any, owner: str) -> str:
    """The name of an activation function of a module of the class `owner`. Raises Unproven."""
    x = torch.linspace(-8, 8, 1001, dtype=torch.float32)
    y = act(x)
    for name, function in _FUNCTIONS.items():
        if isinstance(y, Tensor) and torch.allclose(y, function(x), rtol=1e-5, atol=1e-5):
            return name
    raise Unproven(f"the activation function of {owner} is none that hf_quant knows")


def takes_more(module: nn.Module | None) -> bool:
    """True if a module's forward takes more than x: BLOOM's adds the residual."""
    return len(inspect.signature(host_class(module).forward).parameters) > 2


class MLPBlock:
    """The native block of a feed-forward block for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, is_part: bool = False) -> None:
        """Make it of a module. Not tried if that does more, `is_part`: then it is tried as a part of its layer."""
        found = _layers(module)
        if found is None:
            raise Unproven("its layers were replaced")
        self.watch, self.activation = Watch(module), activation_of(module)
        self.kind, self.layers = found
        self.K, self.N = width_of(self.layers[0]), outputs_of(self.layers[-1])
        last = module._modules.get(_LAST_NORM)
        self.last_norm = None if last is None else as_part(NormBlock, last, dtype, width_of(self.layers[-1]))
        self.block = Block(dtype, self.K, self.N)
        self.add_to(self.block, 0, 1)
        self.block.finish()
        if is_part:
            return
        check_read(module, *self.layers, last)
        probe = random_rows(1, 2, self.K, dtype=dtype)
        error = difference(self(probe), host_class(module).forward(module, probe))
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} computes something else: off by {error:.3g} roundings")

    def add_to(self, block: Block, x: int, to: int) -> None:
        """Add the steps to a block."""
        first, last = self.layers[0], self.layers[-1]
        width = width_of(last)
        gate = block.buffer(width)
        up = None if self.kind == "plain" else block.buffer(width)
        if self.kind == "joined":
            add_product(block, x, gate, first, slice(0, width))
            add_product(block, x, up, first, slice(width, 2 * width))
        else:
            add_product(block, x, gate, first)
            if up is not None:
                add_product(block, x, up, self.layers[1])
        block.gate(gate, up, gate, self.activation)
        if self.last_norm is not None:
            self.last_norm.add_to(block, gate, gate)
        add_product(block, gate, to, last)

    def __call__(self, x: Tensor) -> Tensor:
        return self.block.of_rows(x, x.new_empty(*x.shape[:-1], self.N))


def run_mlp(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The output for x [..., K], None where the host has to compute it."""
    x = rows_given(args, kwargs, MAX_ROWS)
    if x is None or module.training:
        return None
    block = state.block(module, x.dtype, lambda: MLPBlock(module, x.dtype))
    return None if block is None or block.K != x.shape[-1] else block(x)
