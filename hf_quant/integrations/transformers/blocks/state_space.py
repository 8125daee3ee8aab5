"""Selective state spaces, one native call for the new tokens: the mixers of Mamba, Mamba-2 and their hybrids.

Mamba (https://arxiv.org/abs/2312.00752) has a decay for each channel and state: Mamba, FalconMamba and Jamba. Mamba-2
(https://arxiv.org/abs/2405.21060) has one for each head: Mamba-2, Bamba, Granite 4.0, Nemotron-H and Zamba2.
"""

from itertools import product
from math import inf
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_quant.integrations.transformers.blocks.base import Classes, State, Unproven, add_product
from hf_quant.integrations.transformers.blocks.mlp import named
from hf_quant.integrations.transformers.blocks.norm import _eps_of
from hf_quant.integrations.transformers.blocks.recurrent import Mixer, States, add_small, run_mixer, taps_of
from hf_quant.kernels.native.blocks import Block, max_head_dim


_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def is_state_space(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of Mamba-2's mixer, by their names; a trial shows what it computes."""
    return _has(module, {"conv1d", "norm"}, ("in_proj", "out_proj"), {"A_log", "dt_bias", "D"}, linear)


def is_selective_state(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of Mamba's mixer, by their names; a trial shows what it computes."""
    layers = ("in_proj", "x_proj", "out_proj")
    others = {"conv1d", "dt_proj", *(name for name in _NORMS if name in module._modules)}
    return _has(module, others, layers, {"A_log", "D"}, linear)


def _has(module: nn.Module, others: set[str], layers: tuple[str, ...], parameters: set[str], linear: Classes) -> bool:
    children = module._modules
    if set(children) - {"act"} != {*others, *layers} or not parameters <= set(module._parameters):
        return False
    return all(isinstance(children[name], linear) for name in layers) and hasattr(module, "layer_idx")


class _StateMixer(Mixer):
    """Base of both kinds."""

    serves_prompts = True

    def _read_common(self, module: nn.Module) -> None:
        """Find the layers and the convolution."""
        self.layers = children = dict(module._modules)
        self.K, self.inner = children["in_proj"].in_features, children["out_proj"].in_features
        self.width = children["conv1d"].in_channels
        self.taps, self.bias = taps_of(children["conv1d"], self.width, self.dtype)
        self.activation = named(ACT2FN[module.activation], type(module).__name__)
        self.decay, self.skip = module.A_log, module.D
        if children["out_proj"].out_features != self.K:
            raise Unproven("its output is of another width")
        # Hosts keep the time steps of prompts within limits, not those of one token.
        self.serves_prompts = tuple(getattr(module, "time_step_limit", (0, inf))) == (0, inf)

    def next_tokens(self, past: Any, B: int, count: int) -> States | None:
        """The states of `Mixer.next_tokens`, but None for prompts that the block does not compute."""
        return super().next_tokens(past, B, count) if count == 1 or self.serves_prompts else None

    def _check_sizes(self, head_dim: int, state_size: int, *parts: Tensor | None) -> None:
        """Raise Unproven if the native kernel does not serve heads of these sizes, or cannot read these parts."""
        if max(head_dim, state_size) > max_head_dim() or state_size % 16:
            raise Unproven(f"its heads are of other sizes: {head_dim} x {state_size}")
        if any(part is not None and not (part.is_cpu and part.is_contiguous()) for part in parts):
            raise Unproven("its parameters lie otherwise")


class StateSpace(_StateMixer):
    """The native block of a mixer with one decay for each head, for x of one dtype."""

    def _read(self, module: nn.Module) -> None:
        self._read_common(module)
        self.time_bias, self.groups = module.dt_bias, module.n_groups
        heads = len(self.decay)
        states = (self.width - self.inner) // 2
        self.head_dim, self.state_size = self.inner // heads, states // self.groups
        self.shape = (heads, self.head_dim, self.state_size)
        sizes = (
            heads * self.head_dim,
            self.groups * self.state_size * 2 + self.inner,
            2 * self.inner + 2 * states + heads,
        )
        if sizes != (self.inner, self.width, self.layers["in_proj"].out_features) or heads % self.groups:
            raise Unproven("its layers are of other widths")
        self.norm_weight = self.layers["norm"]._parameters.get("weight")
        if self.decay.dim() != 1 or self.norm_weight is None or self.norm_weight.shape != (self.inner,):
            raise Unproven("its decays or its norm are of another kind")
        self._check_sizes(self.head_dim, self.state_size, self.decay, self.time_bias, self.skip)

    def _ways(self) -> list[Any]:
        return [*product({1: None, self.groups: None}, (True, False))]

    def add_to(self, block: Block, x: int, to: int) -> None:
        (parts, gates_first), layers, inner, width = self.way, self.layers, self.inner, self.width
        z, values, step = block.buffer(inner), block.buffer(width), block.buffer(len(self.decay))
        y, first, last = block.buffer(inner), slice(inner), slice(inner + width, None)
        for to_part, rows in ((z, first), (values, slice(inner, inner + width)), (step, last)):
            add_product(block, x, to_part, layers["in_proj"], rows)
        block.convolve(values, values, 1, self.taps, self.bias, self.activation)
        sizes = {"head_dim": self.head_dim, "state_size": self.state_size, "groups": self.groups, "first": inner}
        tensors = {"log_decay": self.decay, "time_bias": self.time_bias, "skip": self.skip}
        block.scan(values, step, values, y, 2, **sizes, **tensors)
        if gates_first:
            block.gate(z, y, y, "silu", rounds=False)
        self._add_norm(block, y, parts)
        if not gates_first:
            block.gate(z, y, y, "silu", rounds=False)
        add_product(block, y, to, layers["out_proj"])

    def _add_norm(self, block: Block, y: int, parts: int) -> None:
        """Add RMSNorm of each of so many parts of y."""
        size, weight, eps = self.inner // parts, self.norm_weight, _eps_of(self.layers["norm"])
        if parts == 1:
            _norm(block, y, weight, eps)
            return
        part = block.buffer(size)
        for first in range(0, self.inner, size):
            columns = slice(first, first + size)
            _norm_part(block, y, self.inner, part, columns, weight[columns], eps)


class SelectiveState(_StateMixer):
    """The native block of a mixer with a decay for each channel and state, for x of one dtype."""

    def _read(self, module: nn.Module) -> None:
        self._read_common(module)
        self.rank, self.state_size = self.layers["dt_proj"].in_features, self.decay.shape[-1]
        self.shape = (self.inner, self.state_size)
        self.time_bias = self.layers["dt_proj"]._parameters["bias"]
        outputs = [self.layers[name].out_features for name in ("in_proj", "x_proj", "dt_proj")]
        if outputs != [2 * self.inner, self.rank + 2 * self.state_size, self.inner] or self.width != self.inner:
            raise Unproven("its layers are of other widths")
        if self.decay.shape != self.shape:
            raise Unproven("its decays are of another kind")
        self._check_sizes(1, self.state_size, self.decay, self.time_bias, self.skip)

    def next_tokens(self, past: Any, B: int, count: int) -> States | None:
        """The states of `Mixer.next_tokens`, but None for several later tokens: hosts forget the state before them."""
        found = super().next_tokens(past, B, count)
        return found if found is None or found.are_new or count == 1 else None

    def add_to(self, block: Block, x: int, to: int) -> None:
        layers, inner, states = self.layers, self.inner, self.state_size
        values, z, low, both, y = (block.buffer(width) for width in (inner, inner, self.rank, 2 * states, inner))
        add_product(block, x, values, layers["in_proj"], slice(inner))
        add_product(block, x, z, layers["in_proj"], slice(inner, None))
        block.convolve(values, values, 1, self.taps, self.bias, self.activation)
        add_product(block, values, low, layers["x_proj"], slice(self.rank))
        add_product(block, values, both, layers["x_proj"], slice(self.rank, None))
        if "dt_layernorm" in layers:
            self._add_norms(block, low, both)
        sizes = {"head_dim": 1, "state_size": states, "groups": 1, "first": 0}
        tensors = {"log_decay": self.decay, "time_bias": self.time_bias, "skip": self.skip}
        step = add_small(block, low, layers["dt_proj"], inner, has_bias=False)
        block.scan(values, step, both, y, 2, **sizes, **tensors)
        block.gate(z, y, y, "silu")
        add_product(block, y, to, layers["out_proj"])

    def _add_norms(self, block: Block, low: int, both: int) -> None:
        """Add the norms of what the steps are made of, and of B and C."""
        size, (dt, *norms) = self.state_size, (self.layers[name] for name in _NORMS)
        _norm(block, low, self._weight_of(dt, self.rank), _eps_of(dt))
        part = block.buffer(size)
        for first, norm in zip((0, size), norms):
            columns = slice(first, first + size)
            _norm_part(block, both, 2 * size, part, columns, self._weight_of(norm, size), _eps_of(norm))

    def _weight_of(self, norm: nn.Module, width: int) -> Tensor | None:
        """The weight of a norm, None if it has none, as FalconMamba's, which have buffers in place of it."""
        weight = norm._parameters.get("weight")
        if weight is not None and weight.shape != (width,):
            raise Unproven("its norms are of other widths")
        return weight


def _norm(block: Block, x: int, weight: Tensor | None, eps: float) -> None:
    """Add RMSNorm of x, in place."""
    block.norm(x, x, weight, None, eps, plus_one=False, rounds_weight=False, rounds=True, centers=False)


def _norm_part(block: Block, x: int, width: int, part: int, columns: slice, weight: Tensor | None, eps: float) -> None:
    """Add RMSNorm of some columns of x [M, width], in place; `part`: a buffer of as many."""
    size = columns.stop - columns.start
    block.pick(x, part, columns, group=width)
    _norm(block, part, weight, eps)
    block.pick(part, x, slice(0, size), group=size, column=columns.start)


def run_state_space(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The module's output for the new tokens of each sequence, None where the host has to compute it."""
    return run_mixer(StateSpace, module, state, args, kwargs)


def run_selective_state(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The module's output for the new tokens of each sequence, None where the host has to compute it."""
    return run_mixer(SelectiveState, module, state, args, kwargs)
