"""FasterCache of diffusers around attention whose inputs are lazy, because the norms before it are fused."""

from collections.abc import Callable
from typing import Any

import diffusers.hooks.faster_cache as faster_cache
from torch import nn

from hf_quant.integrations.wrapping import wrap_once
from hf_quant.modules.inputs.lazy import LazyInput


def _with_tensors(host: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the hook of FasterCache around attention: it reads the size of a batch off an argument that is a Tensor."""

    def new_forward(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return host(self, module, *map(_tensor, args), **{name: _tensor(value) for name, value in kwargs.items()})

    return new_forward


def _tensor(value: Any) -> Any:
    return value.tensor() if isinstance(value, LazyInput) else value


def register() -> None:
    """Wrap that hook. Further calls do nothing."""
    wrap_once(faster_cache.FasterCacheBlockHook, "new_forward", _with_tensors)


register()
