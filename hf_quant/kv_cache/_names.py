"""Names of a cache: `cache` since transformers 5.24, before that `past_key_values`.

Earlier there were `cache_params` of Mamba and `layer_past` of layers of old models (Falcon, BLOOM), too.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any


CACHES = ("cache", "past_key_values", "cache_params", "layer_past")


def cache_in(values: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model, by any of its names; None if there is none."""
    return next((values[name] for name in CACHES if values.get(name) is not None), None)


def cache_name(function: Callable[..., Any]) -> str:
    """Return the name by which a function takes a cache; that of transformers if it names none."""
    named = inspect.signature(function).parameters
    return next((name for name in CACHES if name in named), host_cache_name())


@cache
def host_cache_name() -> str:
    """Return the name of the cache in the installed transformers: in `generate`, in masks and most models."""
    from transformers.masking_utils import create_causal_mask  # imports the compiler

    named = inspect.signature(create_causal_mask).parameters
    return next(name for name in CACHES if name in named)
