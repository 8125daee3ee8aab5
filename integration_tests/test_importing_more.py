"""Checkpoints of HQQ, AutoRound and ModelOpt become ours without rounding."""

import json
import re
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_quant import import_checkpoint
from hf_quant.checkpoint import FOREIGN_METHODS
from hf_quant.convert.readers import METHODS
from integration_tests.support import packed_libraries as packed
from integration_tests.support.foreign_checkpoints import (
    config_of,
    foreign_checkpoint,
    load_all,
    make_llama,
    mismatches,
    weights_of,
)
from integration_tests.support.tiny_models import build
from integration_tests.test_importing_libraries import UP, check_import, edit, refused


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "bf16")


@pytest.mark.parametrize("fields", [{"symmetric": True}, {"symmetric": False, "v2": True}, {"bits": 8}])
def test_gptq_with_a_short_last_group(fields, tmp_path):
    """192 columns are a group of 128 and one of 64, as g_idx and `group_size` say; not two of 96."""
    source = make_llama(tmp_path / "source", torch.float16, intermediate_size=192)
    meant = foreign_checkpoint(tmp_path / "in", source, "gptq", group=128, **fields)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wrong, count = mismatches(meant, weights_of(model))
    assert wrong == 0 and count == 2 * (3 * 128 * 192 + 2 * 128 * 128 + 2 * 64 * 128)
    assert model.model.layers[1].mlp.down_proj.scheme.weight.group_size == 128


HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}


@pytest.mark.parametrize(
    ("packer", "scheme", "bits"),
    [
        (packed.hqq(4, 64), "int4 g64 asym", 4.375),
        (packed.hqq(4, 64, as_float=True), "int4 g64 asym", 4.375),
        (packed.hqq(3, 64), "int3 g64 asym", 3.375),
        (packed.hqq(2, 16), "int2 g16 asym", 3.5),
        (packed.hqq(8, 32), "int8 g32", 8.5),
        (packed.hqq(4, 64, fraction=0.25), "int4 g64 floating-point zero points", 4.75),
        (packed.hqq(8, 32, fraction=-0.375), "int8 g32 floating-point zero points", 9.5),
    ],
)
def test_hqq(packer, scheme, bits, llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, HQQ, packer)
    assert import_checkpoint(tmp_path / "in", tmp_path / "out") == ()
    check_import(tmp_path / "in", tmp_path / "out", meant, scheme, bits)


@pytest.mark.parametrize(
    ("packer", "changes", "message"),
    [
        (packed.hqq(4, 64, fraction=torch.inf), {}, "zero .*has NaN or inf; needs finite zero points"),
        (packed.hqq(4, 64, axis=0), {}, "groups across its rows .axis 0."),
        (packed.hqq(4, 64), {f"{UP}.scale": None}, "up_proj.scale is missing"),
        (packed.hqq(4, 64), {f"{UP}.W_q": None}, "up_proj.*, but not all that belongs to it"),
        (
            packed.hqq(4, 64),
            {f"{UP}.W_q": torch.zeros(3, 64, dtype=torch.uint8)},
            "W_q is .3, 64. uint8 beside scales",
        ),
        (packed.hqq(4, 64), {f"{UP}.W_q": torch.zeros(256, 32, dtype=torch.uint8)}, "need another width"),
        (packed.hqq(4, 64), {f"{UP}.packing": torch.tensor([255, 10], dtype=torch.uint8)}, "packing is .*; readable"),
        (packed.hqq(4, 64), {f"{UP}.shape": torch.tensor([0, 5])}, "W_q is .* for 0 x 5 weights"),
        (packed.hqq(4, 64), {f"{UP}.quant_zero": torch.tensor(1)}, "has a quantized zero"),
        (packed.hqq(4, 64), {f"{UP}.axis": torch.ones(3)}, "axis is .3. float32; needs one number"),
    ],
)
def test_hqq_that_cannot_be(packer, changes, message, llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, HQQ, packer)
    edit(tmp_path / "in", changes)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found


def test_the_methods_that_errors_name_are_those_that_are_read():
    assert set(FOREIGN_METHODS) == set(METHODS)


# AutoRound.


