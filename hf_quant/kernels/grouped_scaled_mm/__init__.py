"""Products of experts in low-bit training: codes with codes."""
