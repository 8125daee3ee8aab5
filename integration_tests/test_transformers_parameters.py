"""Quantize on load, save and reload: modules with matrices, attention or convolutions of their own, in real models."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_quant import QuantizerConfig, dequantize_, plan, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.testing import assert_close, sqnr


_TEXT = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_LM = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
_IDS = {"input_ids": torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))}


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _config(name: str, /, **fields: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**fields)


_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
_PIXELS = {"pixel_values": _values(1, 3, 32, 32)}
_SPEECH = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"conv_dim": (32, 32), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
}
_NORM = "*.conv.parametrizations.weight"
# {name: (class, config, inputs, patterns that name what is quantized on request, kind that must be there)}.
MODELS: dict[str, tuple[str, Callable[[], Any], dict[str, Tensor], tuple[str, ...], str]] = {
    "llama4": (
        "Llama4ForCausalLM",
        _config("Llama4TextConfig", **{**_LM, **_MOE}, intermediate_size_mlp=128, max_position_embeddings=64),
        _IDS,
        (),
        "parameters",
    ),
    "dbrx": (
        "DbrxForCausalLM",
        _config(
            "DbrxConfig",
            **{"d_model": 64, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 96},
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            ffn_config={"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        _IDS,
        (),
        "parameters",
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        _config("JetMoeConfig", **{**_MOE, **_TEXT}, kv_channels=16, max_position_embeddings=64),
        _IDS,
        (),
        "parameters",
    ),
    "longcat": (
        "LongcatFlashForCausalLM",
        _config(
            "LongcatFlashConfig",
            **{"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_layers": 1, "head_dim": 16},
            **{"ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 2},
            **{"moe_topk": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
            **{"v_head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0},
        ),
        _IDS,
        (),
        "parameters",
    ),
    "siglip": (
        "SiglipVisionModel",
        _config("SiglipVisionConfig", **_VISION, image_size=32, patch_size=16),
        _PIXELS,
        (),
        "attention",
    ),
    "hubert": (
        "HubertModel",
        _config("HubertConfig", **_SPEECH),
        {"input_values": _values(1, 800)},
        (_NORM,),
        "weight_norm",
    ),
    "encodec": (
        "EncodecModel",
        _config(
            "EncodecConfig",
            **{"num_filters": 4, "hidden_size": 32, "upsampling_ratios": [4, 2], "num_residual_layers": 1},
            **{"codebook_size": 16, "codebook_dim": 32, "target_bandwidths": [1.0], "sampling_rate": 800},
        ),
        {"input_values": _values(1, 1, 64)},
        ("*.lstm", "*.parametrizations.weight"),
        "recurrent",
    ),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, config, *_ = MODELS[name]
    model = getattr(transformers, cls)(config()).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            nn.init.normal_(parameter, std=0.1)
    return model


def config_of(name: str) -> QuantizerConfig:
    return QuantizerConfig("int4", modules=dict.fromkeys(MODELS[name][3], "int8"))


@torch.no_grad()
def output(model: nn.Module, name: str) -> Tensor:
    found = model(**MODELS[name][2])
    return found.audio_values if name == "encodec" else found[0]


def states(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_on_load_by_quantize_and_reloaded_with_equal_bits(name, tmp_path: Path):
    cls = getattr(transformers, MODELS[name][0])
    build(name).save_pretrained(tmp_path / "plain")
    loaded = cls.from_pretrained(tmp_path / "plain", quantization_config=config_of(name)).eval()
    quantized = quantize_(build(name), config_of(name))
    found = plan(build(name), config_of(name))
    assert MODELS[name][4] in {entry.kind for entry in found.quantized.values()}
    assert MODELS[name][4] in {m.kind for m in loaded.modules() if isinstance(m, QuantizedModule)}
    loaded.save_pretrained(tmp_path / "saved")
    again = cls.from_pretrained(tmp_path / "saved").eval()
    assert states(loaded).keys() == states(quantized).keys() == states(again).keys()
    for key, tensor in states(quantized).items():
        assert torch.equal(tensor, states(loaded)[key]) and torch.equal(tensor, states(again)[key]), key
    y = output(again, name)
    assert torch.equal(y, output(quantized, name)) and torch.equal(y, output(loaded, name))
    assert_close(y, output(dequantize_(copy.deepcopy(quantized)), name), rms=1e-4)
    assert -5 < sqnr(y, output(build(name), name)) < 60  # it is quantized


@pytest.mark.parametrize("name", ["llama4", "jetmoe", "dbrx"])
def test_generates_as_the_dequantized_model(name):
    model = quantize_(build(name), "int8")
    options = {"max_new_tokens": 5, "do_sample": False}
    ids = model.generate(**_IDS, **options)
    assert torch.equal(ids, dequantize_(copy.deepcopy(model)).generate(**_IDS, **options))


def test_a_router_beside_matrices_of_experts_stays_in_16_bit():
    config = MODELS["jetmoe"][1]()
    config.num_local_experts = 64
    with torch.device("meta"):
        model = transformers.JetMoeForCausalLM(config)
    entries = plan(model, "int4").entries
    assert {entries[f"model.layers.0.{n}.router.layer"].reason for n in ("mlp", "self_attention.experts")} == {
        "MoE router"
    }


def test_codes_of_a_weight_that_has_another_last_name_in_checkpoints(tmp_path):
    config = transformers.Inkling2TextConfig(  # "weight_proj" of its checkpoints is "weight_proj.weight" in the model
        **{**_LM, "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "rel_extent": 16, "d_rel": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
    )
    model = quantize_(
        transformers.Inkling2ForCausalLM(config).bfloat16(), QuantizerConfig("int8", modules={"*.weight_proj": "int8"})
    )
    assert "model.layers.1.self_attn.k_sconv.weight_proj.qdata" in states(model)
    for path in (tmp_path / "first", tmp_path / "second"):
        model.save_pretrained(path)
        again, info = type(model).from_pretrained(path, output_loading_info=True)
        assert not any(info.values()) and states(again).keys() == states(model).keys()
        assert all(torch.equal(tensor, states(again)[key]) for key, tensor in states(model).items())
        model = again
