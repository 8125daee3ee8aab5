"""Rules for diffusion models: linear layers that stay in 16 bit, or that keep their input in 16 bit, with reasons.

The rules come from the structure, so that a new architecture needs no entry. Layers outside of the repeated blocks
(embedders, projections in and out) are small, and their errors reach every token or every block. Layers whose input is
one vector per image (modulation, time embeddings) gain nothing from 8-bit inputs. Autoencoders stay in 16 bit as a
whole. `_FIRST_BLOCKS` lists exceptions that the structure does not show.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator

from torch import nn

from hf_quant.config import QuantizerConfig
from hf_quant.planning import Rules


_logger = logging.getLogger("hf_quant")

# {class: modules that stay in 16 bit}. Other libraries that quantize these models leave the same layers out.
_FIRST_MODULATION = "modulation of the first block of its kind: its error passes through all others"
_FIRST_BLOCKS = {
    "FluxTransformer2DModel": ("single_transformer_blocks.0.norm.linear",),
    "QwenImageTransformer2DModel": ("transformer_blocks.0.img_mod.1",),
    "Lumina2Transformer2DModel": ("layers.0.norm1.linear",),
    "GlmImageTransformer2DModel": ("transformer_blocks.0.norm1.linear",),
}
# (pattern of a path, reason) for layers outside of the blocks; the first match counts.
_ROLES = (
    (r"modulat|adaln", "modulation of all blocks: its error reaches each of them"),
    (r"norm_out|proj_out|final|last|head|linear_out", "output projection: its error is one of the result"),
    (r"time|guidance|temb|label|pooled|add_embed|class_embed|condition_embed", "embedding of what all blocks read"),
    (r"embed|proj_in|_in$|_in\.|patch|caption|context|text|adapter|proj", "input projection: all blocks read it"),
)
# Lists of layers in such a module, as in Chroma's `distilled_guidance_layer`, are none of the repeated blocks.
_CONDITIONS = re.compile("|".join(role for role, _ in (_ROLES[0], _ROLES[2])), re.I)
_AUTOENCODER = (
    "autoencoders stay in 16 bit, as they are small, and every pixel passes through them; name layers in `modules` to "
    "quantize these"
)
_OUTSIDE = "outside of the repeated blocks"
_ONE_VECTOR = "its input is one vector per image: 8-bit activations would gain nothing"
# Paths and classes of layers that read the time embedding.
_MODULATION_NAMES = re.compile(
    r"(^|[._])(mod|modulation|ada_?ln(_modulation)?|time_emb_proj|temb_proj|context_mlp)([._]|$)", re.I
)
_MODULATION_CLASSES = re.compile(
    r"Ada(ptive)?(Layer|RMS)?Norm|NormZero|NormContinuous|Modulation|AdaLN|Timestep(Embedding|Block)|FiLM"
)


def rules(model: nn.Module) -> Rules:
    """Return the exceptions that `hf_quant.plan` makes for the linear layers of a diffusers model."""
    # Not at the top: this module is loaded before diffusers' attention, whose import takes seconds.
    from hf_quant.integrations.diffusers.attention import describe

    keep: dict[str, str] = {}
    weight_only: dict[str, str] = {}
    blocks = set(_blocks(model))
    first = next((names for cls in type(model).__mro__ if (names := _FIRST_BLOCKS.get(cls.__name__))), ())
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, nn.Linear):
            continue
        parents = [name[:i] for i, character in enumerate(name) if character == "."]
        if name in first:
            keep[name] = _FIRST_MODULATION
        elif blocks and blocks.isdisjoint(parents):
            keep[name] = next((why for role, why in _ROLES if re.search(role, name, re.I)), _OUTSIDE)
        elif _MODULATION_NAMES.search(name) or (
            parents and _MODULATION_CLASSES.search(type(modules[parents[-1]]).__name__)
        ):
            weight_only[name] = _ONE_VECTOR
    return Rules(keep, weight_only, describe(model), whole=_AUTOENCODER if is_autoencoder(model) else None)


def rules_within(model: nn.Module, is_host: Callable[[nn.Module], bool]) -> Rules | None:
    """Return the rules of a diffusers model, or of those in a container (MultiControlNetModel); None: there is none.

    is_host: True for the models of diffusers. A container has no line on 8-bit attention, as it cannot have that.
    """
    if is_host(model):
        return rules(model)
    parts = {name: found for name, child in model.named_children() if (found := rules_within(child, is_host))}
    keep: dict[str, str] = {}
    weight_only: dict[str, str] = {}
    for name, found in parts.items():
        if found.whole is not None:
            keep |= {f"{name}.{inner}": found.whole for inner, _ in model.get_submodule(name).named_modules()}
        keep |= {f"{name}.{inner}": why for inner, why in found.keep.items()}
        weight_only |= {f"{name}.{inner}": why for inner, why in found.weight_only.items()}
    return Rules(keep, weight_only) if parts else None


def fitting(model: nn.Module, config: QuantizerConfig) -> QuantizerConfig:
    """Return the config without `attention` where a pipeline gives it to all of its parts, and this one has none."""
    from hf_quant.integrations.diffusers.attention import describe

    if config.attention is None or not vars(config).get("is_for_all_parts") or describe(model) is not None:
        return config
    _logger.warning(
        "attention is %r, but %s has none that can be in 8 bit: it stays in 16 bit",
        *(config.attention, type(model).__name__),
    )
    changed = copy.copy(config)
    changed.attention = None
    return changed


def is_autoencoder(model: nn.Module) -> bool:
    """Return True if a diffusers model is a VAE or another autoencoder."""
    return any(c.__module__.startswith("diffusers.models.autoencoders.") for c in type(model).__mro__)


def _blocks(model: nn.Module) -> Iterator[str]:
    """Yield names of the repeated blocks: elements of lists with several linear layers each, and a UNet's middle."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not _CONDITIONS.search(name):
            for index, block in enumerate(module):
                if block is not None and sum(isinstance(m, nn.Linear) for m in block.modules()) > 1:
                    yield f"{name}.{index}"
        elif name == "mid_block":
            yield name
