"""Runs Gluon kernels on the CPU, which Triton's interpreter does not know: what they compute, in any order they allow.

The source of a kernel runs as Python, with the names of this file in place of `triton.experimental.gluon`. One program
runs after the other; the partitions of one are threads of which one runs at a time; at every barrier chance decides
which partition goes on, or which copy lands. Of what must not happen in any order, this raises an error:

- all partitions wait, and nothing is on its way (a deadlock), or a barrier gets more arrivals than it counts;
- shared memory is read before a copy into it has landed, or a copy begins while a product in flight reads it;
- a sum is used before its product has been waited for;
- memory outside of a tensor is read or written.

Memory that a copy will fill holds large numbers until then. What is not seen here, the compiler and `make aot` check:
layouts, registers, and what the hardware cannot do.
"""

import builtins
import functools
import importlib.util
import inspect
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.experimental.gluon import language as real

from hf_quant.kernels.gpu.hopper import attention, plan
from hf_quant.kernels.gpu.launch import forget_plans
from hf_quant.kernels.weight_only import few
from hf_quant.tests.kernels import gluon_values
from hf_quant.tests.kernels.gluon_values import GLUON, TORCH, Value, pointer_to


_POISON = 0x7F  # of each byte: 3.4e38 in bf16


class Tiles:
    """A tensor descriptor. One of an address, of a product that has been made ready, cannot be run."""

    def __init__(self, base: Any, shape: list, strides: list, block_shape: list, layout: Any) -> None:
        self.base, self.shape, self.strides, self.layout = base, shape, strides, layout
        self.block_shape, self.dtype = block_shape, GLUON[base.dtype]

    def at(self, where: list) -> torch.Tensor:
        """The tile whose first element is at `where`; what is outside of the tensor is zero."""
        tile = torch.zeros(self.block_shape, dtype=self.base.dtype)
        starts = [stride * tile.itemsize for stride in self.strides[:-1]] + [self.base.data_ptr()]
        assert all(start and start % 16 == 0 for start in starts), "rows that are not aligned, or all in one place"
        part = self.base.as_strided(self.shape, self.strides)
        for dim, (first, size) in enumerate(zip(map(int, where), self.block_shape)):
            part = part[(slice(None),) * dim + (slice(first, first + size),)]
        tile[tuple(slice(0, size) for size in part.shape)] = part
        return tile


