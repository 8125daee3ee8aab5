"""Hadamard transforms: rotations that spread outliers over all channels."""