def auto_round(path, source, method: str, own: dict, **fields) -> dict[str, torch.Tensor]:
    meant = foreign_checkpoint(path, source, method, **fields)
    bits = {"bits": fields.get("bits", 4), "group_size": 32, "data_type": "int", **own}
    config = {**config_of(path), "quantization_config": {"quant_method": "auto-round", **bits}}
    (path / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize(
    ("method", "own", "fields", "scheme"),
    [
        ("gptq", {"packing_format": "auto_round:auto_gptq", "sym": True}, {}, "int4 g32"),
        ("gptq", {"packing_format": "auto_round:gptqmodel", "sym": True}, {"v2": True}, "int4 g32"),
        ("gptq", {"packing_format": "auto_round:auto_gptq", "sym": True}, {"bits": 8}, "int8 g32"),
        ("gptq", {"packing_format": "auto_round:auto_gptq", "sym": False}, {"symmetric": False}, "int4 g32 asym"),
        ("gptq", {"backend": "auto_round:gptq:exllamav2", "sym": True}, {}, "int4 g32"),
        ("awq", {"packing_format": "auto_round:auto_awq", "sym": False}, {"symmetric": False}, "int4 g32 asym"),
    ],
)
def test_auto_round(method, own, fields, scheme, llama, tmp_path):
    meant = auto_round(tmp_path / "in", llama, method, own, **fields)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    check_import(
        tmp_path / "in", tmp_path / "out", meant, scheme, {"4": 4.5, "8": 8.5}[scheme[3]] + 0.25 * ("asym" in scheme)
    )


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"packing_format": "auto_round:exllamav2", "sym": False}, "in whose meaning releases differ"),
        ({"data_type": "mx_fp", "sym": True}, "with data_type 'mx_fp'"),
        ({"act_bits": 8, "sym": True}, "act_bits 8; readable: integers, inputs in 16 bit"),
    ],
)
def test_auto_round_that_cannot_be(own, message, llama, tmp_path):
    auto_round(tmp_path / "in", llama, "gptq", own)
    assert message in refused(tmp_path / "in", tmp_path / "out")


# ModelOpt.

MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
PER_TOKEN = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


@pytest.mark.parametrize(
    ("own", "packer", "scheme", "bits", "notes"),
    [
        (NVFP4, packed.modelopt_nvfp4, "nvfp4 g16", 4.502, 1),
        (
            {**NVFP4, "quant_algo": "FP8"},
            packed.fp8("tensor", static="input_scale"),
            *("fp8_e4m3 tensor, fp8_e4m3 activations, static", 8.003, 0),
        ),
        (PER_TOKEN, packed.fp8("row"), "fp8_e4m3 row, fp8_e4m3 activations", 8.222, 0),
        ({**PER_TOKEN, "quant_algo": "fp8_pb_wo"}, packed.fp8("block"), "fp8_e4m3 block", 8.0023, 0),
    ],
)
def test_modelopt(own, packer, scheme, bits, notes, llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, own, packer)
    assert len(import_checkpoint(tmp_path / "in", tmp_path / "out")) == notes
    check_import(tmp_path / "in", tmp_path / "out", meant, scheme, bits)


def test_modelopt_by_its_own_file(llama, tmp_path):
    """Layers in fp8 beside layers in nvfp4, and scales of a KV cache."""

    def mixed(N, K, dtype, seed):
        packer = packed.modelopt_nvfp4 if seed % 2 else packed.fp8("tensor", static="input_scale")
        return packer(N, K, dtype, seed)

    meant = packed.packed_checkpoint(tmp_path / "in", llama, None, mixed)
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    edit(tmp_path / "in", {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)})
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert "ModelOpt rounds them to 4 bits" in notes[0] and "scales of the KV cache are left out" in notes[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert mismatches(meant, weights_of(model))[0] == 0
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_experts_of_modelopt(tmp_path):
    """Gate and up share one scale, as ModelOpt writes them; two scales are no tensor of hf_quant."""
    build("qwen3_moe").save_pretrained(tmp_path / "source")

    def is_expert(key):
        return ".experts." in key

    meant = packed.packed_checkpoint(
        tmp_path / "in", tmp_path / "source", NVFP4, packed.modelopt_nvfp4, is_packed=is_expert
    )
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    experts = model.get_submodule("model.layers.0.mlp.experts")
    parts = [meant[f"model.layers.0.mlp.experts.3.{name}_proj"] for name in ("gate", "up", "down")]
    assert torch.equal(experts.dequantize_weight("gate_up_proj")[3], torch.cat(parts[:2]))
    assert torch.equal(experts.dequantize_weight("down_proj")[3], parts[2])
    edit(tmp_path / "in", {"model.layers.0.mlp.experts.3.up_proj.weight_scale_2": torch.tensor(0.5)})
    assert "its 2 parts have a scale of their own each" in refused(tmp_path / "in", tmp_path / "second")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{UP}.pre_quant_scale": torch.ones(128)}, "pre_quant_scale is multiplied with an input"),
        ({f"{UP}.weight_scale": None}, "up_proj.weight_scale is missing"),
        ({f"{UP}.weight_scale_2": None}, "up_proj.input_scale, but not all that belongs"),
        ({f"{UP}.weight_scale_2": torch.ones(2)}, "weight_scale_2 is .2. float32"),
        ({f"{UP}.weight": torch.zeros(256, 3, dtype=torch.uint8)}, "up_proj.weight_scale is"),
    ],
)
def test_modelopt_that_cannot_be(changes, message, llama, tmp_path):
    packed.packed_checkpoint(tmp_path / "in", llama, NVFP4, packed.modelopt_nvfp4)
    edit(tmp_path / "in", changes)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found
    assert load_all(tmp_path / "in")


