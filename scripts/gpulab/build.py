"""From launches to machine code without a GPU: what Triton's JIT would compile, compiled in parallel and cached.

`collect` calls launchers on tensors that hold nothing under `record_launches` and keeps what differs to the compiler;
`build` compiles that for any target. Used by aot_compile.py, tune.py, bench_kernels.py --model and, to fill Triton's
own cache before the first launch, by gpu_suite.py.
"""

import contextlib
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpulab import machine_code, rings, wgmma
from gpulab.cases import gpu_ops, launcher
from gpulab.machine_code import Resources, Summary
from hf_quant.kernels.gpu.launch import HAS_TRITON, TARGETS, Launch, Target, interpreting, pretend, record_launches


os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns about its default, which this is
CACHE = Path(__file__).parents[2] / "build" / "aot"
TIMEOUT = 180  # seconds for one kernel; the largest take some 10
OUT_OF_TIME = "not compiled: out of time"


class Unit(NamedTuple):
    """One thing to compile: a kernel, specialized as Triton's JIT does it, for one target.

    `key` is the same for launches that run the same machine code, in every process; `values` are constexprs by name.
    """

    key: str
    kernel: Any
    target: Target
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def num_warps(self) -> int:
        return self.options["num_warps"]


class Built(NamedTuple):
    """Result of compiling a unit; if that failed, `error` gives the reason and the rest is empty.

    hazards: see gpulab/wgmma.py and gpulab/rings.py. warnings: lines of ptxas with C75xx, about products that wait
    for each other.
    """

    error: str | None
    shared: int = 0
    resources: Resources = Resources(0, 0)
    summary: Summary = Summary(0, 0, {}, {}, 0)
    dots: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    hazards: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def check_environment() -> str | None:
    """Return the reason for which kernels cannot be compiled in this process; None if they can."""
    if not HAS_TRITON:
        return "triton is not installed: pip install triton (Linux)"
    if interpreting():
        return "TRITON_INTERPRET is set, and Triton compiles nothing then: unset it"
    return None


def gpu_target(target: Target) -> Any:
    """Triton's own name of a target."""
    from triton.backends.compiler import GPUTarget

    if target.is_nvidia:
        return GPUTarget("cuda", target.capability, 32)
    return GPUTarget("hip", target.name, 64)


