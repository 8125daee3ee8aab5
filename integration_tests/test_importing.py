"""Checkpoints of GPTQ, AWQ and compressed-tensors, written by their published rules, become ours without rounding."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, export_compressed_tensors, import_checkpoint, quantize_
from hf_quant.checkpoint import inspect_checkpoint
from hf_quant.cli import main
from hf_quant.convert.experts import merge_experts
from hf_quant.convert.foreign import ForeignWeight
from hf_quant.modules import QuantizedModule
from hf_quant.resolve import resolve_scheme
from integration_tests.support.foreign_checkpoints import (
    config_of,
    foreign_checkpoint,
    load_all,
    make_llama,
    mismatches,
    weights_of,
)
from integration_tests.support.tiny_models import ARCHITECTURES


ASSET = Path(__file__).parent / "assets" / "tiny-llama-13m"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "fp16", torch.float16)


def edit_config(path, **changes) -> None:
    fields = config_of(path)
    fields["quantization_config"] = {**fields["quantization_config"], **changes}
    (path / "config.json").write_text(json.dumps(fields))


def edit_tensors(path, **changes) -> None:
    """Replace tensors; None removes one. Dots of a name are written as two underscores."""
    tensors = {**load_all(path), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file(
        {k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors", metadata={"format": "pt"}
    )


def check_loads(out, meant, scheme: str) -> torch.nn.Module:
    """`from_pretrained` of the import decodes to exactly what was meant."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    wrong, count = mismatches(meant, weights_of(model))
    assert wrong == 0 and count == 2 * (3 * 128 * 256 + 2 * 128 * 128 + 2 * 64 * 128)
    assert {str(module.scheme) for module in model.modules() if isinstance(module, QuantizedModule)} == {scheme}
    assert "14 modules quantized by hf_quant" in str(inspect_checkpoint(out))
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()
    return model


@pytest.mark.parametrize(
    ("method", "fields", "scheme"),
    [
        ("gptq", {"symmetric": True}, "int4 g32"),
        ("gptq", {"symmetric": True, "v2": True}, "int4 g32"),
        ("gptq", {"symmetric": False, "group": 64}, "int4 g64 asym"),
        ("gptq", {"symmetric": False, "v2": True}, "int4 g32 asym"),
        ("gptq", {"symmetric": True, "group": -1}, "int4 row"),
        ("gptq", {"bits": 8}, "int8 g32"),
        ("gptq", {"bits": 8, "group": -1, "v2": True}, "int8 row"),
        ("gptq", {"bits": 8, "symmetric": False}, "int8 g32 floating-point zero points"),
        ("awq", {"symmetric": False}, "int4 g32 asym"),
        ("awq", {"symmetric": False, "group": 64}, "int4 g64 asym"),
    ],
)
def test_every_code_and_scale_arrives(method, fields, scheme, llama, tmp_path):
    meant = foreign_checkpoint(tmp_path / "in", llama, method, **fields)
    assert import_checkpoint(tmp_path / "in", tmp_path / "out") == ()
    model = check_loads(tmp_path / "out", meant, scheme)
    module = model.model.layers[0].mlp.up_proj
    assert module.scheme.weight.scale_dtype == "float16"
    stored, ours = load_all(tmp_path / "in"), module.packed()
    assert torch.equal(ours.scale, stored["model.layers.0.mlp.up_proj.scales"].T)
    assert ours.qdata.dtype == torch.int32 or ours.qdata.min() == -128


def test_fp16_scales_in_a_bf16_model_stay_fp16(tmp_path):
    source = make_llama(tmp_path / "bf16")
    meant = foreign_checkpoint(tmp_path / "in", source, "gptq", symmetric=False)
    (note,) = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert note == "scales stay float16, the model's other tensors bfloat16: nothing is rounded"
    model = check_loads(tmp_path / "out", meant, "int4 g32 asym")
    assert model.dtype == torch.bfloat16
    # What casting the scales to the model's dtype would have cost:
    scales = load_all(tmp_path / "in")["model.layers.0.mlp.up_proj.scales"]
    assert (scales.bfloat16().half() != scales).float().mean() > 0.5


