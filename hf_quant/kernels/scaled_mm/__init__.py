"""Products with quantized activations."""
