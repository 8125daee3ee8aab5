"""Adapters for the hosts: transformers, diffusers and PEFT. Each adapter registers itself when its host is loaded."""

from functools import partial
from importlib import import_module

from hf_quant._boot import submodule


# Before anything else of this package: see `hf_quant._boot`. An import statement would bind the name of the adapter.
import_module("transformers.quantizers.auto")

__getattr__ = partial(submodule, __name__)
