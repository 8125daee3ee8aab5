"""Proves and measures the kernels on a GPU: one command, at most 8 minutes.

    python scripts/gpu_suite.py             # everything; writes scripts/results/<gpu>.json
    python scripts/gpu_suite.py --quick     # 3 minutes: fewer sizes, no models; writes nothing unless --json is given
    python scripts/gpu_suite.py --sections untried   # what is off until a GPU has run it, beside what serves
    python scripts/gpu_suite.py --dry-run   # the whole logic on tiny shapes and the CPU: its numbers mean nothing;
                                            # and the launches of every case of a real run, for an H100, without one

Sections run one after the other, each in a process and with a time budget of its own: a crash or a slow section costs
only itself. First the kernels are compiled by all cores into Triton's cache; then every op is compared with its
reference at real shapes; then the targets of gpulab/targets.py are measured. Needs torch, triton, transformers and
numpy, no network; rivals take part where they are installed, and diffusion models where diffusers is.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpulab.cases import Case
from gpulab.checks import check_case, check_no_recompilation, correctness_cases
from gpulab.measures import Record, table
from gpulab.rivals import FAILURES, first_line
from gpulab.targets import TARGETS, Target, judge
from gpulab.timing import (
    Ceilings,
    GraphTimer,
    HostTimer,
    Timer,
    environment,
    environment_line,
    gpu,
    installed,
    measure_ceilings,
)


SCRIPTS = Path(__file__).parent
RESULTS = SCRIPTS / "results"
GRACE = 15  # seconds after which a section that has had its time is killed
SKIPPED = "skipped"  # how the status of a section begins that lacks what it measures
MAX_FAILURES = 20  # a section with more ends: after a fault of the device everything fails


class Options(NamedTuple):
    """Options of a run, from the command line."""

    quick: bool = False
    dry_run: bool = False


class Writer:
    """Collects what a section finds, in a file that survives the section's process."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.deadline = path, deadline

    def write(self, kind: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "value": value}) + "\n")

    def is_late(self) -> bool:
        """Return True if the section should end, and record that in the file."""
        late = time.monotonic() > self.deadline
        if late:
            self.write("status", "stopped: out of time")
        return late


class Section(NamedTuple):
    """`run(timer, options, writer)` writes records; budgets in seconds."""

    name: str
    run: Callable[[Timer, Options, Writer], None]
    budget: int
    quick_budget: int
    by_name: bool = False  # runs only if it is named


def measured(timer: Timer, options: Options, writer: Writer, runs: Iterator[Callable[[Ceilings], Record]]) -> None:
    """Ceilings first, then each run while there is time."""
    small = {"copy_bytes": 2**20, "size": 64} if options.dry_run else {}
    ceilings = measure_ceilings(timer, **small)
    writer.write("ceilings", ceilings._asdict())
    failed = 0
    for run in runs:
        if writer.is_late() or failed > MAX_FAILURES:
            return
        try:
            writer.write("record", run(ceilings))
        except FAILURES as error:
            failed += 1
            writer.write("failure", first_line(error))


def warm_up(timer: Timer, options: Options, writer: Writer) -> None:
    """Compile what the other sections launch, by all cores."""
    from gpulab.cells import CELLS
    from gpulab.collect import rehearse
    from hf_quant.kernels.gpu.launch import target_of

    cases = correctness_cases(quick=options.quick)
    cases += [cell.case for cells in CELLS.values() for cell in cells(options.quick, False)]
    if options.dry_run:  # of real sizes, on tensors that hold nothing: what a real run would stumble over
        failures = rehearse(cases, [target_of(timer.device)])
        for (op, reason), where in failures.items():
            writer.write("failure", f"{op}: {reason} ({where[0]}; {len(where)} calls)")
    _compile(cases, timer, options, writer)


def _compile(cases: list[Case], timer: Timer, options: Options, writer: Writer) -> None:
    """Compile what cases launch, by all cores."""
    from gpulab.build import OUT_OF_TIME, check_environment, warm
    from gpulab.collect import collect
    from hf_quant.kernels.gpu.launch import target_of

    if check_environment() is not None:  # the interpreter, in a dry run
        writer.write("note", f"{len(cases)} cases, nothing compiled: {check_environment()}")
        return
    collected = collect(cases, [target_of(timer.device)])
    for (op, reason), where in collected.failures.items():
        writer.write("failure", f"{op}: {reason} ({where[0]})")
    units = [use.unit for use in collected.uses.values()]
    start = time.monotonic()
    if options.dry_run:
        writer.write("note", f"{len(cases)} cases, {len(units)} kernels to compile")
        return
    built = warm(units, seconds=writer.deadline - time.monotonic())
    errors = [(unit.name, built[unit.key].error) for unit in units if built[unit.key].error is not None]
    late = sum(error == OUT_OF_TIME for _, error in errors)
    for name, error in errors:
        if error != OUT_OF_TIME:
            writer.write("failure", f"{name}: {error}")
    writer.write("note", f"{len(units) - len(errors)} kernels compiled in {time.monotonic() - start:.0f} s")
    if late:
        writer.write("note", f"{late} kernels left to their first launch: out of time")


