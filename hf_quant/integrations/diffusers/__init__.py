"""The diffusers integration: `quantizer` is the adapter; `hf_quant._boot` imports each module when it is needed."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Resolve names of `quantizer`: pickles of whole models look for its functions here, in their first place."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.quantizer"), name)
