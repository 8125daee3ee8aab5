"""Optimizers whose states take 8 or 4 bits, with bf16 parameters that are written once, by stochastic rounding."""

from hf_quant.optim.adam import AdamW, AdamW4bit, AdamW8bit, AdamWFp8
from hf_quant.optim.offload import CPUOffloadOptimizer


__all__ = ["AdamW", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer"]
