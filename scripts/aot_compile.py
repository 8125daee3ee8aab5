"""Compiles every Triton kernel for every target, without a GPU, and checks what came out; a report and a gate.

    python scripts/aot_compile.py                     # every kernel x tile x decoder x target; also: make aot
    python scripts/aot_compile.py --subset ci         # each kernel on three targets, each constexpr once: make aot-ci
    python scripts/aot_compile.py --subset all        # everything that the cases launch: three times as many kernels
    python scripts/aot_compile.py --ops weight_only_mm --targets sm90 --show all
    python scripts/aot_compile.py --readme            # the resources in the reports of all Tritons, into docs/

The launchers of the ops are called on tensors without content; what Triton's JIT would compile for their launches is
compiled (results are kept in build/aot), and must

- fit the shared memory of a block,
- use no local memory in loops: no stack, no spilled register; over a loop at most 64 bytes of a thread are kept,
- run `tl.dot` on the target's best matrix units: HGMMA, IGMMA, QGMMA on sm90, HMMA, IMMA on sm80, mfma on gfx942, ...
- move at least half of the bytes of its main loop in accesses of 16 bytes a lane, or by the copy engine,
- on sm90, leave registers of products in flight alone (gpulab/wgmma.py), and make no product wait (ptxas: C75xx).

Exceptions, each with its reason: gpulab/code_checks.py. The table is modelled, not measured: the largest of bytes
over bandwidth, instructions over issue rate and operations over matrix rate, by data sheets (gpulab/model.py).
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.pages import markdown, write_section
from gpulab.all_cases import all_cases
from gpulab.build import (
    CACHE,
    Built,
    build,
    check_environment,
    target_named,
)
from gpulab.cases import gpu_ops
from gpulab.code_checks import check_built, is_excepted, wide_share
from gpulab.collect import Use, case_label, collect, cover, uncovered, work_of
from gpulab.machine_code import access_bits
from gpulab.model import CHIPS, modelled, occupancy
from hf_quant.kernels.gpu.launch import TARGETS
from hf_quant.planning import format_table


CI_TARGETS = ("sm90", "sm80", "gfx942")
ALL_TARGETS = tuple(name for name in TARGETS if name != "xpu")


def rows_of_report(uses: Iterable[Use], built: dict[str, Built]) -> list[dict[str, Any]]:
    """One record for each unit: its first case, resources, instructions, occupancy, modelled time."""
    rows = []
    for use in uses:
        unit, result = use.unit, built[use.unit.key]
        case, launched = use.launches[0]
        row: dict[str, Any] = {
            "kernel": unit.name,
            "target": unit.target.name,
            "case": case.name,
            "op": case.op,
            "cases": len(use.launches),
            "constexprs": {k: v if isinstance(v, int | float | None) else str(v) for k, v in unit.values.items()},
            "num_warps": unit.num_warps,
            "num_stages": unit.options["num_stages"],
            "error": result.error,
        }
        if result.error is None:
            work = work_of(case, launched, result)
            times = modelled(unit.target.name, result.summary, unit.num_warps, work)
            row |= {
                "registers": result.resources.registers,
                "local_memory": result.resources.local_memory,
                "shared": result.shared,
                "instructions": result.summary.instructions,
                "loop": result.summary.loop,
                "mix": result.summary.mix,
                "matrix": result.summary.matrix,
                "wide_accesses": wide_share(result.summary.mix),
                "blocks_per_multiprocessor": occupancy(
                    unit.target.name, unit.num_warps, result.resources, result.shared
                ),
                "modelled_us": {name: seconds * 1e6 for name, seconds in times.items()},
                "compile_s": result.seconds,
            }
        rows.append(row)
    return rows


def resources(reports: Iterable[Path]) -> list[tuple[str, ...]]:
    """The most registers, local and shared memory of each kernel on each target, by all reports; header first."""
    most: dict[tuple[str, str], list[Any]] = {}
    for path in reports:
        found = json.loads(path.read_text())
        for row in found["rows"]:
            if row["error"] is None:
                counts = [row["registers"], row["local_memory"], row["shared"]]
                old = most.setdefault((row["kernel"], row["target"]), [0, 0, 0, 0, set()])
                old[:4] = [*(max(pair) for pair in zip(old, counts)), old[3] + 1]
                old[4].add(found["triton"])
    table = [("kernel", "target", "registers", "bytes of spills", "shared memory, KB", "compiled", "Triton")]
    for (kernel, target), (registers, local, shared, count, versions) in sorted(most.items()):
        numbers = (str(registers), str(local), f"{shared / 1024:.0f}", str(count))
        table.append((f"`{kernel}`", target, *numbers, ", ".join(sorted(versions))))
    return table


def report(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    lines = [("kernel", "case", "target", "warps", "regs", "shared", "blocks/MP", "loop", "of it", "modelled us")]
    for row in rows:
        if row["error"] is not None:
            lines.append((row["kernel"], row["case"], row["target"], *[""] * 6, "does not compile"))
            continue
        bound = max(row["modelled_us"], key=row["modelled_us"].get)
        counts = {name: count for name, count in row["mix"].items() if _is_telling(name)}
        lines.append(
            (
                row["kernel"],
                row["case"],
                row["target"],
                str(row["num_warps"]),
                str(row["registers"]),
                f"{row['shared'] / 1024:.0f} K",
                str(row["blocks_per_multiprocessor"]),
                str(row["loop"] or "-"),
                " ".join(f"{count} {name}" for name, count in list(counts.items())[:4]),
                f"{row['modelled_us'][bound]:.1f} {bound}",
            )
        )
    return format_table(lines)


def _is_telling(name: str) -> bool:
    return "MMA" in name or "mfma" in name or bool(access_bits(name)) or name.startswith(("STS", "LDS", "ds_", "I2F"))


def main() -> int:
    """Compile, check, report; the exit status is 1 if something is wrong, 2 if nothing can be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--subset",
        choices=("all", "tiles", "ci", "few"),
        default="tiles",
        help="tiles (default): every tile with every decoder and pointer type, every other constexpr once, on all "
        "targets; ci: every kernel on " + ", ".join(CI_TARGETS) + ", every constexpr on one of them; few: the "
        "three of each kernel that have the most of these",
    )
    parser.add_argument("--targets", nargs="+", default=None, metavar="NAME", help=f"of {', '.join(ALL_TARGETS)}")
    parser.add_argument("--ops", nargs="+", choices=gpu_ops(), help="(default: all)")
    parser.add_argument("--cases", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument("--show", default="sm90", help="rows of the table: a target's name, or all (default: sm90)")
    parser.add_argument("--readme", nargs="*", type=Path, metavar="JSON", help="tabulate reports in docs/ only")
    parser.add_argument("--json", type=Path, help="(default: build/aot/report-triton-<version>.json)")
    args = parser.parse_args()
    if args.readme is not None:
        write_section("gpu resources", markdown(resources(args.readme or sorted(CACHE.glob("report-*.json")))))
        return 0
    reason = check_environment()
    if reason is not None:
        print(f"aot_compile: {reason}", file=sys.stderr)
        return 2
    import triton

    names = args.targets or (CI_TARGETS if args.subset in ("ci", "few") else ALL_TARGETS)
    start = time.perf_counter()
    cases = [case for case in all_cases(args.ops) if re.search(args.cases, case.name)]
    collected = collect(cases, [target_named(name) for name in names])
    uses = list(collected.uses.values())
    chosen = uses if args.subset == "all" else cover(uses, args.subset)
    took = time.perf_counter() - start
    print(f"triton {triton.__version__}: {len(cases)} cases, {len(uses)} kernels to compile, {len(chosen)} chosen")
    built = build([use.unit for use in chosen], workers=args.workers)
    rows = rows_of_report(chosen, built)
    shown = [row for row in rows if args.show in ("all", row["target"])]
    if shown:
        print(report(sorted(shown, key=lambda row: (row["kernel"], row["target"], row["case"]))))
    path = args.json or CACHE / f"report-triton-{triton.__version__}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"triton": triton.__version__, "chips": _chips(names), "rows": rows}, indent=1))
    failures = [
        f"{op}: its launch failed: {why} ({where[0]}; {len(where)} calls)"
        for (op, why), where in collected.failures.items()
    ]
    if args.ops is None and not args.cases:
        failures += [f"{name}: no case of gpulab/cases.py launches it" for name in uncovered(uses)]
    failures += _failures(chosen, built)
    for line in failures:
        print(f"FAILED {line}")
    total = time.perf_counter() - start
    print(f"{len(chosen)} kernels, {len(failures)} failures, {total:.0f} s ({took:.0f} s to collect); {path}")
    return 1 if failures else 0


def _failures(uses: Iterable[Use], built: dict[str, Built]) -> list[str]:
    """One line for each thing that is wrong: which case broke what limit."""
    import triton

    lines = []
    for use in uses:
        for finding in check_built(built[use.unit.key], use.unit.target):
            unit, (case, _) = use.unit, use.launches[0]
            if not is_excepted(finding, unit.name, unit.target.name, case_label(use), triton.__version__):
                lines.append(f"{unit.name} on {unit.target.name} ({case.op}: {case.name}): {finding.text}")
    return lines


def _chips(names: Sequence[str]) -> dict[str, Any]:
    return {name: CHIPS[name]._asdict() for name in names}


if __name__ == "__main__":
    sys.exit(main())
