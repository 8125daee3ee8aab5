"""Launches of the Triton kernels: the GPU they are configured for, workspaces, tuned tables.

Importable without triton: the kernels then do not exist, `unavailable_reason` says so, and the paths that need none
serve. Importing triton takes .2 s, so the `gpu.py` files are imported at the first call on a GPU: `implements_lazily`.
"""

import contextvars
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from hf_quant.kernels.gpu import ready
from hf_quant.kernels.gpu.compiled import run_by_jit, run_compiled


if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:  # the decorated functions are never called then

    def _jit(fn: Callable | None = None, **options: Any) -> Callable:
        return fn if fn is not None else (lambda f: f)

    triton = SimpleNamespace(jit=_jit, cdiv=lambda a, b: -(-a // b), constexpr_function=_jit)
    # What stands outside of functions: annotations, and constants of types.
    tl = SimpleNamespace(constexpr=lambda value: value, int16="int16")

HAS_TRITON = hasattr(triton, "compile")
IS_OLD_TRITON = HAS_TRITON and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)  # 3.6 to 3.8


class Target(NamedTuple):
    """The GPU that a launch is configured for.

    Attributes:
        name: "sm90", "gfx942", ...; "xpu" for Intel.
        multiprocessors: how many blocks run at once, at least.
        shared_memory: bytes that one block may take.
    """

    name: str
    multiprocessors: int
    shared_memory: int

    @property
    def is_nvidia(self) -> bool:
        return self.name.startswith("sm")

    @property
    def capability(self) -> int:
        """80 for sm80, ...; 0 if it is not NVIDIA's."""
        return int(self.name[2:]) if self.is_nvidia else 0

    @property
    def table(self) -> str:
        """The name of the shipped config table that serves: "sm75", "sm80", "sm89", "sm90", "sm100" or "gfx942"."""
        if not self.is_nvidia:
            return "gfx942" if self.name.startswith("gfx") else "sm80"
        if not self.has_dot:
            return "sm75"
        # By shared memory a block: 99 KB on sm86, sm89 and sm120, 163 on sm80, 227 on sm90 and sm100.
        return {80: "sm80", 87: "sm80", 90: "sm90", 100: "sm100", 103: "sm100"}.get(self.capability, "sm89")

    @property
    def has_dot(self) -> bool:
        """True if `tl.dot` of 16 bits and of int8 runs on matrix units.

        For Turing and older (sm75, sm70) Triton makes FMAs of fp32 of it since triton-lang/triton#5066, in 3.6 and 3.9
        alike: right, and fast enough for few tokens only. So other products go to the vendor's GEMM there.
        """
        return not self.is_nvidia or self.capability >= 80

    @property
    def has_warp_dot(self) -> bool:
        """True if each warp multiplies what lies in its registers (mma.sync), not in shared memory."""
        return self.is_nvidia and self.has_dot and self.table not in ("sm90", "sm100")

    @property
    def has_fp8_dot(self) -> bool:
        """True if the matrix units multiply float8_e4m3fn (gfx942 has another fp8, with a bias of 8)."""
        return self.capability >= 89 or self.name == "gfx950"

    @property
    def has_tma(self) -> bool:
        """True if the tensor memory accelerator copies tiles; on sm120 Triton 3.6 calls a function for each copy."""
        return self.table in ("sm90", "sm100")


# What ahead-of-time compilation and the tests pretend to run on: the largest part of each kind.
TARGETS = {
    t.name: t
    for t in (
        Target("sm75", 72, 65536),
        Target("sm80", 108, 166912),
        Target("sm86", 84, 101376),
        Target("sm89", 142, 101376),
        Target("sm90", 132, 232448),
        Target("sm100", 148, 232448),
        Target("sm120", 170, 101376),
        Target("gfx942", 304, 65536),
        Target("xpu", 128, 131072),
    )
}


MAX_GRID_X, MAX_GRID_YZ = 2**31 - 1, 65535  # blocks, by the CUDA guide and by HIP's


_NO_OPTIONS: dict[str, Any] = {}


class Launch(NamedTuple):
    """One launch as `record_launches` sees it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]  # constexprs, num_warps, num_stages
    shared: dict[str, Any] = {}  # those of them that a plan keeps


_recorded: list[Launch] | None = None
_pretended: Target | None = None


@contextmanager
def pretend(target: Target) -> Iterator[None]:
    """Configure launches on tensors that are on no GPU (CPU under the interpreter, meta) for a target."""
    global _pretended
    before, _pretended = _pretended, target
    try:
        yield
    finally:
        _pretended = before


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect launches instead of making them: with meta tensors, what a call would run on a GPU.

    A launcher that reads a tensor on the host fails here: meta tensors hold nothing.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def recording() -> bool:
    """True inside of `record_launches`: no kernel runs."""
    return _recorded is not None


def interpreting() -> bool:
    """True if kernels run in Triton's interpreter (TRITON_INTERPRET=1 before they were imported)."""
    return HAS_TRITON and bool(triton.knobs.runtime.interpret)


def unavailable_reason(device: torch.device | str) -> str | None:
    """The reason why Triton kernels cannot run on tensors of a device, None if they can."""
    kind = device if isinstance(device, str) else device.type
    if not HAS_TRITON:
        return "triton is not installed"
    if kind == "cuda" or kind == "xpu" or _recorded is not None or interpreting():
        return None
    return f"there are no Triton kernels for {kind}"


def target_of(device: torch.device) -> Target:
    """The target of a device; for CPU and meta the pretended one, by default an H100."""
    if device.type in ("cuda", "xpu"):
        return _device_target(device.type, device.index)
    return _pretended or TARGETS["sm90"]


@cache
def _device_target(kind: str, index: int | None) -> Target:
    if kind == "xpu":
        properties = torch.xpu.get_device_properties(index)
        return Target("xpu", properties.gpu_subslice_count, getattr(properties, "local_mem_size", 65536))
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target(properties.gcnArchName.split(":")[0], properties.multi_processor_count, 65536)
    shared = properties.shared_memory_per_block_optin
    return Target(f"sm{properties.major}{properties.minor}", properties.multi_processor_count, shared)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, shared: dict[str, Any] = _NO_OPTIONS, **options: Any
) -> None:
    """Run `kernel[grid](*args, **options, **shared)` on the device of the first argument, or record it.

    shared: options of a kept plan, which are known by their identity and not compared: see `run_compiled`.
    Raises ValueError if a GPU has no such grid.
    """
    if grid[0] > MAX_GRID_X or (len(grid) > 1 and (grid[1] > MAX_GRID_YZ or grid[-1] > MAX_GRID_YZ)):
        raise ValueError(
            f"a launch of {' x '.join(map(str, grid))} blocks; a GPU takes at most {MAX_GRID_X} x {MAX_GRID_YZ} x "
            f"{MAX_GRID_YZ}: give it fewer rows, heads or sequences at once"
        )
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, {**options, **shared}, shared))
        return
    device = args[0].device
    run = RUNNERS[device.type]
    if device.type == "cpu" or torch.accelerator.current_device_index() == device.index:
        run(kernel, grid, device.index, args, options, shared)
    else:  # Triton takes the current device, whatever the tensors are on
        with torch.accelerator.device_index(device.index):
            run(kernel, grid, device.index, args, options, shared)


