"""Module names with numbers as a stored plan folds them: layers.0.mlp ... layers.31.mlp <-> layers.{0-31}.mlp."""

import itertools
import re
from math import prod


MAX_MODULES = 10**6  # in a stored plan; more is no model but an attack on memory


def fold_names(names: list[str]) -> list[str]:
    """Fold names that differ in their numeric components only; `unfold_name` gives them back, in another order."""
    groups: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for name in names:
        # "007" is not the number 7: only canonical numerals are folded, and none that `unfold_name` finds absurd.
        numerals = [p.isdecimal() and str(int(p)) == p and len(p) <= 6 for p in name.split(".")]
        numbers = tuple(int(p) for p, is_numeral in zip(name.split("."), numerals) if is_numeral)
        template = tuple(None if is_numeral else p for p, is_numeral in zip(name.split("."), numerals))
        groups.setdefault(template, []).append(numbers)
    folded = []
    for template, found in groups.items():
        slots = [sorted({numbers[i] for numbers in found}) for i in range(len(found[0]))]
        combinations = (
            [slots] if prod(map(len, slots)) == len(found) else [[[n] for n in numbers] for numbers in found]
        )
        for slot_values in combinations:
            values = iter(slot_values)
            folded.append(".".join(_fold_numbers(next(values)) if part is None else part for part in template))
    return folded


def _fold_numbers(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [n for _, n in run]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return "{" + ",".join(ranges) + "}"


def unfold_name(folded: str) -> list[str]:
    """Inverse of `fold_names` for one name. Raises ValueError on malformed or absurdly large ranges."""
    if not isinstance(folded, str):
        raise ValueError(f"the stored plan names a module {folded!r}; names are strings")
    parts: list[list[str]] = []
    for part in folded.split("."):
        if not (part.startswith("{") and part.endswith("}")):
            parts.append([part])
            continue
        numbers: list[str] = []
        for piece in part[1:-1].split(","):
            match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", piece)
            if match is None:
                raise ValueError(f"the stored plan has the module name {folded!r}, which cannot be read")
            numbers += map(str, range(int(match[1]), int(match[2] or match[1]) + 1))
            if len(numbers) > MAX_MODULES:
                break
        parts.append(numbers)
    if prod(map(len, parts)) > MAX_MODULES:
        raise ValueError(f"the stored plan's {folded[:80]!r} stands for more than {MAX_MODULES} modules")
    return [".".join(combination) for combination in itertools.product(*parts)]
