"""Measure the CPU paths: quantized products against bf16 `F.linear`, in one run.

    python scripts/bench_cpu.py linear                       # forward, the figures of the README
    python scripts/bench_cpu.py linear --direction backward
    python scripts/bench_cpu.py overhead                     # cost of a call on a 64 x 64 layer

Every number is the ratio to bf16 `F.linear` (for the gradient: to the bf16 product) on the same shape in the same run:
above 1 is faster. Candidates take turns, weights rotate through `--copies` random copies so that none stays in the
cache, and the lower quartile of the rounds counts. With one thread, CPU time of that thread is measured, which leaves
out being preempted; with more, wall-clock time.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_quant import kernels
from hf_quant.algorithms import PackedWeight, quantize_matrix
from hf_quant.scheme import TensorQuant


class Candidate(NamedTuple):
    """A way to quantize a linear layer: the weight, and the format of its activations or None."""

    name: str
    weight: TensorQuant
    activation: str | None = None

    def group_size(self, K: int) -> int:
        return self.weight.group_size or (128 if self.weight.granularity == "block" else K)


def _group(format: str, size: int, symmetric: bool = True, scale_dtype: str = "bfloat16") -> TensorQuant:
    return TensorQuant(format, "group", size, symmetric, scale_dtype)


def _row(format: str, scale_dtype: str = "float32") -> TensorQuant:
    return TensorQuant(format, "row", scale_dtype=scale_dtype)


CANDIDATES = (
    Candidate("int8", _row("int8", "bfloat16")),
    Candidate("int8 g128", _group("int8", 128)),
    Candidate("int4 g128", _group("int4", 128)),
    Candidate("int4 g128 asym", _group("int4", 128, False)),
    Candidate("int4 g32", _group("int4", 32)),
    Candidate("int3 g128 asym", _group("int3", 128, False)),
    Candidate("int2 g64 asym", _group("int2", 64, False)),
    Candidate("fp8_e4m3", _row("fp8_e4m3")),
    Candidate("fp8_e4m3 tensor", TensorQuant("fp8_e4m3", "tensor")),
    Candidate("fp8_e4m3 block", TensorQuant("fp8_e4m3", "block")),
    Candidate("fp8_e5m2", _row("fp8_e5m2")),
    Candidate("fp6_e3m2", _row("fp6_e3m2")),
    Candidate("fp6_e2m3", _row("fp6_e2m3")),
    Candidate("nf4 g64", _group("nf4", 64)),
    Candidate("mxfp4", _group("mxfp4", 32, scale_dtype="float8_e8m0fnu")),
    Candidate("nvfp4", _group("nvfp4", 16, scale_dtype="float8_e4m3fn")),
    Candidate("W8A8 int8", _row("int8"), "int8"),
    Candidate("W8A8 fp8", _row("fp8_e4m3"), "fp8_e4m3"),
    Candidate("W8A8 fp8 block", TensorQuant("fp8_e4m3", "block"), "fp8_e4m3"),
    Candidate("W4A8 int8", _group("int4", 128), "int8"),
    Candidate("W4A8 fp8", _group("int4", 128), "fp8_e4m3"),
)


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


def interleaved(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Seconds of each call(round), lower quartile; the candidates take turns."""
    now, seconds = clock(), {name: [] for name in calls}
    for i in range(rounds + 2):  # the first two rounds let caches be built
        for name, call in calls.items():
            start = now()
            call(i)
            seconds[name].append(now() - start)
    return {name: sorted(values[2:])[rounds // 4] for name, values in seconds.items()}


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
                rows["bf16 (ms)"].append(f"{base * 1e3:.2f}")
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
    calls: dict[str, Callable[[int], object]] = {
        "bf16": (lambda i: F.linear(x, plain[i % len(plain)])) if forward else lambda i: x @ plain[i % len(plain)]
    }
    for candidate in chosen:
        call = (forward_call if forward else backward_call)(candidate, K)
        weights = copies[candidate.name]
        for packed in weights:  # twice: what is prepacked is made at the second use
            call(x, packed)
            call(x, packed)
        calls[candidate.name] = lambda i, call=call, weights=weights: call(x, weights[i % len(weights)])
    return interleaved(calls, max(args.rounds // (1 + M // 64), 3))


def bench_overhead(args: argparse.Namespace) -> None:
    """Microseconds of one forward of a 64 x 64 layer with one row, in eager mode without autograd."""
    import hf_quant

    torch.set_num_threads(1)
    for K in (64, 128):
        linear = torch.nn.Linear(64, K, bias=False, dtype=torch.bfloat16)
        x = torch.randn(1, 64, dtype=torch.bfloat16)
        calls = {"nn.Linear": linear}
        for name in ("int8", "int4", "nf4", "fp8", "W8A8"):
            layer = torch.nn.Sequential(torch.nn.Linear(64, K, bias=False, dtype=torch.bfloat16))
            hf_quant.quantize_(layer, hf_quant.QuantizerConfig(name, modules={"0": name}))
            calls[name] = layer[0]
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        with torch.no_grad():
            for _ in range(args.rounds + 2):
                for name, call in calls.items():
                    start = time.thread_time()
                    for _ in range(500):
                        call(x)
                    seconds[name].append((time.thread_time() - start) / 500)
        best = {name: min(values[2:]) for name, values in seconds.items()}
        base = best["nn.Linear"]
        print(f"\n64 -> {K}, M = 1, bf16, no_grad")
        print_table(["", "us", "x nn.Linear"], {n: [f"{v * 1e6:.1f}", f"{v / base:.2f}"] for n, v in best.items()})


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
    linear.add_argument("--rounds", type=int, default=12, help="per M; fewer for M >= 64, at least 3")
    linear.add_argument("--only", nargs="+", help="candidates whose name contains one of these")
    linear.add_argument("--direction", choices=("forward", "backward"), default="forward")
    linear.set_defaults(run=bench_linear)

    overhead = commands.add_parser("overhead", help="cost of a call on a tiny layer")
    overhead.add_argument("--rounds", type=int, default=10)
    overhead.set_defaults(run=bench_overhead)

    args = parser.parse_args()
    print(environment())
    args.run(args)


if __name__ == "__main__":
    main()
