"""Export for serving engines: every byte by the format's description; the package compressed-tensors is not needed."""

import json
import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, export_compressed_tensors, import_checkpoint, quantize_
from hf_quant.cli import main
from hf_quant.convert import files as _files
from hf_quant.convert.compressed_tensors.schemes import Inexpressible
from hf_quant.convert.compressed_tensors.tensors import divisor_of
from hf_quant.formats import FORMATS
from hf_quant.modules import QuantizedModule
from integration_tests.support.foreign_checkpoints import (
    config_of,
    decode_compressed_checkpoint,
    load_all,
    make_llama,
    mismatches,
    weights_of,
)
from integration_tests.support.tiny_models import ARCHITECTURES


LINEAR = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
BF16, F32 = torch.bfloat16, torch.float32
I32, I64, I8, U8, F8 = torch.int32, torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn
# {scheme: (config, storage format, tensors of down_proj [128, 256])}
SCHEMES = {
    "w4a16": (
        {"weights": "W4A16", "group_size": 64},
        "pack-quantized",
        {"weight_packed": (I32, (128, 32)), "weight_scale": (BF16, (128, 4)), "weight_shape": (I64, (2,))},
    ),
    "w4a16_asym": (
        {"weights": "W4A16_ASYM"},
        "pack-quantized",
        {
            "weight_packed": (I32, (128, 32)),
            "weight_scale": (BF16, (128, 2)),
            "weight_shape": (I64, (2,)),
            "weight_zero_point": (I32, (16, 2)),
        },
    ),
    "w4a16_channel": (
        {"weights": "W4A16", "granularity": "row"},
        "pack-quantized",
        {"weight_packed": (I32, (128, 32)), "weight_scale": (BF16, (128, 1)), "weight_shape": (I64, (2,))},
    ),
    "w8a16": (
        {"weights": "W8A16"},
        "pack-quantized",
        {"weight_packed": (I32, (128, 64)), "weight_scale": (BF16, (128, 1)), "weight_shape": (I64, (2,))},
    ),
    "w8a8": (
        {"weights": "W8A8", "input_transform": "none"},
        "int-quantized",
        {"weight": (I8, (128, 256)), "weight_scale": (F32, (128, 1))},
    ),
    "w8a8_tensor": (
        {"weights": "W8A8", "granularity": "tensor", "input_transform": "none"},
        "int-quantized",
        {"weight": (I8, (128, 256)), "weight_scale": (F32, (1,))},
    ),
    "w8a8_fp8": (
        {"weights": "W8A8_FP8"},
        "float-quantized",
        {"weight": (F8, (128, 256)), "weight_scale": (F32, (128, 1))},
    ),
    "w8a8_static": (
        {"weights": "W8A8", "activation_scale": "static", "input_transform": "none"},
        "int-quantized",
        {"weight": (I8, (128, 256)), "weight_scale": (F32, (128, 1)), "input_scale": (F32, (1,))},
    ),
    "w8a8_fp8_static": (
        {"weights": "W8A8_FP8", "granularity": "tensor", "activation_scale": "static", "input_transform": "none"},
        "float-quantized",
        {"weight": (F8, (128, 256)), "weight_scale": (F32, (1,)), "input_scale": (F32, (1,))},
    ),
    "fp8_block": (
        {"weights": "FP8_BLOCK"},
        "float-quantized",
        {"weight": (F8, (128, 256)), "weight_scale": (F32, (1, 2))},
    ),
    "w8a16_fp8": (
        {"weights": "W8A16_FP8"},
        "naive-quantized",
        {"weight": (F8, (128, 256)), "weight_scale": (F32, (128, 1))},
    ),
    "nvfp4": (
        {"weights": "nvfp4"},
        "nvfp4-pack-quantized",
        {"weight_packed": (U8, (128, 128)), "weight_scale": (F8, (128, 16)), "weight_global_scale": (F32, (1,))},
    ),
    "mxfp4": (
        {"weights": "mxfp4"},
        "mxfp4-pack-quantized",
        {"weight_packed": (U8, (128, 128)), "weight_scale": (U8, (128, 8))},
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


def quantized(llama, **config):
    if config.get("activation_scale") == "static":
        model = AutoModelForCausalLM.from_pretrained(llama)
        ids = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(0))
        return quantize_(model, QuantizerConfig(**config), calibration=ids)
    return AutoModelForCausalLM.from_pretrained(llama, quantization_config=QuantizerConfig(**config))


@pytest.mark.parametrize("name", SCHEMES)
def test_no_weight_changes(name, llama, tmp_path):
    config, format, expected = SCHEMES[name]
    model = quantized(llama, **config)
    reader = "transformers" if name in ("fp8_block", "w8a8_fp8_static") else "engines"
    notes = export_compressed_tensors(model, tmp_path / "out", reader=reader)
    expected_notes = {
        "w8a8_tensor": ["of the engines vLLM alone"],
        "mxfp4": ["vLLM quantizes the inputs", "of the engines vLLM alone"],
    }
    assert [note[:25] for note in notes] == expected_notes.get(name, [])
    tensors = load_all(tmp_path / "out")
    wrong, count = mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))
    assert (wrong, count) == (0, 2 * (3 * 128 * 256 + 2 * 128 * 128 + 2 * 64 * 128))
    prefix = "model.layers.1.mlp.down_proj."
    found = {key.removeprefix(prefix): (t.dtype, tuple(t.shape)) for key, t in tensors.items() if prefix in key}
    assert found == expected
    fields = config_of(tmp_path / "out")["quantization_config"]
    assert (fields["format"], fields["config_groups"]["group_0"]["format"]) == (format, format)
    others = {key for key in tensors if key.rpartition(".")[0].rpartition(".")[2] not in LINEAR}
    assert {key: tensors[key].dtype for key in others} == dict.fromkeys(others, BF16)
    assert all(torch.equal(tensors[key], value) for key, value in load_all(llama).items() if key in others)


