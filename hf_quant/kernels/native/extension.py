"""The compiled extension: loading it, the instruction set in use, and threads shared with torch."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from hf_quant.kernels.prepack import clear_prepacked


_INTERFACE = 26  # of the functions' arguments; an extension built from other sources must not be called


def _load():
    """(the extension or None, why it is missing)."""
    try:
        _native = import_module("hf_quant.kernels.native._native")
    except ImportError as error:
        return None, f"the extension is not built ({error}); install hf-quant from source with a C++ compiler at hand"
    if _native.interface() != _INTERFACE:
        return None, "the extension was built from other sources; install hf-quant again"
    return _native, None


module, _missing = _load()
_active: str | None = None  # the instruction set in use


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets that this build and this CPU have, best first; () without the extension."""
    return () if module is None else module.instruction_sets()


def active() -> str | None:
    """The instruction set in use, None if the native kernels are off or missing."""
    return _active


def unavailable_reason() -> str | None:
    """The reason why no native kernel is used, None if they are."""
    if _active is not None:
        return None
    return _missing or "the native kernels are turned off"


def use(name: str | None) -> None:
    """Compute by the named instruction set from now on, by torch's own ops if None.

    Raises:
        ValueError: this CPU or this build lacks it.
    """
    global _active
    if name is not None:
        if name not in instruction_sets():
            have = ", ".join(map(repr, instruction_sets())) or f"none: {_missing}"
            raise ValueError(f"instruction set {name!r} is not available here; available: {have}")
        module.use(name)
    _active = name
    clear_prepacked()  # products that were made ready go by what was in use before


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """`use`, until the end of the block."""
    before = _active
    use(name)
    try:
        yield
    finally:
        use(before)


def _openmp() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded, None if it has another entry point."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/lib" in line and "omp" in line.lower()}
    runtimes = [p for p in paths if os.path.basename(p).startswith(("libgomp", "libiomp", "libomp"))]
    # Another package may bring a runtime of its own: torch's is in torch's folder.
    runtimes.sort(key=lambda path: os.path.dirname(torch.__file__) not in path)
    for path in runtimes:
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):  # deleted since, or without this entry point
            continue
    return None


def features() -> dict[str, bool]:
    """Features of the instruction set in use, beyond its name: bf16 dot products, and threads of torch's own pool."""
    return {
        "has_bf16_dot": _active is not None and module.has_bf16_dot(),
        "shares_threads_of_torch": _active is not None and _openmp() is not None,
    }


def _start() -> None:
    """Share torch's threads, and take the best instruction set or the one of the environment."""
    if module is None:
        return
    module.share_threads(_openmp() or 0)
    wanted = os.environ.get("HF_QUANT_NATIVE") or instruction_sets()[0]  # set to nothing is not set
    if wanted not in ("off", *instruction_sets()):
        allowed = ", ".join(map(repr, ("off", *instruction_sets())))
        raise ValueError(f"the environment variable HF_QUANT_NATIVE is {wanted!r}; allowed here: {allowed}")
    use(None if wanted == "off" else wanted)


_start()
