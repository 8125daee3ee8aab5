"""Times calls on a GPU: CUDA graphs, rotated weights, variants in turns; and the machine's ceilings in the same run.

Each variant of a product is a list of calls, one for each copy of its weight. A graph replays all of them, often
enough to last some 300 us, so that launches of the host are not in the time, and no weight is still in the L2 cache
when its turn comes again. The variants take turns; the median counts.
"""

import importlib.metadata
import importlib.util
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch

from common.checkout import commit
from hf_quant.kernels.gpu.counters import counters_of


Calls = Sequence[Callable[[], object]]
GRAPH_SECONDS = 300e-6  # of one replay
CACHE_FACTOR = 4  # all copies of a weight together are this many times the L2 cache


class Timer(Protocol):
    """Measures variants in turns."""

    device: torch.device

    def __call__(self, variants: dict[str, Calls], *, rounds: int = 9) -> dict[str, float]:
        """{variant: median seconds of one call}."""


class GraphTimer:
    """`Timer` of a CUDA or ROCm device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.broken: list[torch.cuda.CUDAGraph] = []
        self._take_pool()

    def _take_pool(self) -> None:
        """Memory for all graphs: they never run side by side.

        A pool whose last graph has died cannot be captured into again, so one that does next to nothing stays.
        """
        self.pool = torch.cuda.graph_pool_handle()
        calls = [lambda: torch.zeros(1, device=self.device)]
        self._warm_up(calls)
        self.keeper = self._graph(calls, 1)

    def __call__(self, variants: dict[str, Calls], *, rounds: int = 9) -> dict[str, float]:
        replays, counts = {}, {}
        for name, calls in variants.items():
            replays[name], counts[name] = self._capture(calls)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, graph in replays.items():
                times[name].append(self._replay(graph) / counts[name])
        return {name: statistics.median(values) for name, values in times.items()}

    def _replay(self, graph: torch.cuda.CUDAGraph) -> float:
        """Seconds of a replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the device is busy while the host enqueues what is timed
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def _capture(self, calls: Calls) -> tuple[torch.cuda.CUDAGraph, int]:
        """(graph that lasts GRAPH_SECONDS, calls in it); compiles and warms up first."""
        self._warm_up(calls)
        graph = self._graph(calls, 1)
        repeats = math.ceil(GRAPH_SECONDS / max(self._replay(graph), 1e-6))
        if repeats > 1:
            graph = self._graph(calls, repeats)
        return graph, repeats * len(calls)

    def _warm_up(self, calls: Calls) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
        torch.cuda.synchronize(self.device)

    def _graph(self, calls: Calls, repeats: int) -> torch.cuda.CUDAGraph:
        # Not `with torch.cuda.graph(...)`: that empties the allocator's cache, each time.
        if self.pool is None:
            self._take_pool()
        graph = torch.cuda.CUDAGraph()
        with counters_of(graph, self.device), torch.cuda.stream(self.stream), ExitStack() as failed:
            failed.callback(self._abandon, graph)
            graph.capture_begin(pool=self.pool)
            for _ in range(repeats):
                for call in calls:
                    call()
            graph.capture_end()
            failed.pop_all()
        torch.cuda.synchronize(self.device)
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture in which a call has failed, whose error is on its way."""
        try:
            graph.capture_end()
        except RuntimeError:  # after CUDA's own errors; the allocator goes on recording to the pool, by this graph
            self.broken.append(graph)
            self.pool = self.keeper = None


class HostTimer:
    """`Timer` of the CPU, for dry runs: the numbers mean nothing for a GPU."""

    device = torch.device("cpu")

    def __call__(self, variants: dict[str, Calls], *, rounds: int = 9) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(min(rounds, 2)):
            for name, calls in variants.items():
                start = time.perf_counter()
                for call in calls:
                    call()
                times[name].append((time.perf_counter() - start) / len(calls))
        return {name: statistics.median(values) for name, values in times.items()}


class Ceilings(NamedTuple):
    """Ceilings measured in the same run: copy in GB/s, read and written; bf16 product in TFLOP/s, random data."""

    copy: float
    gemm: float


def measure_ceilings(timer: Timer, *, copy_bytes: int = 2**31, size: int = 8192) -> Ceilings:
    """A device-to-device copy of `copy_bytes` and a [size, size] x [size, size] bf16 product."""
    source = torch.empty(copy_bytes // 2, dtype=torch.bfloat16, device=timer.device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=timer.device) for _ in range(2))
    out = torch.empty_like(a)
    # A kernel: in a graph `copy_` is a copy of the driver, which took 1.5 times as long on an H200.
    copy, gemm = [lambda: torch.neg(source, out=target)], [lambda: torch.mm(a, b.t(), out=out)]
    seconds = timer({"copy": copy, "gemm": gemm})
    return Ceilings(2 * copy_bytes / seconds["copy"] / 1e9, 2 * size**3 / seconds["gemm"] / 1e12)


def num_copies(nbytes: int, device: torch.device) -> int:
    """Number of copies of a weight to rotate, 4 to 32, so that none of them stays in the L2 cache."""
    if device.type != "cuda":
        return 4
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(4, min(32, math.ceil(CACHE_FACTOR * cache / max(nbytes, 1))))


def gpu() -> torch.device | None:
    """The GPU that is measured, None if there is none that CUDA graphs work on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def installed(package: str) -> bool:
    """Return True if a package, perhaps inside another, can be imported."""
    parts = package.split(".")
    return all(importlib.util.find_spec(".".join(parts[: i + 1])) is not None for i in range(len(parts)))


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the software and the device, for readers who want to repeat the numbers."""
    versions = {name: version_of(name) for name in ("torch", "triton", "transformers", "numpy")}
    versions |= {
        name: version_of(name) for name in ("torchao", "gemlite", "bitsandbytes", "diffusers") if installed(name)
    }
    found: dict[str, Any] = {"commit": commit(), "python": platform.python_version(), **versions}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    else:
        found["device"] = "cpu (dry run: no number means anything)"
    return found


def version_of(package: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment_line(device: torch.device) -> str:
    """`environment` for people."""
    return json.dumps(environment(device))[1:-1].replace('"', "")
