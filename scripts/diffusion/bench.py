"""Variants of a diffusion transformer in one process, and what a step of each takes; used by bench_pipeline.py.

All variants compute from the same random weights and share what they do not replace. They take turns, one denoising
loop each; the medians count. Where a model has fewer groups of blocks than published, each loop runs with k and with
2 k groups: a line through both gives the time of the whole model, which is then extrapolated, and marked so.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion.run import Call, compile_blocks_, denoising, predict, shallow_copy, truncated
from diffusion.spec import DiffusionModel, Step, scaled
from gpulab.rivals import FAILURES, first_line
from gpulab.timing import installed
from hf_quant import QuantizerConfig, quantize_
from hf_quant.evaluate import PeakMemory
from hf_quant.testing import sqnr


BASE = "bf16"
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8-dynamic": {"weights": "W8A8_FP8"},
    "int8-dynamic": {"weights": "W8A8"},
    "int4-dynamic": {"weights": "W4A8"},
    "int8": {"weights": "int8"},
    "fp8": {"weights": "fp8"},
    "int4": {"weights": "int4"},
    "nf4": {"weights": "nf4"},
}
SLOW, SLOW_STEPS = 4.0, 2  # a variant that is so much slower than 16 bit is timed by fewer steps
COMPARED = 5  # calls of the transformer of which the error is measured

Quantize = Callable[[nn.Module, DiffusionModel], object]


# Other libraries, in place, as their documentation says. They quantize linear layers of the blocks except modulations,
# whose inputs are one row: torch._int_mm takes no fewer than 17, and the published figures leave them out, too.


def of_blocks(spec: DiffusionModel) -> Callable[[nn.Module, str], bool]:
    """(module, its name) -> whether a rival quantizes it."""
    lists = tuple(f"{name}." for name in spec.block_lists) or ("down_blocks.", "mid_block.", "up_blocks.")

    def chosen(module: nn.Module, name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and name.startswith(lists)
            and not any(
                part.startswith(("norm", "adaln", "time")) or "mod" in part for part in name.lower().split(".")
            )
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    return chosen


def _torchao(config: str, **options: str) -> Quantize:
    def run(model: nn.Module, spec: DiffusionModel) -> None:
        from torchao import quantization

        made = {key: getattr(quantization, value)() for key, value in options.items()}
        quantization.quantize_(model, getattr(quantization, config)(**made), of_blocks(spec))

    return run


def _bitsandbytes_nf4(model: nn.Module, spec: DiffusionModel) -> None:
    import bitsandbytes as bnb

    chosen = of_blocks(spec)
    for name, old in [(n, m) for n, m in model.named_modules() if chosen(m, n)]:
        options = {"bias": old.bias is not None, "compute_dtype": old.weight.dtype, "quant_type": "nf4"}
        new = bnb.nn.Linear4bit(old.in_features, old.out_features, **options)
        new.weight = bnb.nn.Params4bit(old.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
        new.bias = old.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new.to(old.weight.device))


def _quanto(model: nn.Module, spec: DiffusionModel) -> None:
    from optimum import quanto

    chosen = of_blocks(spec)
    left = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and not chosen(module, name)
    ]
    quanto.quantize(model, weights=quanto.qint8, exclude=left)
    quanto.freeze(model)


RIVALS: dict[str, tuple[str, Quantize]] = {
    "torchao fp8 dynamic": (
        "torchao",
        _torchao("Float8DynamicActivationFloat8WeightConfig", granularity="PerRow"),
    ),
    "torchao int8 dynamic": ("torchao", _torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao int8": ("torchao", _torchao("Int8WeightOnlyConfig")),
    "torchao int4": ("torchao", _torchao("Int4WeightOnlyConfig")),
    "bitsandbytes nf4": ("bitsandbytes", _bitsandbytes_nf4),
    "quanto qint8": ("optimum.quanto", _quanto),
}


@dataclass
class Variant:
    """A transformer to measure.

    Attributes:
        name: of what quantizes it and how it runs.
        model: with all of its blocks.
        short: the same with half of them, None if nothing is extrapolated.
        times: seconds per step of each loop; `short_times` likewise.
        steps: how many were run in each loop.
        worst: least SNR in dB over some calls of the transformer, given what bf16 was given; inf: equal bits.
        end: SNR in dB of the latents at the end; None: the loop was not run to its end.
        peak: bytes that a call takes beside the weights, and that the first one kept; None: not measured.
        failure: why it was not measured.
    """

    name: str
    model: nn.Module | None
    short: nn.Module | None = None
    times: list[float] = field(default_factory=list)
    short_times: list[float] = field(default_factory=list)
    steps: int = 0
    worst: float | None = None
    end: float | None = None
    peak: int | None = None
    failure: str = ""


class Subject(NamedTuple):
    """Settings that all variants of a run share.

    Attributes:
        spec: of the model that was built.
        full: of the published one.
        smaller: with half of the groups of blocks of `spec`; None: nothing is extrapolated.
        step: inputs.
        steps: of a denoising loop.
        device: of all.
    """

    spec: DiffusionModel
    full: DiffusionModel
    smaller: DiffusionModel | None
    step: Step
    steps: int
    device: torch.device


def pair_of_sizes(full: DiffusionModel, blocks: int | None) -> tuple[DiffusionModel, DiffusionModel | None]:
    """(the model to build, the one with half of its groups of blocks): 2 * blocks and blocks; None: the whole model.

    Raises:
        ValueError: if the model has fewer than 2 * blocks groups, or none.
    """
    return (full, None) if blocks is None else (scaled(full, 2 * blocks), scaled(full, blocks))


def quantized(base: nn.Module, fields: dict[str, Any], attention: str | None) -> nn.Module:
    """Ours; what it does not replace is shared with `base`."""
    extra = {} if attention is None else {"attention": attention}
    return quantize_(shallow_copy(base), QuantizerConfig(**fields, **extra))


def rival(base: nn.Module, spec: DiffusionModel, name: str) -> nn.Module:
    """Another library's; likewise."""
    model = shallow_copy(base)
    RIVALS[name][1](model, spec)
    return model


