"""Compiles every Triton kernel for every target, without a GPU, and checks what came out; a report and a gate.

    python scripts/aot_compile.py                     # every kernel x shipped config x target; also: make aot
    python scripts/aot_compile.py --subset ci         # every kernel and constexpr on sm80, sm90, gfx942: make aot-ci
    python scripts/aot_compile.py --ops weight_only_mm --targets sm90 --show all

The launchers of the ops are called on tensors without content; what Triton's JIT would compile for their launches is
compiled (results are kept in build/aot), and must

- fit the shared memory of a block,
- use no local memory: no stack, no spilled register,
- run `tl.dot` on the target's best matrix units: HGMMA, IGMMA, QGMMA on sm90, HMMA, IMMA on sm80, mfma on gfx942, ...
- move at least half of the bytes of its main loop in accesses of 16 bytes a lane, or by the copy engine.

Exceptions are in EXCEPTIONS, each with its reason. The table is modelled, not measured: the largest of bytes over
bandwidth, instructions over issue rate and operations over matrix rate, by data sheets (gpulab/model.py).
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpulab.build import (
    CACHE,
    Built,
    Recorded,
    Unit,
    VendorProduct,
    build,
    check_environment,
    record,
    target_named,
    tensors,
)
from gpulab.cases import Case, all_cases, gpu_ops, launcher
from gpulab.machine_code import access_bits
from gpulab.model import CHIPS, Work, modelled, occupancy
from hf_quant.kernels.gpu.launch import TARGETS, Target
from hf_quant.planning import format_table


CI_TARGETS = ("sm80", "sm90", "gfx942")
ALL_TARGETS = tuple(name for name in TARGETS if name != "xpu")

_HOPPER = {"f16": "HGMMA", "bf16": "HGMMA", "tf32": "HGMMA", "i8": "IGMMA", "f8": "QGMMA"}
_AMPERE = {"f16": "HMMA", "bf16": "HMMA", "tf32": "HMMA", "i8": "IMMA"}
_ADA = {**_AMPERE, "f8": "QMMA"}
# Instruction by target and kind of operand; a kind that is missing has no matrix instruction and must not be used.
MATRIX = {
    "sm75": {"f16": "HMMA", "i8": "IMMA"},
    "sm80": _AMPERE,
    "sm86": _AMPERE,
    "sm89": _ADA,
    "sm90": _HOPPER,
    "sm100": {"f16": "UTCHMMA", "bf16": "UTCHMMA", "tf32": "UTCHMMA", "i8": "UTCIMMA", "f8": "UTCQMMA"},
    "sm120": _ADA,
    "gfx942": dict.fromkeys(("f16", "bf16", "tf32", "i8", "f8"), "v_mfma"),
}


class Accepted(NamedTuple):
    """A finding that is accepted; `kernel`, `target` and `case` are regular expressions, `case` of `case_label`."""

    check: str
    kernel: str
    target: str
    case: str
    reason: str


EXCEPTIONS = (
    # Triton 3.6 makes no wgmma 8 wide. So few tokens are bound by bytes, and mma.sync takes fewer instructions (3.6:
    # 180 a step of int4, 3.9 with wgmma: 204).
    Accepted("matrix", ".*", "sm90", r".*\bBLOCK_M=8\b.*", "8 tokens: bound by bytes"),
    Accepted("width", ".*", ".*", ".*(off-tile|odd) .*", "rows that do not start at multiples of 16 bytes"),
    Accepted("width", ".*", ".*", "(int3|fp6).*", "two planes: a lane's codes of one are half, or less, of 16 bytes"),
    Accepted("width", "_quantize_rowwise.*", ".*", r".* rows \d+x(64|128|1000), .*", "short or odd rows"),
    Accepted("width", "_quantize_rowwise.*", ".*", r".*, M=\d{1,3}, .*", "few rows: many lanes each, latency counts"),
    Accepted("width", "_dequantize.*", ".*", "nf4.* fp32.*", "levels are looked up in the cache, 4 bytes each"),
    Accepted("width", ".*", "gfx942", "nf4.*", "without NVIDIA's byte permute, levels are looked up in the cache"),
    Accepted("width", "_int8_attention_stats.*", "gfx942", ".*", "one pass over k; attention makes many"),
    # Tiles of 16 rows: the left operand of wgmma, and of tcgen05, has 64 and more.
    Accepted("matrix", "_kv_decode.*", "sm90|sm100", ".*", "few queries: bound by bytes"),
    Accepted("matrix", "_kv_prefill.*", "sm90|sm100", r".*\bBLOCK_M=(16|32)\b.*", "few queries: bound by bytes"),
    Accepted("width", "_kv_prefill.*", ".*", ".*", "scales and masks: the loop is bound by products and softmax"),
    Accepted("width", "_kv_decode.*", ".*", ".*(fp32|fp16|masked).*", "32 tokens a step: 8 bytes of codes a lane"),
    Accepted("width", "_kv_decode.*", "gfx942", ".*", "scales and offsets, 4 bytes a token, go by registers"),
    Accepted("width", "_kv_.*", ".*", "int2.*", "a tile of codes is less than 16 bytes for each thread"),
    Accepted("width", "_kv_append.*", ".*", ".*", "words and scales of a token lie apart; 3 bytes a value in all"),
    Accepted("width", "_kv_merge.*", ".*", ".*", "a row of fp32 for each split: 4 bytes a lane, all in flight"),
)


class Finding(NamedTuple):
    """What is wrong: which check failed, and the numbers."""

    check: str
    text: str


def dot_kind(left: str, right: str) -> str:
    """Kind of the operands of a dot in MATRIX, by the names of Triton's IR; fp8 of any layout is "f8"."""
    kinds = {"f8" if name.startswith("f8") else name for name in (left, right)}
    return kinds.pop() if len(kinds) == 1 else "/".join(sorted(kinds))


