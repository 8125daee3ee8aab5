"""Published diffusion models: constructor arguments, native sizes, steps and schedulers.

    spec = MODELS["flux.1-dev"]                    # or scaled(spec, blocks=2), or shrunk(spec) for a CPU
    model = random_model(spec, device="cuda")      # diffusion/run.py: weights of a trained-like distribution
    step = make_step(spec, device="cuda")          # latents and what else its forward takes
    latents = denoise(model, spec, step)           # no VAE, prompt embeddings are random

The arguments are those of `config.json` in the named repositories. Not one file was downloaded from them: the values
were compared with copies in public source code (all but those of Wan, PixArt-Sigma's interpolation_scale, and the
schedulers of Wan, HunyuanVideo, Lumina and Qwen-Image, which are as remembered) and with the defaults of diffusers
0.42, and the number of parameters with the published one (`billions`; a test counts them on the meta device).
"""

from torch import Tensor

from diffusion.spec import (
    DiffusionModel,
    Size,
    cogvideox_inputs,
    flux2_inputs,
    flux_inputs,
    hunyuan_inputs,
    ltx_inputs,
    lumina2_inputs,
    pixart_inputs,
    qwen_inputs,
    sd3_inputs,
    sdxl_inputs,
    wan_inputs,
)


_FLOW = "FlowMatchEulerDiscreteScheduler"
_DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}


def _thousandth(t: Tensor) -> Tensor:
    return t / 1000


