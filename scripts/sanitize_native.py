"""Builds the native kernels with sanitizers, runs random calls of them, and fails on any finding; also: make sanitize

    python scripts/sanitize_native.py                          # some minutes, most of them for the builds
    python scripts/sanitize_native.py --cases 5000 --seed 1    # what was built is kept in build/sanitize
    python scripts/sanitize_native.py --sets avx2              # the portable kernels are always among them
    python scripts/sanitize_native.py --sets                   # a minute

- AddressSanitizer and UndefinedBehaviorSanitizer: memory, shifts, overflows, alignment. Every buffer of a call, and
  what the kernels work in, ends where a page without access begins: that catches masked instructions, which
  AddressSanitizer does not see.
- ThreadSanitizer, with the thread pool of the kernels, which serves where torch brings no OpenMP runtime; several
  threads call at once.

Both compare every result with plain sums in fp64 (cpulab/native_driver.cpp). Needs nothing but Python, Linux, and g++
or clang++ (CXX, if set) with its sanitizers.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "hf_quant" / "kernels" / "native" / "src"
DRIVER = Path(__file__).parent / "cpulab" / "native_driver.cpp"
CACHE = ROOT / "build" / "sanitize"
TIMEOUT = 1200  # seconds; a run of the default number of cases takes 20 to 300
COMMON = ("-std=c++17", "-O1", "-g1", "-w", "-pthread")


class InstructionSet(NamedTuple):
    """A source besides the portable ones.

    Attributes:
        flags: words that /proc/cpuinfo has on a CPU with it.
        better: the set with nearly the same code that serves instead where the CPU has both.
        absent: C++ that stands for it where it is not built.
    """

    flags: str
    better: str | None
    absent: str


# Those that take longest to build first.
_VNNI = "avx512vl avx512_vnni"
INSTRUCTION_SETS = {
    "avx512": InstructionSet(
        f"{_VNNI} avx512vbmi gfni", None, "const Kernels kAvx512{}; const Kernels* amx_kernels() { return nullptr; }"
    ),
    "avx512_vnni": InstructionSet(_VNNI, "avx512", "const Kernels kAvx512Vnni{};"),
    "avx2": InstructionSet("avx2 fma f16c bmi2", None, "const Kernels kAvx2{};"),
    "neon": InstructionSet("asimddp", None, "const Kernels kNeon{}; bool has_dot_products() { return false; }"),
    "avx_vnni_evex": InstructionSet(_VNNI, "avx_vnni", "bool (*const kAvxVnniEvexMatmul)(const Product&) = nullptr;"),
    "avx_vnni": InstructionSet("avx_vnni", None, "bool (*const kAvxVnniMatmul)(const Product&) = nullptr;"),
}


class Build(NamedTuple):
    """A build of the kernels: its flags and its callers.

    Attributes:
        kernels: flags for them.
        driver: flags for the driver, which is not what is examined, unless what it reads could be written still.
        parallel: further flags for parallel.cpp.
        share: of the cases; ThreadSanitizer needs fewer.
        callers: threads that call at once.
    """

    kernels: tuple[str, ...]
    driver: tuple[str, ...]
    parallel: tuple[str, ...]
    share: float
    callers: int


def builds(is_clang: bool) -> dict[str, Build]:
    """The builds by name. Checks of addresses are calls: inlined, GCC 12 takes 3 minutes for the AVX-512 kernels."""
    threshold = "asan-instrumentation-with-call-threshold=0"
    address = (
        "-fsanitize=address,undefined",
        *("-fno-sanitize=null,object-size,vptr", "-fno-sanitize-recover=undefined"),  # the first find what pages find
        *(("-mllvm", f"-{threshold}") if is_clang else ("--param", threshold)),
    )
    thread = ("-fsanitize=thread",)
    return {
        "address and undefined": Build(
            address, ("-O2", "-DGUARD_SCRATCH"), ("-Dthread_scratch=unused_scratch",), 1, 2
        ),
        "thread": Build(thread, thread, (), 0.25, 3),
    }


def find_compiler() -> tuple[str, bool] | None:
    """(a C++ compiler, whether it is clang), None if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        command = shutil.which(name) if name else None
        if command is not None:
            version = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
            return command, "clang" in version
    return None


def launcher(compiler: str, build: Build) -> tuple[str, ...] | None:
    """Return the command that starts a program of this build, () for none; None if such programs do not run here.

    Where addresses are random in more bits than ThreadSanitizer expects, it runs without that randomness only.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text("#include <thread>\nint main() { std::thread([] {}).join(); }\n")
        command = [compiler, *COMMON, *build.kernels, source, "-o", program]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        for start in ((), ("setarch", platform.machine(), "-R")):
            if start and shutil.which(start[0]) is None:
                continue
            if subprocess.run([*start, program], capture_output=True, check=False).returncode == 0:
                return start
    return None


def sets_here() -> list[str]:
    """The instruction sets of this CPU, of those with nearly the same code the better one; [] if it is not known."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    found = [name for name, each in INSTRUCTION_SETS.items() if flags.issuperset(each.flags.split())]
    return [name for name in found if INSTRUCTION_SETS[name].better not in found]