def test_a_decoder_that_swaps_nibbles_sees_it(llama, tmp_path):
    model = quantized(llama, weights="W4A16")
    export_compressed_tensors(model, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_all(tmp_path / "out")
    key = "model.layers.0.mlp.up_proj.weight_packed"
    bytes_ = tensors[key].view(U8)
    tensors[key] = ((bytes_ >> 4) | (bytes_ << 4)).view(I32)
    _files.save_file(tensors, file)
    wrong, _ = mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))
    assert wrong > 256 * 128 // 2


def test_config_of_one_scheme(llama, tmp_path):
    export_compressed_tensors(quantized(llama, weights="W4A16"), tmp_path / "out")
    assert config_of(tmp_path / "out")["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": False,
                },
            }
        },
    }
    before, after = config_of(llama), config_of(tmp_path / "out")
    del after["quantization_config"]
    assert after == before
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"README.md", "config.json", "generation_config.json", "model.safetensors"}


def test_config_of_several_schemes(llama, tmp_path):
    modules = {"*.mlp.*": "W8A8_FP8", "*.o_proj": None, "model.layers.1.self_attn.*": None}
    model = quantized(llama, weights="W4A16", modules=modules)
    export_compressed_tensors(model, tmp_path / "out")
    fields = config_of(tmp_path / "out")["quantization_config"]
    fp8, int4 = fields["config_groups"]["group_0"], fields["config_groups"]["group_1"]
    assert fields["format"] == "mixed-precision"
    assert fields["ignore"] == [
        "lm_head",
        "model.layers.0.self_attn.o_proj",
        *(f"model.layers.1.self_attn.{part}_proj" for part in ("k", "kv", "o", "q", "qkv", "v")),
    ]
    assert int4["targets"] == [f"model.layers.0.self_attn.{part}_proj" for part in ("k", "kv", "q", "qkv", "v")]
    assert (int4["format"], fp8["format"]) == ("pack-quantized", "float-quantized")
    parts = ("down", "gate", "gate_up", "up")
    assert fp8["targets"] == [f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in parts]
    assert fp8["input_activations"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
    }
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))[0] == 0
    export_compressed_tensors(model, tmp_path / "apart", reader="transformers")
    fields = config_of(tmp_path / "apart")["quantization_config"]
    targets = [name for group in fields["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(weights_of(model))


def test_scales_of_the_cache(llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama)
    ids = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(0))
    quantize_(model, QuantizerConfig("W8A16", scale_dtype="model", kv_cache="fp8"), calibration=ids)
    (note,) = export_compressed_tensors(model, tmp_path / "out")
    assert "one calibrated fp8 scale per layer" in note
    assert "`--kv-cache-dtype fp8` uses them" in (tmp_path / "out" / "README.md").read_text()
    scheme = config_of(tmp_path / "out")["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"], scheme["dynamic"]) == (8, "float", "tensor", False)
    tensors, scales = load_all(tmp_path / "out"), model.config.quantization_config.kv_scales
    assert len(scales) == len(model.model.layers)
    for name, (keys, values) in scales.items():
        assert tensors[f"{name}.k_scale"].tolist() == [keys] and tensors[f"{name}.v_scale"].tolist() == [values]
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    model.config.quantization_config.kv_scales["model.layers.9.self_attn"] = [1.0, 1.0]
    with pytest.raises(ValueError, match=r"kv_scales names model\.layers\.9\.self_attn"):
        export_compressed_tensors(model, tmp_path / "refused")
    (note,) = export_compressed_tensors(model, tmp_path / "apart", reader="transformers")
    assert "the quantized KV cache is left out" in note


