"""Where the files of a checkpoint are: in a directory, or in a repository of the Hub. Their beginnings are read."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import HFValidationError, build_hf_headers, validate_repo_id

from hf_quant.checkpoint.untrusted import one_line, parse_json, shorten


MAX_REMOTE_BYTES = 200_000_000  # in all, of configs, index files and headers; 70B models have 2 MB of them
_MAX_LISTING_BYTES = 20_000_000
_ATTEMPTS = 3
_MAX_SECONDS = 600  # for one answer: a server that sends byte by byte is not waited for
_MAX_NAME = 1000  # characters of a file's path, or a revision
_COMMIT = re.compile(r"[0-9A-Za-z]{1,100}")
_CREDENTIALS = re.compile(r"Bearer [!-~]+")
_SPAN = re.compile(r"bytes 0-[0-9]{1,18}/([0-9]{1,18})")


class Folder(Protocol):
    """The files of a checkpoint.

    Attributes:
        name: what errors call it.
        workers: how many files it is sensible to read at a time.
    """

    name: str
    workers: int

    def files(self) -> list[str]:
        """Names of its files, and paths of the configs of its parts ("transformer/config.json")."""

    def beginning(self, file: str, length: int) -> tuple[bytes, int]:
        """(the first `length` bytes of a file, or all; how many it has). Raises ValueError if it cannot be read."""

    def part(self, name: str) -> "Folder":
        """A folder in it."""


class Directory:
    """A `Folder` on this machine."""

    workers = 1

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def files(self) -> list[str]:
        if not self.path.is_dir():
            return []
        parts = (f"{path.parent.name}/{path.name}" for path in self.path.glob("*/config.json"))
        names = [path.name for path in self.path.iterdir() if path.is_file()]
        return sorted(name for name in (*names, *parts) if name.isprintable())

    def beginning(self, file: str, length: int) -> tuple[bytes, int]:
        path = self.path / file
        if not path.is_file():  # to open a pipe would wait for its writer
            raise ValueError(f"{path} is not a file")
        try:
            with path.open("rb") as opened:
                return opened.read(length), path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None

    def part(self, name: str) -> "Directory":
        return Directory(self.path / name)


class HubRepository:
    """A `Folder` of the Hub, at one commit: a push meanwhile changes nothing.

    Raises ValueError if there is no such repository or revision, or it is not shown to the token's owner.
    """

    workers = 8

    def __init__(self, repo_id: str, *, revision: str | None = None, token: str | bool | None = None) -> None:
        if revision is not None and (not 0 < len(revision) <= _MAX_NAME or not revision.isprintable()):
            raise ValueError(f"revision is {shorten(repr(revision))}; needs a branch, tag or commit of {repo_id}")
        self.repo_id, self.revision, self.name = repo_id, revision, repo_id
        self._headers = _headers(token)
        self._folder, self._left, self._lock = "", [MAX_REMOTE_BYTES], threading.Lock()
        route = f"/revision/{quote(revision, safe='')}" if revision is not None else ""
        self._commit, self._files = self._list(f"{constants.ENDPOINT}/api/models/{repo_id}{route}")

    def _list(self, url: str) -> tuple[str, list[str]]:
        data, size = self._get(url, _MAX_LISTING_BYTES)
        if size > len(data):
            raise ValueError(f"{self.name} has too many files to be a model: its list takes {size} bytes")
        fields = parse_json(data, f"what the Hub says of {self.name}")
        siblings = fields.get("siblings")
        names = [s.get("rfilename") for s in siblings if isinstance(s, dict)] if isinstance(siblings, list) else []
        commit = fields.get("sha")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise ValueError(f"{self.name} has no commit: push a model to it first")
        return commit, sorted(n for n in names if isinstance(n, str) and n.isprintable() and len(n) <= _MAX_NAME)

    def files(self) -> list[str]:
        prefix = f"{self._folder}/" if self._folder else ""
        inside = [name.removeprefix(prefix) for name in self._files if name.startswith(prefix)]
        return [name for name in inside if "/" not in name or (name.count("/") == 1 and name.endswith("/config.json"))]

    def part(self, name: str) -> "HubRepository":
        found = object.__new__(HubRepository)
        found.__dict__.update(self.__dict__)  # the budget and its lock are shared
        found._folder = f"{self._folder}/{name}" if self._folder else name
        found.name = f"{self.name}/{name}"
        return found

    def beginning(self, file: str, length: int) -> tuple[bytes, int]:
        path = quote(f"{self._folder}/{file}" if self._folder else file)
        url = f"{constants.ENDPOINT}/{self.repo_id}/resolve/{self._commit}/{path}"
        return self._get(url, length, f"{self.name}/{file}")

    def _get(self, url: str, length: int, what: str | None = None) -> tuple[bytes, int]:
        """`beginning` of a file that errors call `what`, or (None) of an answer of the Hub's API."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._read(url, length, what)
            except (HTTPError, OSError, UnicodeError) as error:  # the last: a redirect to a name that is no host's
                if attempt == _ATTEMPTS - 1:
                    reason = " ".join(one_line(error).split()) or type(error).__name__
                    raise ValueError(f"{what or self.name}: the Hub cannot be reached: {reason[:200]}") from None
                time.sleep(0.5 * 2**attempt)
        raise AssertionError

    def _read(self, url: str, length: int, what: str | None) -> tuple[bytes, int]:
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if what is not None:
            headers["Range"] = f"bytes=0-{length - 1}"
        options = {"headers": headers, "follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        with get_session().stream("GET", url, **options) as response:
            if response.status_code == 416:  # an empty file has no byte 0
                return b"", 0
            if response.status_code not in (200, 206):
                raise ValueError(self._refusal(response.status_code, response.headers, what))
            if response.headers.get("Content-Encoding", "identity") != "identity":  # it could stand for any size
                raise ValueError(f"{what or self.name}: the Hub answers in an encoding that was not asked for")
            total = response.headers.get("Content-Length", "")
            if response.status_code == 206:
                span = _SPAN.fullmatch(response.headers.get("Content-Range", ""))
                if span is None:
                    raise ValueError(f"{what or self.name}: the Hub answers with another part than was asked for")
                total = span[1]
            data = self._body(response.iter_raw(), length, what)
        return data, int(total) if total.isdecimal() else len(data)

    def _body(self, chunks: Iterator[bytes], length: int, what: str | None) -> bytes:
        """The first `length` bytes of an answer, or all."""
        data, end = bytearray(), time.monotonic() + _MAX_SECONDS
        for chunk in chunks:
            data += chunk
            with self._lock:
                self._left[0] -= len(chunk)
            if self._left[0] < 0:
                raise ValueError(f"{self.name} has more than {MAX_REMOTE_BYTES} bytes of configs and headers")
            if len(data) >= length:
                break
            if time.monotonic() > end:
                raise ValueError(f"{what or self.name}: the Hub has not answered in full after {_MAX_SECONDS} seconds")
        return bytes(data[:length])

    def _refusal(self, status: int, headers: dict[str, str], what: str | None) -> str:
        """One line for what the Hub does not give."""
        code, message = headers.get("X-Error-Code"), headers.get("X-Error-Message", "")
        if code == "RevisionNotFound":
            return f"{self.repo_id} has no revision {self.revision!r}; give a branch, tag or commit of it"
        if code == "EntryNotFound":
            return f"{what} does not exist"
        if code == "GatedRepo":
            return f"{self.repo_id} is gated: accept its conditions on the Hub, and log in with `hf auth login`"
        if "Invalid credentials" in message:
            return f"{self.repo_id}: the Hub does not know the token: log in again with `hf auth login`"
        if code == "RepoNotFound" or status in (401, 404):
            return (
                f"{self.repo_id} is not a directory, and the Hub has no such model, or it is private: log in with "
                "`hf auth login`, or set HF_TOKEN"
            )
        more = f": {message[:200]}" if message.isprintable() and message else ""
        return f"{what or self.name}: the Hub answers with status {status}{more}"


def _headers(token: str | bool | None) -> dict[str, str]:
    """Of every request. Raises ValueError, which does not repeat the token, on one that cannot be sent."""
    try:
        headers = build_hf_headers(token=token, library_name="hf_quant")
    except LocalTokenNotFoundError:
        raise ValueError("token is True, but there is none: log in with `hf auth login`, or set HF_TOKEN") from None
    if "authorization" in headers and not _CREDENTIALS.fullmatch(headers["authorization"]):
        raise ValueError("the token has characters that no token of the Hub has: log in again with `hf auth login`")
    return headers


def open_folder(
    source: Path | str, *, revision: str | None = None, token: str | bool | None = None
) -> Directory | HubRepository:
    """The folder that a path, or the name of a repository, stands for. Raises ValueError if it is neither."""
    path = local_path(source, revision)
    if path is not None:
        return Directory(path)
    try:
        validate_repo_id(source)
    except HFValidationError:
        shown = source if source.isprintable() and len(source) <= 200 else shorten(repr(source))
        raise ValueError(f"{shown} is not a directory, and not a name on the Hub either, which is USER/NAME") from None
    if constants.HF_HUB_OFFLINE:
        return _cached(source, revision)
    return HubRepository(source, revision=revision, token=token)


def local_path(source: Path | str, revision: str | None) -> Path | None:
    """The path of a source on this machine, None if it may be a name.

    Raises ValueError if it is a file, or has a revision.
    """
    refuse_file(source)
    if not isinstance(source, Path) and not _exists(source):
        return None
    if revision is not None:
        raise ValueError(f"{source} is on this machine and has no revision {revision!r}: leave it out")
    return Path(source)


def _cached(repo_id: str, revision: str | None) -> Directory:
    """What was downloaded of a repository. Raises ValueError if nothing was."""
    try:
        found = Directory(Path(snapshot_download(repo_id, revision=revision, local_files_only=True)))
    except OSError:  # LocalEntryNotFoundError among them
        of = "" if revision is None else f"revision {revision!r} of "
        raise ValueError(
            f"{repo_id} is not a directory, and HF_HUB_OFFLINE is set: {of}it is not in the cache, unset it to ask "
            "the Hub"
        ) from None
    found.name = repo_id
    return found


def refuse_file(source: Path | str) -> None:
    """Raise ValueError for a file in the place of a model, which is a directory or a name on the Hub."""
    is_gguf = str(source).lower().endswith(".gguf")
    if not (is_gguf or _exists(source)) or (_exists(source) and not Path(source).is_file()):
        return
    hint = ""
    if is_gguf:
        hint = (
            ". transformers unpacks a GGUF file, from_pretrained(DIR, gguf_file=NAME, "
            "quantization_config=GgufConfig(dequantize=True)), and save_pretrained makes a 16-bit model of it"
        )
    here = "is a file" if _exists(source) else "is no file here"
    raise ValueError(f"{source} {here}; a model is a directory, or USER/NAME on the Hub{hint}")


def _exists(path: Path | str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # longer than a path may be, or with a zero byte
        return False
