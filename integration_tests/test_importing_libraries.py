"""Checkpoints of bitsandbytes, ..., packed by hand, become ours without rounding, and load and save unchanged."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from hf_quant import QuantizerConfig, import_checkpoint
from hf_quant.checkpoint import inspect_checkpoint
from hf_quant.modules import QuantizedModule
from integration_tests.support import packed_libraries as packed
from integration_tests.support.foreign_checkpoints import config_of, load_all, make_llama, mismatches, weights_of
from integration_tests.support.tiny_diffusion import load, make_model, run
from integration_tests.support.tiny_models import build
from integration_tests.support.tiny_pipelines import save_flux


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "bf16")


def check_import(path: Path, out: Path, meant: dict[str, torch.Tensor], scheme: str, bits: float) -> nn.Module:
    """The import decodes to exactly what was meant, has the size that its format needs, and is saved as it is."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert {str(m.scheme) for m in model.modules() if isinstance(m, QuantizedModule)} == {scheme}
    rows = [row for row in inspect_checkpoint(out).rows if row.scheme is not None]
    assert 8 * sum(row.nbytes for row in rows) / sum(row.num_weights for row in rows) == pytest.approx(bits, abs=0.001)
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()
    model.save_pretrained(out.parent / "again")
    before, after = ({k: v for k, v in load_all(p).items() if v.numel()} for p in (out, out.parent / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    kept = {key: tensor for key, tensor in load_all(path).items() if "_proj" not in key}
    assert kept and all(torch.equal(before[key], tensor) for key, tensor in kept.items())
    return model


def refused(path: Path, out: Path) -> str:
    with pytest.raises(ValueError) as caught:
        import_checkpoint(path, out)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000 and not out.exists()
    return message


def edit(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint; None removes one."""
    tensors = {**load_all(path), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors", {"format": "pt"})


UP = "model.layers.0.mlp.up_proj"


# bitsandbytes.

BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("options", "scheme", "bits"),
    [
        ({}, "nf4 g64", 4.5),
        ({"nested": True}, "nf4 g64", 4.5),
        ({"storage": torch.bfloat16}, "nf4 g64", 4.5),
        ({"block": 256}, "nf4 g256", None),
    ],
)
def test_nf4_of_bitsandbytes(options, scheme, bits, llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, BNB4, packed.bnb_nf4(**options))
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert [note for note in notes if "quantized themselves" in note] == list(notes)
    assert len(notes) == ("nested" in options)
    if bits is not None:
        check_import(tmp_path / "in", tmp_path / "out", meant, scheme, bits)
    else:  # rows of 128 share a block with their neighbour
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        assert mismatches(meant, weights_of(model))[0] == 0
        assert {str(m.scheme) for m in model.modules() if isinstance(m, QuantizedModule)} == {"nf4 row"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "quantized by bitsandbytes, imported by hf_quant" in card


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
def test_fp4_of_bitsandbytes(dtype, nested, tmp_path):
    source = make_llama(tmp_path / "source", dtype)
    meant = packed.packed_checkpoint(tmp_path / "in", source, BNB4, packed.bnb_nf4(kind="fp4", nested=nested))
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert notes[-1] == "FP4 is stored as fp6_e3m2, which has 12 times its levels: 2 bits more for each weight"
    check_import(tmp_path / "in", tmp_path / "out", meant, "fp6_e3m2 g64", 6.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int8_of_bitsandbytes(dtype, tmp_path):
    source = make_llama(tmp_path / "source", dtype)
    meant = packed.packed_checkpoint(tmp_path / "in", source, BNB8, packed.bnb_int8)
    (note,) = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert note == "inputs stay in 16 bit; bitsandbytes rounds all but its outliers to 8 bits"
    check_import(tmp_path / "in", tmp_path / "out", meant, "int8 row", 8.222)


def test_a_reader_that_swaps_the_halves_of_bytes_would_be_seen(llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, BNB4, packed.bnb_nf4())
    stored = load_all(tmp_path / "in")[f"{UP}.weight"]
    edit(tmp_path / "in", {f"{UP}.weight": stored >> 4 | stored << 4})
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    found = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert (found.pop(UP) != meant.pop(UP)).float().mean() > 0.5
    assert mismatches(meant, found)[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{UP}.weight.absmax": None}, "up_proj.weight.absmax is missing"),
        ({f"{UP}.weight": None}, "up_proj.weight is missing; 256 x 128 codes of 4 bits need 16384 bytes"),
        ({f"{UP}.weight": torch.zeros(9, 1, dtype=torch.uint8)}, r"up_proj.weight is \[9, 1\] uint8"),
        ({f"{UP}.weight.quant_map": torch.arange(16.0)}, "quant_map has other levels than NF4"),
        ({f"{UP}.weight.absmax": torch.full((512,), torch.inf)}, "up_proj.scale is corrupt"),
        ({f"{UP}.weight.quant_state.bitsandbytes__nf4": None}, "up_proj.weight.* is a shard missing"),
        ({f"{UP}.weight.quant_state.bitsandbytes__nf4": packed.json_bytes({"shape": 3})}, "needs a blocksize and a"),
        ({f"{UP}.weight.quant_state.bitsandbytes__nf4": torch.ones(20_000, dtype=torch.uint8)}, "20000 bytes of JSON"),
        ({f"{UP}.weight_format": torch.tensor(2, dtype=torch.uint8)}, "order of another release's GPU kernels"),
        ({f"{UP}.SCB": torch.ones(256)}, r"up_proj.weight is \[16384, 1\] uint8; needs"),
    ],
)
def test_tensors_of_bitsandbytes_that_cannot_be(changes, message, llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, BNB4, packed.bnb_nf4())
    edit(tmp_path / "in", changes)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found


def test_levels_and_groups_of_bitsandbytes_that_have_no_form(llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, BNB4, packed.bnb_nf4(kind="int4"))
    assert "int4 codes; those that can be imported: nf4, fp4" in refused(tmp_path / "in", tmp_path / "out")
    shutil.rmtree(tmp_path / "in")
    odd = make_llama(tmp_path / "odd", hidden_size=136, head_dim=32)
    packed.packed_checkpoint(tmp_path / "in", odd, BNB4, packed.bnb_nf4())
    assert "have the common divisor 8; hf_quant has groups of 16" in refused(tmp_path / "in", tmp_path / "out")


def test_blocks_that_no_row_is_a_multiple_of(tmp_path):
    """The greatest common divisor of 64 and 96 is 32: each scale is stored up to twice, the weights are the same."""
    source = make_llama(tmp_path / "source", hidden_size=96, head_dim=32)
    meant = packed.packed_checkpoint(tmp_path / "in", source, BNB4, packed.bnb_nf4(nested=True))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert {str(m.scheme) for m in model.modules() if isinstance(m, QuantizedModule)} == {"nf4 g32", "nf4 g64"}


def test_a_config_without_the_name_of_its_method(llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, {"load_in_8bit": True}, packed.bnb_int8)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    found = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert mismatches(meant, found)[0] == 0
    assert config_of(tmp_path / "out")["quantization_config"]["imported_from"]["method"] == "bitsandbytes"
    assert json.loads((tmp_path / "in" / "config.json").read_text())["quantization_config"] == {"load_in_8bit": True}


# The mxfp4 of gpt-oss.


def test_experts_of_gpt_oss(tmp_path):
    build("gpt_oss").save_pretrained(tmp_path / "source")
    meant = packed.gpt_oss(tmp_path / "in", tmp_path / "source")
    assert import_checkpoint(tmp_path / "in", tmp_path / "out") == ()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for key, weight in meant.items():
        name, _, leaf = key.rpartition(".")
        module = model.get_submodule(name)
        assert module.scheme.weight.format == "mxfp4" and torch.equal(module.dequantize_weight(leaf), weight)
    theirs = {key: tensor for key, tensor in load_all(tmp_path / "in").items() if "_blocks" in key or "_scales" in key}
    rows = [row for row in inspect_checkpoint(tmp_path / "out").rows if row.scheme is not None]
    assert sum(row.nbytes for row in rows) == sum(tensor.nbytes for tensor in theirs.values())
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype="auto")
        for key, weight in meant.items():
            plain.get_parameter(key).copy_(weight)
        ids = torch.arange(8)[None]
        assert (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max() < 0.05
    model.save_pretrained(tmp_path / "again")
    before, after = load_all(tmp_path / "out"), load_all(tmp_path / "again")
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items() if tensor.numel())


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scales", None, "gate_up_proj_scales is missing"),
        ("blocks", None, "gate_up_proj_scales, but not all that belongs to it"),
        ("blocks", torch.zeros(4, 256, 8, dtype=torch.uint8), "needs .experts, rows, groups, 16."),
        ("scales", torch.full((4, 256, 2), 255, dtype=torch.uint8), "scale_gate_up_proj is corrupt"),
    ],
)
def test_tensors_of_gpt_oss_that_cannot_be(part, tensor, message, tmp_path):
    build("gpt_oss").save_pretrained(tmp_path / "source")
    packed.gpt_oss(tmp_path / "in", tmp_path / "source")
    edit(tmp_path / "in", {f"model.layers.0.mlp.experts.gate_up_proj_{part}": tensor})
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found


# fp8.

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
STATIC = {**FP8, "activation_scheme": "static", "weight_block_size": None}
BOUNDED = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
PER_TOKEN = "fp8_e4m3 activations"


@pytest.mark.parametrize(
    ("own", "packer", "scheme", "bits", "noted"),
    [
        (BLOCKS, packed.fp8("block", name="weight_scale_inv"), f"block, {PER_TOKEN}", 8.0023, "not per 128 values"),
        (
            {**BLOCKS, "modules_to_convert": None},
            packed.fp8("block", name="weight_scale_inv", scale_dtype=torch.float8_e8m0fnu),
            *(f"block, {PER_TOKEN}", 8.0023, "not per 128 values"),
        ),
        (
            STATIC,
            packed.fp8("tensor", name="weight_scale_inv", static="activation_scale", scale_dtype=torch.bfloat16),
            *(f"tensor, {PER_TOKEN}, static", 8.003, None),
        ),
        (STATIC, packed.fp8("tensor", static="input_scale"), f"tensor, {PER_TOKEN}, static", 8.003, None),
        (FP8, packed.fp8("tensor"), f"tensor, {PER_TOKEN}", 8.0021, "not with one for all tokens"),
        (BOUNDED, packed.fp8("row"), f"row, {PER_TOKEN}", 8.2222, "no input is clipped"),
    ],
)
def test_fp8(own, packer, scheme, bits, noted, llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, own, packer)
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert (len(notes) == 1 and noted in notes[0]) if noted is not None else notes == ()
    model = check_import(tmp_path / "in", tmp_path / "out", meant, f"fp8_e4m3 {scheme}", bits)
    if "static" in scheme:
        (scale,) = [
            t for k, t in load_all(tmp_path / "in").items() if k in (f"{UP}.activation_scale", f"{UP}.input_scale")
        ]
        assert model.get_submodule(UP).static_scale() == scale.float()


@pytest.mark.parametrize("extent", ["block", "tensor"])
def test_experts_in_fp8(extent, tmp_path):
    """Layers of single experts are fused; of one scale for a layer each row of gate and up gets its own."""
    source = build("qwen3_moe").save_pretrained(tmp_path / "source") or tmp_path / "source"
    own = BLOCKS if extent == "block" else STATIC
    static = None if extent == "block" else "input_scale"
    packer = packed.fp8(extent, name="weight_scale_inv" if extent == "block" else "weight_scale", static=static)
    meant = packed.packed_checkpoint(tmp_path / "in", source, own, packer, is_packed=lambda key: ".experts." in key)
    if extent == "block":  # 64 rows of gate and 64 of up cannot be blocks of 128
        assert "have a scale of their own each" in refused(tmp_path / "in", tmp_path / "out")
        return
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert str(experts.scheme) == "fp8_e4m3 row, fp8_e4m3 activations, static"
    for e in range(2):
        parts = [meant[f"model.layers.0.mlp.experts.{e}.{name}_proj"] for name in ("gate", "up", "down")]
        assert torch.equal(experts.dequantize_weight("gate_up_proj")[e], torch.cat(parts[:2]))
        assert torch.equal(experts.dequantize_weight("down_proj")[e], parts[2])


@pytest.mark.parametrize("static", [False, True])
def test_fused_experts_in_fp8(static, tmp_path):
    """As transformers itself holds them: one tensor for all experts, with its blocks, or scales, beside it."""
    build("qwen3_moe").save_pretrained(tmp_path / "source")
    tensors, meant = load_all(tmp_path / "source"), {}
    name = "model.layers.0.mlp.experts"
    for leaf, (N, K) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
        layers = [packed.fp8("block", name="scale")(N, K, torch.bfloat16, seed) for seed in range(4)]
        scales = [parts["scale"] + 0.01 for parts, _ in layers]
        values = [parts["weight"] for parts, _ in layers]
        tensors[f"{name}.{leaf}"], tensors[f"{name}.{leaf}_scale_inv"] = torch.stack(values), torch.stack(scales)
        meant[leaf] = torch.stack([(v.float() * s).bfloat16() for v, s in zip(values, scales)])
        if static:
            tensors[f"{name}.{leaf}_activation_scale"] = torch.full((4,), 0.5)
    tensors = {k: v for k, v in tensors.items() if not re.match(rf"{re.escape(name)}\.[0-9]", k)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    fields = {**config_of(tmp_path / "source"), "quantization_config": STATIC if static else BLOCKS}
    (tmp_path / "in" / "config.json").write_text(json.dumps(fields))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    experts = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").get_submodule(name)
    assert all(torch.equal(experts.dequantize_weight(leaf), weight) for leaf, weight in meant.items())
    assert experts.scheme.is_static == static
    if static:
        edit(tmp_path / "in", {f"{name}.down_proj_activation_scale": torch.arange(1, 5) / 8})
        assert "has one static scale of its input in hf_quant" in refused(tmp_path / "in", tmp_path / "second")


def test_layers_that_the_model_does_not_use_are_left_out(tmp_path):
    """Layers for speculative decoding, which transformers passes over."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    heads = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    config = DeepseekV3Config(vocab_size=96, **sizes, **heads, first_k_dense_replace=1, n_routed_experts=8)
    DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(source := tmp_path / "source")
    packer = packed.fp8("block", name="weight_scale_inv")
    meant = packed.packed_checkpoint(
        tmp_path / "in", source, BLOCKS, packer, is_packed=lambda key: "self_attn.o_proj.weight" in key
    )
    parts, _ = packer(128, 128, torch.bfloat16, 0)
    edit(tmp_path / "in", {f"model.layers.61.self_attn.o_proj.{name}": part for name, part in parts.items()})
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert "layers that DeepseekV3ForCausalLM does not use are left out, model.layers.61.self_attn.o_proj" in notes[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({**BLOCKS, "weight_block_size": [1, 32]}, {}, "its weight_block_size is .1, 32."),
        ({**BLOCKS, "activation_scheme": "x"}, {}, "its activation_scheme is 'x'"),
        (BLOCKS, {f"{UP}.weight_scale_inv": None}, "up_proj.weight as .*, but no scale for it"),
        (BLOCKS, {f"{UP}.weight": None}, "up_proj.weight is missing"),
        (BLOCKS, {f"{UP}.weight": torch.ones(256, 128).to(torch.float8_e5m2)}, "float8_e5m2; needs .* float8_e4m3fn"),
        (BLOCKS, {f"{UP}.weight_scale_inv": torch.ones(2, 2)}, r"up_proj.weight_scale_inv is \[2, 2\] float32; needs"),
        (BLOCKS, {f"{UP}.weight_scale_inv": torch.full((2, 1), torch.nan)}, "up_proj.scale is corrupt"),
        (BLOCKS, {f"{UP}.activation_scale": torch.ones(7)}, r"up_proj.activation_scale is \[7\] float32"),
    ],
)
def test_fp8_that_cannot_be(own, changes, message, llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, own, packed.fp8("block", name="weight_scale_inv"))
    edit(tmp_path / "in", changes)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found


# optimum-quanto.

QUANTO = {"quant_method": "quanto", "weights": "int8"}


@pytest.mark.parametrize(
    ("packer", "scheme", "bits"),
    [
        (packed.quanto_whole(torch.int8), "int8 row", 8.111),
        (packed.quanto_whole(torch.float8_e4m3fn), "fp8_e4m3 row", 8.111),
        (packed.quanto_whole(torch.float8_e5m2), "fp8_e5m2 row", 8.111),
        (packed.quanto_grouped(4, 64), "int4 g64 asym", 4.375),
        (packed.quanto_grouped(2, 32), "int2 g32 asym", 2.75),
        (packed.quanto_grouped(4, 64, integer=False), "int4 g64 floating-point zero points", 4.5),
        (packed.quanto_grouped(2, 32, integer=False), "int2 g32 floating-point zero points", 3.0),
    ],
)
def test_quanto(packer, scheme, bits, llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, QUANTO, packer)
    assert import_checkpoint(tmp_path / "in", tmp_path / "out") == ()
    check_import(tmp_path / "in", tmp_path / "out", meant, scheme, bits)


def test_quanto_by_its_own_file(llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, None, packed.quanto_whole(torch.int8))
    (tmp_path / "in" / "quanto_qmap.json").write_text(json.dumps({UP: {"weights": "qint8", "activations": "qint8"}}))
    edit(tmp_path / "in", {f"{UP}.input_scale": torch.tensor(0.5)})
    (note,) = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert note.startswith("inputs and outputs stay in 16 bit")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert not (tmp_path / "out" / "quanto_qmap.json").exists()


@pytest.mark.parametrize(
    ("packer", "changes", "message"),
    [
        (packed.quanto_grouped(4, 64), {f"{UP}.weight._shift": None}, "weight._shift is missing"),
        (packed.quanto_grouped(4, 64), {f"{UP}.weight._scale": torch.ones(3, 1)}, "weight._scale is .3, 1. float32"),
        (packed.quanto_grouped(4, 64), {f"{UP}.weight._data._data": None}, "has .*up_proj.weight._scale, but not all"),
        (
            packed.quanto_grouped(4, 64),
            {f"{UP}.weight._data._data": torch.zeros(3, 64, dtype=torch.uint8)},
            "_data._data is .3, 64. uint8 beside shifts",
        ),
        (
            packed.quanto_grouped(4, 64),
            {f"{UP}.weight._shift": torch.full((512, 1), 16, dtype=torch.uint8)},
            "shifts outside of the 16 codes",
        ),
        (packed.quanto_whole(torch.int8), {f"{UP}.weight._scale": None}, "weight._scale is missing"),
        (packed.quanto_whole(torch.int8), {f"{UP}.weight._data": None}, "weight._scale, but not all that belongs"),
    ],
)
def test_quanto_that_cannot_be(packer, changes, message, llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, QUANTO, packer)
    edit(tmp_path / "in", changes)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found


# `from_pretrained` with our config does not round codes again.


@pytest.mark.parametrize(
    ("own", "packer"),
    [
        (BNB4, packed.bnb_nf4()),
        (FP8, packed.fp8("tensor")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, packed.fp8("tensor", static="input_scale")),
        ({"quant_method": "unknown"}, packed.bnb_int8),
    ],
)
def test_loading_with_our_config_names_the_import(own, packer, llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, own, packer)
    with pytest.raises(ValueError, match="`hf-quant import MODEL OUT`.*every weight as it is"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=QuantizerConfig("int8"))


def test_diffusers_with_our_config_names_the_import(flux, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", flux, BNB4, packed.bnb_nf4(), is_packed=is_of_block)
    with pytest.raises(ValueError, match="quantized by 'bitsandbytes' already.*`hf-quant import MODEL OUT`"):
        load(tmp_path / "in", quantization_config=QuantizerConfig("int8"))


# Models of diffusers.


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux") / "bf16"
    make_model("flux", torch.bfloat16).save_pretrained(path)
    return path


def is_of_block(key: str) -> bool:
    return "transformer_blocks" in key and key.endswith(".weight") and "norm" not in key


def check_flux(out: Path, meant: dict[str, torch.Tensor]) -> nn.Module:
    model = load(out)
    assert mismatches(meant, weights_of(model))[0] == 0
    assert run(model, "flux").isfinite().all()
    model.save_pretrained(out.parent / "again")
    before, after = ({k: v for k, v in load_all(p).items() if v.numel()} for p in (out, out.parent / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    return model


@pytest.mark.parametrize(
    ("own", "packer"),
    [
        (BNB4, packed.bnb_nf4(nested=True)),
        (BNB8, packed.bnb_int8),
        ({"quant_method": "quanto", "weights_dtype": "float8"}, packed.quanto_whole(torch.float8_e4m3fn)),
    ],
)
def test_models_of_diffusers(own, packer, flux, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", flux, own, packer, is_packed=is_of_block)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    check_flux(tmp_path / "out", meant)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("README.md", "config.json", "diffusion_pytorch_model.safetensors")
    }


def test_models_of_diffusers_that_cannot_be(flux, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", flux, BNB4, packed.bnb_nf4(), is_packed=is_of_block)
    fields = config_of(tmp_path / "in")
    for changes, message in (
        ({"_class_name": "Nothing"}, "it is a 'Nothing', which is no model of diffusers"),
        ({"_class_name": ["x"]}, "which is no model of diffusers"),
        ({"num_layers": 0}, "transformer_blocks.* that FluxTransformer2DModel of diffusers does not have"),
        ({"num_layers": "x"}, "diffusers cannot make a FluxTransformer2DModel"),
        ({"quantization_config": None}, "is not quantized"),
    ):
        (tmp_path / "in" / "config.json").write_text(json.dumps({**fields, **changes}))
        found = refused(tmp_path / "in", tmp_path / "out")
        assert re.search(message, found), found


def test_pipelines(tmp_path):
    """Of a pipeline the components of another library are imported, and the others are what they were."""
    source = save_flux(tmp_path / "source")
    shutil.copytree(source, tmp_path / "in")
    for part in ("transformer", "text_encoder_2"):
        shutil.rmtree(tmp_path / "in" / part)
    meant = packed.packed_checkpoint(
        tmp_path / "in" / "transformer", source / "transformer", BNB4, packed.bnb_nf4(), is_packed=is_of_block
    )
    text = packed.packed_checkpoint(
        *(tmp_path / "in" / "text_encoder_2", source / "text_encoder_2", BNB8, packed.bnb_int8),
        is_packed=lambda key: "SelfAttention" in key and key.endswith(("q.weight", "o.weight")),
    )
    (tmp_path / "in" / "README.md").write_text("---\nbase_model: me/base\nlicense: mit\n---\n")
    (note,) = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert note.startswith("text_encoder_2: inputs stay in 16 bit")
    pipe = FluxPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert mismatches(meant, weights_of(pipe.transformer))[0] == 0
    assert mismatches(text, weights_of(pipe.text_encoder_2))[0] == 0
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        for path in (tmp_path / "in" / name).iterdir():
            assert path.read_bytes() == (tmp_path / "out" / name / path.name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card and "quantized by bitsandbytes, imported by hf_quant" in card
    assert "is a pipeline without a component" in refused(source, tmp_path / "second")
