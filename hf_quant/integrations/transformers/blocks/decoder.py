"""The step of a decoder for one new token: all layers in one native call, what lies around them by the host's modules.

A host makes masks, passes arguments on and calls one module after the other, which takes long beside the products of a
small model. The trial runs the host's `forward` on the arguments of a real call, with children that note
how they are called. The block calls them likewise if each was given the very objects that those before it returned.
What is not seen in one call is how the host's masks change with the number of tokens: only the code of transformers
is trusted with that, for layers that attend to all tokens or to a window.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.angles import (
    PLACES,
    POSITIONS,
    ROTARY,
    THREE_TIMES,
    Angles,
    LearnedPositions,
    X,
)
from hf_quant.integrations.transformers.blocks.attention import (
    addresses_of,
    fit,
    implementation_of,
    is_one_token,
    past_of,
    usable,
)
from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    Call,
    Classes,
    Recorder,
    State,
    Unproven,
    Watch,
    by_name,
    entries_of,
    is_same,
    is_served,
    new_result,
    state_of,
    twin_of,
    weight_of,
)
from hf_quant.integrations.transformers.blocks.layer import LayerBlock, attention_of, is_layer
from hf_quant.integrations.transformers.blocks.recurrent import RecurrentLayer, States, is_recurrent_layer
from hf_quant.kernels.native.blocks import Chain
from hf_quant.kernels.native.products import row_reader
from hf_quant.modules import QuantEmbedding


_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv"}  # of layers
_SETTINGS = (bool, int, float, str, type(None))


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


class _Inputs(NamedTuple):
    """One new token of each of B sequences, as a decoder is given it.

    Attributes:
        ids: [B, 1], or None if `x` is given.
        x: the embedding [B, 1, K], or None.
        positions: [1 or B, 1], or as the host makes them from the length of the cache, if `own_positions`.
        past: the cache.
        padding: a mask [B, tokens] that is not all ones, or None.
    """

    ids: Tensor | None
    x: Tensor | None
    positions: Tensor
    own_positions: bool
    past: Any
    padding: Tensor | None

    @property
    def rows(self) -> int:
        """B."""
        return len(self.x if self.ids is None else self.ids)

    def mask(self, tokens: int) -> Tensor | None:
        """The mask of layers that attend to the last tokens, bool [B, 1, 1, tokens], or None."""
        return None if self.padding is None else self.padding[:, None, None, -tokens:].bool()

    def place_of(self, value: Any) -> object | None:
        """The mark of positions that a host made, or passed on; None for all else."""
        positions = self.positions
        if value is positions:
            return POSITIONS
        if not isinstance(value, Tensor) or value.dtype != positions.dtype:
            return None
        if positions.dim() == 2 and value.dim() == 3:
            return THREE_TIMES if len(value) == 3 and bool((value == positions).all()) else None
        if self.own_positions:
            return POSITIONS if torch.equal(value, positions) else None
        rest = positions[1:]
        is_rest = positions.dim() == 3 and value.data_ptr() == rest.data_ptr()
        return ROTARY if is_rest and torch.equal(value, rest) else None


class DecoderBlock:
    """The step of a decoder for calls with the settings of the call that is its trial."""

    def __init__(self, module: nn.Module, inputs: _Inputs, kwargs: dict[str, Any]) -> None:
        config = module.config.__dict__
        watch = Watch(module, _layers(module), entries=entries_of(config), numbers=[config.__len__, len(config)])
        layers = list(_layers(module) or ())
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
        self.embed = None if embed is None else rows_of(embed, x.dtype)
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
        for call, before, block, token in zip(ours, [x, *(call.result for call in ours)], blocks, tokens):
            if isinstance(token, States):
                _check(call, before, inputs)
                kinds.append((None, States, None))
                continue
            _check(call, before, inputs, inputs.mask(token.place[1]), token.place[1])
            angles = call.kwargs.get("position_embeddings")
            number = None if angles is None else [made.result is angles for made in rotary].index(True)
            turned = block.attention.sizes.turned
            if turned and (angles is None or not fit(*angles, len(x), turned, block.attention.angle_dtype)):
                raise Unproven("its angles are of another dtype or shape than the blocks of its layers take")
            kinds.append((number, block.attention.sizes, block.attention.options.get("sliding_window")))
        if last.args != (ours[-1].result,) or last.kwargs:
            raise Unproven(f"{type(module).__name__} does not end with its norm")
        self.output = _output_of(output, last.result, inputs.past)
        # Layers that follow each other with equal angles and heads, and if there is a mask with an equal window.
        self.parts, self.masked_parts = _parts([kind[:2] for kind in kinds]), _parts(kinds)
        self.watch = Watch.of_all([watch, *(block.watch for block in blocks)])
        # By cache: (rows and whether there is no padding, its layers, parts for their next tokens).
        self.known: WeakKeyDictionary[Any, tuple[tuple, list, list[_CachedPart | _StatePart]]] = WeakKeyDictionary()

    def _tokens(self, inputs: _Inputs) -> list[kv_cache.NextToken | States] | None:
        """The places of the next token in the cache, None if a layer of the cache takes it another way."""
        tokens, rows = [], inputs.rows
        for block in self.blocks:
            token = block.next_token(inputs.past, rows)
            if token is None:
                return None
            tokens.append(token)
        return tokens

    def __call__(self, inputs: _Inputs) -> Any:
        """The decoder's output, whose tokens are added to the cache; None: left to the host."""
        y = self.states(inputs)
        return None if y is None else self.output(self.norm(y), inputs.past)

    def states(self, inputs: _Inputs) -> Tensor | None:
        """The result of the last layer, before the norm; the tokens are added to the cache. None: left to the host."""
        parts, places = self._next(inputs)
        if places is None:
            return None
        x = inputs.x if self.embed is None else self.embed(inputs.ids)
        x = x if self.learned is None else x + self.learned(inputs.positions)
        x = x if self.scale is None else x * self.scale
        if x.dtype != self.dtype or not is_served(x):
            return None
        angles = [rotary(x, inputs.positions) for rotary in self.rotary]
        results = [new_result(x.shape, x.dtype) for _ in parts]
        rows = [x, *results]
        runs = [part.run(inputs, x, y, angles, place) for part, x, y, place in zip(parts, rows, results, places)]
        if None in runs:
            return None
        for run in runs:
            run()
        for part in parts:
            part.done()
        return results[-1]

    def _next(self, inputs: _Inputs) -> tuple[list["_CachedPart | _StatePart"], list[list[Any]] | None]:
        """The parts of the layers for the next token, and its places in the cache; None: left to the host."""
        key = (inputs.rows, inputs.padding is None)
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

    def __init__(self, blocks: list[LayerBlock], tokens: list[kv_cache.NextToken], number: int | None) -> None:
        """Make it of the `next_token` of each layer; `number`: of their angles."""
        self.attention, self.number = blocks[0].attention, number
        windows = [block.attention.options.get("sliding_window") for block in blocks]
        self.tokens = kv_cache.NextTokens(tokens, windows)
        self.chain = Chain([block.block for block in blocks], self.tokens.caches)
        self.done = self.tokens.done

    def places(self, inputs: _Inputs) -> list[int] | None:
        """See `NextTokens.places`."""
        return self.tokens.places()

    def run(
        self, inputs: _Inputs, x: Tensor, y: Tensor, angles: list[Any], places: list[int]
    ) -> Callable[[], None] | None:
        """A function that computes the last layer's result y of the first one's input; None: left to the host."""
        B, (heads, _, _, turned), count = len(x), self.attention.sizes, places[1]
        own = None if self.number is None else angles[self.number]
        if turned and not (own is not None and fit(*own, B, turned, self.attention.angle_dtype)):
            return None
        mask = inputs.mask(count)
        if mask is not None:
            mask = usable(mask, B, heads, count)
            if mask is None or any(other != count for other in places[1::3]):
                return None
        cos, sin, stride = addresses_of(own, turned)
        return partial(self.chain, B, stride, places, mask, x.data_ptr(), cos, sin, y.data_ptr())


