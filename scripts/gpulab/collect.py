"""Collect the kernels that cases launch on a target, without a GPU, and the work of each launch."""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from gpulab.build import Built, Recorded, Unit, VendorProduct, record, record_call, tensors
from gpulab.cases import Case, gpu_ops, launcher
from gpulab.code_checks import dot_kind
from gpulab.model import Work
from hf_quant.kernels.gpu.launch import Target
from hf_quant.kernels.grouped_mm import gpu as grouped


# What the constexprs of a tile begin with, and those of a decoder end with.
_DECODER = ("BITS", "KIND", "PTX")
_TILE = ("BLOCK", "EVEN_K", "PARTS", "ROWS", "SCALE_MODE", "STAGES", "num_stages", "num_warps")


class Use(NamedTuple):
    """A unit and the launches that it serves."""

    unit: Unit
    launches: list[tuple[Case, Recorded]]


def case_label(use: Use) -> str:
    """The name of a unit's first case and its constexprs: "int8, llama o 4096x4096, M=1, bf16; BLOCK_M=8 ..."."""
    values = " ".join(f"{name}={value}" for name, value in use.unit.values.items() if name != "PTX")
    return f"{use.launches[0][0].name}; {values}"


class Collected(NamedTuple):
    """`uses` by key; for each (target, case) `calls`, its launches, and `products`, what it leaves to torch.

    `failures`: calls that failed, by (op, why).
    """

    uses: dict[str, Use]
    calls: dict[tuple[str, Case], list[Recorded]]
    products: dict[tuple[str, Case], list[VendorProduct]]
    failures: dict[tuple[str, str], list[str]]


