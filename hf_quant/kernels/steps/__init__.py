"""Steps between the products of a block of a model: norms, activation functions, rotary embeddings."""
