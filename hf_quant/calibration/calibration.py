"""`Calibration`: run a 16-bit model on data, and keep what its layers are given."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # comes with accelerate
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_quant.algorithms import SOLVERS, Statistics
from hf_quant.calibration.data import LENGTH, NUM_TOKENS, OWN_LENGTH, Data, default_length, of_rows, prepare
from hf_quant.calibration.fp32 import fast_products
from hf_quant.calibration.gradients import CallRecorder, Sensitivity, sensitivities
from hf_quant.calibration.observe import KINDS, CacheObserver, Moments, Observer, is_encoder_decoder
from hf_quant.calibration.sample import sample
from hf_quant.calibration.store import StatisticsFile
from hf_quant.config import QuantizerConfig, as_config
from hf_quant.planning import PlanEntry, QuantPlan, plan
from hf_quant.scheme import InputTransform


logger = logging.getLogger("hf_quant")

_LIMITS = {"num_tokens", "length", "seed", "temperature"}  # of data, in a dict that may name the data, too

TOKENIZERS: list[
    Callable[[nn.Module], Any]
] = []  # of hosts: model -> its tokenizer, or None; filled by `integrations`
_MEMORY_SHARE = 0.25  # of the memory that is free
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class Calibration:
    """Statistics of the inputs of a model's layers, for the algorithms and scales that need them.

        calibration = hf_quant.Calibration(model, QuantizerConfig("int4", algorithm="gptq"))
        with calibration:
            pipeline(prompts)          # or model(...), as often as you like
        hf_quant.quantize_(model, calibration.config, calibration=calibration)

    In the `with` block hooks see the inputs of the layers of the plan; nothing of the model is traced or replaced. For
    "gptq" `quantize_` runs some of the calls again, forward and backward, see `weight_by_gradients`. Padding that the
    model's attention_mask names is left out. Layers that read the same tensor share their statistics. Experts are
    routed as ever, and each sees its own tokens.

    Args:
        model: the 16-bit model, with its weights.
        config: what it will be quantized to; decides which layers need which statistics.
        kind: "hessian", "second_moment" or "amax", recorded of all layers; None: what the config needs.
        momentum: the largest magnitudes of the inputs are a moving average over the calls, with this weight on what
            was; None: the largest of all.
        max_memory: bytes that the statistics may take at a time; None: a quarter of what is free. `run` makes as many
            passes over the data as that takes.
        quant_plan: the plan, if it is made already.

    Attributes:
        config: the QuantizerConfig.
        plan: the QuantPlan.
        record: what the checkpoint will say about the data.
        states: {attention module: `Moments` of its keys and of its values}, for kv_cache="fp8".

    Raises:
        ValueError: if no layer of the plan needs data, or as `plan` does.
    """

    def __init__(
        self,
        model: nn.Module,
        config: QuantizerConfig | str | dict[str, Any],
        *,
        kind: str | None = None,
        momentum: float | None = None,
        max_memory: int | None = None,
        quant_plan: QuantPlan | None = None,
    ) -> None:
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(KINDS)}, or None")
        if momentum is not None and not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}; needs a number from 0 to below 1, or None")
        self.model, self.config, self.momentum = model, as_config(config), momentum
        # A model that is quantized already may get the scales of a cache.
        is_empty = quant_plan is None and self.config.quantizes_no_weights
        self.plan = QuantPlan([], 0) if is_empty else quant_plan or plan(model, self.config)
        self.record: dict[str, Any] = {"data": "a loop of the user's"}
        wanted = ((name, kind or needed(entry)) for name, entry in self.plan.quantized.items() if _observable(entry))
        self._wanted = {name: found for name, found in wanted if found is not None}
        # Engines take the scales of decoders.
        is_decoder = not is_encoder_decoder(model)
        self._observes_cache = self.config.has_fp8_cache and is_decoder
        if not self._wanted and not self._observes_cache:
            raise ValueError(
                f"no layer needs data under {self.config}: calibration is for algorithm='gptq' or 'imatrix', for "
                "activation_scale='static', and for kv_cache='fp8' of a decoder"
            )
        self.max_memory = max_memory if max_memory is not None else memory_for_statistics(model)
        self._moments: dict[str, dict[str, Sequence[Moments]]] = {}
        self.states: dict[str, tuple[Moments, Moments]] = {}
        self._recorder = CallRecorder(model)
        self._weighted: dict[str, dict[str, list[Sensitivity | None]]] = {}
        self._observers: list[Observer | CacheObserver | CallRecorder] = []

    # The primitive: the user runs the model.

    def __enter__(self) -> "Calibration":
        passes = self._passes()
        if len(passes) > 1:
            raise ValueError(
                f"the statistics need {len(passes)} passes in {self.max_memory / 1e9:.2f} GB: give the data to "
                "quantize_(model, config, calibration=...), a function that runs the model if need be, or more "
                "max_memory"
            )
        self._attach(passes[0])
        return self

    def __exit__(self, *exception: Any) -> None:
        self._detach()
        if exception[0] is None:
            self._check("")

    def _attach(self, names: Iterable[str]) -> None:
        if self._observers:
            raise ValueError("this Calibration observes its model already")
        wanted = {name: (self._wanted[name], self.transform(name)) for name in names}
        self._observers = [Observer(self.model, wanted, self._moments, self.momentum)]
        if self._observes_cache:
            self._observers.append(CacheObserver(self.model, self.states, self.momentum))
        if "hessian" in self._wanted.values() and not self._recorder.calls:
            self._observers.append(self._recorder)
        for observer in self._observers:
            observer.attach()

    def _detach(self) -> None:
        while self._observers:
            self._observers.pop().detach()

    def _check(self, where: str) -> None:
        """Raise ValueError if a layer got NaN or inf."""
        inputs = {f"input of {name}": [m for of in w.values() for m in of] for name, w in self._moments.items()}
        states = {f"cache of {name}": list(both) for name, both in self.states.items()}
        for what, found in (inputs | states).items():
            if not all(moments.is_finite for moments in found):
                raise ValueError(
                    f"the {what} contains NaN or inf{where}: the 16-bit model overflows on this data, or the data is "
                    "broken"
                )

    # Data that hf_quant runs.

    def passes(self, data: Data, *, progress: bool = False) -> Iterator[list[str]]:
        """Run the model on the data, once for each part of its layers; yield their names after each pass.

        The statistics of a part are dropped when the next begins.
        """
        passes = self._passes()
        self.record = data.record
        if len(passes) > 1:
            logger.info("calibration takes %d passes over the data: the statistics fill the memory", len(passes))
        is_training = self.model.training
        total = None if data.num_runs is None else data.num_runs * len(passes)
        with tqdm(total=total, desc="Calibrating", disable=not progress) as bar:
            for names in passes:
                self._moments = {}
                self._weighted = {}
                self._attach(names)
                self.model.eval()
                try:
                    with torch.no_grad(), fast_products():
                        for number, run in enumerate(data.runs(self._observes_output(names))):
                            run(self.model)
                            self._check(f" in batch {number}")
                            bar.update()
                finally:
                    self.model.train(is_training)
                    self._detach()
                yield names
        self._moments = {}

    def _observes_output(self, names: list[str]) -> bool:
        output = getattr(self.model, "get_output_embeddings", lambda: None)()
        return output is not None and any(self.model.get_submodule(name) is output for name in names)

    def _passes(self) -> list[list[str]]:
        """The layers, in parts whose statistics fit the memory."""
        first_of = {name: group[0] for group in self.plan.fused for name in group}
        parts: list[list[str]] = [[]]
        used, counted = 0, set()
        for name, kind in self._wanted.items():
            reader, entry = first_of.get(name, name), self.plan.entries[name]
            whole = _nbytes(entry, kind)
            own = whole if kind == "hessian" else 0  # weighted by gradients
            size = own + (0 if reader in counted else whole)
            if parts[-1] and used + size > self.max_memory:
                parts.append([])
                used, counted, size = 0, set(), own + whole
            counted.add(reader)
            used += size
            parts[-1].append(name)
        return parts

    # Results.

    def transform(self, name: str) -> InputTransform | None:
        """The rotation under which the inputs of a layer are recorded: that of its scheme."""
        scheme = self.plan.entries[name].scheme
        return None if scheme is None else scheme.input_transform

    @property
    def kv_scales(self) -> dict[str, list[float]] | None:
        """{attention module: [scale of its keys, scale of its values]} for a cache in fp8; None: there is none.

        A scale is the largest magnitude over 448, the largest number of fp8 e4m3. Raises ValueError if the model has
        filled no cache, or one with zeros.
        """
        if not self._observes_cache:
            return None
        scales = {
            name: [(m.amax.max() / _FP8_MAX).item() for m in both if m.amax is not None]
            for name, both in self.states.items()
        }
        if not scales or not all(len(both) == 2 and min(both) > 0 for both in scales.values()):
            raise ValueError(
                f"the KV cache of this {type(self.model).__name__} got no keys and values other than zeros from the "
                "calibration data: give data that runs its attention, or leave kv_cache out"
            )
        return scales

    def weight_by_gradients(self) -> None:
        """Mix each Hessian with one in which inputs count by the square of the gradient at the layer's output.

        The plain mean makes the error of the layer's output least, the weighted mean that of the model's. The half of
        each, scaled to the same mean diagonal, takes a quarter off the KL divergence of SmolLM2 in nf4 (.042 to .031;
        .034 by the weighted one alone). Kim et al., "GuidedQuant", https://arxiv.org/abs/2505.07004.
        """
        names = [name for name in self.observed if self._wanted[name] == "hessian"]
        transforms = {name: self.transform(name) for name in names}
        try:
            self._weighted = sensitivities(self.model, self._recorder.calls, transforms).layers if names else {}
        except (RuntimeError, ValueError) as error:  # an operator without a gradient, or too little memory
            logger.warning(
                "the Hessians of %s are not weighted by gradients, because it does not run backward: %s",
                *(type(self.model).__name__, error),
            )

    @property
    def observed(self) -> list[str]:
        """Names of the layers that were given an input."""
        return [name for name, weights in self._moments.items() if _num_tokens(weights)]

    @property
    def nbytes(self) -> int:
        """Bytes of the statistics that are held."""
        held = {id(m): m for weights in self._moments.values() for matrices in weights.values() for m in matrices}
        return sum(moments.nbytes for moments in held.values())

    @property
    def unseen(self) -> list[str]:
        """Names of the layers that need data and were given no input."""
        seen = set(self.observed)
        return [name for name in self._wanted if name not in seen]

    def statistics(self, name: str) -> dict[str, list[Statistics]] | None:
        """{weight: one `Statistics` per matrix} of a layer; None if it was given no input.

        An expert that saw fewer tokens than it has inputs is filled up with those of the others.
        """
        weights = self._moments.get(name)
        if weights is None or not _num_tokens(weights):
            return None
        found = {weight: _filled(matrices) for weight, matrices in weights.items()}
        weighted = self._weighted.get(name, {})
        return {
            w: [_mixed_hessians(*pair) for pair in zip(of, weighted.get(w, [None] * len(of)))]
            for w, of in found.items()
        }

    def drop(self, name: str) -> None:
        """Free the statistics of a layer."""
        self._moments.pop(name, None)
        self._weighted.pop(name, None)


def needed(entry: PlanEntry) -> str | None:
    """The statistics that a layer of the plan needs, None if it needs none."""
    if entry.algorithm in SOLVERS:
        return "hessian" if entry.algorithm == "gptq" else "second_moment"
    return "amax" if entry.scheme is not None and entry.scheme.is_static else None


def needs_data(config: QuantizerConfig) -> bool:
    """True if an algorithm or scale of the config needs data."""
    entries = config.all_fields()
    return any(e.get("algorithm") in SOLVERS or e.get("activation_scale") == "static" for e in entries)


def takes_data(config: QuantizerConfig, calibration: Any) -> bool:
    """True if a search, an algorithm or a scale needs data, or a cache in fp8 gets scales from what is given."""
    return config.is_auto or needs_data(config) or (calibration is not None and config.has_fp8_cache)


def is_file(calibration: Any) -> bool:
    """True for statistics, or for the path of a file of them: with these a model is quantized while it loads."""
    is_path = isinstance(calibration, (str, Path)) and Path(calibration).suffix == ".safetensors"
    return is_path or isinstance(calibration, StatisticsFile)


def can_write(model: nn.Module) -> bool:
    """True if the model can write the text that it is calibrated on."""
    return getattr(model, "can_generate", lambda: False)() and not is_encoder_decoder(model)


def check_writer(model: nn.Module) -> None:
    """Raise ValueError unless the model can write the text that it is calibrated on."""
    if not can_write(model):
        raise ValueError(
            f"a {type(model).__name__} cannot write its own text to be calibrated on: give calibration=, a text file, "
            "texts, token ids, batches, or a function that runs the model"
        )


def find_data(model: nn.Module, data: Any, tokenizer: Any = None, *, progress: bool = False, **limits: Any) -> Data:
    """`data` as batches of the model; None: text that a causal language model writes itself.

    limits: num_tokens, length, seed, temperature. Raises ValueError as `calibrate` does.
    """
    if isinstance(data, Data):
        return data
    if isinstance(data, dict) and ("data" in data or (data and data.keys() <= _LIMITS)):
        unknown = set(data) - {"data", *_LIMITS}
        if unknown:
            raise ValueError(
                f"calibration has the unknown keys {sorted(unknown)}; allowed: data, num_tokens, length, seed, "
                "temperature"
            )
        limits = {**limits, **{name: value for name, value in data.items() if name != "data"}}
        data = data.get("data")
    num_tokens, length = limits.get("num_tokens", NUM_TOKENS), limits.get("length")
    if tokenizer is None and (
        isinstance(data, (str, Path)) or (isinstance(data, (list, tuple)) and data and isinstance(data[0], str))
    ):
        tokenizer = next((found for find in TOKENIZERS if (found := find(model)) is not None), None)
    length = default_length(model, tokenizer, OWN_LENGTH if data is None else LENGTH) if length is None else length
    for name, value in (("num_tokens", num_tokens), ("length", length)):
        if type(value) is not int or value < 2:
            raise ValueError(f"{name} is {value!r}; needs a number of tokens from 2 on")
    if data is not None:
        return prepare(data, model, tokenizer, num_tokens, length)
    check_writer(model)
    chosen = {"seed": limits.get("seed", 0), "temperature": limits.get("temperature", 1.0)}
    if type(chosen["seed"]) is not int:
        raise ValueError(f"seed is {chosen['seed']!r}; needs an integer")
    if type(chosen["temperature"]) not in (int, float) or not 0 < chosen["temperature"] < math.inf:
        raise ValueError(f"temperature is {chosen['temperature']!r}; needs a number above 0")
    found = of_rows(sample(model, num_tokens, length, progress=progress, **chosen), model, "text that the model wrote")
    return found._replace(record={**found.record, **chosen})


def calibrate(
    model: nn.Module,
    data: Any = None,
    *,
    kind: str = "second_moment",
    config: QuantizerConfig | str | dict[str, Any] = "int4",
    tokenizer: Any = None,
    num_tokens: int = NUM_TOKENS,
    length: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> StatisticsFile:
    """Record the statistics of the inputs of a model's layers, to be saved: `calibrate(model, data).save(path)`.

    A model is quantized with the file while it loads: `QuantizerConfig("int4", algorithm="imatrix",
    calibration=path)`.

    Args:
        model: the 16-bit model.
        data: a text file or a .npy file of token ids; a list of texts; token ids, a tensor or lists; batches (dicts of
            arguments of the model, or tensors), a list or a DataLoader; or a function of the model that runs it, such
            as `lambda model: pipeline(prompts)`. None: text that a causal language model writes itself. A dict
            {"data": any of these, "num_tokens": n, "length": n, "seed": n} sets the limits, too.
        kind: "second_moment" (an imatrix) or "amax".
        config: what the model will be quantized to: which layers, and whether their inputs are rotated.
        tokenizer: for texts; None: the tokenizer of the model's checkpoint.
        num_tokens: tokens of texts that are used at most, spread over them.
        length: tokens of a sequence; None: 512, of text that the model writes 256, or fewer if it has fewer positions.
        seed: of the text that the model writes.
        progress: True shows a progress bar.

    Raises:
        ValueError: if the data is empty or of an unknown kind, or the model is quantized already.
    """
    if kind not in ("second_moment", "amax"):
        raise ValueError(f"kind is {kind!r}; allowed: 'second_moment', 'amax' (Hessians are not saved)")
    calibration = Calibration(model, config, kind=kind)
    found = find_data(model, data, tokenizer, progress=progress, num_tokens=num_tokens, length=length, seed=seed)
    statistics = {}
    for names in calibration.passes(found, progress=progress):
        statistics.update({name: s for name in names if (s := calibration.statistics(name)) is not None})
    if not statistics:
        raise ValueError("no layer was given an input: does the data run this model?")
    transforms = {name: calibration.transform(name) for name in statistics}
    return StatisticsFile(statistics, transforms, calibration.record, calibration.kv_scales)


def _observable(entry: PlanEntry) -> bool:
    return entry.kind in ("linear", "experts") and entry.shared_with is None


def _nbytes(entry: PlanEntry, kind: str) -> int:
    """Bytes of the statistics of a layer in fp32."""
    total = 0
    for *lead, _, K in entry.shapes.values():
        total += 4 * math.prod(lead) * (K + {"hessian": K * K, "second_moment": K, "amax": 0}[kind])
    return total


def memory_for_statistics(model: nn.Module) -> float:
    """Bytes that statistics may take at a time: a quarter of what is free on the device of the model."""
    device = next(model.parameters()).device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return free * _MEMORY_SHARE


def _num_tokens(weights: dict[str, Sequence[Moments]]) -> int:
    return sum(moments.num_tokens for matrices in weights.values() for moments in matrices)


def _filled(matrices: Sequence[Moments]) -> list[Statistics]:
    """The statistics of each matrix; of experts with few tokens, mixed with the mean of all."""
    if len(matrices) == 1:
        return [matrices[0].statistics()]
    found = [moments.statistics() if moments.num_tokens else None for moments in matrices]
    seen = [own for own in found if own is not None]
    amax = torch.stack([own.amax for own in seen if own.amax is not None]).amax(0)
    means = (_mean(seen, "second_moment"), _mean(seen, "hessian"))
    filled = []
    for own in found:
        if own is None:
            own = Statistics(1, amax, *means)
        elif own.num_tokens < own.num_features:
            share = own.num_tokens / own.num_features
            mixed = [_mixed(mine, of_all, share) for mine, of_all in zip((own.second_moment, own.hessian), means)]
            own = replace(own, second_moment=mixed[0], hessian=mixed[1])
        filled.append(own)
    return filled


def _mixed_hessians(statistics: Statistics, sensitivity: Sensitivity | None) -> Statistics:
    """The statistics with the half of their Hessian, and of the one whose inputs are weighted by gradients."""
    plain = statistics.hessian
    if sensitivity is None or plain is None:
        return statistics
    weighted = sensitivity.inputs.to(plain.device)
    if not bool(weighted.diagonal().sum().isfinite()):
        return statistics  # gradients in fp16 may overflow
    scale = plain.diagonal().mean() / weighted.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    return replace(statistics, hessian=(weighted * scale).add_(plain).mul_(0.5))


def _mean(seen: list[Statistics], part: str) -> Tensor | None:
    """The mean over all tokens of a part of the statistics, None if it was not recorded."""
    count, total = sum(own.num_tokens for own in seen), None
    for own in seen:
        value = getattr(own, part)
        if value is None:
            return None
        value = value * (own.num_tokens / count)
        total = value if total is None else total.add_(value)
    return total


def _mixed(own: Tensor | None, of_all: Tensor | None, share: float) -> Tensor | None:
    return None if own is None or of_all is None else own * share + of_all * (1 - share)
