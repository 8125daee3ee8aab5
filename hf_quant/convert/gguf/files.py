"""Read GGUF files: metadata, and tensors under the names of transformers."""

from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_quant.checkpoint import TensorInfo, one_line, shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.gguf.layouts import Layout
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

    Values are as transformers has them. What is in blocks is read part by part.
    """

    def __init__(self, file: Gguf, layouts: dict[str, Layout], shapes: dict[str, tuple[int, ...]]) -> None:
        """Arguments: {name in transformers: its layout in the file}, and its shape there."""
        self._file, self.layouts = file, layouts
        self.tensors = {}
        shards: list[dict[str, TensorInfo]] = []
        size = _SHARD
        for name, layout in layouts.items():
            nbytes = sum(file.tensors[own].data.nbytes for own in layout.parts)
            self.tensors[name] = TensorInfo(self._dtype(name), shapes[name])
            if size + nbytes > _SHARD:
                shards.append({})
                size = 0
            shards[-1][name] = self.tensors[name]
            size += nbytes
        self.files = {file.path.with_name(f"{file.path.name}-{i}"): shard for i, shard in enumerate(shards)}

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return the types of the parts of a parameter."""
        return tuple(self._file.kind(own) for own in self.layouts[name].parts)

    def _dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which all parts are exact; uint8 if there are blocks."""
        dtypes = [PLAIN.get(kind) for kind in self.kinds(name)]
        known = [dtype for dtype in dtypes if dtype is not None]
        return reduce(torch.promote_types, known) if len(known) == len(dtypes) else torch.uint8

    def blocks(self, name: str, part: int) -> Tensor:
        """Read a part as it is in the file: numbers, or blocks as uint8 [..., bytes of a row]."""
        return self._file.read(self.layouts[name].parts[part])

    def read(self, name: str) -> Tensor:
        """Read a parameter that is not in blocks to the CPU."""
        info, layout = self.tensors[name], self.layouts[name]
        parts = [self._file.read(own).to(info.dtype) for own in layout.parts]
        return layout.values(parts).view(info.shape)

    def decode(self, name: str) -> Tensor:
        """Return the matrices of any types in fp32. Raises ValueError if the package cannot decode them."""
        layout = self.layouts[name]
        return layout.join([self._file.decode(own) for own in layout.parts])
