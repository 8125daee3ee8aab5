"""`auto_plans`: one budget for all models of a pipeline, each of which counts by its influence on the result."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_quant._wording import first_few
from hf_quant.auto.allocate import Unit, allocate
from hf_quant.auto.search import Candidates, check_auto, rounded_up, score_by_gradients
from hf_quant.calibration import CallRecorder
from hf_quant.config import QuantizerConfig, as_config
from hf_quant.planning import QuantPlan


# Beginnings of names. Denoisers and text encoders fill the memory; the VAE is small, and its errors are visible.
PIPELINE_PARTS = (
    *("transformer", "unet", "text_encoder", "prior", "controlnet"),
    "decoder",  # the second denoiser of Stable Cascade, unCLIP and Kandinsky
    "unconditional_transformer",  # the second denoiser of Ideogram 4
    "model",  # the only one of DiffusionGemma and LLaDA 2
    *("condition_encoder", "connectors"),  # which follow on the text encoders of ACE-Step and LTX-2
    *("language_model", "vision_language_encoder"),  # which read the text in AudioLDM 2 and GLM-Image
)
_NOISE = 1e-3  # relative squared error that is added to the outputs of a model, to see what it does to the result


def auto_plans(
    pipe: Any,
    config: QuantizerConfig | dict[str, Any],
    *,
    calibration: Callable[[Any], Any],
    components: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> dict[str, QuantPlan]:
    """Plan the automatic bits of a 16-bit pipeline of diffusers: one budget, shared over its models.

    The loss of each layer is predicted as `auto_plan` does, relative to the output of its model. A model counts by its
    influence: noise of a known size is added to its outputs, and its effect on the result of the pipeline measured.
    The predicted losses are so those of the pipeline's result, as relative squared errors. Nothing is changed.

    Args:
        pipe: the pipeline; its models are those of `pipe.components`.
        config: a config with weights="auto". The budget counts the layers of all models to quantize ("bits"), or
            all models of the pipeline ("gb"), or the predicted loss of the pipeline ("kl").
        calibration: a function that runs the pipeline it is given, with few steps, and returns the result: tensors,
            arrays or images. It is called some times, always with the same random numbers of torch.
        components: names of the models to quantize; default: denoisers, text encoders, priors and controlnets.
        device: device that computes the errors; default: that of each weight.
        progress: True shows progress bars.

    Returns:
        {name of the model: its plan}, for `quantize_(getattr(pipe, name), config, quant_plan=plan)`.

    Raises:
        ValueError: if the budget is too small, the result differs from run to run, a model to quantize is not run, or
            `objective` is given: times are measured model by model.
    """
    config = as_config(config)
    check_auto(config)
    if config.is_for_latency:
        raise ValueError("objective is given, but the times of a pipeline are measured model by model: see autoquant")
    models = {name: m for name, m in pipe.components.items() if isinstance(m, nn.Module)}
    if components is None:
        components = [name for name in models if name.startswith(PIPELINE_PARTS)]
    if unknown := [name for name in components if name not in models]:
        raise ValueError(f"components names {first_few(unknown)}; the models of the pipeline are {', '.join(models)}")
    found = {name: Candidates(models[name], config) for name in components}
    other_bytes = sum(_nbytes(model) for name, model in models.items() if name not in found)
    most = _budget(config, found, other_bytes)
    recorders = {name: CallRecorder(models[name]) for name in found}
    with _attached(recorders):
        clean = _run(pipe, calibration)
    if idle := [name for name, recorder in recorders.items() if not recorder.calls]:
        raise ValueError(f"calibration does not run {first_few(idle)}: give components without it, or run it")
    if not torch.equal(clean, _run(pipe, calibration)):
        raise ValueError(
            "the result of the pipeline differs from run to run: give it a new generator with the same seed each time"
        )
    tables = {}
    for name, candidates in tqdm(found.items(), desc="Scoring models", disable=not progress):
        score_by_gradients(models[name], candidates, recorders[name].calls, device, False)
        influence = _influence(pipe, calibration, models[name], clean)
        candidates.scores = {n: [score * influence for score in of] for n, of in candidates.scores.items()}
        candidates.is_kl = False
        tables[name] = candidates.table()
    chosen = iter(_allocate(config, found, tables, most))
    return {name: candidates.chosen([next(chosen) for _ in candidates.units]) for name, candidates in found.items()}


def _allocate(
    config: QuantizerConfig,
    found: Mapping[str, Candidates],
    tables: Mapping[str, tuple[list[list[float]], list[list[float]]]],
    most: float,
) -> list[int]:
    """The number of the candidate of each unit, of all models in turn."""
    names = [unit for candidates in found.values() for unit in candidates.units]
    nbytes, losses = ([row for table in tables.values() for row in table[part]] for part in (0, 1))
    if "kl" in config.budget:
        return allocate([Unit(*each) for each in zip(names, losses, nbytes)], config.budget["kl"])
    return allocate([Unit(*each) for each in zip(names, nbytes, losses)], most)


def _budget(config: QuantizerConfig, found: Mapping[str, Candidates], other_bytes: int) -> float:
    """Bytes that the layers to choose for may take. Raises ValueError if the smallest candidates take more."""
    least = sum(candidates.least_bytes for candidates in found.values())
    fixed = sum(candidates.fixed_bytes for candidates in found.values()) + other_bytes
    weights = sum(candidates.num_weights for candidates in found.values())
    budget = config.budget
    most = budget["bits"] * weights / 8 if "bits" in budget else budget.get("gb", torch.inf) * 1e9 - fixed
    if least > most:
        needed = f"{rounded_up((least + fixed) / 1e9)} GB"
        if "bits" in budget:
            needed = f"{rounded_up(8 * least / weights)} bits per weight"
        raise ValueError(
            f"the budget is {budget}, and the smallest candidates of the pipeline take {needed}: give as much, or "
            "candidates with fewer bits"
        )
    return most


def _nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def _attached(recorders: Mapping[str, CallRecorder]) -> Iterator[None]:
    for recorder in recorders.values():
        recorder.attach()
    try:
        yield
    finally:
        for recorder in recorders.values():
            recorder.detach()


@torch.no_grad()
def _run(pipe: Any, calibration: Callable[[Any], Any]) -> Tensor:
    """The result of the pipeline as one vector in fp32, with the same random numbers each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = list(_arrays(calibration(pipe)))
    if not found:
        raise ValueError("calibration returns no tensors, arrays or images: return the result of the pipeline")
    return torch.cat(found)


