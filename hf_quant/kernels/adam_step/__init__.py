"""Steps of AdamW on many parameters at once, with states in fp32, bf16, 8 or 4 bits and stochastic rounding."""
