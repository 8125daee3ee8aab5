"""A server that answers as no Hub would: `inspect` ends in one line, soon, and the token stays where it is."""

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants

from hf_quant import quantize_
from hf_quant.cards import find_card
from hf_quant.checkpoint import inspect_checkpoint, inspect_parts
from integration_tests.support.hub_server import asked_by_this_process
from integration_tests.support.tiny_models import build


TOKEN = "hf_secret"
COMMIT = "a" * 40


class Server(ThreadingHTTPServer):
    """Answers by `answers`, {end of a path: function of the handler}.

    `asked` holds what was asked of the repository; huggingface_hub has requests of its own, some once a day.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], Any]] = {}
        self.asked: list[tuple[str, str | None]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: clients that have seen enough close the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if not self.path.startswith("/api/") or "me/model" in self.path:
            self.server.asked.append((self.path, self.headers.get("Authorization")))
        answer = next((f for end, f in self.server.answers.items() if self.path.endswith(end)), None)
        send(self, 404) if answer is None else answer(self)

    do_HEAD = do_GET


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def part_of(body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """A file as an honest server gives it."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        data = body[: int(handler.headers["Range"].partition("-")[2]) + 1]
        send(handler, 206, data, Content_Range=f"bytes 0-{len(data) - 1}/{len(body)}")

    return answer


def listing(*files: str, sha: str = COMMIT) -> Callable[[BaseHTTPRequestHandler], None]:
    body = json.dumps({"sha": sha, "siblings": [{"rfilename": file} for file in files]}).encode()
    return lambda handler: send(handler, 200, body)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("good")
    quantize_(build("llama"), "int4").save_pretrained(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def server(files, monkeypatch) -> Iterator[Server]:
    """A server with the repository me/model, which this process takes for the Hub."""
    with Server() as server, asked_by_this_process(f"http://127.0.0.1:{server.server_port}", monkeypatch):
        names = ("config.json", "model.safetensors")
        server.answers = {"/api/models/me/model": listing(*names), **{name: part_of(files[name]) for name in names}}
        yield server
        server.shutdown()


def refusal(function: Callable[..., Any] = inspect_checkpoint, **options: Any) -> str:
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        function("me/model", **{"token": TOKEN, **options})
    assert time.perf_counter() - start < 20
    message = str(caught.value)
    assert type(caught.value) is ValueError and message.isprintable() and len(message) < 600
    assert "secret" not in message
    return message


def test_the_honest_one_is_read(server):
    assert inspect_checkpoint("me/model", token=TOKEN).num_files == 1
    assert len(server.asked) > 2 and {token for _, token in server.asked} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    "span", ["", "bytes 5-10/11", "bytes 0-9/*", "x", "bytes 0-1/-5", f"bytes 0-1/{'9' * 5000}", "bytes=0-1/2"]
)
def test_another_part_than_was_asked_for(span, server, files):
    server.answers["config.json"] = lambda handler: send(handler, 206, files["config.json"], Content_Range=span)
    assert "me/model/config.json: the Hub answers with another part than was asked for" in refusal()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("size", [0, 3, 10**15])
def test_sizes_that_are_not_true(file, size, server, files):
    span = {"Content_Range": f"bytes 0-1/{size}"}
    server.answers[file] = lambda handler: send(handler, 206, files[file][:20], **span)
    refusal()


@pytest.mark.parametrize("end", ["/api/models/me/model", "config.json", "model.safetensors"])
def test_what_is_packed_is_not_unpacked(end, server):
    bomb = gzip.compress(bytes(50_000_000))
    server.answers[end] = lambda handler: send(handler, 200, bomb, Content_Encoding="gzip")
    assert "the Hub answers in an encoding that was not asked for" in refusal()


@pytest.mark.parametrize("end", ["/api/models/me/model", "config.json", "model.safetensors"])
def test_answers_without_an_end(end, server):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    server.answers[end] = answer
    refusal()


def test_answers_byte_by_byte(server, monkeypatch):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(1000):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            wait.wait(0.05)

    wait = threading.Event()
    monkeypatch.setattr("hf_quant.checkpoint.folder._MAX_SECONDS", 0.5)
    server.answers["config.json"] = answer
    assert "me/model/config.json: the Hub has not answered in full after 0.5 seconds" in refusal()


@pytest.mark.parametrize(
    "location",
    ["/config.json", "file:///etc/passwd", "http://[::1", f"http://{'a' * 300}/", "http://x" * 9000, "javascript:1"],
)
def test_redirects_to_nowhere(location, server):
    server.answers["config.json"] = lambda handler: send(handler, 302, Location=location)
    assert "me/model/config.json: the Hub cannot be reached: " in refusal()


def test_the_token_goes_to_no_other_host(server, files):
    with Server() as other:
        other.answers["/x"] = part_of(files["model.safetensors"])
        for host in ("127.0.0.1", "localhost"):  # another port, and another name
            location = f"http://{host}:{other.server_port}/x"
            server.answers["model.safetensors"] = lambda handler, to=location: send(handler, 302, Location=to)
            assert inspect_checkpoint("me/model", token=TOKEN).num_files == 1
        assert other.asked == [("/x", None)] * 2
        other.shutdown()


@pytest.mark.parametrize("token", ["hf_secret\n", "hf_secret\r\nX: y", "hf_secr\u00e9t_secret", "hf_secret\0", ""])
def test_a_token_that_cannot_be_sent_is_not_repeated(token, server):
    assert "the token has characters that no token of the Hub has" in refusal(token=token)
    assert not server.asked


@pytest.mark.parametrize("sha", ["a" * 70_000, "\u0660" * 40, "a/../b", "", None, 5])
def test_commits_that_are_none(sha, server):
    server.answers["/api/models/me/model"] = listing("config.json", "model.safetensors", sha=sha)
    assert "me/model has no commit" in refusal()


def test_names_of_files_that_no_address_can_hold(server):
    server.answers["/api/models/me/model"] = listing("model_index.json", f"{'a' * 70_000}/config.json")
    assert "me/model is a pipeline without a component" in refusal(inspect_parts)
    refusal(revision="a" * 70_000)


def test_a_card_of_absurd_size_is_not_fetched(server):
    headers = {"Content_Length": str(10**12), "ETag": '"x"', "X_Repo_Commit": COMMIT}
    server.answers["README.md"] = lambda handler: send(handler, 200, **headers)
    assert find_card("me/model", token=TOKEN) is None
    assert [path.rpartition("/")[2] for path, _ in server.asked] == ["README.md"]


@pytest.mark.parametrize("token", [TOKEN, "hf_secret\n"])
def test_cards_that_cannot_be_had_are_none(token, server, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    server.answers["README.md"] = lambda handler: send(handler, 302, Location=f"http://{'a' * 300}/")
    assert find_card("me/model", token=token) is None
    assert bool(server.asked) == (token == TOKEN)
