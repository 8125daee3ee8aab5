"""Latent attention (MLA, https://arxiv.org/abs/2405.04434) of few tokens, without keys and values of the whole past.

Its cache holds one latent of each token, and hosts multiply all of them with `kv_b_proj` for every new token. But the
scores q @ (W_k @ latent) are those of W_k.T @ q with the latents, and the sum of the values is W_v times that of the
latents (section 2.1.2 of the paper): only what belongs to the new tokens meets the weight. `LatentAttention` is the
native block of a module that has no other parts. Of others all else is the host's code, which is run with keys and
values that are not expanded (`LatentBlock`, `LatentStates`).
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.angles import angle_dtype, in_pairs, turned_by
from hf_quant.integrations.transformers.blocks.attention import AttentionBlock, Sizes
from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    QUANTIZED,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    add_product,
    as_part,
    by_name,
    check_read,
    difference,
    host_class,
    is_served,
    outputs_of,
    random_rows,
    twin_of,
    weight_of,
    width_of,
)
from hf_quant.integrations.transformers.blocks.calls import are_tokens, implementation_of, length_of, past_of
from hf_quant.integrations.transformers.blocks.norm import NormBlock, is_norm
from hf_quant.integrations.transformers.blocks.trial import Recorded
from hf_quant.kernels.native.blocks import PAIRS, Block
from hf_quant.kernels.native.heads import HeadRows, unsupported_reason
from hf_quant.modules.packed_linear import PackedLinear


_EXPANDING = "kv_b_proj"  # the layer that makes keys and values of latents
_SIZES = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
READING = ("sdpa", "hf_quant")  # attention functions that read latents
_JOINED = "kv_a_proj_with_mqa"  # the layer that makes latents, and the part of keys that is turned
_NORMS = ("kv_a_layernorm", "q_a_layernorm")
_LAYERS = {_JOINED, _EXPANDING, _NORMS[0]}
# Of the queries.
_QUERIES = (("q_proj",), ("q_a_proj", "q_b_proj"))
_OUTPUTS = ("o_proj", "dense")


def is_latent_attention(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of latent attention, by their names; a trial shows what it computes."""
    has_sizes = all(isinstance(getattr(module, name, None), int) for name in _SIZES)
    return has_sizes and hasattr(module, "expand_kv") and isinstance(getattr(module, _EXPANDING, None), linear)


def _are_few(B: int, S: int, before: int) -> bool:
    """True if S tokens of each of B sequences are few behind those before them: latents need not be expanded."""
    return B * S <= MAX_ROWS and before >= S


class _Latents:
    """The latents of all tokens [B, 1, T, kv_lora_rank], and the part of their keys that is turned [B, 1, T, D]."""

    def __init__(self, block: "Expanding", latents: Tensor, turned: Tensor) -> None:
        self.block, self.latents, self.turned = block, latents, turned

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor]:
        """The keys and values that the host makes."""
        return self.block.host.expand_kv(self.block.plain, self.latents, self.turned)

    def attend(self, q: Tensor, mask: Tensor | None, is_causal: bool, scale: float, count: int) -> Tensor | None:
        """`LatentStates.attend`."""
        (B, H, S, _), block = q.shape, self.block
        if not block.are_few(B, S, count - S):
            k, v = (x[:, :, :count] for x in self.expanded)
            return kv_cache.attend_to_narrow(q, k, v, mask, is_causal=is_causal, scale=scale)
        rows, (plain, of_turned) = block.rows(q.dtype), q.tensor_split([block.unturned], -1)
        absorbed = rows[0].sums(plain.transpose(1, 2).flatten(0, 1)).view(B, S, H, -1).transpose(1, 2)
        options = {"is_causal": is_causal, "scale": scale}
        y = block.attend(absorbed, of_turned, self.latents, self.turned, mask, **options)
        return None if y is None else rows[1].scores(y.reshape(B * S, H, -1)).view(B, S, H, -1)


