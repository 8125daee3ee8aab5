"""Tries configs around the shipped ones on a GPU, and keeps what is faster in the user's table.

    python scripts/tune.py                                  # every table, shapes of real models
    python scripts/tune.py weight_only_mm --shape 5120,5120 5120,13824 --format "int4 g128"
    python scripts/tune.py --regenerate                     # the user's tables as Python, to be shipped

Launches read the table at $HF_QUANT_TUNED, by default hf_quant/tuned.json in the user's cache directory, before the
shipped ones; deleting it undoes everything. For each row of a table, one number after the other is halved and doubled
(stages: one more, one less) while that gains. A config is tried only if it compiles for this GPU into what fits:
shared memory, no spilled register, the intended instructions (gpulab/code_checks.py), and kept only if its results are
right (gpulab/checks.py). Nothing is tuned at call time, ever.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from gpulab.build import build
from gpulab.cache_cases import Cached, cached_case
from gpulab.cases import (
    ATTENTION,
    EXPERTS,
    LLAMA,
    Case,
    Linear,
    attention_case,
    candidate,
    grouped_case,
    launcher,
    linear_case,
    memory_case,
    scaled_case,
)
from gpulab.checks import check_case
from gpulab.code_checks import check_built, is_excepted
from gpulab.collect import case_label, collect
from gpulab.measures import op_calls
from gpulab.timing import Calls, GraphTimer, Timer, environment_line, gpu, num_copies
from hf_quant.kernels.gpu import launch
from hf_quant.kernels.gpu.launch import Target, shipped_table, target_of, tuned_path
from hf_quant.kernels.int8_attention.gpu import BOUNDED, ONLINE, ONLINE_FP8
from hf_quant.kernels.int8_attention.op import KEY_BLOCK


Row = tuple[int, ...]
Cases = Callable[[Row, Row | None, Sequence[Linear], Sequence[str]], list[Case]]
GAIN = 0.02  # what a config must win, as the same config measured twice differs by about half of it
MAX_ROWS_PER_EXPERT, MAX_TOKENS = 512, 4096
BF16 = torch.bfloat16


class Column(NamedTuple):
    """Range of one number of a row: powers of two from `least` to `most`, or steps of one."""

    name: str
    least: int
    most: int
    is_power: bool = True

    def neighbours(self, value: int) -> list[int]:
        """The values beside `value`; none for a column that is given (least == most)."""
        if self.least == self.most:
            return []
        near = (value // 2, value * 2) if self.is_power else (value - 1, value + 1)
        return [n for n in near if self.least <= n <= self.most]


def _given(name: str) -> Column:
    return Column(name, 0, 0)


class Space(NamedTuple):
    """A config table: its op, the module of the shipped one and its place there, its columns, the cases of a row.

    `cases(row, before, linears, formats)`: `before` is the row above, None for the first. `checks`, likewise: what is
    compared with the reference where the cases are too large for it.
    """

    op: str
    module: str
    shipped: tuple[str, ...]
    columns: tuple[Column, ...]
    cases: Cases
    checks: Cases | None = None

    def table(self, target: Target) -> list[Row]:
        """The shipped rows for a target. Raises ValueError if they are not what `columns` says."""
        launcher(self.op)
        tables = getattr(sys.modules[self.module], self.shipped[0])
        for key in self.shipped[1:]:
            tables = tables[key]
        rows = [tuple(row) for row in shipped_table(tables, target)]
        if any(len(row) != len(self.columns) for row in rows):
            raise ValueError(
                f"{self.module}.{self.shipped[0]} has rows of {len(rows[0])}; tune.py knows {self.columns}"
            )
        return rows


def _tokens(row: Row, before: Row | None) -> list[int]:
    """The ends of the M that a row serves."""
    first = 1 if before is None or before[0] >= row[0] else before[0] + 1
    return sorted({first, min(row[0], MAX_TOKENS)})


def _linear_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    names = formats or ("int4 g128", "int8")
    tokens = _tokens(row, before)
    return [linear_case(candidate(name), one, M, BF16) for name in names for one in linears or LLAMA for M in tokens]


def _grouped_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    mean = min(row[0], MAX_ROWS_PER_EXPERT)
    found = []
    for linear in linears or EXPERTS:
        M = max(mean * linear.experts // linear.per_token, 1)
        found += [grouped_case(candidate(name), linear, M, BF16) for name in formats or ("int4 g128",)]
    return found


def _split_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    tokens = _tokens(row, before) if row[0] < MAX_TOKENS else [128]
    return [
        scaled_case(name, linear, M, BF16)
        for name in formats or ("int8", "fp8_e4m3")
        for linear in linears or LLAMA
        for M in tokens
    ]


def _tile_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    names = formats or ("int8", "fp8_e4m3")
    return [scaled_case(name, linear, M, BF16) for name in names for linear in linears or LLAMA for M in (1024, 4096)]


def _row_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    """`quantize_rowwise` at the largest K and M of the row that models have."""
    return [memory_case(name, min(row[1], 28672), min(row[0], 8192), BF16) for name in formats or ("quantize",)]


# Activations and values that a kind of attention serves; bf16 takes online softmax only where scores have no bound.
_OF_KIND = {BOUNDED: (BF16, None), ONLINE: (torch.float16, None), ONLINE_FP8: (BF16, "fp8_e4m3")}


def _attention_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    dtype, values = _OF_KIND[row[1]]
    if formats and (values or "16-bit values") not in formats:
        return []
    return [attention_case(one, dtype, values) for one in ATTENTION if one.D == row[0]]


def _attention_checks(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    """Fewer tokens and heads: the reference holds every score."""
    dtype, values = _OF_KIND[row[1]]
    small = [one._replace(S=1200, H=4, kv_heads=4 * one.kv_heads // one.H) for one in ATTENTION if one.D == row[0]]
    return [attention_case(one, dtype, values) for one in small]


_OF_BITS = {2: "int2", 4: "int4", 8: "int8"}


def _decode_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    """One query over long caches; two parts of a query are those of fp16, where bf16 has a row of its own."""
    bits, D, parts = row[:3]
    dtype = torch.float16 if before is not None and before[:2] == (bits, D) and parts == 2 else BF16
    caches = [Cached("llama", batch, 1, 32768, D=D) for batch in (1, 8)]
    return [cached_case(one, _OF_BITS[bits], dtype) for one in caches if not formats or _OF_BITS[bits] in formats]


def _decode_checks(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    return [cached_case(Cached("short", 2, 1, 3000, 8, 2, row[1]), _OF_BITS[row[0]], BF16)]


def _prefill_cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    one = Cached("llama", 1, 2048, 32768, D=row[0])
    masked = row[1] > 0 and row[0] <= 128  # larger heads have one row for both
    return [cached_case(one, name, BF16, masked=masked) for name in formats or ("int8", "int4")]


def _prefill_checks(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
    return [cached_case(Cached("short", 1, 200, 1000, 8, 2, row[0]), name, BF16) for name in ("int8", "int4")]


def _hadamard_cases(name: str) -> Callable[..., list[Case]]:
    def cases(row: Row, before: Row | None, linears: Sequence[Linear], formats: Sequence[str]) -> list[Case]:
        sizes = [K for K in (3072, 4096, 14336) if K <= row[0] and (before is None or K > before[0])]
        return [memory_case(name, K, 8192, BF16) for K in sizes or (min(row[0], 4096),)]

    return cases


_MM = "hf_quant.kernels.scaled_mm.gpu"
_WARPS, _STAGES = Column("num_warps", 1, 16), Column("num_stages", 1, 8, is_power=False)
_DECODED = (
    Column("BLOCK_M", 8, 256),
    Column("BLOCK_N", 32, 256),
    Column("BLOCK_K", 32, 256),
    _WARPS,
    _STAGES,
)
SPACES = {
    "weight_only_mm": Space(
        "weight_only_mm",
        "hf_quant.kernels.weight_only.gpu",
        ("CONFIGS",),
        (_given("M"), *_DECODED, Column("split of K", 1, 32), _given("scales before the dot")),
        _linear_cases,
    ),
    "grouped_mm": Space(
        "grouped_mm",
        "hf_quant.kernels.grouped_mm.gpu",
        ("CONFIGS",),
        (_given("rows per expert"), *_DECODED, _given("split of K"), _given("scales before the dot")),
        _grouped_cases,
    ),
    "scaled_mm_split": Space(
        "int8_scaled_mm",
        _MM,
        ("SPLIT_CONFIGS",),
        (_given("M"), *_DECODED[:3], Column("blocks", 1, 4), _WARPS, _STAGES),
        _split_cases,
    ),
    "scaled_mm_tiles": Space(
        "int8_scaled_mm",
        _MM,
        ("TILE_CONFIGS",),
        (*_DECODED[:3], Column("GROUP_M", 1, 32), _given("% of time"), _WARPS, _STAGES),
        _tile_cases,
    ),
    "quantize_rowwise": Space(
        "quantize_rowwise",
        "hf_quant.kernels.rowwise.gpu",
        ("CONFIGS",),
        (_given("M"), _given("K"), Column("rows", 1, 32), Column("values", 64, 16384), Column("num_warps", 1, 32)),
        _row_cases,
    ),
    "int8_attention": Space(
        "int8_attention",
        "hf_quant.kernels.int8_attention.gpu",
        ("CONFIGS",),
        (_given("D"), _given("kind"), Column("BLOCK_M", 64, 256), Column("BLOCK_N", 32, KEY_BLOCK), _WARPS, _STAGES),
        _attention_cases,
        _attention_checks,
    ),
    "kv_decode": Space(
        "kv_attention",
        "hf_quant.kernels.kv_attention.gpu",
        ("DECODE_CONFIGS",),
        (
            *(_given("bits"), _given("D"), _given("parts"), Column("BLOCK_N", 32, 256), _WARPS, _STAGES),
            Column("programs", 1, 16, is_power=False),
        ),
        _decode_cases,
        _decode_checks,
    ),
    "kv_prefill": Space(
        "kv_attention",
        "hf_quant.kernels.kv_attention.gpu",
        ("PREFILL_CONFIGS",),
        (_given("D"), _given("mask"), Column("BLOCK_M", 64, 256), Column("BLOCK_N", 32, 128), _WARPS, _STAGES),
        _prefill_cases,
        _prefill_checks,
    ),
    **{
        op: Space(
            op,
            "hf_quant.kernels.hadamard.gpu",
            ("CONFIGS", op),
            (
                _given("K"),
                Column("rows", 32, 256),  # at least the odd factor of a size, which is 28 at most
                Column("columns", 16, 128),
                _WARPS,
                _STAGES,
                Column("programs", 1, 4),
            ),
            _hadamard_cases(name),
        )
        for op, name in (("hadamard", "Hadamard"), ("hadamard_quantize_rowwise", "Hadamard, quantize"))
    },
}


@contextmanager
def table_in_use(name: str, target: Target, rows: Sequence[Row]) -> Iterator[None]:
    """Launches take `rows` for the table `name`."""
    launch.use_table(name, target, rows)
    try:
        yield
    finally:
        launch.reload_tables()


def fits(name: str, target: Target, rows: Sequence[Row], cases: Sequence[Case]) -> str | None:
    """Return the reason for which the cases do not compile well with a table; None if they do."""
    import triton

    with table_in_use(name, target, rows):
        collected = collect(cases, [target])
    if collected.failures:
        return next(iter(collected.failures))[1]
    built = build([use.unit for use in collected.uses.values()])
    for use in collected.uses.values():
        for finding in check_built(built[use.unit.key], target):
            if not is_excepted(finding, use.unit.name, target.name, case_label(use), triton.__version__):
                return finding.text
    return None


def wrong(
    name: str, target: Target, rows: Sequence[Row], cases: Sequence[Case], check: Callable[[Case], str | None]
) -> str | None:
    """Return the reason for which the results with a table are wrong; None if no check fails."""
    with table_in_use(name, target, rows):
        return next((reason for case in cases if (reason := check(case)) is not None), None)


def neighbours(space: Space, row: Row) -> Iterator[Row]:
    """Rows that differ from a row in one number."""
    for i, column in enumerate(space.columns):
        for value in column.neighbours(row[i]):
            yield (*row[:i], value, *row[i + 1 :])


def _with_table(name: str, target: Target, rows: Sequence[Row], call: Callable[[], object]) -> object:
    with table_in_use(name, target, rows):
        return call()


def tune_table(
    name: str,
    timer: Timer,
    target: Target,
    *,
    linears: Sequence[Linear] = (),
    formats: Sequence[str] = (),
    fits: Callable[[str, Target, Sequence[Row], Sequence[Case]], str | None] = fits,
    check: Callable[[Case, torch.device], str | None] = check_case,
    make_calls: Callable[[Case, int, torch.device], Calls] = op_calls,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """The best table found, row by row; the shipped one where nothing is faster by GAIN."""
    space = SPACES[name]
    rows = space.table(target)
    for i, row in enumerate(list(rows)):
        wanted = (row, rows[i - 1] if i else None, linears, formats)
        cases = space.cases(*wanted)
        if not cases:
            continue
        checks = cases if space.checks is None else space.checks(*wanted)
        copies = {case: num_copies(case.num_bytes(), timer.device) for case in cases}
        calls = [call for case in cases for call in make_calls(case, copies[case], timer.device)]
        tried = {row}
        while True:
            tables = {rows[i]: list(rows)}
            for other in neighbours(space, rows[i]):
                if other in tried:
                    continue
                tried.add(other)
                table = [*rows[:i], other, *rows[i + 1 :]]
                reason = fits(name, target, table, cases)
                if reason is None:
                    tables[other] = table
                else:
                    say(f"{name} {other}: left out: {reason}")
            if len(tables) == 1:
                break
            seconds = timer(
                {
                    str(key): [partial(_with_table, name, target, table, call) for call in calls]
                    for key, table in tables.items()
                }
            )
            gains = {key: 1 - seconds[str(key)] / seconds[str(rows[i])] for key in tables}
            for best in sorted((key for key in tables if gains[key] >= GAIN), key=gains.get, reverse=True):
                reason = wrong(name, target, tables[best], checks, partial(check, device=timer.device))
                if reason is None:
                    say(f"{name} {rows[i]} -> {best}: {gains[best]:.0%} less time")
                    rows = tables[best]
                    break
                say(f"{name} {best}: left out: {reason}")
            else:
                break
    return rows


def write_tuned(target: Target, tables: dict[str, list[Row]]) -> None:
    """Put tables into the user's file, beside what is there."""
    path = tuned_path()
    found = json.loads(path.read_text()) if path.is_file() else {}
    found.setdefault(target.name, {}).update({name: [list(row) for row in rows] for name, rows in tables.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))