def test_static_scales_of_inputs(llama, tmp_path):
    config, _, _ = SCHEMES["w8a8_static"]
    model = quantized(llama, **config)
    assert export_compressed_tensors(model, tmp_path / "out") == ()
    group = config_of(tmp_path / "out")["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor",
        "group_size": None,
        "dynamic": False,
    }
    tensors = load_all(tmp_path / "out")
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            assert torch.equal(tensors[f"{name}.input_scale"], module.static_scale())
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.quantization_config.format_version == 2
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    # Engines give the layers that they fuse one scale.
    layer = model.model.layers[1].self_attn.k_proj
    layer.set_input_scale_("weight", 2 * layer.static_scale())
    with pytest.raises(ValueError, match="engines compute q_proj, k_proj, v_proj as one layer with one static scale"):
        export_compressed_tensors(model, tmp_path / "refused")
    export_compressed_tensors(model, tmp_path / "apart", reader="transformers")
    rotated = quantized(llama, **{**config, "input_transform": "hadamard"})
    with pytest.raises(ValueError, match="its input is rotated"):
        export_compressed_tensors(rotated, tmp_path / "rotated")
    blocks = quantized(llama, weights="FP8_BLOCK", activation_scale="static", input_transform="none")
    with pytest.raises(ValueError, match="no reader takes weights in blocks with a static scale of their input"):
        export_compressed_tensors(blocks, tmp_path / "blocks", reader="transformers")


