"""Conversion of other libraries' checkpoints, bit for bit: `import_checkpoint` and the exports."""
