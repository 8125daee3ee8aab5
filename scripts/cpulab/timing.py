"""Shared parts of the CPU benchmarks: candidates that take turns, the kernels in use, tables, the machine."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hf_quant.kernels import native
from hf_quant.machine import cpu


TORCH = "torch"  # the kernels that serve where no native ones are in use


class Turn(NamedTuple):
    """One timed candidate: `calls` calls that read `nbytes` each, by the native kernels, torch's, or any (None)."""

    run: Callable[[], None]
    calls: int
    nbytes: int
    kernels: str | None = None


def clock() -> Callable[[], float]:
    """CPU time of the thread if there is only one, else wall-clock time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def kernels_in_use() -> str:
    """The native instruction set, or `TORCH`."""
    return native.active() or TORCH


def select(wanted: str) -> None:
    """Compute by a native instruction set, or by torch's ops.

    `native.use` drops what was made ready for a weight by the kernels before. Here they never use that weight.
    """
    if wanted != kernels_in_use():
        with patch.object(native.extension, "clear_prepacked", lambda: None):
            native.use(None if wanted == TORCH else wanted)


def interleaved(turns: dict[Any, Turn], rounds: int) -> dict[Any, float]:
    """Seconds of each turn, the least of `rounds`; the candidates take turns, the first round does not count.

    Every second round has them in the opposite order: what runs before a candidate decides which caches it finds.
    """
    now, seconds = clock(), {key: [] for key in turns}
    for i in range(rounds + 1):
        for key, turn in reversed(turns.items()) if i % 2 else turns.items():
            if turn.kernels is not None:
                select(turn.kernels)
            start = now()
            turn.run()
            seconds[key].append(now() - start)
    return {key: min(values[1:]) for key, values in seconds.items()}


def print_table(header: list[str], rows: dict[str, list[str]]) -> None:
    """Names left, cells right-aligned."""
    width = max(len(name) for name in [*rows, header[0]])
    print(header[0].ljust(width), *(title.rjust(8) for title in header[1:]))
    for name, cells in rows.items():
        print(name.ljust(width), *(cell.rjust(8) for cell in cells))


def command() -> str:
    """Return the command line of this run."""
    return f"python {shlex.join(sys.argv)}"


def environment() -> str:
    """Describe the software and the machine, for readers who want to repeat the numbers."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    model, features = cpu()
    return (
        f"torch {torch.__version__} ({torch.version.git_version[:10]}), hf_quant at {commit or '?'}, "
        f"{model}, {os.cpu_count()} cores, {' '.join(features)}"
    )
