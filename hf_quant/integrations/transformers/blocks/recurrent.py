"""Layers with a state in place of a cache, one native call for a token: gated delta nets and short convolutions.

Gated delta nets (https://arxiv.org/abs/2412.06464) of Qwen3-Next and Qwen3.5, and LFM2's convolutions. The host's
module is tried with states that are given: the block must compute the same output and leave the same states. Prompts
are served by the blocks of layers, one token after the other, unless they are padded.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.base import (
    QUANTIZED,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    add_product,
    difference,
    host_class,
    random_rows,
)
from hf_quant.integrations.transformers.blocks.calls import are_tokens
from hf_quant.integrations.transformers.blocks.layer import CHUNK, Rest, has_parts
from hf_quant.integrations.transformers.blocks.mlp import named
from hf_quant.integrations.transformers.blocks.norm import _eps_of
from hf_quant.kernels.native.blocks import Block, max_head_dim
from hf_quant.modules import QuantLinear


_MAX_TAPS = 8  # of a convolution: kMaxTaps of the native kernels
# Layers of a gated delta net: one with its queries, keys and values, and those of one output for each head.
_APART, _JOINED = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"), ("in_proj_qkvz", "in_proj_ba")


class _States:
    """A cache that holds the given states of one layer, if there are some."""

    def __init__(self, conv: Tensor | None, recurrent: Tensor | None) -> None:
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> Tensor:
        self.conv = states[..., -conv_kernel_size:]
        return states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent = states
        return states


def is_delta_net(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of a gated delta net, by their names; a trial shows what it computes."""
    children = module._modules
    is_named = any(set(children) == {*names, "conv1d", "norm", "out_proj"} for names in (_APART, _JOINED))
    large = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")
    return is_named and all(isinstance(child, linear) for name, child in children.items() if name in large)


