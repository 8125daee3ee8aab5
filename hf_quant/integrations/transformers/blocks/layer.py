"""A layer of a decoder as native calls: norms, attention, feed-forward, and the sums between.

Up to `CHUNK` tokens with a quantized cache are one call. Of more, or with another cache, what lies before the
attention is one, and what lies behind it. The parts are the blocks of its modules; the trial shows how the host puts
them together.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.angles import angle_dtype, fit, in_pairs, turned_by
from hf_quant.integrations.transformers.blocks.attention import AttentionBlock
from hf_quant.integrations.transformers.blocks.attention_parts import is_attention
from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    QUANTIZED,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    as_part,
    by_name,
    check_read,
    difference,
)
from hf_quant.integrations.transformers.blocks.calls import are_tokens, implementation_of, past_of
from hf_quant.integrations.transformers.blocks.latent import LatentAttention, is_latent_attention
from hf_quant.integrations.transformers.blocks.mixture import MixtureBlock, is_mixture
from hf_quant.integrations.transformers.blocks.mlp import MLPBlock, is_mlp, takes_more
from hf_quant.integrations.transformers.blocks.norm import NormBlock, is_norm
from hf_quant.integrations.transformers.blocks.trial import has_own_code, probe, record
from hf_quant.kernels.native.blocks import Block


# The norm of a layer whose attention and feed-forward read the same.
_PARALLEL = (
    ("input_layernorm", None, None, None),
    ("ln_1", None, None, None),
)
# Names of the norms before and after the attention, before and after the feed-forward.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("ln_1", None, "ln_2", None),
    ("self_attn_layer_norm", None, "final_layer_norm", None),
    ("operator_norm", None, "ffn_norm", None),
    *_PARALLEL,
)
# Of these norms: (whether attention and feed-forward read the same x, whether x is added last), as they may be.
_WAYS = {_NORMS[0]: [(False, False), (True, False), (True, True)]}
_WAYS |= dict.fromkeys(_PARALLEL, [(True, False), (True, True)])
_FEED_FORWARD = ("mlp", "block_sparse_moe", "feed_forward", "moe")
_INLINE = {"fc1", "fc2", "activation_fn"}  # a feed-forward block without a module of its own (OPT)
_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_FACTORS = ("residual_multiplier", "residual_scale")  # of what is added to x: Granite, MiniCPM3
_POSITION = 5  # of the trial
CHUNK = 512  # rows at a time: what lies between two steps stays in the caches


def is_layer(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of a layer, by their names; a trial shows what it computes."""
    return has_attention(module, linear) and not has_own_code(attention_of(module))


