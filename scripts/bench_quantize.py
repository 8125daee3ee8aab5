"""Seconds that quantizing one matrix takes; prints one table, with the targets of the 14336 x 4096 matrix.

    python scripts/bench_quantize.py [--shape 14336 4096] [--dtype bfloat16] [--device cpu] [--threads 1] [--runs 5]
        [--format int4:absmax --format nf4 ...] [--kernels avx512,avx2,torch]

Without --format: every format with its default algorithm, and what has a target. On a CPU by each of the kernels, in
turns: the native ones in use and those of torch, unless --kernels names others. The best of the runs counts; "cpu" is
processor time of all threads, which grows less than "wall" when other programs use the machine, and "M/s" are millions
of weights per second of it; the ceiling is reading the weight and writing the codes at the copy bandwidth measured in
the same run.
"""

import argparse
import time
from typing import NamedTuple

import torch

import hf_quant
from hf_quant.algorithms import default_algorithm, quantize_matrix
from hf_quant.formats import ALIASES, FORMATS
from hf_quant.kernels import native
from hf_quant.resolve import resolve_scheme
from hf_quant.scheme import TensorQuant


TARGETS = {("int4", "absmax"): 1500, ("int4", None): 250}  # of native kernels: M weights per second of a core
TARGET_SHAPE = (14336, 4096)


class Timing(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float


def measure(
    weight: torch.Tensor, quant: TensorQuant, algorithm: str, kernels: list[str], runs: int
) -> tuple[dict[str, Timing], int]:
    """(shortest of `runs` calls by each of the kernels, bytes of the result)."""
    timings, nbytes = {name: [] for name in kernels}, 0
    for _ in range(runs + 1):  # the first one warms up
        for name in kernels:
            with native.using(None if name == "torch" else name):
                wall, cpu = time.perf_counter(), time.process_time()
                packed = quantize_matrix(weight, quant, algorithm)
                if weight.is_cuda:
                    torch.cuda.synchronize()
                timings[name].append(Timing(time.perf_counter() - wall, time.process_time() - cpu))
            nbytes = sum(t.numel() * t.element_size() for t in packed if t is not None)
    return {name: Timing(*(min(values) for values in zip(*times[1:]))) for name, times in timings.items()}, nbytes


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
    parser.add_argument("--kernels", help="instruction sets and torch, by commas (default: the one in use, torch)")
    parser.add_argument("--format", action="append", metavar="FORMAT[:ALGORITHM]", help="may be given several times")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    specs = arguments.format or ["int8:absmax", "int4:absmax", *FORMATS]
    for spec in specs:
        if spec.partition(":")[0] not in FORMATS | ALIASES:
            parser.error(f"{spec!r}: formats are {', '.join([*FORMATS, *ALIASES])}")

    in_use = [native.active()] if native.active() and arguments.device == "cpu" else []
    kernels = arguments.kernels.split(",") if arguments.kernels else [*in_use, "torch"]
    for name in kernels:
        if name != "torch" and name not in native.instruction_sets():
            parser.error(f"{name!r}: kernels are {', '.join([*native.instruction_sets(), 'torch'])}")

    torch.manual_seed(0)
    weight = torch.randn(arguments.shape, device=arguments.device).mul_(0.02).to(dtype)
    bandwidth = copy_bandwidth(weight)
    where = torch.cuda.get_device_name() if weight.is_cuda else f"cpu, {arguments.threads} threads"
    print(
        f"hf_quant {hf_quant.__version__}, torch {torch.__version__}, {where}, copy {bandwidth / 1e9:.1f} GB/s; "
        f"{arguments.shape[0]} x {arguments.shape[1]} {arguments.dtype}, best of {arguments.runs}"
    )
    print(
        f"{'scheme':<18}{'algorithm':<11}{'kernels':<10}{'wall s':>8}{'cpu s':>8}{'M/s':>8}{'target':>8}{'GB/s':>8}"
        f"{'of ceiling':>12}"
    )
    for spec in specs:
        quant, given = parse(spec, dtype)
        algorithm = given or default_algorithm(quant)
        timings, nbytes = measure(weight, quant, algorithm, kernels, arguments.runs)
        moved = weight.numel() * weight.element_size() + nbytes
        for name, timing in timings.items():
            has_target = weight.shape == TARGET_SHAPE and name == native.active() and not weight.is_cuda
            target = TARGETS.get((quant.format, given)) if has_target else None
            print(
                f"{quant!s:<18}{algorithm:<11}{name:<10}{timing.wall:>8.3f}{timing.cpu:>8.3f}"
                f"{weight.numel() / timing.cpu / 1e6:>8.0f}{target or '':>8}{moved / timing.wall / 1e9:>8.1f}"
                f"{moved / bandwidth / timing.wall:>11.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
