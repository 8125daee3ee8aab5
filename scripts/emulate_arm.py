"""Builds the native kernels for Arm and runs random calls of them in an emulator; also: make arm

    python scripts/emulate_arm.py
    python scripts/emulate_arm.py --cases 2000 --seed 1

The calls come from cpulab/native_driver.cpp, which compares every result with plain sums in fp64; every buffer ends
where a page without access begins. Needs zig (`pip install ziglang`) and qemu-aarch64 (package qemu-user or
qemu-user-static); says so and succeeds where they are missing. It proves that results are right, not that they are
fast.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from sanitize_native import COMMON, DRIVER, SOURCES, run_driver


FLAGS = (*COMMON, "-target", "aarch64-linux-musl", "-O2", f"-I{SOURCES}")
DEFINES = {  # what the kernels work in is guarded, too
    "parallel": ("-Dthread_scratch=unused_scratch",),
    DRIVER.stem: ("-DGUARD_SCRATCH", "-DNO_SANITIZER"),
}


def find_tools() -> tuple[list[str], str] | str:
    """(compiler, emulator), or what is missing."""
    if find_spec("ziglang") is not None:
        compiler = [sys.executable, "-m", "ziglang", "c++"]
    elif shutil.which("zig"):
        compiler = ["zig", "c++"]
    else:
        return "no zig (pip install ziglang)"
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    return (compiler, emulator) if emulator else "no qemu-aarch64 (package qemu-user or qemu-user-static)"


def build(compiler: list[str], folder: Path) -> str | None:
    """Make folder/driver; return what the compiler said if it failed."""

    def run(arguments: Sequence[object]) -> str:
        done = subprocess.run([*compiler, *map(str, arguments)], capture_output=True, text=True, check=False)
        return done.stderr if done.returncode != 0 else ""

    sources = [*(SOURCES / f"{name}.cpp" for name in ("neon", "portable", "parallel", "sets")), DRIVER]
    commands = [[*FLAGS, *DEFINES.get(s.stem, ()), "-c", s, "-o", folder / f"{s.stem}.o"] for s in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = "".join(pool.map(run, commands))
    return errors or run([*FLAGS, "-static", *(command[-1] for command in commands), "-o", folder / "driver"]) or None


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="random calls of each kernel (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    tools = find_tools()
    if isinstance(tools, str):
        print(f"emulate_arm: skipped, {tools}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        error = build(tools[0], Path(folder))
        if error is not None:
            print(f"emulate_arm: the build failed: {error}")
            return 1
        command = [tools[1], "-cpu", "max", str(Path(folder, "driver")), str(args.cases), str(args.seed), "1"]
        return 0 if run_driver("Arm", command) else 1


if __name__ == "__main__":
    sys.exit(main())
