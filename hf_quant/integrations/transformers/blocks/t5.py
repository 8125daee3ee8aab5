"""A layer of T5's decoder for one new token, as two native calls: see `cross`.

Its attention adds a bias for each distance of two tokens to the scores. The first layer makes it and hands it on; for
the kernels it is a mask. The first layer is left to the host, and so is fp16, in which the host cuts off infinities.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.base import Classes, State, Unproven, Watch, by_name, random_rows
from hf_quant.integrations.transformers.blocks.cross import ENCODER, STATES, CrossLayer, PartOfLayer, run
from hf_quant.integrations.transformers.blocks.mlp import MLPBlock, is_mlp
from hf_quant.integrations.transformers.blocks.norm import is_norm
from hf_quant.integrations.transformers.blocks.trial import Recorded


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


def _parts_or_raise(module: nn.Module) -> list[nn.Module]:
    found = _parts(module)
    if found is None:
        raise Unproven("its layers were replaced")
    return found


class T5Layer(CrossLayer):
    """The native blocks of a layer for x of one dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        if dtype == torch.float16:
            raise Unproven("in fp16 the host cuts off infinities")
        super().__init__(module, dtype)

    @staticmethod
    def attentions_of(module: nn.Module) -> list[nn.Module]:
        return _parts_or_raise(module)[:2]

    def _part(self, attention: nn.Module, dtype: torch.dtype) -> PartOfLayer:
        return PartOfLayer(attention, dtype, tuple(attention._modules[name] for name in "qkvo"))

    def _mlp(self, module: nn.Module, dtype: torch.dtype) -> MLPBlock:
        return MLPBlock(_parts_or_raise(module)[2], dtype)

    def _norms(self, module: nn.Module) -> list[nn.Module]:
        return [layer.layer_norm for layer in module.layer]

    def _watch(self, module: nn.Module) -> Watch:
        return Watch(module, module.layer, *module.layer)

    def _arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        shapes = [(1, self.attention.sizes.heads, 1, tokens) for tokens in (1, STATES)]
        biases = [random_rows(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        return {**dict(zip(_BIASES, biases)), kv_cache.host_cache_name(): None}

    def _plain(self, name: str, found: list[Recorded], given: dict[str, Any]) -> list[Recorded]:
        output, biases = found[0].output, [given[bias] for bias in _BIASES]
        if not isinstance(output, tuple) or len(output) != 3 or any(a is not b for a, b in zip(output[1:], biases)):
            raise Unproven(f"{name} returns something else than its output and the biases that it was given")
        if any(of.options.pop("position_bias", None) is not bias for of, bias in zip(found, biases)):
            raise Unproven(f"{name} gives its attention another bias")
        return [of._replace(output=output[0]) for of in found]

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
    y = run(module, state, T5Layer, _BIASES, args, kwargs)
    return None if y is None else (y, *(kwargs[name] for name in _BIASES))
