"""Descriptions of diffusion models, smaller versions of them, and the inputs of one denoising step.

The models are in diffusion/models.py. diffusers is imported where it is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """Size of an image or video in latent pixels (before patches are made), and of the prompt in tokens."""

    height: int
    width: int
    text: int
    frames: int = 1


class Step(NamedTuple):
    """Inputs of a denoising step: noise, and the other arguments of the forward except the timestep."""

    latents: Tensor
    conditions: dict[str, Any]


Normal = Callable[..., Tensor]  # of a shape
Inputs = Callable[[dict[str, Any], Size, int, Normal], Step]


@dataclass(frozen=True)
class DiffusionModel:
    """A published model.

    Attributes:
        repo: whose `transformer/config.json` (`unet/`) the arguments are of.
        model_class: of diffusers.
        config: arguments of its constructor that differ from diffusers' defaults, or that `inputs` needs.
        blocks: {argument: number of repeated blocks}.
        block_lists: names of the model's lists of those blocks, in the same order.
        billions: parameters as published.
        size: its native one.
        steps: of the published figures.
        inputs: (config, size, batch, normal) -> inputs of one step.
        scheduler: class of diffusers, and its arguments.
        tiny: arguments for a model that a CPU runs in milliseconds.
        tiny_size: likewise.
        guidance: scale of classifier-free guidance, which doubles the batch; None: without it.
        timestep: what the forward takes for the scheduler's timestep (0 to 1000).
        sample: the forward's name of the latents.
        velocity: from the model's output to what the scheduler takes.
    """

    repo: str
    model_class: str
    config: dict[str, Any]
    blocks: dict[str, int]
    block_lists: tuple[str, ...]
    billions: float
    size: Size
    steps: int
    inputs: Inputs
    scheduler: tuple[str, dict[str, Any]]
    tiny: dict[str, Any]
    tiny_size: Size
    guidance: float | None = None
    timestep: Callable[[Tensor], Tensor] = lambda t: t
    sample: str = "hidden_states"
    velocity: Callable[[Tensor], Tensor] = lambda output: output

    @property
    def batch(self) -> int:
        """Batch size of the model's inputs for one image."""
        return 1 if self.guidance is None else 2

    @property
    def units(self) -> int:
        """Number of smallest groups of blocks with the model's proportions: 19 times 1 + 2 in Flux.1."""
        return gcd(*self.blocks.values()) if self.blocks else 1


