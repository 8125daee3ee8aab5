"""Methods of a model with 8-bit attention that exchange its processors: the new ones compute in 8 bit, too."""

from collections.abc import Callable
from typing import Any

from torch import nn


def set_attention(model: nn.Module, attention: str | None) -> None:
    """Compute the attention of a model in 8 bit ("int8") or in 16 bit (None)."""
    # Not at the top: see `diffusers_rules.rules`.
    from hf_quant.integrations.diffusers.attention import set_attention_

    set_attention_(model, attention)


def _set_processors(model: nn.Module, host: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Wrap `set_attn_processor` (of an IP adapter) and `set_attention_slice`.

    Processors of slices compute attention themselves, in 16 bit; `disable_attention_slicing` sets others again.
    """
    from hf_quant.integrations.diffusers.attention import describe

    host(*args, **kwargs)
    if model.hf_quantizer.quantization_config.attention is not None and describe(model) is not None:
        set_attention(model, model.hf_quantizer.quantization_config.attention)


def _set_default_processors(model: nn.Module, host: Callable[..., None]) -> None:
    """Wrap `set_default_attn_processor`, which knows the host's own classes only."""
    set_attention(model, None)
    host()


ATTENTION_WRAPPERS = {
    "set_attention_slice": _set_processors,
    "set_attn_processor": _set_processors,
    "set_default_attn_processor": _set_default_processors,
}
