"""`allocate`: choose one candidate for each unit of a model, so that the sum of their scores is least in a budget.

`fastest` does the same within two budgets, of the loss and of the bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


_NOISE = 0.03  # of a predicted time


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


def fastest(
    units: list[Unit], nbytes: list[list[float]], most_loss: float, most_bytes: float, size: Callable[[float], str]
) -> list[int]:
    """The candidates with the least scores (times) among those whose costs (losses) and bytes are bounded.

    Bytes get a price in time, the lowest one that keeps their bound.
    """

    def choose(price: float, time: float = 1.0) -> tuple[list[int], float]:
        priced = [
            unit._replace(scores=[time * t + price * b for t, b in zip(unit.scores, of)])
            for unit, of in zip(units, nbytes)
        ]
        chosen = allocate(priced, most_loss)
        return chosen, sum(of[c] for of, c in zip(nbytes, chosen))

    chosen, used = choose(0.0)
    if used <= most_bytes:
        return chosen
    best, used = choose(1.0, time=0.0)
    if used > most_bytes:
        raise ValueError(
            f"no choice of the candidates keeps both bounds of the budget: with a predicted loss of {most_loss:g} the "
            f"smallest takes {size(used)}: give more of one, or other candidates"
        )
    low, high = 0.0, sum(max(unit.scores) for unit in units) / max(sum(max(of) for of in nbytes), 1)
    while choose(high)[1] > most_bytes and high < 1e12:
        low, high = high, 4 * high
    for _ in range(40):
        price = (low + high) / 2
        chosen, used = choose(price)
        if used <= most_bytes:
            best, high = chosen, price
        else:
            low = price
    return best


def one_for_all(
    numbers: list[int], units: list[Unit], nbytes: list[list[float]], most_bytes: float, rest: float
) -> list[int]:
    """One candidate for all units if it loses no more than the mixture `numbers`, and is not measurably slower.

    `rest` is the time of what is not in the units.
    """

    def total(table: Iterable[Sequence[float]], chosen: list[int]) -> float:
        return sum(of[number] for of, number in zip(table, chosen))

    losses, times = [unit.costs for unit in units], [unit.scores for unit in units]
    most_loss, most_time = total(losses, numbers), (1 + _NOISE) * (rest + total(times, numbers))
    alone = [[number] * len(units) for number in range(len(nbytes[0]))]
    kept = [c for c in alone if total(losses, c) <= most_loss and total(nbytes, c) <= most_bytes]
    kept = [c for c in kept if rest + total(times, c) <= most_time]
    return min(kept, key=lambda c: total(losses, c), default=numbers)
