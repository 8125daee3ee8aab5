"""Products of MoE experts."""
