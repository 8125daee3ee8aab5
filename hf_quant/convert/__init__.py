"""Conversion of other libraries' checkpoints, bit for bit: `import_checkpoint`, `export_compressed_tensors`."""
