"""Attention over the codes of a quantized KV cache."""
