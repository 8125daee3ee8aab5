"""Seconds that quantizing one matrix takes; prints one table, with the targets of the 4096 x 14336 matrix.

    python scripts/bench_quantize.py [--shape 4096 14336] [--dtype bfloat16] [--device cpu] [--threads 2] [--runs 5]
        [--format int4:absmax --format nf4 ...]

Without --format: every format with its default algorithm, and what has a target. The best of the runs counts; "cpu"
is processor time of all threads, which does not grow when other programs use the machine; the ceiling is reading the
weight and writing the codes at the copy bandwidth measured in the same run.
"""

import argparse
import time
from typing import NamedTuple

import torch

import hf_quant
from hf_quant.algorithms import default_algorithm, quantize_matrix
from hf_quant.config import resolve_scheme
from hf_quant.formats import ALIASES, FORMATS
from hf_quant.scheme import TensorQuant


TARGETS = {("int8", "absmax"): 0.1, ("int4", "absmax"): 0.35, ("int4", None): 1.5}  # seconds, 4096 x 14336 on 2 cores
TARGET_SHAPE = (4096, 14336)


class Timing(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float


def measure(weight: torch.Tensor, quant: TensorQuant, algorithm: str, runs: int) -> tuple[Timing, int]:
    """(shortest of `runs` calls, bytes of the result)."""
    timings, nbytes = [], 0
    for _ in range(runs + 1):  # the first one warms up
        wall, cpu = time.perf_counter(), time.process_time()
        packed = quantize_matrix(weight, quant, algorithm)
        if weight.is_cuda:
            torch.cuda.synchronize()
        timings.append(Timing(time.perf_counter() - wall, time.process_time() - cpu))
        nbytes = sum(t.numel() * t.element_size() for t in packed if t is not None)
    return Timing(*(min(values) for values in zip(*timings[1:]))), nbytes


def copy_bandwidth(weight: torch.Tensor) -> float:
    """Bytes per second, read and written."""
    target, best = torch.empty_like(weight), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(weight)
        if weight.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * weight.numel() * weight.element_size() / best


def parse(spec: str, dtype: torch.dtype) -> tuple[TensorQuant, str | None]:
    """ "int4:absmax" or "int4" -> (scheme with the format's defaults, algorithm or None)."""
    name, _, algorithm = spec.partition(":")
    scheme, algorithm = resolve_scheme({"weights": name, "algorithm": algorithm or None}, dtype)
    return scheme.weight, algorithm


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", type=int, nargs=2, default=TARGET_SHAPE, metavar=("N", "K"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--format", action="append", metavar="FORMAT[:ALGORITHM]", help="may be given several times")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    specs = arguments.format or ["int8:absmax", "int4:absmax", *FORMATS]
    for spec in specs:
        if spec.partition(":")[0] not in FORMATS | ALIASES:
            parser.error(f"{spec!r}: formats are {', '.join([*FORMATS, *ALIASES])}")

    torch.manual_seed(0)
    weight = torch.randn(arguments.shape, device=arguments.device).mul_(0.02).to(dtype)
    bandwidth = copy_bandwidth(weight)
    where = torch.cuda.get_device_name() if weight.is_cuda else f"cpu, {arguments.threads} threads"
    print(
        f"hf_quant {hf_quant.__version__}, torch {torch.__version__}, {where}, copy {bandwidth / 1e9:.1f} GB/s; "
        f"{arguments.shape[0]} x {arguments.shape[1]} {arguments.dtype}, best of {arguments.runs}"
    )
    print(f"{'scheme':<18}{'algorithm':<11}{'wall s':>8}{'cpu s':>8}{'target':>8}{'GB/s':>8}{'of ceiling':>12}")
    for spec in specs:
        quant, given = parse(spec, dtype)
        algorithm = given or default_algorithm(quant)
        timing, nbytes = measure(weight, quant, algorithm, arguments.runs)
        moved = weight.numel() * weight.element_size() + nbytes
        target = TARGETS.get((quant.format, given)) if tuple(arguments.shape) == TARGET_SHAPE else None
        print(
            f"{quant!s:<18}{algorithm:<11}{timing.wall:>8.3f}{timing.cpu:>8.3f}"
            f"{'' if target is None else f'{target:.2f}':>8}{moved / timing.wall / 1e9:>8.1f}"
            f"{moved / bandwidth / timing.wall:>11.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
