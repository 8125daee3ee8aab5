"""Diffusion models of diffusion/models.py with random weights, and their denoising loop in latents.

The weights are not those of a trained model; by default they have what makes trained ones hard to quantize:

- heavy tails: a normal value times the exponential of another (deviation 0.4), which has a kurtosis of 5.7 (normal: 3)
- rows of different size: each times the exponential of a normal value of deviation 0.3
- outlier channels: of each width, the same 1 in 512 outputs (at least one) is 6 times as large in every layer, so that
  these channels of the residual stream are far larger than the others in all blocks

All is scaled by 1 / sqrt(inputs), so that activations neither vanish nor grow. What this has in common with a certain
checkpoint has not been measured: it serves to compare schemes, not to predict the quality of images. `NORMAL` weights
have none of the three: what errors are with them bounds what the choice of these numbers does.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion.spec import DiffusionModel, Size, Step


OUTLIERS = 512  # outputs for each outlier channel


class Distribution(NamedTuple):
    """Random weights: deviations of the logarithms of values and of rows, and the size of outlier channels."""

    tail: float
    spread: float
    outlier: float


TRAINED_LIKE = Distribution(0.4, 0.3, 6.0)
NORMAL = Distribution(0.0, 0.0, 1.0)


def empty_model(spec: DiffusionModel) -> nn.Module:
    """The model with its parameters on the meta device and its buffers in place."""
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights():
        return getattr(diffusers, spec.model_class)(**spec.config).eval()


def empty_t5(config: dict[str, Any]) -> nn.Module:
    """transformers' T5EncoderModel on the meta device."""
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        return T5EncoderModel(T5Config(**config)).eval()


def random_model(
    spec: DiffusionModel,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    weights: Distribution = TRAINED_LIKE,
    seed: int = 0,
) -> nn.Module:
    """The model with random weights, made on the device one parameter at a time.

    What the host keeps in fp32 when it loads such a model is fp32.
    """
    model = empty_model(spec)
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            parts = [*path.split("."), name]
            value = _random_weight(module, name, parameter.shape, weights, generator)
            value = value.to(torch.float32 if any(one in parts for one in kept) else dtype)
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return model.to(device)


def _random_weight(
    module: nn.Module, name: str, shape: torch.Size, weights: Distribution, generator: torch.Generator
) -> Tensor:
    """fp32 on the generator's device; of the distribution where the module multiplies by it."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    if len(shape) == 1:  # weights of norms, and biases
        return normal(*shape).mul_(0.1).add_(1.0 if name == "weight" else 0.0)
    if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd):  # tables of embeddings and modulations
        return normal(*shape).mul_(shape[-1] ** -0.5)
    value = normal(*shape).mul_(normal(*shape).mul_(weights.tail).exp_())
    value *= value[0].numel() ** -0.5 / math.exp(weights.tail**2)
    rows = normal(shape[0]).mul_(weights.spread).exp_()
    rows[outlier_channels(shape[0]).to(rows.device)] *= weights.outlier
    return value.mul_(rows.view(-1, *[1] * (len(shape) - 1)))


def outlier_channels(width: int) -> Tensor:
    """int64 [1 in OUTLIERS]: the same for all layers with so many outputs."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    return order[: max(1, width // OUTLIERS)]


def shallow_copy(model: nn.Module) -> nn.Module:
    """A model with modules of its own that shares every parameter and buffer: quantizing it leaves the first alone.

    Moving or casting it would not: `.to` changes parameters in place.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def truncated(model: nn.Module, spec: DiffusionModel, smaller: DiffusionModel) -> nn.Module:
    """The model with the first blocks only, as many as `smaller` has; it shares them."""
    short = copy.copy(model)
    short._modules = dict(model._modules)
    for name, count in zip(spec.block_lists, smaller.blocks.values(), strict=True):
        short._modules[name] = nn.ModuleList(list(getattr(model, name))[:count])
    return short


def compile_blocks_(model: nn.Module, spec: DiffusionModel, **options: Any) -> nn.Module:
    """Compile each repeated block, which is one compilation per class; the whole model where its blocks differ."""
    parts = [block for name in spec.block_lists for block in getattr(model, name)] or [model]
    for part in parts:
        part.compile(**options)
    return model


def make_step(
    spec: DiffusionModel,
    *,
    size: Size | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """Inputs of a denoising step at the native size or another: latents of one image, conditions for guidance, too."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    step = spec.inputs(spec.config, size or spec.size, spec.batch, normal)
    return Step(step.latents[:1], step.conditions)


def predict(model: nn.Module, spec: DiffusionModel, step: Step, latents: Tensor, t: Tensor) -> Tensor:
    """One call of the transformer, with both halves of the batch under guidance: what it returns for them."""
    doubled = torch.cat([latents] * spec.batch)
    times = spec.timestep(t.expand(len(doubled))).to(latents.device)
    arguments = {spec.sample: doubled, "timestep": times, **step.conditions}
    return model(**arguments, return_dict=False)[0]


class Call(NamedTuple):
    """One step of a denoising loop: what the transformer was given and what it returned."""

    latents: Tensor
    timestep: Tensor
    output: Tensor


def make_scheduler(spec: DiffusionModel, steps: int, tokens: int, device: torch.device | str) -> Any:
    """The model's scheduler, set to `steps` for latents of so many tokens."""
    import diffusers

    name, options = spec.scheduler
    scheduler = getattr(diffusers, name)(**options)
    config = scheduler.config
    if config.get("use_dynamic_shifting"):  # as the pipelines do it, between two lengths
        slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
        mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=sigmas, mu=mu, device=device)
    else:
        scheduler.set_timesteps(steps, device=device)
    return scheduler


def denoising(model: nn.Module, spec: DiffusionModel, step: Step, steps: int | None = None) -> Iterator[Call]:
    """The calls of a denoising loop, each made when it is asked for; the last one holds the result, twice."""
    latents = step.latents.float()
    tokens = latents.shape[1] if latents.dim() == 3 else latents.shape[-1] * latents.shape[-2] // 4
    scheduler = make_scheduler(spec, steps or spec.steps, tokens, latents.device)
    latents = latents * getattr(scheduler, "init_noise_sigma", 1.0)
    dtype = step.latents.dtype
    for t in scheduler.timesteps:
        given = scheduler.scale_model_input(latents, t) if hasattr(scheduler, "scale_model_input") else latents
        given = given.to(dtype)
        output = predict(model, spec, step, given, t)
        yield Call(given, t, output)
        velocity = spec.velocity(output).float()
        if spec.guidance is not None:
            without, toward = velocity.chunk(2)
            velocity = without + spec.guidance * (toward - without)
        latents = scheduler.step(velocity, t, latents, return_dict=False)[0].float()
    yield Call(latents, scheduler.timesteps[-1], latents)


@torch.no_grad()
def denoise(model: nn.Module, spec: DiffusionModel, step: Step, steps: int | None = None) -> Tensor:
    """The latents at the end of the loop, fp32."""
    *_, last = denoising(model, spec, step, steps)
    return last.latents
