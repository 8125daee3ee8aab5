"""Attention of transformers over a quantized cache, and masks that do not grow with it.

A `QuantizedCache` returns `QuantizedStates`. The attention functions in the registry of transformers are wrapped:
plain tensors are computed as before, and quantized states go to the kernel that reads their codes. "hf_quant" is one
more name in that registry, for models whose config asks for a quantized cache: instead of a large mask of all pairs,
[B, 1, S, T], as "sdpa" creates it, "hf_quant" takes a mask of the padding only, [B, T]. Of modules with the attribute
`NATIVE_SDPA`, which quantized models have, "sdpa" of plain tensors is a native kernel on CPUs.

A function that a model brings itself, for "eager", is in no registry: it is wrapped where the registry hands it back.
It reads codes if `_eager` proves that it computes that attention, and nobody wants its weights.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.kv_attention.op import visible
from hf_quant.kernels.native.attention import attention_of_values
from hf_quant.kv_cache import _eager
from hf_quant.kv_cache._attention import attend, mean_scores
from hf_quant.kv_cache._latents import LatentStates, is_fast_in_prompts
from hf_quant.kv_cache._layers import FirstPrompt
from hf_quant.kv_cache._states import QuantizedStates


NAME = "hf_quant"
NATIVE_SDPA = "_hf_quant_native_sdpa"
LARGE_MASK = 2**24  # bytes; smaller masks are created as for "sdpa"
_local = threading.local()
_wrapped: dict[Callable[..., Any], Callable[..., Any]] = {}  # {a model's own function: the one that reads codes}
# Options of "hf_quant" that do not change the attention of plain tensors, besides their mask.
_KNOWN = {"is_causal", "sliding_window", *_eager.IGNORED_OPTIONS}
_WRAPPED = ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention "hf_quant" for plain tensors: "sdpa", causal from the lower right corner.

    query [B, H, S, D] -> ([B, S, H, D], None). attention_mask: None, the padding [B, T], or all pairs [B, 1, S, T].
    Raises ValueError if the model caps its scores, because only "eager" attention does that.
    """
    if kwargs.get("softcap") is not None:
        raise ValueError(
            f'{type(module).__name__} caps its scores, which "hf_quant" attention of plain tensors does not: call '
            'set_attn_implementation("eager"), which takes a quantized cache, too'
        )
    S, T, sinks = query.shape[2], key.shape[2], kwargs.pop("s_aux", None)
    is_padding = attention_mask is not None and attention_mask.dim() == 2
    lacks_mask = attention_mask is None and (T > S or sinks is not None) and _is_causal(module, kwargs)
    if S > 1 and (is_padding or lacks_mask):
        seen = visible(S, T, T, kwargs.get("sliding_window") or 0, query.device)
        attention_mask = seen[None, None] if attention_mask is None else seen & attention_mask[:, None, None, -T:]
    if S > 1:
        found = _on_cpu(module, query, key, value, attention_mask, dropout, scaling, kwargs, sinks)
        if found is not None:
            return found, None
    if sinks is not None:
        key, value, attention_mask = _with_sinks(query, key, value, attention_mask, sinks)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def _on_cpu(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float | None,
    kwargs: dict[str, Any],
    sinks: Tensor | None = None,
) -> Tensor | None:
    """The attention [B, S, H, D] of "sdpa" by the native kernel; None if it does not compute it, or is not faster.

    In prompts it takes a half to a third of the time of torch's in 16 bit, as much as torch's where each position sees
    all others in fp32, and more where torch multiplies bf16 by AMX.
    """
    S, causal = q.shape[2], _is_causal(module, kwargs)
    if dropout or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or _has_others(kwargs):
        return None
    if not all([x.is_cpu and is_plain(x) for x in (q, k, v)]):
        return None
    if S > 1 and not (is_fast_in_prompts(q.dtype) and (causal or q.dtype != torch.float32)):
        return None
    if torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v)]):
        return None
    is_causal = causal and S > 1 and mask is None
    if is_causal and S != k.shape[2]:  # torch's first query is the first token then
        return None
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return attention_of_values(q, k, v, mask, is_causal=is_causal, scale=scale, sinks=sinks)


def _has_others(kwargs: dict[str, Any]) -> bool:
    """True if an attention function is asked for something that the kernels do not compute."""
    return any(option is not None and option is not False for name, option in kwargs.items() if name not in _KNOWN)


