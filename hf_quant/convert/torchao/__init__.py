"""Import of torchao: tensor subclasses, flattened into safetensors files or pickled."""
