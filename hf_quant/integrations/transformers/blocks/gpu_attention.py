"""Attention and layers on a GPU: norms of heads and rotary embedding of queries and keys in one launch.

Projections are the host's layers, with the product that they share; the cache takes keys and values by its own
`update`, and the host's attention function reads them. The trial is that of the native block (`attention`). In a layer
a sum and the norm of it are one launch; the blocks of its parts are those that the parts have by themselves.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kernels, kv_cache
from hf_quant.integrations.transformers.blocks.angles import fit, turned_by
from hf_quant.integrations.transformers.blocks.attention import POSITIONS, AttentionBlock
from hf_quant.integrations.transformers.blocks.attention_parts import is_attention, norms_of, width_of_norm
from hf_quant.integrations.transformers.blocks.base import (
    QUANTIZED,
    TOLERANCE,
    State,
    Unproven,
    Watch,
    difference,
    host_class,
    state_of,
)
from hf_quant.integrations.transformers.blocks.calls import TAKEN, implementation_of
from hf_quant.integrations.transformers.blocks.gpu import GpuMLP, GpuNorm, block_of, check_place, closest, is_served
from hf_quant.integrations.transformers.blocks.layer import (
    attention_of,
    feed_forward,
    name_of_attention,
    names_of_norms,
)
from hf_quant.integrations.transformers.blocks.mlp import is_mlp
from hf_quant.integrations.transformers.blocks.trial import Recorded, probe, record
from hf_quant.kernels.dispatch import direct
from hf_quant.kernels.steps.op import PAIRS, rotary_reference


rotary = direct(kernels.rotary)
_NO_NORM = {"eps": None, "plus_one": False, "norm_rounds": True}
_POSITION = 5  # of the trial of a layer


class GpuAttention(AttentionBlock):
    """The block of an attention module for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, turned: int, device: torch.device) -> None:
        check_place(module, device)
        self._read(module, dtype, turned, dtype)
        if self.is_gated:
            raise Unproven(f"{type(module).__name__} has gates")
        D = self.sizes.D
        norms = [GpuNorm(norm, dtype, width_of_norm(norm, D), device) for norm in norms_of(module)]
        # Norms of heads are a part of the launch, if those of queries and keys are alike; norms of rows are not.
        fuses = bool(norms) and all(norm.width == D and norm.options == norms[0].options for norm in norms)
        self.norms = [] if fuses else norms
        self.weights = [norm.weight if fuses else None for norm in norms] or [None, None]
        options = norms[0].options if fuses else None
        self.norm = _NO_NORM
        if options is not None:
            self.norm = {**options, "norm_rounds": options["rounds"]}
            del self.norm["rounds"]
        self.scale = self._prove_on(module, device)

    def _prove_on(self, module: nn.Module, device: torch.device) -> float:
        """Do what `_prove` does, on a GPU."""
        found, records = self._records(module, device, _positions(module))

        def error_of(turn: Callable[..., Any]) -> float:
            return max(self._error(turn, *trial[:3], of) for trial, of in zip(found, records))

        def with_turn(way: tuple[str, bool] | None) -> float:
            self.turn = way
            return error_of(rotary_reference)

        self.turn = closest([way for way in self.turns() if way is None or way[0] in PAIRS], with_turn)
        # What a host passes on to the attention function, it passes on as it is.
        self.passes = all("position_ids" in of.options for of in records)
        return self._scale_of(module, found, records, error_of(rotary))

    def _error(self, turn: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, of: Recorded) -> float:
        found = self.project(x, (cos, sin), turn)
        return max(difference(own.transpose(1, 2), theirs) for own, theirs in zip(found, (of.q, of.k, of.v)))

    def project(self, x: Tensor, angles: Any, turn: Callable[..., Any] = rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, S, heads, D] of x [B, S, K]."""
        layers = self.layers
        parts = [layer(x) for layer in layers[:3]] if len(layers) == 4 else layers[0](x).split(self.widths, -1)
        parts = [norm(part) for norm, part in zip(self.norms, parts)] + list(parts[len(self.norms) :])
        q, k, v = (part.view(*part.shape[:2], -1, self.sizes.D) for part in parts)
        if self.turn is None and self.norm["eps"] is None:
            return q, k, v
        pairs, rounds = self.turn or ("halves", True)
        cos, sin = angles if self.turn is not None else (None, None)
        q, k = turn(q, k, cos, sin, *self.weights, pairs=pairs, rounds=rounds, **self.norm)
        return q, k, v

    def output(
        self, module: nn.Module, x: Tensor, angles: Any, mask: Any, past: Any, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """The output [B, S, K] for tokens x [B, S, K]; `kwargs` of the host's call."""
        q, k, v = self.project(x, angles)
        ignored = kv_cache.IGNORED_OPTIONS
        more = {name: value for name, value in kwargs.items() if name in ignored} if self.passes else {}
        y = self.attend(module, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, past, more)
        return self.layers[-1](y.reshape(*x.shape[:2], -1))

    def takes(self, module: nn.Module, x: Tensor, angles: Any) -> bool:
        """True if the block is of such calls."""
        turned = self.sizes.turned
        if self.K != x.shape[2] or turned != turned_by(angles) or self.implementation != implementation_of(module):
            return False
        return not turned or fit(*angles, len(x), turned, x.dtype, x.shape[1])


