"""A decoder for new tokens: all layers in one native call, what lies around them by the host's modules.

A host makes masks, passes arguments on and calls one module after the other, which takes long beside the products of a
small model. The trial runs the host's `forward` on the arguments of a real call, with children that note
how they are called. The block calls them likewise if each was given the very objects that those before it returned.
What is not seen in one call is how the host's masks change with the number of tokens: only the code of transformers
is trusted with that, for layers that attend to all tokens or to a window. Calls for one token of each sequence and for
more of them, which are prompts, have blocks of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.angles import (
    PLACES,
    POSITIONS,
    Angles,
    LearnedPositions,
    X,
    addresses_of,
    by_rows,
    fit,
    in_pairs,
)
from hf_quant.integrations.transformers.blocks.base import (
    Call,
    Classes,
    Recorder,
    State,
    Unproven,
    Watch,
    by_name,
    host_class,
    is_same,
    is_served,
    new_result,
    state_of,
    twin_of,
    weight_of,
)
from hf_quant.integrations.transformers.blocks.calls import are_tokens, implementation_of, past_of, usable
from hf_quant.integrations.transformers.blocks.inputs import SETTINGS, Inputs, NewTokens, named_inputs
from hf_quant.integrations.transformers.blocks.layer import LayerBlock, attention_of, is_layer
from hf_quant.integrations.transformers.blocks.recurrent import RecurrentLayer, States, is_recurrent_layer
from hf_quant.kernels.native.blocks import Chain
from hf_quant.kernels.native.places import entries_of
from hf_quant.kernels.native.products import row_reader
from hf_quant.modules import QuantEmbedding


_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv"}  # of layers


def is_decoder(module: nn.Module, linear: Classes) -> bool:
    """True if a module has one list of children, all of which are layers; a trial shows what it computes."""
    layers = _layers(module)
    kinds = (is_layer, is_recurrent_layer)
    return bool(layers) and all(any(is_kind(layer, linear) for is_kind in kinds) for layer in layers)


def _layers(module: nn.Module) -> nn.ModuleList | None:
    lists = [child for child in module._modules.values() if isinstance(child, nn.ModuleList)]
    return lists[0] if len(lists) == 1 else None


def _through(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.clone()


class DecoderBlock:
    """The native block of a decoder for calls with the settings of the call that is its trial."""

    def __init__(self, module: nn.Module, inputs: Inputs, kwargs: dict[str, Any]) -> None:
        config = module.config.__dict__
        watch = Watch(module, _layers(module), entries=entries_of(config), numbers=[config.__len__, len(config)])
        layers = list(_layers(module) or ())
        if inputs.ids is not None:
            _check_embedding(module)
        calls, output = _record(module, kwargs)
        ours = [call for call in calls if call.child in layers]
        others = [call for call in calls if call.child not in layers and not isinstance(call.child, nn.Dropout)]
        embed = None if inputs.ids is None else others.pop(0).child
        if [call.child for call in ours] != layers or not others:
            raise Unproven(f"{type(module).__name__} does not call each of its layers once")
        *rotary, last = others
        embedded, x = _embedded(calls, inputs), ours[0].args[0]
        self.learned = None
        if rotary and isinstance(rotary[0].child, nn.Embedding):
            table = rotary.pop(0)
            self.learned, embedded = LearnedPositions(table, inputs.positions), embedded + table.result
        self.scale = None if torch.equal(x, embedded) else _scale(embedded, x, module.config)
        self.norm, self.dtype = last.child, x.dtype
        self.embed = rows_of(embed, x.dtype) if embed is not None and x.shape[1] == 1 else embed
        self.rotary = [
            Angles(
                call.child,
                _places(call.args, x, inputs),
                dict(zip(call.kwargs, _places(call.kwargs.values(), x, inputs))),
            )
            for call in rotary
        ]
        self.blocks = blocks = [_block_of(layer, self.dtype) for layer in layers]
        tokens = self._tokens(inputs)
        if any(block.K != x.shape[-1] for block in blocks):
            raise Unproven("the embedding is of another width than the layers")
        if tokens is None:
            raise Unproven("a layer of the cache takes new tokens another way")
        kinds = []
        for call, before, block, place in zip(ours, [x, *(call.result for call in ours)], blocks, tokens):
            if isinstance(place, States):
                _check(call, before, inputs)
                kinds.append((None, States, None))
                continue
            window = block.attention.options.get("sliding_window")
            _check(call, before, inputs, inputs.seen(place.place[1], window))
            if block.attention.limit is not None and inputs.place_of(call.kwargs.get("position_ids")) is not POSITIONS:
                raise Unproven("a layer whose queries depend on their positions is given others")
            angles = call.kwargs.get("position_embeddings")
            number = None if angles is None else [made.result is angles for made in rotary].index(True)
            turned, angles = block.attention.sizes.turned, in_pairs(angles)
            if turned and (
                angles is None or not fit(*angles, len(x), turned, block.attention.angle_dtype, x.shape[1])
            ):
                raise Unproven("its angles are of another dtype or shape than the blocks of its layers take")
            kinds.append((number, block.attention.sizes, window))
        if last.args != (ours[-1].result,) or last.kwargs:
            raise Unproven(f"{type(module).__name__} does not end with its norm")
        self.output = _output_of(output, last.result, inputs.past)
        # Layers that follow each other with equal angles and heads, and if there is a mask with an equal window.
        self.parts, self.masked_parts = _parts([kind[:2] for kind in kinds]), _parts(kinds)
        self.watch = Watch.of_all([watch, *(block.watch for block in blocks)])
        limits = [block.attention.limit for block in blocks if isinstance(block, LayerBlock)]
        self.limit = min([limit for limit in limits if limit is not None], default=None)
        # By cache: (sequences and whether there is no padding, its layers, parts for their next tokens).
        self.known: WeakKeyDictionary[Any, tuple[tuple, list, list[_CachedPart | _StatePart]]] = WeakKeyDictionary()

    def _tokens(self, inputs: Inputs) -> list[kv_cache.NextTokens | States] | None:
        """The places of new tokens in the cache, None if a layer of the cache takes them another way."""
        tokens, (B, S) = [], inputs.sizes
        for block in self.blocks:
            place = block.next_tokens(inputs.past, B, S)
            if place is None:
                return None
            tokens.append(place)
        return tokens

    def __call__(self, inputs: Inputs) -> Any:
        """The decoder's output, whose tokens are added to the cache; None: left to the host."""
        y = self.states(inputs)
        return None if y is None else self.output(self.norm(y), inputs.past)

    def states(self, inputs: Inputs) -> Tensor | None:
        """The result of the last layer, before the norm; the tokens are added to the cache. None: left to the host."""
        if self.limit is not None and int(inputs.positions.max()) >= self.limit:
            return None
        parts, places = self._next(inputs)
        if places is None:
            return None
        x = inputs.x if self.embed is None else self.embed(inputs.ids)
        x = x if self.learned is None else x + self.learned(inputs.positions)
        x = x if self.scale is None else x * self.scale
        if x.dtype != self.dtype or not is_served(x):
            return None
        angles = [by_rows(in_pairs(rotary(x, inputs.positions)), len(x)) for rotary in self.rotary]
        results = [new_result(x.shape, x.dtype) for _ in parts]
        rows = [x, *results]
        runs = [part.run(inputs, x, y, angles, place) for part, x, y, place in zip(parts, rows, results, places)]
        if None in runs:
            return None
        for run in runs:
            run()
        for part in parts:
            part.done(x.shape[1])
        return results[-1]

    def _next(self, inputs: Inputs) -> tuple[list["_CachedPart | _StatePart"], list[list[Any]] | None]:
        """The parts of the layers for new tokens, and their places in the cache; None: left to the host."""
        if inputs.sizes[1] > 1 and isinstance(inputs.past, kv_cache.QuantizedCache):
            inputs.past.note_padding(inputs.padding, inputs.sizes[1])
        key = (inputs.sizes[0], inputs.padding is None)
        found = self.known.get(inputs.past)
        if found is not None and found[0] == key and found[1] == inputs.past.layers:
            places = [part.places(inputs) for part in found[2]]
            if None not in places:
                return found[2], places
        tokens = self._tokens(inputs)
        if tokens is None:
            return [], None
        bounds = self.parts if inputs.padding is None else self.masked_parts
        parts = [_part(self.blocks[start:end], tokens[start:end], number) for number, start, end in bounds]
        self.known[inputs.past] = key, list(inputs.past.layers), parts
        places = [part.places(inputs) for part in parts]
        return parts, None if None in places else places


