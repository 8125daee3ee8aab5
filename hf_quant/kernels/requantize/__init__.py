"""Weights of int8 codes that an optimizer writes: new values rounded at random under scales that last."""
