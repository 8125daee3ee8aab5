"""A layer of a decoder as native calls: norms, attention, feed-forward, and the sums between.

One new token with a quantized cache is one call. Of a prompt, or with another cache, what lies before the attention is
one, and what lies behind it. The parts are the blocks of its modules; the trial shows how the host puts them together.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.attention import (
    AttentionBlock,
    are_tokens,
    fit,
    implementation_of,
    is_attention,
    probe,
    record,
    turned_by,
)
from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    TOLERANCE,
    State,
    Unproven,
    Watch,
    add_product,
    difference,
)
from hf_quant.integrations.transformers.blocks.mlp import MLPBlock, is_mlp
from hf_quant.integrations.transformers.blocks.norm import NormBlock, is_norm
from hf_quant.kernels.native.blocks import Block


# Names of the norms before and after the attention, before and after the feed-forward.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)
_POSITION = 5  # of the trial
_CHUNK = 512  # rows at a time: what lies between two steps stays in the caches


def is_layer(module: nn.Module, linear: type[nn.Module]) -> bool:
    """True if a module has the parts of a layer, by their names; a trial shows what it computes."""
    children = module._modules
    if _names(module) is None or not is_attention(children["self_attn"], linear):
        return False
    return is_mlp(children["mlp"], linear)


def _names(module: nn.Module) -> tuple[str | None, ...] | None:
    children = module._modules
    if "self_attn" not in children or "mlp" not in children:
        return None
    norms = {name for name, child in children.items() if not isinstance(child, nn.Dropout)} - {"self_attn", "mlp"}
    found = next((names for names in _NORMS if norms == set(names) - {None}), None)
    return found if found is not None and all(is_norm(children[name]) for name in norms) else None


class LayerBlock:
    """The native block of a layer for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, turned: int) -> None:
        children = module._modules
        self.watch = Watch(module, children["self_attn"], children["mlp"])
        self.attention = attention = AttentionBlock(children["self_attn"], dtype, turned)
        self.mlp, self.K = MLPBlock(children["mlp"], dtype), attention.K
        if self.mlp.K != self.K or self.mlp.N != self.K:
            raise Unproven("the widths of attention and feed-forward differ")
        names = _names(module) or ()
        self.norms = [None if name is None else NormBlock(children[name], self.K, dtype) for name in names]
        angles = max(turned, 1)
        self.first = Block(dtype, self.K, angles, angles, *attention.widths)
        attention.add_projections(self.first, self._before(self.first), (3, 4, 5))
        self.first.finish()
        self.last = Block(dtype, self.K, attention.widths[0], self.K)
        y = self.last.buffer(self.K)
        add_product(self.last, 1, y, attention.layers[-1])
        self._add_rest(self.last, y, 2)
        self.last.finish()
        self._prove(module, dtype, turned)
        self.block = Block(dtype, self.K, angles, angles, self.K)
        y = self.block.buffer(self.K)
        attention.add_to(self.block, self._before(self.block), y)
        self._add_rest(self.block, y, 3)
        self.block.finish()

    def _before(self, block: Block) -> int:
        """Add the norm before the attention to a block; returns the buffer of its result."""
        if self.norms[0] is None:
            return 0
        h = block.buffer(self.K)
        self.norms[0].add_to(block, 0, h)
        return h

    def _add_rest(self, block: Block, y: int, to: int) -> None:
        """Add the steps from the output y of the attention to that of the layer."""
        _, after, before_mlp, after_mlp = self.norms
        h, n = block.buffer(self.K), block.buffer(self.K)
        if after is not None:
            after.add_to(block, y, y)
        block.add(0, y, h)
        if before_mlp is not None:
            before_mlp.add_to(block, h, n)
        self.mlp.add_to(block, n if before_mlp is not None else h, y)
        if after_mlp is not None:
            after_mlp.add_to(block, y, y)
        block.add(h, y, to)

    def _prove(self, module: nn.Module, dtype: torch.dtype, turned: int) -> None:
        """Compare with the host's layer, whose attention function returns a given result. Raises Unproven."""
        error = 0.0
        for tokens in (1, 3):
            x, cos, sin, position = probe(self.K, turned, _POSITION, dtype, tokens)
            recorded = record(type(module)._hf_quant_block_of.forward, module, x, cos, sin, position)
            error = max(error, self.attention.error(self.first, x, cos, sin, recorded))
            y = torch.empty_like(x)
            result = recorded.result.contiguous()
            self.last(2 * tokens, x.data_ptr(), result.data_ptr(), y.data_ptr())
            error = max(error, difference(y, recorded.output))
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} puts its parts together otherwise: off by {error:.3g} roundings")

    def in_parts(self, module: nn.Module, x: Tensor, angles: Any, mask: Any, past: Any) -> Tensor:
        """The layer's output for tokens x [B, S, K], whose attention is the host's."""
        B, S, K = x.shape
        heads, shared, D, turned = self.attention.sizes
        q, k, v = (x.new_empty(B, S, count, D) for count in (heads, shared, shared))
        cos, sin = (part.expand(B, S, turned).contiguous() for part in angles) if turned else (None, None)
        step = x.element_size()
        for start in range(0, B * S, _CHUNK):
            rows = min(_CHUNK, B * S - start)
            parts = ((x, K), (cos, turned), (sin, turned), *zip((q, k, v), self.attention.widths))
            at = [0 if part is None else part.data_ptr() + start * width * step for part, width in parts]
            self.first(rows, *at, angle_stride=turned)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = self.attention.attend(module._modules["self_attn"], q, k, v, mask, past)
        attended = attended.to(x.dtype).contiguous()
        y = torch.empty_like(x)
        for start in range(0, B * S, _CHUNK):
            rows, parts = min(_CHUNK, B * S - start), ((x, K), (attended, heads * D), (y, K))
            self.last(rows, *[part.data_ptr() + start * width * step for part, width in parts])
        return y


def run_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Tensor | None:
    """The layer's output for tokens, None where the host has to compute it."""
    if len(args) != 1 or module.training or not are_tokens(args[0], kwargs):
        return None
    x, angles = args[0], kwargs.get("position_embeddings")
    turned = turned_by(angles)
    block = state.block(module, x.dtype, lambda: LayerBlock(module, x.dtype, turned))
    if block is None or block.K != x.shape[2]:
        return None
    attention = block.attention
    if turned != attention.sizes.turned or attention.implementation != implementation_of(module._modules["self_attn"]):
        return None
    B, S = x.shape[:2]
    if turned and not fit(*angles, B, turned, x.dtype, S):
        return None
    mask, past = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    y = attention.with_codes(block.block, x, angles, mask, past) if S == 1 and B <= MAX_ROWS else None
    return block.in_parts(module, x, angles, mask, past) if y is None else y