class Shared:
    """A part of shared memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: GLUON[self.data.dtype])

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def reshape(self, shape: list) -> "Shared":
        return Shared(self.data.view(shape))

    def permute(self, order: list) -> "Shared":
        return Shared(self.data.permute(order))

    def load(self, layout: Any) -> Value:
        _program.check_landed(self)
        return Value(self.data.clone(), layout)

    def overlaps(self, other: "Shared") -> bool:
        def span(data: torch.Tensor) -> tuple[int, int]:
            last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride()))
            return data.data_ptr(), data.data_ptr() + (last + 1) * data.element_size()

        (first, end), (begin, until) = span(self.data), span(other.data)
        return first < until and begin < end


class _Barrier:
    """An mbarrier: a phase ends when all that it counts have arrived, and all expected bytes have landed."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing < 0:
            raise AssertionError("more arrivals than a barrier counts")
        self.end_phase()

    def land(self, count: int) -> None:
        self.bytes -= count
        self.end_phase()

    def end_phase(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def has_passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class _Product:
    """A product of a partition: `reads` are its operands in shared memory."""

    def __init__(self, reads: list[Shared]) -> None:
        self.reads, self.done = reads, False


class _Abandoned(Exception):
    """Ends a partition after another one has failed."""


class _Program:
    """One program: its place in the grid, its partitions, and what is on its way."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], chance: random.Random) -> None:
        self.place, self.grid, self.chance = place, grid, chance
        self.copies: list[Callable[[], None]] = []
        self.landing: list[Shared] = []
        self.flights: dict[int, list[_Product]] = {}
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.turn, self.failure = threading.Condition(), ""
        self.current: int | None = None

    def run_partitions(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run all to their ends, one at a time."""
        self.waiting = {i: lambda: True for i in range(len(parts))}
        with ThreadPoolExecutor(len(parts)) as threads:
            ends = [threads.submit(self._run, i, *part) for i, part in enumerate(parts)]
            with self.turn:
                self._choose()
        for end in ends:
            if end.exception() is not None and not isinstance(end.exception(), _Abandoned):
                raise end.exception()
        if self.failure:
            raise AssertionError(self.failure)
        self.current = None
        if self.copies or any(self.flights.values()):
            raise AssertionError("a copy or a product that nobody waits for")

    def _run(self, me: int, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        has_ended = False
        try:
            self._sleep(me)
            fn(*args)
            has_ended = True
        finally:
            with self.turn:
                self.failure = self.failure or ("" if has_ended else "a partition has failed")
                del self.waiting[me]
                self._choose()

    def _sleep(self, me: int) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.current == me or self.failure)
        if self.failure:
            raise _Abandoned

    def _choose(self) -> None:
        """Let a copy land or a partition go on, by chance, until a partition goes on."""
        while self.waiting and not self.failure:
            ready = [i for i, is_ready in self.waiting.items() if is_ready()]
            if not ready and not self.copies:
                self.failure = f"a deadlock: partitions {sorted(self.waiting)} wait"
            elif self.copies and (not ready or self.chance.random() < 0.3):
                self.copies.pop(self.chance.randrange(len(self.copies)))()
            else:
                self.current = self.chance.choice(ready)
                break
        self.turn.notify_all()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Give others their turn; go on when `is_ready`."""
        me = self.current
        with self.turn:
            self.waiting[me] = is_ready
            self._choose()
        self._sleep(me)
        self.waiting[me] = lambda: True

    def copy(self, tile: torch.Tensor, barrier: _Barrier, target: Shared) -> None:
        """Begin a copy into shared memory, which lands some time later."""
        if any(part.overlaps(target) for flight in self.flights.values() for one in flight for part in one.reads):
            raise AssertionError("a copy begins where a product in flight reads")
        self.check_landed(target)
        target.data.view(torch.uint8).fill_(_POISON)

        def land() -> None:
            target.data.copy_(tile)
            self.landing.remove(target)
            barrier.land(tile.nbytes)

        self.landing.append(target)
        self.copies.append(land)

    def check_landed(self, part: Shared) -> None:
        """Raise AssertionError if a copy into it is on its way."""
        if any(part.overlaps(other) for other in self.landing):
            raise AssertionError("shared memory is used before a copy has landed")


_program: _Program


def allocate_shared_memory(dtype: tl.dtype, shape: list, layout: Any) -> Any:
    if isinstance(layout, real.nvidia.hopper.mbarrier.MBarrierLayout):
        barriers = [_Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[int(i)])
    memory = torch.empty(shape, dtype=TORCH[dtype])
    memory.view(torch.uint8).fill_(_POISON)
    return Shared(memory)


def warp_specialize(parts: list, worker_num_warps: list, worker_num_regs: list) -> None:
    assert len(parts) == len(worker_num_warps) + 1 == len(worker_num_regs) + 1
    _program.run_partitions(parts)


def barrier_init(barrier: _Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def barrier_wait(barrier: _Barrier, phase: Any, pred: Any = True) -> None:
    assert barrier.count, "a barrier without its count"
    if pred:
        parity = int(phase)
        _program.wait(lambda: barrier.has_passed(parity))


def barrier_expect(barrier: _Barrier, bytes: int, pred: Any = True) -> None:
    if pred:
        barrier.bytes += int(bytes)
        barrier.arrive()


def barrier_arrive(barrier: _Barrier, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive()
        _program.wait(lambda: True)


def async_load(tiles: Tiles, where: list, barrier: _Barrier, target: Shared) -> None:
    _program.copy(tiles.at(where), barrier, target)
    _program.wait(lambda: True)


def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: Any = True, is_async: bool = False) -> Value:
    reads = [part for part in (a, b) if isinstance(part, Shared)]
    for part in reads:
        _program.check_landed(part)
    left, right, total = a.data, b.data, acc.early
    kinds = {left.dtype, right.dtype}
    assert len(kinds) == 1 and total.dtype == (torch.int32 if kinds == {torch.int8} else torch.float32)
    found = (left.double() @ right.double() + (total if use_acc else 0)).to(total.dtype)
    product = _Product(reads)
    product.done = not is_async
    if is_async:
        _program.flights.setdefault(_program.current, []).append(product)
    return Value(found, acc.layout, product)


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    flight = _program.flights.get(_program.current, [])
    while len(flight) > num_outstanding:
        flight.pop(0).done = True
    return deps[0] if len(deps) == 1 else tuple(deps)


class Jit:
    """A function of a kernel: called as Python, or launched over a grid."""

    seed = 0

    def __init__(self, fn: Callable) -> None:
        if fn.__module__.startswith("hf_quant.kernels.gpu.decode"):  # of Triton, whose names Gluon has, too
            fn = FunctionType(fn.__code__, {**fn.__globals__, "tl": _LANGUAGE}, fn.__name__, fn.__defaults__)
        self.fn, self.__name__ = fn, fn.__name__

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.run(grid, args, options)

    def run(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run all programs, in an order of chance."""
        global _program
        names = inspect.signature(self.fn).parameters
        constants = {name: value for name, value in options.items() if name in names}
        assert set(options) - set(names) <= {"num_warps", "maxnreg", "num_stages"}
        values = [pointer_to(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        values = [Value(torch.tensor(v, dtype=torch.int32)) if type(v) is int else v for v in values]
        chance = random.Random(self.seed)
        places = [(x, y) for x in range(grid[0]) for y in range(grid[1] if len(grid) > 1 else 1)]
        for place in chance.sample(places, len(places)):
            _program = _Program(place, (*grid, 1), chance)
            self.fn(*values, **constants)


def _static_assert(condition: bool, message: str) -> None:
    assert condition, message


def _program_number(name: str) -> Callable[[int], Value]:
    return lambda axis: Value(torch.tensor(getattr(_program, name)[axis], dtype=torch.int32))


_TYPES = "int1 int8 uint8 int16 int32 int64 float8e4nv float16 bfloat16 float32".split()
_LANGUAGE = SimpleNamespace(
    **{name: getattr(real, name) for name in dir(real) if name.endswith("Layout") or name in _TYPES},
    **{name: fn for name, fn in vars(gluon_values).items() if inspect.isfunction(fn)},
    allocate_shared_memory=allocate_shared_memory,
    warp_specialize=warp_specialize,
    program_id=_program_number("place"),
    num_programs=_program_number("grid"),
    barrier=lambda: None,
    constexpr=lambda value: value,
    static_assert=_static_assert,
    static_range=range,
)
_BARRIERS = SimpleNamespace(
    MBarrierLayout=real.nvidia.hopper.mbarrier.MBarrierLayout,
    init=barrier_init,
    wait=barrier_wait,
    expect=barrier_expect,
    arrive=barrier_arrive,
)
_HOPPER = SimpleNamespace(
    mbarrier=_BARRIERS,
    tma=SimpleNamespace(async_load=async_load),
    fence_async_shared=lambda: None,
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
)
_GLUON_MODULE = SimpleNamespace(
    jit=lambda fn=None, **options: Jit(fn) if fn is not None else Jit,
    constexpr_function=lambda fn: fn,
    language=_LANGUAGE,
)
_MODULES: dict[str, Any] = {
    "triton.experimental": SimpleNamespace(gluon=_GLUON_MODULE),
    "triton.experimental.gluon": _GLUON_MODULE,
    "triton.experimental.gluon.language.nvidia": SimpleNamespace(hopper=_HOPPER),
    "triton.experimental.gluon.language.nvidia.hopper": _HOPPER,
    "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(mma_v2=gluon_values.mma_v2),
}


_KERNELS = ("hf_quant.kernels.gpu.hopper.", "hf_quant.kernels.weight_only.few_kernel")


@functools.cache
def _code(name: str, edit: tuple[str, str] | None) -> CodeType:
    source = importlib.util.find_spec(name).loader.get_source(name)
    return compile(source.replace(*edit) if edit else source, name, "exec")


def _module(name: str, known: dict[str, Any], edit: tuple[str, str] | None) -> Any:
    """The module of a kernel with the names of this file in place of Gluon's, its source with edit[1] for edit[0]."""
    if name not in known:
        known[name] = ModuleType(name)

        def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            if name in known or name.startswith(_KERNELS):
                return _module(name, known, edit)
            return builtins.__import__(name, globals, locals, fromlist, level)

        known[name].__builtins__ = {**vars(builtins), "__import__": import_}
        exec(_code(name, edit), known[name].__dict__)
    return known[name]


@contextmanager
def interpreted(seed: int = 0, edit: tuple[str, str] | None = None) -> Iterator[None]:
    """Launches of the kernels for Hopper run here.

    seed: decides the order of what has none. edit: a text of their sources, and one in place of it.
    """
    known = dict(_MODULES)
    names = [_KERNELS[0] + name for name in ("kernel", "scaled_kernel", "attention_kernel")] + [_KERNELS[1]]
    kernel, scaled, attentive, with_few = (_module(name, known, edit) for name in names)
    sources = (importlib.util.find_spec(name).loader.get_source(name) for name in known if name.startswith(_KERNELS))
    assert edit is None or any(edit[0] in source for source in sources), "a text that no kernel has"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Jit, "seed", seed)
        patch.setattr(plan, "_gluon", lambda: kernel)
        patch.setattr(plan, "_scaled_mm_kernel", lambda: scaled._hopper_scaled_mm_kernel)
        patch.setattr(few, "_gluon", lambda: with_few)
        patch.setattr(attention, "_kernel", lambda: attentive._hopper_attention_kernel)
        for user in (plan, attention):
            patch.setattr(user, "descriptor", lambda: Tiles)
            patch.setattr(user, "has_kernels", lambda: True)
        forget_plans()
        yield
    forget_plans()