def check_built(built: Built, target: Target) -> list[Finding]:
    """Everything that is wrong with compiled code; an empty list passes."""
    if built.error is not None:
        return [Finding("compiles", built.error)]
    findings = []
    if built.shared > target.shared_memory:
        text = f"{built.shared} bytes of shared memory, a block on {target.name} has {target.shared_memory}"
        findings.append(Finding("shared", text))
    summary, resources = built.summary, built.resources
    if resources.local_memory or resources.spills or summary.local_accesses:
        text = (
            f"{resources.local_memory} bytes of local memory a thread, {resources.spills} spilled registers, "
            f"{summary.local_accesses} local loads and stores; none are allowed"
        )
        findings.append(Finding("local", text))
    findings += _check_matrix(built, target)
    share = wide_share(summary.mix)
    if share is not None and share < 0.5:
        text = f"{share:.0%} of the bytes of the main loop move in accesses of 16 bytes a lane; at least 50% must"
        findings.append(Finding("width", text))
    return findings


def _check_matrix(built: Built, target: Target) -> list[Finding]:
    wanted = set()
    for left, right in built.dots:
        kind = dot_kind(left, right)
        if kind == "f32":  # tl.dot(..., input_precision="ieee") runs on fp32 units by intention
            continue
        instruction = MATRIX[target.name].get(kind)
        if instruction is None:
            return [Finding("matrix", f"tl.dot of {left} and {right}: {target.name} has no such matrix instruction")]
        wanted.add(instruction)
    found = built.summary.matrix
    missing = [name for name in wanted if not any(base.startswith(name) for base in found)]
    if missing:
        text = f"tl.dot of {built.dots} gave {dict(found) or 'no matrix instruction'}, not {', '.join(missing)}"
        return [Finding("matrix", text)]
    other = [base for base in found if not any(base.startswith(name) for name in wanted)]
    if other:
        return [Finding("matrix", f"{', '.join(other)} beside {', '.join(wanted)}: a dot runs on slower units")]
    return []