def test_blocks_say_their_size(tmp_path):
    model = quantized(make_llama(tmp_path / "model", num_key_value_heads=4), weights="FP8_BLOCK")
    (note,) = export_compressed_tensors(model, tmp_path / "out")
    assert note.startswith("vLLM quantizes the inputs of fp8 blocks in groups of 128")
    weights = config_of(tmp_path / "out")["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["block_structure"]) == ("block", [128, 128])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"weights": "int3"}, "no format of compressed-tensors that engines read holds int3 codes"),
        ({"weights": "int2"}, "holds int2 codes"),
        ({"weights": "nf4"}, "holds nf4 codes"),
        ({"weights": "fp6"}, "holds fp6_e3m2 codes"),
        ({"weights": "fp8_e5m2"}, "holds fp8_e5m2 codes"),
        ({"weights": "W4A16", "group_size": 96}, "groups of 96 do not divide its 128 columns"),
        ({"weights": "int4"}, "no engine reads: quantize it as W4A16, or with scale_dtype='model'"),
        (
            {"weights": "W4A8", "scale_dtype": "model"},
            "no reader takes int4 weights with one scale per group and int8",
        ),
        (
            {"weights": "W4A16", "granularity": "tensor"},
            "no reader takes int4 weights with one scale per tensor and 16",
        ),
        ({"weights": "W8A8"}, '_proj.*: its input is rotated, .* quantize the model with input_transform="none"'),
        ({"weights": "W8A16", "input_transform": "hadamard"}, "its input is rotated"),
        ({"weights": "W8A8", "group_size": 64}, "no reader takes int8 weights with one scale per group and int8"),
        ({"weights": "fp8", "group_size": 64}, "no reader takes fp8_e4m3 weights with one scale per group and 16-bit"),
        ({"weights": "int8", "modules": {"model.embed_tokens": "int8"}}, "embed_tokens.*: it is an embedding"),
        (
            {"weights": "W4A16", "modules": {"*.q_proj": "int8"}},
            r"layers.1.self_attn.q_proj: engines compute q_proj, k_proj, v_proj as one layer and want",
        ),
        ({"weights": "W4A16", "modules": {"*.up_proj": None}}, "engines compute gate_proj, up_proj as one layer"),
        (
            {"weights": "int8", "modules": {"*.down_proj": {"weights": "int8", "group_size": 256}}},
            "layers.0.mlp.down_proj.*: .* take groups of 32, 64 or 128, and no groups of 256",
        ),
        (
            {"weights": "FP8_BLOCK"},
            "q_proj, k_proj, v_proj as one layer, and blocks of 128 rows do not .* 64 rows of k_proj",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused_with_reasons(config, reason, llama, tmp_path):
    model = quantized(llama, **config)
    with pytest.raises(ValueError, match=reason):
        export_compressed_tensors(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale_dtype", ["float16", "float32", "float8_e4m3fn"])
def test_scales_that_would_be_rounded_are_refused(scale_dtype, llama, tmp_path):
    model = quantized(llama, weights="W4A16", scale_dtype=scale_dtype)
    reason = "are quantized themselves" if scale_dtype.startswith("float8") else f"its scales are {scale_dtype}, but"
    with pytest.raises(ValueError, match=reason):
        export_compressed_tensors(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_one_scale_per_tensor_must_be_that_of_the_siblings(llama, tmp_path):
    model = quantized(llama, weights="W8A8_FP8", granularity="tensor")
    with pytest.raises(ValueError, match="compute q_proj, k_proj, v_proj as one layer with one scale per tensor"):
        export_compressed_tensors(model, tmp_path / "out")
    assert export_compressed_tensors(model, tmp_path / "out", reader="transformers") == ()
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))[0] == 0
    shutil.rmtree(tmp_path / "out")
    for layer in model.model.layers:  # with one largest weight they share it
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            weight = module.dequantize_weight().clamp(-0.1, 0.1)
            weight[0, 0] = 1.0
            module.weight = weight
    export_compressed_tensors(model, tmp_path / "out")
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))[0] == 0


def test_siblings_of_nvfp4_are_brought_to_one_global_scale(llama, tmp_path):
    model = quantized(llama, weights="nvfp4")
    attention = model.model.layers[0].self_attn
    for module, factor in ((attention.k_proj, 8.0), (attention.v_proj, 0.02)):
        module.weight = module.dequantize_weight() * factor
    ours = {part: getattr(attention, f"{part}_proj").global_scale.view(F32).item() for part in "qkv"}
    assert len(set(ours.values())) == 3
    export_compressed_tensors(model, tmp_path / "out")
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))[0] == 0
    tensors = load_all(tmp_path / "out")
    found = {tensors[f"model.layers.0.self_attn.{part}_proj.weight_global_scale"].item() for part in "qkv"}
    assert found == {1 / max(ours.values())}
    export_compressed_tensors(model, tmp_path / "apart", reader="transformers")
    tensors = load_all(tmp_path / "apart")
    found = {part: tensors[f"model.layers.0.self_attn.{part}_proj.weight_global_scale"].item() for part in "qkv"}
    assert found == {part: 1 / scale for part, scale in ours.items()}
    attention.v_proj.weight = attention.v_proj.dequantize_weight() * 1e-6
    with pytest.raises(ValueError, match="v_proj: its weights are so much smaller than its siblings'"):
        export_compressed_tensors(model, tmp_path / "far")
    with torch.no_grad():  # a checkpoint of others
        attention.v_proj.global_scale.copy_(torch.tensor([0.3]).view(attention.v_proj.global_scale.dtype))
    with pytest.raises(ValueError, match="compute q_proj, k_proj, v_proj as one layer with one scale per tensor"):
        export_compressed_tensors(model, tmp_path / "far")


def test_readers(llama, tmp_path):
    model = quantized(llama, weights="W4A16", modules={"*.q_proj": "int8"})
    with pytest.raises(ValueError, match="reader is 'vllm'; allowed: 'engines', 'transformers'"):
        export_compressed_tensors(model, tmp_path / "out", reader="vllm")
    export_compressed_tensors(model, tmp_path / "out", reader="transformers")
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))[0] == 0