def scaled(spec: DiffusionModel, blocks: int) -> DiffusionModel:
    """The model with `blocks` groups of blocks instead of `spec.units`.

    Raises:
        ValueError: if the model has no blocks to take away, or fewer.
    """
    if not spec.blocks or not 1 <= blocks <= spec.units:
        allowed = f"1 to {spec.units}" if spec.blocks else "none: its blocks differ"
        raise ValueError(f"blocks is {blocks}; {spec.repo} allows {allowed}")
    counts = {name: count // spec.units * blocks for name, count in spec.blocks.items()}
    return replace(spec, config={**spec.config, **counts}, blocks=counts)


def shrunk(spec: DiffusionModel, blocks: int = 2) -> DiffusionModel:
    """The same architecture with the widths and the size of `spec.tiny`, for tests and dry runs."""
    small = replace(spec, config={**spec.config, **spec.tiny}, size=spec.tiny_size)
    return scaled(small, min(blocks, small.units)) if spec.blocks else small


# Inputs of one step: (config, size, batch, normal) -> Step.


def _positions(*sizes: int, axes: int) -> Tensor:
    """[product of sizes, axes] fp32: coordinates 0, y, x, and 0 for further axes."""
    grid = torch.stack(torch.meshgrid(*(torch.arange(n).float() for n in sizes), indexing="ij"), -1)
    ids = grid.reshape(-1, len(sizes))
    return torch.cat([torch.zeros(len(ids), 1), ids, torch.zeros(len(ids), axes - 1 - len(sizes))], 1)


def flux_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents in patches [B, tokens, channels], a pooled and a whole prompt, positions, guidance as a number."""
    rows, columns = size.height // 2, size.width // 2
    latents = normal(batch, rows * columns, config["in_channels"])
    conditions = {
        "encoder_hidden_states": normal(batch, size.text, config["joint_attention_dim"]),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
        "img_ids": _positions(rows, columns, axes=3).to(latents.device),
        "txt_ids": torch.zeros(size.text, 3, device=latents.device),
    }
    if config["guidance_embeds"]:
        conditions["guidance"] = torch.full((batch,), 3.5, device=latents.device)
    return Step(latents, conditions)


def flux2_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Make the inputs of Flux.1 with four axes of positions and no pooled prompt."""
    rows, columns = size.height // 2, size.width // 2
    latents = normal(batch, rows * columns, config["in_channels"])
    text = torch.zeros(size.text, 4)
    text[:, 3] = torch.arange(size.text)
    conditions = {
        "encoder_hidden_states": normal(batch, size.text, config["joint_attention_dim"]),
        "img_ids": _positions(rows, columns, axes=4).to(latents.device),
        "txt_ids": text.to(latents.device),
        "guidance": torch.full((batch,), 4.0, device=latents.device),
    }
    return Step(latents, conditions)


def cogvideox_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents [B, frames, channels, height, width], rotary embeddings made by the pipeline."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    latents = normal(batch, size.frames, config["in_channels"], size.height, size.width)
    grid = (size.height // 2, size.width // 2)
    cos, sin = get_3d_rotary_pos_embed(
        embed_dim=config["attention_head_dim"],
        crops_coords=((0, 0), grid),
        grid_size=grid,
        temporal_size=size.frames,
        device=latents.device,
    )
    text = normal(batch, size.text, config["text_embed_dim"])
    return Step(latents, {"encoder_hidden_states": text, "image_rotary_emb": (cos, sin)})


def wan_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents [B, channels, frames, height, width] and a prompt."""
    latents = normal(batch, config["in_channels"], size.frames, size.height, size.width)
    return Step(latents, {"encoder_hidden_states": normal(batch, size.text, config["text_dim"])})


def hunyuan_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Make the inputs of Wan with a mask, a pooled prompt and guidance as a number."""
    latents = normal(batch, config["in_channels"], size.frames, size.height, size.width)
    conditions = {
        "encoder_hidden_states": normal(batch, size.text, config["text_embed_dim"]),
        "encoder_attention_mask": torch.ones(batch, size.text, device=latents.device),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
        "guidance": torch.full((batch,), 6000.0, device=latents.device),
    }
    return Step(latents, conditions)


def qwen_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents in patches [B, tokens, channels], and their shapes instead of positions."""
    rows, columns = size.height // 2, size.width // 2
    latents = normal(batch, rows * columns, config["in_channels"])
    text = normal(batch, size.text, config["joint_attention_dim"])
    return Step(latents, {"encoder_hidden_states": text, "img_shapes": [[(1, rows, columns)]] * batch})


def ltx_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents [B, tokens, channels], one token for each latent pixel of each frame."""
    latents = normal(batch, size.frames * size.height * size.width, config["in_channels"])
    conditions = {
        "encoder_hidden_states": normal(batch, size.text, config["caption_channels"]),
        "encoder_attention_mask": torch.ones(batch, size.text, device=latents.device),
        "num_frames": size.frames,
        "height": size.height,
        "width": size.width,
        "rope_interpolation_scale": (8 / 25, 32, 32),  # frames of a latent at 25 per second, pixels of a latent
    }
    return Step(latents, conditions)


def _image(config: dict[str, Any], size: Size, batch: int, normal: Normal, text: str) -> tuple[Tensor, Tensor]:
    latents = normal(batch, config["in_channels"], size.height, size.width)
    return latents, normal(batch, size.text, config[text])


def sd3_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents [B, channels, height, width], a pooled and a whole prompt."""
    latents, text = _image(config, size, batch, normal, "joint_attention_dim")
    pooled = normal(batch, config["pooled_projection_dim"])
    return Step(latents, {"encoder_hidden_states": text, "pooled_projections": pooled})


def pixart_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents [B, channels, height, width], a prompt with a mask."""
    latents, text = _image(config, size, batch, normal, "caption_channels")
    added = {"resolution": None, "aspect_ratio": None}
    mask = torch.ones(batch, size.text, device=latents.device)
    return Step(latents, {"encoder_hidden_states": text, "encoder_attention_mask": mask, "added_cond_kwargs": added})


def lumina2_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Make the inputs of PixArt with a mask of booleans."""
    latents, text = _image(config, size, batch, normal, "cap_feat_dim")
    mask = torch.ones(batch, size.text, dtype=torch.bool, device=latents.device)
    return Step(latents, {"encoder_hidden_states": text, "encoder_attention_mask": mask})


def sdxl_inputs(config: dict[str, Any], size: Size, batch: int, normal: Normal) -> Step:
    """Latents [B, channels, height, width], a pooled and a whole prompt, sizes in pixels."""
    latents, text = _image(config, size, batch, normal, "cross_attention_dim")
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    sizes = torch.tensor([8.0 * size.height, 8.0 * size.width, 0, 0, 8.0 * size.height, 8.0 * size.width])
    added = {"text_embeds": normal(batch, pooled), "time_ids": sizes.repeat(batch, 1).to(latents.device)}
    return Step(latents, {"encoder_hidden_states": text, "added_cond_kwargs": added})