def has_attention(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of a layer with attention, by their names."""
    name = name_of_attention(module)
    if not has_parts(module, name, linear):
        return False
    return is_attention(module._modules[name], linear) or is_latent_attention(module._modules[name], linear)


def name_of_attention(module: nn.Module) -> str:
    """The name of the attention of a layer."""
    return next((name for name in _ATTENTION if name in module._modules), _ATTENTION[0])


def attention_of(module: nn.Module) -> nn.Module:
    """The attention of a layer."""
    return module._modules[name_of_attention(module)]


def has_parts(module: nn.Module, mixer: str, linear: Classes) -> bool:
    """True if a module has a child `mixer`, norms, and a feed-forward block of layers of a class."""
    rest = feed_forward(module)
    return names_of_norms(module, mixer) is not None and (is_mlp(rest, linear) or is_mixture(rest))


def feed_forward(module: nn.Module) -> nn.Module | None:
    """The feed-forward block of a layer, which may be the layer itself; None if it has none."""
    own = module if module._modules.keys() >= _INLINE - {"activation_fn"} else None
    return next((module._modules[name] for name in _FEED_FORWARD if name in module._modules), own)


def names_of_norms(module: nn.Module, mixer: str) -> tuple[str | None, ...] | None:
    """The names of the norms before and behind `mixer` and feed-forward of a layer, None if it has others."""
    children = module._modules
    if mixer not in children or feed_forward(module) is None:
        return None
    norms = {name for name, child in children.items() if not isinstance(child, nn.Dropout)}
    norms -= {mixer, *(_INLINE if feed_forward(module) is module else _FEED_FORWARD)}
    found = next((names for names in _NORMS if norms == set(names) - {None}), None)
    return found if found is not None and all(is_norm(children[name]) for name in norms) else None


class Rest:
    """The norms and the feed-forward block of a layer whose x is K wide; `factor`: of what is added to x."""

    def __init__(self, module: nn.Module, mixer: str, K: int, dtype: torch.dtype) -> None:
        children, rest = module._modules, feed_forward(module)
        is_part = rest is module or takes_more(rest)
        make = partial(MLPBlock, is_part=is_part) if is_mlp(rest) else MixtureBlock
        self.mlp = make(rest, dtype) if is_part else as_part(make, rest, dtype)
        if self.mlp.K != K or self.mlp.N != K:
            raise Unproven("the widths of attention and feed-forward differ")
        self.K, self.names = K, names_of_norms(module, mixer) or ()
        self.norms = [None if name is None else as_part(NormBlock, children[name], dtype, K) for name in self.names]
        check_read(module, *(child for child in children.values() if child is not None))
        self.factor = next((float(getattr(module, name)) for name in _FACTORS if hasattr(module, name)), 1.0)

    def add_before(self, block: Block) -> int:
        """Add the norm before the attention to a block; returns the buffer of its result."""
        if self.norms[0] is None:
            return 0
        h = block.buffer(self.K)
        self.norms[0].add_to(block, 0, h)
        return h

    def add_behind(self, block: Block, y: int, to: int) -> None:
        """Add the steps from the input, buffer 0, and the output y of the attention to the output of the layer."""
        _, after, before_mlp, after_mlp = self.norms
        h, n = block.buffer(self.K), block.buffer(self.K)
        if after is not None:
            after.add_to(block, y, y)
        block.add(0, y, h, self.factor)
        if before_mlp is not None:
            before_mlp.add_to(block, h, n)
        self.mlp.add_to(block, n if before_mlp is not None else h, y)
        if after_mlp is not None:
            after_mlp.add_to(block, y, y)
        block.add(h, y, to, self.factor)


class LayerBlock:
    """The native block of a layer with attention for x of one dtype, and angles of one."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, turned: int, of_angles: torch.dtype) -> None:
        kind = self.kind_of_attention(module)
        self.attention = attention = as_part(kind, attention_of(module), dtype, turned, of_angles)
        self.K = attention.K
        self.rest = rest = Rest(module, name_of_attention(module), self.K, dtype)
        self.watch = Watch.of_all([Watch(module), attention.watch, rest.mlp.watch])
        self.is_parallel, self.residual_last = False, False
        self.first = attention.projections_of(rest.add_before)
        self._prove(module, dtype, turned)
        angles = max(turned, 1)
        self.block = Block(dtype, self.K, angles, angles, self.K)
        x, y = rest.add_before(self.block), self.block.buffer(self.K)
        attention.add_to(self.block, x, y)
        self._add_rest(self.block, x, y, 3)
        self.block.finish()

    def kind_of_attention(self, module: nn.Module) -> type[AttentionBlock]:
        """The class of the block of a layer's attention."""
        return LatentAttention if is_latent_attention(attention_of(module), QUANTIZED) else AttentionBlock

    def ways(self) -> list[tuple[bool, bool]]:
        """The values that `is_parallel` and `residual_last` may have."""
        return _WAYS.get(self.rest.names, [(False, False)])

    def make_last(self, dtype: torch.dtype, *, of_trial: bool = False) -> Block:
        """The block from x and the result of the attention to the output; the last argument is the gate, if any.

        `of_trial`: that of an attention function.
        """
        attention = self.attention
        gates = attention.widths[attention.num_states :]
        width = attention.width_of_trial() if of_trial else attention.widths[0]
        block = Block(dtype, self.K, width, self.K, *gates)
        reads_same = self.is_parallel and self.rest.norms[2] is None
        x, y = self.rest.add_before(block) if reads_same else 0, block.buffer(self.K)
        add = attention.add_output_of_trial if of_trial else attention.add_output
        add(block, 1, y, *range(3, 3 + len(gates)))
        self._add_rest(block, x, y, 2)
        return block.finish()

    def _add_rest(self, block: Block, x: int, y: int, to: int) -> None:
        """Add the steps from the normed input x and the output y of the attention to the output of the layer."""
        if not self.is_parallel:
            self.rest.add_behind(block, y, to)
            return
        h, n = block.buffer(self.K), block.buffer(self.K)
        own = self.rest.norms[2]  # GPT-NeoX
        if own is not None:
            own.add_to(block, 0, n)
        self.rest.mlp.add_to(block, x if own is None else n, h)
        block.add(y if self.residual_last else 0, h if self.residual_last else y, n)
        block.add(n, 0 if self.residual_last else h, to)

    def _prove(self, module: nn.Module, dtype: torch.dtype, turned: int) -> None:
        """Compare with the host's layer, whose attention function returns a given result. Raises Unproven."""
        host = self.attention.host_of(module)
        kind = self.attention.angle_dtype
        probes = [probe(self.K, turned, _POSITION, dtype, tokens, angle_dtype=kind) for tokens in (1, 3)]
        # Beside a large x, what a layer with small weights adds to it is lost in its rounding.
        probes = [(x * size, *angles) for size, (x, *angles) in zip((1.0, 2.0**-6), probes)]
        records = [record(host, module, trial) for trial in probes]
        projected = [self.attention.of_trial(self.first, trial) for trial in probes]
        error = max(self.attention.error(*pair) for pair in zip(projected, records))
        ways, blocks, errors = self.ways(), [], []
        for self.is_parallel, self.residual_last in ways:
            blocks.append(self.make_last(dtype, of_trial=True))
            found, gates = zip(probes, projected, records), slice(self.attention.num_states, None)
            results = [(trial[0], parts[gates], of.result.contiguous(), of.output) for trial, parts, of in found]
            errors.append(max(error, *(error_of(blocks[-1], *result) for result in results)))
            if not self.is_parallel and self.attention.layout is None and errors[-1] <= TOLERANCE[dtype]:
                break  # of the others only GPT-NeoX is known
        best = errors.index(min(errors))
        self.is_parallel, self.residual_last = ways[best]
        self.last = self.make_last(dtype)
        if not min(errors) <= TOLERANCE[dtype]:
            name = type(module).__name__
            raise Unproven(f"{name} puts its parts together otherwise: off by {min(errors):.3g} roundings")

    def next_tokens(self, past: Any, B: int, count: int) -> kv_cache.NextTokens | None:
        """The place of new tokens in a quantized cache, see `AttentionBlock.next_tokens`."""
        return self.attention.next_tokens(past, B, count)

    def in_parts(self, module: nn.Module, x: Tensor, angles: Any, mask: Any, past: Any) -> Tensor:
        """The layer's output for tokens x [B, S, K], whose attention is the host's."""
        B, S, K = x.shape
        attention, turned = self.attention, self.attention.sizes.turned
        widths, states = attention.widths, attention.num_states
        projected = [x.new_empty(B, S, *shape) for shape in attention.shapes]
        cos, sin = (part.expand(B, S, turned).contiguous() for part in angles) if turned else (None, None)
        for start in range(0, B * S, CHUNK):
            rows = min(CHUNK, B * S - start)
            parts = ((x, K), (cos, turned), (sin, turned), *zip(projected, widths))
            at = [0 if part is None else _address(part, start * width) for part, width in parts]
            self.first(rows, *at, angle_stride=turned)
        attended = attention.attended(attention_of(module), projected, mask, past)
        if attended.dtype != x.dtype or not attended.is_contiguous():
            attended = attended.to(x.dtype).contiguous()
        y = torch.empty_like(x)
        gates = list(zip(projected[states:], widths[states:]))
        for start in range(0, B * S, CHUNK):
            rows, parts = min(CHUNK, B * S - start), ((x, K), (attended, widths[0]), (y, K), *gates)
            self.last(rows, *[_address(part, start * width) for part, width in parts])
        return y


def _address(part: Tensor, element: int) -> int:
    return part.data_ptr() + element * part.element_size()


def error_of(last: Block, x: Tensor, gate: list[Tensor], attended: Tensor, output: Any) -> float:
    """The `difference` of the output of a layer's last block from the host's, for a result of the attention."""
    y = torch.empty_like(x)
    last(x.shape[0] * x.shape[1], *[part.data_ptr() for part in (x, attended, y, *gate)])
    return difference(y, output)


def run_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The layer's output for tokens, None where the host has to compute it."""
    kwargs = by_name(module, args, kwargs)
    if not args or module.training or not are_tokens(args[0], kwargs):
        return None
    x, angles = args[0], kwargs.get("position_embeddings")
    turned, of_angles, angles = turned_by(angles), angle_dtype(angles, x.dtype), in_pairs(angles)
    block = state.block(module, x.dtype, lambda: LayerBlock(module, x.dtype, turned, of_angles))
    if block is None or block.K != x.shape[2]:
        return None
    attention = block.attention
    if turned != attention.sizes.turned or attention.implementation != implementation_of(attention_of(module)):
        return None
    B, S = x.shape[:2]
    if turned and not fit(*angles, B, turned, attention.angle_dtype, S):
        return None
    mask, past = kwargs.get("attention_mask"), past_of(kwargs)
    if not attention.takes(x, past) or not attention.reaches(kwargs.get("position_ids")):
        return None
    is_short = B * S <= (MAX_ROWS if S == 1 else CHUNK)
    y = attention.with_codes(block.block, x, angles, mask, past) if is_short else None
    return block.in_parts(module, x, angles, mask, past) if y is None else y
