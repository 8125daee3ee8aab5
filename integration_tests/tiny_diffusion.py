"""Tiny diffusion models of real architectures with random weights, for the tests of the diffusers integration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """A model class of diffusers, the arguments of its constructor, and its inputs.

    Attributes:
        model: name of the class.
        config: arguments of the constructor.
        inputs: makes the arguments of the forward; the seed is fixed.
    """

    model: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]]


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _flux_inputs() -> dict[str, Tensor]:
    image = torch.zeros(4, 4, 3)
    image[..., 1], image[..., 2] = torch.arange(4)[:, None], torch.arange(4)[None]
    return {
        "hidden_states": _values(2, 16, 4),
        "encoder_hidden_states": _values(2, 8, 64),
        "pooled_projections": _values(2, 64),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_ids": image.view(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def _flux2_inputs() -> dict[str, Tensor]:
    image = torch.zeros(4, 4, 4)
    image[..., 1], image[..., 2] = torch.arange(4)[:, None], torch.arange(4)[None]
    text = torch.zeros(8, 4)
    text[:, 3] = torch.arange(8)
    return {
        "hidden_states": _values(2, 16, 4),
        "encoder_hidden_states": _values(2, 8, 32),
        "timestep": torch.tensor([0.3, 0.9]),
        "guidance": torch.tensor([1.0, 1.0]),
        "img_ids": image.view(16, 4),
        "txt_ids": text,
    }


_TWO_BLOCKS = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}

ARCHITECTURES = {
    "flux": Architecture(
        "FluxTransformer2DModel",
        {
            **_TWO_BLOCKS,
            "in_channels": 4,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux_inputs,
    ),
    "flux2": Architecture(
        "Flux2Transformer2DModel",
        {
            **_TWO_BLOCKS,
            "in_channels": 4,
            "joint_attention_dim": 32,
            "timestep_guidance_channels": 64,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        _flux2_inputs,
    ),
    "sd3": Architecture(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "caption_projection_dim": 64,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "pos_embed_max_size": 16,
        },
        lambda: {
            "hidden_states": _values(2, 4, 8, 8),
            "encoder_hidden_states": _values(2, 8, 32),
            "pooled_projections": _values(2, 64),
            "timestep": torch.tensor([300.0, 900.0]),
        },
    ),
    "cogvideox": Architecture(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
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
        },
        lambda: {
            "hidden_states": _values(2, 2, 4, 8, 8),
            "encoder_hidden_states": _values(2, 8, 64),
            "timestep": torch.tensor([300, 900]),
        },
    ),
    "wan": Architecture(
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 64,
            "freq_dim": 64,
            "ffn_dim": 128,
            "num_layers": 1,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": _values(2, 4, 2, 8, 8),
            "encoder_hidden_states": _values(2, 8, 64),
            "timestep": torch.tensor([300, 900]),
        },
    ),
    "unet": Architecture(
        "UNet2DConditionModel",
        {
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
        },
        lambda: {
            "sample": _values(2, 4, 8, 8),
            "timestep": torch.tensor([300, 900]),
            "encoder_hidden_states": _values(2, 8, 64),
        },
    ),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of ARCHITECTURES with seeded random weights, in eval mode."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(diffusers, architecture.model)(**architecture.config)
    with torch.no_grad():
        for parameter in model.parameters():  # some are initialized to zero or one: no test would see an error there
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(mean=float(parameter.mean() > 0.5), std=0.1)
    return model.to(dtype).eval()


@torch.no_grad()
def run(model: nn.Module, name: str) -> Tensor:
    """The model's output for its fixed inputs, in fp32."""
    inputs = {
        key: value.to(model.dtype) if value.is_floating_point() and not key.endswith("_ids") else value
        for key, value in ARCHITECTURES[name].inputs().items()
    }
    return model(**inputs, return_dict=False)[0].float()


def make_autoencoder(dtype: torch.dtype = torch.float32) -> diffusers.AutoencoderKL:
    """A VAE for one latent channel with seeded random weights; its attention has layers that could be quantized."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=1,
        sample_size=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.1,
        scaling_factor=1.5,
    )
    return vae.to(dtype).eval()


def make_flux_pipeline(dtype: torch.dtype = torch.float32) -> diffusers.FluxPipeline:
    """A FluxPipeline with a tiny transformer, VAE, CLIP and T5; without tokenizers, so it takes embeddings."""
    torch.manual_seed(0)
    clip = transformers.CLIPTextConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        projection_dim=64,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    t5 = transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=make_autoencoder(dtype),
        text_encoder=transformers.CLIPTextModel(clip).to(dtype).eval(),
        tokenizer=None,
        text_encoder_2=transformers.T5EncoderModel(t5).to(dtype).eval(),
        tokenizer_2=None,
        transformer=make_model("flux", dtype),
    )


@torch.no_grad()
def run_flux_pipeline(pipe: diffusers.FluxPipeline, steps: int = 2) -> Tensor:
    """A 16 x 16 image [1, 3, 16, 16] in fp32 from fixed noise, with fixed token ids as the prompt."""
    ids = torch.randint(3, 96, (1, 8), generator=torch.Generator().manual_seed(0))
    return pipe(
        prompt_embeds=pipe.text_encoder_2(ids)[0],
        pooled_prompt_embeds=pipe.text_encoder(ids).pooler_output,
        height=16,
        width=16,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images.float()


def assert_same_bytes(value: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise AssertionError unless both have the same names, dtypes and values, bit for bit."""
    assert value.keys() == expected.keys()
    for key, tensor in expected.items():
        assert value[key].dtype == tensor.dtype and torch.equal(value[key], tensor), key
