"""Tiny diffusion models of real architectures with random weights, for the tests of the diffusers integration."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_quant.modules import QuantizedModule
from integration_tests.support.tiny_architectures import ARCHITECTURES, Size


NO_TOKENIZERS = {"tokenizer": None, "tokenizer_2": None}


def model_class(name: str) -> type:
    """The class of a model of ARCHITECTURES; skips the test if this version of diffusers does not have it."""
    cls = getattr(diffusers, ARCHITECTURES[name].model, None)
    if cls is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {ARCHITECTURES[name].model}")
    return cls


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A model of ARCHITECTURES with seeded random weights, in eval mode; `changes` of its configuration."""
    torch.manual_seed(0)
    model = model_class(name)(**{**ARCHITECTURES[name].config, **changes})
    with torch.no_grad():
        for parameter in model.parameters():  # some are initialized to zero or one: no test would see an error there
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.normal_(mean=float(parameter.mean() > 0.5), std=0.1)
    return model.to(dtype).eval()


def make_inputs(name: str, dtype: torch.dtype = torch.float32, size: Size = Size()) -> dict[str, Any]:  # noqa: B008
    """The arguments of the forward of a model of ARCHITECTURES; positions and time steps stay in fp32."""

    def cast(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: cast(k, v) for k, v in value.items()}
        exact = not isinstance(value, Tensor) or not value.is_floating_point() or key.endswith("_ids")
        return value if exact else value.to(dtype)

    return {key: cast(key, value) for key, value in ARCHITECTURES[name].inputs(size).items()}


@torch.no_grad()
def run(model: nn.Module, name: str, size: Size = Size()) -> Tensor:  # noqa: B008
    """The model's output for its fixed inputs, in fp32."""
    return model(**make_inputs(name, model.dtype, size), return_dict=False)[0].float()


def load(directory: Path, name: str = "flux", dtype: torch.dtype | None = torch.bfloat16, **kwargs: Any) -> nn.Module:
    """A model of ARCHITECTURES from a checkpoint."""
    return model_class(name).from_pretrained(directory, torch_dtype=dtype, **kwargs)


def quantized_names(model: nn.Module) -> set[str]:
    """The names of the modules that are quantized."""
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


def file_tensors(directory: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint, from all of its shards."""
    return {key: tensor for file in sorted(directory.glob("*.safetensors")) for key, tensor in load_file(file).items()}


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
