"""`Record`: one tensor subclass of torchao, as a checkpoint describes it.

In safetensors files the tensors of `X.weight` are `X._weight_qdata`, `X._weight_scale`, ..., and the header's metadata
have its class and other fields as JSON
(https://github.com/pytorch/ao/blob/main/torchao/prototype/safetensors/safetensors_support.py).
"""

from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from hf_quant.checkpoint import one_line, parse_json
from hf_quant.convert.files import TensorFiles


class Record(NamedTuple):
    """A quantized weight: the name of its class in torchao, its fields, and the keys of its tensors.

    Objects among the fields are as torchao writes them in JSON: {"_type": class, "_data": fields or name}; a dtype is
    its name.
    """

    module: str
    weight: str  # name of the 16-bit weight in the module
    kind: str
    fields: dict[str, Any]
    parts: dict[str, str]  # {attribute: key}

    def key(self, part: str) -> str:
        """Return the key of a tensor. Raises ValueError if the record has none of that name."""
        if part not in self.parts:
            raise ValueError(f"{self.module}.{self.weight}, a {self.kind}, has no {part}")
        return self.parts[part]


def part_key(module: str, weight: str, attribute: str) -> str:
    """Return the key of a tensor of a subclass."""
    return f"{module}._{weight}_{attribute}"


def stored_records(files: TensorFiles) -> list[Record]:
    """Return the quantized weights of safetensors files. Raises ValueError if their metadata cannot be."""
    found: dict[str, Record] = {}
    for file in files.files:
        metadata = _metadata(file)
        for name in _names(metadata, file):
            module, _, weight = name.rpartition(".")
            fields = parse_json(str(metadata.get(name, "{}")).encode(), f"what {file} says of {name}")
            names = fields.get("_tensor_data_names")
            if not isinstance(names, list):  # a plain tensor
                continue
            data, kind = fields.get("_data"), fields.get("_type")
            if not isinstance(data, dict) or not isinstance(kind, str):
                raise ValueError(f"{file} describes {name} by {fields}; needs a class and its fields")
            keys = {str(part): part_key(module, weight, str(part)) for part in names}
            plain = {field: plain_field(value) for field, value in data.items()}
            if any(key in files.tensors for key in keys.values()):
                found[name] = Record(module, weight, kind, plain, keys)
    return list(found.values())


def plain_field(value: Any) -> Any:
    """Return the name of a dtype that JSON has as an object; any other value as it is."""
    return value.get("_data") if isinstance(value, dict) and value.get("_type") == "torch.dtype" else value


def _metadata(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {one_line(error)}") from None


def _names(metadata: dict[str, str], file: Path) -> list[str]:
    if "tensor_names" not in metadata:
        return []
    listed = parse_json(f'{{"names": {metadata["tensor_names"]}}}'.encode(), f"tensor_names of {file}")["names"]
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"tensor_names of {file} is no list of names")
    return listed
