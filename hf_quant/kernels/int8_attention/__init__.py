"""Attention with 8-bit products, for diffusion transformers."""