def correctness(timer: Timer, options: Options, writer: Writer) -> None:
    """Every op against its reference."""
    torch.manual_seed(0)
    passed = failed = 0
    for case in correctness_cases(quick=options.quick, tiny=options.dry_run):
        if writer.is_late() or failed > MAX_FAILURES:
            break
        reason = _reason(partial(check_case, case, timer.device))
        if reason is None:
            passed += 1
        else:
            failed += 1
            writer.write("failure", f"{case.op}: {case.name}: {reason}")
    reason = _reason(partial(check_no_recompilation, timer.device, tiny=options.dry_run))
    if reason is not None:
        writer.write("failure", f"recompilation: {reason}")
    writer.write("note", f"{passed} cases are within the tolerance of their reference, and their second calls equal")


def _reason(check: Callable[[], str | None]) -> str | None:
    """Return the reason for which a check fails, or the error that it raises; None if it passes."""
    try:
        return check()
    except FAILURES as error:
        return first_line(error)


def _cells(name: str) -> Callable[[Timer, Options, Writer], None]:
    def run(timer: Timer, options: Options, writer: Writer) -> None:
        from gpulab.cells import CELLS

        cells = CELLS[name](options.quick, options.dry_run)
        measured(timer, options, writer, (lambda c, cell=cell: cell.run(timer, c) for cell in cells))

    return run


def models(timer: Timer, options: Options, writer: Writer) -> None:
    """`generate` of a model of Llama-3.1-8B's shape with random weights, and quantizing it."""
    from gpulab.suite_models import model_runs

    measured(timer, options, writer, model_runs(timer.device, tiny=options.dry_run))


def latent(timer: Timer, options: Options, writer: Writer) -> None:
    """A token of a model with latent attention behind a long prompt."""
    from gpulab.suite_latent import latent_runs

    measured(timer, options, writer, latent_runs(timer.device, tiny=options.dry_run))


def diffusion(timer: Timer, options: Options, writer: Writer) -> None:
    """Blocks of Flux.1-dev and CogVideoX-5b, extrapolated to whole models; skipped without diffusers."""
    if not installed("diffusers"):
        writer.write("status", f"{SKIPPED}: diffusers is not installed")
        return
    from gpulab.suite_diffusion import diffusion_runs

    writer.write("note", "seconds and bytes of whole models are extrapolated from one and two groups of blocks")
    for run in diffusion_runs(timer.device, tiny=options.dry_run):
        if writer.is_late():
            return
        for found in run():
            if "failure" not in found:
                writer.write("record", found)
            else:
                kind = "failure" if found["is_ours"] else "note"
                writer.write(kind, f"{found['candidate']}: {found['failure']}")


def untried(timer: Timer, options: Options, writer: Writer) -> None:
    """Kernels that no GPU has run yet: whether they are right, and how fast beside what serves without them."""
    from gpulab import untried as lab

    cases = lab.untried_cases(quick=options.quick, tiny=options.dry_run)
    with lab.untried():
        _compile(cases, timer, options, writer)
    measured(timer, options, writer, (partial(lab.measure_untried, timer, case) for case in cases))


SECTIONS = (
    Section("warm_up", warm_up, 65, 35),
    Section("correctness", correctness, 60, 35),
    Section("weights", _cells("weights"), 80, 35),
    Section("dynamic", _cells("dynamic"), 55, 25),
    Section("rowwise", _cells("rowwise"), 25, 15),
    Section("experts", _cells("experts"), 45, 20),
    Section("attention", _cells("attention"), 30, 15),
    Section("models", models, 60, 0),
    Section("diffusion", diffusion, 50, 0),
    Section("latent", latent, 40, 40, by_name=True),
    Section("untried", untried, 180, 90, by_name=True),
)


def run_section(section: Section, options: Options, path: Path, budget: float) -> None:
    """In this process; what it raises ends the process."""
    device = torch.device("cpu") if options.dry_run else gpu()
    timer = HostTimer() if options.dry_run else GraphTimer(device)
    torch.manual_seed(0)
    writer, compiled = Writer(path, time.monotonic() + budget), []
    if installed("triton"):
        import triton

        triton.knobs.compilation.listener = partial(_note_miss, compiled)
    with torch.no_grad():
        section.run(timer, options, writer)
    if compiled:
        writer.write("note", f"{len(compiled)} kernels were compiled at their launch, such as {compiled[0]}")


