"""Row-wise (per token) quantization of activations."""