REFUSALS = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, AssertionError)


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_left_out(case: Case, arguments: tuple, target: Target) -> bool:
    """True for calls whose kernels nobody launches: without matrix units (sm75) those of bf16 and fp32.

    So are those of many rows an expert, and of their gradients: the host reads the rows, and meta tensors have none.
    """
    if target.has_dot or case.op not in ("grouped_mm", "grouped_mm_backward"):
        return not target.has_dot and case.dtype != torch.float16
    most = grouped.CONFIGS["sm75"][-1][0]
    many = case.op == "grouped_mm_backward" or -(-case.M // min(len(arguments[-1]), case.M)) > most
    return many or case.dtype != torch.float16


def rehearse(cases: Iterable[Case], targets: Sequence[Target]) -> dict[tuple[str, str], list[str]]:
    """Call the launcher of each case for each target; {(op, why it fails on a GPU): calls}.

    Nothing is compiled, so it serves under the interpreter, too. A case that launches nothing, and leaves no product
    to torch, fails: its check would compare the reference with itself.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        arguments, options = case.make("meta")
        for target in targets:
            if _is_left_out(case, arguments, target):
                continue
            try:
                launches, products = record_call(partial(launcher(case.op), *arguments, **options), target)
                reason = None if launches or products else "no kernel is launched"
            except REFUSALS as error:
                reason = _reason(error)
            if reason is not None:
                found.setdefault((case.op, reason), []).append(f"{case.name}, {target.name}")
    return found


def collect(cases: Iterable[Case], targets: Sequence[Target]) -> Collected:
    """Call the launcher of each case for each target."""
    found, binders = Collected({}, {}, {}, {}), {}
    inputs = [(case, *case.make("meta")) for case in cases if case.op in gpu_ops()]
    for target in targets:
        for case, arguments, options in inputs:
            if _is_left_out(case, arguments, target):
                continue
            call = partial(launcher(case.op), *arguments, **options)
            try:
                launches, products = record(call, target, binders)
            except REFUSALS as error:
                found.failures.setdefault((case.op, _reason(error)), []).append(f"{case.name}, {target.name}")
                continue
            found.calls[target.name, case], found.products[target.name, case] = launches, products
            for launched in launches:
                use = found.uses.setdefault(launched.unit.key, Use(launched.unit, []))
                use.launches.append((case, launched))
    return found


def cover(uses: Iterable[Use], subset: str) -> list[Use]:
    """A few uses of each kernel that have every value of every constexpr, pointer type and option.

    subset: "tiles": on each target, and every tile, as the launchers choose them, with every decoder and every pointer
    type; "ci": every kernel on each target, but every value on one of them, the first if it can be; "few": the three
    uses of each kernel that have the most of "ci".
    """
    kept = []
    groups: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        groups.setdefault((use.unit.name, use.unit.target.name if subset == "tiles" else ""), []).append(use)
    for group in groups.values():
        features = {use.unit.key: _features(use.unit, crossed=subset == "tiles") for use in group}
        missing = set().union(*features.values())
        most = len(kept) + (3 if subset == "few" else len(group))
        while missing and len(kept) < most:
            best = max(group, key=lambda use: len(features[use.unit.key] & missing))  # noqa: B023
            kept.append(best)
            missing -= features[best.unit.key]
    return kept


def _features(unit: Unit, *, crossed: bool) -> set[tuple]:
    values = {name: str(value) for name, value in unit.values.items()}
    values |= {name: str(unit.options[name]) for name in ("num_warps", "num_stages")}
    pointers = {(name, kind) for name, kind in unit.signature.items() if kind.startswith("*")}
    found: set[tuple] = {("target", unit.target.name)} | pointers | set(values.items())
    if crossed:
        tile = tuple(pair for pair in values.items() if pair[0].startswith(_TILE))
        found |= {(tile, pair) for pair in found if pair in pointers or pair[0].endswith(_DECODER)}
    return found


def uncovered(uses: Iterable[Use]) -> list[str]:
    """Kernels (`_..._kernel`) of the package that no case launches."""
    from triton.runtime.jit import JITFunction

    for op in gpu_ops():
        launcher(op)
    launched = {use.unit.kernel for use in uses}
    names = []
    for module in [m for name, m in sys.modules.items() if name.startswith("hf_quant.kernels.")]:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel") and value not in launched:
                if value.fn.__module__ == module.__name__:
                    names.append(f"{module.__name__}.{name}")
    return names


def work_of(case: Case, launched: Recorded, built: Built) -> Work:
    """Compute the bytes and operations of a launch from its tensors and its tiles."""
    unique = {id(tensor): tensor for tensor in tensors(launched.arguments)}
    num_bytes = sum(t.nbytes * (case.touched if t.dim() == 3 else 1) for t in unique.values())
    kinds = {dot_kind(*pair) for pair in built.dots}
    kind = "fp8" if "f8" in kinds else "int8" if "i8" in kinds else "16bit" if kinds else None
    blocks, steps, num_ops = 1, None, float(case.num_ops)
    for size in launched.grid:
        blocks *= int(size)
    values = {**launched.arguments, **launched.unit.values}
    if all(isinstance(values.get(name), int) for name in ("M", "N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K")):
        values["K"] *= values.get("ALIGN", 1)  # kernels of 8-bit operands count K in such units
        M, N, K = (-(-values[name] // values[f"BLOCK_{name}"]) for name in "MNK")
        if case.op.startswith("grouped_mm"):  # every expert's rows fill tiles of their own
            experts = max(round(case.touched * values.get("E", _experts(launched))), 1)
            M = experts * -(-max(case.M // experts, 1) // values["BLOCK_M"])
        steps = M * N * K
        num_ops = 2.0 * steps * values["BLOCK_M"] * values["BLOCK_N"] * values["BLOCK_K"]
        if launched.unit.name == "_hopper_mm_kernel":  # whose loop takes two in a turn
            steps = -(-steps // 2)
    elif launched.unit.name == "_few_mm_kernel":  # its loop, too
        steps = blocks * -(-int(values["steps"]) // 2)
    elif launched.unit.name in ("_kv_decode_kernel", "_kv_prefill_kernel"):
        # Every tile of rows reads the tokens of its head; a causal chunk reads half of its own.
        steps = int(launched.grid[0]) * -(-(values["T"] - values["S"] // 2) // values["BLOCK_N"])
        rows = values["BLOCK_M"] if "BLOCK_M" in values else values["G"] * values["R"] * values["PARTS"]
        num_ops = 4.0 * steps * rows * values["BLOCK_N"] * values["D"]
    return Work(int(num_bytes), num_ops if kind else 0.0, kind, blocks, steps)


def _experts(launched: Recorded) -> int:
    return max((t.shape[0] for t in tensors(launched.arguments) if t.dim() == 3), default=1)
