"""Read GGUF files: metadata, and tensors under the names of transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_quant.checkpoint import TensorInfo, one_line, shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.gguf.package import gguf_package


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHARD = 5_000_000_000  # bytes of a file that is written: one is in memory
# What the package raises on bytes that are no GGUF.
_BROKEN = (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError, MemoryError)
_MAX_NAME = 500


class Gguf:
    """A GGUF file: its metadata, its tensors by their names in the file.

    Raises ValueError if it is none, is damaged, or a part of several.
    """

    def __init__(self, path: Path) -> None:
        gguf = gguf_package()
        if not path.is_file():
            raise ValueError(f"{path} is not a file")
        try:
            self._reader: Any = gguf.GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            self.architecture = str(self.value("general.architecture"))
            parts = int(self.value("split.count", 1))
        except _BROKEN as error:
            hint = "it is of another kind, or incomplete: download it again"
            raise ValueError(f"{path} cannot be read as GGUF: {one_line(error)}; {hint}") from None
        self.path = path
        if self._reader.byte_order != "I":
            raise ValueError(f"{path} has another byte order than this machine")
        odd = next((name for name in self.tensors if not name.isprintable() or len(name) > _MAX_NAME), None)
        if odd is not None:
            raise ValueError(f"{path} names a tensor {shorten(repr(odd))}")
        if parts > 1:
            raise ValueError(f"{path} is one of {parts} parts: join them by `llama-gguf-split --merge` first")

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def values(self, prefix: str) -> dict[str, Any]:
        """Return {key: value} of the metadata whose keys begin with a prefix."""
        return {key: self.value(key) for key in self._reader.fields if key.startswith(prefix)}

    def kind(self, name: str) -> str:
        """Return the name of a tensor's type, such as "Q4_0"."""
        return self.tensors[name].tensor_type.name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of values, in torch's order."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape.tolist()))

    def read(self, name: str) -> Tensor:
        """Read a tensor: floating-point numbers in their dtype, else blocks as uint8 [..., bytes of a row]."""
        kind, data = self.kind(name), torch.from_numpy(self.tensors[name].data.copy())
        return data.view(PLAIN[kind]) if kind in PLAIN else data

    def decode(self, name: str) -> Tensor:
        """Return the values of a tensor of any type in fp32. Raises ValueError if the package cannot decode it."""
        tensor = self.tensors[name]
        try:
            return torch.from_numpy(gguf_package().dequantize(tensor.data, tensor.tensor_type))
        except NotImplementedError as error:
            raise ValueError(f"{name} cannot be decoded: {one_line(error)}") from None


class GgufTensors(TensorFiles):
    """The tensors of a GGUF file under the names of transformers, as if they were in files of 5 GB.

    Rows are in transformers' order, norms without their offset. Quantized tensors are rows of blocks.
    """

    def __init__(
        self, file: Gguf, names: dict[str, str], orders: dict[str, Tensor], offsets: dict[str, float]
    ) -> None:
        """Arguments: {name in transformers: name in the file}, its order of rows, and what is subtracted from it."""
        self._file, self._names, self._orders, self._offsets = file, names, orders, offsets
        self.tensors = {}
        shards: list[dict[str, TensorInfo]] = []
        size = _SHARD
        for name, own in names.items():
            data = file.tensors[own].data
            dtype = PLAIN.get(file.kind(own), torch.uint8)
            shape = file.shape(own) if file.kind(own) in PLAIN else tuple(data.shape)
            self.tensors[name] = TensorInfo(dtype, shape)
            if size + data.nbytes > _SHARD:
                shards.append({})
                size = 0
            shards[-1][name] = self.tensors[name]
            size += data.nbytes
        self.files = {file.path.with_name(f"{file.path.name}-{i}"): shard for i, shard in enumerate(shards)}

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    def order(self, name: str, values: Tensor) -> Tensor:
        """Return rows of the file in transformers' order."""
        order = self._orders.get(name)
        return values if order is None else values[order.argsort()]

    def read(self, name: str) -> Tensor:
        """Read one tensor to the CPU."""
        found = self.order(name, self._file.read(self._names[name]))
        offset = self._offsets.get(name)
        return found if offset is None else found - offset

    def decode(self, name: str) -> Tensor:
        """Return the values of a tensor of any type in fp32. Raises ValueError if the package cannot decode it."""
        return self.order(name, self._file.decode(self._names[name]))
