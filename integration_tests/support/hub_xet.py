"""hf_xet's store on disk: which files it holds, and their bytes.

Its metadata shards: a header of 48 bytes; for each file an entry of 48 bytes (hash, flags, number of segments), its
segments of 48 bytes, as many again if bit 31 of the flags is set, and 48 bytes that begin with the SHA-256 of the
file if bit 30 is; 32 bytes of 0xFF after the last. A hash is printed as four little-endian words.
"""

import functools
import struct
from pathlib import Path
from typing import NamedTuple


class Stored(NamedTuple):
    """A file in the store."""

    hash: str
    size: int


def hash_in_store(store: Path, oid: str) -> Stored | None:
    """The file with this SHA-256, None if the store has none."""
    for shard in sorted(store.rglob("*.mdb")):
        found = _files_of(shard.read_bytes()).get(oid)
        if found is not None:
            return found
    return None


def _files_of(data: bytes) -> dict[str, Stored]:
    """{SHA-256: file} of a metadata shard."""
    files, position = {}, 48
    while data[position : position + 32] != b"\xff" * 32:
        name = _printed(data[position : position + 32])
        flags, count = struct.unpack_from("<II", data, position + 32)
        position += 48
        # A segment: hash of its xorb, flags, bytes after unpacking, first and last chunk.
        size = sum(struct.unpack_from("<I", data, position + 48 * i + 36)[0] for i in range(count))
        position += 48 * count * (2 if flags >> 31 else 1)
        if flags >> 30 & 1:
            files[_printed(data[position : position + 32])] = Stored(name, size)
            position += 48
    return files


def _printed(hash: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", hash))


@functools.cache
def read_from_store(store: Path, hash: str, size: int) -> bytes:
    """The bytes of a file."""
    import hf_xet

    session = hf_xet.XetSession()
    group = session.new_download_stream_group(endpoint=f"local://{store}", token="", token_expiry_unix_secs=4 * 10**9)
    return b"".join(group.download_stream(hf_xet.XetFileInfo(hash, size)))