def test_a_reader_that_forgets_the_order_of_nibbles_would_be_seen(llama, tmp_path, monkeypatch):
    from hf_quant.convert import gptq_awq

    meant = foreign_checkpoint(tmp_path / "in", llama, "awq", symmetric=False)
    monkeypatch.setattr(gptq_awq, "_AWQ_COLUMNS", tuple(range(8)))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    wrong, count = mismatches(meant, weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")))
    assert wrong > count // 2


def test_dynamic_bits_and_plain_layers(llama, tmp_path):
    """Layers of their own bits (GPTQModel's `dynamic`), or left in 16 bit, are found by their tensors."""
    four = foreign_checkpoint(tmp_path / "in", llama, "gptq")
    eight = foreign_checkpoint(tmp_path / "eight", llama, "gptq", bits=8)
    key, plain = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"
    tensors = {k: v for k, v in load_all(tmp_path / "in").items() if not k.startswith((key, plain))}
    tensors |= {k: v for k, v in load_all(tmp_path / "eight").items() if k.startswith(key)}
    tensors[f"{plain}.weight"] = load_all(llama)[f"{plain}.weight"]
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path / "in", dynamic={"+:.*o_proj": {"bits": 8}, "-:.*down_proj": {}})
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    meant = {k: v for k, v in four.items() if k != plain} | {key: eight[key]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert type(model.get_submodule(plain)) is torch.nn.Linear
    assert torch.equal(model.get_submodule(plain).weight, tensors[f"{plain}.weight"])


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_fields_in_a_file_of_their_own(name, llama, tmp_path):
    method = "gptq" if name.startswith("quantize") else "awq"
    meant = foreign_checkpoint(tmp_path / "in", llama, method, symmetric=False)
    fields = config_of(tmp_path / "in")
    own = fields.pop("quantization_config")
    if method == "awq":
        own = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    else:
        del own["quant_method"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(fields))
    (tmp_path / "in" / name).write_text(json.dumps(own))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    check_loads(tmp_path / "out", meant, "int4 g32 asym")
    assert not (tmp_path / "out" / name).exists()


UP = "model__layers__0__mlp__up_proj"


@pytest.mark.parametrize(
    ("method", "fields", "changes", "message"),
    [
        (
            "gptq",
            {},
            {f"{UP}__g_idx": torch.arange(127, -1, -1).int() // 32},
            r"g_idx orders .* desc_act=False",
        ),
        ("gptq", {"group": 8}, {}, "group_size is 8; allowed: 16"),
        ("gptq", {}, {f"{UP}__qzeros": torch.full((4, 32), -1, dtype=torch.int32)}, "stores 15 in version 1 of GPTQ"),
        ("gptq", {}, {f"{UP}__scales": None}, "up_proj.scales is missing"),
        ("gptq", {}, {f"{UP}__scales": torch.zeros(4, 256).half()}, "up_proj.scale is corrupt"),
        ("gptq", {}, {f"{UP}__scales": torch.ones(3, 256).half()}, "up_proj.qzeros is .* beside scales"),
        ("awq", {}, {f"{UP}__qzeros": torch.zeros(4, 3, dtype=torch.int32)}, "up_proj.qzeros is .* beside scales"),
        ("gptq", {}, {"lost__qweight": torch.zeros(8, 32, dtype=torch.int32)}, "lost.qzeros is missing"),
    ],
)
def test_tensors_that_cannot_be_imported(method, fields, changes, message, llama, tmp_path):
    foreign_checkpoint(tmp_path / "in", llama, method, **fields)
    edit_tensors(tmp_path / "in", **changes)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {"checkpoint_format": "marlin"}, "of the format 'marlin'; readable: 'gptq', 'gptq_v2'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"bits": 3}, "with bits 3"),
        ("awq", {"zero_point": False}, "zero_point False"),
        (
            "gptq",
            {"quant_method": "quark"},
            "by 'quark'; can be imported: gptq, awq",
        ),
        ("gptq", {"quant_method": "hf_quant"}, "is a checkpoint of hf_quant already"),
        ("gptq", {"quant_method": "compressed-tensors"}, "config_groups None; needs 'compressed' and a table"),
    ],
)
def test_configs_that_cannot_be_imported(method, changes, message, llama, tmp_path):
    foreign_checkpoint(tmp_path / "in", llama, method)
    edit_config(tmp_path / "in", **changes)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_layers_that_the_model_does_not_have(llama, tmp_path):
    foreign_checkpoint(tmp_path / "in", llama, "gptq")
    tensors = load_all(tmp_path / "in")
    moved = {k.replace("layers.0.mlp.up_proj", "layers.0.mlp.experts.3.up_proj"): v for k, v in tensors.items()}
    save_file(moved, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="experts.3.up_proj among them, that Llama.*does not have"):
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match="is not quantized"):
        import_checkpoint(llama, tmp_path / "out")
    with pytest.raises(ValueError, match="has no config.json"):
        import_checkpoint(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# compressed-tensors: from our own export, and as other writers do it.

ROUND_TRIPS = {
    "w4a16": ({"weights": "W4A16"}, ()),
    "w4a16_asym": ({"weights": "W4A16_ASYM", "group_size": 32}, ()),
    "w4a16_channel": ({"weights": "W4A16", "granularity": "row", "symmetric": False}, ()),
    "w8a16": ({"weights": "W8A16"}, ()),
    "w8a8": ({"weights": "W8A8", "input_transform": "none"}, ()),
    "w8a8_tensor": ({"weights": "W8A8", "granularity": "tensor", "input_transform": "none"}, ()),
    "w8a8_fp8": ({"weights": "W8A8_FP8"}, ()),
    "w8a16_fp8": ({"weights": "W8A16_FP8"}, ()),
    "fp8_block": (
        {"weights": "FP8_BLOCK"},
        ("inputs of fp8 blocks are quantized with one scale per token, not per 128 values",),
    ),
    "nvfp4": ({"weights": "nvfp4"}, ()),
    "mxfp4": ({"weights": "mxfp4"}, ()),
    "mixed": ({"weights": "W4A16", "modules": {"*.mlp.*": "W8A8_FP8", "*.o_proj": None}}, ()),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_export_and_import_give_the_codes_back(name, tmp_path):
    config, expected_notes = ROUND_TRIPS[name]
    source = make_llama(tmp_path / "bf16")
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=QuantizerConfig(**config))
    model.save_pretrained(tmp_path / "ours", max_shard_size="60KB")
    # For engines, siblings of nvfp4 get one global scale: the same weights, other bits; these blocks cross siblings.
    reader = "transformers" if name in ("nvfp4", "fp8_block") else "engines"
    export_compressed_tensors(tmp_path / "ours", tmp_path / "exported", reader=reader)
    assert import_checkpoint(tmp_path / "exported", tmp_path / "out") == expected_notes
    before, after = load_all(tmp_path / "ours"), load_all(tmp_path / "out")
    guards = {key for tensors in (before, after) for key, tensor in tensors.items() if 0 in tensor.shape}
    assert before.keys() - guards == after.keys() - guards
    different = [key for key in before.keys() - guards if not torch.equal(before[key], after[key])]
    assert different == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert mismatches(weights_of(model), weights_of(again))[0] == 0
    assert {n: m.scheme for n, m in model.named_modules() if isinstance(m, QuantizedModule)} == {
        n: m.scheme for n, m in again.named_modules() if isinstance(m, QuantizedModule)
    }
    stored = again.config.quantization_config
    assert (stored.to_dict()["format_version"], stored.input_transform) == (1, config.get("input_transform"))


def exported(tmp_path, **config):
    model = AutoModelForCausalLM.from_pretrained(
        make_llama(tmp_path / "bf16"), quantization_config=QuantizerConfig(**config)
    )
    export_compressed_tensors(model, tmp_path / "in", reader="transformers")
    shutil.rmtree(tmp_path / "bf16")
    return tmp_path / "in"


@pytest.mark.parametrize(
    "name", ["llama_classifier", "gemma3", "t5", "llava", "qwen2_vl", "phi3", "nomic_bert", "mamba"]
)
def test_architectures_there_and_back(name, tmp_path):
    """Heads, towers, renamed and split layers: what is exported comes back with every bit of the state."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    cls = getattr(transformers, architecture.model)
    model = cls(architecture.config()).bfloat16()
    quantize_(model, QuantizerConfig("W4A16", group_size=32, symmetric=False))
    reader = "transformers" if name == "mamba" else "engines"
    export_compressed_tensors(model, tmp_path / "exported", reader=reader)
    import_checkpoint(tmp_path / "exported", tmp_path / "out")
    before, after = model.state_dict(), cls.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def change_group(path, part: str, **changes) -> None:
    groups = config_of(path)["quantization_config"]["config_groups"]
    groups["group_0"][part] = {**(groups["group_0"][part] or {}), **changes}
    edit_config(path, config_groups=groups)


def test_patterns_class_names_and_older_configs(tmp_path):
    path = exported(tmp_path, weights="W4A16", modules={"*.mlp.*": "int8"})
    groups = config_of(path)["quantization_config"]["config_groups"]
    by_bits = {group["weights"]["num_bits"]: group for group in groups.values()}
    by_bits[8]["targets"], by_bits[4]["targets"] = ["re:.*mlp.*"], ["Linear"]
    for group in by_bits.values():
        del group["format"], group["output_activations"], group["weights"]["dynamic"]
    edit_config(path, config_groups=groups, format="pack-quantized", kv_cache_scheme={"num_bits": 8})
    (note,) = import_checkpoint(path, tmp_path / "out")
    assert note.startswith("the calibrated scales of the KV cache are left out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(model.model.layers[1].mlp.up_proj.scheme) == "int8 row"
    assert str(model.model.layers[1].self_attn.q_proj.scheme) == "int4 g128"


@pytest.mark.parametrize(
    ("config", "part", "changes", "message"),
    [
        ("W8A8", "input_activations", {"dynamic": False}, "its inputs have static scales by strategy 'token'"),
        (
            "W8A8",
            "input_activations",
            {"dynamic": False, "strategy": "tensor"},
            "input_scale is missing; needs one num",
        ),
        ("W8A8", "input_activations", {"symmetric": False}, "its inputs are quantized with zero points"),
        ("W8A8", "input_activations", {"num_bits": 4}, "its inputs are quantized to 4-bit int"),
        ("W8A8", "input_activations", {"strategy": "tensor"}, "its inputs share scales by strategy 'tensor'"),
        ("W8A8", "output_activations", {"num_bits": 8}, "its outputs are quantized"),
        ("W8A16_FP8", "weights", {"symmetric": False}, "fp8_e4m3 has no zero point here"),
        (
            "W8A8",
            "weights",
            {"symmetric": False, "strategy": "tensor"},
            "its zero points are shared by strategy 'tensor'; hf_quant has those of int8 by strategy 'channel' or",
        ),
        ("W4A16", "weights", {"num_bits": 3}, "hf_quant has no 3-bit int weights stored as pack-quantized"),
        ("W4A16", "weights", {"actorder": "group"}, "its columns are reordered"),
        ("FP8_BLOCK", "weights", {"block_structure": [64, 64]}, "its blocks are .64, 64.; hf_quant has 128 x 128"),
    ],
)
def test_schemes_that_cannot_be_imported(config, part, changes, message, tmp_path):
    path = exported(tmp_path, weights=config, input_transform="none")
    change_group(path, part, **changes)
    with pytest.raises(ValueError, match=rf"in cannot be imported: model.layers.0\S+: {message}"):
        import_checkpoint(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "it has a sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "it has a transform_config"),
        ({"quantization_status": "frozen"}, "its quantization_status is 'frozen'"),
        ({"config_groups": {}}, "no group of its config_groups names it"),
    ],
)
def test_more_configs_that_cannot_be_imported(changes, message, tmp_path):
    path = exported(tmp_path, weights="W4A16")
    edit_config(path, **changes)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(path, tmp_path / "out")


def test_zero_points_of_older_releases_are_not_packed(tmp_path):
    path = exported(tmp_path, weights="W4A16_ASYM", group_size=64)
    import_checkpoint(path, tmp_path / "new")
    zeros = {k.replace("zero_point", "weight_zero_point"): v for k, v in load_all(tmp_path / "new").items()}
    older = {k: v.view(torch.int8) - 8 if "weight_zero_point" in k else v for k, v in zeros.items()}
    edit_tensors(path, **{k: v for k, v in older.items() if "weight_zero_point" in k})
    assert load_all(path)["model.layers.0.mlp.up_proj.weight_zero_point"].dtype == torch.int8
    import_checkpoint(path, tmp_path / "old")
    new, old = load_all(tmp_path / "new"), load_all(tmp_path / "old")
    assert new.keys() == old.keys() and [key for key in new if not torch.equal(new[key], old[key])] == []


@pytest.mark.parametrize(("rows", "given"), [(0, "missing"), (63, r"\[63, 1\] int32")])
def test_zero_points_of_int8_have_a_shape(rows, given, tmp_path):
    path = exported(tmp_path, weights="W8A16")
    change_group(path, "weights", symmetric=False)
    names = [key.replace("scale", "zero_point") for key in load_all(path) if key.endswith("weight_scale")]
    edit_tensors(path, **{name: torch.zeros(rows, 1, dtype=torch.int32) if rows else None for name in names})
    with pytest.raises(ValueError, match=f"weight_zero_point is {given} beside .*; needs as many int8, or .* int32"):
        import_checkpoint(path, tmp_path / "out")


def test_compressed_tensors_that_cannot_be_imported(tmp_path):
    path = exported(tmp_path, weights="W4A16")
    stored = load_all(path)
    for changes, message in (
        ({f"{UP}__weight_g_idx": torch.zeros(128)}, "an order of columns by activation"),
        ({f"{UP}__weight_packed": None}, "no weight_packed"),
        ({f"{UP}__weight_zero_point": torch.ones(32, 1, dtype=torch.int32)}, "is not 0, but its group is symmetric"),
    ):
        edit_tensors(path, **changes)
        with pytest.raises(ValueError, match=message):
            import_checkpoint(path, tmp_path / "out")
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    edit_tensors(path, **{f"{UP}__weight_zero_point": torch.zeros(32, 1, dtype=torch.int32)})
    import_checkpoint(path, tmp_path / "out")


MOE_SCHEMES = {
    "nvfp4": {"weights": "nvfp4"},
    "int4": {"weights": "W4A16", "group_size": 32},
    "int4_asym": {"weights": "W4A16", "group_size": 32, "symmetric": False},
    "w8a8": {"weights": "W8A8", "input_transform": "none"},
    "w8a8_static": {"weights": "W8A8", "input_transform": "none", "activation_scale": "static"},
    "mxfp4": {"weights": "mxfp4"},
}


def exported_moe(tmp_path, name: str, **config):
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, architecture.model)(architecture.config()).bfloat16()
    ids = torch.arange(96).view(4, 24) if config.get("activation_scale") == "static" else None
    quantize_(model, QuantizerConfig(**config), calibration=ids)
    export_compressed_tensors(model, tmp_path / "in", reader="transformers")
    return model


@pytest.mark.parametrize("scheme", MOE_SCHEMES)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_that_are_stored_one_by_one(name, scheme, tmp_path):
    model = exported_moe(tmp_path, name, **MOE_SCHEMES[scheme])
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and any("qdata_gate_up_proj" in key for key in before)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_static_scales_as_other_libraries_write_them(tmp_path):
    """In the model's dtype, without a dimension, with a zero point of 0; anything else has no counterpart."""
    model = AutoModelForCausalLM.from_pretrained(make_llama(tmp_path / "bf16"))
    config = QuantizerConfig("W8A8_FP8", activation_scale="static", granularity="tensor", input_transform="none")
    quantize_(model, config, calibration=torch.arange(96).view(4, 24))
    export_compressed_tensors(model, tmp_path / "in", reader="transformers")
    file, tensors = tmp_path / "in" / "model.safetensors", load_all(tmp_path / "in")
    scales = [key for key in tensors if key.endswith("input_scale")]
    for key in scales:
        tensors[key] = tensors[key].bfloat16().reshape(())
        tensors[key.replace("scale", "zero_point")] = torch.zeros(1, dtype=torch.int8)
    save_file(tensors, file)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for key in scales:
        assert torch.equal(
            again.get_submodule(key[: -len(".input_scale")]).static_scale(), tensors[key].float().view(1)
        )
    first = scales[0]
    for changed, message in (
        ({first.replace("scale", "zero_point"): torch.ones(1, dtype=torch.int8)}, "zero_point is not 0"),
        ({first: torch.ones(2)}, "input_scale is .*; needs one number"),
        ({first: torch.zeros(1)}, "input_scale is corrupt"),
        ({first: torch.full((1,), torch.nan)}, "input_scale is corrupt"),
    ):
        save_file({**tensors, **changed}, file)
        with pytest.raises(ValueError, match=message):
            import_checkpoint(tmp_path / "in", tmp_path / "refused")


def test_experts_that_cannot_be_one_tensor(tmp_path):
    exported_moe(tmp_path, "qwen3_moe", weights="W8A8", input_transform="none")
    stored = load_all(tmp_path / "in")
    expert = "model.layers.0.mlp.experts.2.gate_proj"
    fewer = {key: tensor for key, tensor in stored.items() if not key.startswith(expert)}
    half = {**stored, f"{expert}.weight_scale": stored[f"{expert}.weight_scale"].half()}
    for tensors, message in ((fewer, "for 7 of its 8 layers only"), (half, "its experts are quantized differently")):
        save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"layers.0.mlp.experts.gate_up_proj is .*{message}"):
            import_checkpoint(tmp_path / "in", tmp_path / "out")
    shutil.rmtree(tmp_path / "in")
    exported_moe(tmp_path, "qwen3_moe", weights="nvfp4")
    name = "model__layers__0__mlp__experts__2__gate_proj__weight_global_scale"
    edit_tensors(tmp_path / "in", **{name: torch.tensor([0.5])})
    with pytest.raises(ValueError, match="its 2 parts have a scale of their own each"):
        import_checkpoint(tmp_path / "in", tmp_path / "out")


