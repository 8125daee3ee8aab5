"""Decoding on a CPU without the Python of the host: `TokenDecoder`, in place of the model for one `generate`.

The blocks of a decoder (`blocks.decoder`) leave to Python, at each token, the model's own `forward`, the norm and the
head, and the search for parameters, layers and hooks that were replaced: as long as a third of the products of a
model of 135M parameters. A captured step is that decoder's block and one of norm and head. It is made by a trial: a
real step of the host, whose children note how they are called. What it was made from is compared once per generation.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from hf_quant.integrations.transformers.blocks.base import (
    Call,
    Recorder,
    Unproven,
    Watch,
    add_product,
    new_result,
    random_rows,
    state_of,
    twin_of,
)
from hf_quant.integrations.transformers.blocks.decoder import DecoderBlock, rows_of
from hf_quant.integrations.transformers.blocks.inputs import INPUTS, NewTokens, named_inputs
from hf_quant.integrations.transformers.blocks.norm import NormBlock
from hf_quant.integrations.transformers.graphs.state import globals_of
from hf_quant.kernels.native.blocks import Block
from hf_quant.kernels.native.places import entries_of
from hf_quant.kv_cache import CACHES


if TYPE_CHECKING:
    from hf_quant.integrations.transformers.graphs.capture import DecodeGraphs

_WAITS = 3  # steps in which the blocks of a model are made
_AHEAD = 64  # tokens
# Arguments of a step that the host's `_update_model_kwargs_for_generation` makes from those of the one before.
_MADE = ("token_type_ids", "mm_token_type_ids")
_GROWN = ("attention_mask", "position_ids")
_OWN = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class TokenStep:
    """The step of a causal language model for one new token: its decoder, and the head on the decoder's states."""

    def __init__(
        self,
        model: nn.Module,
        token: NewTokens,
        given: dict[str, Any],
        calls: list[Call],
        inner: list[Call],
        output: Any,
    ) -> None:
        """Make it of a step of the host: its arguments, the calls of its children, its output. Raises Unproven.

        `inner`: calls of a child's children, if that is no decoder but holds one, as in multimodal models.
        """
        name = type(model).__name__
        if len(calls) == len(inner) == 1:  # OPT's model goes around the child that holds its decoder
            calls, inner = inner + calls, []
        if len(calls) != 2:
            raise Unproven(f"{name} calls something else than a decoder and a head")
        (decoder, args, kwargs, states), (head, head_args, head_kwargs, logits) = calls
        kwargs = named_inputs(args, kwargs) or {}
        is_passed = all(kwargs.get(key) is given.get(key) for key in INPUTS)
        y = states.last_hidden_state
        self.embed: Callable[[Tensor], Tensor] | None = None  # of the decoder, if it is given embeddings
        if inner:
            decoder, kwargs, self.embed = _inside(type(decoder).__name__, inner, kwargs, y)
        holders = [child for child in model.children() if any(decoder is part for part in child.children())]
        self.block = block = _block_of(decoder, kwargs)
        if not is_passed:
            raise Unproven(f"{name} changes the inputs of its decoder")
        x = head_args[0] if len(head_args) == 1 and not head_kwargs else None
        if not isinstance(x, Tensor) or (x.data_ptr(), x.shape, x.dtype) != (y.data_ptr(), y.shape, y.dtype):
            raise Unproven(f"{name} gives its head something else than the decoder's states")
        held = dict(output) if isinstance(output, dict) else {}
        found = held.pop("logits", None)
        self.cache = next((name for name in CACHES if held.get(name) is token.inputs.past), "")
        if found is None or held.pop(self.cache, None) is None or held:
            raise Unproven(f"{name} returns more than logits and the cache")
        self.change = None if found is logits else _change(logits, found, model.config)
        self.kind, self.key, self.globals = type(output), token.key, globals_of(model)
        # It holds no model: a cycle would keep the memory of one that is gone.
        watch = Watch(model, *holders, decoder, entries=entries_of(model.config.__dict__))
        self.watch = Watch.of_all([watch, block.watch])
        if not self.is_valid(model):
            raise Unproven(f"{name} has hooks")
        self.end = _end(block, head, logits.shape[-1])

    def is_valid(self, model: nn.Module) -> bool:
        """True if nothing that the step was made of has changed."""
        own = model.__dict__
        has_hooks = "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]
        return not has_hooks and self.watch.holds() and self.globals == globals_of(model)

    def __call__(self, token: NewTokens) -> Any:
        """The model's output, with the token added to the cache; None: left to the host."""
        if token.key != self.key:
            return None
        inputs = token.inputs
        if self.embed is not None:
            inputs = inputs._replace(ids=None, x=self.embed(inputs.ids))
        y = self.block.states(inputs)
        if y is None:
            return None
        logits = self.end(y) if self.change is None else self.change(self.end(y))
        return self.kind(**{"logits": logits, self.cache: token.inputs.past})