class _StatePart:
    """Consecutive layers with states."""

    def __init__(self, blocks: list[RecurrentLayer]) -> None:
        self.blocks = blocks

    def places(self, inputs: _Inputs) -> list[States] | None:
        """The states of each layer; None: left to the host."""
        states = [block.next_token(inputs.past, inputs.rows) for block in self.blocks]
        return None if None in states else states

    def run(
        self, inputs: _Inputs, x: Tensor, y: Tensor, angles: list[Any], places: list[States]
    ) -> Callable[[], None]:
        """A function that computes the last layer's result y of the first one's input."""
        rows = [x, *(torch.empty_like(x) for _ in self.blocks[1:]), y]

        def run() -> None:
            for block, state, before, after in zip(self.blocks, places, rows, rows[1:]):
                block.block(len(x), before.data_ptr(), *state.addresses(), after.data_ptr())

        return run

    def done(self) -> None:
        """Count the tokens: states do not count."""


def _part(blocks: list[Any], tokens: list[Any], number: int | None) -> _CachedPart | _StatePart:
    return _StatePart(blocks) if isinstance(blocks[0], RecurrentLayer) else _CachedPart(blocks, tokens, number)


def _parts(kinds: list[tuple]) -> list[tuple[int | None, int, int]]:
    """Layers of equal kinds, which begin with the number of their angles: (that number, first, last + 1)."""
    starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    return [(kinds[i][0], i, end) for i, end in zip(starts, [*starts[1:], len(kinds)])]


