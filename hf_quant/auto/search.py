"""`auto_plan`: choose the scheme of each layer, so that the model loses least within a budget of bits or bytes."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_quant.algorithms import SOLVERS, PackedWeight, Statistics, quantize_matrix, solve_matrix
from hf_quant.auto.allocate import Unit, allocate, fastest, one_for_all
from hf_quant.auto.latency import Latencies, Seen, Workload, find_workloads, watch
from hf_quant.calibration import (
    Calibration,
    Call,
    Data,
    InputRounding,
    Sensitivity,
    can_write,
    find_data,
    is_file,
    memory_for_statistics,
    record_calls,
    sensitivities,
)
from hf_quant.config import QuantizerConfig, as_config
from hf_quant.kernels import dequantize
from hf_quant.kv_cache import KVCacheConfig, bytes_per_token
from hf_quant.modules import check_model, in_basis, quantized_class
from hf_quant.patterns import matches
from hf_quant.planning import PlanEntry, QuantPlan, plan
from hf_quant.scheme import InputTransform, TensorQuant


logger = logging.getLogger("hf_quant")

_SOLVED_ROWS = 8  # of so many rows of a weight one is solved, to see how much less a solver loses


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        plan: an ordinary plan, with the predicted loss of each layer in `scores`.
        data: the data, for a calibration that follows; None: there is none.
        candidates: what was chosen from, to choose again.
    """

    plan: QuantPlan
    data: Data | None
    candidates: "Candidates"