# By the type of the device; on a CPU it is Triton's interpreter.
RUNNERS: dict[str, Callable[..., object]] = {"cuda": run_compiled, "xpu": run_by_jit, "cpu": run_by_jit}
if torch.version.hip is not None:
    RUNNERS["cuda"] = run_by_jit


def launch_with_scratch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`launch` for a kernel that makes tensor descriptors, which are in memory that Triton asks of an allocator.

    The allocator is set in a copy of the context: the caller's stays.
    """
    device = args[0].device

    def run() -> None:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch(kernel, grid, *args, **options)

    contextvars.copy_context().run(run)


# Tuned tables: `scripts/tune.py` writes them, nothing tunes at call time.
TUNED_FILE = "HF_QUANT_TUNED"  # environment variable: path of a table that replaces shipped ones


def tuned_path() -> Path:
    """The file that `scripts/tune.py` writes and launches read: $HF_QUANT_TUNED, or tuned.json in the user's cache.

    Raises ValueError if the user has no home directory.
    """
    path = _tuned_path()
    if path is None:
        raise ValueError(f"there is no home directory for tuned tables; set {TUNED_FILE} to a path")
    return path


def _tuned_path() -> Path | None:
    if TUNED_FILE in os.environ:
        return Path(os.environ[TUNED_FILE])
    directory = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if directory.startswith("~") else Path(directory) / "hf_quant" / "tuned.json"


_tables: dict[tuple[str, Target], Sequence[tuple[int, ...]]] = {}
_CATCH_ALL = 2**30  # a size that serves every larger one, too


def tuned_tables() -> dict[str, dict[str, list[list[int]]]]:
    """{target: {table: rows}} of the user's file, {} if none can be read. Raises ValueError if it is damaged."""
    path = _tuned_path()
    if path is None or not os.path.isfile(path) or not os.access(path, os.R_OK):
        return {}
    try:
        found = json.loads(path.read_text())
        rows = [row for tables in found.values() for table in tables.values() for row in table]
        if not all(isinstance(value, int) for row in rows for value in row):
            raise ValueError("a table's rows must be lists of whole numbers")
    except (ValueError, AttributeError, TypeError) as error:
        raise _damaged(error) from None
    return found