def _record(module: nn.Module, kwargs: dict[str, Any]) -> tuple[list[Call], Any]:
    """(calls of the children, output) of a decoder's host; its layers return what they get."""
    host = type(module)._hf_quant_block_of
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


def _embedded(calls: list[Call], inputs: _Inputs) -> Tensor:
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
        weight, _, _ = weight_of(embed, "weight", None, dtype)
    except Unproven:
        return embed
    if weight.scale.shape[0] != weight.N or weight.input_diagonal is not None:
        return embed
    return row_reader(weight, dtype)


def _scale(embedded: Tensor, x: Tensor, config: Any) -> float:
    """The number of a config by which an embedding was multiplied. Raises Unproven if there is none."""
    for value in config.__dict__.values():
        if isinstance(value, float) and torch.equal(embedded * value, x):
            return value
    raise Unproven("the first layer is given something else than the embedding")


def _check(call: Call, before: Tensor, inputs: _Inputs, expected: Tensor | None = None, tokens: int = 0) -> None:
    """Raise Unproven if a layer was given something else than the result of the one before, the cache and the mask.

    `expected`: the mask of `tokens` tokens that its attention needs; of 0 tokens: it needs none.
    """
    name, kwargs = type(call.child).__name__, by_name(call.child, call.args, call.kwargs)
    if not call.args or call.args[0] is not before or not is_one_token(before, kwargs):
        raise Unproven(f"{name} is given something else than the result of the layer before it")
    if past_of(kwargs) is not inputs.past:
        raise Unproven(f"{name} is given another cache")
    mask = kwargs.get("attention_mask")
    if mask is None:
        is_known = expected is None or bool(expected.all())
    else:
        seen = _seen(mask) if tokens else None
        is_known = seen is not None and bool((seen[..., :tokens] == (True if expected is None else expected)).all())
    if not is_known:
        raise Unproven(f"{name} is given another mask than that of the padding")


