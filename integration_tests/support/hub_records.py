"""Records of the tests' Hub: repositories, files, requests; and the faults that it is asked for."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from integration_tests.support.hub_xet import read_from_store


LFS_SUFFIXES = (".safetensors", ".bin", ".model")
EMPTY_COMMIT = "0" * 40


class Sparse(NamedTuple):
    """A file whose bytes after its beginning are zeros, made as they are read."""

    beginning: bytes
    size: int

    def __getitem__(self, span: slice) -> bytes:
        data = self.beginning[span]
        return data + bytes(min(span.stop, self.size) - span.start - len(data))


class InStore(NamedTuple):
    """A file in hf_xet's store."""

    oid: str
    size: int
    hash: str
    store: Path

    def __getitem__(self, span: slice) -> bytes:
        return read_from_store(self.store, self.hash, self.size)[span]


Content = bytes | Sparse | InStore


def size_of(content: Content) -> int:
    """Bytes of a file."""
    return len(content) if isinstance(content, bytes) else content.size


@dataclass
class Repository:
    """A repository: its files by branch, and by commit as they were.

    Attributes:
        fields: with which it was created.
        commits: [(branch, first line of the message)].
    """

    private: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Content]] = field(default_factory=lambda: {EMPTY_COMMIT: {}})
    commits: list[tuple[str, str]] = field(default_factory=list)

    def commit(self, branch: str, message: str, changes: dict[str, Content | None]) -> str:
        """Files by path, None deletes; returns the commit's name, which is another one each time."""
        files = {**self.snapshots[self.branches.get(branch, EMPTY_COMMIT)], **changes}
        sha = hashlib.sha1(f"{id(self)} {len(self.snapshots)} {branch}".encode()).hexdigest()
        self.snapshots[sha] = {path: content for path, content in files.items() if content is not None}
        self.branches[branch] = sha
        self.commits.append((branch, message))
        return sha


class Request(NamedTuple):
    """A request, with the number of bytes that the server read of its body and sent of the answer's."""

    method: str
    path: str
    user: str | None
    range: str | None
    received: int
    sent: int
    status: int


@dataclass
class Fault:
    """Makes the next requests of a method whose path matches fail, `times` times, after letting `skip` pass.

    Attributes:
        after: bytes of the body after which the connection is closed; None: answer with `status` instead.
    """

    method: str
    path: str
    after: int | None = None
    status: int = 403
    skip: int = 0
    times: int = 1

    def strikes(self, method: str, path: str) -> bool:
        """Return True if this fault makes the request fail."""
        if method != self.method or self.times == 0 or not re.search(self.path, path):
            return False
        self.skip -= 1
        if self.skip >= 0:
            return False
        self.times -= 1
        return True


def oid_of(path: str, content: Content) -> str:
    """SHA-256 of large files, git's of the others."""
    if isinstance(content, InStore):
        return content.oid
    if isinstance(content, Sparse):  # its zeros are not read for it
        return hashlib.sha256(b"%d %b" % (content.size, content.beginning)).hexdigest()
    if path.endswith(LFS_SUFFIXES):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


def described(path: str, content: Content) -> dict[str, Any]:
    """An entry of the list of files."""
    entry = {"type": "file", "path": path, "size": size_of(content), "oid": oid_of(path, content)}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": entry["oid"], "size": entry["size"], "pointerSize": 130}
    if isinstance(content, InStore):
        entry["xetHash"] = content.hash
    return entry