# BitNet.

BITNET = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
OFFLINE, ONLINE = ({**BITNET, "linear_class": "autobitlinear", "quantization_mode": m} for m in ("offline", "online"))


@pytest.mark.parametrize(
    ("own", "packer", "bits"),
    [
        (BITNET, partial(packed.bitnet, divides=True), 2.222),
        (OFFLINE, packed.bitnet, 2.111),
        (ONLINE, packed.bitnet_online, 2.222),
        ({**ONLINE, "modules_to_not_convert": None}, packed.bitnet_online, 2.222),
    ],
)
def test_bitnet(own, packer, bits, llama, tmp_path):
    meant = packed.packed_checkpoint(tmp_path / "in", llama, own, packer)
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert len(notes) == (packer is packed.bitnet_online)
    model = check_import(tmp_path / "in", tmp_path / "out", meant, "int2 row, int8 activations", bits)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    # Inputs as in `ActQuant`, but for its rounding of their values to the dtype.
    scale = 127 / x.float().abs().amax(-1, keepdim=True)
    y = (x.float() * scale).round() / scale @ meant["model.layers.0.mlp.up_proj"].float().T
    assert (layer(x).float() - y).norm() < 0.004 * y.norm()


def test_layers_that_bitnet_leaves(llama, tmp_path):
    """Of names that the library takes for beginnings, ends and expressions."""
    own = {**ONLINE, "modules_to_not_convert": ["lm_head", "model.layers.0", "up_proj"]}
    packed.packed_checkpoint(tmp_path / "in", llama, own, packed.bitnet_online)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    found = {name for name, module in model.named_modules() if hasattr(module, "scheme")}
    assert len(found) == 6 and all(name.startswith("model.layers.1.") for name in found)


@pytest.mark.parametrize(
    ("own", "changes", "message"),
    [
        ({**OFFLINE, "use_rms_norm": True}, {}, "normalize their inputs"),
        (
            {**BITNET, "quantization_mode": "online"},
            {},
            "linear_class is 'bitlinear' and its quantization_mode 'online'",
        ),
        ({**BITNET, "linear_class": ["tri"]}, {}, "linear_class is .*tri"),
        ({**ONLINE, "modules_to_not_convert": 3}, {}, "modules_to_not_convert is 3; needs a list of names"),
        ({**ONLINE, "modules_to_not_convert": ["a("]}, {}, "'re:a.' is not a regular expression"),
        (OFFLINE, {f"{UP}.weight": torch.full((64, 128), 3, dtype=torch.uint8)}, "codes of 3"),
        (OFFLINE, {f"{UP}.weight_scale": None}, "up_proj.weight as .*, but no scale for it"),
        (OFFLINE, {f"{UP}.weight_scale": torch.ones(3)}, "weight_scale is .3. float32; needs"),
        (OFFLINE, {f"{UP}.weight": torch.zeros(63, 128, dtype=torch.uint8)}, "up_proj"),
        (ONLINE, {f"{UP}.weight": torch.full((256, 128), torch.nan)}, "NaN or inf"),
    ],
)
def test_bitnet_that_cannot_be(own, changes, message, llama, tmp_path):
    packer = packed.bitnet_online if own.get("quantization_mode") == "online" else packed.bitnet
    packed.packed_checkpoint(tmp_path / "in", llama, own, packer)
    edit(tmp_path / "in", changes)
    found = refused(tmp_path / "in", tmp_path / "out")
    assert re.search(message, found), found
