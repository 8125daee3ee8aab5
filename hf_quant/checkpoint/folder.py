"""Folders: the files of a checkpoint in a directory or in a repository of the Hub, read from their beginning."""

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import HFValidationError, build_hf_headers, validate_repo_id

from hf_quant.checkpoint.untrusted import one_line, parse_json, shorten


MAX_CONFIG_BYTES = 20_000_000  # a plan of 100 000 names that do not fold has 5 MB
FIRST_BYTES = 1 << 16  # read at first: most configs and headers fit
MAX_REMOTE_BYTES = 200_000_000  # of all configs, index files and headers together; 70B models have 2 MB
_MAX_LISTING_BYTES = 20_000_000
_ATTEMPTS = 3
_MAX_SECONDS = 600  # for one response: a server may send byte by byte
_MAX_NAME = 1000  # characters of the path of a file, or of a revision
_COMMIT = re.compile(r"[0-9A-Za-z]{1,100}")
_CREDENTIALS = re.compile(r"Bearer [!-~]+")
_SPAN = re.compile(r"bytes 0-[0-9]{1,18}/([0-9]{1,18})")


class Folder:
    """The files of a checkpoint: a `Directory` on this machine, or a `HubRepository`."""

    name: str  # in error messages
    workers: int  # number of files that are read at the same time

    def files(self) -> list[str]:
        """Return the names of the files, and the paths of the configs of parts ("transformer/config.json")."""
        raise NotImplementedError

    def beginning(self, file: str, length: int) -> tuple[bytes, int]:
        """Return (the first `length` bytes of a file, its size). Raises ValueError if the file cannot be read."""
        raise NotImplementedError

    def part(self, name: str) -> "Folder":
        """Return a folder inside this one."""
        raise NotImplementedError

    def load_json(self, file: str, *, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
        """Return the JSON object in a file. Raises ValueError if there is none, or the file exceeds `limit` bytes."""
        data, size = self.beginning(file, FIRST_BYTES)
        if size > limit:
            raise ValueError(f"{self.name}/{file} has {size} bytes; at most {limit} can be right")
        if size > len(data):
            data, size = self.beginning(file, size)
        return parse_json(data, f"{self.name}/{file}")


class Directory(Folder):
    """A folder on this machine."""

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
        if not path.is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{path} is not a file")
        try:
            with path.open("rb") as opened:
                return opened.read(length), path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None

    def part(self, name: str) -> "Directory":
        return Directory(self.path / name)


class HubRepository(Folder):
    """A folder of the Hub, at one commit: a later push changes nothing.

    Raises ValueError if the repository or revision does not exist, or the token gives no access to it.
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
        found.__dict__.update(self.__dict__)  # shares the budget and its lock
        found._folder = f"{self._folder}/{name}" if self._folder else name
        found.name = f"{self.name}/{name}"
        return found

    def beginning(self, file: str, length: int) -> tuple[bytes, int]:
        path = quote(f"{self._folder}/{file}" if self._folder else file)
        url = f"{constants.ENDPOINT}/{self.repo_id}/resolve/{self._commit}/{path}"
        return self._get(url, length, f"{self.name}/{file}")

    def _get(self, url: str, length: int, what: str | None = None) -> tuple[bytes, int]:
        """Read the beginning of a file that errors call `what`, or (None) of a response of the Hub's API; retry."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._read(url, length, what)
            except (HTTPError, OSError, UnicodeError) as error:  # UnicodeError: a redirect to an invalid host name
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
            # A compressed body may expand to any size.
            if response.headers.get("Content-Encoding", "identity") != "identity":
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
        """Return the first `length` bytes of a response."""
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

    def _refusal(self, status: int, headers: Mapping[str, str], what: str | None) -> str:
        """Return the error message for a response without content."""
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
    """Return the headers of every request. Raises ValueError, which does not quote the token, if it cannot be sent."""
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
    """Open the folder at a path or in a repository of the Hub. Raises ValueError if `source` is neither."""
    path = local_path(source, revision)
    if path is not None:
        return Directory(path)
    repo_id = str(source)
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        shown = repo_id if repo_id.isprintable() and len(repo_id) <= 200 else shorten(repr(repo_id))
        raise ValueError(f"{shown} is not a directory, and not a name on the Hub either, which is USER/NAME") from None
    if constants.HF_HUB_OFFLINE:
        return _cached(repo_id, revision)
    return HubRepository(repo_id, revision=revision, token=token)


def local_path(source: Path | str, revision: str | None) -> Path | None:
    """Return the path of a source on this machine, or None if it may be the name of a repository.

    Raises ValueError if it is a file, or has a revision.
    """
    refuse_file(source)
    if not isinstance(source, Path) and not _exists(source):
        return None
    if revision is not None:
        raise ValueError(f"{source} is on this machine and has no revision {revision!r}: leave it out")
    return Path(source)


def _cached(repo_id: str, revision: str | None) -> Directory:
    """Return the downloaded snapshot of a repository. Raises ValueError if there is none."""
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
    """Raise ValueError if `source` is a file: a model is a directory, or a name on the Hub."""
    is_gguf = str(source).lower().endswith(".gguf")
    if not (is_gguf or _exists(source)) or (_exists(source) and not Path(source).is_file()):
        return
    hint = ""
    if is_gguf:
        hint = (
            ". hf-quant import makes a checkpoint of a GGUF file, and transformers unpacks one to 16 bits, "
            "from_pretrained(DIR, gguf_file=NAME, quantization_config=GgufConfig(dequantize=True))"
        )
    here = "is a file" if _exists(source) else "is no file here"
    raise ValueError(f"{source} {here}; a model is a directory, or USER/NAME on the Hub{hint}")


def gguf_hint(names: Iterable[str]) -> str:
    """Return what to do with a GGUF file among the names of a folder, for the end of an error; "" if it has none."""
    found = next((name for name in sorted(names) if name.lower().endswith(".gguf")), None)
    if found is None:
        return ""
    return f"; `hf-quant import` makes a checkpoint of a GGUF file, such as {shorten(found)} there"


def _exists(path: Path | str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False
