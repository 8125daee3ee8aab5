"""One process at a time writes a directory, whatever becomes of that process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_quant.checkpoint import workspace


HOLD = """
import sys
from pathlib import Path
from hf_quant.checkpoint.staging import workspace
with workspace(Path(sys.argv[1])) as place:
    (place / "half").mkdir()
    (place / "half" / "model.safetensors").write_text("half")
    print(place, flush=True)
    sys.stdin.read()
"""


def holder(out: Path) -> subprocess.Popen:
    """A process that writes `out` until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == str(out.parent / f".{out.name}.writing")
    return process


def test_another_process_is_refused_and_then_served(tmp_path):
    out = tmp_path / "out"
    process = holder(out)
    for same in (out, tmp_path / "missing" / ".." / "out"):
        with pytest.raises(ValueError, match=r"out is being written by another process: wait for it"), workspace(same):
            pass
    with workspace(tmp_path / "other"):
        pass
    process.communicate("", timeout=60)
    assert process.returncode == 0
    with workspace(out) as place:
        assert [path.name for path in place.iterdir()] == ["lock"]
    assert list(tmp_path.iterdir()) == []


def test_the_next_one_removes_what_a_killed_process_left(tmp_path):
    process = holder(tmp_path / "out")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert (tmp_path / ".out.writing" / "half" / "model.safetensors").is_file()
    with workspace(tmp_path / "out") as place:
        assert [path.name for path in place.iterdir()] == ["lock"]
        (place / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_an_error_removes_everything_and_frees_the_place(tmp_path):
    with pytest.raises(KeyError), workspace(tmp_path / "out"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with workspace(tmp_path / "out"):
        pass


def test_of_many_threads_one_at_a_time_is_inside(tmp_path):
    inside, most, refused = [], [], []

    def enter() -> None:
        for _ in range(200):
            try:
                with workspace(tmp_path / "out") as place:
                    inside.append(place)
                    most.append(len(inside))
                    assert (place / "lock").is_file()
                    inside.pop()
            except ValueError:
                refused.append(1)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) + len(refused) == 800 and max(most) == 1 and refused
    assert list(tmp_path.iterdir()) == []
