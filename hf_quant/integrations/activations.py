"""`fuse_activations_`: norms, activation functions and what else lies between products, computed in fewer calls."""

from typing import TypeVar

from torch import nn

from hf_quant.integrations.diffusers.fused_norms import quantizes_activations, restore_activations_, set_fusion_
from hf_quant.modules import check_model


_Model = TypeVar("_Model", bound=nn.Module)


def fuse_activations_(model: _Model) -> _Model:
    """Compute what lies between the products of a quantized model in fewer calls, in place, and return the model.

    In a diffusion model norms and activation functions are computed together with the quantization after them, on
    every device. In a model of transformers norms, feed-forward blocks and attention become one native call each on
    CPUs; on GPUs norms, activation functions and rotary embeddings become one launch each. A block is used if it
    agrees with the host's module on a random input.

    Without this function that is so as `QuantizerConfig(fuse_activations=...)` says when a model is quantized; a
    checkpoint does not keep it. Results are the same but for rounding. What needs a gradient, autocast, and modules
    with hooks compute as before. `unfuse_activations_` is the way back.

    Raises ValueError if nothing in the model can be fused.
    """
    check_model(model)
    if not set_fusion_(model, True) + _fuse_blocks(model):
        reason = (
            "no block that hf_quant knows" if quantizes_activations(model) else "no layer that quantizes its input"
        )
        raise ValueError(f"nothing to fuse in this {type(model).__name__}: it has {reason}")
    _remember(model, True)
    return model


def unfuse_activations_(model: _Model) -> _Model:
    """Compute everything between the products by itself again, on GPUs, too, and return the model."""
    from hf_quant.integrations.transformers.blocks import unfuse_blocks_

    check_model(model)
    restore_activations_(model)
    unfuse_blocks_(model)
    _remember(model, False)
    return model


def _fuse_blocks(model: nn.Module) -> int:
    import sys

    host = sys.modules.get("transformers.modeling_utils")  # None: not imported, so no model of transformers exists
    if host is None or not any(isinstance(module, host.PreTrainedModel) for module in model.modules()):
        return 0
    from hf_quant.integrations.transformers.blocks import fuse_blocks_

    return fuse_blocks_(model)


def _remember(model: nn.Module, fuses: bool) -> None:
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # layers of it may be quantized or dequantized later
        quantizer._fuse_activations = fuses
