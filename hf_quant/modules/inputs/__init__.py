"""The input of a quantized linear layer: read by one layer alone, or by several that share work on it."""
