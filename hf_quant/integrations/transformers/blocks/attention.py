"""The attention of new tokens as one native call: projections, norms of heads, rotary embedding, append, attention.

The host's module is tried with an attention function that only records: its queries, keys and values, the scale of
the scores and everything else that it asks for. The block must compute the same queries, keys and values, at a low and
at a high position, and the same output from the same result of the attention. What happens in between is the attention
of `kv_cache`, as the host would call it; for other caches the host's own function is called.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_quant import kv_cache  # its layers, and what imports models, only when they are used
from hf_quant.integrations.transformers.blocks.angles import (
    addresses_of,
    angle_dtype,
    by_rows,
    fit,
    in_pairs,
    turned_by,
)
from hf_quant.integrations.transformers.blocks.attention_parts import (
    LAST_NORM,
    head_dim_of,
    layers_of,
    norms_of,
    width_of_norm,
)
from hf_quant.integrations.transformers.blocks.base import (
    TOLERANCE,
    State,
    Unproven,
    Watch,
    add_product,
    as_part,
    by_name,
    check_read,
    difference,
    host_class,
    outputs_of,
    width_of,
)
from hf_quant.integrations.transformers.blocks.calls import implementation_of, is_one_token, past_of, usable
from hf_quant.integrations.transformers.blocks.norm import NormBlock
from hf_quant.integrations.transformers.blocks.trial import Recorded, Trial, given_complex, has_own_code, probe, record
from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.native.attention import attention_of_values
from hf_quant.kernels.native.blocks import PAIRS, Block
from hf_quant.kernels.native.places import entries_of


POSITIONS = (3, 200_001)  # of the trials
_FIRST_LENGTH = "original_max_position_embeddings"  # of `rope_parameters`
_NEUTRAL = {"dropout": 0.0, "is_causal": True}
_NOTHING: dict[str, Any] = {}


# (width, places): a joined projection has queries, keys and values of this width in these places, over and over.
Layout = tuple[int, tuple[int, int, int]]


class Sizes(NamedTuple):
    """Heads of a module, and their channels."""

    heads: int
    shared_heads: int  # of keys and values
    D: int
    turned: int  # channels that the rotary embedding turns, 0: none


class AttentionBlock:
    """The native block of an attention module for x of one dtype, and angles of one.

    Attributes:
        widths: of queries, keys, values and perhaps gates of a token; `shapes`: their heads, and channels of each.
        last_norm: of the result, before the last projection.
        limit: number of positions, from the first one on, that it computes; None: all.
    """

    last_norm: NormBlock | None = None
    limit: int | None = None
    num_states = 3  # of `widths`: queries, keys and values
    value_dim: int | None = None  # of what a cache holds as values; None: as of keys

    def __init__(self, module: nn.Module, dtype: torch.dtype, turned: int, angle_dtype: torch.dtype) -> None:
        self._read(module, dtype, turned, angle_dtype)
        D = self.sizes.D
        self.norms = [as_part(NormBlock, norm, dtype, width_of_norm(norm, D)) for norm in norms_of(module)]
        last = module._modules.get(LAST_NORM)
        self.last_norm = None if last is None else as_part(NormBlock, last, dtype, self.widths[0])
        self.scale = self._prove(module)
        check_read(module, *self.layers, *norms_of(module), last, self.options.get("s_aux"))
        self.projections = self.projections_of()
        angles = max(turned, 1)
        self.block = Block(dtype, self.K, angles, angles, self.N)
        self.add_to(self.block, 0, 3)
        self.block.finish()

    def _read(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        turned: int,
        angle_dtype: torch.dtype,
        layers: tuple[nn.Module, ...] | None = None,
    ) -> None:
        """Find the layers, unless they are given, and their sizes. Raises Unproven."""
        layers = layers_of(module) if layers is None else layers
        if layers is None:
            raise Unproven("its layers were replaced")
        self.watch = Watch(module)
        self.is_causal = getattr(module, "is_causal", True)  # which counts for several tokens at once
        self.dtype, self.layers = dtype, layers
        self._read_angles(angle_dtype)
        self.implementation, self.index = implementation_of(module), module.layer_idx
        self.K, self.N = width_of(layers[0]), outputs_of(layers[-1])
        if self.N != self.K:
            raise Unproven("the output is of another width than the input")
        D = head_dim_of(module)
        if D is None:
            raise Unproven(f"{type(module).__name__} does not tell the width of its heads")
        heads, first = width_of(layers[-1]) // D, outputs_of(layers[0]) // D
        self.is_gated = len(layers) == 4 and first == 2 * heads
        shared = outputs_of(layers[1]) // D if len(layers) == 4 else (first - heads) // 2
        self.sizes = Sizes(heads, shared, D, turned)
        self._read_shapes([(heads, D), (shared, D), (shared, D)] + [(heads, D)] * self.is_gated)

    def _read_angles(self, dtype: torch.dtype) -> None:
        self.takes_complex = dtype.is_complex
        self.angle_dtype = torch.float32 if self.takes_complex else dtype

    def _read_shapes(self, shapes: list[tuple[int, int]]) -> None:
        """Set what a trial has to find, of a module with these `shapes`."""
        self.shapes, self.widths = shapes, tuple(heads * D for heads, D in shapes)
        self.options: dict[str, Any] = {}  # of the attention function
        self.function: Callable[..., Any] | None = None  # of a model's own attention, "eager"
        self.turn: tuple[str, bool] | None = None  # pairs and rounding of the rotary embedding
        self.norms_last = False  # after the rotary embedding
        self.layout: Layout | None = None  # None: queries, keys and values of all heads in turn
        self.factor = 1.0  # of the queries (OPT)

    def add_projections(self, block: Block, x: int, to: Sequence[int]) -> None:
        """Add the steps from x to queries, keys, values, and gates, if there are some.

        cos and sin are the arguments 1 and 2 of the block. Heads of gates lie behind those of queries (Qwen3-Next).
        """
        layers = self.layers
        if len(layers) == 4:
            targets = [block.buffer(2 * self.widths[0]) if self.is_gated else to[0], *to[1:]]
            for layer, target in zip(layers[:3], targets):
                add_product(block, x, target, layer)
            if self.is_gated:
                D = self.sizes.D
                block.pick(targets[0], to[0], slice(0, D), group=2 * D)
                block.pick(targets[0], to[3], slice(D, 2 * D), group=2 * D)
        elif self.layout is not None:
            joined, (width, order) = block.buffer(sum(self.widths)), self.layout
            add_product(block, x, joined, layers[0])
            for i, target in zip(order, to):
                block.pick(joined, target, slice(i * width, (i + 1) * width), group=3 * width)
        else:
            start = 0
            for target, width in zip(to, self.widths):
                add_product(block, x, target, layers[0], slice(start, start + width))
                start += width
        self.scale_queries(block, to[0])
        for target, norm in zip(to, self.norms or (None, None)):
            if norm is not None and not self.norms_last:
                norm.add_to(block, target, target)
            self.add_turn(block, target, self.sizes.D)
            if norm is not None and self.norms_last:
                norm.add_to(block, target, target)

    def add_turn(self, block: Block, x: int, head_dim: int) -> None:
        """Add the rotary embedding of queries or keys x, if there is one."""
        if self.turn is not None:
            pairs, rounds = self.turn
            block.turn(x, 1, 2, head_dim=head_dim, pairs=pairs, rounds=rounds, angle_dtype=self.angle_dtype)

    def scale_queries(self, block: Block, q: int) -> None:
        """Add the step that multiplies queries, if the module does."""
        if self.factor != 1.0:
            block.add(None, q, q, self.factor)

    def add_to(self, block: Block, x: int, to: int) -> None:
        """Add all steps, from x to the output."""
        q, k, v, *gate = found = [block.buffer(width) for width in self.widths]
        y = block.buffer(self.widths[0])
        self.add_projections(block, x, found)
        block.append(k, v, self.sizes.shared_heads)
        self.add_attention(block, q, (k, v), y)
        self.add_output(block, y, to, *gate)

    def add_attention(self, block: Block, q: int, new: tuple[int, int], to: int) -> None:
        """Add the step from the queries, and `new` keys and values, to the result of the attention to the cache."""
        (heads, shared, *_), window = self.sizes, self.options.get("sliding_window") or 0
        block.attend(q, new, to, heads, shared, scale=self.scale, window=window, **self._more_options())

    def _more_options(self) -> dict[str, Any]:
        return {"softcap": self.options.get("softcap"), "sinks": self.options.get("s_aux")}

    def add_output(self, block: Block, y: int, to: int, *gate: int) -> None:
        """Add the steps from the result of the attention, and the gate if there is one, to the output."""
        if gate:
            gated = block.buffer(self.widths[0])
            block.gate(gate[0], y, gated, "sigmoid")
            y = gated
        if self.last_norm is not None:
            normed = block.buffer(self.widths[0])
            self.last_norm.add_to(block, y, normed)
            y = normed
        add_product(block, y, to, self.layers[-1])

    def add_output_of_trial(self, block: Block, y: int, to: int, *gate: int) -> None:
        """`add_output` from the result of an attention function."""
        self.add_output(block, y, to, *gate)

    def width_of_trial(self) -> int:
        """The width of the result of an attention function."""
        return self.widths[0]

    def projections_of(self, add_before: Callable[[Block], int] = lambda block: 0) -> Block:
        """The block from x to queries, keys, values and gates, its last arguments; `add_before`: what lies before."""
        angles = max(self.sizes.turned, 1)
        block = Block(self.dtype, self.K, angles, angles, *self.widths)
        self.add_projections(block, add_before(block), range(3, 3 + len(self.widths)))
        return block.finish()

    def _prove(self, module: nn.Module) -> float:
        """Find the rotary embedding by trial, and return the scale of the scores. Raises Unproven.

        Queries that are scaled by their position (Ministral 3) are not at those of the model's first length.
        """
        try:
            return self._prove_at(module, POSITIONS)
        except Unproven:
            parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
            limit = parameters.get(_FIRST_LENGTH) if isinstance(parameters, dict) else None
            if not isinstance(limit, int) or limit <= POSITIONS[0]:
                raise
            self.limit, self.watch = limit, Watch(module, entries=entries_of(parameters))
            return self._prove_at(module, (POSITIONS[0], limit - 1))

    def _prove_at(self, module: nn.Module, positions: tuple[int, ...]) -> float:
        found, records = self._records(module, positions=positions)
        turned = self.sizes.turned
        orders = (False, True) if turned and self.norms else (False,)
        own = getattr(module, "scaling", None)
        factors = (1.0, own) if not self.norms and isinstance(own, float) else (1.0,)
        ways, errors = [*product(factors, self.turns(), orders, self.layouts())], []
        for self.factor, self.turn, self.norms_last, self.layout in ways:
            block = self.projections_of()
            errors.append(max(self.error(self.of_trial(block, trial), of) for trial, of in zip(found, records)))
            if errors[-1] == 0.0:
                break
        best = min(errors)
        self.factor, self.turn, self.norms_last, self.layout = ways[errors.index(best)]
        return self._scale_of(module, found, records, best)

    def _records(
        self, module: nn.Module, device: torch.device | None = None, positions: tuple[int, ...] = POSITIONS
    ) -> tuple[list[Trial], list[Recorded]]:
        """(arguments of trials, what the host does with them). Raises Unproven."""
        kind = {"angle_dtype": self.angle_dtype, "device": device}
        found = [probe(self.K, self.sizes.turned, position, self.dtype, **kind) for position in positions]
        host = self.host_of(module)
        records = [record(host, module, trial) for trial in found]
        if any(not isinstance(r.output, tuple) or len(r.output) != 2 or r.output[1] is not None for r in records):
            raise Unproven(f"{type(module).__name__} returns more than its output")
        return found, records

    def host_of(self, module: nn.Module) -> Callable[..., Any]:
        """The `forward` of a module, or of its layer, which a trial calls with cos and sin."""
        host = host_class(module).forward
        return given_complex(host) if self.takes_complex else host

    def layouts(self) -> list[Layout | None]:
        """The layouts that a joined projection may have; the second one is by heads."""
        heads, shared, D, _ = self.sizes
        return [None, (D, (0, 1, 2))] if len(self.layers) == 2 and heads == shared else [None]

    def turns(self) -> list[tuple[str, bool] | None]:
        """(pairs, rounding) of all rotary embeddings that there may be; None: of none."""
        _, _, D, turned = self.sizes
        kinds = [pairs for pairs in PAIRS if pairs != "halves_by_pair" or 2 * turned <= D]
        return [None, *product(kinds, (True, False))] if turned else [None]

    def _scale_of(self, module: nn.Module, trials: list[Any], records: list[Recorded], error: float) -> float:
        """The scale of the scores, if the queries and keys of trials are right. Raises Unproven."""
        heads, shared, D, _ = self.sizes
        dtype = self.dtype
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} has other queries or keys: off by {error:.3g} roundings")
        for (x, *_), of in zip(trials, records):
            result = of.result.reshape(2, 1, heads * D)
            if self.is_gated:
                result = result * self.layers[0](x).view(2, 1, heads, 2, D)[..., 1, :].flatten(2).sigmoid()
            y = self.output_of(result)
            if not difference(y, of.output[0]) <= TOLERANCE[dtype]:
                raise Unproven(f"{type(module).__name__} makes something else of the result of the attention")
        return self.read_options(module, records)

    def read_options(self, module: nn.Module, records: Sequence[Recorded]) -> float:
        """Take over what a module asks the attention function for, and return the scale of the scores.

        Raises Unproven if kernels do not compute that attention.
        """
        for of in records:
            self._check_options(module, of.options)
        if len({of.options.get("scaling") for of in records}) > 1:
            raise Unproven(f"the scale of the scores in {type(module).__name__} depends on the position")
        of, scale = records[0], records[0].options.get("scaling")
        if not kv_cache.reads_codes(of.function, module, of.q, self.sizes.shared_heads, scale, self.options):
            raise Unproven(f"{type(module).__name__} has an attention function that computes something else")
        self.function = of.function if self.implementation == "eager" else None
        return self.sizes.D**-0.5 if scale is None else float(scale)

    def projected(self, block: Block, x: Tensor, cos: Any, sin: Any, stride: int) -> list[Tensor]:
        """Queries, keys, values and gates [B, S, heads, D] of x [B, S, K] by a block that ends in them.

        `cos`, `sin`: addresses. `stride` from row to row of them.
        """
        found = [x.new_empty(*x.shape[:2], *shape) for shape in self.shapes]
        addresses = [tensor.data_ptr() for tensor in found]
        block(x.shape[0] * x.shape[1], x.data_ptr(), cos, sin, *addresses, angle_stride=stride)
        return found

    def of_trial(self, block: Block, trial: Trial) -> list[Tensor]:
        """`projected` for the arguments of a trial."""
        x, cos, sin, _ = trial
        return self.projected(block, x, cos.data_ptr(), sin.data_ptr(), self.sizes.turned)

    def error(self, found: list[Tensor], recorded: Recorded) -> float:
        """The `difference` of a block's queries, keys and values from recorded ones."""
        pairs = zip(found, (recorded.q, recorded.k, recorded.v))
        return max(difference(own.transpose(1, 2), theirs) for own, theirs in pairs)

    def _check_options(self, module: nn.Module, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if name in ("scaling", *kv_cache.IGNORED_OPTIONS) or value is None:
                continue
            if name == "softcap" or (name == "s_aux" and self._are_sinks(module, value)):
                self.options[name] = value
                continue
            if value is not False and name != "sliding_window" and value != _NEUTRAL.get(name):
                raise Unproven(f"{type(module).__name__} asks the attention for {name}")
            self.options[name] = value

    def _are_sinks(self, module: nn.Module, value: Any) -> bool:
        """True if a value is a parameter of the module, which is watched, as the block reads it."""
        own = any(value is parameter for parameter in module._parameters.values())
        return own and is_plain(value) and value.shape == (self.sizes.heads,) and value.dtype in TOLERANCE

    def __call__(self, module: nn.Module, x: Tensor, angles: Any, mask: Any, past: Any) -> Tensor | None:
        """The output for tokens x [B, S, K], which are added to a cache; None: left to the host."""
        turned = self.sizes.turned
        if turned and not fit(*angles, len(x), turned, self.angle_dtype, x.shape[1]):
            return None
        y = self.with_codes(self.block, x, angles, mask, past)
        return self._by_host(module, x, angles, mask, past) if y is None else y

    def next_tokens(self, past: Any, B: int, count: int) -> kv_cache.NextTokens | None:
        """The place of new tokens in a growing cache, None if the native kernels do not compute their attention.

        One token must not leave the window.
        """
        layers = getattr(past, "layers", ())
        if self.index >= len(layers) or not kv_cache.takes_tokens(past):
            return None
        is_causal = self.is_causal and self.options.get("is_causal", True)
        if count > 1 and not (is_causal and kv_cache.computes_prompts(self.implementation, self.dtype)):
            return None
        sizes, window = self.sizes, self.options.get("sliding_window")
        kind = (sizes.shared_heads, sizes.D, self.dtype, self.value_dim)
        tokens = kv_cache.next_tokens(layers[self.index], B, count, *kind)
        return None if tokens is None or (count == 1 and window and tokens.place[1] > window) else tokens

    def with_codes(self, block: Block, x: Tensor, angles: Any, mask: Any, past: Any) -> Tensor | None:
        """Run a block with the arguments (x, cos, sin, y) that ends in a quantized cache, None if it cannot."""
        B, S = x.shape[:2]
        tokens = self.next_tokens(past, B, S)
        if tokens is None:
            return None
        is_causal = mask is None
        if mask is not None:
            mask = usable(mask, B, self.sizes.heads, S, tokens.place[1])
            if mask is None:
                return None
        y = torch.empty_like(x)
        angles = by_rows(angles, B)
        cos, sin, stride = addresses_of(angles, self.sizes.turned)
        at = (x.data_ptr(), cos, sin, y.data_ptr())
        block.with_cache(B, S, stride, tokens.cache, tokens.place, mask, *at, is_causal=is_causal)
        tokens.done()
        return y

    def _by_host(self, module: nn.Module, x: Tensor, angles: Any, mask: Any, past: Any) -> Tensor:
        """The output by the cache's own `update` and the host's attention function."""
        angles = by_rows(angles, len(x))
        projected = self.projected(self.projections, x, *addresses_of(angles, self.sizes.turned))
        y = self.attended(module, projected, mask, past).reshape(*x.shape[:2], self.widths[0])
        return self.output_of(y, *projected[self.num_states :])

    def output_of(self, y: Tensor, *gate: Tensor) -> Tensor:
        """The output [B, S, K] of the result of the attention, and the gate if there is one."""
        y = y * gate[0].view_as(y).sigmoid() if gate else y
        return self.layers[-1](y if self.last_norm is None else self.last_norm(y.to(self.dtype).contiguous()))

    def attended(self, module: nn.Module, projected: Sequence[Tensor], mask: Any, past: Any) -> Tensor:
        """The result [B, S, heads, D] of the attention of what `projected` gives, which a cache takes if any."""
        return self.attend(module, *(part.transpose(1, 2) for part in projected[: self.num_states]), mask, past)

    def takes(self, x: Tensor, past: Any) -> bool:
        """True if the block may compute tokens x [B, S, K] behind those of a cache."""
        return True

    def reaches(self, positions: Any) -> bool:
        """True if the block computes tokens at these positions."""
        return self.limit is None or (isinstance(positions, Tensor) and int(positions.max()) < self.limit)

    def takes_places(self, tokens: int, places: Sequence[int]) -> bool:
        """True if the native steps may compute so many tokens in these places, see `kv_cache.Places.next`."""
        return True

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        past: Any,
        more: Mapping[str, Any] = _NOTHING,
    ) -> Tensor:
        """The host's attention [B, S, H, D] of q [B, H, S, D] to k and v, which a cache takes if there is one.

        `more`: arguments of the attention function besides `options`.
        """
        if past is not None:
            k, v = past.update(k, v, module.layer_idx)
        return self.attention_to(module, q, k, v, mask, more)

    def attention_to(
        self, module: nn.Module, q: Tensor, k: Any, v: Any, mask: Any, more: Mapping[str, Any] = _NOTHING
    ) -> Tensor:
        """`attend` to all keys and values, those of new tokens included.

        A model's own function has passed a trial of the kernel, which computes it several times as fast.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        is_ours = isinstance(k, Tensor) and k.is_cpu and is_plain(k)
        is_ours = is_ours and (q.shape[2] == 1 or kv_cache.computes_prompts("hf_quant", q.dtype))
        if self.function is not None and is_ours and not kv_cache.is_recorded():
            y = attention_of_values(q, k, v, mask, is_causal=False, scale=self.scale, **self._more_options())
            if y is not None:
                return y
        function = self.function or ALL_ATTENTION_FUNCTIONS[self.implementation]
        return function(module, q, k, v, mask, scaling=self.scale, **self.options, **more)[0]


def run_attention(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, None] | None:
    """The module's result for one token, None where the host has to compute it."""
    x, kwargs = args[0] if args else kwargs.get("hidden_states"), by_name(module, args, kwargs)
    if module.training or has_own_code(module) or not is_one_token(x, kwargs):
        return None
    angles = kwargs.get("position_embeddings")
    turned, of_angles, angles = turned_by(angles), angle_dtype(angles, x.dtype), in_pairs(angles)
    block = state.block(module, x.dtype, lambda: AttentionBlock(module, x.dtype, turned, of_angles))
    if block is None or block.K != x.shape[2] or block.implementation != implementation_of(module):
        return None
    if turned != block.sizes.turned or (block.function is not None and kv_cache.wants_weights(module, kwargs)):
        return None
    if not block.reaches(kwargs.get("position_ids")):
        return None
    y = block(module, x, angles, kwargs.get("attention_mask"), past_of(kwargs))
    return None if y is None else (y, None)
