"""The timer of CUDA graphs with torch.cuda replaced, and what else a run says of its machine."""

import itertools
import os
import weakref

import pytest
import torch

from gpulab import timing as gpu_timing
from gpulab.timing import GraphTimer, num_copies


CPU = torch.device("cpu")


class FakeCuda:
    """Stand-in for torch.cuda in GraphTimer: a replay takes a time that the test sets, and capture runs the calls.

    As the allocator has it, a pool can be shared while a graph of it lives, and not after a capture that broke.
    """

    def __init__(self, seconds_per_call: float) -> None:
        self.now, self.seconds, self.captures = 0.0, seconds_per_call, []
        self.users, self.recording, self.handles = {}, {}, itertools.count()

    def patch(self, monkeypatch) -> None:
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class Graph:
            def capture_begin(self, pool):
                assert fake.users.get(pool, 1) > 0, "use_count > 0"
                assert pool not in fake.recording, "already recording to mempool_id"
                assert all(graph() is not None for graph in fake.recording.values()), "its filter is still called"
                fake.users[pool] = fake.users.get(pool, 0) + 1
                fake.recording[pool] = weakref.ref(self)
                fake.current, self.pool, self.count, self.is_valid = self, pool, 0, True
                weakref.finalize(self, fake.release, pool)

            def capture_end(self):
                fake.current = None
                if not self.is_valid:
                    raise RuntimeError("operation failed due to a previous error during capture")
                fake.captures.append(self.count)
                del fake.recording[self.pool]

            def replay(self):
                fake.now += self.count * fake.seconds

        class Stream:
            def __init__(self, device=None):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def wait_stream(self, other):
                pass

        self.current = None
        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "stream": lambda stream: stream,
            "current_stream": Stream,
            "synchronize": lambda device=None: None,
            "graph_pool_handle": lambda: next(self.handles),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "zeros", lambda *_, device: self.call())  # what keeps a pool

    def release(self, pool: int) -> None:
        self.users[pool] -= 1

    def call(self) -> None:
        if self.current is not None:
            self.current.count += 1

    def wait(self) -> None:
        """An operation that no capture allows."""
        if self.current is not None:
            self.current.is_valid = False
            raise ValueError("a stream that is captured cannot be waited for")


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    fake = FakeCuda(10e-6)
    fake.patch(monkeypatch)
    return fake


def test_graph_timer_repeats_until_a_replay_is_long_enough_and_serves_again(fake):
    timer = GraphTimer(torch.device("cuda", 0))
    seconds = timer({"ours": [fake.call] * 4, "bf16": [fake.call] * 100}, rounds=3)
    assert seconds == {"ours": pytest.approx(10e-6), "bf16": pytest.approx(10e-6)}
    assert fake.captures == [1, 4, 32, 100], "40 us are too short, 1 ms is not"
    for _ in range(2):
        assert timer({"ours": [fake.call] * 4}, rounds=1) == {"ours": pytest.approx(10e-6)}
    assert len(fake.users) == 1


def test_graph_timer_survives_a_call_that_breaks_its_capture(fake):
    timer = GraphTimer(torch.device("cuda", 0))
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be waited for"):
            timer({"ours": [fake.call] * 4, "rival": [fake.call, fake.wait]}, rounds=1)
        assert timer({"ours": [fake.call] * 4}, rounds=1) == {"ours": pytest.approx(10e-6)}
    assert len(fake.users) == 3
    with pytest.raises(ZeroDivisionError):  # one that breaks nothing of CUDA's
        timer({"ours": [lambda: 1 / (fake.current is None)]}, rounds=1)
    assert timer({"ours": [fake.call] * 4}, rounds=1) and len(fake.users) == 3


def test_copies_exceed_the_cache(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 60 << 20})
    monkeypatch.setattr(gpu_timing.torch.cuda, "get_device_properties", lambda device: properties)
    cuda = torch.device("cuda", 0)
    assert num_copies(8 << 20, cuda) == 30 and num_copies(1 << 30, cuda) == 4 and num_copies(1, cuda) == 32
    assert num_copies(1, CPU) == 4


def test_environment_names_what_matters():
    found = gpu_timing.environment(CPU)
    assert {"torch", "triton", "transformers", "commit", "device"} <= set(found) and "dry run" in found["device"]
    assert "torch: " in gpu_timing.environment_line(CPU)
    assert os.environ["TRITON_INTERPRET"] == "1", "importing the scripts changed nothing"
