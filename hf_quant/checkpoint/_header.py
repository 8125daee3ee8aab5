"""What safetensors files hold, read from their headers: names, dtypes, shapes; no weights are loaded.

Layout of a file (https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little
endian; the header, JSON; the data. Everything in a header is checked against the size of its file.
"""

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch


MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself; also ours for an index file
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
_INDEX_SUFFIX = ".safetensors.index.json"
_STEMS = ("model", "diffusion_pytorch_model")  # what transformers and diffusers call their files


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
    """{tensor name: (dtype, shape)} of a safetensors file, or of a directory with one file or shards and an index.

    Raises ValueError if a file is missing, truncated or corrupt; no data is read.
    """
    return {name: info for tensors in scan_files(Path(path)).values() for name, info in tensors.items()}


def scan_files(path: Path) -> dict[Path, dict[str, TensorInfo]]:
    """{file: {tensor name: TensorInfo}}; `path` as for `read_header`. Raises ValueError like it."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        return {path: _parse_file(path)}
    index = _pick(path, _INDEX_SUFFIX)
    if index is not None:
        return _scan_shards(index)
    file = _pick(path, ".safetensors")
    if file is None:
        raise ValueError(f"{path} holds no safetensors file")
    return {file: _parse_file(file)}


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError if there is none, or it is absurdly large."""
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_HEADER_BYTES} can be right")
    return _parse_json(path.read_bytes(), str(path))


def _pick(directory: Path, suffix: str) -> Path | None:
    """The one file with the suffix; of several, the one that the hosts would load."""
    found = sorted(p for p in directory.iterdir() if p.name.endswith(suffix) and not p.name.startswith("."))
    if len(found) <= 1:
        return found[0] if found else None
    known = [directory / f"{stem}{suffix}" for stem in _STEMS]
    preferred = next((p for p in known if p in found), None)
    if preferred is None:
        raise ValueError(f"{directory} holds {', '.join(p.name for p in found)}; name the one to read")
    return preferred


def _scan_shards(index: Path) -> dict[Path, dict[str, TensorInfo]]:
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map, the table of its shards")
    for name in weight_map.values():
        # A name with a path in it would read files outside of the checkpoint.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names the shard {name!r}; a shard is a .safetensors file beside the index")
    shards = sorted({index.parent / name for name in weight_map.values()})
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:3])}")
    files = {shard: _parse_file(shard) for shard in shards}
    for tensor, name in weight_map.items():
        if tensor not in files[index.parent / name]:
            raise ValueError(f"{index} says that {name} holds {tensor!r}, but it does not")
    return files


def _parse_file(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is truncated or not a safetensors file: {size} bytes, with a header that claims {length}"
            )
        header = _parse_json(file.read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        tensors[name], begin = _parse_entry(entry, name, path)
        spans.append((begin, begin + tensors[name].nbytes, name))
    position, available = 0, size - 8 - length
    for begin, end, name in sorted(spans):
        if begin != position:
            raise ValueError(f"{path} is corrupt: {name!r} is said to begin at byte {begin}, not {position}")
        position = end
    if position > available:
        raise ValueError(f"{path} is truncated: {available} bytes of tensors, its header promises {position}")
    if position < available:
        raise ValueError(f"{path} is corrupt: {available - position} bytes at its end belong to no tensor")
    return tensors


def _parse_entry(entry: Any, name: str, path: Path) -> tuple[TensorInfo, int]:
    """(TensorInfo, position of its first byte) of one entry of a header."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{path} is corrupt: its header has {_shorten(entry)} for {name!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path} holds {name!r} as {_shorten(dtype)}; known dtypes: {', '.join(DTYPES)}")
    info = TensorInfo(DTYPES[dtype], tuple(shape))
    if offsets[1] - offsets[0] != info.nbytes:
        raise ValueError(
            f"{path} is corrupt: {name!r} with shape {_shorten(shape)} takes {_shorten(info.nbytes)} bytes, "
            f"its header says {_shorten(offsets[1] - offsets[0])}"
        )
    return info, offsets[0]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _parse_json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # nesting thousands deep is no header either
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}; needs an object")
    return value


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
