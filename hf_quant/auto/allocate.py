"""`allocate`: choose one candidate for each unit of a model, so that the sum of their scores is least in a budget."""

from collections.abc import Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """Modules that get the same candidate: layers that read one tensor, or one module.

    Attributes:
        names: the modules.
        costs: what each candidate costs, in bytes or any other unit.
        scores: what each candidate loses.
    """

    names: tuple[str, ...]
    costs: Sequence[float]
    scores: Sequence[float]


class _Step(NamedTuple):
    """A change of a unit to its next better candidate."""

    gain: float  # of the score, per unit of cost
    unit: int
    number: int  # of the steps of the unit
    candidate: int


def allocate(units: Sequence[Unit], budget: float) -> list[int]:
    """Return the number of the candidate of each unit.

    Each unit begins with its cheapest candidate. Then the steps along the lower convex hulls of (cost, score) are
    taken in the order of what they gain for their cost, which is the solution of the Lagrangian, as far as they fit;
    what is left of the budget goes to the units that gain most by it. Shoham and Gersho, "Efficient bit allocation for
    an arbitrary set of quantizers", https://doi.org/10.1109/29.90373.

    Raises ValueError if the cheapest candidates cost more than the budget.
    """
    chosen = [min(range(len(unit.costs)), key=lambda c, u=unit: (u.costs[c], u.scores[c])) for unit in units]
    left = budget - sum(unit.costs[c] for unit, c in zip(units, chosen))
    if left < 0:
        raise ValueError(f"the budget is {budget:g}, and the cheapest candidates cost {budget - left:g}")
    steps = [step for i, unit in enumerate(units) for step in _steps(i, unit)]
    taken = [0] * len(units)
    for step in sorted(steps, key=lambda step: (-step.gain, step.unit, step.number)):
        cost = units[step.unit].costs[step.candidate] - units[step.unit].costs[chosen[step.unit]]
        if step.number == taken[step.unit] and cost <= left:
            chosen[step.unit], taken[step.unit], left = step.candidate, step.number + 1, left - cost
    while (better := _best_that_fits(units, chosen, left)) is not None:
        i, candidate = better
        left -= units[i].costs[candidate] - units[i].costs[chosen[i]]
        chosen[i] = candidate
    return chosen


def _steps(i: int, unit: Unit) -> list[_Step]:
    """The steps along the lower convex hull of a unit, from its cheapest candidate on; their gains fall."""
    hull: list[int] = []
    for candidate in sorted(range(len(unit.costs)), key=lambda c: (unit.costs[c], unit.scores[c])):
        if hull and unit.scores[candidate] >= unit.scores[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(unit, hull[-1], candidate) >= _gain(unit, hull[-2], hull[-1]):
            hull.pop()
        hull.append(candidate)
    pairs = zip(hull, hull[1:])
    return [_Step(_gain(unit, before, after), i, number, after) for number, (before, after) in enumerate(pairs)]


def _gain(unit: Unit, before: int, after: int) -> float:
    return (unit.scores[before] - unit.scores[after]) / (unit.costs[after] - unit.costs[before])


def _best_that_fits(units: Sequence[Unit], chosen: Sequence[int], left: float) -> tuple[int, int] | None:
    """The change (unit, candidate) that takes most off the scores, among those that the rest of the budget pays."""
    best, gained = None, 0.0
    for i, (unit, current) in enumerate(zip(units, chosen)):
        for candidate, (cost, score) in enumerate(zip(unit.costs, unit.scores)):
            gain = unit.scores[current] - score
            if gain > gained and cost - unit.costs[current] <= left:
                best, gained = (i, candidate), gain
    return best