class _Exact(nn.Module):
    """The product of a layer without rounded inputs, by its weight in fp32."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False, device="meta")
        self.layer.weight = nn.Parameter(layer.dequantize_weight(dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()).to(x.dtype)


class Expanding:
    """A replacement of a host's `expand_kv`, whose states are not expanded.

    Attributes:
        plain: a twin of the host's module, whose `expand_kv` is the host's.
        unturned: channels of a head of keys that latents make.
        widths: of a head of keys, and of values.
        are_few: tells whether S tokens of each of B sequences are few behind those before them.
        attend: the attention to latents.
    """

    are_few = staticmethod(_are_few)
    attend = staticmethod(kv_cache.attend_to_latents)

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        layer = module._modules[_EXPANDING]
        if not isinstance(layer, QUANTIZED) or type(layer).forward is not PackedLinear.forward:
            raise Unproven(f"{type(layer).__name__} is no quantized linear layer")
        if layer._parameters["bias"] is not None:
            raise Unproven(f"{_EXPANDING} has a bias")
        self.heads, self.unturned, turned, of_values, rank = (getattr(module, name) for name in _SIZES)
        self.widths = self.unturned + turned, of_values
        N, K = layer.matrix_shape("weight")
        if (N, K) != (self.heads * (self.unturned + of_values), rank):
            raise Unproven(f"{_EXPANDING} is [{N}, {K}]")
        self.read(layer, dtype)
        self.plain = twin_of(module, module._modules)
        self.host = type(self.plain)
        self._prove(module, layer, dtype)

    def read(self, layer: Any, dtype: torch.dtype) -> None:
        """Find the rows of the layer. Raises Unproven."""
        weight, _, _ = weight_of(layer, "weight", layer._parameters, None, dtype)
        reason = unsupported_reason(weight)
        if reason is not None:
            raise Unproven(reason)
        self.keys = HeadRows(weight, self.heads, 0, self.unturned)
        self.values = HeadRows(weight, self.heads, self.unturned, self.widths[1])

    def rows(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The rows of the layer that make keys, and values, of each head, for inputs of a dtype: as `HeadRows`."""
        return self.keys, self.values

    def _prove(self, module: nn.Module, layer: Any, dtype: torch.dtype) -> None:
        """Compare with the host's `expand_kv` by the weight in fp32. Raises Unproven."""
        rank, device = layer.matrix_shape("weight")[1], layer._parameters["qdata"].device
        exact = _Exact(layer)
        x = random_rows(1, 1, 3, rank, dtype=dtype, device=device)
        turned = random_rows(1, 1, 3, self.widths[0] - self.unturned, dtype=dtype, seed=1, device=device)
        twin = twin_of(module, {**module._modules, _EXPANDING: exact})
        keys, values = self.host.expand_kv(twin, x.float(), turned.float())
        latents, shared = x[0, 0].unsqueeze(1).expand(-1, self.heads, -1), turned.expand(-1, self.heads, -1, -1)
        rows = self.rows(dtype)
        own = [part.scores(latents).transpose(0, 1)[None] for part in rows]
        errors = [difference(torch.cat([own[0], shared], -1), keys.to(dtype)), difference(own[1], values.to(dtype))]
        q = random_rows(3, self.heads, self.unturned, dtype=dtype, seed=2, device=device)
        weight = exact.layer.weight.view(self.heads, -1, rank)[:, : self.unturned]
        absorbed = torch.einsum("mhd,hdk->mhk", q.float(), weight)
        errors.append(difference(rows[0].sums(q), absorbed.to(dtype)))
        if not max(errors) <= TOLERANCE[dtype]:
            raise Unproven(f"{type(module).__name__} makes other keys and values: off by {max(errors):.3g} roundings")

    def __call__(self, latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        if latents.shape[1] != 1 or turned.shape[1] != 1:
            return self.host.expand_kv(self.plain, latents, turned)
        found, (B, _, T, _) = _Latents(self, latents, turned), latents.shape
        made = (lambda: found.expanded[0], lambda: found.expanded[1])
        shapes = [(B, self.heads, T, width) for width in self.widths]
        return tuple(
            kv_cache.LatentStates(shape, latents, expand, found.attend) for shape, expand in zip(shapes, made)
        )


def _children(module: nn.Module) -> tuple[list[nn.Module], nn.Module, list[nn.Module]]:
    """(layers of the queries, layer of the output, norms of latents and perhaps queries). Raises Unproven."""
    found = {name: child for name, child in module._modules.items() if child is not None}
    for queries, output in product(_QUERIES, _OUTPUTS):
        norms = _NORMS[: len(queries)]
        if found.keys() != {*_LAYERS, *queries, *norms, output} or not all(is_norm(found[name]) for name in norms):
            continue
        if all(isinstance(found[name], QUANTIZED) for name in (*queries, output)):
            return [found[name] for name in queries], found[output], [found[name] for name in norms]
    raise Unproven(f"{type(module).__name__} has other parts")


class LatentAttention(AttentionBlock):
    """The native block of latent attention for few tokens behind those of a cache, which holds latents as keys.

    Its queries are those that meet latents, those that meet the part of keys that is turned; then come both of these.
    """

    num_states = 4

    def __init__(self, module: nn.Module, dtype: torch.dtype, turned: int, angle_dtype: torch.dtype) -> None:
        self.watch = Watch(module)
        queries, output, norms = _children(module)
        rows = Expanding(module, dtype)
        heads, self.unturned, of_turned, self.of_values, rank = (getattr(module, name) for name in _SIZES)
        self.keys, self.values, self.value_dim = rows.keys, rows.values, of_turned
        self.dtype, self.is_gated, self.is_causal = dtype, False, True
        self._read_angles(angle_dtype)
        self.layers, self.joined = (*queries, output), module._modules[_JOINED]
        self.implementation, self.index = implementation_of(module), module.layer_idx
        self.K, self.N, width = width_of(queries[0]), outputs_of(output), self.unturned + of_turned
        if self.N != self.K or turned not in (0, of_turned) or outputs_of(queries[-1]) != heads * width:
            raise Unproven("its widths are others")
        self.sizes = Sizes(heads, 1, rank, turned)
        self._read_shapes([(heads, rank), (heads, of_turned), (1, rank), (1, of_turned)])
        widths = [rank, width_of(queries[-1])]
        self.norms = [as_part(NormBlock, norm, dtype, size) for norm, size in zip(norms, widths)]
        kv_cache.register_attention()
        self.scale = self._prove(module)
        check_read(module, *self.layers, self.joined, *norms, module._modules[_EXPANDING])
        self.projections = self.projections_of()
        self.block = Block(dtype, self.K, max(turned, 1), max(turned, 1), self.N)
        self.add_to(self.block, 0, 3)
        self.block.finish()

    def add_projections(self, block: Block, x: int, to: Sequence[int]) -> None:
        q, q_turned, latents, turned = to
        (heads, _, rank, _), (*before, last), width = self.sizes, self.layers[:-1], self.unturned + self.value_dim
        joined, plain = block.buffer(rank + self.value_dim), block.buffer(heads * width)
        unturned = block.buffer(heads * self.unturned)
        for layer in before:
            h = block.buffer(outputs_of(layer))
            add_product(block, x, h, layer)
        add_product(block, x, joined, self.joined)
        if before:
            self.norms[1].add_to(block, h, h)
        add_product(block, h if before else x, plain, last)
        block.pick(joined, latents, slice(0, rank), group=rank + self.value_dim)
        block.pick(joined, turned, slice(rank, rank + self.value_dim), group=rank + self.value_dim)
        block.pick(plain, unturned, slice(0, self.unturned), group=width)
        block.pick(plain, q_turned, slice(self.unturned, width), group=width)
        self.norms[0].add_to(block, latents, latents)
        block.multiply_heads(unturned, q, self.keys, sums=True)
        for part in (q_turned, turned):
            self.add_turn(block, part, self.value_dim)

    def add_to(self, block: Block, x: int, to: int) -> None:
        q, q_turned, *new = found = [block.buffer(width) for width in self.widths]
        y = block.buffer(self.widths[0])
        self.add_projections(block, x, found)
        block.append(*new, 1)
        block.attend_to_latents(q, q_turned, y, self.sizes.heads, scale=self.scale)
        self.add_output(block, y, to)

    def add_output(self, block: Block, y: int, to: int, *gate: int) -> None:
        values = block.buffer(self.width_of_trial())
        block.multiply_heads(y, values, self.values, sums=False)
        self.add_output_of_trial(block, values, to)

    def add_output_of_trial(self, block: Block, y: int, to: int, *gate: int) -> None:
        add_product(block, y, to, self.layers[-1])

    def width_of_trial(self) -> int:
        return self.sizes.heads * self.of_values

    def output_of(self, y: Tensor, *gate: Tensor) -> Tensor:
        values = self.values.scores(y.view(-1, self.sizes.heads, self.sizes.D))
        return self.layers[-1](values.view(*y.shape[:2], -1))

    def attended(self, module: nn.Module, projected: Sequence[Tensor], mask: Any, past: Any) -> Tensor:
        q, q_turned, *new = (part.transpose(1, 2) for part in projected)
        latents, turned = (x if x.dtype == q.dtype else x.to(q.dtype) for x in past.update(*new, self.index))
        mask, is_causal = kv_cache.latent_mask(module, q.shape[2], latents.shape[2], mask)
        options = {"is_causal": is_causal, "scale": self.scale}
        return kv_cache.attend_to_latents(q, q_turned, latents, turned, mask, **options)

    def takes(self, x: Tensor, past: Any) -> bool:
        return _are_few(*x.shape[:2], length_of(past, self.index))

    def takes_places(self, tokens: int, places: Sequence[int]) -> bool:
        return tokens <= MAX_ROWS and all(kind != kv_cache.NEW_TOKENS for kind in places[2::3])

    def next_tokens(self, past: Any, B: int, count: int) -> kv_cache.NextTokens | None:
        is_short = _are_few(B, count, length_of(past, self.index))
        return super().next_tokens(past, B, count) if is_short else None

    def turns(self) -> list[tuple[str, bool] | None]:
        pairs = [pairs for pairs in PAIRS if pairs != "halves_by_pair"]
        return [None, *product(pairs, (True, False))] if self.sizes.turned else [None]

    def error(self, found: list[Tensor], recorded: Recorded) -> float:
        """The `difference` of queries, and of the turned part of keys, from recorded ones; not of the latents."""
        q, q_turned, _, turned = (part.transpose(1, 2) for part in found)
        plain, of_turned = recorded.q[..., : self.unturned], recorded.q[..., self.unturned :]
        absorbed = self.keys.sums(plain.transpose(1, 2).flatten(0, 1)).view(*found[0].shape).transpose(1, 2)
        of_keys = recorded.k[:, :1, :, self.unturned :]
        return max(difference(q, absorbed), difference(q_turned, of_turned), difference(turned, of_keys))

    def _prove(self, module: nn.Module) -> float:
        exact = twin_of(module, {**module._modules, _EXPANDING: _Exact(module._modules[_EXPANDING])})
        found, records = self._records(exact)
        if any(of.options.get("scaling") is None for of in records):
            raise Unproven(f"{type(module).__name__} asks for another attention")
        errors, ways = [], self.turns()
        for self.turn in ways:
            made = [self.of_trial(self.projections_of(), trial) for trial in found]
            errors.append(max(self.error(own, of) for own, of in zip(made, records)))
            if errors[-1] == 0.0:
                break
        best = min(errors)
        self.turn = ways[errors.index(best)]
        for trial, of in zip(found, records):
            own = self.of_trial(self.projections_of(), trial)
            states = host_class(module).expand_kv(exact, *(part.transpose(1, 2) for part in own[2:]))
            output = self.layers[-1](of.result.reshape(*of.result.shape[:2], -1))
            pairs = ((states[0], of.k), (states[1], of.v), (output, of.output[0]))
            best = max(best, *(difference(*pair) for pair in pairs))
        if not best <= TOLERANCE[self.dtype]:
            raise Unproven(f"{type(module).__name__} has other queries or latents: off by {best:.3g} roundings")
        scale = self.read_options(module, records)
        if self.function is not None or any(self.options.get(name) for name in ("softcap", "s_aux", "sliding_window")):
            raise Unproven(f"{type(module).__name__} asks for another attention")
        return scale


class LatentBlock:
    """A twin of a host's module that attends to latents, and what it was made from.

    In prompts it expands them, and attends to values that are narrower than keys: torch needs several times as long.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, expanding: type[Expanding] = Expanding) -> None:
        kv_cache.register_attention()
        self.watch = Watch(module)
        self.twin = twin_of(module, module._modules)
        self.twin.__dict__["expand_kv"] = expanding(module, dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.twin).forward(self.twin, *args, **kwargs)


def _block_of(module: nn.Module, dtype: torch.dtype, angles: Any) -> LatentAttention | LatentBlock:
    try:
        return LatentAttention(module, dtype, turned_by(angles), angle_dtype(angles, dtype))
    except (Unproven, ValueError):  # ValueError: of a weight that a step does not read in place
        return LatentBlock(module, dtype)


def run_latent_attention(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Any:
    """The module's result for tokens, None where the host has to compute it."""
    x, named = args[0] if args else kwargs.get("hidden_states"), by_name(module, args, kwargs)
    if module.training or not is_served(x) or x.dim() != 3 or x.dtype not in TOLERANCE or kv_cache.is_recorded():
        return None
    (B, S, _), past, angles = x.shape, past_of(named), named.get("position_embeddings")
    if not x.numel() or implementation_of(module) not in READING or kv_cache.wants_weights(module, named):
        return None
    if _are_few(B, S, length_of(past, module.layer_idx)):
        block = state.block(module, x.dtype, lambda: _block_of(module, x.dtype, angles))
    else:
        block = state.prompts.block(module, x.dtype, lambda: LatentBlock(module, x.dtype)) if S > 1 else None
    if isinstance(block, LatentBlock):
        return block(*args, **kwargs)
    if block is None or not are_tokens(x, named) or turned_by(angles) != block.sizes.turned:
        return None
    y = block(module, x, in_pairs(angles), named.get("attention_mask"), past)
    return None if y is None else (y, None)
