"""Times one op on a GPU against bf16 and against what else is installed, in one process.

    python scripts/bench_kernels.py                                      # int4, int8 and fp8 weights, Llama-3.1-8B
    python scripts/bench_kernels.py dynamic_mm --m 1 4096 --vs torch,torchao
    python scripts/bench_kernels.py weight_only_mm --shape 8192,8192 --format "int4 g128" --m 1 16 64 --json out.json
    python scripts/bench_kernels.py --model --target sm90                # modelled from compiled code, without a GPU

Medians of CUDA graphs over at least 4 copies of each weight, so that nothing stays in the cache, random data, variants
in turns; a copy and a bf16 product in the same run give the ceilings. "of floor" is the least time that bytes and
operations allow at these ceilings, over the time taken. Exit status 2: there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gpulab.cache_cases import CACHE_GROUPS, CACHED, Cached, cached_case
from gpulab.cases import (
    ATTENTION,
    CANDIDATES,
    EXPERTS,
    FLUX,
    LLAMA,
    MEMORY,
    Case,
    Linear,
    attention_case,
    candidate,
    grouped_case,
    linear_case,
    memory_case,
    scaled_case,
)
from gpulab.measures import (
    Record,
    measure_attention,
    measure_cached,
    measure_grouped,
    measure_linear,
    measure_memory,
    measure_scaled,
    table,
)
from gpulab.timing import Ceilings, GraphTimer, Timer, environment, environment_line, gpu, measure_ceilings
from hf_quant.planning import format_table


FORMATS = {  # of each op; DEFAULTS, or all, if the command line names none
    "weight_only_mm": tuple(c.name for c in CANDIDATES if c.activation is None),
    "dynamic_mm": tuple(c.name for c in CANDIDATES if c.activation is not None),
    "grouped_mm": tuple(c.name for c in CANDIDATES),
    "int8_scaled_mm": ("int8",),
    "fp8_scaled_mm": ("fp8_e4m3",),
    "rowwise": tuple(MEMORY),
    "int8_attention": ("16-bit values", "fp8_e4m3"),
    "kv_attention": tuple(CACHE_GROUPS),
}
DEFAULTS = {
    "weight_only_mm": ("int4 g128", "int8", "fp8_e4m3"),
    "dynamic_mm": ("W8A8 int8", "W8A8 fp8"),
    "grouped_mm": ("int4 g128", "int8", "W8A8 fp8"),
}
HAVE_RIVALS = ("weight_only_mm", "dynamic_mm")
VS = {  # what --vs may name: the beginnings of the names in gpulab/rivals.py
    "torch": ("tinygemm", "_int", "_scaled"),
    **{name: (name,) for name in ("torchao", "gemlite", "bitsandbytes")},
    "none": (),
}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BF16 = torch.bfloat16


class Job(NamedTuple):
    """One line of the table: the case, how it is measured, and the bytes that a bf16 product of its shape moves."""

    case: Case
    run: Callable[..., Record]
    plain_bytes: float


def jobs(args: argparse.Namespace) -> list[Job]:
    """List the cases that the command line asks for. Raises ValueError on formats that the op does not have."""
    names = args.format or DEFAULTS.get(args.op, FORMATS[args.op])
    unknown = [name for name in names if name not in FORMATS[args.op]]
    if unknown:
        raise ValueError(f"{args.op} has no format {'; '.join(unknown)}; it has: {'; '.join(FORMATS[args.op])}")
    if args.op == "int8_attention":
        pairs = [(one, name if name == "fp8_e4m3" else None) for one in ATTENTION for name in names]
        return [
            Job(attention_case(one, BF16, values), partial(measure_attention, one=one, value_format=values), 0.0)
            for one, values in pairs
        ]
    if args.op == "kv_attention":
        return [_cached_job(one, name) for one in CACHED for name in names]
    wanted = _rival_names(args)
    return [_job(args.op, name, linear, M, wanted) for linear in _linears(args) for name in names for M in args.m]


def _cached_job(one: Cached, format: str) -> Job:
    plain_bytes = 4 * one.batch * one.D * (one.kv_heads * one.T + one.H * one.S)
    return Job(cached_case(one, format, BF16), partial(measure_cached, one=one, format=format), plain_bytes)


def _job(op: str, name: str, linear: Linear, M: int, wanted: tuple[str, ...] | None) -> Job:
    if op == "rowwise":
        case = memory_case(name, linear.K, M, BF16)
        return Job(case, partial(measure_memory, case=case), 0.0)
    if op == "grouped_mm":
        case = grouped_case(candidate(name), linear, M, BF16)
        run = partial(measure_grouped, candidate=candidate(name), linear=linear, M=M)
    elif op in ("weight_only_mm", "dynamic_mm"):
        case = linear_case(candidate(name), linear, M, BF16)
        run = partial(measure_linear, candidate=candidate(name), linear=linear, M=M, wanted=wanted)
    else:
        case = scaled_case(name, linear, M, BF16)
        run = partial(measure_scaled, activation=name, linear=linear, M=M)
    weights = linear.N * linear.K * max(linear.experts, 1) * case.touched
    return Job(case, run, 2 * (weights + case.M * (linear.N + linear.K)))


def _rival_names(args: argparse.Namespace) -> tuple[str, ...] | None:
    """The beginnings of the names that --vs asks for, None for all. Raises ValueError if it would be ignored."""
    if args.vs is None:
        return None
    if args.model or args.op not in HAVE_RIVALS:
        what = "a model" if args.model else args.op
        raise ValueError(f"--vs is for measuring {' and '.join(HAVE_RIVALS)}; {what} has no choice of rivals")
    names = args.vs.split(",")
    unknown = [name for name in names if name not in VS]
    if unknown:
        raise ValueError(f"--vs {','.join(unknown)}: no such rivals; known: {', '.join(VS)}")
    return tuple(beginning for name in names for beginning in VS[name])


def _linears(args: argparse.Namespace) -> tuple[Linear, ...]:
    """The shapes of the command line, else those of real models; for ops of rows, which have no N, one of each K."""
    if args.shape:
        linears = tuple(Linear("", *(int(size) for size in shape.split(","))) for shape in args.shape)
    else:
        linears = EXPERTS if args.op == "grouped_mm" else LLAMA + FLUX if args.op.endswith("scaled_mm") else LLAMA
    return tuple({linear.K: linear for linear in linears}.values()) if args.op == "rowwise" else linears


def measured(todo: list[Job], timer: Timer, ceilings: Ceilings) -> list[Record]:
    """Run the jobs, each line printed when it is known."""
    records = []
    for job in todo:
        records.append(job.run(timer=timer, ceilings=ceilings))
        print(table(records[-1:]).splitlines()[2], flush=True)
    return records


def model_table(todo: list[Job], target_name: str, workers: int | None) -> str:
    """Modelled times from compiled code: nothing is measured."""
    from gpulab.build import build, target_named
    from gpulab.collect import collect, work_of
    from gpulab.model import CHIPS, modelled

    target, chip = target_named(target_name), CHIPS[target_name]
    collected = collect([job.case for job in todo], [target])
    built = build([use.unit for use in collected.uses.values()], workers=workers)
    rows = [(f"modelled for {chip.name} ({target.name})", "launches", "us", "bound by", "x bf16, modelled")]
    for case, _, plain_bytes in todo:
        total, bounds = 0.0, []
        launches = collected.calls.get((target.name, case), [])
        for launched in launches:
            result = built[launched.unit.key]
            if result.error is not None:
                raise ValueError(f"{case.name}: {result.error}")
            work = work_of(case, launched, result)
            times = modelled(target.name, result.summary, launched.unit.num_warps, work)
            bound = max(times, key=times.get)
            total += times[bound]
            bounds.append(bound)
        for product in collected.products.get((target.name, case), []):
            moved = product.itemsize * (product.M * product.K + product.K * product.N + product.M * product.N)
            rate = chip.rates["16bit"] / (product.itemsize // 2)
            total += max(moved / chip.bandwidth, 2 * product.M * product.N * product.K / rate) / 1e12
            bounds.append("torch's GEMM")
        plain = max(plain_bytes / (chip.bandwidth * 1e12), case.num_ops / (chip.rates["16bit"] * 1e12))
        ratio = f"{plain / total:.2f}" if total and plain_bytes else ""
        note = ", ".join(bounds) or "nothing recorded"
        rows.append((case.name, str(len(launches)), f"{total * 1e6:.1f}" if total else "", note, ratio))
    return format_table(rows)


def main() -> int:
    """Read the arguments, measure or model, print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="?", choices=tuple(FORMATS), default="weight_only_mm")
    parser.add_argument("--shape", nargs="+", metavar="N,K", help="(default: those of Llama-3.1-8B and others)")
    parser.add_argument("--m", nargs="+", type=int, default=list(TOKENS), help="numbers of tokens")
    parser.add_argument(
        "--format", nargs="+", help=f"of: {', '.join(c.name for c in CANDIDATES)}; rowwise: {', '.join(MEMORY)}"
    )
    parser.add_argument("--vs", help=f"rivals, by commas: {', '.join(VS)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the records there, too")
    parser.add_argument("--model", action="store_true", help="model from compiled code instead of measuring")
    parser.add_argument("--target", default="sm90", help="with --model (default: sm90)")
    parser.add_argument("--workers", type=int, help="with --model: processes that compile (default: one per core)")
    args = parser.parse_args()
    try:
        todo = jobs(args)
    except ValueError as error:
        parser.error(str(error))
    if args.model:
        print(model_table(todo, args.target, args.workers))
        return 0
    device = gpu()
    if device is None:
        print("bench_kernels: no CUDA or ROCm GPU here; --model gives modelled times instead", file=sys.stderr)
        return 2
    timer = GraphTimer(device)
    ceilings = measure_ceilings(timer)
    print(f"python {' '.join(sys.argv)}\n{environment_line(device)}")
    print(f"ceilings of this run: copy {ceilings.copy:.0f} GB/s, bf16 product {ceilings.gemm:.0f} TFLOP/s\n")
    torch.manual_seed(0)
    records = measured(todo, timer, ceilings)
    print(f"\n{table(records)}")
    if args.json:
        args.json.write_text(
            json.dumps(
                {"environment": environment(device), "ceilings": ceilings._asdict(), "records": records}, indent=1
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