def wide_share(mix: dict[str, int]) -> float | None:
    """Share of the bytes of the main loop in accesses of at least 16 bytes a lane; None if it has no access."""
    total = wide = 0
    for name, count in mix.items():
        bits = access_bits(name)
        total += bits * count
        wide += bits * count if bits >= 128 else 0
    return wide / total if total else None


def is_excepted(finding: Finding, kernel: str, target: str, case: str) -> bool:
    """Whether EXCEPTIONS accepts a finding."""
    return any(
        e.check == finding.check
        and re.fullmatch(e.kernel, kernel)
        and re.fullmatch(e.target, target)
        and re.fullmatch(e.case, case)
        for e in EXCEPTIONS
    )


class Use(NamedTuple):
    """A unit and the launches that it serves."""

    unit: Unit
    launches: list[tuple[Case, Recorded]]


def case_label(use: Use) -> str:
    """The name of a unit's first case and its constexprs: "int8, llama o 4096x4096, M=1, bf16; BLOCK_M=8 ..."."""
    values = " ".join(f"{name}={value}" for name, value in use.unit.values.items() if name != "PTX")
    return f"{use.launches[0][0].name}; {values}"


class Collected(NamedTuple):
    """`uses` by key; for each (target, case) `calls`, its launches, and `products`, what it leaves to torch.

    `failures`: calls that failed, by (op, why).
    """

    uses: dict[str, Use]
    calls: dict[tuple[str, Case], list[Recorded]]
    products: dict[tuple[str, Case], list[VendorProduct]]
    failures: dict[tuple[str, str], list[str]]


