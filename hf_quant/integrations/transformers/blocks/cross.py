"""A layer of a decoder that also attends to an encoder, for one new token (Whisper, BART, Marian, M2M-100).

With a quantized cache it is two native calls: one up to the sum behind the self-attention, one from there to the end.
With another cache it is three, between which the host's attention is called. The keys and values of the encoder's
states are those in the cache, which the host has written with the first token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.attention import POSITIONS, AttentionBlock
from hf_quant.integrations.transformers.blocks.attention_parts import is_attention
from hf_quant.integrations.transformers.blocks.base import (
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    add_product,
    by_name,
    difference,
    host_class,
    random_rows,
    width_of,
)
from hf_quant.integrations.transformers.blocks.calls import implementation_of, is_one_token, usable
from hf_quant.integrations.transformers.blocks.mlp import MLPBlock, is_mlp
from hf_quant.integrations.transformers.blocks.norm import NormBlock, is_norm
from hf_quant.integrations.transformers.blocks.trial import Recorded, Trial, probe, records
from hf_quant.kernels.native.blocks import Block


_MIXERS = ("self_attn", "encoder_attn")
_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
ENCODER = ("encoder_hidden_states", "encoder_attention_mask")  # arguments
STATES = 7  # of the encoder in the trials


def is_cross_layer(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of such a layer, by their names; a trial shows what it computes."""
    children = {name: child for name, child in module._modules.items() if not isinstance(child, nn.Dropout)}
    if children.keys() - {"activation_fn"} != {*_MIXERS, *_NORMS, "fc1", "fc2"} or not is_mlp(module, linear):
        return False
    return all(is_attention(children[name], linear) for name in _MIXERS) and all(is_norm(children[n]) for n in _NORMS)


