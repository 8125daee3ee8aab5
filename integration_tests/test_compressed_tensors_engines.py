"""Exports as serving engines read them: the names that they look for, and layers that they cannot load."""

import re

import pytest
import torch
import transformers

from hf_quant import QuantizerConfig, export_compressed_tensors, quantize_
from integration_tests.support.foreign_checkpoints import config_of
from integration_tests.support.tiny_models import ARCHITECTURES


INT4_EXPERTS = {"*experts*": {"weights": "W4A16", "group_size": 32}}
LLAMA_EXPERTS, MIXTRAL_EXPERTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")


def export(tmp_path, name_or_model, config=None, /, **fields):
    """(its `quantization_config`, notes) of a tiny random model, quantized and exported for engines."""
    torch.manual_seed(0)
    if config is None:
        name_or_model, config = ARCHITECTURES[name_or_model].model, ARCHITECTURES[name_or_model].config()
    model = getattr(transformers, name_or_model)(config).bfloat16()
    quantize_(model, QuantizerConfig(**fields))
    notes = export_compressed_tensors(model, tmp_path / "out")
    return config_of(tmp_path / "out")["quantization_config"], notes


def matches(name, target):
    return re.match(target[3:], name) is not None if target.startswith("re:") else name == target


def format_of(fields, name, *, is_linear=True):
    """The storage format of a layer that an engine calls `name` and knows by that alone; None: it is in 16 bit."""
    if any(matches(name, ignored) for ignored in fields["ignore"]):
        return None
    groups = fields["config_groups"].values()
    named = [group for group in groups if any(matches(name, target) for target in group["targets"])]
    by_class = [group for group in groups if is_linear and "Linear" in group["targets"]]
    return (named or by_class)[0]["format"] if named or by_class else None


def test_fused_layers_are_found_by_their_own_names(tmp_path):
    modules = {"*.mlp.*": "W8A8_FP8", "*.o_proj": None, "model.layers.1.self_attn.*": None}
    fields, _ = export(tmp_path, "llama", weights="W8A16", modules=modules)
    first, second = "model.layers.0.", "model.layers.1."
    assert format_of(fields, f"{first}self_attn.qkv_proj") == "pack-quantized"
    assert format_of(fields, f"{second}self_attn.qkv_proj") is None
    for layer in (first, second):
        assert format_of(fields, f"{layer}mlp.gate_up_proj") == "float-quantized"
        assert format_of(fields, f"{layer}mlp.down_proj") == "float-quantized"
        assert format_of(fields, f"{layer}self_attn.o_proj") is None


def test_fused_layers_in_16_bit_beside_one_scheme(tmp_path):
    fields, _ = export(tmp_path, "llama", weights="W8A16", modules={"model.layers.1.*": None})
    assert fields["config_groups"]["group_0"]["targets"] == ["Linear"]
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert format_of(fields, f"model.layers.0.{name}") == "pack-quantized"
        assert format_of(fields, f"model.layers.1.{name}") is None


@pytest.mark.parametrize(
    ("name", "block", "parts"),
    [
        ("qwen3_moe", "mlp", LLAMA_EXPERTS),
        ("mixtral", "block_sparse_moe", (*MIXTRAL_EXPERTS, *LLAMA_EXPERTS)),
    ],
)
@pytest.mark.parametrize("experts", [INT4_EXPERTS, {"*experts*": None}])
def test_experts_are_found_by_the_names_of_the_first(name, block, parts, experts, tmp_path):
    fields, notes = export(tmp_path, name, weights="W8A8", input_transform="none", modules=experts)
    assert bool(notes) == (experts is INT4_EXPERTS)  # with int8 beside them
    expected = None if experts["*experts*"] is None else "pack-quantized"
    for layer in (0, 1):
        assert {format_of(fields, f"model.layers.{layer}.{block}.experts.0.{part}") for part in parts} == {expected}
        assert format_of(fields, f"model.layers.{layer}.self_attn.qkv_proj") == "int-quantized"
        assert format_of(fields, f"model.layers.{layer}.{block}.gate") is None