def _arrays(result: Any) -> Iterator[Tensor]:
    """The tensors, arrays and images of a result, as vectors in fp32."""
    if isinstance(result, Tensor):
        yield result.detach().flatten().float().cpu()
    elif isinstance(result, numpy.ndarray) or hasattr(result, "getbands"):  # an image of PIL
        yield torch.from_numpy(numpy.asarray(result, dtype=numpy.float32)).flatten()
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _arrays(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _arrays(value)


def _influence(pipe: Any, calibration: Callable[[Any], Any], model: nn.Module, clean: Tensor) -> float:
    """The relative squared error of the pipeline's result per that of a model's outputs."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    handle = model.register_forward_hook(lambda module, args, output: _map(partial(_noisy, generator), output))
    try:
        error = _run(pipe, calibration) - clean
    finally:
        handle.remove()
    return float(error.square().sum() / clean.square().sum().clamp(min=1e-30)) / _NOISE


def _noisy(generator: torch.Generator, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float32, device=x.device)
    size = x.float().square().mean().sqrt() * _NOISE**0.5
    return (x.float() + noise * size).to(x.dtype)


def _map(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """The output of a model with all of its floating-point tensors changed."""
    if isinstance(output, Tensor):
        return change(output) if output.is_floating_point() else output
    if isinstance(output, Mapping):
        return type(output)(**{name: _map(change, value) for name, value in output.items()})
    if isinstance(output, (list, tuple)):
        return type(output)(_map(change, value) for value in output)
    return output
