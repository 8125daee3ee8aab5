"""Writes the support matrix of docs/formats.md: the kernel that serves each format on each device.

    python scripts/support_matrix.py           # writes it between its markers
    python scripts/support_matrix.py --check   # exit status 1 if the page has another one; a unit test does the same

It asks `explain`, which also makes the plan's table and follows the dispatch of the ops; the matrix is for a layer of
4096 x 4096 in bf16, on a CPU with VNNI, with the native kernels.
"""

import argparse
import sys
from unittest.mock import patch

import torch

from common.pages import ROOT, is_current, markdown, page_with, write_section
from hf_quant.algorithms import empty_packed, geometry
from hf_quant.formats import ALIASES, FORMATS
from hf_quant.kernels import dynamic_mm, grouped_mm, native, weight_only_mm
from hf_quant.kernels.cpu import product
from hf_quant.kernels.dispatch import Problem, explain
from hf_quant.resolve import resolve_scheme
from hf_quant.scheme import LinearScheme


NAME = "support matrix"
SIZE = 4096  # N and K of the layer
INSTRUCTION_SET = "avx512"  # any: all of them take the same products
# What to ask for: (header, device, activations, experts).
COLUMNS = tuple(
    (f"{label}{what}", device, activations, experts)
    for label, device in (("CPU", "cpu"), ("GPU", "cuda"))
    for what, activations, experts in (
        ("", None, None),
        (", int8 act.", "int8", None),
        (", fp8 act.", "fp8", None),
        (", experts", None, 8),
    )
)


def paths(scheme: LinearScheme, device: str, experts: int | None, kernels: str | None) -> list[tuple[str, str]]:
    """[(path, for which M)] by which a layer of the scheme is computed; `kernels`: as `native.use` takes it."""
    problem = Problem(
        format=scheme.weight.format,
        group_size=geometry(scheme.weight, SIZE, SIZE)[1],
        N=SIZE,
        K=SIZE,
        dtype=torch.bfloat16,
        symmetric=scheme.weight.symmetric,
        activation=None if scheme.activation is None else scheme.activation.format,
        num_experts=experts,
    )
    op = grouped_mm if experts else weight_only_mm if scheme.activation is None else dynamic_mm
    found = []
    # The matrix is the same wherever it is made.
    with patch.object(product, "_VNNI", True), patch.object(native.extension, "_active", kernels):
        for path, when, reason in explain(op, device, problem):
            if reason is None:
                found.append((path, when))
                if when == "any M":  # what follows it is never taken
                    break
    return found


def matrix() -> str:
    """The matrix, the legend of its letters, and what serves without the native kernels, in Markdown."""
    letters: dict[tuple[str, str], str] = {}
    stock: dict[str, None] = {}  # names of the paths, in the order in which they are met
    alias = {full: short for short, full in ALIASES.items()}
    rows = []
    for name in FORMATS:
        scheme, _ = resolve_scheme({"weights": name}, torch.bfloat16)
        weight = scheme.weight
        size = sum(t.nbytes for t in empty_packed((SIZE, SIZE), weight, "meta") if t is not None)
        short = f" (`{alias[name]}`)" if name in alias else ""
        scale = str(weight).removeprefix(f"{name} ")
        cells = [f"`{name}`{short}", f"{8 * size / SIZE**2:.3f}", scale]
        for _, device, activations, experts in COLUMNS:
            found, _ = resolve_scheme({"weights": name, "activations": activations}, torch.bfloat16)
            taken = paths(found, device, experts, INSTRUCTION_SET)
            cells.append(" ".join(letters.setdefault(path, chr(ord("A") + len(letters))) for path in taken))
            if device == "cpu":
                stock.update((path, None) for path, _ in paths(found, device, experts, None))
        rows.append(cells)
    header = ["weights", "bits/weight", "scale per", *(column[0] for column in COLUMNS)]
    table = markdown([header, *rows])
    legend = "\n".join(f"- **{letter}** {path}: {when}" for (path, when), letter in letters.items())
    return (
        f"{table}\n\nEach letter is a path. It is taken for this number of tokens, M:\n\n{legend}\n\n"
        f"Without the native kernels, CPUs use ops of torch: {'; '.join(stock)}. `print(plan)` shows the one that is "
        "taken."
    )


def main() -> int:
    """Write the section, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.check:
        write_section(NAME, matrix())
        return 0
    current, page = is_current(NAME, matrix()), page_with(NAME).relative_to(ROOT)
    print(f"{page} is current" if current else f"{page} is not current: run scripts/support_matrix.py")
    return int(not current)


if __name__ == "__main__":
    sys.exit(main())
