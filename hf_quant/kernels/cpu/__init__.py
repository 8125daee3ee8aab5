"""Shared by the CPU backends of all ops: decoders, prepacked weights, and the product with a quantized weight."""
