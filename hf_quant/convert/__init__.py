"""Checkpoints of other libraries: `import_checkpoint` reads them, `export_compressed_tensors` writes them, exactly."""