def computes_prompts(implementation: str | None, dtype: torch.dtype) -> bool:
    """True if native blocks compute the attention inside of prompts for this attention function on this CPU."""
    return implementation in ("sdpa", NAME) and is_fast_in_prompts(dtype)


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append one token of zeros to keys and values; its mask is the score `sinks` [H] of each head."""
    scores = query.new_zeros(()) if mask is None else mask
    if scores.dtype == torch.bool:
        scores = query.new_zeros(scores.shape).masked_fill_(~scores, float("-inf"))
    scores = scores.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    more = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    key, value = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value))
    return key, value, torch.cat([scores, more], -1)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Create the mask of "hf_quant": None or the padding, bool [B, T], for a long prompt; else the mask of "sdpa"."""
    is_large = q_length > 1 and batch_size * q_length * kv_length >= LARGE_MASK
    if is_large and mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True):
        # Only if the positions are the last ones. In a cache of fixed size they are not, and q_offset is a tensor.
        if isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length:
            padding = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].bool()
            return None if padding is None or bool(padding.all()) else padding
    if q_length > 1 and q_length != kv_length and not isinstance(kv_length, FirstPrompt):
        # "sdpa" takes None as causal from the upper left corner, in front of the empty places of a static cache.
        kwargs["allow_is_causal_skip"] = False
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    return sdpa_mask(*sizes, **kwargs)


