"""The package gguf, which is needed for GGUF files only.

Its source: https://github.com/ggml-org/llama.cpp/tree/master/gguf-py
"""

import importlib
from typing import Any


def gguf_package() -> Any:
    """Return the module. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ValueError("GGUF files need the package gguf: pip install 'hf-quant[gguf]'") from None
