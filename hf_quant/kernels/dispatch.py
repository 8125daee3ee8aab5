"""Registration, dispatch and explanation of every op of the package.

An op's definition is its fully typed reference: the schema is inferred from its annotations, and it serves every
device that has no implementation of its own. `Library.define` + `impl` costs 4.6 us a call where
`torch.library.custom_op` costs 15.3 (torch 2.13, CPU).
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves


_PLAIN = (Tensor, torch.nn.Parameter)
# Looked up once: a product asks all three, and each look-up by two dots takes as long as the call.
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_is_in_old_vmap = torch._C._functorch.is_legacy_batchedtensor
LIB = torch.library.Library("hf_quant", "DEF")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Problem(NamedTuple):
    """The facts of a product (or an attention) that are known at plan time: the argument of every `supports`."""

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
_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {}  # {op name: {device type: function}}
_LAZY: dict[tuple[str, str], str] = {}  # {(op name, key): module that registers it when it is imported}


def define_op(
    name: str,
    reference: Callable[_P, _R],
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
    *,
    is_row_by_row: bool = False,
) -> Callable[_P, _R]:
    """Register the fully typed `reference` as `hf_quant::<name>` on every device; return the op.

    The op is an OpOverload of torch; to type checkers it is a function with the signature of its reference.

    `fake` gives the output's shape and dtype (and is what torch.compile traces); `mutates` names the arguments that
    the op writes to. `is_row_by_row`: the first argument is [..., K], and so are the results: torch.vmap over it is
    one call. torch runs any other op under vmap once for each element.
    """
    LIB.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
    LIB.impl(name, reference, "CompositeExplicitAutograd")

    def checked_fake(*args: Any, **kwargs: Any) -> Any:
        check_tracer()
        return fake(*args, **kwargs)

    torch.library.register_fake(f"hf_quant::{name}", checked_fake, lib=LIB)
    op = getattr(torch.ops.hf_quant, name).default
    if is_row_by_row:
        torch.library.register_vmap(f"hf_quant::{name}", partial(_map_rows, op), lib=LIB)
    return op


def _map_rows(
    op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """torch.vmap of a row-by-row op over its first argument."""
    first, *others = in_dims
    if first is None or any(dim is not None for dim in tree_leaves(others)):
        raise ValueError(
            f"torch.vmap of hf_quant::{_name(op)} maps over its first argument; its other tensors (weights, scales, a "
            "bias) must be the same for all elements. Give them in_dims=None, or call it in a loop"
        )
    y = op(x.movedim(first, 0), *args, **kwargs)
    return y, (0 if isinstance(y, Tensor) else [0] * len(y))


def implements(op: Callable[..., Any], key: str, paths: tuple[Path, ...] = ()) -> Callable[[_Function], _Function]:
    """Register the decorated function as the `key` ("CPU", "CUDA", "XPU") implementation of `op`.

    `paths` name the ways it computes, best first; the plan and the support matrix print them.
    """
    name = _name(op)

    def wrap(fn: _Function) -> _Function:
        if (name, key) not in _LAZY:
            LIB.impl(name, fn, key)
        _PATHS[name, key] = paths
        _IMPLEMENTATIONS.setdefault(name, {})[key.lower()] = fn
        return fn

    return wrap


def implements_lazily(module: str, *ops: Callable[..., Any], keys: tuple[str, ...] = ("CUDA", "XPU")) -> None:
    """Import `module`, which registers implementations of `ops` for `keys`, at the first call or `explain`."""
    for op in ops:
        for key in keys:
            name = _name(op)
            _LAZY[name, key] = module
            call = partial(_call_lazily, name, key)
            LIB.impl(name, call, key)
            _IMPLEMENTATIONS.setdefault(name, {})[key.lower()] = call


def _call_lazily(name: str, key: str, *args: Any, **kwargs: Any) -> Any:
    importlib.import_module(_LAZY[name, key])
    return _IMPLEMENTATIONS[name][key.lower()](*args, **kwargs)


def _name(op: Any) -> str:
    return op._schema.name.split("::")[1]


def is_transformed() -> bool:
    """True inside of torch.func's transforms (vmap, grad, jvp) and of forward-mode AD."""
    return _has_transforms() or forward_ad._current_level >= 0


def is_plain(x: Tensor) -> bool:
    """True if implementations may be called with x.

    It is no subclass, no negated view and no batch of derivatives of torch.autograd.functional, and neither a dispatch
    mode nor a transform of torch.func nor torch.jit.trace watches.
    """
    return (
        type(x) in _PLAIN
        and not _num_dispatch_modes()
        and not _has_transforms()
        and not _is_tracing()
        and not x.is_neg()
        and not _is_in_old_vmap(x)
    )


def check_tracer() -> None:
    """Raise ValueError inside of torch.jit.trace and torch.onnx.export, which have no ops for codes."""
    if torch.compiler.is_dynamo_compiling():
        return
    onnx = sys.modules.get("torch.onnx")  # not imported: nobody exports to it
    if _is_tracing() or (onnx is not None and onnx.is_in_onnx_export()):
        raise ValueError(
            "torch.jit.trace and torch.onnx.export cannot record quantized layers: use torch.export, or give them the "
            "16-bit model, hf_quant.dequantize_(model)"
        )


def assume_constant_result(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a function as `torch.compiler.assume_constant_result` does, which imports the compiler: half a second."""
    fn._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return fn


@assume_constant_result
def is_exporting() -> bool:
    """Return True inside of torch.export; torch.compile answers torch's own question with True in torch 2.11, too."""
    return torch.compiler.is_exporting()


def mark_static_address(x: Tensor) -> None:
    """Mark a tensor as `torch._dynamo.mark_static_address` does without a guard, without an import of the compiler."""
    x._dynamo_static_input_type = "unguarded"  # pyrefly: ignore[missing-attribute]


def direct(op: Callable[Concatenate[Tensor, _P], _R]) -> Callable[Concatenate[Tensor, _P], _R]:
    """`op` for eager code: calls the implementation for the first argument's device without the dispatcher.

    Saves 4 of the 5 us that an op call costs. Subclasses, compilation, export and dispatch modes get the op itself.
    """
    implementations = _IMPLEMENTATIONS.setdefault(_name(op), {})

    def call(x: Tensor, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.compiler.is_compiling() and is_plain(x):
            implementation = implementations.get(x.device.type)
            if implementation is not None:
                return implementation(x, *args, **kwargs)
        check_tracer()
        return op(x, *args, **kwargs)

    return call


def explain(op: Callable[..., Any], device_type: str, problem: Problem) -> list[tuple[str, str, str | None]]:
    """The paths of `op` for `problem` on a device: [(path, for which M, None or the reason against it)].

    An op without an implementation for the device is served by its reference, and the list says so.
    """
    key = (_name(op), device_type.upper())
    if key in _LAZY:
        importlib.import_module(_LAZY[key])
    rows = [(p.name, p.when, p.supports(problem)) for p in _PATHS.get(key, ())]
    if all(reason is not None for *_, reason in rows):
        rows.append(("reference", "any M", None))
    return rows