MODELS: dict[str, DiffusionModel] = {
    "flux.1-dev": DiffusionModel(
        repo="black-forest-labs/FLUX.1-dev",
        model_class="FluxTransformer2DModel",
        config={
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
        blocks={"num_layers": 19, "num_single_layers": 38},
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        billions=11.90,
        size=Size(128, 128, 512),  # 1024 x 1024: 4096 + 512 tokens
        steps=28,
        inputs=flux_inputs,
        scheduler=(_FLOW, _DYNAMIC),
        tiny={
            "in_channels": 16,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "axes_dims_rope": (8, 12, 12),
        },
        tiny_size=Size(32, 32, 16),  # with fewer than 256 keys 8-bit attention would not run
        timestep=_thousandth,
    ),
    "flux.2-dev": DiffusionModel(
        repo="black-forest-labs/FLUX.2-dev",
        model_class="Flux2Transformer2DModel",
        config={
            "in_channels": 128,
            "num_layers": 8,
            "num_single_layers": 48,
            "attention_head_dim": 128,
            "num_attention_heads": 48,
            "joint_attention_dim": 15360,
            "timestep_guidance_channels": 256,
            "mlp_ratio": 3.0,
            "axes_dims_rope": (32, 32, 32, 32),
            "rope_theta": 2000,
            "guidance_embeds": True,
        },
        blocks={"num_layers": 8, "num_single_layers": 48},
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        billions=32.2,
        size=Size(128, 128, 512),  # 1024 x 1024: 4096 + 512 tokens
        steps=28,
        inputs=flux2_inputs,
        scheduler=(_FLOW, _DYNAMIC),
        tiny={
            "in_channels": 16,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 96,
            "axes_dims_rope": (8, 8, 8, 8),
        },
        tiny_size=Size(16, 16, 16),
        timestep=_thousandth,
    ),
    "cogvideox-5b": DiffusionModel(
        repo="zai-org/CogVideoX-5b",
        model_class="CogVideoXTransformer3DModel",
        config={
            "in_channels": 16,
            "num_layers": 42,
            "num_attention_heads": 48,
            "attention_head_dim": 64,
            "text_embed_dim": 4096,
            "max_text_seq_length": 226,
            "use_rotary_positional_embeddings": True,
        },
        blocks={"num_layers": 42},
        block_lists=("transformer_blocks",),
        billions=5.57,
        size=Size(60, 90, 226, frames=13),  # 720 x 480, 49 frames: 17550 + 226 tokens
        steps=50,
        inputs=cogvideox_inputs,
        scheduler=(
            "CogVideoXDDIMScheduler",  # deterministic; the pipeline's documentation takes the DPM one for this model
            {
                "beta_schedule": "scaled_linear",
                "prediction_type": "v_prediction",
                "rescale_betas_zero_snr": True,
                "snr_shift_scale": 1.0,
                "timestep_spacing": "trailing",
            },
        ),
        tiny={
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "text_embed_dim": 64,
            "time_embed_dim": 64,
            "max_text_seq_length": 16,
        },
        tiny_size=Size(16, 24, 16, frames=3),
        guidance=6.0,
    ),
    "wan2.1-t2v-14b": DiffusionModel(
        repo="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        model_class="WanTransformer3DModel",
        config={
            "in_channels": 16,
            "num_layers": 40,
            "num_attention_heads": 40,
            "attention_head_dim": 128,
            "ffn_dim": 13824,
            "text_dim": 4096,
        },
        blocks={"num_layers": 40},
        block_lists=("blocks",),
        billions=14.3,
        size=Size(90, 160, 512, frames=21),  # 1280 x 720, 81 frames: 75600 tokens
        steps=50,
        inputs=wan_inputs,
        scheduler=(_FLOW, {"shift": 5.0}),  # of its UniPC scheduler, the shift
        tiny={"num_attention_heads": 4, "attention_head_dim": 32, "ffn_dim": 256, "text_dim": 64, "freq_dim": 64},
        tiny_size=Size(8, 8, 16, frames=3),
        guidance=5.0,
    ),
    "qwen-image": DiffusionModel(
        repo="Qwen/Qwen-Image",
        model_class="QwenImageTransformer2DModel",
        config={
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 60,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 3584,
            "axes_dims_rope": (16, 56, 56),
        },
        blocks={"num_layers": 60},
        block_lists=("transformer_blocks",),
        billions=20.43,
        size=Size(166, 166, 256),  # 1328 x 1328: 6889 tokens; the prompt's number of tokens varies
        steps=50,
        inputs=qwen_inputs,
        scheduler=(_FLOW, {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9}),
        tiny={
            "in_channels": 16,
            "out_channels": 4,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 64,
            "axes_dims_rope": (8, 12, 12),
        },
        tiny_size=Size(16, 16, 16),
        guidance=4.0,
        timestep=_thousandth,
    ),
    "sd3.5-large": DiffusionModel(
        repo="stabilityai/stable-diffusion-3.5-large",
        model_class="SD3Transformer2DModel",
        config={
            "in_channels": 16,
            "num_layers": 38,
            "attention_head_dim": 64,
            "num_attention_heads": 38,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 2432,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        blocks={"num_layers": 38},
        block_lists=("transformer_blocks",),
        billions=8.06,
        size=Size(128, 128, 333),  # 1024 x 1024: 4096 tokens; 77 tokens of CLIP and 256 of T5
        steps=28,
        inputs=sd3_inputs,
        scheduler=(_FLOW, {"shift": 3.0}),
        tiny={
            "sample_size": 16,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 64,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 64,
            "pos_embed_max_size": 16,
        },
        tiny_size=Size(16, 16, 16),
        guidance=3.5,
    ),
    "pixart-sigma-xl": DiffusionModel(
        repo="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        model_class="PixArtTransformer2DModel",
        config={
            "in_channels": 4,
            "num_layers": 28,
            "num_attention_heads": 16,
            "attention_head_dim": 72,
            "cross_attention_dim": 1152,
            "caption_channels": 4096,
            "sample_size": 128,
            "interpolation_scale": 2,
            "use_additional_conditions": False,
        },
        blocks={"num_layers": 28},
        block_lists=("transformer_blocks",),
        billions=0.61,
        size=Size(128, 128, 300),  # 1024 x 1024: 4096 tokens
        steps=20,
        inputs=pixart_inputs,
        scheduler=("DPMSolverMultistepScheduler", {"beta_start": 0.0001, "beta_end": 0.02}),
        tiny={
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "cross_attention_dim": 128,
            "caption_channels": 64,
            "sample_size": 16,
        },
        tiny_size=Size(16, 16, 16),
        guidance=4.5,
        velocity=lambda output: output.chunk(2, dim=1)[0],  # the other half is a variance
    ),
    "hunyuanvideo": DiffusionModel(
        repo="hunyuanvideo-community/HunyuanVideo",
        model_class="HunyuanVideoTransformer3DModel",
        config={
            "in_channels": 16,
            "num_layers": 20,
            "num_single_layers": 40,
            "num_attention_heads": 24,
            "attention_head_dim": 128,
            "text_embed_dim": 4096,
            "pooled_projection_dim": 768,
            "rope_axes_dim": (16, 56, 56),
            "guidance_embeds": True,
        },
        blocks={"num_layers": 20, "num_single_layers": 40},
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        billions=12.8,
        size=Size(90, 160, 256, frames=33),  # 1280 x 720, 129 frames: 118800 tokens
        steps=50,
        inputs=hunyuan_inputs,
        scheduler=(_FLOW, {"shift": 7.0}),
        tiny={
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "text_embed_dim": 64,
            "pooled_projection_dim": 64,
            "num_refiner_layers": 1,
            "rope_axes_dim": (8, 12, 12),
        },
        tiny_size=Size(8, 8, 16, frames=3),
    ),
    "ltx-video": DiffusionModel(
        repo="Lightricks/LTX-Video",
        model_class="LTXVideoTransformer3DModel",
        config={
            "in_channels": 128,
            "num_layers": 28,
            "num_attention_heads": 32,
            "attention_head_dim": 64,
            "cross_attention_dim": 2048,
            "caption_channels": 4096,
        },
        blocks={"num_layers": 28},
        block_lists=("transformer_blocks",),
        billions=1.92,
        size=Size(16, 22, 128, frames=21),  # 704 x 512, 161 frames: 7392 tokens
        steps=50,
        inputs=ltx_inputs,
        scheduler=(
            _FLOW,
            {"use_dynamic_shifting": True, "base_image_seq_len": 1024, "base_shift": 0.95, "max_shift": 2.05},
        ),
        tiny={
            "in_channels": 16,
            "out_channels": 16,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "cross_attention_dim": 128,
            "caption_channels": 64,
        },
        tiny_size=Size(4, 4, 16, frames=3),
        guidance=3.0,
    ),
    "lumina2": DiffusionModel(
        repo="Alpha-VLLM/Lumina-Image-2.0",
        model_class="Lumina2Transformer2DModel",
        config={
            "in_channels": 16,
            "num_layers": 26,
            "hidden_size": 2304,
            "num_attention_heads": 24,
            "num_kv_heads": 8,
            "axes_dim_rope": (32, 32, 32),
            "axes_lens": (300, 512, 512),
            "cap_feat_dim": 2304,
        },
        blocks={"num_layers": 26},
        block_lists=("layers",),
        billions=2.61,
        size=Size(128, 128, 256),  # 1024 x 1024: 4096 tokens
        steps=30,
        inputs=lumina2_inputs,
        scheduler=(_FLOW, {"shift": 6.0}),
        tiny={
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "axes_dim_rope": (8, 12, 12),
            "multiple_of": 32,
            "num_refiner_layers": 1,
            "cap_feat_dim": 64,
        },
        tiny_size=Size(16, 16, 16),
        guidance=4.0,
        timestep=lambda t: 1 - t / 1000,
        velocity=lambda output: -output,
    ),
    "sdxl": DiffusionModel(
        repo="stabilityai/stable-diffusion-xl-base-1.0",
        model_class="UNet2DConditionModel",
        config={
            "sample_size": 128,
            "in_channels": 4,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": (5, 10, 20),
            "transformer_layers_per_block": (1, 2, 10),
            "cross_attention_dim": 2048,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "use_linear_projection": True,
        },
        blocks={},
        block_lists=(),
        billions=2.567,
        size=Size(128, 128, 77),  # 1024 x 1024
        steps=30,
        inputs=sdxl_inputs,
        scheduler=(
            "EulerDiscreteScheduler",
            {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"},
        ),
        tiny={
            "block_out_channels": (32, 64, 128),
            "attention_head_dim": (1, 2, 4),
            "transformer_layers_per_block": (1, 1, 2),
            "layers_per_block": 1,
            "cross_attention_dim": 64,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 112,
            "norm_num_groups": 8,
        },
        tiny_size=Size(16, 16, 16),
        guidance=5.0,
        sample="sample",
    ),
}
# google/t5-v1_1-xxl, the text encoder of Flux.1, SD3.5, PixArt-Sigma and CogVideoX: transformers' T5EncoderModel.
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
T5_XXL_BILLIONS = 4.762
