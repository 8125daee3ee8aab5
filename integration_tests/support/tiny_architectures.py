"""Tiny configurations of the architectures of diffusers, with fixed inputs, for the tests of the integration.

Each is as small as its structure allows: every kind of block that the model has, heads of 16, and most layers with at
least 64 x 64 weights, which are those that get quantized.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """Height and width of the image, and the length of the text, in tokens."""

    height: int = 4
    width: int = 4
    text: int = 8


class Architecture(NamedTuple):
    """A model class of diffusers, the arguments of its constructor, and its inputs.

    Attributes:
        model: name of the class.
        config: arguments of the constructor.
        inputs: makes the arguments of the forward for a size; the seed is fixed.
    """

    model: str
    config: dict[str, Any]
    inputs: Callable[[Size], dict[str, Any]]


_HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}
_BOTH_STREAMS = {"num_layers": 1, "num_single_layers": 1, **_HEADS}


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _fractions() -> Tensor:
    return torch.tensor([0.3, 0.9])


def _steps() -> Tensor:
    return torch.tensor([300, 900])


def _positions(size: Size, axes: int) -> Tensor:
    """[height * width, axes] row and column of every token."""
    image = torch.zeros(size.height, size.width, axes)
    image[..., 1], image[..., 2] = torch.arange(size.height)[:, None], torch.arange(size.width)[None]
    return image.view(-1, axes)


def _mask(size: Size) -> Tensor:
    """[2, text] of which the second has two tokens of padding."""
    mask = torch.ones(2, size.text, dtype=torch.int64)
    mask[1, -2:] = 0
    return mask


def _flux(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, size.height * size.width, 4),
        "encoder_hidden_states": _values(2, size.text, 64),
        "pooled_projections": _values(2, 64),
        "timestep": _fractions(),
        "img_ids": _positions(size, 3),
        "txt_ids": torch.zeros(size.text, 3),
    }


def _flux2(size: Size) -> dict[str, Any]:
    text = torch.zeros(size.text, 4)
    text[:, 3] = torch.arange(size.text)
    return {
        "hidden_states": _values(2, size.height * size.width, 4),
        "encoder_hidden_states": _values(2, size.text, 32),
        "timestep": _fractions(),
        "guidance": torch.tensor([1.0, 1.0]),
        "img_ids": _positions(size, 4),
        "txt_ids": text,
    }


def _sd3(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, 4, size.height, size.width),
        "encoder_hidden_states": _values(2, size.text, 32),
        "pooled_projections": _values(2, 64),
        "timestep": _steps().float(),
    }


def _qwen_image(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, size.height * size.width, 4),
        "encoder_hidden_states": _values(2, size.text, 64),
        "encoder_hidden_states_mask": _mask(size),
        "timestep": _fractions(),
        "img_shapes": [[(1, size.height, size.width)]] * 2,
    }


def _pixart(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, 4, 2 * size.height, 2 * size.width),
        "encoder_hidden_states": _values(2, size.text, 64),
        "encoder_attention_mask": _mask(size),
        "timestep": _steps(),
        "added_cond_kwargs": {"resolution": torch.tensor([[64.0, 64.0]] * 2), "aspect_ratio": torch.ones(2, 1)},
    }


def _lumina2(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, 4, 2 * size.height, 2 * size.width),
        "encoder_hidden_states": _values(2, size.text, 64),
        "encoder_attention_mask": _mask(size).bool(),
        "timestep": _fractions(),
    }


def _cogvideox(size: Size) -> dict[str, Any]:
    angles = _values(2 * size.height * size.width, 16)
    return {
        "hidden_states": _values(2, 2, 4, 2 * size.height, 2 * size.width),
        "encoder_hidden_states": _values(2, size.text, 64),
        "timestep": _steps(),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def _wan(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, 4, 2, 2 * size.height, 2 * size.width),
        "encoder_hidden_states": _values(2, size.text, 64),
        "timestep": _steps(),
    }


def _hunyuan_video(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, 4, 2, 2 * size.height, 2 * size.width),
        "encoder_hidden_states": _values(2, size.text, 64),
        "encoder_attention_mask": _mask(size),
        "pooled_projections": _values(2, 64),
        "timestep": _steps(),
        "guidance": torch.tensor([6000.0, 6000.0]),
    }


def _ltx(size: Size) -> dict[str, Any]:
    return {
        "hidden_states": _values(2, 2 * size.height * size.width, 64),
        "encoder_hidden_states": _values(2, size.text, 32),
        "encoder_attention_mask": _mask(size),
        "timestep": _steps(),
        "num_frames": 2,
        "height": size.height,
        "width": size.width,
    }


def _unet(size: Size) -> dict[str, Any]:
    return {
        "sample": _values(2, 4, 2 * size.height, 2 * size.width),
        "timestep": _steps(),
        "encoder_hidden_states": _values(2, size.text, 64),
    }


def _sdxl(size: Size) -> dict[str, Any]:
    ids = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * 2)
    return {**_unet(size), "added_cond_kwargs": {"text_embeds": _values(2, 32), "time_ids": ids}}


_FLUX = {
    **_BOTH_STREAMS,
    "in_channels": 4,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (4, 4, 8),
}
_FLUX2 = {
    **_BOTH_STREAMS,
    "in_channels": 4,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 64,
    "axes_dims_rope": (4, 4, 4, 4),
}
_SD3 = {  # the first block has a second attention, the last one drops the text
    **_HEADS,
    "sample_size": 8,
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "caption_projection_dim": 64,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 16,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
_QWEN_IMAGE = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "joint_attention_dim": 64,
    "axes_dims_rope": (4, 4, 8),
}
_PIXART = {  # a width of 96: each of the three size conditions gets a third of it
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 1,
    "cross_attention_dim": 96,
    "caption_channels": 64,
    "sample_size": 8,
    "patch_size": 2,
    "use_additional_conditions": True,
}
_LUMINA2 = {  # grouped queries; refiners of the text have no modulation
    "sample_size": 8,
    "in_channels": 4,
    "hidden_size": 64,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 32,
    "axes_dim_rope": (4, 4, 8),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": 64,
}
_COGVIDEOX = {  # as the one of 5B: without stored positions, which hold for one length of the text
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 64,
    "text_embed_dim": 64,
    "num_layers": 1,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 8,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 8,
    "use_rotary_positional_embeddings": True,
}
_WAN = {
    **_HEADS,
    "patch_size": (1, 2, 2),
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 128,
    "num_layers": 1,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
_HUNYUAN_VIDEO = {
    **_BOTH_STREAMS,
    "in_channels": 4,
    "out_channels": 4,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 64,
    "pooled_projection_dim": 64,
    "rope_axes_dim": (4, 4, 8),
}
_LTX = {
    **_HEADS,
    "in_channels": 64,
    "out_channels": 64,
    "cross_attention_dim": 64,
    "num_layers": 1,
    "caption_channels": 32,
}
_UNET = {
    "block_out_channels": (32, 64),
    "norm_num_groups": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 64,
    "attention_head_dim": 8,
    "out_channels": 4,
    "in_channels": 4,
    "layers_per_block": 1,
    "sample_size": 8,
}
_SDXL = {  # no attention at the first resolution, two layers of it at the second
    **_UNET,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}

ARCHITECTURES = {
    "flux": Architecture("FluxTransformer2DModel", _FLUX, _flux),
    "flux2": Architecture("Flux2Transformer2DModel", _FLUX2, _flux2),
    "sd3": Architecture("SD3Transformer2DModel", _SD3, _sd3),
    "qwen_image": Architecture("QwenImageTransformer2DModel", _QWEN_IMAGE, _qwen_image),
    "pixart": Architecture("PixArtTransformer2DModel", _PIXART, _pixart),
    "lumina2": Architecture("Lumina2Transformer2DModel", _LUMINA2, _lumina2),
    "cogvideox": Architecture("CogVideoXTransformer3DModel", _COGVIDEOX, _cogvideox),
    "wan": Architecture("WanTransformer3DModel", _WAN, _wan),
    "hunyuan_video": Architecture("HunyuanVideoTransformer3DModel", _HUNYUAN_VIDEO, _hunyuan_video),
    "ltx": Architecture("LTXVideoTransformer3DModel", _LTX, _ltx),
    "unet": Architecture("UNet2DConditionModel", _UNET, _unet),
    "sdxl": Architecture("UNet2DConditionModel", _SDXL, _sdxl),
}
