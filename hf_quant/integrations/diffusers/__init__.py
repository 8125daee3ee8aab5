"""The diffusers integration: `quantizer` is the adapter; `hf_quant._boot` imports each module with what it extends."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Names of the adapter. Pickles of whole models look for them here, where it was."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.quantizer"), name)