def test_scales_in_the_dtype_of_an_fp16_model(tmp_path):
    model = quantized(make_llama(tmp_path / "fp16", torch.float16), weights="W4A16", symmetric=False)
    export_compressed_tensors(model, tmp_path / "out")
    found = decode_compressed_checkpoint(tmp_path / "out", torch.float16)
    assert mismatches(weights_of(model), found)[0] == 0
    assert load_all(tmp_path / "out")["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float16


def test_columns_that_fill_no_whole_words(tmp_path):
    # 72 columns: 9 words of int4, where ours are padded to 12; 36: no multiple of 8 rows of zero points.
    path = make_llama(tmp_path / "odd", hidden_size=72, intermediate_size=100, num_attention_heads=2, head_dim=36)
    for i, fields in enumerate([{"symmetric": False}, {}]):
        model = quantized(path, weights="W4A16", granularity="row", modules_to_not_convert=["lm_head"], **fields)
        export_compressed_tensors(model, tmp_path / f"out{i}")
        assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / f"out{i}"))[0] == 0
    model = quantized(path, weights="int8", modules_to_not_convert=["lm_head"])
    export_compressed_tensors(model, tmp_path / "int8")
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "int8"))[0] == 0


def test_the_divisor_of_nvfp4_is_exact_or_refused():
    torch.manual_seed(0)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(F8)
    levels = torch.tensor([x for x in FORMATS["nvfp4"].spec.levels if x > 0])
    for factor in torch.rand(200).mul(1e-3)[:, None]:
        divisor = divisor_of(factor, BF16)
        expected = (levels * (scales.float()[:, None] * factor)).to(BF16)
        assert torch.equal((levels * (scales.float()[:, None] / divisor)).to(BF16), expected)
        assert torch.equal(divisor_of(divisor, BF16, back=True).view(I32) // 64, factor.view(I32) // 64)
    refused = 0
    for factor in torch.rand(50)[:, None]:  # in fp32 every bit counts
        try:
            divisor_of(factor, F32)
        except Inexpressible as reason:
            refused += "gives the same weights in float32" in str(reason)
    assert refused > 10
    with pytest.raises(Inexpressible):
        divisor_of(torch.tensor([1e-42]), BF16)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "config",
    [{"weights": "W4A16", "group_size": 32, "symmetric": False}, {"weights": "W8A8", "input_transform": "none"}],
)
def test_experts_get_the_names_of_the_original_checkpoint(name, config, tmp_path):
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, architecture.model)(architecture.config()).bfloat16()
    model.save_pretrained(tmp_path / "model")
    quantize_(model, QuantizerConfig(**config))
    export_compressed_tensors(model, tmp_path / "out")
    found, before = decode_compressed_checkpoint(tmp_path / "out"), load_all(tmp_path / "model")
    assert {f"{module}.weight" for module in found} <= before.keys()
    up = ("gate_proj", "up_proj") if name == "qwen3_moe" else ("w1", "w3")
    expected = weights_of(model)
    for module_name, module in model.named_modules():
        if isinstance(module, QuantizedModule) and module.kind == "experts":
            gate_up, down = module.dequantize_weight("gate_up_proj"), module.dequantize_weight("down_proj")
            stored = module_name.replace(".mlp.", ".block_sparse_moe.") if name == "mixtral" else module_name
            for e in range(4):
                expected[f"{stored}.{e}.{up[0]}"], expected[f"{stored}.{e}.{up[1]}"] = gate_up[e].chunk(2)
                expected[f"{stored}.{e}.{'down_proj' if name == 'qwen3_moe' else 'w2'}"] = down[e]
    assert len(expected) == 2 * (4 + 3 * 4)
    assert mismatches(expected, found)[0] == 0
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert [key for key in ignored if key.endswith(".gate")] and "lm_head" in ignored


