"""The hand-packed layers of test_importing_libraries.py mean what the libraries themselves decode, where installed."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_quant import import_checkpoint
from integration_tests.support import packed_libraries as packed
from integration_tests.support.foreign_checkpoints import config_of, make_llama, mismatches, weights_of


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_decodes_4_bits_alike(kind, nested):
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    parts, meant = packed.bnb_nf4(nested=nested, kind=kind)(64, 192, torch.bfloat16, 0)
    stats = {name: part for name, part in parts.items() if name != "weight"}
    state = functional.QuantState.from_dict(dict(stats), torch.device("cpu"))
    assert torch.equal(functional.dequantize_4bit(parts["weight"], state), meant)
    written = functional.quantize_4bit(meant, quant_type=kind, compress_statistics=nested, blocksize=64)[1]
    own = json.loads(bytes(written.as_dict(packed=True)[f"quant_state.bitsandbytes__{kind}"].tolist()))
    mine = json.loads(bytes(stats[f"weight.quant_state.bitsandbytes__{kind}"].tolist()))
    assert own.keys() == mine.keys()


def test_bitsandbytes_decodes_int8_alike():
    functional = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes").functional
    parts, meant = packed.bnb_int8(64, 192, torch.float16, 0)
    assert torch.equal(functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"]).half(), meant)


def _llama(tmp_path):
    make_llama(tmp_path / "bf16")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")


@pytest.mark.parametrize("kind", ["int8", "int8_dynamic", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("pickled", [False, True])
def test_what_torchao_saves(kind, pickled, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", reason="needs torchao 0.14")
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig

    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "int8_dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
        "fp8": lambda: quantization.Float8WeightOnlyConfig(),
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
        "mxfp4": lambda: MXDynamicActivationMXWeightConfig(
            activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2
        ),
    }[kind]()
    model = _llama(tmp_path)
    is_layer = lambda module, name: isinstance(module, torch.nn.Linear) and name.endswith("_proj")  # noqa: E731
    try:
        quantization.quantize_(model, config, filter_fn=is_layer)
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"torchao needs a GPU for it: {error}")
    state = {key: tensor.detach() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    meant = {key.removesuffix(".weight"): t.dequantize() for key, t in state.items() if key.endswith("_proj.weight")}
    (tmp_path / "in").mkdir()
    own = {"quant_method": "torchao", "quant_type": {"default": {"_type": type(config).__name__}}}
    fields = {**config_of(tmp_path / "bf16"), "quantization_config": own}
    (tmp_path / "in" / "config.json").write_text(json.dumps(fields))
    if pickled:
        torch.save(state, tmp_path / "in" / "pytorch_model.bin")
    else:
        tensors, metadata = support.flatten_tensor_state_dict(state)
        save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt", **metadata})
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    found = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    assert mismatches(meant, found)[0] == 0


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "qint4"])
def test_what_quanto_saves(kind, tmp_path):
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    model = _llama(tmp_path)
    quanto.quantize(model, weights=kind, exclude="lm_head")
    quanto.freeze(model)
    names = [name for name, module in model.named_modules() if isinstance(module, quanto.QLinear)]
    meant = {name: model.get_submodule(name).weight.dequantize() for name in names}
    (tmp_path / "in").mkdir()
    state = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    save_file(state, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "in" / "quanto_qmap.json").write_text(json.dumps(quanto.quantization_map(model)))
    (tmp_path / "in" / "config.json").write_text(json.dumps(config_of(tmp_path / "bf16")))
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    found = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))
    if kind != "qint4":
        assert mismatches(meant, found)[0] == 0
        return
    for name, weight in meant.items():  # quanto rounds the product of code and scale, too
        assert (found[name].double() - weight.double()).norm() < 2**-7 * weight.double().norm()


def test_quanto_decodes_groups_alike():
    quanto = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto")
    from optimum.quanto.tensor.packed import PackedTensor
    from optimum.quanto.tensor.weights import WeightQBitsTensor

    for bits, kind in ((4, quanto.qint4), (2, quanto.qint2)):
        parts, meant = packed.quanto_grouped(bits, 64)(128, 192, torch.bfloat16, 0)
        data = PackedTensor(parts["weight._data._data"], bits, (384, 64), (64, 1))
        scale, shift = parts["weight._scale"], parts["weight._shift"]
        weight = WeightQBitsTensor(kind, 0, 64, (128, 192), (192, 1), data, scale, shift)
        assert torch.equal(weight.dequantize(), meant)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_hqq_decodes_alike(bits):
    quantizer = pytest.importorskip("hqq.core.quantize", reason="needs hqq").Quantizer
    parts, meant = packed.hqq(bits, 64)(64, 192, torch.bfloat16, 0)
    names = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}
    meta = {"scale": parts["scale"], "zero": parts["zero"], "packing": names[bits], "shape": (64, 192), "axis": 1}
    meta |= {"nbits": bits, "group_size": 64, "view_as_float": False, "compute_dtype": torch.bfloat16}
    assert torch.equal(quantizer.dequantize(parts["W_q"], meta), meant)