def _inside(
    name: str, calls: list[Call], given: dict[str, Any], y: Tensor
) -> tuple[nn.Module, dict[str, Any], Callable[[Tensor], Tensor]]:
    """(decoder, its arguments, its embedding) in a module that was given ids, and returned y. Raises Unproven."""
    decoder, args, kwargs, states = calls[0]
    x, ids, masks = kwargs.get("inputs_embeds"), given.get("input_ids"), kwargs.get("attention_mask")
    passed = [key for key in INPUTS if key not in ("input_ids", "inputs_embeds")]
    if isinstance(masks, dict) and not any(mask is not None for mask in masks.values()):
        passed.remove("attention_mask")
    embed = decoder.get_input_embeddings() if hasattr(decoder, "get_input_embeddings") else None
    is_watched = any(embed is child for child in decoder._modules.values())
    if len(calls) != 1 or args or x is None or ids is None or embed is None or not is_watched:
        raise Unproven(f"{name} calls something else than a decoder with embeddings")
    if any(kwargs.get(key) is not given.get(key) for key in passed) or states.last_hidden_state is not y:
        raise Unproven(f"{name} changes the inputs of its decoder, or its states")
    embed = rows_of(embed, x.dtype)
    if not torch.equal(embed(ids), x):
        raise Unproven(f"{name} gives its decoder something else than embeddings")
    return decoder, kwargs, embed


def _block_of(decoder: nn.Module, kwargs: dict[str, Any]) -> DecoderBlock:
    """The block that a decoder runs for a call. Raises Unproven."""
    state, token = state_of(decoder), NewTokens.of(kwargs)
    if state is None or token is None:
        raise Unproven(f"{type(decoder).__name__} has no block")
    block = state.found.get(token.key)
    if not isinstance(block, DecoderBlock):
        raise Unproven(state.reason or f"{type(decoder).__name__} has no block")
    return block


def _change(logits: Tensor, found: Any, config: Any) -> Callable[[Tensor], Tensor]:
    """The function of a config's number that made `found` of a head's result. Raises Unproven if there is none."""
    is_like = isinstance(found, Tensor) and found.shape == logits.shape and found.dtype == logits.dtype
    for value in config.__dict__.values() if is_like else ():
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            ways = (partial(torch.mul, other=value), partial(torch.div, other=value), partial(_capped, limit=value))
            for way in ways:
                if torch.equal(way(logits), found):
                    return way
    raise Unproven("its logits are an unknown function of its head's result")


def _capped(x: Tensor, limit: float) -> Tensor:
    return torch.tanh(x / limit) * limit


def _end(decoder: DecoderBlock, head: nn.Module, N: int) -> Callable[[Tensor], Tensor]:
    """A function that gives the logits [B, 1, N] of the states before a decoder's norm: one block, or both modules."""
    norm, K = decoder.norm, decoder.blocks[0].K
    if state_of(norm) is None:  # torch's own, whose sums are rounded otherwise
        return lambda y: head(norm(y))
    try:
        block = Block(decoder.dtype, K, N)
        middle = block.buffer(K)
        NormBlock(norm, decoder.dtype, K).add_to(block, 0, middle)
        add_product(block, middle, 1, head)
        block.finish()
    except Unproven:
        return lambda y: head(norm(y))

    def end(y: Tensor) -> Tensor:
        logits = new_result((len(y), 1, N), y.dtype)
        block(len(y), y.data_ptr(), logits.data_ptr())
        return logits

    probe = random_rows(1, 1, K, dtype=decoder.dtype)
    return end if torch.equal(end(probe), head(norm(probe))) else lambda y: head(norm(y))


class _Ahead:
    """Masks [B, tokens] and positions [..., 1] of tokens to come, made at once.

    Between two tokens the code of the ops that make them leaves the caches of the CPU.
    """

    def __init__(self, mask: Tensor | None, positions: Tensor | None) -> None:
        """Begin behind a token with this mask and these positions [..., tokens]."""
        self.has_padding = mask is not None and not bool(mask.all())
        self.made: dict[str, Tensor] = {}  # the arguments of the last token
        self._coming: dict[str, Sequence[Tensor]] = {}
        self._at = 0
        if mask is not None:
            longest = torch.cat([mask, mask.new_ones(len(mask), _AHEAD)], dim=1)
            first = mask.shape[1] + 1
            self._coming["attention_mask"] = [longest[:, :tokens] for tokens in range(first, first + _AHEAD)]
        if positions is not None:
            steps = torch.arange(1, _AHEAD + 1, dtype=positions.dtype, device=positions.device)
            self._coming["position_ids"] = (positions[..., -1:] + steps).split(1, dim=-1)

    def follows(self, kwargs: dict[str, Any]) -> bool:
        """True if these arguments are those of the last token, and there are some for the next one."""
        return self._at < _AHEAD and all(kwargs.get(name) is self.made.get(name) for name in _GROWN)

    def moved_on(self) -> dict[str, Tensor]:
        """The arguments of the next token."""
        self.made = {name: coming[self._at] for name, coming in self._coming.items()}
        self._at += 1
        return self.made


