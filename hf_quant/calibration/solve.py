"""Codes of the layers of a plan whose algorithm needs data."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_quant._wording import first_few
from hf_quant.algorithms import SOLVERS, PackedWeight, Statistics, calibrated_matrix
from hf_quant.calibration.calibration import Calibration, find_data, is_file, needed
from hf_quant.calibration.store import StatisticsFile
from hf_quant.config import QuantizerConfig
from hf_quant.modules import in_basis, quantized_class
from hf_quant.patterns import matches
from hf_quant.planning import PlanEntry, QuantPlan
from hf_quant.scheme import LinearScheme


logger = logging.getLogger("hf_quant")

_OUTLIER = 8  # times the magnitude of a usual token: then int8 codes of a usual token have 3 bits less


class Solved(NamedTuple):
    """Results of the calibration of a model.

    Attributes:
        packed: {module: {weight: its codes}}, of the layers whose algorithm needs data.
        amax: {module: {weight: largest magnitude of each input feature [K]}}, of layers with static scales.
        plan: the plan, in which the layers with outlier tokens have dynamic scales.
        config: a copy of the config with a record of the calibration.
    """

    packed: dict[str, dict[str, PackedWeight]]
    amax: dict[str, dict[str, Tensor]]
    plan: QuantPlan
    config: QuantizerConfig


def solve(
    model: nn.Module,
    config: QuantizerConfig,
    quant_plan: QuantPlan,
    calibration: Any = None,
    *,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Solved:
    """Calibrate a 16-bit model, and compute the codes of the layers that need it. The model is not changed.

    `calibration`: data, see `calibrate`; a `Calibration` of this model and config that has seen data; a
    `StatisticsFile`, or the path of one. Raises ValueError as these do, and if they do not fit the model.
    """
    solver = _Solver(model, config, quant_plan, device)
    if is_file(calibration):
        file = StatisticsFile.of(calibration)
        solver.solve(
            [n for n in solver.wanted if n in file.statistics],
            lambda n: of_file(file, quant_plan.entries[n]),
            progress,
        )
        return solver.finish(file.record, file.kv_scales)
    if isinstance(calibration, Calibration):
        if calibration.model is not model or calibration.config != config:
            raise ValueError(
                f"the calibration is of another model or config ({calibration.config}): give quantize_ "
                "calibration.model and calibration.config"
            )
        if not calibration.observed and not calibration.states:
            raise ValueError("the calibration has seen no data: run the model inside of `with calibration:`")
        calibration.weight_by_gradients()
        solver.solve(calibration.observed, calibration.statistics, progress, calibration.drop)
        return solver.finish(calibration.record, calibration.kv_scales)
    own = Calibration(model, config, quant_plan=quant_plan)
    data = find_data(model, calibration, tokenizer, progress=progress)
    for _ in own.passes(data, progress=progress):
        own.weight_by_gradients()
        solver.solve(own.observed, own.statistics, progress, own.drop)
    return solver.finish(data.record, own.kv_scales)


def of_file(file: StatisticsFile, entry: PlanEntry) -> dict[str, list[Statistics]]:
    """The statistics that a file has for a layer. Raises ValueError if they are not what the layer needs."""
    name, kind = entry.name, needed(entry)
    found = file.statistics[name]
    transform = None if entry.scheme is None else entry.scheme.input_transform
    if file.transforms.get(name) != transform:
        raise ValueError(
            f"the statistics of {name} are of inputs {file.transforms.get(name) or 'not rotated'}, and the layer's "
            f"will be {transform or 'not rotated'}: calibrate with the config that you quantize with"
        )
    if kind is not None and any(getattr(s, kind) is None for s in found.get(next(iter(entry.shapes)), [])):
        raise ValueError(f"the statistics of {name} lack what it needs: calibrate with kind={kind!r}")
    if {w: len(s) for w, s in found.items()} != {
        w: shape[0] if len(shape) == 3 else 1 for w, shape in entry.shapes.items()
    }:
        raise ValueError(f"the statistics of {name} are those of another layer: calibrate this model")
    return {weight: list(of) for weight, of in found.items()}


def with_outliers(
    config: QuantizerConfig, quant_plan: QuantPlan, statistics: Mapping[str, Mapping[str, Sequence[Statistics]]]
) -> QuantPlan:
    """The plan, but layers whose inputs have outlier tokens get a scale per token in place of a static int8 scale.

    In language models the inputs of a few layers have single tokens, such as the first, that are hundreds of times as
    large as the others, see Sun et al., "Massive Activations in Large Language Models",
    https://arxiv.org/abs/2402.17762. No static scale of 8 bits holds both. Layers that `modules` of the config names
    keep what it says.
    """
    found = [
        name
        for name, weights in statistics.items()
        if _is_static_int8(quant_plan.entries[name].scheme)
        and not any(matches(pattern, name) for pattern in config.modules)
        and any(_has_outliers(of) for matrices in weights.values() for of in matrices)
    ]
    if found:
        logger.warning(
            "%d of %d layers get a scale of their input per token, not a static one, because single tokens in it are "
            "more than %d times as large as the others: %s. Name them in `modules` to decide otherwise",
            *(len(found), len(statistics), _OUTLIER, first_few(found)),
        )
    return quant_plan.with_dynamic_inputs(found, "its input has outlier tokens")


def _is_static_int8(scheme: LinearScheme | None) -> bool:
    return scheme is not None and scheme.is_static and scheme.activation_on("cuda") == "int8"


def _has_outliers(of: Statistics) -> bool:
    return of.amax is not None and of.token_amax is not None and bool(of.amax.max() > _OUTLIER * of.token_amax)


class _Solver:
    """Computes the codes of one layer after the other."""

    def __init__(
        self, model: nn.Module, config: QuantizerConfig, quant_plan: QuantPlan, device: torch.device | str | None
    ) -> None:
        self.modules, self.config = dict(model.named_modules()), config
        self.plan, self.device = quant_plan, device
        entries = quant_plan.quantized.items()
        self.wanted = [n for n, entry in entries if entry.shared_with is None and needed(entry) is not None]
        self.packed: dict[str, dict[str, PackedWeight]] = {}
        self.inputs: dict[str, dict[str, list[Statistics]]] = {}  # of layers with static scales
        self.kept: list[str] = []  # layers in which a matrix keeps the codes of the default algorithm
        self.failed: dict[str, str] = {}  # {layer without a solution: why}

    def solve(
        self,
        names: Iterable[str],
        statistics: Callable[[str], dict[str, list[Statistics]] | None],
        progress: bool,
        drop: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Compute the codes of the layers, and free the statistics of each."""
        for name in tqdm(list(names), desc="Solving", disable=not progress):
            found = statistics(name)
            assert found is not None  # it was given an input
            entry = self.plan.entries[name]
            if entry.scheme is not None and entry.scheme.is_static:
                self.inputs[name] = {
                    w: [Statistics(s.num_tokens, amax=s.amax, token_amax=s.token_amax) for s in of]
                    for w, of in found.items()
                }
            if entry.algorithm in SOLVERS:
                try:
                    self.packed[name] = self._codes(entry, found)
                except ValueError as error:
                    if "Cholesky" not in str(error):
                        raise
                    self.failed[name] = str(error)
            del found
            drop(name)

    @torch.no_grad()
    def _codes(self, entry: PlanEntry, statistics: dict[str, list[Statistics]]) -> dict[str, PackedWeight]:
        module, scheme, algorithm = self.modules[entry.name], entry.scheme, entry.algorithm
        quantized = quantized_class(type(module))
        assert quantized is not None and scheme is not None and algorithm is not None  # it is planned, for a solver
        packed = {}
        for weight, found in statistics.items():
            fqn = f"{entry.name}.{weight}"
            own = module.get_parameter(weight).detach()
            device = own.device if self.device is None else torch.device(self.device)
            # `to_matrix` reads only what the host's module has.
            matrix = quantized.to_matrix(module, weight, own.to(device))  # pyrefly: ignore[bad-argument-type]
            matrix = in_basis(matrix, scheme.input_transform)
            moved = [of.to(device) for of in found]
            codes, num_kept = calibrated_matrix(matrix, scheme.weight, algorithm, moved, name=fqn)
            if num_kept:
                self.kept.append(fqn if len(moved) == 1 else f"{fqn} ({num_kept} of {len(moved)})")
            packed[weight] = codes.to(own.device)
        return packed

    def finish(self, record: dict[str, Any], kv_scales: dict[str, list[float]] | None) -> Solved:
        """The results. Raises ValueError if a layer with a static scale was given no input."""
        seen = {*self.packed, *self.inputs, *self.failed}
        unseen = [name for name in self.wanted if name not in seen]
        static = [n for n in unseen if needed(self.plan.entries[n]) == "amax"]
        if static or (unseen and len(unseen) == len(self.wanted)):
            raise ValueError(
                f"{first_few(static or unseen)} got no input from the calibration data: give data that reaches these "
                "layers, or another scheme for them in `modules`"
            )
        if unseen:
            logger.warning(
                "%s got no input from the calibration data, and are quantized by the default algorithm: give data "
                "that reaches them",
                first_few(unseen),
            )
        if self.failed:
            failed = first_few([f"{name} ({why})" for name, why in self.failed.items()])
            logger.warning("quantized by the default algorithm: %s", failed)
        if self.kept:
            logger.info(
                "%d weights keep the codes of the default algorithm, which answer to inputs that were held out no "
                "worse: %s",
                *(len(self.kept), first_few(self.kept)),
            )
        quant_plan = with_outliers(self.config, self.plan, self.inputs)
        amax = {
            name: {weight: torch.stack([s.amax for s in of if s.amax is not None]).amax(0) for weight, of in w.items()}
            for name, w in self.inputs.items()
            if quant_plan.schemes[name].is_static
        }
        config = copy.copy(self.config)
        config.calibrated_with, config.kv_scales = record, kv_scales
        return Solved(self.packed, amax, quant_plan, config)