def _noting_padding(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that creates masks: an empty quantized cache is told the padding of its first prompt."""

    @wraps(host)
    def create(*args: Any, **kwargs: Any) -> Any:
        length, padding = kwargs.get("kv_length"), kwargs.get("attention_mask")
        if isinstance(length, FirstPrompt) and length.cache is not None and isinstance(padding, Tensor):
            length.cache.note_padding(padding, kwargs["q_length"])
        return host(*args, **kwargs)

    return create


def _is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if given is None else given


def _reading_codes(host: Callable[..., Any], *, is_eager: bool = False) -> Callable[..., Any]:
    """Wrap an attention function: the codes of quantized states are read, everything else goes to `host`.

    is_eager: `host` is a model's own function, whose mask has everything that a position does not see.
    """
    name, is_sdpa = _name_of(host), host is sdpa_attention_forward

    @wraps(host)
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        recorder = getattr(_local, "recorder", None)
        if recorder is not None:
            return recorder(forward, query, key, value, {"dropout": dropout, "scaling": scaling, **kwargs}), None
        if isinstance(key, LatentStates) and isinstance(value, LatentStates):
            found = _attend_latents(host, module, query, key, attention_mask, dropout, scaling, kwargs)
            if found is not None:
                return found, None
            key, value = key.expand_states(), value.expand_states()
        # Of the prompt, too, so that code that is compiled later finds the result of the trial.
        reads = isinstance(key, QuantizedStates)
        if reads and is_eager:
            reads = _eager.is_attention(host, name, module, query, key.shape[1], scaling, kwargs)
        if isinstance(key, QuantizedStates) and key.exact is not None:
            key = key.exact  # the model may have computed new values from those in the cache
            exact = value.exact if isinstance(value, QuantizedStates) else None
            value = value[:, :, : key.shape[2]] if exact is None else exact
            if isinstance(attention_mask, Tensor):
                attention_mask = attention_mask[..., : key.shape[2]]
        if torch.is_grad_enabled() and query.requires_grad:  # the kernel has no gradient
            key, value = (x.dequantize() if isinstance(x, QuantizedStates) else x for x in (key, value))
        if isinstance(key, QuantizedStates) and reads and not dropout:
            found = None
            if not is_eager:
                found = _attend(module, query, key, value, attention_mask, scaling, kwargs)
            elif not _eager.wants_weights(module, kwargs) and (attention_mask is None or attention_mask.dim() == 4):
                options = {**kwargs, "is_causal": False}
                found = _attend(module, query, key, value, attention_mask, scaling, options)
            if found is not None:
                return found, None
        key, value = (x.noted().dequantize() if isinstance(x, QuantizedStates) else x for x in (key, value))
        if is_sdpa and NATIVE_SDPA in getattr(module, "__dict__", ()):  # some call it without a module
            found = _on_cpu(module, query, key, value, attention_mask, dropout, scaling, kwargs)
            if found is not None:
                return found, None
        return host(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)

    return forward


def _name_of(host: Callable[..., Any]) -> str:
    return f"{host.__module__}.{getattr(host, '__qualname__', type(host).__qualname__)}"


def reads_codes(
    function: Any, module: nn.Module, q: Tensor, kv_heads: int, scale: float | None, options: dict[str, Any]
) -> bool:
    """True if an attention function of `recorded_attention` is the kernel's, for q [B, H, S, D] and these options."""
    host = function.__wrapped__
    if _wrapped.get(host) is not function:
        return True
    return _eager.is_attention(host, _name_of(host), module, q, kv_heads, scale, options)


def _with_own_functions(get_interface: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of the registry that is given a model's own function, and returns it for "eager"."""

    @wraps(get_interface)
    def found(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = get_interface(self, attn_implementation, default)
        if function is not default or attn_implementation != "eager":
            return function
        own = _wrapped.get(default)
        if own is None:
            if torch.compiler.is_compiling():
                return function
            own = _wrapped[default] = _reading_codes(default, is_eager=True)
        return own

    return found


@contextmanager
def recorded_attention(recorder: Callable[..., Tensor]) -> Iterator[None]:
    """In this thread, call `recorder(function, query, key, value, options)` in place of an attention function.

    It returns the result. Only of functions that can read codes, see `register`.
    """
    outer = getattr(_local, "recorder", None)
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = outer


def is_recorded() -> bool:
    """True inside of `recorded_attention`."""
    return getattr(_local, "recorder", None) is not None


def _attend_latents(
    host: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: LatentStates,
    mask: Any,
    dropout: float,
    scale: float | None,
    kwargs: Any,
) -> Tensor | None:
    """Compute the attention [B, S, H, D] without expanding the keys; None if this attention is unsupported."""
    if dropout or _has_others(kwargs) or kwargs.get("sliding_window") or not isinstance(mask, Tensor | None):
        return None
    S, T = query.shape[2], key.shape[2]
    # The first prompt in a cache of fixed size has no mask: torch's first query is the first token.
    count = S if mask is None and S > 1 and host is not attention_forward else T
    mask, is_causal = latent_mask(module, S, T, mask, kwargs)
    return key.attend(query, mask, is_causal, query.shape[3] ** -0.5 if scale is None else scale, count)


def latent_mask(
    module: nn.Module, S: int, T: int, mask: Tensor | None, kwargs: dict[str, Any] | None = None
) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) of S tokens behind others, T in all, as `attend_to_latents` takes them."""
    is_causal = S > 1 and (mask is None or mask.dim() == 2) and _is_causal(module, kwargs or {})
    if mask is not None:
        mask = (mask[:, None, None, :].bool() if mask.dim() == 2 else mask)[..., :T]
    return mask, is_causal


def _attend(
    module: nn.Module, query: Tensor, key: QuantizedStates, value: Tensor, mask: Any, scale: float | None, kwargs: Any
) -> Tensor | None:
    """Compute the attention [B, S, H, D] from the codes; None if this attention is unsupported."""
    S, D, T = *query.shape[2:], key.shape[2]
    has_codes = isinstance(value, QuantizedStates) and key.shape[3] == value.shape[3] == D
    if not has_codes or not isinstance(mask, Tensor | None):
        return None
    softcap = kwargs.get("softcap")
    causal, window = False, 0
    if mask is None or mask.dim() == 2:  # else the mask contains both
        causal = _is_causal(module, kwargs)
        window = (kwargs.get("sliding_window") or 0) if causal else 0
    if mask is not None:
        mask = (mask[:, None, None, :].bool() if mask.dim() == 2 else mask)[..., :T]
    bias = kwargs.get("position_bias")
    if bias is not None:
        bias = bias[..., :T]
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
        mask = bias
    causal = causal and (S > 1 or window > 0)
    y, lse = attend(query, key, value, mask, is_causal=causal, window=window, scale=scale, softcap=softcap)
    sinks = kwargs.get("s_aux")
    if sinks is not None:  # one more score for each head, with no value
        lse = lse if softcap is not None else lse + mean_scores(query, key, scale)
        y = (y * torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1)).to(y.dtype)
    return y.transpose(1, 2).contiguous()


@cache
def register() -> None:
    """Register the attention and its masks with transformers, once."""
    AttentionInterface.register(NAME, _reading_codes(attention_forward))
    AttentionMaskInterface.register(NAME, padding_mask)
    for name, host in AttentionMaskInterface._global_mapping.items():
        AttentionMaskInterface.register(name, _noting_padding(host))
    for name in _WRAPPED:
        host = AttentionInterface._global_mapping.get(name)
        if host is not None:
            AttentionInterface.register(name, _reading_codes(host))
    # A class of the host, whose method stays what it is for all but "eager".
    AttentionInterface.get_interface = _with_own_functions(  # pyrefly: ignore[method-assign]
        AttentionInterface.get_interface
    )
