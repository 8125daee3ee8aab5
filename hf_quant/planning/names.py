"""Fold and unfold names with numbers: "layers.0.mlp" ... "layers.31.mlp" <-> "layers.{0-31}.mlp"."""

import itertools
import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any


# Limits on all names of a stored plan: more would be an attack on memory. Unfused experts of 2025 have 70 000.
MAX_MODULES = 250_000
MAX_CHARACTERS = 20_000_000
MAX_PARTS = 32  # between the dots of a name


def fold_names(names: list[str]) -> list[str]:
    """Fold names that differ in their numeric components only; `unfold_name` restores them, in another order."""
    groups: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for name in names:
        # "007" is not the number 7: only canonical numerals are folded, up to the length that `unfold_name` accepts.
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


def unfold_names(lists: Iterable[list[Any]]) -> Iterator[list[str]]:
    """Invert `fold_names` for each list of a stored plan.

    Raises ValueError as `unfold_name` does, and if all lists together have more names than a model can have.
    """
    modules = characters = 0
    for folded_names in lists:
        names: list[str] = []
        for folded in folded_names:
            found = unfold_name(folded)
            modules += len(found)
            characters += sum(map(len, found))
            if modules > MAX_MODULES or characters > MAX_CHARACTERS:
                raise ValueError(
                    f"the stored plan names more than {MAX_MODULES} modules, or has over {MAX_CHARACTERS} characters"
                )
            names += found
        yield names


def unfold_name(folded: str) -> list[str]:
    """Invert `fold_names` for one name. Raises ValueError on malformed or too large ranges."""
    if not isinstance(folded, str):
        raise ValueError(f"the stored plan names a module {folded!r}; names are strings")
    if len(folded) > MAX_CHARACTERS or folded.count(".") >= MAX_PARTS or not folded.isprintable():
        raise ValueError(f"the stored plan has the module name {folded[:80]!r}, which no model has")
    parts: list[list[str]] = []
    for part in folded.split("."):
        if not (part.startswith("{") and part.endswith("}")):
            parts.append([part])
            continue
        numbers: list[str] = []
        for piece in part[1:-1].split(","):
            match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", piece)
            if match is None:
                raise ValueError(f"the stored plan has the module name {folded[:80]!r}, which cannot be read")
            numbers += map(str, range(int(match[1]), int(match[2] or match[1]) + 1))
            if len(numbers) > MAX_MODULES:
                break
        parts.append(numbers)
    count = prod(map(len, parts))
    if count > MAX_MODULES or count * sum(len(part[-1]) for part in parts) > MAX_CHARACTERS:
        raise ValueError(f"the stored plan's {folded[:80]!r} stands for more than {MAX_MODULES} modules")
    return [".".join(combination) for combination in itertools.product(*parts)]
