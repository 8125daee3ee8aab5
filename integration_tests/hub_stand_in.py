"""A Hugging Face Hub on this machine: what pushing and pulling models needs of its HTTP API, kept in memory.

Written from the requests that huggingface_hub makes (https://huggingface.co/docs/hub/api). Large files go by LFS; a
client needs HF_HUB_DISABLE_XET=1, and HF_ENDPOINT set before it imports huggingface_hub.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """The server; use as a context manager.

    Attributes:
        repositories: {"user/name": {path: content}}.
        created: {"user/name": the fields with which it was created}.
        url: what HF_ENDPOINT must be.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sha(self, repository: str) -> str:
        """The commit: a hash of all that is in the repository."""
        files = sorted(self.repositories[repository].items())
        return hashlib.sha1(repr([(name, hashlib.sha1(data).digest()) for name, data in files]).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Silent."""

    def reply(self, status: int, body: bytes | dict | list = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rpartition("/")[2]] = self.read()
        self.reply(200)

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.read()
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = "/".join(filter(None, (fields.get("organization"), fields["name"])))
            known = name in self.hub.repositories
            self.hub.repositories.setdefault(name, {})
            self.hub.created.setdefault(name, fields)
            return self.reply(409 if known else 200, {"url": f"https://huggingface.co/{name}"})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path.endswith("/objects/batch"):
            objects = [self._upload(entry) for entry in json.loads(body)["objects"]]
            return self.reply(200, {"transfer": "basic", "objects": objects})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/[^/]+", path)
        if match is None:
            return self.reply(404)
        if match[2] == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.reply(200, {"files": files})
        files = self.hub.repositories[match[1]]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        sha = self.hub.sha(match[1])
        return self.reply(200, {"commitOid": sha, "commitUrl": f"https://huggingface.co/{match[1]}/commit/{sha}"})

    def _upload(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"}}}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if match is not None:
            return self._resolve(match[1], match[2])
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+)?", path)
        files = None if match is None else self.hub.repositories.get(match[1])
        if files is None:
            return self.reply(404, X_Error_Code="RepoNotFound")
        if (match[2] or "").startswith("/tree"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self.reply(200, listed)
        siblings = [{"rfilename": name} for name in files]
        return self.reply(200, {"id": match[1], "sha": self.hub.sha(match[1]), "siblings": siblings, "tags": []})

    def _resolve(self, repository: str, name: str) -> None:
        files = self.hub.repositories.get(repository)
        if files is None:
            return self.reply(404, X_Error_Code="RepoNotFound")
        if name not in files:
            return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=self.hub.sha(repository))
        data = files[name]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        return self.reply(200, data, ETag=etag, X_Repo_Commit=self.hub.sha(repository))