def is_short_convolution(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of a convolution with two gates, by their names."""
    children = module._modules
    is_named = set(children) == {"conv", "in_proj", "out_proj"} and isinstance(children["conv"], nn.Conv1d)
    return is_named and all(isinstance(children[name], linear) for name in ("in_proj", "out_proj"))


def taps_of(convolution: Any, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(weight [width, taps], bias) of a causal convolution of each channel. Raises Unproven."""
    weight, bias = (convolution._parameters.get(name) for name in ("weight", "bias"))
    if type(convolution) is not nn.Conv1d or weight.shape[:2] != (width, 1) or weight.shape[2] > _MAX_TAPS:
        raise Unproven("its convolution is of another kind")
    for part in (weight, bias):
        if part is not None and (part.dtype != dtype or not part.is_contiguous() or not part.is_cpu):
            raise Unproven("its convolution is of another dtype")
    return weight.squeeze(1), bias


def add_small(block: Block, x: int, layer: nn.Module, outputs: int, *, has_bias: bool = True) -> int:
    """Add the product of a layer that may be as it was; returns the buffer of the result. Raises Unproven."""
    if isinstance(layer, QuantLinear) and layer.out_features == outputs:
        to = block.buffer(outputs)
        add_product(block, x, to, layer, has_bias=has_bias)
        return to
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous() or layer.out_features != outputs:
        raise Unproven(f"{type(layer).__name__} is no linear layer of {outputs} outputs")
    return block.small(x, layer.weight, layer.bias if has_bias else None)


class Mixer:
    """Base of all kinds: what a layer computes in place of attention.

    Attributes:
        K: width of x and y.
        width: channels of the convolution.
        taps, bias: of the convolution, [width, taps] and [width].
        shape: of the recurrent state of a sequence; None: there is none.
        serves_prompts: it computes several tokens, too, and not only as part of a layer.
    """

    serves_prompts = False
    shape: tuple[int, ...] | None = None

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.watch, self.dtype, self.index = Watch(module), dtype, module.layer_idx
        self._read(module)
        errors, ways = [], self._ways()
        for self.way in ways:
            errors.append(_error(self._make(), self, module))
        best = min(errors)
        self.way = ways[errors.index(best)]
        self.block = self._make()
        if self.serves_prompts:
            best = max(best, _error(self.block, self, module, tokens=70))
        _check(module, best, dtype)

    def _read(self, module: nn.Module) -> None:
        """Find the layers and their sizes. Raises Unproven."""
        raise NotImplementedError

    def _ways(self) -> list[Any]:
        """Return the settings that differ from host to host, of which a trial finds the right one."""
        return [None]

    def add_to(self, block: Block, x: int, to: int) -> None:
        """Add the steps from x to the result to a block that `begin` has begun."""
        raise NotImplementedError

    def begin(self) -> Block:
        """Begin a block with the arguments x, the state of the convolution, the recurrent state, and y."""
        recurrent = torch.Size(self.shape or ()).numel()
        return Block(self.dtype, self.K, self.width * self.taps.shape[1], recurrent, self.K)

    def _make(self) -> Block:
        block = self.begin()
        self.add_to(block, 0, 3)
        return block.finish()

    def new_states(self, B: int) -> "States":
        """The states of B sequences before their first token."""
        conv = torch.zeros(B, self.width, self.taps.shape[1], dtype=self.dtype)
        return States(conv, None if self.shape is None else torch.zeros(B, *self.shape, dtype=torch.float32))

    def states(self, past: Any, B: int) -> "States | None":
        """The states of B sequences in a cache, None if there are none yet, or they lie otherwise than blocks read."""
        conv = past.get_conv_state(self.index, state_idx=0)
        if past.is_recording_past(self.index) or not _lies(conv, (B, self.width, self.taps.shape[1]), self.dtype):
            return None
        if self.shape is None:
            return States(conv, None)
        recurrent = past.get_recurrent_state(self.index, state_idx=0)
        return States(conv, recurrent) if _lies(recurrent, (B, *self.shape), torch.float32) else None

    def next_tokens(self, past: Any, B: int, count: int) -> "States | None":
        """The states that new tokens of B sequences move on, None if the block does not read them.

        One token needs states that are there.
        """
        index = self.index
        if count > 1 and not past.is_recording_past(index) and past.get_conv_state(index, state_idx=0) is None:
            return self.new_states(B)._replace(are_new=True)
        return self.states(past, B)

    def keep(self, states: "States", past: Any) -> None:
        """Put states into the cache if they are new."""
        if not states.are_new:
            return
        past.update_conv_state(states.conv, self.index, conv_kernel_size=states.conv.shape[2])
        if states.recurrent is not None:
            past.update_recurrent_state(states.recurrent, self.index)


def _lies(state: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    is_like = isinstance(state, Tensor) and state.shape == shape and state.dtype == dtype
    return is_like and state.is_cpu and state.is_contiguous()


class States(NamedTuple):
    """The states of a layer: of its convolution [B, width, taps], and the recurrent one, if it has one."""

    conv: Tensor
    recurrent: Tensor | None
    are_new: bool = False  # not in the cache yet

    def addresses(self) -> tuple[int, int]:
        """The addresses of both, 0 if there is none."""
        return self.conv.data_ptr(), 0 if self.recurrent is None else self.recurrent.data_ptr()


class RecurrentLayer:
    """The native block of a layer: norms, a mixer, feed-forward, and the sums between, for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        found = _mixer_of(module)
        if found is None:
            raise Unproven("its layers were replaced")
        name, kind = found
        self.mixer = mixer = kind(module._modules[name], dtype)
        self.K = mixer.K
        rest = Rest(module, name, mixer.K, dtype)
        self.watch = Watch.of_all([Watch(module), mixer.watch, rest.mlp.watch])
        self.block = block = mixer.begin()
        x, y = rest.add_before(block), block.buffer(mixer.K)
        mixer.add_to(block, x, y)
        rest.add_behind(block, y, 3)
        block.finish()
        errors = [_error(block, mixer, module, tokens=tokens, position_embeddings=None) for tokens in (1, 70)]
        _check(module, max(errors), dtype)

    def next_tokens(self, past: Any, B: int, count: int) -> States | None:
        """The states that new tokens of B sequences move on, see `Mixer.next_tokens`."""
        return self.mixer.next_tokens(past, B, count)

    def move(self, states: States, x: Tensor, y: Tensor) -> None:
        """Compute the output y for tokens x [B, S, K]; the states are moved on by S tokens."""
        _move(self.block, states, x, y)


def _move(block: Block, states: States, x: Tensor, y: Tensor) -> None:
    """`RecurrentLayer.move` by a block, some hundred rows at a time."""
    (B, S, K), size = x.shape, x.element_size()
    if B * S <= CHUNK:
        block(B * S, x.data_ptr(), *states.addresses(), y.data_ptr(), sequences=B)
        return
    together = max(CHUNK // S, 1)  # sequences
    for b in range(0, B, together):
        count = min(together, B - b)
        at = States(*(None if state is None else state[b:] for state in states[:2])).addresses()
        for start in range(0, S, CHUNK):
            offset = (b * S + start) * K * size
            rows = count * min(S - start, CHUNK)
            block(rows, x.data_ptr() + offset, *at, y.data_ptr() + offset, sequences=count)


def _error(block: Block, mixer: Mixer, module: nn.Module, *, tokens: int = 1, **kwargs: None) -> float:
    """The largest `difference` of output and states of a block from those of the host's module.

    One token meets random states, several are the first ones. `kwargs`: further ones of the module.
    """
    dtype = mixer.dtype
    x, given, theirs = random_rows(2, tokens, mixer.K, dtype=dtype), mixer.new_states(2), _States(None, None)
    if tokens == 1:
        conv, recurrent, _ = given
        conv.copy_(random_rows(*conv.shape, dtype=dtype, seed=1))
        if recurrent is not None:
            recurrent.copy_(random_rows(*recurrent.shape, dtype=torch.float32, seed=2))
        theirs = _States(conv.clone(), None if recurrent is None else recurrent.clone())
    host = host_class(module).forward
    expected = host(module, hidden_states=x, attention_mask=None, **kwargs, **{kv_cache.cache_name(host): theirs})
    y = torch.empty_like(x)
    _move(block, given, x, y)
    errors = [difference(y, expected), difference(given.conv, theirs.conv)]
    if given.recurrent is not None:
        errors.append(difference(given.recurrent.to(dtype), theirs.recurrent.to(dtype)))
    return max(errors)


def _check(module: nn.Module, error: float, dtype: torch.dtype) -> None:
    if not error <= TOLERANCE[dtype]:
        raise Unproven(f"{type(module).__name__} computes something else: off by {error:.3g} roundings")


class DeltaNet(Mixer):
    """The native block of a gated delta net for x of one dtype."""

    def _read(self, module: nn.Module) -> None:
        self.layers = children = dict(module._modules)
        self.decay, self.time_bias = module.A_log, module.dt_bias
        self.is_joined = "in_proj_qkvz" in children
        first = children["in_proj_qkvz" if self.is_joined else "in_proj_qkv"]
        values = module.num_v_heads * module.head_v_dim
        self.K, self.width = first.in_features, first.out_features - values * self.is_joined
        self.taps, self.bias = taps_of(children["conv1d"], self.width, self.dtype)
        self.heads = module.num_k_heads, module.num_v_heads
        self.dims = module.head_k_dim, module.head_v_dim
        self.shape = (module.num_v_heads, *self.dims)
        self.activation = named(ACT2FN[module.activation], type(module).__name__)
        if self.width != 2 * module.num_k_heads * module.head_k_dim + values or max(self.dims) > max_head_dim():
            raise Unproven("its heads are of other sizes")
        if module.head_k_dim % 4 or module.num_v_heads % module.num_k_heads:
            raise Unproven("its heads are of other sizes")
        if children["out_proj"].in_features != values or children["out_proj"].out_features != self.K:
            raise Unproven("its output is of another width")

    def _ways(self) -> list[Any]:
        return [*product((True, False), repeat=2)]

    def add_to(self, block: Block, x: int, to: int) -> None:
        (rounds, rounds_gate), layers, heads, value_dim = self.way, self.layers, self.heads[1], self.dims[1]
        qkv, y, z = (block.buffer(width) for width in (self.width, heads * value_dim, heads * value_dim))
        if self.is_joined:
            a, b = self._add_joined(block, x, qkv, z)
        else:
            add_product(block, x, qkv, layers["in_proj_qkv"])
            add_product(block, x, z, layers["in_proj_z"])
            a, b = (add_small(block, x, layers[name], heads) for name in ("in_proj_a", "in_proj_b"))
        block.convolve(qkv, qkv, 1, self.taps, self.bias, self.activation)
        block.delta(qkv, a, b, y, 2, heads=self.heads, dims=self.dims, log_decay=self.decay, time_bias=self.time_bias)
        norm = layers["norm"]
        options = {"plus_one": False, "rounds_weight": False, "rounds": rounds, "centers": False}
        block.norm(y, y, norm.weight, None, _eps_of(norm), **options)
        block.gate(z, y, y, "silu", rounds=rounds_gate)
        add_product(block, y, to, layers["out_proj"])

    def _add_joined(self, block: Block, x: int, qkv: int, z: int) -> tuple[int, int]:
        """Add two products, whose results lie together by heads of keys (Qwen3-Next); returns the buffers of a, b."""
        (shared, heads), (key_dim, value_dim) = self.heads, self.dims
        each = heads // shared  # heads of values
        both = block.buffer(self.width + heads * value_dim)
        small = add_small(block, x, self.layers["in_proj_ba"], 2 * heads)
        add_product(block, x, both, self.layers["in_proj_qkvz"])
        first, column = 0, 0
        for width, to in ((key_dim, qkv), (key_dim, qkv), (each * value_dim, qkv), (each * value_dim, z)):
            at = 0 if to == z else column
            block.pick(both, to, slice(first, first + width), group=2 * (key_dim + each * value_dim), column=at)
            first, column = first + width, column + shared * width
        a, b = block.buffer(heads), block.buffer(heads)
        block.pick(small, b, slice(0, each), group=2 * each)
        block.pick(small, a, slice(each, 2 * each), group=2 * each)
        return a, b


class ShortConvolution(Mixer):
    """The native block of a convolution between two gates, for x of one dtype."""

    def _read(self, module: nn.Module) -> None:
        self.layers = first, last = module._modules["in_proj"], module._modules["out_proj"]
        self.K = self.width = first.in_features
        if (first.out_features, last.in_features, last.out_features) != (3 * self.K, self.K, self.K):
            raise Unproven("its layers are of other widths")
        self.taps, self.bias = taps_of(module._modules["conv"], self.width, self.dtype)

    def add_to(self, block: Block, x: int, to: int) -> None:
        K = self.K
        before, after, y = (block.buffer(K) for _ in range(3))
        for i, part in enumerate((before, after, y)):
            add_product(block, x, part, self.layers[0], slice(i * K, (i + 1) * K))
        block.gate(before, y, y, "identity")
        block.convolve(y, y, 1, self.taps, self.bias)
        block.gate(after, y, y, "identity")
        add_product(block, y, to, self.layers[1])


_KINDS = (("linear_attn", DeltaNet, is_delta_net), ("conv", ShortConvolution, is_short_convolution))


def _mixer_of(module: nn.Module, linear: Classes = QUANTIZED) -> tuple[str, type[Mixer]] | None:
    """(name, kind) of the child of a layer that stands in place of attention, None if there is none."""
    for name, kind, is_kind in _KINDS:
        if name in module._modules and is_kind(module._modules[name], linear):
            return name, kind
    return None


def is_recurrent_layer(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of a layer with a state, by their names; a trial shows what it computes."""
    found = _mixer_of(module, linear)
    return found is not None and has_parts(module, found[0], linear)


def _run(
    kind: type[Mixer] | type[RecurrentLayer], module: nn.Module, state: State, x: Any, kwargs: dict[str, Any]
) -> Tensor | None:
    """The output for tokens x [B, S, K], of modules but layers S = 1; None where the host has to compute it."""
    past = kv_cache.cache_in(kwargs)
    if module.training or past is None or kwargs.get("attention_mask") is not None or not are_tokens(x, kwargs):
        return None
    found = state.block(module, x.dtype, lambda: kind(module, x.dtype))
    if found is None or found.K != x.shape[2]:
        return None
    mixer = found.mixer if isinstance(found, RecurrentLayer) else found
    states = mixer.next_tokens(past, *x.shape[:2])
    if states is None:
        return None
    y = torch.empty_like(x)
    _move(found.block, states, x, y)
    mixer.keep(states, past)
    return y


def run_delta_net(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The module's output for one token of each sequence, None where the host has to compute it."""
    return run_mixer(DeltaNet, module, state, args, kwargs)


def run_short_convolution(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The module's output for one token of each sequence, None where the host has to compute it."""
    return run_mixer(ShortConvolution, module, state, args, kwargs)


def run_mixer(kind: type[Mixer], module: nn.Module, state: State, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The output of a module with a mixer of a kind, None where the host has to compute it."""
    if len(args) > 1:
        return None
    x = args[0] if args else kwargs.get("hidden_states")
    if not kind.serves_prompts and isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] > 1:
        return None
    return _run(kind, module, state, x, kwargs)


def run_recurrent_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The layer's output, None where the host has to compute it."""
    if len(args) != 1:
        return None
    return _run(RecurrentLayer, module, state, args[0], kwargs)