class _CachedPart:
    """Consecutive layers of equal kinds with a quantized cache, for the next tokens in it."""

    def __init__(self, blocks: list[LayerBlock], tokens: list[kv_cache.NextTokens], number: int | None) -> None:
        """Make it of the `next_tokens` of each layer; `number`: of their angles."""
        self.attention, self.number = blocks[0].attention, number
        windows = [block.attention.options.get("sliding_window") for block in blocks]
        self.tokens = kv_cache.Places(tokens, windows)
        self.chain = Chain([block.block for block in blocks], self.tokens.caches)
        self.done = self.tokens.done

    def places(self, inputs: Inputs) -> list[int] | None:
        """See `kv_cache.Places.next`."""
        B, S = inputs.sizes
        places = self.tokens.next(S)
        return places if places is not None and self.attention.takes_places(B * S, places) else None

    def run(
        self, inputs: Inputs, x: Tensor, y: Tensor, angles: list[Any], places: list[int]
    ) -> Callable[[], None] | None:
        """A function that computes the last layer's result y of the first one's input; None: left to the host."""
        (B, S, _), (heads, _, _, turned), count = x.shape, self.attention.sizes, places[1]
        own = None if self.number is None else angles[self.number]
        if turned and not (own is not None and fit(*own, B, turned, self.attention.angle_dtype, S)):
            return None
        mask = inputs.mask(count)
        if mask is not None:
            mask = usable(mask, B, heads, S, count)
            if mask is None or any(other != count for other in places[1::3]):
                return None
        cos, sin, stride = addresses_of(own, turned)
        return partial(self.chain, B, S, stride, places, mask, x.data_ptr(), cos, sin, y.data_ptr())


