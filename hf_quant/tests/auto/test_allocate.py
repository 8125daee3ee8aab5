"""`allocate`: near the optimum of all choices, within the budget, and never by a candidate that another one beats."""

import itertools

import pytest
import torch

from hf_quant.auto import Unit, allocate


def units_of(seed: int, count: int = 6, candidates: int = 4) -> list[Unit]:
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 100, (count, candidates), generator=generator).tolist()
    scores = torch.rand(count, candidates, generator=generator).tolist()
    return [Unit((str(i),), cost, score) for i, (cost, score) in enumerate(zip(costs, scores))]


def total(units, chosen, part) -> float:
    return sum(getattr(unit, part)[c] for unit, c in zip(units, chosen))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("room", [0.0, 0.2, 0.5, 1.0])
def test_near_the_best_of_all_choices(seed, room):
    units = units_of(seed)
    least, most = (sum(pick(unit.costs) for unit in units) for pick in (min, max))
    budget = least + room * (most - least)
    chosen = allocate(units, budget)
    assert total(units, chosen, "costs") <= budget
    choices = [c for c in itertools.product(range(4), repeat=6) if total(units, c, "costs") <= budget]
    best = min(total(units, c, "scores") for c in choices)
    worst = max(total(units, c, "scores") for c in choices)
    assert total(units, chosen, "scores") <= best + 0.05 * (worst - best)


def test_all_that_improves_is_taken_where_the_budget_allows_it():
    units = units_of(0)
    assert allocate(units, 10**6) == [unit.scores.index(min(unit.scores)) for unit in units]


def test_a_candidate_above_the_hull_is_taken_only_to_fill_the_budget():
    unit = Unit(("a",), [10, 20, 30], [1.0, 0.9, 0.0])
    assert allocate([unit], 30) == [2] and allocate([unit], 29) == [1]
    assert sorted(allocate([unit, unit], 40)) == [0, 2]


def test_too_small_a_budget():
    with pytest.raises(ValueError, match="the budget is 5, and the cheapest candidates cost 10"):
        allocate([Unit(("a",), [10, 20], [1.0, 0.0])], 5)