def collect(cases: Iterable[Case], targets: Sequence[Target]) -> Collected:
    """Call the launcher of each case for each target."""
    found, binders = Collected({}, {}, {}, {}), {}
    inputs = [(case, *case.make("meta")) for case in cases if case.op in gpu_ops()]
    for target in targets:
        for case, arguments, options in inputs:
            if target.name == "sm75" and case.dtype != torch.float16:
                continue
            call = partial(launcher(case.op), *arguments, **options)
            try:
                launches, products = record(call, target, binders)
            except (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                found.failures.setdefault((case.op, reason), []).append(f"{case.name}, {target.name}")
                continue
            found.calls[target.name, case], found.products[target.name, case] = launches, products
            for launched in launches:
                use = found.uses.setdefault(launched.unit.key, Use(launched.unit, []))
                use.launches.append((case, launched))
    return found


def cover(uses: Iterable[Use]) -> list[Use]:
    """A few uses that have every value of every constexpr, pointer type and option of each kernel on each target."""
    kept = []
    groups: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        groups.setdefault((use.unit.name, use.unit.target.name), []).append(use)
    for group in groups.values():
        features = {use.unit.key: _features(use.unit) for use in group}
        missing = set().union(*features.values())
        while missing:
            best = max(group, key=lambda use: len(features[use.unit.key] & missing))  # noqa: B023
            kept.append(best)
            missing -= features[best.unit.key]
    return kept


def _features(unit: Unit) -> set[tuple[str, str]]:
    signature = {(name, kind) for name, kind in unit.signature.items() if kind.startswith("*")}
    options = {(name, str(unit.options[name])) for name in ("num_warps", "num_stages")}
    return signature | options | {(name, str(value)) for name, value in unit.values.items()}


def uncovered(uses: Iterable[Use]) -> list[str]:
    """Kernels (`_..._kernel`) of the package that no case launches."""
    from triton.runtime.jit import JITFunction

    for op in gpu_ops():
        launcher(op)
    launched = {use.unit.kernel for use in uses}
    names = []
    for module in [m for name, m in sys.modules.items() if name.startswith("hf_quant.kernels.")]:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value not in launched:
                if value.fn.__module__ == module.__name__:
                    names.append(f"{module.__name__}.{name}")
    return names


def work_of(case: Case, launched: Recorded, built: Built) -> Work:
    """What a launch has to do, from its tensors and its tiles."""
    unique = {id(tensor): tensor for tensor in tensors(launched.arguments)}
    num_bytes = sum(t.nbytes * (case.touched if t.dim() == 3 else 1) for t in unique.values())
    kinds = {dot_kind(*pair) for pair in built.dots}
    kind = "fp8" if "f8" in kinds else "int8" if "i8" in kinds else "16bit" if kinds else None
    blocks, steps, num_ops = 1, None, float(case.num_ops)
    for size in launched.grid:
        blocks *= int(size)
    values = {**launched.arguments, **launched.unit.values}
    if all(isinstance(values.get(name), int) for name in ("M", "N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K")):
        values["K"] *= values.get("ALIGN", 1)  # kernels of 8-bit operands count K in such units
        M, N, K = (-(-values[name] // values[f"BLOCK_{name}"]) for name in "MNK")
        if case.op.startswith("grouped_mm"):  # every expert's rows fill tiles of their own
            experts = max(round(case.touched * values.get("E", _experts(launched))), 1)
            M = experts * -(-max(case.M // experts, 1) // values["BLOCK_M"])
        steps = M * N * K
        num_ops = 2.0 * steps * values["BLOCK_M"] * values["BLOCK_N"] * values["BLOCK_K"]
    elif launched.unit.name in ("_kv_decode_kernel", "_kv_prefill_kernel"):
        # Every tile of rows meets the tokens of its head, those of a causal chunk half of their own.
        steps = int(launched.grid[0]) * -(-(values["T"] - values["S"] // 2) // values["BLOCK_N"])
        rows = values["BLOCK_M"] if "BLOCK_M" in values else values["G"] * values["R"] * values["PARTS"]
        num_ops = 4.0 * steps * rows * values["BLOCK_N"] * values["D"]
    return Work(int(num_bytes), num_ops if kind else 0.0, kind, blocks, steps)


def _experts(launched: Recorded) -> int:
    return max((t.shape[0] for t in tensors(launched.arguments) if t.dim() == 3), default=1)


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
    parser.add_argument("--subset", choices=("all", "ci"), default="all")
    parser.add_argument("--targets", nargs="+", default=None, metavar="NAME", help=f"of {', '.join(ALL_TARGETS)}")
    parser.add_argument("--ops", nargs="+", choices=gpu_ops(), help="(default: all)")
    parser.add_argument("--cases", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    parser.add_argument("--show", default="sm90", help="rows of the table: a target's name, or all (default: sm90)")
    parser.add_argument("--json", type=Path, help="(default: build/aot/report-triton-<version>.json)")
    args = parser.parse_args()
    reason = check_environment()
    if reason is not None:
        print(f"aot_compile: {reason}", file=sys.stderr)
        return 2
    import triton

    names = args.targets or (CI_TARGETS if args.subset == "ci" else ALL_TARGETS)
    start = time.perf_counter()
    cases = [case for case in all_cases(args.ops) if re.search(args.cases, case.name)]
    collected = collect(cases, [target_named(name) for name in names])
    uses = list(collected.uses.values())
    chosen = cover(uses) if args.subset == "ci" else uses
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
    lines = []
    for use in uses:
        for finding in check_built(built[use.unit.key], use.unit.target):
            unit, (case, _) = use.unit, use.launches[0]
            if not is_excepted(finding, unit.name, unit.target.name, case_label(use)):
                lines.append(f"{unit.name} on {unit.target.name} ({case.op}: {case.name}): {finding.text}")
    return lines


def _chips(names: Sequence[str]) -> dict[str, Any]:
    return {name: CHIPS[name]._asdict() for name in names}


if __name__ == "__main__":
    sys.exit(main())
