"""8-bit attention for diffusion models: a backend of diffusers' dispatcher, and wrappers for processors without it.

`model.set_attention_backend("hf_quant_int8")` selects the backend. `QuantizerConfig(attention="int8")` selects it for
one model, and also covers models without the dispatcher (CogVideoX, UNets, SD3, PixArt): their processors call torch's
scaled_dot_product_attention, which is replaced by the 8-bit one within them.
`hf_quant._boot` imports this module after diffusers has loaded its dispatcher, and never before.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import diffusers.models.attention_dispatch as dispatch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from hf_quant.kernels import int8_attention


BACKEND = "hf_quant_int8"
MAX_HEAD = 128  # largest head size, in values, that the kernels support
# With fewer keys, as in cross attention over 77 tokens of text, quantizing costs more time than it saves.
MIN_KEYS = 256


def int8_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` with int8 scores (see `hf_quant.kernels`).

    query [B, H, S, D], key and value [B, H, T, D]. In 16 bit, by torch itself: attention with a mask, dropout or a
    gradient, heads of more than 128 values, fewer than 256 keys, and any within a function mode that may replace it
    (perturbed attention guidance).
    """
    # As torch does: norms return fp32.
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        query, key, value = (part.to(torch.get_autocast_dtype(query.device.type)) for part in (query, key, value))
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if (
        needs_grad
        or attn_mask is not None
        or dropout_p
        or query.dim() != 4
        or key.shape != value.shape
        or query.shape[-1] > MAX_HEAD
        or key.shape[-2] < MIN_KEYS
        or not all(isinstance(mode, _Int8Attention | DeviceContext) for mode in _get_current_function_mode_stack())
    ):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return int8_attention(query, key, value, is_causal=is_causal, scale=scale, value_format=None)


def _backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Compute attention as diffusers calls it: query [B, S, H, D], key and value [B, T, H, D] -> [B, S, H, D]."""
    if return_lse or _parallel_config is not None:
        raise ValueError(
            f"the attention backend {BACKEND!r} has no context parallelism and returns no log-sum-exp: select another "
            'for that, e.g. model.set_attention_backend("native")'
        )
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # as diffusers' native backend reads it: [B, T] masks keys
    heads_first = (part.transpose(1, 2) for part in (query, key, value))
    return int8_sdpa(*heads_first, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)


class _Int8Attention(TorchFunctionMode):
    """Context manager: calls of torch's attention go to `int8_sdpa` within it."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = int8_sdpa
        return func(*args, **(kwargs or {}))


@functools.cache
def _int8_processor(cls: type) -> type:
    """Return a subclass of a processor that calls torch's attention; the subclass computes it in 8 bit."""

    @functools.wraps(cls.__call__)  # diffusers reads the names of its arguments
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Int8Attention():
            return cls.__call__(self, *args, **kwargs)

    def reduce(self: Any, protocol: int) -> tuple:
        return _rebuild, (cls,), self.__dict__

    return type(cls.__name__, (cls,), {"__call__": call, "__reduce_ex__": reduce, "_hf_quant_host": cls})


def _rebuild(cls: type) -> Any:
    return object.__new__(_int8_processor(cls))


def _processors(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """Yield (processor, True if diffusers' dispatcher serves it) for all attention that can be computed in 8 bit."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is None or not isinstance(module, Attention | MochiAttention | AttentionModuleMixin):
            continue
        if hasattr(processor, "_attention_backend"):
            # A class that names a backend takes no other: its masks are made for that one (AnyFlow's, for "flex").
            if getattr(type(processor), "_attention_backend", None) is None:
                yield processor, True
        elif _calls_torch(getattr(type(processor), "_hf_quant_host", type(processor))):
            yield processor, False


def _calls_torch(cls: type) -> bool:
    """Return True if a processor calls torch's attention, itself or by the dispatcher without a backend (Cosmos)."""
    names = getattr(getattr(cls.__call__, "__code__", None), "co_names", ())
    by_dispatcher = "dispatch_attention_fn" in names and "AttentionBackendName" not in names
    return "scaled_dot_product_attention" in names or by_dispatcher


def describe(model: nn.Module) -> str | None:
    """Return the plan's line on attention="int8" for a model, or None if it has no such attention."""
    count = len(list(_processors(model)))
    if not count:
        return None
    return (
        f"attention: int8 scores in {count} modules; in 16 bit where there is a mask, a gradient, fewer than "
        f"{MIN_KEYS} keys or a head of more than {MAX_HEAD} values"
    )


def set_attention_(model: nn.Module, attention: str | None) -> nn.Module:
    """Compute the attention of a diffusers model in 8 bit ("int8") or in 16 bit (None), and return the model.

    Only this model's: `model.set_attention_backend("hf_quant_int8")` also makes it the default of all others.
    Raises ValueError if it has no attention that can be.
    """
    processors = list(_processors(model))
    if attention is not None and not processors:
        raise ValueError(
            f"attention is {attention!r}, but {type(model).__name__} has no attention that can be in 8 bit"
        )
    own = dispatch.AttentionBackendName(BACKEND)
    for processor, is_dispatched in processors:
        host = getattr(type(processor), "_hf_quant_host", None)
        if is_dispatched and attention is not None:
            processor._attention_backend = own
        elif is_dispatched and processor._attention_backend is own:
            processor._attention_backend = None
        elif not is_dispatched and attention is not None and host is None:
            processor.__class__ = _int8_processor(type(processor))
        elif not is_dispatched and attention is None and host is not None:
            processor.__class__ = host
    return model


def register() -> None:
    """Add the backend to diffusers' dispatcher. Further calls do nothing."""
    names = dispatch.AttentionBackendName
    if BACKEND in names._value2member_map_:
        return
    # An Enum cannot be subclassed once it has members, and diffusers has no function that adds one.
    member = str.__new__(names, BACKEND)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    names._member_map_[member._name_] = names._value2member_map_[BACKEND] = member
    names._member_names_.append(member._name_)
    type.__setattr__(names, member._name_, member)
    dispatch._AttentionBackendRegistry.register(member)(_backend)


register()
