"""The line of a plan on models that mostly stay in 16 bit: the share, the largest kinds of modules, and what to do."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_quant.planning.table import template


if TYPE_CHECKING:
    from hf_quant.planning.records import PlanEntry


LARGE = 2**20  # weights of a module: nobody misses the 2 MB of less
_SHOWN = 3  # kinds of modules
KEPT_BY_USER = "kept by "  # beginning of the reason of an entry of `modules` that is None


def left_in_16_bit(entries: Iterable["PlanEntry"], num_weights: int) -> str | None:
    """Return the line, or None if no more than half of `num_weights`, all weights of the model, stay in 16 bit.

    What a user has excluded by name does not count, and a model without a layer of `LARGE` weights gets no line.
    """
    groups: dict[tuple[str, str], list[PlanEntry]] = {}
    for e in entries:
        reason = e.reason or ""
        if e.scheme is None and e.num_weights and not reason.startswith(KEPT_BY_USER):
            kind = "" if e.kind == "other" else e.kind
            groups.setdefault((kind, reason.partition(";")[0].removeprefix(f"{e.kind}: ")), []).append(e)
    sizes = {group: sum(e.num_weights for e in found) for group, found in groups.items()}
    left = sum(sizes.values())
    if 2 * left <= num_weights or max(e.num_weights for found in groups.values() for e in found) < LARGE:
        return None
    largest = sorted(sizes, key=lambda group: -sizes[group])
    shown: list[str] = []
    for kind, reason in largest[:_SHOWN]:
        if shown and 100 * sizes[kind, reason] < num_weights:
            break  # the rest is below 1 %
        share = f"{100 * sizes[kind, reason] // num_weights} %"
        shown.append(f"{share} {kind} ({reason})" if kind else f"{share}, as {reason}")
    kinds = "; ".join(shown)
    named = next((group for group in largest if group[0]), None)
    if named is None:
        advice = "hf_quant cannot quantize these"
    else:
        advice = f"to quantize them, too, name them: {naming(groups[named])}"
    return f"{100 * left // num_weights} % of the weights stay in 16 bit: {kinds}; {advice}"


def naming(entries: Iterable["PlanEntry"]) -> str:
    """Return the argument of `QuantizerConfig` that quantizes the largest of the entries, and those of like names."""
    pattern = template(max(entries, key=lambda e: e.num_weights).name)
    return f"modules={{{pattern!r}: 'int8'}}"
