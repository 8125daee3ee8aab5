"""What the Triton kernels share: importing without triton, counters and lasting tensors on CUDA, tuned tables."""

import contextlib
import json
import os
import pwd
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from hf_quant import kernels
from hf_quant.kernels.gpu import counters
from hf_quant.kernels.gpu.counters import counters_of, lasting, tile_counters
from hf_quant.kernels.gpu.launch import (
    MAX_GRID_YZ,
    TARGETS,
    Target,
    config_table,
    launch,
    record_launches,
    reload_tables,
    tuned_path,
)


KERNELS = Path(kernels.__file__).parent
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib
from hf_quant.kernels.gpu import launch
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not launch.HAS_TRITON and launch.unavailable_reason("cuda") == "triton is not installed"
"""


def test_every_gpu_file_can_be_imported_without_triton():
    paths = (*KERNELS.rglob("gpu*.py"), *KERNELS.glob("gpu/*.py"))
    files = [path.relative_to(KERNELS).with_suffix("") for path in paths if path.name != "__init__.py"]
    assert len(files) >= 8
    names = [".".join(("hf_quant.kernels", *path.parts)) for path in files]
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON, *names], check=True)


def test_targets():
    gpus = {n: Target(n, 100, 101376) for n in ("sm70", "sm75", "sm80", "sm90", "sm120", "sm121", "gfx942", "xpu")}
    assert {n for n, t in gpus.items() if not t.has_dot} == {"sm70", "sm75"}
    assert {n for n, t in gpus.items() if t.table == "sm75"} == {"sm70", "sm75"}
    assert {n for n, t in TARGETS.items() if t.has_tma} == {"sm90", "sm100"}


# Counters.

CUDA = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch) -> types.SimpleNamespace:
    """What is asked of CUDA, where there is none: the stream in use, whether it captures, what happened."""
    state = types.SimpleNamespace(stream=1, capturing=False, current=0, captures_on=None, events=[])
    here = lambda: "caller" if threading.current_thread() is threading.main_thread() else "thread"  # noqa: E731

    class Stream:
        def __init__(self, device: torch.device) -> None:
            state.events.append(f"{here()} makes a stream")

        def synchronize(self) -> None:
            state.events.append("waits")

    @contextlib.contextmanager
    def inside(stream):
        state.events.append("enters it")
        yield
        state.events.append("leaves it")

    zeros = torch.zeros

    def fake_zeros(*args, device, **kwargs):
        state.events.append(f"{here()} makes zeros")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=state.stream))

    @contextlib.contextmanager
    def on(device):
        before, state.current = state.current, device.index
        yield
        state.current = before

    def is_capturing():
        return state.capturing and state.captures_on in (None, state.current)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: state.events.append(f"waits for {device}"))
    monkeypatch.setattr(torch, "zeros", fake_zeros)
    monkeypatch.setattr(counters, "_pools", {})
    return state


def _ranges_overlap(*tensors: torch.Tensor) -> bool:
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    return any(end > start for (_, end), (start, _) in zip(ends, ends[1:]))


def test_lasting_tensors_are_complete_and_in_nobodys_pool(cuda):
    made = lasting(lambda: torch.zeros(3, device=CUDA), CUDA)
    assert made.shape == (3,)
    expected = ["thread makes a stream", "enters it", "thread makes zeros", "leaves it", "waits"]
    assert cuda.events == expected
    cuda.events.clear()
    assert tile_counters(5, CUDA).numel() >= 5 and cuda.events == expected, "the pool lasts"
    assert tile_counters(5, CUDA).numel() >= 5 and cuda.events == expected, "and is made once"

    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        lasting(fail, CUDA)


def test_streams_and_captured_launches_share_no_counters(cuda):
    cuda.capturing = True
    tile_counters(5, CUDA)
    assert cuda.events == ["caller makes zeros"] and not counters._pools, "a graph's own memory"
    cuda.capturing = False
    first = tile_counters(5, CUDA)
    assert tile_counters(7, CUDA).data_ptr() == first.data_ptr()
    cuda.stream = 2
    found = [first, tile_counters(5, CUDA)]
    cuda.capturing = True
    found += [tile_counters(5, CUDA), tile_counters(5, CUDA)]
    assert not _ranges_overlap(*found) and [t.numel() for t in found] == [2**14, 2**14, 5, 5]
    assert not any(t.any() for t in found)


def test_threads_share_no_counters(cuda):
    class Slow(int):
        """A count whose sums give another thread the time to take the same."""

        def __radd__(self, other: int) -> int:
            time.sleep(0.02)
            return other + int(self)

    tile_counters(1, CUDA)
    cuda.capturing, found = True, []
    threads = [threading.Thread(target=lambda: found.append(tile_counters(Slow(8), CUDA))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and not _ranges_overlap(*found)


@pytest.mark.parametrize("capturing", [False, True])
def test_more_counters_than_a_slice_has(cuda, capturing):
    cuda.capturing = capturing
    found = tile_counters(2**14 + 1, CUDA)
    assert found.shape == (2**14 + 1,) and found.dtype == torch.int32 and not found.any()


def test_the_device_of_the_tensor_is_asked_whether_it_captures(cuda):
    second = torch.device("cuda", 1)
    tile_counters(5, second)
    cuda.capturing, cuda.captures_on = True, 1  # the current device is the first one
    found = [tile_counters(5, second), tile_counters(5, second)]
    assert not _ranges_overlap(*found) and [t.numel() for t in found] == [5, 5]
    assert cuda.current == 0
    cuda.captures_on = 0
    assert tile_counters(5, second).numel() == 2**14, "a capture on another device"


class Graph:
    """Something that can be collected."""


def test_counters_come_back_with_the_graph(cuda):
    tile_counters(5, CUDA)
    graph, other = Graph(), Graph()

    def capture(graph):
        with counters_of(graph, CUDA):
            cuda.capturing, cuda.stream = True, 7
            found = [tile_counters(9, CUDA), tile_counters(5, CUDA)]
            cuda.stream = 8
            found.append(tile_counters(5, CUDA))
            cuda.capturing, cuda.stream = False, 1
        return found

    first, again, forked = capture(graph)
    assert first.data_ptr() == again.data_ptr(), "launches on a stream follow each other"
    assert not _ranges_overlap(first, forked), "those on another do not"
    second = capture(other)[0]
    assert not _ranges_overlap(first, second), "graphs may be replayed side by side"
    del graph
    cuda.events.clear()
    third = Graph()
    assert capture(third)[0].data_ptr() == first.data_ptr() and cuda.events == ["waits for cuda:0"]
    taken = counters._pools[CUDA].taken
    for _ in range(100):
        capture(Graph())
    assert counters._pools[CUDA].taken <= taken + 2**14 + 100 * 5


def test_a_capture_without_a_pool_and_a_failed_one(cuda):
    graph = Graph()
    with counters_of(graph, CUDA):
        cuda.capturing = True
        assert tile_counters(5, CUDA).numel() == 5 and not counters._pools
    cuda.capturing = False
    tile_counters(5, CUDA)
    with pytest.raises(RuntimeError, match="stopped"):
        with counters_of(graph, CUDA):
            raise RuntimeError("stopped")
    cuda.capturing = True
    assert tile_counters(5, CUDA).numel() == 5, "no launch of another capture gets the slice"


# Grids.


@pytest.mark.parametrize("grid", [(2**31,), (1, MAX_GRID_YZ + 1), (1, 1, MAX_GRID_YZ + 1)], ids=str)
def test_grids_that_no_gpu_has_are_refused(grid):
    with record_launches() as recorded:
        launch(None, (2**31 - 1, MAX_GRID_YZ, MAX_GRID_YZ), torch.empty(1, device="meta"))
        with pytest.raises(ValueError, match="a launch of .* blocks; a GPU takes at most .*: give it fewer rows"):
            launch(None, grid, torch.empty(1, device="meta"))
    assert len(recorded) == 1


# Tuned tables.

SHIPPED = {"sm90": ((16, 32, 4), (2**30, 64, 8)), "sm80": ((16, 32, 4), (1024, 64, 8))}


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Writes {table: rows} for sm90 as the user's file and reads it."""
    monkeypatch.setenv("HF_QUANT_TUNED", str(tmp_path / "tuned.json"))

    def read(tables: object, target: str = "sm90"):
        (tmp_path / "tuned.json").write_text(json.dumps({target: tables}))
        reload_tables()
        return config_table("some", SHIPPED, TARGETS[target])

    yield read
    monkeypatch.undo()
    reload_tables()


