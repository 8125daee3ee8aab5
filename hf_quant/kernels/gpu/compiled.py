"""Launches of compiled kernels past Triton's JIT, whose work for each launch takes longer than most kernels run.

The JIT looks at every argument and makes text of all options to find the compiled kernel: 17 us for 19 arguments, 27
for 58 (https://github.com/meta-pytorch/tritonbench/issues/1059). Here a function, written once for each kernel, makes
a key of what the JIT would specialize: dtype, device and alignment of tensors, 1 and multiples of 16 of sizes. The
first launch of a key goes through the JIT and keeps what it returns, as in https://github.com/pytorch/helion/pull/3004.
`scripts/bench_launch.py` measures both.

What goes through the JIT always: integers that are negative or take more than 31 bits, every launch while a profiler
has hooks, and AMD's GPUs, where the JIT looks at the size of a tensor's memory, too. Triton's environment variables
count when a key is seen first.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


if importlib.util.find_spec("triton") is not None:
    from triton import knobs
    from triton.runtime import driver


class Address:
    """A tensor as a kernel takes it, by its address and dtype: it keeps no memory alive."""

    __slots__ = ("_address", "_index", "dtype")

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._index, self.dtype = tensor.data_ptr(), tensor.get_device(), tensor.dtype

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return self._index


def address_of(tensor: Tensor | None) -> Address | None:
    """The address of a tensor that may be missing."""
    return None if tensor is None else Address(tensor)


class _Ready(NamedTuple):
    """A compiled kernel, loaded on a device."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # of parameters that are constexpr, which stand behind all others
    shared: dict[str, Any]  # kept, as its id is part of the key


class _Launcher:
    """The compiled kernels of one JIT function; see `_key_function`."""

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel = kernel  # kept, as its id is its name in `_launchers`: to hash it takes .5 us
        self.key_of = _key_function(kernel, args)
        self.ready: dict[tuple[Any, ...], _Ready] = {}


_launchers: dict[int, _Launcher] = {}
_NOTHING: dict[str, Any] = {}


def run_by_jit(
    kernel: Any,
    grid: tuple[int, ...],
    device: int | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
    shared: dict[str, Any] = _NOTHING,
) -> Any:
    """`kernel[grid](*args, **options, **shared)` on the current device; returns the compiled kernel."""
    return kernel[grid](*args, **options, **shared)


def run_compiled(
    kernel: Any,
    grid: tuple[int, ...],
    device: int | None,
    args: tuple[Any, ...],
    options: dict[str, Any],
    shared: dict[str, Any] = _NOTHING,
) -> None:
    """`run_by_jit` for the device that is the current one, without the JIT from the second launch of a key on.

    Each parameter of a kernel takes one kind of argument: a tensor or None, a tensor descriptor, an integer, or a
    float. Options that are equal are the same: no launcher gives one parameter 1 and 1.0. `shared` is not compared,
    but known by its identity, and must not change: the options of a plan that is kept.
    """
    launcher = _launchers.get(id(kernel))
    if launcher is None:
        launcher = _launchers[id(kernel)] = _Launcher(kernel, args)
    key, values = launcher.key_of((device, id(shared), *options, *options.values()), *args)
    if key is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
        run_by_jit(kernel, grid, device, args, options, shared)
        return
    ready = launcher.ready.get(key)
    if ready is None:
        compiled = run_by_jit(kernel, grid, device, args, options, shared)
        constants = _constants(kernel, len(args), {**options, **shared})
        launcher.ready[key] = _Ready(compiled.run, compiled.function, compiled.packed_metadata, constants, shared)
        return
    y, z = grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1
    stream = driver.active.get_current_stream(device)
    ready.run(grid[0], y, z, stream, ready.function, ready.metadata, None, None, None, *values, *ready.constants)


def _constants(kernel: Any, count: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """The constexprs in the order of the parameters, which begin behind the first `count`."""
    names = [parameter.name for parameter in kernel.params[count:]]
    assert all(parameter.is_constexpr for parameter in kernel.params[count:])
    return tuple(options[name] for name in names)


def _key_function(kernel: Any, args: tuple[Any, ...]) -> Callable[..., tuple[tuple[Any, ...] | None, tuple[Any, ...]]]:
    """Write `key_of` for a kernel, whose arguments are of the kinds of `args`.

    `key_of(options, *args)` -> (a key of all that the compiled code depends on, None if that needs the JIT; args with
    addresses instead of tensors).
    """
    names = [f"a{i}" for i in range(len(args))]
    lines, key, values, sizes = [], [], [], []
    for name, parameter, arg in zip(names, kernel.params, args):
        assert not parameter.is_constexpr and not isinstance(arg, bool)
        aligns = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if isinstance(arg, int | float):
            values.append(name)
            if isinstance(arg, int):
                sizes.append(name)
                if aligns:  # 1, and multiples of 16
                    key.append(f"{name} if {name} < 16 else {name} & 15 | 16")
                elif not parameter.do_not_specialize:
                    key.append(f"{name} == 1")
        elif hasattr(arg, "block_shape"):  # its block and layout follow from the constexprs
            key += [f"{name}.base.dtype", f"{name}.base.get_device()"]
            values.append(name)
        else:
            assert arg is None or isinstance(arg, Tensor | Address)
            found = {f"p{name}": f"{name}.data_ptr()", f"d{name}": f"{name}.dtype", f"i{name}": f"{name}.get_device()"}
            if aligns:
                found[f"l{name}"] = f"p{name} & 15"
            lines += [f"    if {name} is None:", f"        {' = '.join(found)} = None", "    else:"]
            lines += [f"        {part} = {text}" for part, text in found.items()]
            key += [part for part in found if part != f"p{name}"]
            values.append(f"p{name}")
    refused = [f"    if ({' | '.join(sizes)}) >> 31:", "        return None, ()"] if sizes else []
    result = [
        f"    return ({' '.join(part + ',' for part in key)} *options), ({' '.join(part + ',' for part in values)})"
    ]
    source = "\n".join([f"def key_of({', '.join(['options', *names])}):", *refused, *lines, *result])
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # of the text above only: no name in it comes from outside
    return namespace["key_of"]
