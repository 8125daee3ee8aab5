"""A layer of T5's decoder for one new token, as two native calls: see `cross`.

Its attention adds a bias for each distance of two tokens to the scores. The first layer makes it and hands it on; for
the kernels it is a mask. The first layer is left to the host, and so is fp16, in which the host cuts off infinities.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.integrations.transformers.blocks.attention import implementation_of, is_one_token
from hf_quant.integrations.transformers.blocks.base import (
    TOLERANCE,
    Classes,
    State,
    Unproven,
    Watch,
    by_name,
    random_rows,
    width_of,
)
from hf_quant.integrations.transformers.blocks.cross import ENCODER, POSITION, STATES, CrossLayer, PartOfLayer
from hf_quant.integrations.transformers.blocks.mlp import MLPBlock, is_mlp
from hf_quant.integrations.transformers.blocks.norm import NormBlock, is_norm
from hf_quant.integrations.transformers.blocks.trial import probe, records


_PARTS = ("SelfAttention", "EncDecAttention", "DenseReluDense")
_BIASES = ("position_bias", "encoder_decoder_position_bias")  # arguments


def is_t5_layer(module: nn.Module, linear: Classes) -> bool:
    """True if a module has the parts of a layer of T5's decoder, by their names; a trial shows what it computes."""
    found = _parts(module)
    if found is None or module._modules.keys() != {"layer"}:
        return False
    *attentions, mlp = found
    are_ours = all(isinstance(part._modules.get(name), linear) for part in attentions for name in "qkvo")
    return are_ours and is_mlp(mlp, linear) and all(is_norm(layer.layer_norm) for layer in module.layer)


def _parts(module: nn.Module) -> list[nn.Module] | None:
    layers = module._modules.get("layer")
    if not isinstance(layers, nn.ModuleList) or len(layers) != len(_PARTS):
        return None
    if not all({name, "layer_norm"} <= layer._modules.keys() for name, layer in zip(_PARTS, layers)):
        return None
    return [layer._modules[name] for name, layer in zip(_PARTS, layers)]


class T5Layer(CrossLayer):
    """The native blocks of a layer for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        if dtype == torch.float16:
            raise Unproven("in fp16 the host cuts off infinities")
        found = _parts(module)
        if found is None:
            raise Unproven("its layers were replaced")
        own, crossing, mlp = found
        self.attention, self.crossing = (
            PartOfLayer(part, dtype, tuple(part._modules[name] for name in "qkvo")) for part in (own, crossing)
        )
        self.K, self.mlp = self.attention.K, MLPBlock(mlp, dtype)
        if {self.crossing.K, self.mlp.K, self.mlp.N} != {self.K}:
            raise Unproven("the widths of its parts differ")
        self.norms = [NormBlock(layer.layer_norm, self.K, dtype) for layer in module.layer]
        watched = [part.watch for part in (self.attention, self.crossing, self.mlp)]
        self.watch = Watch.of_all([Watch(module, module.layer, *module.layer), *watched])
        self._prove(module, dtype)
        self._make(dtype)

    def _prove(self, module: nn.Module, dtype: torch.dtype) -> None:
        trial, heads = probe(self.K, 0, POSITION, dtype, angle_dtype=dtype), self.attention.sizes.heads
        states = random_rows(2, STATES, width_of(self.crossing.layers[1]), dtype=dtype, seed=3)
        biases = [random_rows(1, heads, 1, tokens, dtype=dtype, seed=tokens) for tokens in (1, STATES)]
        more = {**dict(zip(_BIASES, biases)), ENCODER[0]: states, "past_key_values": None}
        found = records(type(module)._hf_quant_block_of.forward, module, trial, **more)
        name = type(module).__name__
        if len(found) != 2:
            raise Unproven(f"{name} does not call two attention functions")
        output = found[0].output
        if not isinstance(output, tuple) or len(output) != 3 or any(a is not b for a, b in zip(output[1:], biases)):
            raise Unproven(f"{name} returns something else than its output and the biases that it was given")
        for part, of, bias, host in zip((self.attention, self.crossing), found, biases, _parts(module) or ()):
            if of.options.pop("position_bias", None) is not bias:
                raise Unproven(f"{name} gives its attention another bias")
            part.read_options(host, of)
        error = self._error(trial, *(of._replace(output=output[0]) for of in found))
        if not error <= TOLERANCE[dtype]:
            raise Unproven(f"{name} puts its parts together otherwise: off by {error:.3g} roundings")

    def _masks(self, kwargs: dict[str, Any]) -> list[Any]:
        return [
            _with_bias(kwargs[bias], kwargs.get(mask)) for bias, mask in zip(_BIASES, ("attention_mask", ENCODER[1]))
        ]


def _with_bias(bias: Tensor, mask: Any) -> Any:
    """A bias [1, heads, 1, T] with the mask [B, 1, 1, T], as `kv_cache` adds them."""
    if mask is None:
        return bias
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2] != 1:
        return mask  # which is not usable
    tokens = min(bias.shape[-1], mask.shape[-1])
    bias, mask = bias[..., :tokens], mask[..., :tokens]
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def run_t5_layer(module: nn.Module, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """The layer's output and the biases for one token, None where the host has to compute it."""
    kwargs = by_name(module, args, kwargs)
    biases = [kwargs.get(name) for name in _BIASES]
    if not args or module.training or not all(isinstance(part, Tensor) for part in (kwargs.get(ENCODER[0]), *biases)):
        return None
    x, rest = args[0], {name: value for name, value in kwargs.items() if name not in (*ENCODER, *_BIASES)}
    if not is_one_token(x, rest):
        return None
    block = state.block(module, x.dtype, lambda: T5Layer(module, x.dtype))
    if block is None or block.K != x.shape[2]:
        return None
    if block.attention.implementation != implementation_of(module.layer[0].SelfAttention):
        return None
    y = block(x, kwargs)
    return None if y is None else (y, *biases)