def test_a_table_of_its_own_name_comes_first():
    own = {"sm89": ((1, 2),), "sm120": ((3, 4),)}
    assert config_table("own", own, TARGETS["sm120"]) == ((3, 4),)
    assert config_table("own", own, TARGETS["sm86"]) == ((1, 2),)
    reload_tables()


def test_tuned_tables_replace_shipped_ones(tuned):
    assert tuned({"some": [[8, 16, 4], [2**30, 64, 16]]}) == [(8, 16, 4), (2**30, 64, 16)]
    assert tuned({"other": [[8]]}) == SHIPPED["sm90"]
    assert tuned({"some": [[64, 16, 4]]}, "sm80") == [(64, 16, 4)], "larger sizes go elsewhere there"


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"some": [[8, 16], [2**30, 64, 16]]}, r"rows of 3 numbers, not \[8, 16\]"),
        ({"some": [[8, 16, 4], [2**30, 64, 16, 1]]}, "rows of 3 numbers"),
        ({"some": [[8, 16, 4], [64, 64, 16]]}, "has to serve all sizes"),
        ({"some": []}, "has to serve all sizes"),
        ({"some": [[8, 16, "4"]]}, "whole numbers"),
        ({"some": 3}, "not iterable"),
        (3, "values"),
    ],
    ids=str,
)
def test_damaged_tables_are_named(tuned, tables, why, tmp_path):
    with pytest.raises(ValueError, match=why) as caught:
        tuned(tables)
    assert str(tmp_path / "tuned.json") in str(caught.value) and "delete it or run" in str(caught.value)


@pytest.fixture
def no_home(monkeypatch):
    def unknown(uid: int):
        raise KeyError(uid)

    for name in ("HF_QUANT_TUNED", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    reload_tables()
    yield
    monkeypatch.undo()
    reload_tables()


def test_no_home_is_no_table(no_home, monkeypatch):
    assert config_table("some", SHIPPED, TARGETS["sm90"]) == SHIPPED["sm90"]
    with pytest.raises(ValueError, match="no home directory for tuned tables; set HF_QUANT_TUNED"):
        tuned_path()
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert tuned_path() == Path("/caches/hf_quant/tuned.json")


def test_a_home_that_may_not_be_read_is_no_table(no_home, monkeypatch):
    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setenv("HOME", "/locked")
    monkeypatch.setattr(os, "stat", denied)
    table = config_table("some", SHIPPED, TARGETS["sm90"])
    monkeypatch.undo()
    assert table == SHIPPED["sm90"]
