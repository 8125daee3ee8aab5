"""`auto_plan`: choose the scheme of each layer, so that the model loses least within a budget of bits or bytes."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_quant.algorithms import SOLVERS, PackedWeight, Statistics, quantize_matrix, solve_matrix
from hf_quant.auto.allocate import Unit, allocate
from hf_quant.calibration import (
    Calibration,
    Data,
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
from hf_quant.modules import in_basis, quantized_class
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
    """

    plan: QuantPlan
    data: Data | None


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
    config = as_config(config)
    calibration = config.calibration if calibration is None else calibration
    if not config.is_auto:
        raise ValueError(
            f"weights is {config.weights!r}; a search needs weights='auto': call hf_quant.plan for others"
        )
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
    configs = config.candidate_configs()
    plans = [None if each is None else plan(model, each) for each in configs]
    candidates = _Candidates(model, plans, config)
    candidates.check_budget()
    if is_file(calibration) or isinstance(calibration, Calibration):
        raise ValueError(
            f"weights is 'auto', and calibration a {type(calibration).__name__}: a search runs the model backward, "
            "too: give data, or a function that runs the model"
        )
    is_kl, data = None, None
    if calibration is not None or can_write(model):
        data = find_data(model, calibration, tokenizer, progress=progress)
        calls = record_calls(model, data.runs(False))
        if not calls:
            raise ValueError("the calibration data does not run the model: no layer can be scored")
        is_kl = _score_by_gradients(model, candidates, calls, device, progress)
    else:
        logger.warning(
            "there is no data, and a %s writes none: bits are allocated by the relative errors of the weights, which "
            "say less than the gradients of the model. Give calibration=",
            type(model).__name__,
        )
        _score_by_weights(model, candidates, device, progress)
    quant_plan = candidates.allocated(is_kl)
    quant_plan.record = None if data is None else data.record
    return Found(quant_plan, data)


def check_search(model: nn.Module, config: QuantizerConfig) -> None:
    """Raise ValueError if the candidates do not fit the model or its budget; the model may be on the meta device."""
    plans = [None if each is None else plan(model, each) for each in config.candidate_configs()]
    _Candidates(model, plans, config).check_budget()


class _Candidates:
    """The plans of the candidates, and the modules among which they differ.

    Attributes:
        searched: {module: its entries, one per candidate}.
        scores: {module: its scores, one per candidate}, to be filled.
    """

    def __init__(self, model: nn.Module, plans: Sequence[QuantPlan | None], config: QuantizerConfig) -> None:
        self.config, self.plans = config, plans
        self.model = model
        given = [found for found in plans if found is not None]
        # What no input is observed of (convolutions, embeddings) gets the candidate with most bits.
        self.base = max(given, key=lambda found: found.nbytes)
        self.searched: dict[str, list[PlanEntry]] = {}
        for name, entry in self.base.entries.items():
            if entry.kind not in ("linear", "experts") or entry.shared_with is not None:
                continue
            entries = [_in_16_bit(entry) if found is None else found.entries[name] for found in plans]
            is_named = any(matches(pattern, name) for pattern in config.modules)
            if not is_named and len({e.scheme for e in entries}) > 1:
                self.searched[name] = entries
        if not self.searched:
            raise ValueError("weights is 'auto', but its candidates differ in no layer: name others")
        self.scores: dict[str, list[float]] = {}
        self.units = list(self._units())

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
    def fixed_bytes(self) -> int:
        """Bytes of everything else, and of the KV cache of the budget's context."""
        own = sum(self.base.entries[name].bytes_after for name in self.searched)
        return self.base.nbytes - own + _cache_bytes(self.model, self.config)

    def check_budget(self) -> None:
        """Raise ValueError if the smallest candidates need more than the budget."""
        least = sum(min(e.bytes_after for e in entries) for entries in self.searched.values())
        if least <= self.budget_bytes:
            return
        bits, nbytes = 8 * least / self.num_weights, least + self.fixed_bytes
        needed = f"{bits:.3f} bits per weight" if "bits" in self.config.budget else f"{nbytes / 1e9:.3f} GB"
        raise ValueError(
            f"the budget is {self.config.budget}, and the smallest candidates of {type(self.model).__name__} take "
            f"{needed}: give as much, or candidates with fewer bits"
        )

    @property
    def budget_bytes(self) -> float:
        """Bytes that the searched modules may take."""
        budget = self.config.budget
        if "bits" in budget:
            return budget["bits"] * self.num_weights / 8
        return budget["gb"] * 1e9 - self.fixed_bytes

    def allocated(self, is_kl: bool | None) -> QuantPlan:
        """The plan with the best candidate for each unit; `is_kl` None: the scores predict nothing."""
        units = [
            Unit(
                names,
                [sum(e.bytes_after for e in of) for of in zip(*(self.searched[n] for n in names))],
                [sum(of) for of in zip(*(self.scores[n] for n in names))],
            )
            for names in self.units
        ]
        chosen = allocate(units, self.budget_bytes)
        by_name = {name: candidate for unit, candidate in zip(units, chosen) for name in unit.names}
        entries = {name: self.searched[name][candidate] for name, candidate in by_name.items()}
        scores = {name: self.scores[name][candidate] for name, candidate in by_name.items()}
        return self.base.with_entries(entries, scores, is_kl)


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