class _StatePart:
    """Consecutive layers with states."""

    def __init__(self, blocks: list[RecurrentLayer]) -> None:
        self.blocks = blocks

    def places(self, inputs: Inputs) -> list[States] | None:
        """The states of each layer; None: left to the host."""
        states = [block.next_tokens(inputs.past, *inputs.sizes) for block in self.blocks]
        return None if None in states else states

    def run(self, inputs: Inputs, x: Tensor, y: Tensor, angles: list[Any], places: list[States]) -> Callable[[], None]:
        """A function that computes the last layer's result y of the first one's input."""
        rows = [x, *(torch.empty_like(x) for _ in self.blocks[1:]), y]

        def run() -> None:
            for block, states, before, after in zip(self.blocks, places, rows, rows[1:]):
                block.move(states, before, after)
                block.mixer.keep(states, inputs.past)

        return run

    def done(self, count: int) -> None:
        """Count the tokens: states do not count."""


def _part(blocks: list[Any], tokens: list[Any], number: int | None) -> _CachedPart | _StatePart:
    return _StatePart(blocks) if isinstance(blocks[0], RecurrentLayer) else _CachedPart(blocks, tokens, number)


def _parts(kinds: list[tuple]) -> list[tuple[int | None, int, int]]:
    """Layers of equal kinds, which begin with the number of their angles: (that number, first, last + 1)."""
    starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    return [(kinds[i][0], i, end) for i, end in zip(starts, [*starts[1:], len(kinds)])]


def _record(module: nn.Module, kwargs: dict[str, Any]) -> tuple[list[Call], Any]:
    """(calls of the children, output) of a decoder's host; its layers return what they get."""
    host = host_class(module)
    types = set(getattr(module.config, "layer_types", None) or ())
    if host.forward.__module__.partition(".")[0] != "transformers" or not types <= _TYPES:
        raise Unproven(f"the masks of {host.__name__} are not known")
    children = dict(module._modules)
    calls: list[Call] = []
    for name, child in children.items():
        if child is not None and child is _layers(module):
            children[name] = nn.ModuleList(Recorder(layer, _through, calls) for layer in child)
        elif child is not None:
            children[name] = Recorder(child, child, calls)
    return calls, host.forward(twin_of(module, children), **kwargs)


def _check_embedding(module: nn.Module) -> None:
    """Raise Unproven if ids are embedded by a module of another kind than `nn.Embedding`.

    It may keep a state, as that of an assistant with another tokenizer does: a trial, and a block that leaves a call
    to the host, call it once more.
    """
    try:
        embed = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    except NotImplementedError:  # the host does not find it
        return
    if embed is not None and not isinstance(embed, nn.Embedding):
        raise Unproven(f"{type(module).__name__} embeds by {type(embed).__name__}, which may keep a state")


def _embedded(calls: list[Call], inputs: Inputs) -> Tensor:
    """The embedding that a host has made, or was given. Raises Unproven if it began with something else."""
    if inputs.x is not None:
        return inputs.x
    first = calls[0]
    is_given = len(first.args) == 1 and not first.kwargs and is_same(first.args[0], inputs.ids)
    if not is_given or not isinstance(first.result, Tensor):
        raise Unproven(f"{type(first.child).__name__} is called before the embedding")
    return first.result


