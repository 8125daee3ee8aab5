"""Measure the CPU paths: products against bf16 `F.linear`, attention over a cache against bf16, in one run.

    python scripts/bench_cpu.py linear                                 # forward
    python scripts/bench_cpu.py linear --direction backward
    python scripts/bench_cpu.py linear --kernels torch,avx512,avx2,portable --only "int4 g128"
    python scripts/bench_cpu.py linear --targets --json targets.json   # what is aimed at, and what is reached
    python scripts/bench_cpu.py linear --targets --only "W8A8 int8" --m 1 128 --shapes 576x1536 4096x14336  # rotation
    python scripts/bench_cpu.py kv_attention --context 8192            # a decoding step
    python scripts/bench_cpu.py prompt_attention --threads 1           # a prompt

Every number of `linear` is the ratio to bf16 `F.linear` (for the gradient: to the bf16 product) on the same shape in
the same run: above 1 is faster. At M = 1 there are also the GB/s at which a weight with its scales is read, and the
share that this is of the bandwidth at which torch reads memory in the same run, by as many threads.

Candidates take turns; a turn is one call for each of `--copies` random weights, as the layers of a model follow each
other, and no weight stays in the cache; the least of the turns counts, which other processes disturb least. By
`--kernels`, native instruction sets and the paths of torch take turns, too, each with weights of its own. With one
thread, CPU time of that thread is measured, which leaves out being preempted; with more, wall-clock time. The first
use of a weight, which may prepack it, is not timed.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cpulab import attention as cpu_attention
from cpulab.timing import TORCH, Turn, command, environment, interleaved, kernels_in_use, print_table
from gpulab import cases
from gpulab.cases import CANDIDATES, Candidate
from hf_quant import kernels
from hf_quant.algorithms import PackedWeight, quantize_matrix
from hf_quant.kernels import native
from hf_quant.modules.rotation import signs
from hf_quant.planning import format_table
from hf_quant.resolve import DEFAULT_TRANSFORM
from hf_quant.scheme import InputTransform, TensorQuant


BASE = "bf16"
TOKENS = (1, 2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024)
READ_BYTES = 2**28  # more than caches hold
# What is aimed at for 14336 x 4096 by one thread and by two: {candidate: {M: ratio to bf16}}, and the share of the
# bandwidth at M = 1.
TARGETS = {
    "int4 g128": {1: 6.0, 4: 3.6, 16: 1.8, 128: 1.0, 512: 0.95},
    "W4A8 int8": {1: 7.0, 4: 4.4, 16: 2.6, 128: 1.8, 512: 1.7},
    "W8A8 int8": {1: 3.6, 4: 3.5, 16: 2.4, 128: 2.0, 512: 2.0},
    "nf4 g64": {1: 6.0},
    "int3 g128 asym": {1: 6.0},
    "int2 g64 asym": {1: 8.0},
}
SHARE_TARGETS = {"int4 g128": 0.85}
FP8 = "float8_e4m3fn"
# Small groups with fp8 scales, after the groups of 128 with bf16 scales that they are compared with.
GROUPS = (
    *(Candidate(f"{format} g128", TensorQuant(format, "group", 128)) for format in ("nf4", "int3", "int2")),
    *(
        Candidate(f"{format} g{size} fp8 scales", TensorQuant(format, "group", size, scale_dtype=FP8))
        for format, sizes in (("int4", (64, 32)), ("nf4", (64, 32)), ("int3", (64, 32, 16)), ("int2", (64, 32, 16)))
        for size in sizes
    ),
    *(
        Candidate(f"W4A8 int8 g{size} fp8 scales", TensorQuant("int4", "group", size, scale_dtype=FP8), "int8")
        for size in (64, 32)
    ),
)
PEERS = {
    c.name: "W4A8 int8" if c.activation else f"{c.weight.format} g128" for c in GROUPS if c.name.endswith("scales")
}
PEER_TARGETS = dict.fromkeys(PEERS, dict.fromkeys((1, 4, 16, 128), 0.9))  # {candidate: {M: the speed of the peer}}
# With an input transform, after what they are compared with.
ROTATED = tuple(cases.candidate(name)._replace(name=f"{name}, rotated") for name in ("W8A8 int8", "W4A8 int8"))
PEERS |= {c.name: c.name.removesuffix(", rotated") for c in ROTATED}
PEER_TARGETS |= dict.fromkeys((c.name for c in ROTATED), {1: 0.95, 128: 0.95})


@dataclass
class Record:
    """One measurement: of a candidate, of bf16, or of reading memory (`kernels` is then None, and `name` says how).

    `seconds` are those of one call, `gbps` the bytes of the weight (of the memory) by them; `ratio` is to bf16,
    `share` of the bandwidth, at M = 1.
    """

    name: str
    kernels: str | None
    shape: str
    threads: int
    direction: str
    M: int
    seconds: float
    gbps: float
    ratio: float | None = None
    share: float | None = None


def weight_copies(candidate: Candidate, packed: PackedWeight, N: int, copies: int) -> list[PackedWeight]:
    """`copies` different packed weights of N rows: those of one, rolled."""
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
                rows = shift // 128 if tensor.shape[0] < N else shift
                bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                parts.append(torch.roll(bits, rows, 0).view(tensor.dtype))
        rolled.append(PackedWeight(*parts))
    return rolled


def forward_call(candidate: Candidate, K: int) -> Callable[[Tensor, PackedWeight], Tensor]:
    """x, weight -> product, through the registered op."""
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(K)}
    if candidate.activation is None:
        return lambda x, packed: kernels.weight_only_mm(x, *packed, None, **options)
    options["activation"] = candidate.activation
    transform = InputTransform(min(K & -K, DEFAULT_TRANSFORM.block_size))
    diagonal = signs(transform, K, torch.device("cpu")) if candidate in ROTATED else None
    return lambda x, packed: kernels.dynamic_mm(x, *packed, None, diagonal, **options)


def backward_call(candidate: Candidate, K: int) -> Callable[[Tensor, PackedWeight], Tensor]:
    """grad, weight -> gradient of the input, through the registered op."""
    options = {"format": candidate.weight.format, "group_size": candidate.group_size(K), "K": K}
    return lambda grad, packed: kernels.weight_only_mm_backward(grad, *packed, **options)


class Bench:
    """Measures products with one weight matrix [N, K] for many M and numbers of threads.

    Attributes:
        plain: random bf16 weights.
        weights: {(candidate's name, kernels): quantized ones}.
    """

    def __init__(self, args: argparse.Namespace, shape: str, chosen: list[Candidate]) -> None:
        self.args, self.shape, self.chosen = args, shape, chosen
        self.N, self.K = (int(size) for size in shape.split("x"))
        torch.manual_seed(0)
        self.plain = [torch.randn(self.N, self.K, dtype=torch.bfloat16).mul_(0.02) for _ in range(args.copies)]
        packed = {c.name: quantize_matrix(self.plain[0], c.weight, "absmax") for c in chosen}
        self.weights = {
            (c.name, kind): weight_copies(c, packed[c.name], self.N, args.copies)
            for c in chosen
            for kind in args.kernels
        }
        self.buffer = torch.randint(256, (args.read_bytes,), dtype=torch.uint8) if self.reads(1) else None

    def reads(self, M: int) -> bool:
        """Return True if the bandwidth is measured beside products with M rows."""
        return M == 1 and M in self.args.m and self.args.direction == "forward"

    def measure(self, M: int) -> list[Record]:
        """bf16, each candidate by each of the kernels and, for M = 1, reading memory."""
        args, threads = self.args, torch.get_num_threads()
        turns = self.turns(M)
        seconds = interleaved(turns, max(args.rounds // (1 + M // 64), 2))
        records = {}
        for key, turn in turns.items():
            each = seconds[key] / turn.calls
            place = (self.shape, threads, args.direction, M)
            records[key] = Record(*key, *place, each, turn.nbytes / each / 1e9)
        base = records[BASE, None]
        bandwidth = max((r.gbps for r in records.values() if r.name.startswith("read")), default=None)
        for record in records.values():
            if record.kernels is not None or record is base:
                record.ratio = base.seconds / record.seconds
                record.share = None if bandwidth is None else record.gbps / bandwidth
        return list(records.values())

    def turns(self, M: int) -> dict[tuple[str, str | None], Turn]:
        """{(name, kernels): turn}."""
        forward, copies = self.args.direction == "forward", self.args.copies
        x = torch.randn(M, self.K if forward else self.N, dtype=torch.bfloat16)
        plain = (lambda w: F.linear(x, w)) if forward else (lambda w: x @ w)
        turns = {(BASE, None): Turn(_each(plain, self.plain), copies, self.plain[0].nbytes)}
        for candidate in self.chosen:
            call = (forward_call if forward else backward_call)(candidate, self.K)
            for kind in self.args.kernels:
                weights = self.weights[candidate.name, kind]
                nbytes = sum(part.nbytes for part in weights[0] if part is not None)
                run = _each(lambda packed, call=call: call(x, packed), weights)
                turns[candidate.name, kind] = Turn(run, copies, nbytes, kind)
        if self.reads(M):
            words = self.buffer.view(torch.int64)
            turns["read, sum of int64", None] = Turn(words.sum, 1, words.nbytes)
            turns["read, max of uint8", None] = Turn(self.buffer.max, 1, words.nbytes)
        return turns


def _each(call: Callable[[Any], Tensor], weights: list[Any]) -> Callable[[], None]:
    def turn() -> None:
        for weight in weights:
            call(weight)

    return turn


def bench_linear(args: argparse.Namespace) -> None:
    """Every candidate against bf16 `F.linear`, for all shapes, M and thread counts."""
    print(f"kernels: {', '.join(args.kernels)}")
    candidates = (*CANDIDATES, *GROUPS, *ROTATED)
    names = [c.name for c in candidates if not args.only or any(word in c.name for word in args.only)]
    if args.targets:
        names = [name for name in names if name in (*TARGETS, *PEERS, *PEERS.values())]
    records: list[Record] = []
    for shape in args.shapes:
        bench = Bench(args, shape, [c for c in candidates if c.name in names])
        for threads in args.threads:
            torch.set_num_threads(threads)
            print(f"\n{shape} (N x K), {threads} thread(s), {args.direction}; load {os.getloadavg()[0]:.1f}")
            found = [record for M in args.m for record in bench.measure(M)]
            print_ratios(found, args.m, several=len(args.kernels) > 1)
            print(f"prepacked weights: {kernels.prepacked_bytes() / 2**20:.0f} MB", flush=True)
            records += found
        del bench
    goals = judge(records) if args.targets else []
    if goals:
        print_goals(goals)
    if args.json is not None:
        found = {"command": command(), "environment": args.environment, "records": [asdict(r) for r in records]}
        args.json.write_text(json.dumps({**found, "targets": goals}, indent=1))


def print_ratios(records: list[Record], tokens: list[int], *, several: bool) -> None:
    """Ratios by M, and what M = 1 says of the bandwidth; the kernels are named if there are several."""
    one = [record for record in records if record.M == 1 and record.share is not None]
    rows: dict[str, list[str]] = {}
    for record in records:
        if record.kernels is not None:
            name = f"{record.name}, {record.kernels}" if several else record.name
            rows.setdefault(name, []).append(f"{record.ratio:.2f}")
    base = [record for record in records if record.name == BASE]
    rows["bf16 (ms)"] = [f"{record.seconds * 1e3:.2f}" for record in base]
    header = ["M =", *map(str, tokens)]
    if one:
        header += ["GB/s", "of read"]
        for record in one:
            name = f"{record.name}, {record.kernels}" if several else record.name
            rows["bf16 (ms)" if record.name == BASE else name] += [f"{record.gbps:.1f}", f"{record.share:.0%}"]
    print_table(header, rows)
    for record in records:
        if record.name.startswith("read"):
            print(f"memory is {record.name}, at {record.gbps:.1f} GB/s")


def judge(records: list[Record]) -> list[dict[str, Any]]:
    """Compare each record that has a target with it; those of `PEERS` with the peer in the same run."""
    goals = []
    found = {(r.name, r.kernels, r.shape, r.threads, r.M): r for r in records}
    for record in records:
        if record.kernels is None or record.direction != "forward":
            continue
        aims = {"x bf16": (record.ratio, TARGETS.get(record.name, {}).get(record.M))}
        peer = found.get((PEERS.get(record.name), record.kernels, record.shape, record.threads, record.M))
        if peer is not None:
            aims[f"x {peer.name}"] = (peer.seconds / record.seconds, PEER_TARGETS[record.name].get(record.M))
        if record.M == 1:
            aims["of read"] = (record.share, SHARE_TARGETS.get(record.name))
        for what, (reached, target) in aims.items():
            if target is not None:
                place = {key: getattr(record, key) for key in ("name", "kernels", "shape", "threads", "M")}
                goals.append({**place, "what": what, "reached": reached, "target": target, "pass": reached >= target})
    return goals


def print_goals(goals: list[dict[str, Any]]) -> None:
    """One line for each target, those of one candidate together, and how many are reached."""
    order = [*TARGETS, *PEERS]
    goals = sorted(goals, key=lambda g: (g["shape"], g["threads"], order.index(g["name"]), g["kernels"], g["M"]))
    rows = [("weights", "kernels", "shape", "threads", "M", "what", "reached", "target", "verdict")]
    for goal in goals:
        missing = goal["target"] - goal["reached"]
        verdict = "PASS" if goal["pass"] else f"short by {missing:.2f} ({missing / goal['target']:.0%})"
        place = (str(goal[key]) for key in ("name", "kernels", "shape", "threads", "M", "what"))
        rows.append((*place, f"{goal['reached']:.2f}", f"{goal['target']:.2f}", verdict))
    print(f"\n{format_table(rows)}\n{sum(goal['pass'] for goal in goals)} of {len(goals)} targets are reached")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    linear = commands.add_parser("linear", help="products at many M against bf16 F.linear")
    linear.add_argument("--shapes", nargs="+", default=["14336x4096"], metavar="NxK")
    linear.add_argument("--m", nargs="+", type=int, help=f"(default: {' '.join(map(str, TOKENS))}, or the targets')")
    linear.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    linear.add_argument("--copies", type=int, default=4, help="different weights to rotate through")
    linear.add_argument("--rounds", type=int, default=8, help="turns per M; fewer for M >= 64, at least 2")
    linear.add_argument("--only", nargs="+", help="candidates whose name contains one of these")
    linear.add_argument("--direction", choices=("forward", "backward"), default="forward")
    linear.add_argument(
        "--kernels",
        default=kernels_in_use(),
        help="native instruction sets and torch, by commas (default: the one in use; `native.use` has the names)",
    )
    linear.add_argument("--targets", action="store_true", help="only what has a target, and whether it is reached")
    linear.add_argument("--json", type=Path, help="write the records there, too")
    linear.add_argument("--read-bytes", type=int, default=READ_BYTES, help="size of the memory that is read")
    linear.set_defaults(run=bench_linear)

    attention = commands.add_parser("kv_attention", help="a decoding step over a quantized KV cache against bf16")
    cpu_attention.add_arguments(attention)
    prompt = commands.add_parser("prompt_attention", help="the attention of a prompt against bf16")
    cpu_attention.add_prompt_arguments(prompt)

    args = parser.parse_args(arguments)
    if args.command != "linear":
        return args
    args.kernels, known = args.kernels.split(","), (*native.instruction_sets(), TORCH)
    if not set(args.kernels) <= set(known):
        linear.error(f"--kernels {','.join(args.kernels)}: known on this machine are {', '.join(known)}")
    if args.targets and args.direction == "backward":
        linear.error("--targets are for --direction forward")
    if args.m is None:
        args.m = sorted({M for aims in TARGETS.values() for M in aims}) if args.targets else list(TOKENS)
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark; `arguments` default to those of the process."""
    args = parse(arguments)
    args.environment = environment()
    print(f"{command()}\n{args.environment}")
    with native.using(native.active()):
        args.run(args)


if __name__ == "__main__":
    main()
