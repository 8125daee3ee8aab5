"""`hf-quant quantize --push`: what is wrong is said before the work, and what was there before is not mixed in."""

import json
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard, constants

from hf_quant.cli import main
from integration_tests.support.hub_records import Fault
from integration_tests.support.hub_server import Hub
from integration_tests.support.tiny_models import build
from integration_tests.test_model_cards import BASE_CARD, USER_CARD, card_of, files_of


# Runs the commands of each line, [directory, {variable: value}, [arguments]]; prints [(exit status, stdout, stderr)].
SERVANT = """
import contextlib, io, json, os, sys
from hf_quant.cli import main

for line in sys.stdin:
    directory, environment, commands = json.loads(line)
    os.chdir(directory)
    os.environ.update(environment)
    found = []
    for arguments in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        found.append((status, out.getvalue(), err.getvalue()))
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with a small model as me/base; each test pushes to repositories of its own."""
    directory = tmp_path_factory.mktemp("base")
    build("llama").save_pretrained(directory)
    with Hub() as server:
        server.add("me/base", {**files_of(directory), "README.md": BASE_CARD.encode()})
        yield server


@pytest.fixture(scope="module")
def run(hub, tmp_path_factory):
    """A function that runs commands, all in one process: to start one takes longer than most commands."""
    options = {"env": hub.environment(tmp_path_factory.mktemp("home")), "text": True}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVANT], **options, **pipes) as process:

        def run(directory, *commands, token="hf_test"):
            request = [str(directory), {"HF_TOKEN": token}, [command.split() for command in commands]]
            print(json.dumps(request), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


def old_repository(hub, name):
    """A repository that holds weights of somebody else."""
    hub.add(name, {"config.json": b"{}", "pytorch_model.bin": b"0", "README.md": b"# Mine\n"})


def test_weights_that_were_there_before_are_not_mixed_in(hub, run, tmp_path):
    old_repository(hub, "me/old")
    pushes = (
        "quantize me/base one --weights int8 --push me/x",
        "quantize me/base two --weights int4 --max-shard-size 20KB --push me/x",
        "quantize me/base three --weights int2 --push named --private",
        "quantize me/base four --weights int2 --push me/old",
        "quantize me/base five --weights int2 --push me/old --force",
    )
    used = ("inspect me/x", "bench me/x --rounds 1 --new-tokens 2 --device cpu")
    results = run(tmp_path, *pushes, *used, "plan me/nothing")
    assert [status for status, _, _ in results] == [0, 0, 0, 2, 0, 0, 0, 2]
    assert "me/nothing is not a directory, and the Hub" in results[-1][2] and results[-1][2].count("\n") == 1
    assert {name for name in hub.files("me/x") if "safetensors" in name} == {
        path.name for path in (tmp_path / "two").glob("*.safetensors*")
    }
    assert "model.safetensors" not in hub.files("me/x") and len(hub.repositories["me/x"].commits) == 2
    assert hub.repositories["me/named"].private and "uploaded to" in results[2][1]
    assert hub.files("me/named") == {path.name: path.read_bytes() for path in (tmp_path / "three").iterdir()}
    assert b'from_pretrained("me/named"' in hub.files("me/named")["README.md"]
    assert "holds weights that hf_quant has not quantized (pytorch_model.bin)" in results[3][2]
    assert not (tmp_path / "four").exists()
    old = hub.files("me/old")
    assert "model.safetensors" in old and b"# Mine" in old["README.md"]


def test_a_directory_with_the_name_of_the_repository_is_not_taken_for_it(hub, run, tmp_path):
    old_repository(hub, "me/old-2")
    theirs = {"README.md": b"# Mine\n", "adapters/lora.safetensors": b"0"}
    hub.add("me/theirs", theirs)
    first = "quantize me/base me/theirs --weights int4 --push me/theirs"
    results = run(tmp_path, first, f"{first} --force", "quantize me/base me/old-2 --weights int4")
    assert [status for status, _, _ in results] == [2, 0, 0]
    assert (
        b"# Mine" in hub.files("me/theirs")["README.md"]
        and b"# Mine" in (tmp_path / "me/theirs/README.md").read_bytes()
    )
    assert hub.files("me/theirs")["adapters/lora.safetensors"] == b"0"
    ((status, _, error),) = run(tmp_path, "quantize me/base out --weights int4 --push me/old-2")
    assert status == 2 and "me/old-2 holds weights that hf_quant has not quantized" in error


def test_a_card_that_somebody_has_written_into_out_is_uploaded(hub, run, tmp_path):
    command = "quantize me/base out --weights int4 --push me/carded"
    assert run(tmp_path, command)[0][0] == 0
    card = (tmp_path / "out/README.md").read_text()
    (tmp_path / "out/README.md").write_text(card.replace("not evaluated", "I like it"))
    assert run(tmp_path, f"{command} --force")[0][0] == 0
    assert (
        b"I like it" in hub.files("me/carded")["README.md"] and "I like it" in (tmp_path / "out/README.md").read_text()
    )


def test_cards_of_the_repository_and_of_the_base(hub, run, tmp_path):
    broken = b"---\na: [\n---\n# Broken\n"
    hub.add("me/own", {"README.md": USER_CARD.encode()})
    hub.add("me/broken", {"README.md": broken})
    commands = (f"quantize me/base {name} --weights int4 --push me/{name}" for name in ("new", "own", "broken"))
    assert [status for status, _, _ in run(tmp_path, *commands)] == [0, 0, 0]
    new, own = card_of(hub, "me/new"), card_of(hub, "me/own")
    assert (new.data.base_model, new.data.license_name) == (["me/base"], "tiny-license")
    assert "hf-quant quantize me/base OUT --weights int4" in new.text
    assert own.text == ModelCard(USER_CARD).text
    assert (own.data.license, own.data.base_model) == ("mit", ["me/base"])
    assert hub.files("me/broken")["README.md"] == broken
    assert all("model.safetensors" in hub.files(f"me/{name}") for name in ("new", "own", "broken"))


def test_what_is_wrong_is_said_before_the_work(hub, run, tmp_path, monkeypatch, capsys):
    old_repository(hub, "me/old-3")
    hub.add("other/theirs", {"README.md": b"# Theirs\n"})
    pushes = ("other/x", "other/theirs", "a/b/c", "me/old-3 --private")
    results = run(tmp_path, *(f"quantize me/base out --push {push}" for push in pushes))
    expected = (
        "--push other/x: the Hub answers with status 403: You don't have the rights to write to other/x",
        "--push other/theirs: the Hub answers with status 403: You don't have the rights to write to other/theirs",
        "--push is 'a/b/c'; needs the name of a repository of the Hub, USER/NAME",
        "--private, but me/old-3 is there already and public",
    )
    (nobody,) = run(tmp_path, "quantize me/base out --push me/nobody", token="")
    build("llama").save_pretrained(tmp_path / "base")
    capsys.readouterr()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # in this process
    offline = main(["quantize", f"{tmp_path}/base", f"{tmp_path}/out", "--push", "me/nobody"]), *capsys.readouterr()
    expected += ("--push me/nobody: log in with `hf auth login`, or set HF_TOKEN", "HF_HUB_OFFLINE is set; unset it")
    for (status, _, error), part in zip([*results, nobody, offline], expected, strict=True):
        assert status == 2 and error.count("\n") == 1 and part in error
    assert not (tmp_path / "out").exists() and "me/nobody" not in hub.repositories


def test_an_upload_that_fails_leaves_a_complete_directory(hub, run, tmp_path):
    hub.faults.append(Fault("POST", r"/commit/", status=403))
    ((status, _, error),) = run(tmp_path, "quantize me/base out --push me/failed")
    assert status == 2 and error.count("\n") == 1
    assert "out is complete, but was not uploaded: the Hub answers with status 403: made to fail" in error
    assert "`hf upload me/failed out` tries it again" in error
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in (tmp_path / "out").iterdir()}