def test_experts_that_only_one_engine_serves_are_mentioned(tmp_path):
    _, notes = export(tmp_path / "int8", "qwen3_moe", weights="W8A8", input_transform="none")
    assert notes == ("of the engines vLLM alone serves these experts (int-quantized)",)
    assert export(tmp_path / "int4", "qwen3_moe", weights="W4A16", group_size=32)[1] == ()


def test_experts_in_16_bit_that_are_one_tensor(tmp_path):
    fields, _ = export(tmp_path, "gpt_oss", weights="W8A16", modules={"*experts*": None})
    for part in (*LLAMA_EXPERTS, *MIXTRAL_EXPERTS):
        assert format_of(fields, f"model.layers.1.mlp.experts.0.{part}") is None
    assert format_of(fields, "model.layers.1.self_attn.qkv_proj") == "pack-quantized"


def test_a_quantized_head_is_named(tmp_path):
    # To engines it is no "Linear", and in a multimodal model it may have a prefix.
    fields, (note,) = export(tmp_path, "llama", weights="W8A16", modules={"lm_head": "int8"})
    assert note.startswith("lm_head is quantized: of the engines, vLLM from 0.20 on")
    for name in ("lm_head", "language_model.lm_head"):
        assert format_of(fields, name, is_linear=False) == "pack-quantized"
    assert format_of(fields, "model.lm_head_norm", is_linear=False) is None


def test_a_kernel_that_only_one_engine_has_is_mentioned(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
    )
    _, notes = export(tmp_path, "LlamaForCausalLM", config, weights="W4A16", group_size=256)
    assert notes == ("of the engines vLLM alone has a kernel for groups of 256",)


def test_a_vision_tower_in_16_bit(tmp_path):
    fields, notes = export(tmp_path, "qwen2_vl", weights="W8A16", modules={"*visual*": None})
    assert format_of(fields, "visual.blocks.0.attn.qkv") is format_of(fields, "visual.blocks.0.attn.qkv_proj") is None
    assert format_of(fields, "model.layers.0.self_attn.qkv_proj") == "pack-quantized" and notes == ()


def test_a_quantized_vision_tower_is_mentioned(tmp_path):
    _, (note,) = export(tmp_path, "qwen2_vl", weights="W8A16")
    assert "layers beside the language model are quantized (visual.blocks.0.attn." in note


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("qwen3_moe", {"weights": "W8A16_FP8"}, "experts.0.*: engines take 8-bit experts with quantized inputs"),
        (
            "qwen3_moe",
            {"weights": "W8A8", "granularity": "tensor", "input_transform": "none"},
            "experts.0.*: engines take 8-bit experts with",
        ),
        ("mamba", {"weights": "W8A16"}, "mixer.in_proj.*: engines compute the mixers of Mamba 1 in 16 bit"),
        ("llama", {"weights": "W8A16", "modules": {"lm_head": "FP8_BLOCK"}}, "cannot split the output head in blocks"),
        ("gpt_oss", {"weights": "W4A16", "group_size": 32}, "experts are transposed or have biases"),
        ("qwen3_moe", {"weights": "FP8_BLOCK"}, "blocks of 128 rows do not divide the 32 rows of its parts"),
        ("gpt2", {"weights": "int8"}, "it is a Conv1D; engines read quantized linear layers only"),
    ],
)
def test_what_engines_cannot_load_is_refused(name, config, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        export(tmp_path, name, **config)
    assert not (tmp_path / "out").exists()


def test_gates_of_shared_experts_are_in_16_bit_for_engines(tmp_path):
    sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, vocab_size=96, num_hidden_layers=1)
    config = transformers.Qwen2MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)
    fields, _ = export(tmp_path, "Qwen2MoeForCausalLM", config, weights="W8A16")
    assert format_of(fields, "model.layers.0.mlp.shared_expert_gate") is None
    assert format_of(fields, "model.layers.0.mlp.shared_expert.gate_up_proj") == "pack-quantized"
    (tmp_path / "second").mkdir()
    with pytest.raises(ValueError, match="shared_expert_gate: engines compute it in 16 bit"):
        export(
            tmp_path / "second",
            "Qwen2MoeForCausalLM",
            config,
            weights="W8A16",
            modules={"*.shared_expert_gate": "int8"},
        )