def specialize(launch: Launch, target: Target, binders: dict[Any, Callable]) -> tuple[Unit, dict[str, Any]]:
    """(what the JIT would compile for a launch, its arguments by name); `binders` is a cache of the caller's."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    if (kernel, target) not in binders:
        backend = make_backend(gpu_target(target))
        binders[kernel, target] = backend, create_function_from_signature(kernel.signature, kernel.params, backend)
    backend, bind = binders[kernel, target]
    options = {**launch.options, "debug": False}
    arguments, specialization, rest = bind(*launch.args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, arguments, specialization, rest)
    values = {kernel.arg_names[path[0]]: value for path, value in constants.items() if len(path) == 1}
    parts = [kernel.cache_key, target.name, sorted(signature.items()), sorted(constants.items(), key=str)]
    parts += [sorted((k, v) for k, v in attributes.items() if v), parsed.hash()]
    key = hashlib.sha256(str(parts).encode()).hexdigest()
    return Unit(key, kernel, target, signature, constants, attributes, dict(parsed.__dict__), values), arguments


class Recorded(NamedTuple):
    """A launch that a call would make: what to compile for it, its grid, its arguments by name."""

    unit: Unit
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class VendorProduct(NamedTuple):
    """A product [M, K] x [K, N] that a launcher leaves to torch."""

    M: int
    N: int
    K: int
    itemsize: int


class _NestedOps(TorchDispatchMode):
    """Ops that a launcher calls on meta tensors go to their launchers, as on a GPU; torch's products are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[VendorProduct] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.products.append(VendorProduct(a.shape[0], b.shape[1], a.shape[1], a.element_size()))
        if func.namespace == "hf_quant" and func._schema.name.split("::")[1] in gpu_ops():
            with self:
                return launcher(func._schema.name.split("::")[1])(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def record_call(call: Callable[[], object], target: Target) -> tuple[list[Launch], list[VendorProduct]]:
    """The launches of `call`, on meta tensors, for a target, and the products that it leaves to torch."""
    nested = _NestedOps()
    with pretend(target), record_launches() as launches, nested:
        call()
    return launches, nested.products


def record(
    call: Callable[[], object], target: Target, binders: dict[Any, Callable]
) -> tuple[list[Recorded], list[VendorProduct]]:
    """`record_call` with what the launches need compiled."""
    launches, products = record_call(call, target)
    found = []
    for launch in launches:
        unit, arguments = specialize(launch, target, binders)
        found.append(Recorded(unit, launch.grid, arguments))
    return found, products


def _compile(unit: Unit, cache_dir: str | None = None, *, dump_log: bool = False) -> Any:
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    if cache_dir is not None:
        triton.knobs.cache.dir = cache_dir
    if dump_log:
        triton.knobs.nvidia.dump_ptxas_log = True
    source_type = GluonASTSource if unit.kernel.is_gluon() else ASTSource
    source = source_type(unit.kernel, unit.signature, unit.constants, unit.attributes)
    return triton.compile(source, target=gpu_target(unit.target), options=unit.options)


def compile_unit(unit: Unit, cache_dir: str | None = None) -> Built:
    """Compile in this process; raises what the compiler raises. `cache_dir` replaces Triton's own cache."""
    start = time.perf_counter()
    said, hazards = io.StringIO(), []
    try:
        with contextlib.redirect_stdout(said):
            compiled = _compile(unit, cache_dir, dump_log=True)
    except Exception:
        print(said.getvalue())  # what the compiler says of its error
        raise
    asm = compiled.asm
    if "cubin" in asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(asm["cubin"])
            file.flush()
            dump = _cuobjdump(file.name)
            resources, instructions = machine_code.parse_resource_usage(dump), machine_code.parse_sass(dump)
            hazards = wgmma.hazards(instructions)
    else:
        resources = machine_code.parse_gcn_metadata(asm["amdgcn"])
        instructions = machine_code.parse_gcn(asm["amdgcn"])
    return Built(
        error=None,
        shared=compiled.metadata.shared,
        resources=resources,
        summary=machine_code.summarize(instructions),
        dots=tuple(sorted(machine_code.dots(asm["ttgir" if unit.kernel.is_gluon() else "ttir"]))),
        seconds=time.perf_counter() - start,
        hazards=(*(hazard.text for hazard in hazards), *rings.still_barriers(asm.get("ttgir", ""))),
        warnings=ptxas_warnings(said.getvalue()),
    )


def ptxas_warnings(log: str) -> tuple[str, ...]:
    """The lines of ptxas about products of four warps that it makes wait for each other: C7510, C7514, C7515, ..."""
    return tuple(dict.fromkeys(line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)))