def rows_of(embed: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that embeds ids as a module does, which the block watches: a native call for each, or the module."""
    if type(embed).forward is not QuantEmbedding.forward or embed.compute_dtype != dtype:
        return embed
    try:
        weight, _, _ = weight_of(embed, "weight", embed._parameters, None, dtype)
    except Unproven:
        return embed
    if weight.scale.shape[0] != weight.N or weight.input_diagonal is not None or weight.has_float_zeros:
        return embed
    return row_reader(weight, dtype)


def _scale(embedded: Tensor, x: Tensor, config: Any) -> float:
    """The number of a config by which an embedding was multiplied. Raises Unproven if there is none."""
    for value in config.__dict__.values():
        if isinstance(value, float) and torch.equal(embedded * value, x):
            return value
    raise Unproven("the first layer is given something else than the embedding")


def _check(call: Call, before: Tensor, inputs: Inputs, expected: Tensor | None = None) -> None:
    """Raise Unproven if a layer was given something else than the result of the one before, the cache and the mask.

    `expected`: the mask [1 or B, 1, S, tokens] that its attention needs; None: it needs none.
    """
    name, kwargs = type(call.child).__name__, by_name(call.child, call.args, call.kwargs)
    if not call.args or call.args[0] is not before or not are_tokens(before, kwargs):
        raise Unproven(f"{name} is given something else than the result of the layer before it")
    if past_of(kwargs) is not inputs.past:
        raise Unproven(f"{name} is given another cache")
    mask = kwargs.get("attention_mask")
    if mask is None:
        tokens = 0 if expected is None else expected.shape[-1]
        is_known = expected is None or bool((expected == inputs._replace(padding=None).seen(tokens, None)).all())
    else:
        seen = None if expected is None else _seen(mask)
        is_known = seen is not None and bool((seen[..., : expected.shape[-1]] == expected).all())
    if not is_known:
        raise Unproven(f"{name} is given another mask than that of the padding")


def _seen(mask: Any) -> Tensor | None:
    """Return the tokens that a mask [B, 1, S, T] lets be seen, bool; None if it is of another kind."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0  # "eager" attention adds the least number to all other scores
    return seen if bool((seen | (mask == torch.finfo(mask.dtype).min)).all()) else None


def _places(values: Any, x: Tensor, inputs: Inputs) -> list[Any]:
    """Arguments of a call, with marks in place of x and the positions. Raises Unproven if there are other tensors."""
    found = [inputs.place_of(value) or (X if value is x else value) for value in values]
    if not all(isinstance(value, SETTINGS) or any(value is place for place in PLACES) for value in found):
        raise Unproven("its angles depend on more than the positions")
    return found


def _output_of(output: Any, y: Tensor, past: Any) -> Callable[[Tensor, Any], Any]:
    """A function that makes an output like `output` of (y, past). Raises Unproven if it holds something else."""
    kind, held = type(output), dict(output) if isinstance(output, dict) else {}
    name = next((name for name in kv_cache.CACHES if held.get(name) is past), "")
    if not is_same(held.pop("last_hidden_state", None), y) or held.pop(name, None) is not past or held:
        raise Unproven(f"its {kind.__name__} holds more than the last states and the cache")
    return lambda y, past: kind(**{"last_hidden_state": y, name: past})


def _block_of(layer: nn.Module, dtype: torch.dtype) -> LayerBlock | RecurrentLayer:
    state = state_of(layer)
    block = None if state is None else state.held(dtype)
    if block is None:
        raise Unproven("a layer has no block")
    if isinstance(block, LayerBlock) and block.attention.implementation != implementation_of(attention_of(layer)):
        raise Unproven("another attention function is chosen")
    return block


def run_decoder(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Any:
    """The decoder's output for new tokens, None where the host has to compute it."""
    kwargs = named_inputs(args, kwargs)
    if kwargs is None or module.training:
        return None
    tokens = NewTokens.of(kwargs)
    if tokens is None:
        return None
    state = state if tokens.inputs.sizes[1] == 1 else state.prompts
    if not state.found and not all([found.trials for layer in _layers(module) or () if (found := state_of(layer))]):
        return None  # its layers have not been called yet
    block = state.block(module, tokens.key, lambda: DecoderBlock(module, tokens.inputs, kwargs))
    return None if block is None else block(tokens.inputs)