def _positions(module: nn.Module) -> tuple[int, ...]:
    """The positions of a trial. Raises Unproven if the host may look them up in a table.

    To read a table beyond its end is an error on a CPU, but ends the use of a GPU by the process.
    """
    named = inspect.signature(host_class(module).forward).parameters
    if "position_ids" not in named:
        return POSITIONS
    known = getattr(module.config, "max_position_embeddings", None)
    if "position_embeddings" not in named or not known:
        raise Unproven(f"{type(module).__name__} may look up its positions in a table")
    return tuple(min(position, known - 1) for position in POSITIONS)


def _are_tokens(module: nn.Module, x: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if a module is called for tokens x [B, S, K], with nothing that blocks do not know."""
    if module.training or not is_served(module, x) or x.dim() != 3:
        return False
    return all([name in TAKEN or value is None or value is False for name, value in kwargs.items()])


def _attention_of(module: nn.Module, state: State, x: Tensor, angles: Any) -> GpuAttention | None:
    turned = turned_by(angles)
    return block_of(module, state, x, lambda: GpuAttention(module, x.dtype, turned, x.device))


def run_attention(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, None] | None:
    """The module's result for tokens, None where the host has to compute it."""
    x, angles = kwargs.get("hidden_states"), kwargs.get("position_embeddings")
    if args or not _are_tokens(module, x, kwargs):
        return None
    block = _attention_of(module, state, x, angles)
    if block is None or not block.takes(module, x, angles):
        return None
    return block.output(module, x, angles, kwargs.get("attention_mask"), kv_cache.cache_in(kwargs), kwargs), None


class GpuLayer:
    """The block of a layer for x of one dtype."""

    def __init__(self, module: nn.Module, x: Tensor, angles: Any) -> None:
        children, dtype, device = module._modules, x.dtype, x.device
        attention, mlp = children[name_of_attention(module)], feed_forward(module)
        if mlp is module or not is_mlp(mlp):
            raise Unproven("its feed-forward block is no plain one")
        if not is_attention(attention, QUANTIZED):
            raise Unproven("its attention has other projections")
        found = _attention_of(attention, _state(attention), x, angles)
        mlp_block = block_of(mlp, _state(mlp), x, lambda: GpuMLP(mlp, dtype, device))
        if found is None or mlp_block is None:
            raise Unproven("its attention or its feed-forward block has no block")
        self.attention, self.mlp, self.K = found, mlp_block, found.K
        self.watch = Watch.of_all([Watch(module), found.watch, mlp_block.watch])
        names = names_of_norms(module, name_of_attention(module)) or ()
        self.norms = [None if name is None else GpuNorm(children[name], dtype, self.K, device) for name in names]
        self._prove(module, dtype, turned_by(angles), device)

    def _prove(self, module: nn.Module, dtype: torch.dtype, turned: int, device: torch.device) -> None:
        """Compare with the host's layer; the attention function of both returns a given result. Raises Unproven."""
        error = 0.0
        for tokens in (1, 3):
            trial = probe(self.K, turned, _POSITION, dtype, tokens, angle_dtype=dtype, device=device)
            of = record(host_class(module).forward, module, trial)
            seen: list[Tensor] = []

            def attend(
                _: Any, q: Tensor, k: Tensor, v: Tensor, options: Any, of: Recorded = of, to: list = seen
            ) -> Tensor:
                to += [q, k, v]
                return of.result

            with kv_cache.recorded_attention(attend):
                y = self(module, trial[0], trial[1:3], None, None, {})
            pairs = ((y, of.output), *zip(seen, (of.q, of.k, of.v)))
            error = max(error, *(difference(own, theirs) for own, theirs in pairs))
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} puts its parts together otherwise: off by {error:.3g} roundings")

    def __call__(
        self, module: nn.Module, x: Tensor, angles: Any, mask: Any, past: Any, kwargs: Mapping[str, Any]
    ) -> Tensor:
        before, after, before_mlp, after_mlp = self.norms
        h = x if before is None else before(x)
        y = self.attention.output(attention_of(module), h, angles, mask, past, kwargs)
        y = y if after is None else after(y)
        x, h = (x + y, None) if before_mlp is None else before_mlp.of_sum(x, y)
        y = self.mlp(x if h is None else h)
        return x + (y if after_mlp is None else after_mlp(y))


def _state(module: nn.Module) -> State:
    found = state_of(module)
    if found is None:
        raise Unproven("its parts have no blocks")
    return found


def run_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The layer's output for tokens, None where the host has to compute it."""
    if len(args) != 1 or not _are_tokens(module, args[0], kwargs):
        return None
    x, angles = args[0], kwargs.get("position_embeddings")
    block = block_of(module, state, x, lambda: GpuLayer(module, x, angles))
    if block is None or not block.attention.takes(attention_of(module), x, angles):
        return None
    return block(module, x, angles, kwargs.get("attention_mask"), kv_cache.cache_in(kwargs), kwargs)
