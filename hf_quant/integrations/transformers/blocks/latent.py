"""Latent attention (MLA, https://arxiv.org/abs/2405.04434) of few tokens, without keys and values of the whole past.

Its cache holds one latent of each token, and hosts multiply all of them with `kv_b_proj` for every new token. But the
scores q @ (W_k @ latent) are those of W_k.T @ q with the latents, and the sum of the values is W_v times that of the
latents (section 2.1.2 of the paper): only what belongs to the new tokens meets the weight. All else is the host's
code, which is run with keys and values that are not expanded (`LatentStates`).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.attention import implementation_of, past_of
from hf_quant.integrations.transformers.blocks.base import (
    MAX_ROWS,
    QUANTIZED,
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    by_name,
    difference,
    is_served,
    random_rows,
    twin_of,
    weight_of,
)
from hf_quant.kernels.native.heads import HeadRows, unsupported_reason
from hf_quant.modules.packed_linear import PackedLinear
from hf_quant.modules.rotation import rotated, rotated_back


_EXPANDING = "kv_b_proj"  # the layer that makes keys and values of latents
_SIZES = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_READING = ("sdpa", "hf_quant")  # attention functions that read latents


def is_latent_attention(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of latent attention, by their names; a trial shows what it computes."""
    has_sizes = all(isinstance(getattr(module, name, None), int) for name in _SIZES)
    return has_sizes and hasattr(module, "expand_kv") and isinstance(getattr(module, _EXPANDING, None), linear)


class _Latents:
    """The latents of all tokens [B, 1, T, kv_lora_rank], and the part of their keys that is turned [B, 1, T, D]."""

    def __init__(self, block: "_Expanding", latents: Tensor, turned: Tensor) -> None:
        self.block, self.latents, self.turned = block, latents, turned

    @cached_property
    def expanded(self) -> tuple[Tensor, Tensor]:
        """The keys and values that the host makes."""
        return self.block.host.expand_kv(self.block.plain, self.latents, self.turned)

    def attend(self, q: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor | None:
        """`LatentStates.attend`."""
        (B, H, S, _), block = q.shape, self.block
        plain, of_turned = q[..., : block.unturned], q[..., block.unturned :]
        absorbed = block.absorbed(plain.transpose(1, 2).flatten(0, 1)).view(B, S, H, -1).transpose(1, 2)
        options = {"is_causal": is_causal, "scale": scale}
        y = kv_cache.attend_to_latents(absorbed, of_turned, self.latents, self.turned, mask, **options)
        return None if y is None else block.made(block.values, y.reshape(B * S, H, -1)).view(B, S, H, -1)


class _Expanding:
    """A replacement of a host's `expand_kv`, whose states are not expanded.

    Attributes:
        plain: a twin of the host's module, whose `expand_kv` is the host's.
        keys, values: the rows of `kv_b_proj` that make keys, and values, of each head.
        unturned: channels of a head of keys that latents make.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        layer = module._modules[_EXPANDING]
        if not isinstance(layer, QUANTIZED) or type(layer).forward is not PackedLinear.forward:
            raise Unproven(f"{type(layer).__name__} is no quantized linear layer")
        if layer._parameters["bias"] is not None:
            raise Unproven(f"{_EXPANDING} has a bias")
        weight, _, _ = weight_of(layer, "weight", None, dtype)
        self.heads, self.unturned, turned, of_values, rank = (getattr(module, name) for name in _SIZES)
        rows, reason = self.unturned + of_values, unsupported_reason(weight)
        if (weight.N, weight.K) != (self.heads * rows, rank) or reason is not None:
            raise Unproven(reason or f"{_EXPANDING} is [{weight.N}, {weight.K}]")
        self.keys = HeadRows(weight, self.heads, 0, self.unturned)
        self.values = HeadRows(weight, self.heads, self.unturned, of_values)
        self.widths, self.transform = (self.unturned + turned, of_values), layer.scheme.input_transform
        self.plain = twin_of(module, module._modules)
        self.host = type(self.plain)
        self._prove(module, layer, dtype)

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries [M, H, unturned] times the rows that make keys -> what meets latents, [M, H, kv_lora_rank]."""
        return rotated_back(self.keys.sums(q), self.transform)

    def made(self, rows: HeadRows, x: Tensor) -> Tensor:
        """Keys or values that latents [M, H, kv_lora_rank] make."""
        return rows.scores(rotated(x, self.transform))

    def _prove(self, module: nn.Module, layer: Any, dtype: torch.dtype) -> None:
        """Compare with the host's `expand_kv` by the weight in fp32. Raises Unproven."""
        rank = layer.matrix_shape("weight")[1]
        dense = nn.Linear(1, 1, bias=False, device="meta")
        dense.weight = nn.Parameter(layer.dequantize_weight(dtype=torch.float32))
        x = random_rows(1, 1, 3, rank, dtype=dtype)
        turned = random_rows(1, 1, 3, self.widths[0] - self.unturned, dtype=dtype, seed=1)
        twin = twin_of(module, {**module._modules, _EXPANDING: dense})
        keys, values = self.host.expand_kv(twin, x.float(), turned.float())
        rows, shared = x[0, 0].unsqueeze(1).expand(-1, self.heads, -1), turned.expand(-1, self.heads, -1, -1)
        own = [self.made(part, rows).transpose(0, 1)[None] for part in (self.keys, self.values)]
        errors = [difference(torch.cat([own[0], shared], -1), keys.to(dtype)), difference(own[1], values.to(dtype))]
        q = random_rows(3, self.heads, self.unturned, dtype=dtype, seed=2)
        weight = dense.weight.detach().view(self.heads, -1, rank)[:, : self.unturned]
        absorbed = torch.einsum("mhd,hdk->mhk", q.float(), weight)
        errors.append(difference(self.absorbed(q), absorbed.to(dtype)))
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


class LatentBlock:
    """A twin of a host's module that attends to latents, and what it was made from."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        kv_cache.register_attention()
        self.watch = Watch(module)
        self.twin = twin_of(module, module._modules)
        self.twin.__dict__["expand_kv"] = _Expanding(module, dtype)


def run_latent_attention(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> Any:
    """The module's result for few tokens behind those of a cache, None where the host has to compute it."""
    x, named = args[0] if args else kwargs.get("hidden_states"), by_name(module, args, kwargs)
    if module.training or not is_served(x) or x.dim() != 3 or x.dtype not in TOLERANCE:
        return None
    (B, S, _), past = x.shape, past_of(named)
    if not 0 < B * S <= MAX_ROWS or past is None or implementation_of(module) not in _READING:
        return None
    if kv_cache.wants_weights(module, named) or past.get_seq_length(module.layer_idx) < S:
        return None
    block = state.block(module, x.dtype, lambda: LatentBlock(module, x.dtype))
    return None if block is None else type(block.twin).forward(block.twin, *args, **kwargs)