def auto_plan(
    model: nn.Module,
    config: QuantizerConfig | dict[str, Any],
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> QuantPlan:
    """Plan what `quantize_` would do with weights="auto": one of the candidates for each layer of a 16-bit model.

    The loss of a layer under a candidate is predicted from the gradients of the model on some data, and the error of
    the layer's weight; the sum of the losses is made least within the budget. Layers that read one tensor get the same
    scheme, and so do the experts of a layer. What `modules` names, and what is not quantized by default, is left as it
    is. The model is not changed.

    Args:
        model: the model, with its weights.
        config: a config with weights="auto", and a budget.
        calibration: data, see `hf_quant.calibrate`; None: text that a causal language model writes itself. Of other
            models without data the relative errors of the weights decide, which says less; a warning says so.
        tokenizer: for texts; None: the tokenizer of the model's checkpoint.
        device: device that computes the errors; default: that of each weight.
        progress: True shows progress bars.

    Returns:
        An ordinary plan. `scores` has the predicted loss of each layer, and `print` shows them: they add up to the KL
        divergence per token, or, of a model without classes, to the relative squared error of its output.

    Raises:
        ValueError: if the budget is less than the smallest candidates need, and as `plan` and `calibrate` do.
    """
    check_model(model)
    config = as_config(config)
    calibration = config.calibration if calibration is None else calibration
    check_auto(config)
    return search(model, config, calibration, tokenizer=tokenizer, device=device, progress=progress).plan


def search(
    model: nn.Module,
    config: QuantizerConfig,
    calibration: Any = None,
    *,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Found:
    """See `auto_plan`."""
    candidates = Candidates(model, config)
    candidates.check_budget()
    if is_file(calibration) or isinstance(calibration, Calibration):
        raise ValueError(
            f"weights is 'auto', and calibration a {type(calibration).__name__}: a search runs the model backward, "
            "too: give data, or a function that runs the model"
        )
    data, calls = None, []
    if calibration is not None or can_write(model):
        data = find_data(model, calibration, tokenizer, progress=progress)
        calls = record_calls(model, data.runs(False))
        if not calls:
            raise ValueError("the calibration data does not run the model: no layer can be scored")
        candidates.record = data.record
        score_by_gradients(model, candidates, calls, device, progress)
    elif "kl" in config.budget:
        raise ValueError(
            f"the budget bounds the loss of the model, and a {type(model).__name__} without data has no prediction of "
            "it: give calibration="
        )
    else:
        logger.warning(
            "there is no data, and a %s writes none: bits are allocated by the relative errors of the weights, which "
            "say less than the gradients of the model. Give calibration=",
            type(model).__name__,
        )
        _score_by_weights(model, candidates, device, progress)
    if config.is_for_latency:
        candidates.time(find_workloads(model, config.latency_tokens, calls), progress=progress)
    return Found(candidates.allocated(config.budget), data, candidates)


def check_auto(config: QuantizerConfig) -> None:
    """Raise ValueError unless the config is one of a search."""
    if not config.is_auto:
        raise ValueError(
            f"weights is {config.weights!r}; a search needs weights='auto': call hf_quant.plan for others"
        )


def check_search(model: nn.Module, config: QuantizerConfig) -> None:
    """Raise ValueError if the candidates do not fit the model or its budget; the model may be on the meta device."""
    Candidates(model, config).check_budget()


class Candidates:
    """The plans of the candidates, and the modules among which they differ.

    Attributes:
        configs, plans: of each candidate; None: 16 bit.
        searched: {module: its entries, one per candidate}.
        scores: {module: its scores, one per candidate}, to be filled.
        is_kl: True if the scores add up to a KL divergence; None: they predict nothing.
        seconds: {workload: {module: its seconds, one per candidate}}, to be filled by `time`.
        seen: {workload: its times in 16 bit}.
    """

    def __init__(self, model: nn.Module, config: QuantizerConfig) -> None:
        self.config, self.model = config, model
        self.configs = config.candidate_configs()
        if any(each is not None and each.sparsity is not None for each in self.configs):
            raise ValueError("candidates are sparse, whose loss is not predicted: leave sparsity out")
        self.plans = [None if each is None else plan(model, each) for each in self.configs]
        # What no input is observed of (convolutions, embeddings) gets the candidate with most bits.
        self.base = max(filter(None, self.plans), key=lambda found: found.nbytes)
        self.searched: dict[str, list[PlanEntry]] = {}
        for name, entry in self.base.entries.items():
            if entry.kind not in ("linear", "experts") or entry.shared_with is not None:
                continue
            entries = [_in_16_bit(entry) if found is None else found.entries[name] for found in self.plans]
            is_named = any(matches(pattern, name) for pattern in config.modules)
            if not is_named and len({e.scheme for e in entries}) > 1:
                self.searched[name] = entries
        if not self.searched:
            raise ValueError("weights is 'auto', but its candidates differ in no layer: name others")
        self.units = list(self._units())
        self.scores: dict[str, list[float]] = {}
        self.is_kl: bool | None = None
        self.record: dict[str, Any] | None = None
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.seen: dict[str, Seen] = {}

    def _units(self) -> Iterator[tuple[str, ...]]:
        taken: set[str] = set()
        for group in self.base.fused:
            names = tuple(name for name in group if name in self.searched)
            taken.update(names)
            if names:
                yield names
        for name in self.searched:
            if name not in taken:
                yield (name,)

    @property
    def num_weights(self) -> int:
        """Weights of the searched modules."""
        return sum(entries[0].num_weights for entries in self.searched.values())

    @property
    def least_bytes(self) -> int:
        """Bytes of the searched modules with the smallest candidates."""
        return sum(min(e.bytes_after for e in entries) for entries in self.searched.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything else, and of the KV cache of the budget's context."""
        own = sum(self.base.entries[name].bytes_after for name in self.searched)
        return self.base.nbytes - own + _cache_bytes(self.model, self.config)

    def check_budget(self) -> None:
        """Raise ValueError if the smallest candidates need more than the budget."""
        if self.least_bytes > self.budget_bytes(self.config.budget):
            raise ValueError(
                f"the budget is {self.config.budget}, and the smallest candidates of {type(self.model).__name__} take "
                f"{self._size(self.least_bytes)}: give as much, or candidates with fewer bits"
            )

    def _size(self, nbytes: float) -> str:
        """The size of the searched modules, in the unit of the budget."""
        if "gb" in self.config.budget:
            return f"{rounded_up((nbytes + self.fixed_bytes) / 1e9)} GB"
        return f"{rounded_up(8 * nbytes / self.num_weights)} bits per weight"

    def budget_bytes(self, budget: dict[str, float]) -> float:
        """Bytes that the searched modules may take."""
        if "bits" in budget:
            return budget["bits"] * self.num_weights / 8
        return budget["gb"] * 1e9 - self.fixed_bytes if "gb" in budget else math.inf

    def in_unit(self, nbytes: float, unit: str) -> float:
        """The budget in a unit, "gb" or "bits", for a model of so many bytes."""
        kept = self.base.nbytes - sum(self.base.entries[name].bytes_after for name in self.searched)
        if unit == "gb":
            return (nbytes + self.fixed_bytes - kept) / 1e9
        return 8 * (nbytes - kept) / self.num_weights

    def time(self, workloads: Sequence[Workload], *, progress: bool = False) -> None:
        """Measure the seconds of every layer under every candidate in these workloads."""
        latencies = Latencies(self.model)
        numbers = range(len(self.plans))
        nbytes = [sum(entries[number].bytes_after for entries in self.searched.values()) for number in numbers]
        for workload in workloads:
            seen = self.seen[workload.label] = watch(self.model, self.searched, workload)
            calls = [(name, shape) for name, shapes in seen.inputs.items() for shape in shapes]
            wanted = [(self.searched[name][i], shape, nbytes[i]) for i in numbers for name, shape in calls]
            found = iter(latencies.measure(wanted, progress=progress))
            own = self.seconds[workload.label] = {name: [0.0] * len(self.plans) for name in self.searched}
            for number in numbers:
                for name, _ in calls:
                    own[name][number] += next(found)

    def table(self) -> tuple[list[list[float]], list[list[float]]]:
        """(bytes, losses) of each unit, one per candidate."""
        entries = [list(zip(*(self.searched[name] for name in names))) for names in self.units]
        nbytes = [[float(sum(e.bytes_after for e in of)) for of in unit] for unit in entries]
        losses = [[sum(of) for of in zip(*(self.scores[name] for name in names))] for names in self.units]
        return nbytes, losses

    def allocated(self, budget: dict[str, float]) -> QuantPlan:
        """The plan with the best candidate for each unit. Raises ValueError if none keeps the budget."""
        nbytes, losses = self.table()
        most = self.budget_bytes(budget)
        if "kl" not in budget:
            return self.chosen(allocate(self._as_units(nbytes, losses), most))
        least = sum(map(min, losses))
        if least > budget["kl"]:
            raise ValueError(
                f"the budget bounds the predicted loss by {budget['kl']:g}, and the best candidates of "
                f"{type(self.model).__name__} lose {rounded_up(least)}: give as much, or candidates with more bits, "
                "or None for 16 bit"
            )
        if not self.config.is_for_latency:
            return self.chosen(allocate(self._as_units(losses, nbytes), budget["kl"]))
        times = [[self._relative_time(names, number) for number in range(len(self.plans))] for names in self.units]
        units = self._as_units(losses, times)
        numbers = fastest(units, nbytes, budget["kl"], most, self._size)
        rest = sum(seen.rest / seen.seconds for seen in self.seen.values())
        return self.chosen(one_for_all(numbers, units, nbytes, most, rest))

    def _as_units(self, costs: list[list[float]], scores: list[list[float]]) -> list[Unit]:
        return [Unit(*each) for each in zip(self.units, costs, scores)]

    def _relative_time(self, names: Sequence[str], number: int) -> float:
        """The seconds of modules under a candidate, of each workload in units of its time in 16 bit."""
        return sum(
            seconds[name][number] / self.seen[workload].seconds
            for workload, seconds in self.seconds.items()
            for name in names
        )

    def chosen(self, numbers: Sequence[int]) -> QuantPlan:
        """The plan with candidate `numbers[i]` for unit i."""
        by_name = {name: number for names, number in zip(self.units, numbers) for name in names}
        entries = {name: self.searched[name][number] for name, number in by_name.items()}
        scores = {name: self.scores[name][number] for name, number in by_name.items()}
        found = self.base.with_entries(entries, scores, self.is_kl)
        found.record = self.record
        found.seconds = {
            workload: self.seen[workload].rest + sum(seconds[name][number] for name, number in by_name.items())
            for workload, seconds in self.seconds.items()
        }
        return found


def _in_16_bit(entry: PlanEntry) -> PlanEntry:
    return replace(entry, scheme=None, algorithm=None, bytes_after=entry.bytes_before, reason="chosen by the search")


def _cache_bytes(model: Any, config: QuantizerConfig) -> int:
    context = config.budget.get("context", 0)
    if not context:
        return 0
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(f"the budget has a context, but a {type(model).__name__} has no KV cache: leave it out")
    cache = None if config.kv_cache is None else KVCacheConfig.of(config.kv_cache)
    return context * bytes_per_token(model.config, cache)


def score_by_gradients(
    model: nn.Module, candidates: Candidates, calls: list[Call], device: Any, progress: bool
) -> None:
    """Fill in the scores, and what they add up to."""
    # In the host's basis: candidates may rotate their inputs differently.
    roundings = {name: _roundings(model, name, entries) for name, entries in candidates.searched.items()}
    with tqdm(total=len(roundings), desc="Scoring layers", disable=not progress) as bar:
        is_solved = any(e.algorithm in SOLVERS for of in candidates.searched.values() for e in of)
        num_parts = 2 if is_solved else 1
        for part in _parts(candidates.searched, memory_for_statistics(model) / num_parts):
            own = {name: roundings[name].values() for name in part}
            found = sensitivities(model, calls, dict.fromkeys(part), own, num_parts=num_parts)
            candidates.is_kl = found.is_kl
            for name in part:
                of = found.layers.pop(name)
                if not all(
                    bool(s.rows.isfinite().all()) for matrices in of.values() for s in matrices if s is not None
                ):
                    raise ValueError(
                        f"the gradients at {name} contain NaN or inf: search the model in bfloat16 or fp32"
                    )
                candidates.scores[name] = _scores(model, candidates.searched[name], of, roundings[name], device)
                bar.update()


def _roundings(model: nn.Module, name: str, entries: list[PlanEntry]) -> dict[int, InputRounding]:
    """{number of a candidate: how it quantizes the input of a module, where the module is now}."""
    device, found = next(model.get_submodule(name).parameters()).device.type, {}
    for number, entry in enumerate(entries):
        scheme = entry.scheme
        format = None if scheme is None else scheme.activation_on(device)
        if scheme is not None and format is not None:
            found[number] = InputRounding(format, scheme.is_static, scheme.input_transform)
    return found


def _parts(searched: dict[str, list[PlanEntry]], most: float) -> Iterator[list[str]]:
    """Yield names of modules whose sums fit into so many bytes."""
    part: list[str] = []
    used = 0
    for name, (entry, *_) in searched.items():
        nbytes = sum(4 * prod(lead) * K * K for *lead, _, K in entry.shapes.values())
        if part and used + nbytes > most:
            yield part
            part, used = [], 0
        part.append(name)
        used += nbytes
    yield part


def _score_by_weights(model: nn.Module, candidates: Candidates, device: Any, progress: bool) -> None:
    """Fill in scores without data: the relative squared errors of the weights, by their number."""
    total = candidates.num_weights
    for name, entries in tqdm(candidates.searched.items(), desc="Scoring layers", disable=not progress):
        scores = [0.0] * len(entries)
        for weight in entries[0].shapes:
            original = _matrices(model, entries[0], weight, device)
            for number, entry in enumerate(entries):
                for matrix in original if entry.scheme is not None else ():
                    error = _error(matrix, quantize_matrix(matrix, entry.scheme.weight), entry.scheme.weight)
                    loss = float(error.square().sum() / matrix.square().sum().clamp(min=1e-30))
                    scores[number] += loss * matrix.numel() / total
        candidates.scores[name] = scores


def _scores(
    model: nn.Module,
    entries: list[PlanEntry],
    found: dict[str, list[Sensitivity | None]],
    roundings: dict[int, InputRounding],
    device: Any,
) -> list[float]:
    """The predicted loss of a module under each of its candidates."""
    scores = [0.0] * len(entries)
    for weight, of in found.items():
        matrices = _matrices(model, entries[0], weight, device)
        seen = [number for number, sensitivity in enumerate(of) if sensitivity is not None]
        if not seen:
            raise ValueError(
                f"{entries[0].name} got no gradient from the calibration data: give batches that run the whole model"
            )
        for i in seen:
            matrix, sensitivity = matrices[i], of[i].to(matrices[i].device)
            for number, loss in enumerate(_losses(matrix, entries, sensitivity)):
                if number in roundings:
                    loss += sensitivity.input_loss(matrix, roundings[number])
                scores[number] += loss * len(of) / len(seen)  # experts without tokens lose like the others
    return scores


def _losses(matrix: Tensor, entries: list[PlanEntry], sensitivity: Sensitivity) -> Iterator[float]:
    """The predicted loss by the codes of one matrix [N, K], for each candidate."""
    bases: dict[InputTransform | None, tuple[Tensor, Sensitivity]] = {}
    for entry in entries:
        if entry.scheme is None:
            yield 0.0
            continue
        transform = entry.scheme.input_transform
        if transform not in bases:
            bases[transform] = in_basis(matrix, transform), sensitivity.rotated(transform)
        yield _loss(*bases[transform], entry.scheme.weight, entry.algorithm)


def _loss(matrix: Tensor, sensitivity: Sensitivity, quant: TensorQuant, algorithm: str | None) -> float:
    """The predicted loss by the codes of one matrix [N, K] in the basis of its inputs."""
    error = _error(matrix, quantize_matrix(matrix, quant), quant)
    plain = float(sensitivity.losses(error).sum())
    if algorithm not in SOLVERS:
        return plain
    # A solver takes long: some rows tell how much less it loses than the default algorithm, by inputs it has not seen.
    rows = slice(None, None, _SOLVED_ROWS) if len(matrix) >= 32 * _SOLVED_ROWS else slice(None)
    hessian, last = sensitivity.parts[0], len(sensitivity.parts) - 1
    moments = Statistics(1, second_moment=hessian.diagonal(), hessian=hessian)
    solved = _error(matrix[rows], solve_matrix(matrix[rows].contiguous(), quant, SOLVERS[algorithm], moments), quant)
    losses = [float(sensitivity.losses(each, rows, last).sum()) for each in (solved, error[rows])]
    return plain * min(losses[0] / max(losses[1], 1e-30), 1.0)


def _matrices(model: nn.Module, entry: PlanEntry, weight: str, device: Any) -> list[Tensor]:
    """The matrices [N, K] of a weight in fp32, in the host's basis."""
    module = model.get_submodule(entry.name)
    quantized = quantized_class(type(module))
    assert quantized is not None  # it is planned
    own = module.get_parameter(weight).detach()
    own = own if device is None else own.to(device)
    matrix = quantized.to_matrix(module, weight, own)
    return list(matrix.float().reshape(-1, *matrix.shape[-2:]))


def _error(matrix: Tensor, packed: PackedWeight, quant: TensorQuant) -> Tensor:
    """Codes - weight [N, K] in fp32."""
    K = matrix.shape[1]
    options = {"format": quant.format, "group_size": quant.columns_per_scale(K), "K": K, "dtype": torch.float32}
    return dequantize(*packed, **options) - matrix


def rounded_up(size: float) -> str:
    """A size with three decimals, or as many as show three digits, rounded up: a budget of so much suffices."""
    decimals = max(3, 2 - math.floor(math.log10(size)))
    return f"{math.ceil(size * 10**decimals) / 10**decimals:.{decimals}f}"