def test_the_command(llama, tmp_path, capsys):
    foreign_checkpoint(tmp_path / "in", llama, "gptq")
    for name in ("tokenizer_config.json", "LICENSE", "notes.txt"):
        shutil.copy(llama / name, tmp_path / "in")
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "every weight is what it was" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "tokenizer_config.json", "LICENSE"}
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-quant: error:") and "is not empty" in line


# Untrusted checkpoints.


LAYER = "model.layers.0.mlp.up_proj"


def refused(path: Path, out: Path) -> str:
    with pytest.raises(ValueError) as caught:
        import_checkpoint(path, out)
    message = str(caught.value)
    assert type(caught.value) is ValueError and message.isprintable() and len(message) < 1000
    assert not out.exists()
    return message


@pytest.fixture(scope="module")
def compressed(llama, tmp_path_factory):
    """Exports by format; "W8A8" has plain int8 codes, the others packed ones."""
    made: dict[str, Path] = {}

    def export(weights: str) -> Path:
        if weights not in made:
            directory = tmp_path_factory.mktemp("compressed")
            model = AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
            config = QuantizerConfig(weights, input_transform="none")
            quantize_(model, config).save_pretrained(directory / "ours")
            export_compressed_tensors(directory / "ours", directory / "out")
            made[weights] = directory / "out"
        return made[weights]

    return export


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_a_layer_that_lacks_a_tensor(part, llama, tmp_path):
    """Otherwise the layer would be copied as 16-bit, and its weight drawn at random on loading."""
    foreign_checkpoint(tmp_path / "in", llama, "gptq")
    edit_tensors(tmp_path / "in", **{f"{LAYER}.{part}": None})
    assert f"{LAYER}." in refused(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("weights", "part", "tensor"),
    [
        ("int8", "weight_scale", None),
        ("W4A16_ASYM", "weight_scale", None),
        ("W4A16_ASYM", "weight_shape", None),
        ("W8A8", "weight_scale", None),
        ("W4A16_ASYM", "weight_shape", torch.tensor([2**40, 2**40])),
        ("W4A16_ASYM", "weight_shape", torch.tensor([-1, 0])),
        ("W4A16_ASYM", "weight_shape", torch.tensor(5)),
        ("W4A16_ASYM", "weight_shape", torch.tensor([256.0, 128.0])),
        ("W4A16_ASYM", "weight_shape", torch.tensor([256, 120])),
        ("W4A16_ASYM", "weight_packed", torch.zeros(256, 20, dtype=torch.int32)),
        ("int8", "weight_packed", torch.zeros(256, 32, dtype=torch.int64)),
        ("W4A16_ASYM", "weight_zero_point", None),
        ("W4A16_ASYM", "weight_zero_point", torch.tensor(0, dtype=torch.int32)),
        ("mxfp4", "weight_packed", torch.zeros(256, 64, dtype=torch.bool)),
        ("mxfp4", "weight_scale", torch.zeros(256, 4, dtype=torch.float16)),
        ("W4A16_ASYM", "weight_scale", torch.ones(256, 8, dtype=torch.bfloat16)),
    ],
)
def test_tensors_of_compressed_tensors_that_cannot_be(weights, part, tensor, compressed, tmp_path):
    shutil.copytree(compressed(weights), tmp_path / "in")
    edit_tensors(tmp_path / "in", **{f"{LAYER}.{part}": tensor})
    message = refused(tmp_path / "in", tmp_path / "out")
    assert LAYER in message
    if weights == "W8A8":
        assert f"has {LAYER}.weight as [256, 128] int8, but no scale for it" in message
    if tensor is not None and tensor.dtype == torch.bfloat16:
        assert f"{LAYER}.weight_scale is [256, 8] bfloat16; weights of [256, 128] as int4 g" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity_config": "x"},
        {"transform_config": [1]},
        {"config_groups": {"a": 3}},
        {"config_groups": {"a": {}}},
        {"config_groups": {"a": {"targets": 3}}},
        {"config_groups": {"a": {"targets": ["re:["]}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": 3}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": [4]}}}},
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": "\n"}}}},
        {"config_groups": {"a": {"targets": ["Linear"], "input_activations": 3}}},
        {"quantization_status": "x" * 10_000},
        {"quant_method": "x\n" * 10_000},
    ],
)
def test_fields_of_compressed_tensors_that_cannot_be(changes, compressed, tmp_path):
    shutil.copytree(compressed("W4A16_ASYM"), tmp_path / "in")
    edit_config(tmp_path / "in", **changes)
    refused(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    "changes", [{"architectures": 5}, {"architectures": {"a": 1}}, {"model_type": [1]}, {"hidden_size": "x"}]
)
def test_configs_of_which_no_model_can_be_made(changes, llama, tmp_path):
    foreign_checkpoint(tmp_path / "in", llama, "gptq")
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config_of(tmp_path / "in"), **changes}))
    assert "cannot be imported" in refused(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("part", ["qweight", "scales"])
def test_matrices_without_rows(method, part, llama, tmp_path):
    foreign_checkpoint(tmp_path / "in", llama, method, symmetric=False)
    empty = load_all(tmp_path / "in")[f"{LAYER}.{part}"][:0].clone()
    edit_tensors(tmp_path / "in", **{f"{LAYER}.{part}": empty})
    assert f"{LAYER}.{part} is [0, " in refused(tmp_path / "in", tmp_path / "out")


def test_an_expert_of_an_absurd_number():
    """An expert's number is not used as a count."""
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(ARCHITECTURES["mixtral"].config())
    name = f"model.layers.0.block_sparse_moe.experts.{10**30}.w1"
    scheme, _ = resolve_scheme({"weights": "W4A16"}, torch.bfloat16)
    weight = ForeignWeight(name, scheme, (64, 64), ("x",), lambda: None)
    with pytest.raises(ValueError, match="is quantized for 1 of its 1000000000000000000000000000001 layers only"):
        merge_experts(model, [weight])
