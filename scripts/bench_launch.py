"""Host time of a launch of each Triton kernel, without a GPU: Triton's JIT against hf_quant's own way.

    python scripts/bench_launch.py             # every kernel; exit status 1 if one takes more than --limit us
    python scripts/bench_launch.py --rounds 5  # quicker

The kernels are launched with the arguments of real calls on tensors that hold nothing, under a driver that does
nothing: everything in Python is timed, from the launch of hf_quant, or of Triton's JIT, to the driver's C function.
What comes behind it is left out (arguments to C, `cuLaunchKernel`), and so is what an op does around its launches:
checks, plans, memory for results. The last column has that for the op of the row, whose launches are only noted;
memory is "meta". The lowest time of `--rounds` blocks of calls counts, which other processes disturb least.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from gpulab.build import check_environment
from gpulab.cases import Case, launcher
from gpulab.checks import correctness_cases
from hf_quant.evaluate import machine
from hf_quant.kernels.gpu import launch as launches
from hf_quant.kernels.gpu.compiled import run_by_jit, run_compiled
from hf_quant.kernels.gpu.launch import TARGETS, Launch, launch, pretend, record_launches
from hf_quant.planning import format_table


LIMIT = 12.0  # us
CALLS = 100  # of a block


def install_driver(sent: list[tuple]) -> None:
    """Make Triton's driver, and its compiler, do nothing, for an sm90; `sent` gets the arguments of every launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    def send(*args: Any) -> None:
        sent[:] = [args]

    nvidia.PyKernelArg = SimpleNamespace  # of a C module that a real driver compiles
    nvidia.compile_module_from_src = lambda **_: SimpleNamespace(launch=send)  # Triton 3.6 compiles C for a signature
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: None,  # the index of meta
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            utils=SimpleNamespace(
                launch=send,
                build_signature_metadata=lambda signature: b"",
                fill_tma_descriptor=_describe,  # Triton 3.6's name
                fill_tma_descriptor_tiled=_describe,
            ),
        )
    )
    triton.compiler.compile = lambda src, target, options, **_: _Compiled(src, nvidia.CudaLauncher)
    torch.accelerator.current_device_index = lambda: None


def _describe(*args: Any) -> object:
    """In place of the description of tiles that the driver makes."""
    return args


class _Compiled:
    """A kernel like Triton's CompiledKernel, with Triton's own launcher in front of the driver."""

    _sizes = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "gsan")

    def __init__(self, src: Any, launcher_class: Any) -> None:
        metadata = SimpleNamespace(num_ctas=1, global_scratch_align=1, profile_scratch_align=1)
        metadata.__dict__.update(dict.fromkeys(self._sizes, 0))
        tiles = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
        metadata.tensordesc_meta = [tiles for kind in src.signature.values() if str(kind).startswith("tensordesc")]
        self.src, self.name, self.function, self.packed_metadata = src, "kernel", 0, (4, 1, 0)
        self.run = launcher_class(src, metadata)

    def _init_handles(self) -> None:
        """Nothing has to be loaded."""

    def launch_metadata(self, *args: Any) -> Any:
        from triton.compiler.compiler import CompiledKernel

        return CompiledKernel.launch_metadata(self, *args)


def first_launches(cases: list[Case]) -> dict[str, tuple[Launch, Case]]:
    """{kernel: its first launch, and the case that makes it} on an H100."""
    found: dict[str, tuple[Launch, Case]] = {}
    with pretend(TARGETS["sm90"]):
        for case in cases:
            arguments, options = case.make("meta")
            with record_launches() as recorded:
                launcher(case.op)(*arguments, **options)
            for one in recorded:
                found.setdefault(one.kernel.fn.__name__, (one, case))
    return found


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """The least mean of `rounds` blocks of calls, after one."""
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best * 1e6


def time_kernels(rounds: int) -> list[dict[str, Any]]:
    """One record for each kernel: what it is called with, and the times. Raises RuntimeError if the ways differ."""
    sent: list[tuple] = []
    install_driver(sent)
    kinds = {}  # few calls reach every kernel
    for case in correctness_cases(quick=True):
        kinds[case.op, case.M, case.dtype, case.name.split(",")[0], "rotated" in case.name] = case
    found = first_launches(list(kinds.values()))
    launches.RUNNERS["meta"] = run_compiled
    records = []
    for name, (one, case) in sorted(found.items()):
        by_jit = partial(run_by_jit, one.kernel, one.grid, None, one.args, one.options)
        own = {key: value for key, value in one.options.items() if key not in one.shared}
        ours = partial(launch, one.kernel, one.grid, *one.args, shared=one.shared, **own)
        by_jit()
        expected = _without_tensors(sent[0])
        ours()
        ours()  # the first call of a key goes through the JIT
        if _without_tensors(sent[0]) != expected:
            raise RuntimeError(f"{name}: the driver gets other arguments than from Triton's JIT")
        arguments, options = case.make("meta")
        times = {"jit": microseconds(by_jit, rounds), "launch": microseconds(ours, rounds)}
        with pretend(TARGETS["sm90"]), record_launches() as recorded:
            around = partial(_noted, recorded, launcher(case.op), arguments, options)
            times["before"] = microseconds(around, min(rounds, 5))
        records.append({"kernel": name, "arguments": len(one.args), "op": case.op, **times})
    return records


def _noted(recorded: list[Launch], op: Callable[..., Any], arguments: tuple, options: dict[str, Any]) -> None:
    """Call an op whose launches are only noted, and forget them."""
    op(*arguments, **options)
    recorded.clear()


def _without_tensors(sent: tuple) -> list[Any]:
    """Return what the driver gets, with addresses instead of tensors, without what hooks of profilers read."""
    values = [v for part in sent for v in (part if isinstance(part, tuple) else (part,))]
    values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    return [v for v in values if v is not None and isinstance(v, int | float | str | torch.dtype)]


def main() -> int:
    """Read the arguments, measure, print; the exit status is 1 if a launch takes too long, 2 without Triton."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"us of a launch (default: {LIMIT:g})")
    args = parser.parse_args()
    reason = check_environment()
    if reason is not None:
        print(f"bench_launch: {reason}", file=sys.stderr)
        return 2
    import triton

    torch.set_num_threads(1)
    print(
        f"python {' '.join(sys.argv)}\n{machine()}, triton {triton.__version__}; host time only, no GPU\n", flush=True
    )
    records = time_kernels(args.rounds)
    rows = [("kernel", "arguments", "Triton's JIT, us", "launch, us", "op", "around launches, us")]
    for r in records:
        times = [f"{r[name]:.1f}" for name in ("jit", "launch", "before")]
        rows.append((r["kernel"], str(r["arguments"]), *times[:2], r["op"], times[2]))
    print(format_table(rows))
    slow = [r["kernel"] for r in records if r["launch"] > args.limit]
    print(f"{len(slow)} of {len(records)} kernels take more than {args.limit:g} us a launch {' '.join(slow)}".rstrip())
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
