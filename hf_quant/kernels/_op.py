"""How every op of the package is registered, dispatched and explained.

An op's definition is its fully typed reference: the schema is inferred from its annotations, and it serves every
device that has no implementation of its own. `Library.define` + `impl` costs 4.6 us a call where
`torch.library.custom_op` costs 15.3 (torch 2.13, CPU).
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


_PLAIN = (Tensor, torch.nn.Parameter)
LIB = torch.library.Library("hf_quant", "DEF")


class Problem(NamedTuple):
    """What is known about a product at plan time; every `supports` judges it."""

    format: str
    group_size: int  # values of K per scale
    N: int
    K: int
    dtype: torch.dtype  # of the activations
    symmetric: bool = True
    activation: str | None = None  # format of dynamically quantized activations
    num_experts: int | None = None


class Path(NamedTuple):
    """One way in which a backend computes an op.

    `supports(problem)` returns None for yes, else the reason for no; `when` says for which M it is taken.
    """

    name: str
    when: str
    supports: Callable[[Problem], str | None]


_PATHS: dict[tuple[str, str], tuple[Path, ...]] = {}
_IMPLEMENTATIONS: dict[str, dict[str, Callable]] = {}  # {op name: {device type: function}}
_LAZY: dict[tuple[str, str], str] = {}  # {(op name, key): module that registers it when it is imported}


def define_op(name: str, reference: Callable, fake: Callable, mutates: tuple[str, ...] = ()):
    """Register the fully typed `reference` as `hf_quant::<name>` on every device; return the op.

    `fake` gives the output's shape and dtype (and is what torch.compile traces); `mutates` names the arguments that
    the op writes to.
    """
    LIB.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
    LIB.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_quant::{name}", fake, lib=LIB)
    return getattr(torch.ops.hf_quant, name).default


def implements(op, key: str, paths: tuple[Path, ...] = ()):
    """Register the decorated function as the `key` ("CPU", "CUDA", "XPU") implementation of `op`.

    `paths` name the ways it computes, best first; the plan and the support matrix print them.
    """
    name = _name(op)

    def wrap(fn: Callable[..., Tensor]):
        if (name, key) not in _LAZY:
            LIB.impl(name, fn, key)
        _PATHS[name, key] = paths
        _IMPLEMENTATIONS.setdefault(name, {})[key.lower()] = fn
        return fn

    return wrap


def implements_lazily(module: str, *ops, keys: tuple[str, ...] = ("CUDA", "XPU")) -> None:
    """Have `module`, once imported, register the `keys` implementations of `ops`: at the first call or question."""
    for op in ops:
        for key in keys:
            name = _name(op)
            _LAZY[name, key] = module
            call = partial(_call_lazily, name, key)
            LIB.impl(name, call, key)
            _IMPLEMENTATIONS.setdefault(name, {})[key.lower()] = call


def _call_lazily(name: str, key: str, *args, **kwargs):
    importlib.import_module(_LAZY[name, key])
    return _IMPLEMENTATIONS[name][key.lower()](*args, **kwargs)


def _name(op) -> str:
    return op._schema.name.split("::")[1]


def is_plain(x: Tensor) -> bool:
    """Whether x is no subclass or negated view, and no dispatch mode watches: implementations may be called."""
    return type(x) in _PLAIN and not torch._C._len_torch_dispatch_stack() and not x.is_neg()


def direct(op) -> Callable[..., Tensor]:
    """`op` for eager code: calls the implementation for the first argument's device without the dispatcher.

    Saves 4 of the 5 us that an op call costs. Subclasses, compilation, export and dispatch modes get the op itself.
    """
    implementations = _IMPLEMENTATIONS.setdefault(_name(op), {})

    def call(x: Tensor, *args, **kwargs) -> Tensor:
        if not torch.compiler.is_compiling() and is_plain(x):
            implementation = implementations.get(x.device.type)
            if implementation is not None:
                return implementation(x, *args, **kwargs)
        return op(x, *args, **kwargs)

    return call


def explain(op, device_type: str, problem: Problem) -> list[tuple[str, str, str | None]]:
    """How `op` would compute `problem` on a device: [(path, for which M, None or why it is not taken)].

    An op without an implementation for the device is served by its reference, and the list says so.
    """
    key = (_name(op), device_type.upper())
    if key in _LAZY:
        importlib.import_module(_LAZY[key])
    rows = [(p.name, p.when, p.supports(problem)) for p in _PATHS.get(key, ())]
    if all(reason is not None for *_, reason in rows):
        rows.append(("reference", "any M", None))
    return rows