def compile_commands(compiler: str, build: Build, sources: Path, folder: Path, sets: Sequence[str]) -> list[list[str]]:
    """A command for each source, those that take longest first; the last argument is the object file."""
    absent = folder / "absent.cpp"
    lines = [each.absent for name, each in INSTRUCTION_SETS.items() if name not in sets]
    absent.write_text("\n".join(('#include "kernels.h"', "namespace hfq {", *lines, "}")))
    names = [*sets, "portable", "mixture", "offsets", "parallel", "sets"]
    commands = []
    for source in [*(sources / f"{name}.cpp" for name in names), absent, DRIVER]:
        flags = build.driver if source == DRIVER else build.kernels
        flags += build.parallel if source.stem == "parallel" else ()
        target = str(folder / f"{source.stem}.o")
        commands.append([compiler, *COMMON, *flags, f"-I{sources}", "-c", str(source), "-o", target])
    return commands


def make(
    compiler: str, wanted: dict[str, Build], sources: Path, sets: Sequence[str]
) -> tuple[dict[str, Path], str | None]:
    """(the program of each build, what failed), with as many compilers at once as there are processors."""
    text = b"".join(path.read_bytes() for path in [DRIVER, Path(__file__), *sorted(sources.glob("*.*"))])
    programs, commands = {}, {}
    for name, build in wanted.items():
        key = hashlib.sha256(repr((compiler, build, sets)).encode() + text).hexdigest()[:16]
        programs[name] = CACHE / key / "driver"
        if not programs[name].exists():
            programs[name].parent.mkdir(parents=True, exist_ok=True)
            commands[name] = compile_commands(compiler, build, sources, programs[name].parent, sets)

    def run(command: list[str]) -> str | None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"{' '.join(command)}\n{done.stderr}" if done.returncode != 0 else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [command for commands_at_once in zip(*commands.values()) for command in commands_at_once]
        errors = [error for error in pool.map(run, jobs) if error]
    for name, compiled in commands.items():
        objects, unfinished = [command[-1] for command in compiled], f"{programs[name]}.new"
        if not errors:
            error = run([compiler, *COMMON, *wanted[name].kernels, *objects, "-o", unfinished])
            errors += [error] if error else []
        if not errors:
            os.replace(unfinished, programs[name])
        for path in objects:  # 50 MB each
            Path(path).unlink(missing_ok=True)
    return programs, errors[0] if errors else None


def run_driver(name: str, command: list[str]) -> bool:
    """Run a program and print its output; return True if it finds nothing."""
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",  # needs ptrace, which containers forbid; buffers live as long as threads
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=TIMEOUT, errors="replace"
        )
    except subprocess.TimeoutExpired:
        print(f"sanitize ({name}): no end after {TIMEOUT} s; again: {' '.join(command)}")
        return False
    if done.returncode != 0:
        print(f"{done.stdout}{done.stderr}")
        print(f"sanitize ({name}): found something, see above; again: {' '.join(command)}")
        return False
    print(f"sanitize ({name}): {done.stdout.strip()}; nothing found in {time.perf_counter() - began:.0f} s")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600, help="random calls of each kernel (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder of the kernels' sources")
    parser.add_argument(
        "--sets",
        nargs="*",
        choices=tuple(INSTRUCTION_SETS),
        default=sets_here(),
        help="instruction sets besides the portable kernels (default: those of this CPU: %(default)s)",
    )
    parser.add_argument("--optional", action="store_true", help="succeed where no compiler has sanitizers")
    args = parser.parse_args(arguments)
    found = find_compiler()
    if found is None:
        print("sanitize: no C++ compiler found (tried CXX, g++, clang++)")
        return 0 if args.optional else 1
    compiler, is_clang = found
    wanted, starts, missing = {}, {}, []
    for name, build in builds(is_clang).items():
        start = launcher(compiler, build)
        if start is None:
            missing.append(name)
        else:
            wanted[name], starts[name] = build, start
    for name in missing:
        print(f"sanitize: {compiler} builds no program with the sanitizers {name} that runs here")
    began = time.perf_counter()
    programs, error = make(compiler, wanted, args.sources, args.sets)
    if error is not None:
        print(f"sanitize: the build failed: {error}")
        return 1
    print(f"sanitize: {len(wanted)} builds by {compiler} in {time.perf_counter() - began:.0f} s")

    def run(name: str) -> bool:
        counts = (max(int(args.cases * wanted[name].share), 1), args.seed, wanted[name].callers)
        return run_driver(name, [*starts[name], str(programs[name]), *map(str, counts)])

    with ThreadPoolExecutor() as pool:
        passed = all([*pool.map(run, wanted)])
    return 0 if passed and (args.optional or not missing) else 1


if __name__ == "__main__":
    sys.exit(main())
