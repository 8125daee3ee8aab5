"""Fuse norms and activation functions of diffusers' blocks with the quantization of the layers that read them.

A norm, its modulation and the quantization become one kernel (see `hf_quant.modules.inputs.lazy`), and so do an
activation function and the quantization. Norms are fused only in the blocks that are listed, where linear layers alone
read them.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn

from hf_quant.kernels.dispatch import is_exporting
from hf_quant.modules import QuantLinear
from hf_quant.modules.inputs.lazy import LazyAct, LazyInput, LazyNorm


_MODELS = "diffusers.models."  # where all of these classes are; Z-Image has a FeedForward of its own
_NORMS_OF_STREAMS = ("norm1.norm", "norm1_context.norm", "norm2", "norm2_context")
# {class of a block: its norms}.
_NORMS = {
    "attention.BasicTransformerBlock": ("norm1", "norm2", "norm3"),
    "attention.JointTransformerBlock": _NORMS_OF_STREAMS,
    "transformers.transformer_flux.FluxSingleTransformerBlock": ("norm.norm",),
    "transformers.transformer_flux.FluxTransformerBlock": _NORMS_OF_STREAMS,
    "transformers.transformer_flux2.Flux2SingleTransformerBlock": ("norm",),
    "transformers.transformer_flux2.Flux2TransformerBlock": ("norm1", "norm1_context", "norm2", "norm2_context"),
    "transformers.transformer_hunyuan_video.HunyuanVideoSingleTransformerBlock": ("norm.norm",),
    "transformers.transformer_hunyuan_video.HunyuanVideoTransformerBlock": _NORMS_OF_STREAMS,
    "transformers.transformer_qwenimage.QwenImageTransformerBlock": (
        *("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"),
    ),
}


def _layer_norm(module: nn.LayerNorm, x: Tensor, forward: Callable) -> LazyNorm:
    return LazyNorm(x, partial(forward, module), module.weight, module.bias, module.eps)


def _gelu(module: nn.Module, x: Tensor, forward: Callable) -> LazyAct:
    h = module.proj(x)
    return LazyAct(h, None, "gelu_tanh" if module.approximate == "tanh" else "gelu", partial(module.gelu, h))


def _geglu(module: nn.Module, x: Tensor, forward: Callable) -> LazyAct:
    h, gate = module.proj(x).chunk(2, dim=-1)
    return LazyAct(gate, h, "gelu", lambda: h * module.gelu(gate))


def _swiglu(module: nn.Module, x: Tensor, forward: Callable) -> LazyAct:
    h, gate = module.proj(x).chunk(2, dim=-1)
    return LazyAct(gate, h, "silu", lambda: h * module.activation(gate))


def _flux2_swiglu(module: nn.Module, x: Tensor, forward: Callable) -> LazyAct:
    gate, up = x.chunk(2, dim=-1)
    return LazyAct(gate, up, "silu", partial(forward, module, x))


# {class: (its activation function, the layer that reads the result)}.
_FEED_FORWARDS = {
    "attention.FeedForward": ("net.0", "net.2"),
    "transformers.transformer_flux2.Flux2FeedForward": ("act_fn", "linear_out"),
}
_ACTS = {
    "activations.GELU": _gelu,
    "activations.GEGLU": _geglu,
    "activations.SwiGLU": _swiglu,
    "transformers.transformer_flux2.Flux2SwiGLU": _flux2_swiglu,
}


@cache
def _lazy_class(cls: type[nn.Module], make: Callable[..., LazyInput]) -> type[nn.Module]:
    """Return a subclass of a norm or an activation function that returns a `LazyInput` where that is faster."""

    def forward(self: nn.Module, x: Tensor | LazyInput) -> Tensor | LazyInput:
        return make(self, x, cls.forward) if _is_wanted(self, x) else cls.forward(self, x)

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _rebuild, (cls, make), self.__dict__

    names = {"forward": forward, "__reduce_ex__": reduce, "_hf_quant_host": cls}
    return type(cls.__name__, (cls,), names)


def _rebuild(cls: type[nn.Module], make: Callable[..., LazyInput]) -> nn.Module:
    return object.__new__(_lazy_class(cls, make))


def _is_wanted(module: nn.Module, x: Tensor | LazyInput) -> bool:
    """Return True without gradients and autocast, if the input is on a GPU or the config asks for every device."""
    if torch.is_grad_enabled() or is_exporting() or torch.is_autocast_enabled(x.device.type):
        return False
    if not torch.compiler.is_compiling() and not isinstance(x, LazyInput) and x.is_inference():
        return False
    # A hook may take weights of the norm away (offloading) before the next layer asks for the result.
    if "forward" in module.__dict__ and any(p is not None for p in module._parameters.values()):
        return False
    fuses = module._hf_quant_fuses
    return x.device.type in ("cuda", "xpu") if fuses is None else fuses


def set_fusion_(model: nn.Module, fuses: bool | None) -> int:
    """Fuse on every device (True), on GPUs (None) or nowhere (False), and return the number of modules.

    See `hf_quant.fuse_activations_`.
    """
    restore_activations_(model)
    targets = [] if fuses is False else list(_targets(model))
    for module, make in targets:
        module.__class__ = _lazy_class(type(module), make)
        module._hf_quant_fuses = fuses
    return len(targets)


def restore_activations_(model: nn.Module) -> None:
    """Undo `set_fusion_`."""
    for module in model.modules():
        host = getattr(type(module), "_hf_quant_host", None)
        if host is not None and "_hf_quant_fuses" in module.__dict__:
            module.__class__ = host
            del module._hf_quant_fuses


def _targets(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., LazyInput]]]:
    """Yield (module, maker of its lazy result) for modules whose result is read by layers that quantize inputs."""
    for block in model.modules():
        name = _name_of(block)
        act, reader = _FEED_FORWARDS.get(name, (None, None))
        if act is not None and _quantizes(block.get_submodule(reader)):
            make = _ACTS.get(_name_of(block.get_submodule(act)))
            if make is not None:
                yield block.get_submodule(act), make
        if name in _NORMS and quantizes_activations(block):
            modules = dict(block.named_modules())
            for norm in _NORMS[name]:
                if type(modules.get(norm)) is nn.LayerNorm:
                    yield modules[norm], _layer_norm


def _name_of(module: nn.Module) -> str:
    """Return the name of a class of diffusers as the tables above have it."""
    return f"{type(module).__module__}.{type(module).__qualname__}".removeprefix(_MODELS)


def quantizes_activations(model: nn.Module) -> bool:
    """Return True if any layer of a model quantizes its input."""
    return any(_quantizes(layer) for layer in model.modules())


def _quantizes(module: nn.Module) -> bool:
    """Return True if a layer, or the layer inside of an adapter of PEFT, quantizes its input, at least on CPUs."""
    layer = getattr(module, "base_layer", module)
    return isinstance(layer, QuantLinear) and layer.scheme.activation_on("cpu") is not None
