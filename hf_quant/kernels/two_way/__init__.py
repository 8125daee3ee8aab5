"""Matrices quantized by their rows and by their columns at once: the operands of a linear layer in training."""