def missing_rivals() -> dict[str, str]:
    """{rival: why it takes no part}."""
    return {name: f"{package} is not installed" for name, (package, _) in RIVALS.items() if not installed(package)}


def add_variant(
    found: list[Variant],
    subject: Subject,
    name: str,
    make: Callable[[], nn.Module],
    *,
    eager: bool = True,
    compiled: dict[str, Any] | None = None,
) -> None:
    """Append the model as it is, and with compiled blocks if there are options to compile them by."""
    try:
        model = make().eval()
    except (*FAILURES, NotImplementedError) as error:
        found.append(Variant(name, None, failure=first_line(error)))
        return
    for suffix, wanted in (("eager", eager), ("compiled", compiled is not None)):
        if wanted:
            one = model if suffix == "eager" else compile_blocks_(shallow_copy(model), subject.spec, **compiled)
            short = None if subject.smaller is None else truncated(one, subject.spec, subject.smaller)
            found.append(Variant(f"{name}, {suffix}", one, short))


def run_loop(model: nn.Module, spec: DiffusionModel, subject: Subject, steps: int) -> tuple[float, list[Call]]:
    """(seconds per step, calls) of the first steps of a denoising loop."""
    _wait(subject.device)
    start = time.perf_counter()
    calls = list(islice(denoising(model, spec, subject.step, subject.steps), steps))
    _wait(subject.device)
    return (time.perf_counter() - start) / min(steps, len(calls)), calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(variant: Variant, subject: Subject, reference: list[Call], seconds: float) -> None:
    """Compile, warm up, measure errors and memory; `seconds` per step of 16 bit decide how many steps are timed."""
    model, spec = variant.model, subject.spec
    on_gpu = subject.device.type == "cuda"
    before = torch.cuda.memory_allocated(subject.device) if on_gpu else 0
    calls = reference[:-1]
    at = sorted({round(i * (len(calls) - 1) / (COMPARED - 1)) for i in range(COMPARED)})
    outputs = [(predict(model, spec, subject.step, calls[i].latents, calls[i].timestep), calls[i]) for i in at]
    variant.worst = min(_decibels(output, call.output) for output, call in outputs)
    del outputs
    first = run_loop(model, spec, subject, 1)[0]
    if variant.short is not None:
        run_loop(variant.short, subject.smaller, subject, 1)
    if on_gpu:
        kept = torch.cuda.memory_allocated(subject.device) - before  # by the first calls: weights in another order
        with PeakMemory(subject.device) as peak:
            predict(model, spec, subject.step, calls[0].latents, calls[0].timestep)
        variant.peak = peak.nbytes + max(kept, 0)
    variant.steps = subject.steps
    if first > SLOW * seconds:
        variant.steps = min(SLOW_STEPS, subject.steps)
    else:
        last = run_loop(model, spec, subject, subject.steps + 1)[1][-1]
        variant.end = _decibels(last.latents, reference[-1].latents)


def _decibels(value: Tensor, reference: Tensor) -> float:
    return sqnr(value.float(), reference.float()) if value.isfinite().all() else -float("inf")


def measure(
    variants: list[Variant], subject: Subject, rounds: int, say: Callable[[str], None] = lambda line: None
) -> None:
    """Fill in what was measured; the first variant is the 16-bit one that errors are measured against."""
    first = variants[0]
    run_loop(first.model, subject.spec, subject, 1)
    seconds, reference = run_loop(first.model, subject.spec, subject, subject.steps + 1)
    for variant in variants:
        if variant.model is None:
            continue
        try:
            compare(variant, subject, reference, seconds)
        except (*FAILURES, NotImplementedError) as error:
            variant.model, variant.failure = None, first_line(error)
        say(f"{variant.name}: {variant.failure or 'ready'}")
    ready = [variant for variant in variants if variant.model is not None]
    for _ in range(rounds):
        for variant in ready:
            variant.times.append(run_loop(variant.model, subject.spec, subject, variant.steps)[0])
            if variant.short is not None:
                variant.short_times.append(run_loop(variant.short, subject.smaller, subject, variant.steps)[0])


def seconds_per_step(variant: Variant, subject: Subject) -> float:
    """Median, of the published model: extrapolated by its number of blocks where fewer were run."""
    return _whole(statistics.median(variant.times), subject, lambda: statistics.median(variant.short_times))


def spread(variant: Variant) -> float:
    """Half of the range of the loops over their median."""
    return (max(variant.times) - min(variant.times)) / 2 / statistics.median(variant.times)


def nbytes(variant: Variant, subject: Subject) -> float:
    """Bytes of parameters and buffers, each counted once; of the published model, likewise."""
    return _whole(tensor_bytes(variant.model), subject, lambda: tensor_bytes(variant.short))


def tensor_bytes(model: nn.Module) -> int:
    """Count the bytes of all parameters and buffers, each storage once."""
    return sum({id(t): _size(t) for t in [*model.parameters(), *model.buffers()]}.values())


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the tensors that a subclass is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_size(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    state = getattr(tensor, "quant_state", None)  # of bitsandbytes
    return tensor.nbytes + (0 if state is None else state.absmax.nbytes)


def _whole(value: float, subject: Subject, shorter: Callable[[], float]) -> float:
    if subject.smaller is None:
        return value
    less, groups = shorter(), subject.smaller.units
    slope = (value - less) / groups
    return less + slope * (subject.full.units - groups)