def _seen(mask: Any) -> Tensor | None:
    """Return the tokens that a mask [B, 1, 1, T] lets be seen, bool; None if it is of another kind."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0  # "eager" attention adds the least number to all other scores
    return seen if bool((seen | (mask == torch.finfo(mask.dtype).min)).all()) else None


def _places(values: Any, x: Tensor, inputs: _Inputs) -> list[Any]:
    """Arguments of a call, with marks in place of x and the positions. Raises Unproven if there are other tensors."""
    found = [inputs.place_of(value) or (X if value is x else value) for value in values]
    if not all(isinstance(value, _SETTINGS) or any(value is place for place in PLACES) for value in found):
        raise Unproven("its angles depend on more than the positions")
    return found


def _output_of(output: Any, y: Tensor, past: Any) -> Callable[[Tensor, Any], Any]:
    """A function that makes an output like `output` of (y, past). Raises Unproven if it holds something else."""
    kind, held = type(output), dict(output) if isinstance(output, dict) else {}
    if not is_same(held.pop("last_hidden_state", None), y) or held.pop("past_key_values", None) is not past or held:
        raise Unproven(f"its {kind.__name__} holds more than the last states and the cache")
    return lambda y, past: kind(last_hidden_state=y, past_key_values=past)


def _block_of(layer: nn.Module, dtype: torch.dtype) -> LayerBlock | RecurrentLayer:
    state = state_of(layer)
    block = None if state is None else state.found.get(dtype)
    if block is None or not block.watch.holds():
        raise Unproven("a layer has no block")
    is_changed = isinstance(block, LayerBlock) and (
        block.attention.implementation != implementation_of(attention_of(layer))
    )
    if is_changed:
        raise Unproven("another attention function is chosen")
    state.reason = None  # an adapter or a hook may be gone again
    return block


def _inputs_of(kwargs: dict[str, Any], is_whole: bool) -> _Inputs | None:
    """Return the arguments of a decoder, None if they are not one token of each sequence with a cache.

    `is_whole`: the mask is known to be all ones.
    """
    ids, x, positions, past, mask = [kwargs.get(name) for name in INPUTS]
    if isinstance(mask, dict) and all([each is None for each in mask.values()]):
        mask = None  # a multimodal model (Gemma 3) makes the masks of all kinds of layers itself, and needs none
    given = x if ids is None else ids
    if past is None or (ids is not None and x is not None) or not isinstance(given, Tensor) or not given.is_cpu:
        return None
    if given.dim() != (3 if ids is None else 2) or given.shape[1] != 1:
        return None
    if not hasattr(past, "layers") or type(past).__hash__ is None:  # blocks know a cache by its hash
        return None
    if not 0 < len(given) <= MAX_ROWS:
        return None
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != len(given):
            return None
        mask = None if is_whole or bool(mask.all()) else mask
    if positions is None:
        return _Inputs(ids, x, torch.tensor([[past.get_seq_length()]]), True, past, mask)
    return _Inputs(ids, x, positions, False, past, mask) if isinstance(positions, Tensor) else None


def named_inputs(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a decoder by name, None if more than its ids has none."""
    if len(args) > 1 or (args and "input_ids" in kwargs):
        return None
    return {"input_ids": args[0], **kwargs} if args else kwargs


INPUTS = ("input_ids", "inputs_embeds", "position_ids", "past_key_values", "attention_mask")


def _setting(name: str, value: Any) -> Any:
    """A value of a call as a part of its key: kinds of tokens (of text and of images) are 0 for a token of text."""
    is_kind = name.endswith("token_type_ids") and isinstance(value, Tensor)
    return 0 if is_kind and not bool(value.any()) else value


class OneToken(NamedTuple):
    """A call of a decoder for one new token of each sequence: its inputs, the key of the block that serves it."""

    inputs: _Inputs
    key: tuple

    @classmethod
    def of(cls, kwargs: dict[str, Any], *, is_whole: bool = False) -> "OneToken | None":
        """The call with these arguments, None if it is of another kind. `is_whole`: the mask is all ones for sure."""
        inputs = _inputs_of(kwargs, is_whole)
        if inputs is None:
            return None
        settings = tuple([(name, _setting(name, value)) for name, value in kwargs.items() if name not in INPUTS])
        if not all([isinstance(value, _SETTINGS) for _, value in settings]):
            return None
        kind = (inputs.ids is None, inputs.own_positions, type(kwargs.get("attention_mask")), inputs.padding is None)
        return cls(inputs, (kind, settings))


def run_decoder(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Any:
    """The decoder's output for one token, None where the host has to compute it."""
    kwargs = named_inputs(args, kwargs)
    if kwargs is None or module.training:
        return None
    token = OneToken.of(kwargs)
    if token is None:
        return None
    if not state.found and not all([found.trials for layer in _layers(module) or () if (found := state_of(layer))]):
        return None  # its layers have not been called for one token yet
    block = state.block(module, token.key, lambda: DecoderBlock(module, token.inputs, kwargs))
    return None if block is None else block(token.inputs)