def test_one_shard_at_a_time_and_no_model(llama, tmp_path, monkeypatch):
    model = quantized(llama, weights="W4A16")
    model.save_pretrained(tmp_path / "ours", max_shard_size="40KB")
    shutil.copy(llama / "tokenizer_config.json", tmp_path / "ours")
    (tmp_path / "ours" / "README.md").write_text("how to load the checkpoint of hf_quant")
    shards = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    written, save = [], _files.save_file

    def spy(tensors, path, metadata):
        written.append((path.name, sum(tensor.nbytes for tensor in tensors.values())))
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(_files, "save_file", spy)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
    export_compressed_tensors(tmp_path / "ours", tmp_path / "out")
    assert [name for name, _ in written] == shards and len(shards) > 3
    assert max(size for _, size in written) < 50_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(size for _, size in written)
    assert index["weight_map"].keys() == load_all(tmp_path / "out").keys()
    assert mismatches(weights_of(model), decode_compressed_checkpoint(tmp_path / "out"))[0] == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer_config.json" in files
    assert "how to load the checkpoint of hf_quant" not in (tmp_path / "out" / "README.md").read_text()


def test_a_model_is_saved_in_files_that_fit_in_memory(llama, tmp_path, monkeypatch):
    model, saved = quantized(llama, weights="W4A16"), []
    original = model.save_pretrained
    monkeypatch.setattr(model, "save_pretrained", lambda path, **options: (saved.append(options), original(path)))
    export_compressed_tensors(model, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        export_compressed_tensors(model, tmp_path / "out")
    assert saved == [{"max_shard_size": "5GB"}]


ON_CPUS = {"cpu_activations": "int8", "input_transform": "none"}


def test_what_is_left_out_is_said(llama, tmp_path):
    model = quantized(
        llama,
        weights="W4A16",
        cpu_activations="int8",
        input_transform="none",
        kv_cache="fp8",
        modules={"lm_head": "W4A16"},
    )
    with pytest.raises(ValueError, match="embed_tokens|lm_head"):  # tied: the codes are the embedding's
        export_compressed_tensors(model, tmp_path / "out")
    untied = make_llama(tmp_path / "untied", tie_word_embeddings=False)
    model = quantized(
        untied,
        weights="W4A16",
        cpu_activations="int8",
        input_transform="none",
        kv_cache="fp8",
        modules={"lm_head": "int8"},
    )
    notes = export_compressed_tensors(model, tmp_path / "out")
    assert [note.partition(":")[0] for note in notes] == [
        "the quantized KV cache is left out",
        "int8 inputs on CPUs are left out",
        "lm_head is quantized",
    ]
    fields = config_of(tmp_path / "out")["quantization_config"]
    assert fields["kv_cache_scheme"] is None and fields["ignore"] == []
    assert all(group["input_activations"] is None for group in fields["config_groups"].values())


def test_directories_that_cannot_be_exported(llama, tmp_path):
    for directory, message in (
        (llama, "is not quantized; needs a checkpoint that hf_quant has quantized"),
        (tmp_path / "nothing", "is not a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            export_compressed_tensors(directory, tmp_path / "out")
    with pytest.raises(ValueError, match="model is a Linear; needs a model of transformers"):
        export_compressed_tensors(torch.nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not quantized: quantize_ it first"):
        export_compressed_tensors(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "out")
    quantized(llama, weights="W4A16").save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="OUT is the checkpoint itself"):
        export_compressed_tensors(tmp_path / "ours", tmp_path / "ours")
    with pytest.raises(ValueError, match="is not empty"):
        export_compressed_tensors(tmp_path / "ours", llama)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        export_compressed_tensors(tmp_path / "ours", tmp_path / "file")
    (tmp_path / "ours" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has adapters .* would be lost: merge or remove them first"):
        export_compressed_tensors(tmp_path / "ours", tmp_path / "out")
    (tmp_path / "ours" / "adapter_config.json").unlink()
    tensors = load_all(tmp_path / "ours")
    tensors["model.layers.0.mlp.up_proj.scale"][:] = 0
    _files.save_file(tensors, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(ValueError, match="up_proj.scale is corrupt"):
        export_compressed_tensors(tmp_path / "ours", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "ours"]


def test_the_command(llama, tmp_path, capsys):
    quantized(llama, weights="W4A16", kv_cache="int8").save_pretrained(tmp_path / "ours")
    (tmp_path / "out").mkdir()
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out")]) == 0
    first, note = capsys.readouterr().out.splitlines()
    assert f"every weight is what it was in {tmp_path / 'ours'}" in first and note.startswith("note: the quantized KV")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--format", "compressed-tensors"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-quant: error:") and "is not empty" in line