def _damaged(why: object) -> ValueError:
    return ValueError(f"{_tuned_path()} is no table of tuned configs ({why}); delete it or run scripts/tune.py")


def _check_rows(name: str, rows: list[list[int]], shipped: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless rows are as long as the shipped ones and the last serves all sizes that theirs does."""
    wrong = next((row for row in rows if len(row) != len(shipped[0])), None)
    if wrong is not None:
        raise _damaged(f"{name} has rows of {len(shipped[0])} numbers, not {wrong}")
    if not rows or any(least >= _CATCH_ALL > value for value, least in zip(rows[-1], shipped[-1])):
        raise _damaged(f"the last row of {name} has to serve all sizes, as {tuple(shipped[-1])} does")


def shipped_table(shipped: dict[str, Sequence[tuple[int, ...]]], target: Target) -> Sequence[tuple[int, ...]]:
    """The shipped rows for a target: those of its own name, else of `target.table`, else (before sm80) of sm89."""
    return shipped.get(target.name) or shipped.get(target.table) or shipped["sm89"]


def config_table(
    name: str, shipped: dict[str, Sequence[tuple[int, ...]]], target: Target
) -> Sequence[tuple[int, ...]]:
    """The config table `name` for a target: the user's tuned one if there is one, else the shipped one.

    The user's file is read once; `reload_tables` forgets it. Raises ValueError if it is damaged.
    """
    table = _tables.get((name, target))
    if table is None:
        table, found = shipped_table(shipped, target), tuned_tables().get(target.name, {}).get(name)
        if found is not None:
            _check_rows(name, found, table)
            table = [tuple(row) for row in found]
        _tables[name, target] = table
    return table


def use_table(name: str, target: Target, rows: Sequence[tuple[int, ...]]) -> None:
    """Use `rows` as the config table `name` of a target until `reload_tables`, whatever the user's file has."""
    reload_tables()
    _tables[name, target] = rows


def reload_tables() -> None:
    """Read the user's tuned tables again at the next launch."""
    _tables.clear()
    forget_plans()


def forget_plans() -> None:
    """Make the plans of launches anew, as what they follow from has changed."""
    for forget in _PLANS:
        forget()


_PLANS: list[Callable[[], None]] = [ready.forget]


def cached_plan(fn: Callable) -> Callable:
    """Cache of what a launcher computes from sizes, as a decorator: some 100 us of Python at every call otherwise."""
    cached = lru_cache(maxsize=4096)(fn)
    _PLANS.append(cached.cache_clear)
    return cached
