"""Shared by the CPU backends of all ops: decoders, layouts, scratch, and the product with a quantized weight."""

from hf_quant.kernels.cpu.product import Run, find_ready, ready_product


__all__ = ["Run", "find_ready", "ready_product"]
