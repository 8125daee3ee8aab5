"""Measure the CPU paths: quantized products against bf16 `F.linear`, in one run.

    python scripts/bench_cpu.py linear                       # forward, the figures of the README
    python scripts/bench_cpu.py linear --direction backward

Every number is the ratio to bf16 `F.linear` (for the gradient: to the bf16 product) on the same shape in the same run:
above 1 is faster. Candidates take turns; a turn is one call for each of `--copies` random weights, as the layers of a
model follow each other, and no weight stays in the cache; the least of the turns counts, which other processes disturb
least. With one thread, CPU time of that thread is measured, which leaves out being preempted; with more, wall-clock
time. The first use of a weight, which may prepack it, is not timed.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases import CANDIDATES, Candidate
from torch import Tensor

from hf_quant import kernels
from hf_quant.algorithms import PackedWeight, quantize_matrix


def weight_copies(candidate: Candidate, weight: Tensor, copies: int) -> list[PackedWeight]:
    """`copies` different packed weights: rows of one quantized weight, rolled."""
    packed = quantize_matrix(weight, candidate.weight, "absmax")
    if candidate.weight.granularity in ("tensor", "block"):
        shifts = [128 * i for i in range(copies)]
    else:
        shifts = [7 * i for i in range(copies)]
    rolled = []
    for shift in shifts:
        parts = []
        for tensor in packed:
            if tensor is None or tensor.dim() < 2 or tensor.shape[0] == 1:
                parts.append(tensor)
            else:
                rows = shift // 128 if tensor.shape[0] < weight.shape[0] else shift
                bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                parts.append(torch.roll(bits, rows, 0).view(tensor.dtype))
        rolled.append(PackedWeight(*parts))
    return rolled


def forward_call(candidate: Candidate, K: int) -> Callable[[Tensor, PackedWeight], Tensor]:
    """x, weight -> product, through the registered op."""
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(K)}
    if candidate.activation is None:
        return lambda x, packed: kernels.weight_only_mm(x, *packed, None, **options)
    return lambda x, packed: kernels.dynamic_mm(x, *packed, None, activation=candidate.activation, **options)


def backward_call(candidate: Candidate, K: int) -> Callable[[Tensor, PackedWeight], Tensor]:
    """grad, weight -> gradient of the input, through the registered op."""
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(K), "K": K}
    return lambda grad, packed: kernels.weight_only_mm_backward(grad, *packed, **options)


def clock() -> Callable[[], float]:
    """CPU time of the thread if there is only one, else wall-clock time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def interleaved(turns: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each turn, the least of `rounds`; the candidates take turns, the first round does not count."""
    now, seconds = clock(), {name: [] for name in turns}
    for _ in range(rounds + 1):
        for name, turn in turns.items():
            start = now()
            turn()
            seconds[name].append(now() - start)
    return {name: min(values[1:]) for name, values in seconds.items()}


def bench_linear(args: argparse.Namespace) -> None:
    """Ratio of every candidate to bf16 `F.linear` for all shapes, M and thread counts."""
    chosen = [c for c in CANDIDATES if not args.only or any(word in c.name for word in args.only)]
    for shape in args.shapes:
        N, K = (int(size) for size in shape.split("x"))
        torch.manual_seed(0)
        plain = [torch.randn(N, K, dtype=torch.bfloat16).mul_(0.02) for _ in range(args.copies)]
        copies = {c.name: weight_copies(c, plain[0], args.copies) for c in chosen}
        for threads in args.threads:
            torch.set_num_threads(threads)
            print(f"\n{shape} (N x K), {threads} thread(s), {args.direction}; load {os.getloadavg()[0]:.1f}")
            rows: dict[str, list[str]] = {c.name: [] for c in chosen}
            rows["bf16 (ms)"] = []
            for M in args.m:
                seconds = _one_size(args, chosen, copies, plain, M, N, K)
                base = seconds.pop("bf16")
                rows["bf16 (ms)"].append(f"{base / args.copies * 1e3:.2f}")
                for name, value in seconds.items():
                    rows[name].append(f"{base / value:.2f}")
            print_table(["M =", *map(str, args.m)], rows)
            print(f"prepacked weights: {kernels.prepacked_bytes() / 2**20:.0f} MB")


def _one_size(
    args: argparse.Namespace,
    chosen: list[Candidate],
    copies: dict[str, list[PackedWeight]],
    plain: list[Tensor],
    M: int,
    N: int,
    K: int,
) -> dict[str, float]:
    """Seconds of bf16 and of each candidate for one M."""
    forward = args.direction == "forward"
    x = torch.randn(M, K if forward else N, dtype=torch.bfloat16)
    turns: dict[str, Callable[[], None]] = {
        "bf16": _turn((lambda w: F.linear(x, w)) if forward else (lambda w: x @ w), plain)
    }
    for candidate in chosen:
        call = (forward_call if forward else backward_call)(candidate, K)
        turns[candidate.name] = _turn(lambda packed, call=call: call(x, packed), copies[candidate.name])
    return interleaved(turns, max(args.rounds // (1 + M // 64), 2))


def _turn(call: Callable[[Any], Tensor], weights: list[Any]) -> Callable[[], None]:
    def turn() -> None:
        for weight in weights:
            call(weight)

    return turn


def print_table(header: list[str], rows: dict[str, list[str]]) -> None:
    """Names left, cells right-aligned."""
    width = max(len(name) for name in [*rows, header[0]])
    print(header[0].ljust(width), *(title.rjust(8) for title in header[1:]))
    for name, cells in rows.items():
        print(name.ljust(width), *(cell.rjust(8) for cell in cells))


def environment() -> str:
    """What a reader needs to know to repeat the numbers."""
    with open("/proc/cpuinfo") as file:
        lines = file.read().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    features = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"torch {torch.__version__} ({torch.version.git_version[:10]}), hf_quant at {commit.stdout.strip() or '?'}, "
        f"{model}, {os.cpu_count()} cores, {' '.join(features)}"
    )


def main() -> None:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    linear = commands.add_parser("linear", help="products at many M against bf16 F.linear")
    linear.add_argument("--shapes", nargs="+", default=["14336x4096"], metavar="NxK")
    linear.add_argument("--m", nargs="+", type=int, default=[1, 2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024])
    linear.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    linear.add_argument("--copies", type=int, default=4, help="different weights to rotate through")
    linear.add_argument("--rounds", type=int, default=8, help="turns per M; fewer for M >= 64, at least 2")
    linear.add_argument("--only", nargs="+", help="candidates whose name contains one of these")
    linear.add_argument("--direction", choices=("forward", "backward"), default="forward")
    linear.set_defaults(run=bench_linear)

    args = parser.parse_args()
    print(environment())
    args.run(args)


if __name__ == "__main__":
    main()