class TokenDecoder:
    """Callable that one `generate` uses instead of the model on a CPU."""

    def __init__(self, graphs: "DecodeGraphs", cache: Any) -> None:
        self.graphs, self.cache = graphs, weakref.ref(cache)
        self.step: TokenStep | None = None
        self.waits = _WAITS  # steps of the host until a captured one has to be there
        self.ahead: _Ahead | None = None
        # A method of its own may make more of the arguments than they are.
        model = graphs.model()
        is_own = any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in _OWN)
        self.makes_arguments = not is_own and _OWN[0] not in model.__dict__

    def moved_on(self, kwargs: dict[str, Any]) -> bool:
        """Make the mask and the positions of the next token in the arguments of `generate`'s steps.

        False: left to the host's `_update_model_kwargs_for_generation`, which does so with a dozen ops.
        """
        if self.step is None or not self.makes_arguments or any(kwargs.get(name) is not None for name in _MADE):
            return False
        if self.ahead is None or not self.ahead.follows(kwargs):
            self.ahead = _Ahead(*(kwargs.get(name) for name in _GROWN))
        kwargs.update(self.ahead.moved_on())
        return True

    def __call__(self, **inputs: Any) -> Any:
        model, graphs, ahead = self.graphs.model(), self.graphs, self.ahead
        is_whole = ahead is not None and not ahead.has_padding and inputs.get(_GROWN[0]) is ahead.made.get(_GROWN[0])
        token = NewTokens.of(inputs, is_whole=is_whole)
        if token is None or token.inputs.sizes[1] > 1 or token.inputs.past is not self.cache():
            ids = inputs.get("input_ids")
            if self.waits and isinstance(ids, Tensor) and ids.shape[-1] == 1:
                names = [name for name, value in inputs.items() if name not in INPUTS and isinstance(value, Tensor)]
                graphs.note(f"its steps are given {', '.join(names) or 'inputs of another kind'}")
                self.waits = 0
            return model(**inputs)
        if self.step is None and self.waits:
            self.step = next((step for step in graphs.steps if step.key == token.key and step.is_valid(model)), None)
        if self.step is not None:
            with torch.no_grad():
                output = self.step(token)
            if output is not None:
                graphs.num_replays += 1
                return output
            graphs.note("a step differs from the captured one")
        elif self.waits:
            return self.capture(model, token, inputs)
        return model(**inputs)

    def capture(self, model: nn.Module, token: NewTokens, inputs: dict[str, Any]) -> Any:
        """Run a step of the host, and make a captured one of it if its decoder has a block by now."""
        self.waits -= 1
        calls, inner = [], []
        past, length = token.inputs.past, token.inputs.past.get_seq_length()
        try:
            output = _recorded(model, calls, inner)(**inputs)
        except Exception as error:  # a host's own code may not bear such children
            if past.get_seq_length() != length:
                raise
            self.graphs.note(str(error) or type(error).__name__)
            self.waits = 0
            return model(**inputs)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.step = TokenStep(model, token, inputs, calls, inner, output)
        except Exception as error:  # noqa: BLE001  (what a host returns may be anything)
            if not self.waits:
                self.graphs.note(str(error) or type(error).__name__)
            return output
        self.graphs.steps = [*(step for step in self.graphs.steps if step.is_valid(model)), self.step]
        self.graphs.num_captures += 1
        return output


def _recorded(module: nn.Module, calls: list[Call], inner: list[Call]) -> Callable[..., Any]:
    """A module whose children note their calls; those of a child that holds a decoder note theirs in `inner`."""
    children = dict(module._modules)
    for name, child in _called(module):
        children[name] = recorder = Recorder(child, child, calls)
        if state_of(child) is None and any(map(_is_decoder, child.children())):
            parts = {**child._modules, **{part: Recorder(own, own, inner) for part, own in _called(child)}}
            recorder.__dict__.update(_compute=_with_children(child, parts), _modules=parts)
    return _with_children(module, children)


def _called(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, child) of the children that a module calls."""
    found = module._modules.items()
    return [(name, child) for name, child in found if not isinstance(child, nn.ModuleList | nn.ModuleDict | None)]


def _with_children(module: nn.Module, children: dict[str, nn.Module | None]) -> Callable[..., Any]:
    """A function that calls a module, with other children."""

    def call(*args: Any, **kwargs: Any) -> Any:
        twin = twin_of(module, children)
        output = twin(*args, **kwargs)
        module.__dict__.update((name, value) for name, value in twin.__dict__.items() if name != "_modules")
        return output

    return call


def _is_decoder(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and any(isinstance(block, DecoderBlock) for block in state.found.values())
