"""Products of quantized weights on Hopper: some warps copy, others decode and multiply."""