def _score_by_gradients(
    model: nn.Module, candidates: _Candidates, calls: list[Any], device: Any, progress: bool
) -> bool:
    """Fill in the scores; True if they add up to a KL divergence."""
    transforms = {name: _transform(entries) for name, entries in candidates.searched.items()}
    is_kl = False
    with tqdm(total=len(transforms), desc="Scoring layers", disable=not progress) as bar:
        for part in _parts(candidates.searched, memory_for_statistics(model)):
            found = sensitivities(model, calls, {name: transforms[name] for name in part})
            is_kl = found.is_kl
            for name in part:
                of = found.layers.pop(name)
                if not all(
                    bool(s.rows.isfinite().all()) for matrices in of.values() for s in matrices if s is not None
                ):
                    raise ValueError(
                        f"the gradients at {name} contain NaN or inf: search the model in bfloat16 or fp32"
                    )
                candidates.scores[name] = _scores(model, candidates.searched[name], of, device)
                bar.update()
    return is_kl


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


def _score_by_weights(model: nn.Module, candidates: _Candidates, device: Any, progress: bool) -> None:
    """Fill in scores without data: the relative squared errors of the weights, by their number."""
    total = candidates.num_weights
    for name, entries in tqdm(candidates.searched.items(), desc="Scoring layers", disable=not progress):
        scores = [0.0] * len(entries)
        for weight in entries[0].shapes:
            original = _matrices(model, entries[0], weight, None, device)
            for number, entry in enumerate(entries):
                for matrix in original if entry.scheme is not None else ():
                    error = _error(matrix, quantize_matrix(matrix, entry.scheme.weight), entry.scheme.weight)
                    loss = float(error.square().sum() / matrix.square().sum().clamp(min=1e-30))
                    scores[number] += loss * matrix.numel() / total
        candidates.scores[name] = scores


def _scores(
    model: nn.Module, entries: list[PlanEntry], found: dict[str, list[Sensitivity | None]], device: Any
) -> list[float]:
    """The predicted loss of a module under each of its candidates."""
    scores = [0.0] * len(entries)
    for weight, of in found.items():
        matrices = _matrices(model, entries[0], weight, _transform(entries), device)
        seen = [number for number, sensitivity in enumerate(of) if sensitivity is not None]
        if not seen:
            raise ValueError(
                f"{entries[0].name} got no gradient from the calibration data: give batches that run the whole model"
            )
        for number, entry in enumerate(entries):
            if entry.scheme is not None:
                losses = [_loss(matrices[i], entry, of[i]) for i in seen]
                scores[number] += sum(losses) * len(of) / len(seen)  # experts without tokens lose like the others
    return scores


def _loss(matrix: Tensor, entry: PlanEntry, sensitivity: Any) -> float:
    """The predicted loss by the codes of one matrix [N, K]."""
    assert entry.scheme is not None  # it is quantized
    quant = entry.scheme.weight
    sensitivity = Sensitivity(*(t.to(matrix.device) for t in sensitivity))
    plain = sensitivity.losses(_error(matrix, quantize_matrix(matrix, quant), quant))
    if entry.algorithm not in SOLVERS:
        return float(plain.sum())
    # A solver takes long: some rows tell how much less it loses than the default algorithm.
    rows = slice(None, None, _SOLVED_ROWS) if len(matrix) >= 32 * _SOLVED_ROWS else slice(None)
    moments = Statistics(1, second_moment=sensitivity.inputs.diagonal(), hessian=sensitivity.inputs)
    solved = solve_matrix(matrix[rows].contiguous(), quant, SOLVERS[entry.algorithm], moments)
    error = _error(matrix[rows], solved, quant)
    share = float(sensitivity.losses(error, rows).sum() / plain[rows].sum().clamp(min=1e-30))
    return float(plain.sum()) * min(share, 1.0)


def _transform(entries: list[PlanEntry]) -> InputTransform | None:
    """The rotation of a module's input, which all candidates share. Raises ValueError if they do not."""
    found = {entry.scheme.input_transform for entry in entries if entry.scheme is not None}
    if len(found) > 1:
        raise ValueError(
            f"the candidates of {entries[0].name} rotate its input differently: give input_transform for all of them"
        )
    return found.pop()


def _matrices(
    model: nn.Module, entry: PlanEntry, weight: str, transform: InputTransform | None, device: Any
) -> list[Tensor]:
    """The matrices [N, K] of a weight in fp32, in the basis of its input."""
    module = model.get_submodule(entry.name)
    quantized = quantized_class(type(module))
    assert quantized is not None  # it is planned
    own = module.get_parameter(weight).detach()
    own = own if device is None else own.to(device)
    matrix = in_basis(quantized.to_matrix(module, weight, own), transform)
    return list(matrix.float().reshape(-1, *matrix.shape[-2:]))


def _error(matrix: Tensor, packed: PackedWeight, quant: TensorQuant) -> Tensor:
    """Codes - weight [N, K] in fp32."""
    K = matrix.shape[1]
    options = {"format": quant.format, "group_size": quant.columns_per_scale(K), "K": K, "dtype": torch.float32}
    return dequantize(*packed, **options) - matrix