def _note_miss(compiled: list[str], *, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.append(getattr(src, "name", "one"))


def in_process(section: Section, options: Options, path: Path, budget: float) -> str:
    """Run a section in a process of its own; "done", or how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--section", section.name]
    command += ["--output", str(path), "--budget", str(budget)]
    command += ["--quick"] * options.quick + ["--dry-run"] * options.dry_run
    return wait_for(command, budget + GRACE)


def wait_for(command: list[str], seconds: float) -> str:
    """Run a command; "done", or how it ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output = process.communicate(timeout=seconds)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
        process.communicate()
        return f"killed after {seconds:.0f} s"
    if process.returncode == 0:
        return "done"
    print(output[-4000:], file=sys.stderr)
    return f"ended with status {process.returncode}: {(output.splitlines() or ['no message'])[-1][:300]}"


def read_section(path: Path, status: str) -> dict[str, Any]:
    """{"status", "records", "ceilings", "failures", "notes"} of what a section wrote."""
    found: dict[str, Any] = {"status": status, "records": [], "failures": [], "notes": []}
    for line in path.read_text().splitlines() if path.is_file() else ():
        entry = json.loads(line)
        kind, value = entry["kind"], entry["value"]
        if kind in ("ceilings", "status"):
            if kind == "ceilings" or status == "done":
                found[kind] = value
        else:
            found[f"{kind}s"].append(value)
    return found


def report(sections: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """(the table, whether everything was measured and passed)."""
    from hf_quant.planning import format_table

    rows = [("target", "what", "M", "against", "wanted", "got", "")]
    verdicts = judge(TARGETS, sections)
    for verdict in verdicts:
        target = verdict.target
        rows.append(
            (
                target.id,
                target.what,
                ",".join(map(str, target.tokens)) if len(target.tokens) < 7 else f"{target.tokens[0]}-",
                target.versus,
                f"{'<=' if target.is_upper else '>='} {target.limit:g}",
                "" if verdict.value is None else f"{verdict.value:.2f}",
                verdict.text() + (f" ({verdict.reason})" if verdict.value is not None and verdict.reason else ""),
            )
        )
    lines = [format_table(rows)]
    missed: dict[str, Target] = {}
    for verdict in verdicts:
        if verdict.passed is False:
            missed.setdefault(verdict.target.next, verdict.target)
    lines += [f"next for {target.id} {target.what}: {what}" for what, target in missed.items()]
    failures = [f"{name}: {line}" for name, found in sections.items() for line in found["failures"]]
    for name, found in sections.items():
        ceilings = found.get("ceilings")
        speed = f"; copy {ceilings['copy']:.0f} GB/s, bf16 {ceilings['gemm']:.0f} TFLOP/s" if ceilings else ""
        lines.append(f"section {name}: {'; '.join([found['status'], *found['notes']])}{speed}")
    if "untried" in sections:
        lines.append(table(sections["untried"]["records"]))
    lines += [f"FAILED {line}" for line in failures]
    done = all(found["status"] == "done" or found["status"].startswith(SKIPPED) for found in sections.values())
    return "\n".join(lines), done and not failures and all(v.passed is not False for v in verdicts)


def run_all(
    options: Options, names: list[str], runner: Callable[..., str], save: Callable[[dict], None]
) -> dict[str, dict[str, Any]]:
    """{section: what it found}; `runner` as `in_process`; `save` is called after each.

    What a section leaves of its budget is added to the next one's.
    """
    found: dict[str, dict[str, Any]] = {}
    spare = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for section in SECTIONS:
            budget = section.quick_budget if options.quick else section.budget
            if (section.name not in names and (names or section.by_name)) or not budget:
                continue
            path = Path(folder) / f"{section.name}.jsonl"
            start = time.monotonic()
            status = runner(section, options, path, budget + spare)
            seconds = time.monotonic() - start
            spare = max(budget + spare - seconds, 0.0)
            found[section.name] = read_section(path, status)
            found[section.name]["seconds"] = round(seconds, 1)
            print(f"{section.name}: {found[section.name]['status']}, {seconds:.0f} s", flush=True)
            save(found)
    return found


def main() -> int:
    """Run, print, write; exit status 0 if everything passed, 1 if not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--sections", nargs="+", choices=[s.name for s in SECTIONS], default=[])
    parser.add_argument("--json", type=Path, help="(default: scripts/results/<gpu>.json for a full run)")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = Options(quick=args.quick, dry_run=args.dry_run)
    # gpulab/build.py sets it, and it is part of Triton's cache key: all sections need it to find what one compiled.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if not args.dry_run and gpu() is None:
        print("gpu_suite: no CUDA or ROCm GPU here; --dry-run runs its logic on the CPU", file=sys.stderr)
        return 2
    if args.section:
        run_section(next(s for s in SECTIONS if s.name == args.section), options, args.output, args.budget)
        return 0
    device = torch.device("cpu") if args.dry_run else gpu()
    print(f"python {' '.join(sys.argv)}\n{environment_line(device)}", flush=True)
    start = time.monotonic()
    path = args.json
    if path is None and not (args.quick or args.dry_run or args.sections):
        name = torch.cuda.get_device_name(device)
        path = RESULTS / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    sections = run_all(options, args.sections, in_process, partial(save, path, device))
    text, passed = report(sections)
    print(f"\n{text}\n{time.monotonic() - start:.0f} s" + (f"; written: {path}" if path else ""))
    return 0 if passed else 1


def save(path: Path | None, device: torch.device, sections: dict[str, dict[str, Any]]) -> None:
    """Write what is known so far; None: nowhere."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        targets = [{**v.target._asdict(), "value": v.value, "verdict": v.text()} for v in judge(TARGETS, sections)]
        found = {"environment": environment(device), "targets": targets, "sections": sections}
        path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
