"""A Hugging Face Hub on this machine: what pushing and pulling models needs of its HTTP API.

Written from the requests that huggingface_hub makes (https://huggingface.co/docs/hub/api). Large files go by LFS, in
one part or several, and come back through a redirect to another host name, as from the Hub's CDN; with `xet`, a
directory, they go by Xet through hf_xet's store on disk. Every request is logged, and can be made to fail once.
"""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from integration_tests.support.hub_records import (
    EMPTY_COMMIT,
    LFS_SUFFIXES,
    Content,
    Fault,
    InStore,
    Repository,
    Request,
    described,
    oid_of,
    size_of,
)
from integration_tests.support.hub_xet import hash_in_store


class Hub:
    """The server; use as a context manager.

    Attributes:
        repositories: {"user/name": Repository}.
        users: {token: user}.
        requests: everything that was asked.
        faults: what fails.
        part_sizes: {"user/name": bytes of a part}, where LFS uploads are in several.
        xet: directory of the Xet store; None: LFS.
        honours_ranges: whether a part of a file can be asked for.
        url: what HF_ENDPOINT must be.
    """

    def __init__(self, *, xet: Path | None = None) -> None:
        self.repositories: dict[str, Repository] = {}
        self.users = {"hf_test": "me", "hf_other": "other"}
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.parts: dict[tuple[str, str, int], bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.part_sizes: dict[str, int] = {}
        self.xet, self.honours_ranges = xet, True
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.cdn = f"http://localhost:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: dict[str, Content], *, private: bool = False) -> None:
        """A repository with these files."""
        self.repositories[name] = Repository(private=private)
        self.repositories[name].commit("main", "files", dict(files))

    def files(self, name: str, revision: str = "main") -> dict[str, Content]:
        """Files of a branch or commit by path."""
        repository = self.repositories[name]
        return repository.snapshots[repository.branches.get(revision, revision)]

    def asked(self, method: str, pattern: str) -> list[Request]:
        """The logged requests of a method whose path matches."""
        return [r for r in self.requests if r.method == method and re.search(pattern, r.path)]

    def environment(self, home: Path, token: str | None = "hf_test", **more: str) -> dict[str, str]:
        """Make the environment of a process that uses this server as the Hub: huggingface_hub reads it on import."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.lower().endswith("_proxy") and not key.startswith(("HF_", "HUGGING"))
        }
        return {
            **kept,
            **{"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"},
            **{"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1"},
            **({} if token is None else {"HF_TOKEN": token}),
            **({"HF_HUB_DISABLE_XET": "1"} if self.xet is None else {}),
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
            ),
            **more,
        }


class _Answer(Exception):
    """Ends a request early."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        self.status = status
        named = {"X_Error_Code": code, "X_Error_Message": message}
        self.headers = {**{key: value for key, value in named.items() if value}, **headers}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """Silent."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # a client that has read enough, or was killed
            self.close_connection = True

    def _serve(self) -> None:
        self.received = self.sent = self.status = 0
        self.route = unquote(urlsplit(self.path).path)
        self.fault = next((f for f in self.hub.faults if f.strikes(self.command, self.route)), None)
        self.user = None
        try:
            if self.fault is not None and self.fault.after is None:
                self.read()
                raise _Answer(self.fault.status, message="made to fail")
            if self.fault is not None and self.command in ("PUT", "POST"):
                self.received = len(self.rfile.read(self.fault.after))
                self.close_connection = True
                return
            self._answer()
        except _Answer as answer:
            self.read()
            self.reply(answer.status, {"error": answer.headers.get("X_Error_Message", "")}, **answer.headers)
        finally:
            entry = (self.command, self.route, self.user, self.headers.get("Range"))
            self.hub.requests.append(Request(*entry, self.received, self.sent, self.status))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def reply(self, status: int, body: Content | dict | list = b"", **headers: str) -> None:
        content = json.dumps(body).encode() if isinstance(body, dict | list) else body
        begin, end = 0, size_of(content)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if self.hub.honours_ranges and status == 200 and span is not None and "ETag" in headers:
            begin, end = int(span[1]), min(int(span[2] or end) + 1, end) if span[2] else end
            if begin >= size_of(content):
                return self.reply(416, Content_Range=f"bytes */{size_of(content)}")
            status, headers = 206, {**headers, "Content_Range": f"bytes {begin}-{end - 1}/{size_of(content)}"}
        self.status = status
        self.send_response(status)
        for name, value in {"Content_Length": str(end - begin), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(content, begin, end)

    def _send(self, content: Content, begin: int, end: int) -> None:
        if self.fault is not None and self.fault.after is not None:
            end, self.close_connection = min(end, begin + self.fault.after), True
        for start in range(begin, end, 1 << 16):
            chunk = content[start : min(start + (1 << 16), end)]
            self.wfile.write(chunk)
            self.sent += len(chunk)

    def read(self) -> bytes:
        """The rest of the body."""
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)) - self.received)
        self.received += len(data)
        return data

    def json(self) -> Any:
        return json.loads(self.read() or b"{}")

    def _answer(self) -> None:
        for method, pattern, handle in _ROUTES:
            match = re.fullmatch(pattern, self.route)
            if match is not None and self.command in method:
                return handle(self, **match.groupdict())
        raise _Answer(404)

    # Who may do what.

    def _authenticate(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise _Answer(401, message="Invalid credentials in Authorization header")
        self.user = self.hub.users.get(token)

    def _find(self, name: str, *, to_write: bool = False) -> Repository:
        """The Hub says of a private repository what it says of a missing one."""
        self._authenticate()
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self.user != name.partition("/")[0]):
            missing = 401 if self.user is None else 404
            message = "Invalid username or password." if self.user is None else "Repository not found"
            raise _Answer(missing, "RepoNotFound", message)
        if to_write:
            self._check_writes(name)
        return repository

    def _check_writes(self, name: str) -> None:
        self._authenticate()
        if self.user is None:
            raise _Answer(401, message="Invalid username or password.")
        if self.user != name.partition("/")[0]:
            raise _Answer(403, message=f"You don't have the rights to write to {name}")

    def _commit_of(self, repository: Repository, revision: str) -> str:
        sha = repository.branches.get(revision, revision)
        if sha not in repository.snapshots or (sha == EMPTY_COMMIT and revision not in repository.branches):
            raise _Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    # Repositories, branches, commits.

    def _create(self) -> None:
        fields = self.json()
        self._authenticate()
        name = "/".join(filter(None, (fields.get("organization") or self.user, fields["name"])))
        self._check_writes(name)
        answer = {"url": f"https://huggingface.co/{name}"}
        if name in self.hub.repositories:
            return self.reply(409, answer)
        private = fields.get("visibility") == "private" or bool(fields.get("private"))
        repository = self.hub.repositories[name] = Repository(private=private, fields=fields)
        repository.branches["main"] = EMPTY_COMMIT
        self.reply(200, answer)

    def _may_write(self, name: str) -> None:
        self._find(name, to_write=True)
        self.reply(200, {})

    def _create_branch(self, name: str, branch: str) -> None:
        repository, start = self._find(name, to_write=True), self.json().get("startingPoint") or "main"
        if branch in repository.branches:
            return self.reply(409, {"error": "Reference already exists"})
        repository.branches[branch] = self._commit_of(repository, start)
        self.reply(200, {})

    def _validate(self) -> None:
        self.read()
        self.reply(200, {"errors": [], "warnings": []})

    def _preupload(self, name: str, revision: str) -> None:
        repository = self._find(name, to_write=True)
        stored, answers = repository.snapshots[self._commit_of(repository, revision)], []
        for entry in self.json()["files"]:
            path = entry["path"]
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
            if path in stored:
                answers[-1]["oid"] = oid_of(path, stored[path])
        self.reply(200, {"files": answers})

    def _commit(self, name: str, revision: str) -> None:
        repository = self._find(name, to_write=True)
        self._commit_of(repository, revision)
        changes: dict[str, Content | None] = {}
        message = ""
        for entry in map(json.loads, self.read().splitlines()):
            key, value = entry["key"], entry["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                changes[value["path"]] = self._large(name, value["oid"], value.get("size"))
            elif key == "deletedFile":
                changes[value["path"]] = None
            elif key == "deletedFolder":
                folder = f"{value['path'].rstrip('/')}/"
                changes |= {p: None for p in self.hub.files(name, revision) if p.startswith(folder)}
        with self.hub.lock:
            sha = repository.commit(revision, message.splitlines()[0] if message else "", changes)
        self.reply(200, {"commitOid": sha, "commitUrl": f"https://huggingface.co/{name}/commit/{sha}"})

    def _large(self, name: str, oid: str, size: int | None) -> Content:
        if (name, oid) in self.hub.blobs:
            return self.hub.blobs[name, oid]
        found = None if self.hub.xet is None else hash_in_store(self.hub.xet, oid)
        if found is None:
            raise _Answer(400, message=f"LFS pointer pointed to a file that does not exist: {oid}")
        return InStore(oid, found.size if size is None else size, found.hash, self.hub.xet)

    # Large files: LFS and Xet.

    def _batch(self, name: str) -> None:
        self._find(name, to_write=True)
        objects = []
        for entry in self.json()["objects"]:
            oid, size = entry["oid"], entry["size"]
            objects.append({"oid": oid, "size": size})
            if (name, oid) in self.hub.blobs:
                continue
            href, part = f"{self.hub.url}/lfs/{name}/{oid}", self.hub.part_sizes.get(name)
            upload: dict[str, Any] = {"href": href}
            if part is not None and size > part:
                count = -(-size // part)
                upload["header"] = {"chunk_size": str(part), **{f"{i:05}": f"{href}/{i}" for i in range(1, count + 1)}}
            verify = {"href": f"{self.hub.url}/{name}.git/info/lfs/verify"}
            objects[-1]["actions"] = {"upload": upload, "verify": verify}
        multipart = any("header" in o.get("actions", {}).get("upload", {}) for o in objects)
        self.reply(200, {"transfer": "multipart" if multipart else "basic", "objects": objects})

    def _store(self, name: str, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            raise _Answer(400, message="the digest of the content is another one")
        self.hub.blobs[name, oid] = data

    def _put(self, name: str, oid: str, part: str | None = None) -> None:
        data = self.read()
        if "Authorization" in self.headers:
            raise _Answer(400, message="Only one auth mechanism allowed")  # what storage says to a token
        if part is None:
            self._store(name, oid, data)
        else:
            self.hub.parts[name, oid, int(part)] = data
        self.reply(200, ETag=f'"{hashlib.md5(data).hexdigest()}"')

    def _complete(self, name: str, oid: str) -> None:
        parts = self.json()["parts"]
        data = [self.hub.parts.pop((name, oid, part["partNumber"])) for part in parts]
        if [f'"{hashlib.md5(d).hexdigest()}"' for d in data] != [part["etag"] for part in parts]:
            raise _Answer(400, message="another ETag")
        self._store(name, oid, b"".join(data))
        self.reply(200, {})

    def _verify(self, name: str) -> None:
        self._find(name, to_write=True)
        value = self.json()
        if len(self.hub.blobs.get((name, value["oid"]), b"")) != value["size"]:
            raise _Answer(404)
        self.reply(200, {})

    def _xet_token(self, name: str, kind: str) -> None:
        if self.hub.xet is None:
            raise _Answer(404)
        self._find(name, to_write=kind == "write")
        url, expiry, token = f"local://{self.hub.xet}", 4_000_000_000, "xet"
        headers = {
            "X_Xet_Cas_Url": url,
            "X_Xet_Access_Token": token,
            "X_Xet_Token_Expiration": str(expiry),
        }
        self.reply(200, {"casUrl": url, "exp": expiry, "accessToken": token}, **headers)

    # Reading.

    def _info(self, name: str, revision: str | None = None) -> None:
        repository = self._find(name)
        sha = self._commit_of(repository, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(repository.snapshots[sha])]
        fields = {"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []}
        self.reply(200, fields)

    def _tree(self, name: str, revision: str, folder: str | None = None) -> None:
        repository = self._find(name)
        files = repository.snapshots[self._commit_of(repository, revision)]
        prefix = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(prefix)}
        if prefix and not inside:
            raise _Answer(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        recursive = "recursive=true" in self.path.lower()
        listed = [
            described(path, content)
            for path, content in sorted(inside.items())
            if recursive or "/" not in path[len(prefix) :]
        ]
        depth = prefix.count("/") + 1
        folders = {"/".join(p.split("/")[:n]) for p in inside for n in range(depth, p.count("/") + 1)}
        folders = {p for p in folders if recursive or p.count("/") == depth - 1}
        listed += [{"type": "directory", "path": p, "oid": EMPTY_COMMIT, "size": 0} for p in sorted(folders)]
        self.reply(200, listed)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._find(name)
        sha = self._commit_of(repository, revision)
        content = repository.snapshots[sha].get(path)
        if content is None:
            raise _Answer(404, "EntryNotFound", "Entry not found", X_Repo_Commit=sha)
        if not path.endswith(LFS_SUFFIXES):
            return self.reply(200, content, ETag=f'"{oid_of(path, content)}"', X_Repo_Commit=sha)
        oid = oid_of(path, content)
        headers = {"X_Repo_Commit": sha, "X_Linked_ETag": f'"{oid}"', "X_Linked_Size": str(size_of(content))}
        if isinstance(content, InStore):
            headers["X_Xet_Hash"] = content.hash
            headers["Link"] = f'<{self.hub.url}/api/models/{name}/xet-read-token/{sha}>; rel="xet-auth"'
        self.reply(302, Location=f"{self.hub.cdn}/cdn/{name}/{sha}/{path}", ETag=f'"{oid}"', **headers)

    def _cdn(self, name: str, revision: str, path: str) -> None:
        if "Authorization" in self.headers:
            raise _Answer(400, message="Only one auth mechanism allowed")
        content = self.hub.files(name, revision)[path]
        self.reply(200, content, ETag=f'"{oid_of(path, content)}"', Accept_Ranges="bytes")

    def _whoami(self) -> None:
        self._authenticate()
        if self.user is None:
            raise _Answer(401, message="Invalid username or password.")
        self.reply(200, {"name": self.user, "type": "user", "orgs": [], "auth": {"type": "access_token"}})


_NAME = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/models/{_NAME}"
_OID = rf"/lfs/{_NAME}/(?P<oid>[0-9a-f]{{64}})"
_ROUTES: list[tuple[tuple[str, ...], str, Callable]] = [
    (("POST",), "/api/repos/create", _Handler._create),
    (("POST",), "/api/validate-yaml", _Handler._validate),
    (("GET",), "/api/whoami-v2", _Handler._whoami),
    (("GET",), rf"{_API}/auth-check/write", _Handler._may_write),
    (("POST",), rf"{_API}/branch/(?P<branch>.+)", _Handler._create_branch),
    (("POST",), rf"{_API}/preupload/(?P<revision>.+)", _Handler._preupload),
    (("POST",), rf"{_API}/commit/(?P<revision>.+)", _Handler._commit),
    (("GET",), rf"{_API}/xet-(?P<kind>read|write)-token/.+", _Handler._xet_token),
    (("GET",), rf"{_API}(?:/revision/(?P<revision>[^/]+))?", _Handler._info),
    (("GET",), rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+?))?/?", _Handler._tree),
    (("POST",), rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    (("POST",), rf"/{_NAME}\.git/info/lfs/verify", _Handler._verify),
    (("PUT",), rf"{_OID}(?:/(?P<part>\d+))?", _Handler._put),
    (("POST",), _OID, _Handler._complete),
    (("GET", "HEAD"), rf"/cdn/{_NAME}/(?P<revision>[^/]+)/(?P<path>.+)", _Handler._cdn),
    (("GET", "HEAD"), rf"/{_NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler._resolve),
]


@contextmanager
def asked_by_this_process(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Point `inspect` and downloads of this process at a server: both read the endpoint at each call."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("hf_quant.checkpoint.folder.time.sleep", lambda seconds: None)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()
