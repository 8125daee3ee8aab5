"""`autoquant`: what a model's layers could be, from the fastest or smallest to the most exact, and what is chosen."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_quant.auto.search import Candidates, check_auto, search
from hf_quant.config import AUTO, LATENCY, QuantizerConfig, as_config
from hf_quant.planning import PlanEntry, QuantPlan, format_table


_STEPS = 8  # of bounds between the extremes of a frontier


class Frontier:
    """The choices of a search under many bounds, beside what each candidate gives alone; `print` shows a table.

    Attributes:
        points: {label: plan}, the fastest first (the smallest without latencies), with `loss`, `nbytes` and `seconds`.
        chosen: the label of the plan within the budget.
        config: an ordinary config of the chosen plan, which names the scheme of every layer: it needs no search. None
            if all layers stay in 16 bit.
        seconds: {call: its seconds in 16 bit}, measured.
    """

    def __init__(self, points: dict[str, QuantPlan], chosen: str, candidates: Candidates) -> None:
        self.points, self.chosen = points, chosen
        self.seconds = {workload: seen.seconds for workload, seen in candidates.seen.items()}
        self.config = explicit_config(candidates, points[chosen])
        self._is_kl = candidates.is_kl

    def ratio(self, label: str) -> float | None:
        """The predicted time of a plan over that of 16 bit, the mean of the calls; None without latencies."""
        ratios = [self.points[label].seconds[call] / seconds for call, seconds in self.seconds.items()]
        return sum(ratios) / len(ratios) if ratios else None

    def __str__(self) -> str:
        loss = "KL" if self._is_kl else "loss"
        times = [f"ms, {call}" for call in self.seconds]
        rows = [("scheme", f"predicted {loss}", "bits/weight", "MB", *times, *(["time / 16 bit"] if times else []))]
        for label, point in self.points.items():
            ratio = self.ratio(label)
            rows.append(
                (
                    label + (" (chosen)" if label == self.chosen else ""),
                    f"{point.loss:.3g}",
                    f"{point.bits_per_weight:.3f}" if point.quantized else "16",
                    f"{point.nbytes / 1e6:.1f}",
                    *(f"{1e3 * point.seconds[call]:.2f}" for call in self.seconds),
                    *([] if ratio is None else [f"{ratio:.2f}"]),
                )
            )
        return format_table(rows)


def autoquant(
    model: nn.Module,
    config: QuantizerConfig | dict[str, Any] | None = None,
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Frontier:
    """Search a 16-bit model under many bounds, and return the frontier with the choice within the budget.

    The losses of all layers are predicted as `auto_plan` does. With objective="latency" their times on this machine
    are measured, once for each shape, scheme and number of tokens, and kept in `hf_quant/latency.json` in the user's
    cache. The predicted time of a model is the sum of those of its layers and of what it takes without them. The model
    is not changed. Nothing else should run on the machine meanwhile.

    Args:
        model: the model, with its weights, on the device for which it is to be made fast.
        config: a config with weights="auto"; None: objective="latency" with its defaults.
        calibration, tokenizer, device, progress: as for `auto_plan`.

    Raises:
        ValueError: if no choice keeps the budget, and as `auto_plan` does.
    """
    config = QuantizerConfig(AUTO, objective=LATENCY) if config is None else as_config(config)
    check_auto(config)
    calibration = config.calibration if calibration is None else calibration
    found = search(model, config, calibration, tokenizer=tokenizer, device=device, progress=progress)
    candidates = found.candidates
    if candidates.is_kl is None:
        raise ValueError(
            f"a {type(model).__name__} without data has no predicted loss to draw a frontier of: give calibration="
        )
    points = dict(_uniform(candidates))
    chosen = _label(config.budget)
    points[chosen] = found.plan
    for label, budget in _bounds(candidates, points):
        try:
            point = candidates.allocated(budget)
        except ValueError:  # a bound that no choice keeps
            continue
        if all(point.schemes != other.schemes for other in points.values()):
            points[label] = point
    order = sorted(points, key=lambda label: (sum(_times(candidates, points[label])), points[label].nbytes))
    return Frontier({label: points[label] for label in order}, chosen, candidates)


def _times(candidates: Candidates, point: QuantPlan) -> list[float]:
    return [point.seconds[call] / seen.seconds for call, seen in candidates.seen.items()]


def _uniform(candidates: Candidates) -> Iterator[tuple[str, QuantPlan]]:
    """Every candidate for all layers, and 16 bit as it was measured."""
    for number, config in enumerate(candidates.configs):
        point = candidates.chosen([number] * len(candidates.units))
        if config is None:
            point.seconds = {call: seen.seconds for call, seen in candidates.seen.items()}
        yield _name(candidates, number), point


def _name(candidates: Candidates, number: int) -> str:
    given = candidates.config.named_candidates[number]
    if isinstance(given, dict):
        return ", ".join(str(v) if n == "weights" else f"{n}={v}" for n, v in given.items())
    return "16 bit" if given is None else given


def _label(budget: dict[str, float]) -> str:
    return "auto, " + ", ".join(f"{'loss' if n == 'kl' else n} <= {v:.3g}" for n, v in budget.items())


def _bounds(candidates: Candidates, uniform: dict[str, QuantPlan]) -> Iterator[tuple[str, dict[str, float]]]:
    """Budgets between the extremes of what each candidate gives alone: of the loss, or of the size."""
    budget = candidates.config.budget
    unit = next(name for name in ("kl", "gb", "bits") if name in budget)
    if unit == "kl":
        values = sorted(point.loss for point in uniform.values() if point.loss > 0)
        low, high = values[0], values[-1]
        steps = [low * (high / low) ** (i / _STEPS) for i in range(_STEPS + 1)]
    else:
        values = sorted(point.nbytes for point in uniform.values())
        sizes = [values[0] + (values[-1] - values[0]) * i / _STEPS for i in range(1, _STEPS)]
        steps = [candidates.in_unit(size, unit) for size in sizes]
    for value in steps:
        bounded = {**budget, unit: value}
        yield _label(bounded), bounded


def explicit_config(candidates: Candidates, chosen: QuantPlan) -> QuantizerConfig | None:
    """A config that makes the same plan without a search: the scheme of most weights, and `modules` for the others."""
    if not chosen.quantized:
        return None
    counts = [0] * len(candidates.configs)
    numbers = {name: _number(of, chosen.entries[name]) for name, of in candidates.searched.items()}
    for name, number in numbers.items():
        if candidates.configs[number] is not None:
            counts[number] += candidates.searched[name][0].num_weights
    default = max(range(len(counts)), key=lambda number: (candidates.configs[number] is not None, counts[number]))
    base = candidates.plans.index(candidates.base)
    for name, entry in chosen.entries.items():  # what is not searched is as the candidate with most bits has it
        plain = candidates.plans[default]
        if name not in numbers and plain is not None and plain.entries[name].scheme != entry.scheme:
            if entry.shared_with is None:
                numbers[name] = base
    own, modules = candidates.configs[default], dict(candidates.config.modules)
    assert own is not None  # a search has a candidate that quantizes
    for name, number in numbers.items():
        if number != default:
            other = candidates.configs[number]
            modules[name] = None if other is None else _fields(other)
    rest = {name: getattr(own, name) for name in ("kv_cache", "attention", "modules_to_not_convert")}
    return QuantizerConfig(**_fields(own), **rest, modules=modules)


def _number(entries: list[PlanEntry], entry: PlanEntry) -> int:
    return next(i for i, each in enumerate(entries) if each.scheme == entry.scheme)


def _fields(config: QuantizerConfig) -> dict[str, Any]:
    fields = config.scheme_fields()
    return {n: v for n, v in fields.items() if v is not None and (n, v) != ("activation_scale", "dynamic")}