def as_python(tables: dict[str, dict[str, list[list[int]]]]) -> str:
    """The user's tables {target: {name: rows}} as tuples, to be pasted over the shipped ones."""
    lines = []
    for name in sorted({name for found in tables.values() for name in found}):
        lines.append(f"# {name}")
        for target, found in tables.items():
            if name in found:
                lines += [f'"{target}": (', *(f"    {tuple(row)}," for row in found[name]), "),"]
    return "\n".join(lines)


def main(argv: Iterable[str] | None = None) -> int:
    """Tune or print; exit status 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of {', '.join(SPACES)} (default: all)")
    parser.add_argument("--shape", nargs="+", metavar="N,K", default=[], help="(default: those of real models)")
    parser.add_argument("--format", nargs="+", default=[], help="(default: the main ones of the op)")
    parser.add_argument("--regenerate", action="store_true", help="print the user's tables as Python")
    args = parser.parse_args(None if argv is None else list(argv))
    unknown = [name for name in args.tables if name not in SPACES]
    if unknown:
        parser.error(f"no table is named {', '.join(unknown)}; known: {', '.join(SPACES)}")
    if args.regenerate:
        path = tuned_path()
        if not path.is_file():
            parser.error(f"{path} does not exist: tune first")
        print(as_python(json.loads(path.read_text())))
        return 0
    device = gpu()
    if device is None:
        print("tune: no CUDA or ROCm GPU here", file=sys.stderr)
        return 2
    target, timer = target_of(device), GraphTimer(device)
    linears = [Linear("", *(int(size) for size in shape.split(","))) for shape in args.shape]
    print(environment_line(device))
    torch.manual_seed(0)
    for name in args.tables or SPACES:
        rows = tune_table(name, timer, target, linears=linears, formats=args.format)
        if rows != SPACES[name].table(target):
            write_tuned(target, {name: rows})
            print(f"{name}: written to {tuned_path()}")
        else:
            print(f"{name}: the shipped configs are the best")
    return 0


if __name__ == "__main__":
    sys.exit(main())