def _cuobjdump(path: str) -> str:
    """The resources and the machine code of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", "-sass", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(units: Iterable[Unit], *, workers: int | None = None, cache: Path | None = CACHE) -> dict[str, Built]:
    """Compile units, each in a process of its own, so that a crash of the compiler costs one; returns {key: result}.

    Results are stored in `cache` by Triton's version and key, so that a second run compiles nothing that succeeded;
    None: nothing is kept.
    """
    import triton

    parsers = (Path(module.__file__).read_bytes() for module in (machine_code, rings, wgmma))
    parser = hashlib.sha256(b"".join(parsers)).hexdigest()[:8]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if cache is None else cache / f"triton-{triton.__version__}-{parser}"
        folder.mkdir(parents=True, exist_ok=True)
        todo, found = {}, {}
        for unit in units:
            path = folder / f"{unit.key[:32]}.json"
            if path.is_file():
                found[unit.key] = _read(path)
            else:
                todo[unit.key] = (unit, path)
        found.update(_in_processes(todo, workers or max(len(os.sched_getaffinity(0)), 1), _compile_to))
    return found


def warm(units: Iterable[Unit], *, seconds: float = math.inf) -> dict[str, Built]:
    """Compile into Triton's own cache, where the JIT finds it: many processes instead of one at the first launches.

    After `seconds` nothing new is started. If there is a GPU, what launches a kernel is made, too: Triton 3.6 compiles
    some C for each signature.
    """
    make_launcher = None
    if torch.cuda.is_available():
        import triton

        make_launcher = triton.runtime.driver.active.launcher_cls  # here: a driver compiles something, too, once
    with tempfile.TemporaryDirectory() as scratch:
        todo = {unit.key: (unit, Path(scratch) / f"{unit.key[:32]}.json") for unit in units}
        work = partial(_warm_to, make_launcher)
        return _in_processes(todo, max(len(os.sched_getaffinity(0)), 1), work, seconds)


def _compile_to(unit: Unit, path: Path) -> None:
    _log_to(path.with_suffix(".log"))
    with tempfile.TemporaryDirectory() as cache_dir:
        _write(compile_unit(unit, cache_dir), path)


def _warm_to(make_launcher: Callable | None, unit: Unit, path: Path) -> None:
    _log_to(path.with_suffix(".log"))
    compiled = _compile(unit)
    if make_launcher is not None:
        make_launcher(compiled.src, compiled.metadata)
    _write(Built(None), path)


def _log_to(path: Path) -> None:
    """Send what this process prints to a file: MLIR and ptxas write their complaints to standard error."""
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _in_processes(
    todo: dict[str, tuple[Unit, Path]], workers: int, work: Callable[[Unit, Path], None], seconds: float = math.inf
) -> dict[str, Built]:
    """Run `work` on each, `workers` at a time, each in a forked process; none is started after `seconds`."""
    from triton.runtime.cache import triton_key

    if todo:
        triton_key()  # a hash of the whole compiler, some seconds: kept here, the processes have it
    context = multiprocessing.get_context("fork")  # kernels cannot be pickled
    end = time.monotonic() + seconds
    waiting = itertools.takewhile(lambda _: time.monotonic() < end, todo.items())
    running: dict[str, tuple[Any, Path, float]] = {}
    found: dict[str, Built] = {}
    for done in _steps(waiting, running, workers, context, work):
        process, path, started = running.pop(done)
        log = path.with_suffix(".log")
        if path.is_file():
            found[done] = _read(path)
        elif process.exitcode is None:
            process.kill()
            found[done] = Built(f"compiler still running after {time.monotonic() - started:.0f} s")
        else:
            said = log.read_text(errors="replace").strip().splitlines()
            errors = [line.strip() for line in said if re.search(r"error", line, re.IGNORECASE)][:1] + said[-1:]
            found[done] = Built(f"does not compile (status {process.exitcode}): {' ... '.join(errors)}"[:500])
        log.unlink(missing_ok=True)
        if len(found) % 50 == 0:
            print(f"compiled {len(found)} of {len(todo)}", file=sys.stderr, flush=True)
    return {key: found.get(key, Built(OUT_OF_TIME)) for key in todo}


def _steps(waiting: Iterator, running: dict, workers: int, context: Any, work: Callable) -> Iterator[str]:
    """Start processes as others end; yields the key of each that has ended, or has had its time."""
    exhausted = False
    while running or not exhausted:
        while len(running) < workers and not exhausted:
            following = next(waiting, None)
            if following is None:
                exhausted = True
            else:
                key, (unit, path) = following
                process = context.Process(target=work, args=(unit, path), daemon=True)
                process.start()
                running[key] = (process, path, time.monotonic())
        if running:
            multiprocessing.connection.wait([process.sentinel for process, *_ in running.values()], timeout=1)
        for key, (process, _, started) in list(running.items()):
            if not process.is_alive() or time.monotonic() - started > TIMEOUT:
                if not process.is_alive():
                    process.join()
                yield key


def _write(built: Built, path: Path) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(built._asdict()))
    part.replace(path)


def _read(path: Path) -> Built:
    fields = json.loads(path.read_text())
    fields["resources"] = Resources(*fields["resources"])
    fields["summary"] = Summary(*fields["summary"])
    fields["dots"] = tuple(tuple(pair) for pair in fields["dots"])
    fields["hazards"], fields["warnings"] = tuple(fields["hazards"]), tuple(fields["warnings"])
    return Built(**fields)


def tensors(arguments: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among a launch's arguments, and those of tensor descriptors."""
    values = (getattr(value, "base", value) for value in arguments.values())
    return (value for value in values if isinstance(value, torch.Tensor))


def target_named(name: str) -> Target:
    """Raises ValueError if there is none of that name that is compiled for."""
    known = [n for n in TARGETS if n != "xpu"]  # Intel's compiler is not in Triton's wheel
    if name not in known:
        raise ValueError(f"target {name!r}; known: {', '.join(known)}")
    return TARGETS[name]
