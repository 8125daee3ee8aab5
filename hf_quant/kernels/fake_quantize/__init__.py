"""Weights as they would be stored, in their own dtype, and the gradients through that."""
