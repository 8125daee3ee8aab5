"""Headers of safetensors files: names, dtypes and shapes of the tensors, read without loading them.

Layout of a file (https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little
endian; the header, JSON; the data. All values of a header are checked against the size of its file.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from hf_quant._wording import first_few
from hf_quant.checkpoint.folder import FIRST_BYTES, Directory, Folder
from hf_quant.checkpoint.untrusted import parse_json, shorten


MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself, used for index files, too
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
MAX_NAME = 500  # characters of a tensor's name
MAX_DIMS = 8  # of a stored tensor; fused convolutions have 5
MAX_SHARDS = 5000  # each is a request to the Hub if the checkpoint is there
_SHARD = re.compile(r"[^/\\:\s]{1,240}\.safetensors")
_INDEX_SUFFIX = ".safetensors.index.json"
_STEMS = ("model", "diffusion_pytorch_model")  # file names of transformers and diffusers


class TensorInfo(NamedTuple):
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def read_header(path: Path | str) -> dict[str, TensorInfo]:
    """Read {tensor name: (dtype, shape)} from a safetensors file, or a directory with one file or an index and shards.

    Raises ValueError if a file is missing, truncated or corrupt; no data is read.
    """
    return {name: info for tensors in scan_files(Path(path)).values() for name, info in tensors.items()}


def scan_files(path: Path) -> dict[Path, dict[str, TensorInfo]]:
    """Read {file: {tensor name: TensorInfo}}; `path` and errors as for `read_header`."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        return {path: _read_file(Directory(path.parent), path.name)}
    return {path / name: tensors for name, tensors in scan_folder(Directory(path)).items()}


def scan_folder(folder: Folder) -> dict[str, dict[str, TensorInfo]]:
    """Read {file name: {tensor name: TensorInfo}} of a checkpoint. Raises ValueError as `read_header` does."""
    names = folder.files()
    index = _pick(folder, names, _INDEX_SUFFIX)
    if index is not None:
        files = _scan_shards(folder, index, set(names))
        single = f"{index.removesuffix(_INDEX_SUFFIX)}.safetensors"
        if single in names and single not in files:
            raise ValueError(
                f"{folder.name} holds {single} and the shards of {index}, of two checkpoints, and hosts differ in "
                "which they read: delete what is left over"
            )
        return files
    file = _pick(folder, names, ".safetensors")
    if file is None:
        unsafe = next((n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".bin.index.json"))), None)
        hint = "" if unsafe is None else f"; {unsafe} is a pickle, which could run any code: hf_quant reads none"
        raise ValueError(f"{folder.name} holds no safetensors file{hint}")
    return {file: _read_file(folder, file)}


def _pick(folder: Folder, names: list[str], suffix: str) -> str | None:
    """Return the file with the suffix, or None; of several, the one that the hosts would load."""
    found = [n for n in names if n.endswith(suffix) and not n.startswith(".") and "/" not in n]
    if len(found) <= 1:
        return found[0] if found else None
    preferred = next((f"{stem}{suffix}" for stem in _STEMS if f"{stem}{suffix}" in found), None)
    if preferred is None:
        raise ValueError(f"{folder.name} holds {first_few(found, 5)}; name the one to read")
    return preferred


def _scan_shards(folder: Folder, index: str, names: set[str]) -> dict[str, dict[str, TensorInfo]]:
    where = f"{folder.name}/{index}"
    weight_map = folder.load_json(index, limit=MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{where} has no weight_map, the table of its shards")
    for name in weight_map.values():
        # A name with a path would read files outside of the checkpoint.
        if not isinstance(name, str) or not _SHARD.fullmatch(name) or not name.isprintable():
            raise ValueError(
                f"{where} names the shard {shorten(repr(name))}; a shard is a .safetensors file beside the index"
            )
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"{where} names {len(shards)} shards; at most {MAX_SHARDS} can be right")
    missing = [shard for shard in shards if shard not in names]
    if missing:
        single = f"{index.removesuffix(_INDEX_SUFFIX)}.safetensors"
        hint = f"; it holds {single}, too: delete {index} if that is left over" if single in names else ""
        raise ValueError(f"{folder.name} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:3])}{hint}")
    with ThreadPoolExecutor(folder.workers) as pool:
        files = dict(zip(shards, pool.map(partial(_read_file, folder), shards)))
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise ValueError(f"{where} says that {name} holds {shorten(repr(tensor))}, but it does not")
    owners: dict[str, str] = {}
    for name, tensors in files.items():
        for tensor in tensors:
            if owners.setdefault(tensor, name) != name:
                raise ValueError(f"{where}: {owners[tensor]} and {name} both hold {shorten(repr(tensor))}")
    return files


def _read_file(folder: Folder, file: str) -> dict[str, TensorInfo]:
    where = f"{folder.name}/{file}"
    data, size = folder.beginning(file, FIRST_BYTES)
    if data.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{where} is a pointer of Git LFS, which stands for the weights: fetch them by `git lfs pull`, or by "
            "`hf download`"
        )
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(
            f"{where} is truncated or not a safetensors file: {size} bytes, with a header that claims {length}"
        )
    if 8 + length > len(data):
        data, size = folder.beginning(file, 8 + length)
    return parse_header(data[8 : 8 + length], size - 8 - length, where)


def parse_header(data: bytes, available: int, where: str) -> dict[str, TensorInfo]:
    """Parse the JSON of a header, which `available` bytes of tensors follow, into {tensor name: TensorInfo}.

    Raises ValueError, which calls the file `where`, if header and size contradict each other.
    """
    header = parse_json(data, f"the header of {where}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{where} is corrupt: its metadata are {shorten(repr(metadata))}; needs strings by name")
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if not name.isprintable() or len(name) > MAX_NAME:
            raise ValueError(
                f"{where} names a tensor {shorten(repr(name))}; names are printable and at most {MAX_NAME} long"
            )
        tensors[name], begin = _parse_entry(entry, name, where)
        spans.append((begin, begin + tensors[name].nbytes, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(f"{where} is corrupt: {name!r} is said to begin at byte {begin}, not {position}")
        position = end
    if position > available:
        raise ValueError(f"{where} is truncated: {available} bytes of tensors, its header promises {position}")
    if position < available:
        raise ValueError(f"{where} is corrupt: {available - position} bytes at its end belong to no tensor")
    return tensors


def _parse_entry(entry: Any, name: str, where: str) -> tuple[TensorInfo, int]:
    """Parse one entry of a header into (TensorInfo, position of its first byte)."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{where} is corrupt: its header has {shorten(repr(entry))} for {name!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where} holds {name!r} as {shorten(repr(dtype))}; known dtypes: {', '.join(DTYPES)}")
    info = TensorInfo(DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != info.nbytes:
        raise ValueError(
            f"{where} is corrupt: {name!r} with shape {shorten(repr(shape))} takes {shorten(repr(info.nbytes))} "
            f"bytes, its header says {shorten(repr(offsets[1] - offsets[0]))}"
        )
    return info, offsets[0]


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
