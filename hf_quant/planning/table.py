"""Tables: the table of a plan, and aligned columns of text."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_quant.planning.records import PlanEntry, QuantPlan


PLAN_HEADER = ("modules", "count", "shape", "scheme", "bits", "MB before", "MB after", "kernels", "reason")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def table(plan: "QuantPlan") -> str:
    """Format a plan as text: one line for each group of modules that are alike, then their kernels, and totals."""
    letters: dict[str, str] = {}
    rows = [PLAN_HEADER, *plan_rows(plan, letters)]
    if plan.scores:
        rows = [(*row[:7], score, *row[7:]) for row, score in zip(rows, ["loss", *plan_losses(plan)])]
    notes = [f"{letter}  {text}" for text, letter in letters.items()]
    return "\n".join([format_table(rows), *notes, plan_totals(plan)])


def plan_rows(plan: "QuantPlan", letters: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the cells under PLAN_HEADER, one row for each group of modules that are alike.

    `letters`: {text on the kernels of each device: the letter that stands for it in the rows}, to be filled.
    """
    rows: list[tuple[str, ...]] = []
    for (template, shapes, scheme, reason, _), entries in _groups(plan).items():
        after, count = sum(e.bytes_after for e in entries), sum(e.num_weights for e in entries)
        shared = entries[0].shared_with
        rows.append(
            (
                template,
                str(len(entries)),
                " + ".join("x".join(map(str, shape)) for shape in shapes),
                "16-bit" if scheme is None else str(scheme),
                f"{8 * after / count:.2f}" if count else "shared",
                f"{sum(e.bytes_before for e in entries) / 1e6:.2f}",
                f"{after / 1e6:.2f}",
                "" if scheme is None else add_mark(letters, _kernels(entries[0]), _LETTERS),
                "; ".join(filter(None, (reason, shared and f"shares the codes of {shared}" if scheme else None))),
            )
        )
    return rows


def _kernels(entry: "PlanEntry") -> str:
    return f"cpu: {entry.kernel('cpu')}\n   cuda: {entry.kernel('cuda')}"


def add_mark(marks: dict[str, str], text: str, signs: str) -> str:
    """Return the mark of a text: the next of the signs, doubled when they are used up."""
    rounds, position = divmod(len(marks), len(signs))
    return marks.setdefault(text, signs[position] * (rounds + 1))


def _groups(plan: "QuantPlan") -> "dict[tuple[Any, ...], list[PlanEntry]]":
    groups: dict[tuple[Any, ...], list[PlanEntry]] = {}
    for e in plan.entries.values():
        key = (template(e.name) or "(model)", tuple(e.shapes.values()), e.scheme, e.reason, e.shared_with is None)
        groups.setdefault(key, []).append(e)
    return groups


def plan_losses(plan: "QuantPlan") -> list[str]:
    """Return the predicted losses of the rows of `plan_rows`, "" where there is none."""
    sums = ([plan.scores[e.name] for e in entries if e.name in plan.scores] for entries in _groups(plan).values())
    return [f"{sum(scores):.2g}" if scores else "" for scores in sums]


def plan_totals(plan: "QuantPlan") -> str:
    """Return the lines under the table of a plan: sizes, what is left, shared products, blocks, cache, advice."""
    total = (
        f"{len(plan.quantized)} of {len(plan.entries)} modules quantized, {plan.bits_per_weight:.3f} bits per weight; "
        f"model {plan.nbytes_before / 1e6:.2f} -> {plan.nbytes / 1e6:.2f} MB"
    )
    if plan.is_kl is not None:
        what = "KL divergence per token" if plan.is_kl else "relative squared error of the output"
        total += f"\npredicted {what}: {plan.loss:.3g}"
    if plan.seconds:
        times = ", ".join(f"{1e3 * seconds:.3g} ms for {call}" for call, seconds in plan.seconds.items())
        total += f"\npredicted time: {times}"
    fused: dict[str, int] = {}
    for names in plan.fused:
        text = " + ".join([template(names[0]), *(n.rpartition(".")[2] for n in names[1:])])
        fused[text] = fused.get(text, 0) + 1
    if fused:
        total += f"\none product on {plan.fused_on}: " + ", ".join(f"{text} ({n})" for text, n in fused.items())
    lines = (plan.blocks, plan.kv_cache, plan.attention, plan.advice, plan.left)
    return "\n".join([total, *filter(None, lines)])


def template(name: str) -> str:
    """Replace the numbers between the dots of a name by "*", except at its beginning."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns of rows, with a line under the first row, which is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
