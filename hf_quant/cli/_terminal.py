"""Print plans: a table that fits the window of a terminal, and the plain text of `print(plan)` everywhere else."""

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_quant.planning import PLAN_HEADER, QuantPlan, add_mark, plan_losses, plan_rows, plan_totals


_NUMBERS = ("count", "bits", "MB")
_DIGITS = "123456789"  # marks of reasons; those of kernels are letters


def print_plan(plan: QuantPlan) -> None:
    """Print a plan. On a terminal the table has its width; in a pipe or file it is `str(plan)`, one line per row."""
    if not sys.stdout.isatty():
        print(plan)
        return
    console = Console(highlight=False, emoji=False, markup=False)
    table, notes = _table(plan)
    console.print(table)
    for mark, text in notes.items():
        console.print(Text(f"{mark}  {text}"))
    console.print(Text(plan_totals(plan)))


def _table(plan: QuantPlan) -> tuple[Table, dict[str, str]]:
    """Lay a plan out as (table, {mark in its last column: long text that the mark stands for})."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True)
    losses = ("loss",) if plan.scores else ()
    for name in ("modules", "count", "shape", "scheme", "bits", "MB", *losses, "notes"):
        is_number = name in _NUMBERS
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    kernels: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for row, loss in zip(plan_rows(plan, kernels), plan_losses(plan)):
        cells = dict(zip(PLAN_HEADER, row))
        marks = [cells["kernels"]] if cells["kernels"] else []
        if cells["reason"]:
            marks.append(add_mark(reasons, cells["reason"], _DIGITS))
        before, after = cells["MB before"], cells["MB after"]
        size = after if before == after else f"{before} -> {after}"
        values = [*(cells[name] for name in ("modules", "count", "shape", "scheme", "bits")), size]
        table.add_row(*map(Text, [*values, *([loss] if losses else []), " ".join(marks)]))
    return table, {mark: text for notes in (kernels, reasons) for text, mark in notes.items()}
