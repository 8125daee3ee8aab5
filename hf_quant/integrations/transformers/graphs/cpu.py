"""Decoding on a CPU without the Python of the host: `TokenDecoder`, in place of the model for one `generate`.

The blocks of a decoder (`blocks.decoder`) leave to Python, at each token, the model's own `forward`, the norm and the
head, and the search for parameters, layers and hooks that were replaced: as long as a third of the products of a
model of 135M parameters. A captured step is that decoder's block and one of norm and head. It is made by a trial: a
real step of the host, whose children note how they are called. What it was made from is compared once per generation.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.base import (
    Unproven,
    Watch,
    add_product,
    entries_of,
    random_rows,
    state_of,
    twin_of,
)
from hf_quant.integrations.transformers.blocks.decoder import INPUTS, Call, DecoderBlock, OneToken, Recorder
from hf_quant.integrations.transformers.blocks.norm import NormBlock
from hf_quant.integrations.transformers.graphs.state import globals_of
from hf_quant.kernels.native.blocks import Block


if TYPE_CHECKING:
    from hf_quant.integrations.transformers.graphs.capture import DecodeGraphs

_WAITS = 3  # steps in which the blocks of a model are made


class TokenStep:
    """The step of a causal language model for one new token: its decoder, and the head on the decoder's states."""

    def __init__(
        self, model: nn.Module, token: OneToken, given: dict[str, Any], calls: list[Call], output: Any
    ) -> None:
        """Make it of a step of the host: its arguments, the calls of its children, its output. Raises Unproven."""
        name = type(model).__name__
        if len(calls) != 2:
            raise Unproven(f"{name} calls something else than a decoder and a head")
        (decoder, args, kwargs, states), (head, head_args, head_kwargs, logits) = calls
        self.block = block = _block_of(decoder, kwargs)
        if args or any(kwargs.get(key) is not given.get(key) for key in INPUTS):
            raise Unproven(f"{name} changes the inputs of its decoder")
        y = states.last_hidden_state
        x = head_args[0] if len(head_args) == 1 and not head_kwargs else None
        if not isinstance(x, Tensor) or (x.data_ptr(), x.shape, x.dtype) != (y.data_ptr(), y.shape, y.dtype):
            raise Unproven(f"{name} gives its head something else than the decoder's states")
        held = dict(output) if isinstance(output, dict) else {}
        found = held.pop("logits", None)
        if found is None or held.pop("past_key_values", None) is not token.inputs.past or held:
            raise Unproven(f"{name} returns more than logits and the cache")
        self.change = None if found is logits else _change(logits, found, model.config)
        self.kind, self.key, self.globals = type(output), token.key, globals_of(model)
        # It holds no model: a cycle would keep the memory of one that is gone.
        watch = Watch(model, decoder, entries=entries_of(model.config.__dict__))
        self.watch = Watch.of_all([watch, block.watch])
        if not self.is_valid(model):
            raise Unproven(f"{name} has hooks")
        self.end = _end(block, head, logits.shape[-1])

    def is_valid(self, model: nn.Module) -> bool:
        """True if nothing that the step was made of has changed."""
        own = model.__dict__
        has_hooks = "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]
        return not has_hooks and self.watch.holds() and self.globals == globals_of(model)

    def __call__(self, token: OneToken) -> Any:
        """The model's output, with the token added to the cache; None: left to the host."""
        if token.key != self.key:
            return None
        y = self.block.states(token.inputs)
        if y is None:
            return None
        logits = self.end(y) if self.change is None else self.change(self.end(y))
        return self.kind(logits=logits, past_key_values=token.inputs.past)


def _block_of(decoder: nn.Module, kwargs: dict[str, Any]) -> DecoderBlock:
    """The block that a decoder runs for a call. Raises Unproven."""
    state, token = state_of(decoder), OneToken.of(kwargs)
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
    try:
        block = Block(decoder.dtype, K, N)
        middle = block.buffer(K)
        NormBlock(norm, K, decoder.dtype).add_to(block, 0, middle)
        add_product(block, middle, 1, head)
        block.finish()
    except Unproven:
        return lambda y: head(norm(y))

    def end(y: Tensor) -> Tensor:
        with torch.inference_mode(False):
            logits = torch.empty(len(y), 1, N, dtype=y.dtype)
        block(len(y), y.data_ptr(), logits.data_ptr())
        return logits

    probe = random_rows(1, 1, K, dtype=decoder.dtype)
    return end if torch.equal(end(probe), head(norm(probe))) else lambda y: head(norm(y))


class TokenDecoder:
    """Callable that one `generate` uses instead of the model on a CPU."""

    def __init__(self, graphs: "DecodeGraphs", cache: Any) -> None:
        self.graphs, self.cache = graphs, weakref.ref(cache)
        self.step: TokenStep | None = None
        self.waits = _WAITS  # steps of the host until a captured one has to be there

    def __call__(self, **inputs: Any) -> Any:
        model, graphs = self.graphs.model(), self.graphs
        token = OneToken.of(inputs)
        if token is None or token.inputs.past is not self.cache():
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

    def capture(self, model: nn.Module, token: OneToken, inputs: dict[str, Any]) -> Any:
        """Run a step of the host, and make a captured one of it if its decoder has a block by now."""
        self.waits -= 1
        calls: list[Call] = []
        children = dict(model._modules)
        for name, child in children.items():
            if child is not None and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                children[name] = Recorder(child, child, calls)
        twin = twin_of(model, children)
        output = twin(**inputs)
        model.__dict__.update((name, value) for name, value in twin.__dict__.items() if name != "_modules")
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.step = TokenStep(model, token, inputs, calls, output)
        except Exception as error:  # noqa: BLE001  (what a host returns may be anything)
            if not self.waits:
                self.graphs.note(str(error) or type(error).__name__)
            return output
        self.graphs.steps = [*(step for step in self.graphs.steps if step.is_valid(model)), self.step]
        self.graphs.num_captures += 1
        return output
