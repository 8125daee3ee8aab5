"""Products with quantized weights and 16-bit activations."""
