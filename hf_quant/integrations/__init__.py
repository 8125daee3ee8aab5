"""Adapters for the hosts: transformers, diffusers and PEFT. Each adapter registers itself when its host is loaded."""

# Before anything else of this package: see `hf_quant._boot`.
import transformers.quantizers.auto  # noqa: F401
