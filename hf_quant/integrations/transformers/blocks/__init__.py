"""Blocks of transformers' models, each one native call on a CPU: norms, feed-forward, attention of one new token.

Decoding a token on a CPU takes as long between the products as in them: each op of torch and each call of a module
costs some microseconds. `fuse_blocks_` gives the modules that lie there a native block; `base` says when it is used.
On a GPU it is launches that cost time, and blocks have fewer of them (`gpu`, `gpu_attention`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_quant import kv_cache
from hf_quant.config import QuantizerConfig
from hf_quant.integrations.transformers.blocks.attention import run_attention
from hf_quant.integrations.transformers.blocks.attention_parts import is_attention
from hf_quant.integrations.transformers.blocks.base import (
    LINEAR,
    QUANTIZED,
    Classes,
    fuse_,
    is_fused,
    reason_of,
    unfuse_,
)
from hf_quant.integrations.transformers.blocks.cross import is_cross_layer, run_cross_layer
from hf_quant.integrations.transformers.blocks.decoder import is_decoder, run_decoder
from hf_quant.integrations.transformers.blocks.gpu import run_mlp as run_mlp_on_gpu
from hf_quant.integrations.transformers.blocks.gpu import run_norm as run_norm_on_gpu
from hf_quant.integrations.transformers.blocks.gpu_attention import run_attention as run_attention_on_gpu
from hf_quant.integrations.transformers.blocks.gpu_attention import run_layer as run_layer_on_gpu
from hf_quant.integrations.transformers.blocks.gpu_latent import run_latent_attention as run_latent_attention_on_gpu
from hf_quant.integrations.transformers.blocks.latent import is_latent_attention, run_latent_attention
from hf_quant.integrations.transformers.blocks.layer import is_layer, run_layer
from hf_quant.integrations.transformers.blocks.mixture import is_mixture, run_mixture
from hf_quant.integrations.transformers.blocks.mlp import is_only_mlp, run_mlp
from hf_quant.integrations.transformers.blocks.norm import is_slow_norm, run_norm
from hf_quant.integrations.transformers.blocks.own_code import is_own_layer, run_own_layer
from hf_quant.integrations.transformers.blocks.plain_linear import is_plain_linear, run_plain_linear
from hf_quant.integrations.transformers.blocks.recurrent import (
    is_delta_net,
    is_recurrent_layer,
    is_short_convolution,
    run_delta_net,
    run_recurrent_layer,
    run_short_convolution,
)
from hf_quant.integrations.transformers.blocks.state_space import (
    is_selective_state,
    is_state_space,
    run_selective_state,
    run_state_space,
)
from hf_quant.integrations.transformers.blocks.t5 import is_t5_layer, run_t5_layer
from hf_quant.modules import QuantizedModule
from hf_quant.planning import Rules


# (whether a module is of a kind, its block on a CPU, on a GPU); the first kind counts.
_KINDS = (
    (is_slow_norm, run_norm, run_norm_on_gpu),
    (is_layer, run_layer, run_layer_on_gpu),
    (is_own_layer, run_own_layer, None),
    (is_recurrent_layer, run_recurrent_layer, None),
    (is_cross_layer, run_cross_layer, None),
    (is_t5_layer, run_t5_layer, None),
    (is_only_mlp, run_mlp, run_mlp_on_gpu),
    (is_mixture, run_mixture, None),
    (is_attention, run_attention, run_attention_on_gpu),
    (is_latent_attention, run_latent_attention, run_latent_attention_on_gpu),
    (is_delta_net, run_delta_net, None),
    (is_short_convolution, run_short_convolution, None),
    (is_state_space, run_state_space, None),
    (is_selective_state, run_selective_state, None),
    (is_plain_linear, run_plain_linear, None),
    (is_decoder, run_decoder, None),
)


def fuse_blocks_(model: nn.Module) -> int:
    """Give every module of a quantized model that may have one a native block, and return the number of these modules.

    Modules of attention are among them whose "sdpa" is a native kernel from now on, those of encoders, too.
    """
    unfuse_blocks_(model)
    found = list(_candidates(model, QUANTIZED)) if any(isinstance(m, QuantizedModule) for m in model.modules()) else []
    for module, *runs in found:
        fuse_(module, *runs)
    attentions = [module for module in model.modules() if _attends(module)]
    if attentions:
        kv_cache.register_attention()
    for module in attentions:
        module.__dict__[kv_cache.NATIVE_SDPA] = True
    return len({*(module for module, *_ in found), *attentions})


def _attends(module: nn.Module) -> bool:
    """True if a module has what attention functions of transformers ask theirs for, and quantized layers."""
    return "is_causal" in module.__dict__ and any(isinstance(m, QUANTIZED) for m in module._modules.values())


def unfuse_blocks_(model: nn.Module) -> None:
    """Undo `fuse_blocks_`."""
    for module in model.modules():
        unfuse_(module)
        module.__dict__.pop(kv_cache.NATIVE_SDPA, None)


def block_reasons(model: nn.Module) -> dict[str, str | None]:
    """{name of a module with a block: why its host computes it, None if the block does or has not been tried}."""
    return {name: reason_of(module) for name, module in model.named_modules() if is_fused(module)}


def fuse_blocks_as_configured_(model: nn.Module, config: QuantizerConfig) -> None:
    """`fuse_blocks_`, unless `QuantizerConfig.fuse_activations` is False."""
    if config.fuse_activations is not False:
        fuse_blocks_(model)


def block_rules(model: nn.Module) -> Rules:
    """The rules of a plan: one line on the modules that may get a block once the linear layers are quantized."""
    counts = Counter(type(module).__name__ for module, *_ in _candidates(model, LINEAR))
    found = ", ".join(f"{name} ({count})" for name, count in counts.items())
    text = f"one call each on CPUs, fewer launches on GPUs, where a trial agrees: {found}"
    return Rules({}, {}, blocks=text if found else None)


def _candidates(
    model: nn.Module, linear: Classes
) -> Iterator[tuple[nn.Module, Callable[..., Any], Callable[..., Any] | None]]:
    for module in model.modules():
        found = next((kind for kind in _KINDS if kind[0](module, linear)), None)
        # A model that is a decoder itself keeps its class, which callers compare.
        if found is not None and not (found[0] is is_decoder and module is model):
            yield module, *found[1:]


__all__ = ["block_reasons", "block_rules", "fuse_blocks_", "fuse_blocks_as_configured_", "unfuse_blocks_"]