class PartOfLayer(AttentionBlock):
    """An attention, of a token or to the states of an encoder, whose trial is that of its layer."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, layers: tuple[nn.Module, ...] | None = None) -> None:
        self._read(module, dtype, 0, dtype, layers)
        self.norms, self.scale = [], 1.0

    def add_query(self, block: Block, x: int, to: int) -> None:
        """Add the steps from x to the queries."""
        add_product(block, x, to, self.layers[0])
        self.scale_queries(block, to)


class CrossLayer:
    """The native blocks of a layer for x of one dtype."""

    norms_first = True  # else behind the sums (BART)

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.attention, self.crossing = (self._part(part, dtype) for part in self.attentions_of(module))
        self.K, self.mlp = self.attention.K, self._mlp(module, dtype)
        if {self.crossing.K, self.mlp.K, self.mlp.N} != {self.K}:
            raise Unproven("the widths of its parts differ")
        self.norms = [NormBlock(norm, dtype, self.K) for norm in self._norms(module)]
        parts = (self.attention, self.crossing, self.mlp)
        self.watch = Watch.of_all([self._watch(module), *(part.watch for part in parts)])
        self._prove(module, dtype)
        self._make(dtype)

    @staticmethod
    def attentions_of(module: nn.Module) -> list[nn.Module]:
        """The attention of the token and that to the encoder, of a host's layer. Raises Unproven."""
        return [module._modules[name] for name in _MIXERS]

    def _part(self, attention: nn.Module, dtype: torch.dtype) -> PartOfLayer:
        return PartOfLayer(attention, dtype)

    def _mlp(self, module: nn.Module, dtype: torch.dtype) -> MLPBlock:
        return MLPBlock(module, dtype, is_part=True)

    def _norms(self, module: nn.Module) -> list[nn.Module]:
        return [module._modules[name] for name in _NORMS]

    def _watch(self, module: nn.Module) -> Watch:
        return Watch(module)

    def _make(self, dtype: torch.dtype) -> None:
        """Make the blocks."""
        self.parts = self._parts(dtype)
        self.first, self.second = Block(dtype, self.K, self.K), Block(dtype, self.K, self.K)
        y = self.first.buffer(self.K)
        self.attention.add_to(self.first, self._before(self.first, 0, 0), y)
        self._add_sum(self.first, 0, y, 1, 0)
        q, attended = (self.second.buffer(self.crossing.widths[0]) for _ in range(2))
        self.crossing.add_query(self.second, self._before(self.second, 0, 1), q)
        self.crossing.add_attention(self.second, q, (-1, -1), attended)
        self._add_end(self.second, attended, 1)
        self.first.finish()
        self.second.finish()

    def _before(self, block: Block, x: int, norm: int) -> int:
        """Add the norm of that number before a part to a block; returns the buffer of what the part reads."""
        if not self.norms_first:
            return x
        n = block.buffer(self.K)
        self.norms[norm].add_to(block, x, n)
        return n

    def _add_sum(self, block: Block, x: int, y: int, to: int, norm: int) -> None:
        """Add the sum of x and the output y of a part, and the norm of that number if it comes behind."""
        block.add(x, y, to)
        if not self.norms_first:
            self.norms[norm].add_to(block, to, to)

    def _add_end(self, block: Block, attended: int, to: int) -> None:
        """Add the steps from the input of the crossing, buffer 0, and its attention's result to the layer's output."""
        y, h = block.buffer(self.K), block.buffer(self.K)
        self.crossing.add_output(block, attended, y)
        self._add_sum(block, 0, y, h, 1)
        self.mlp.add_to(block, self._before(block, h, 2), y)
        self._add_sum(block, h, y, to, 2)

    def _prove(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Compare with the host's layer, whose attention function returns given results. Raises Unproven."""
        trials, name = [probe(self.K, 0, at, dtype, angle_dtype=dtype) for at in POSITIONS], type(module).__name__
        states = random_rows(2, STATES, width_of(self.crossing.layers[1]), dtype=dtype, seed=3)
        host, more = host_class(module).forward, self._arguments(dtype)
        found = [records(host, module, trial, encoder_hidden_states=states, **more) for trial in trials]
        if any(len(calls) != 2 for calls in found):
            raise Unproven(f"{name} does not call two attention functions")
        found, attentions = [self._plain(name, calls, more) for calls in found], self.attentions_of(module)
        for part, attention, calls in zip((self.attention, self.crossing), attentions, zip(*found)):
            part.scale = part.read_options(attention, calls)
        if self.crossing.options.get("sliding_window"):
            raise Unproven(f"{name} attends to a window of the encoder's states")
        own = getattr(attentions[0], "scaling", None)
        factors = {1.0, own} if isinstance(own, float) else {1.0}
        ways, errors = [(first, factor) for first in (True, False) for factor in sorted(factors, reverse=True)], []
        for way in ways:
            self._set(*way)
            errors.append(max(self._error(trial, *calls) for trial, calls in zip(trials, found)))
        best = min(errors)
        self._set(*ways[errors.index(best)])
        if not best <= TOLERANCE[dtype]:
            raise Unproven(f"{name} puts its parts together otherwise: off by {best:.3g} roundings")

    def _set(self, norms_first: bool, factor: float) -> None:
        self.norms_first, self.attention.factor, self.crossing.factor = norms_first, factor, factor

    def _arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Further arguments of the trials."""
        return {}

    def _plain(self, name: str, found: list[Recorded], given: dict[str, Any]) -> list[Recorded]:
        """The records of a trial with the `given` arguments as those of a layer that takes and returns no more."""
        return found

    def _error(self, trial: Trial, own: Recorded, crossed: Recorded) -> float:
        """The largest `difference` of queries, keys, values and the output from recorded ones."""
        x, (first, middle, end) = trial[0], self._parts(own.q.dtype)
        error = self.attention.error(self.attention.of_trial(first, trial), own)
        h, out, q = torch.empty_like(x), torch.empty_like(x), torch.empty_like(own.result)
        middle(len(x), *[part.data_ptr() for part in (x, own.result, h, q)])
        end(len(x), *[part.data_ptr() for part in (h, crossed.result, out)])
        return max(error, difference(q.transpose(1, 2), crossed.q), difference(out, own.output))

    def _parts(self, dtype: torch.dtype) -> tuple[Block, Block, Block]:
        """The blocks before, between and behind both attentions.

        From x to queries, keys and values; from x and the result of the first attention to the sum behind it and to
        queries; from that sum and the result of the second one to the output.
        """
        width = self.attention.widths[0]
        projections = self.attention.projections_of(lambda block: self._before(block, 0, 0))
        middle, end = Block(dtype, self.K, width, self.K, width), Block(dtype, self.K, width, self.K)
        y = middle.buffer(self.K)
        self.attention.add_output(middle, 1, y)
        self._add_sum(middle, 0, y, 2, 0)
        self.crossing.add_query(middle, self._before(middle, 2, 1), 3)
        self._add_end(end, 1, 2)
        return projections, middle.finish(), end.finish()

    def __call__(self, module: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The output for one token x [B, 1, K] of each sequence, which is added to the cache; None: the host's."""
        past, B = kv_cache.cache_in(kwargs), len(x)
        crossed, sizes = getattr(past, "cross_attention_cache", None), self.crossing.sizes
        if crossed is None or crossed.offloading or not past.is_updated.get(self.crossing.index):
            return None
        masks, held = self._masks(kwargs), crossed.layers[self.crossing.index]
        token = self.attention.next_tokens(past.self_attention_cache, B, 1)
        states = kv_cache.held_tokens(held, B, sizes.shared_heads, sizes.D, x.dtype)
        if token is None or states is None:
            return self._in_parts(module, x, masks, past.self_attention_cache, held)
        for i, place in enumerate((token.place, states[1])):
            if masks[i] is not None:
                masks[i] = usable(masks[i], B, sizes.heads, 1, place[1])
                if masks[i] is None:
                    return None
        h, y = torch.empty_like(x), torch.empty_like(x)
        self.first.with_cache(B, 1, 0, token.cache, token.place, masks[0], x.data_ptr(), h.data_ptr())
        token.done()
        self.second.with_cache(B, 1, 0, *states, masks[1], h.data_ptr(), y.data_ptr())
        return y

    def _in_parts(self, module: nn.Module, x: Tensor, masks: list[Any], past: Any, held: Any) -> Tensor:
        """The output by the host's attention; `held`: the layer of the cache with the encoder's states."""
        (first, middle, end), (own, crossing) = self.parts, self.attentions_of(module)
        q, k, v = (part.transpose(1, 2) for part in self.attention.projected(first, x, 0, 0, 0))
        attended = self.attention.attend(own, q, k, v, masks[0], past).contiguous()
        h, y, q = torch.empty_like(x), torch.empty_like(x), torch.empty_like(attended)
        middle(len(x), *[part.data_ptr() for part in (x, attended, h, q)])
        crossed = self.crossing.attention_to(crossing, q.transpose(1, 2), held.keys, held.values, masks[1])
        crossed = crossed.contiguous()
        end(len(x), *[part.data_ptr() for part in (h, crossed, y)])
        return y

    def _masks(self, kwargs: dict[str, Any]) -> list[Any]:
        """The masks of both attentions."""
        return [kwargs.get(name) for name in ("attention_mask", ENCODER[1])]


def run(
    module: nn.Module,
    state: State,
    kind: type[CrossLayer],
    given: tuple[str, ...],
    args: tuple,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output of a layer for one token by a block of a kind, None where the host has to compute it.

    `kwargs` are named, as by `by_name`; `given`: further arguments that must be tensors.
    """
    needed = (ENCODER[0], *given)
    if not args or module.training or not all(isinstance(kwargs.get(name), Tensor) for name in needed):
        return None
    x, rest = args[0], {name: value for name, value in kwargs.items() if name not in (*ENCODER, *given)}
    if not is_one_token(x, rest):
        return None
    block = state.block(module, x.dtype, lambda: kind(module, x.dtype))
    if block is None or block.K != x.shape[2]:
        return None
    parts = zip((block.attention, block.crossing), kind.attentions_of(module))
    if any(part.implementation != implementation_of(attention) for part, attention in parts):
        return None
    return block(module, x, kwargs)


def run_cross_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The layer's output for one token, None where the host has to compute it."""
    return run(module, state, CrossLayer, (), args, by_name(module, args, kwargs))
