"""Shared by the CPU backends of all ops: decoders, layouts, scratch, and the product with a quantized weight."""

from hf_quant.kernels.cpu.product import ready_product


__all__ = ["ready_product"]
