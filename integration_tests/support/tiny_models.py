"""Tiny models of real architectures with random weights, for the tests of the transformers integration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn


VOCAB = 96
_LM = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
_ENCODER = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


@dataclass(frozen=True)
class Architecture:
    """A model class, a config of it, and its inputs.

    Attributes:
        model: name of the model class in transformers.
        config: makes the config.
        inputs: makes the arguments of the forward; the seed is fixed.
        quantized: how many modules the default config quantizes.
    """

    model: str
    config: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    quantized: int


def _ids(length: int = 12) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _text() -> dict[str, Tensor]:
    return {"input_ids": _ids()}


def _config(name: str, /, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**fields)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", _config("LlamaConfig", **_LM), _text, 14),
    "llama_tied": Architecture("LlamaForCausalLM", _config("LlamaConfig", **_LM, tie_word_embeddings=True), _text, 14),
    "llama_classifier": Architecture(
        "LlamaForSequenceClassification", _config("LlamaConfig", **_LM, num_labels=3), _text, 14
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _config("Gemma3TextConfig", **_LM, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        _text,
        14,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        _config("Qwen3MoeConfig", **_LM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        _text,
        10,
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        _config("MixtralConfig", **_LM, num_local_experts=4, num_experts_per_tok=2),
        _text,
        10,
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        _config("GptOssConfig", **_LM, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        _text,
        10,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _config(
            "GPT2Config",
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        ),
        _text,
        8,
    ),
    "bert": Architecture(
        "BertForMaskedLM", _config("BertConfig", vocab_size=VOCAB, max_position_embeddings=64, **_ENCODER), _text, 12
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        _config(
            "T5Config",
            vocab_size=VOCAB,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            pad_token_id=2,
        ),
        lambda: {"input_ids": _ids(), "decoder_input_ids": _ids(5)},
        36,
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        _config(
            "WhisperConfig",
            vocab_size=VOCAB,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            num_mel_bins=16,
            max_source_positions=32,
            max_target_positions=32,
            pad_token_id=2,
            bos_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        lambda: {"input_features": _values(2, 16, 64), "decoder_input_ids": _ids(5)},
        32,
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        _config("ViTConfig", image_size=32, patch_size=8, num_labels=5, **_ENCODER),
        lambda: {"pixel_values": _values(2, 3, 32, 32)},
        12,
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(image_size=32, patch_size=16, **_ENCODER),
            text_config=transformers.LlamaConfig(**_LM),
            image_token_id=3,
            vision_feature_layer=-1,
        ),
        lambda: {
            "input_ids": torch.cat([torch.full((2, 4), 3), _ids() // 2 + 4], 1),
            "pixel_values": _values(2, 3, 32, 32),
        },
        28,
    ),
    "qwen2_vl": Architecture(
        "Qwen2VLForConditionalGeneration",
        lambda: transformers.Qwen2VLConfig(
            text_config={**_LM, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            vision_config=dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4, mlp_ratio=2, patch_size=4),
            image_token_id=3,
            video_token_id=4,
            vision_start_token_id=5,
            vision_end_token_id=6,
        ),
        lambda: {
            "input_ids": torch.cat([torch.full((1, 4), 3), _ids()[:1] // 2 + 7], 1),
            "pixel_values": _values(16, 96),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": torch.tensor([[1] * 4 + [0] * 12]),
        },
        24,
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        _config(
            "MambaConfig",
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            state_size=8,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        ),
        _text,
        4,
    ),
    "phi3": Architecture("Phi3ForCausalLM", _config("Phi3Config", **_LM), _text, 8),
    "nomic_bert": Architecture(
        "NomicBertModel",
        _config(
            "NomicBertConfig", vocab_size=VOCAB, head_dim=16, max_position_embeddings=64, pad_token_id=2, **_ENCODER
        ),
        _text,
        14,
    ),
}


def build(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """A model with random weights; larger ones than the default initialization, so that every layer matters."""
    torch.manual_seed(seed)
    architecture = ARCHITECTURES[name]
    model = getattr(transformers, architecture.model)._from_config(architecture.config(), dtype=dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "router" in parameter_name or parameter_name.endswith("mlp.gate.weight"):
                _draw(parameter, std=2)  # no ties: quantization must not send tokens to other experts
            elif parameter.dim() > 1:
                _draw(parameter, std=0.08)
            elif parameter_name.endswith("bias"):
                _draw(parameter, std=0.1)
    return model


def _draw(parameter: Tensor, std: float) -> None:
    """Set to random numbers that every torch draws alike: torch 2.11 has others for bf16 than for fp32."""
    parameter.copy_(torch.empty(parameter.shape).normal_(std=std))


def inputs(name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Arguments of the model's forward, floating-point ones in `dtype`."""
    values = ARCHITECTURES[name].inputs()
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in values.items()}


@torch.no_grad()
def outputs(model: nn.Module, name: str) -> Tensor:
    """The model's first output (logits or hidden states) for its inputs, fp32.

    Of the second call: some CPU kernels repack a weight at its second use, and round differently from then on.
    """
    arguments = inputs(name, model.dtype)
    model(**arguments)
    return model(**arguments)[0].float()
