"""The package compressed-tensors, and transformers with it, read what `export_compressed_tensors` writes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from hf_quant import QuantizerConfig, export_compressed_tensors, import_checkpoint, quantize_
from hf_quant.kernels import quantize_static
from hf_quant.kernels.codes import row_max
from hf_quant.modules import QuantizedModule
from hf_quant.testing import sqnr
from integration_tests.support.foreign_checkpoints import (
    config_of,
    foreign_checkpoint,
    group_for,
    load_all,
    make_llama,
    mismatches,
    weights_of,
)
from integration_tests.support.tiny_models import ARCHITECTURES, build, inputs
from integration_tests.test_compressed_tensors import SCHEMES, quantized


pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")

PROJECTION = "model.layers.0.self_attn.q_proj"
STRAIGHT = {"weights": "W8A8", "input_transform": "none"}
MIXED = {"weights": "W4A16", "modules": {"*.mlp.*": "W8A8_FP8", "*.o_proj": None}}
ALL = {name: config for name, (config, _, _) in SCHEMES.items()} | {"mixed": MIXED}
# Inputs stay in 16 bit: the first forward decodes all weights and computes with them.
WEIGHT_ONLY = ("w4a16", "w4a16_channel", "w8a16", "nvfp4", "mxfp4")


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """name -> (quantized model, directory of its export), made once each."""
    root, made = tmp_path_factory.mktemp("exports"), {}
    llama = make_llama(root / "model")

    def export(name: str):
        if name not in made:
            model = quantized(llama, **ALL[name])
            export_compressed_tensors(model, root / name, reader="transformers")
            made[name] = model, root / name
        return made[name]

    return export


def modules_of(tensors):
    found = {}
    for key, tensor in tensors.items():
        module, _, leaf = key.rpartition(".")
        found.setdefault(module, {})[leaf] = tensor
    return {module: parts for module, parts in found.items() if "weight_scale" in parts}


def unsigned_zeros(pairs: torch.Tensor) -> torch.Tensor:
    """Pairs of e2m1 codes, of which 8 is -0."""
    low, high = pairs & 15, pairs >> 4
    return torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)


@pytest.mark.parametrize("name", ALL)
def test_its_own_decompression_gives_every_weight(name, exports):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model, path = exports(name)
    fields = config_of(path)["quantization_config"]
    QuantizationConfig.model_validate(fields)
    decoded = {}
    for module, parts in modules_of(load_all(path)).items():
        group = group_for(module, fields)
        scheme = QuantizationConfig.model_validate(fields).config_groups
        scheme = next(s for key, s in scheme.items() if fields["config_groups"][key] == group)
        compressor = BaseCompressor.get_value_from_registry(group["format"])
        decoded[module] = compressor.decompress(parts, scheme)["weight"].to(torch.bfloat16)
    assert mismatches(weights_of(model), decoded)[0] == 0


@pytest.mark.parametrize("name", ALL)
def test_it_writes_the_same_tensors_for_the_scheme(name, exports):
    """Keys, shapes and dtypes: of its own compression of the weights that ours decode to, with our scales."""
    from compressed_tensors.compressors import BaseCompressor, unpack_from_int32
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme

    model, path = exports(name)
    fields, weights = config_of(path)["quantization_config"], weights_of(model)
    for module, parts in modules_of(load_all(path)).items():
        group = group_for(module, fields)
        scheme = QuantizationScheme.model_validate(group)
        assert infer_module_format(nn.Linear, scheme).value == group["format"]
        state = {"weight": weights[module].float(), "weight_scale": parts["weight_scale"]}
        if "weight_zero_point" in parts:
            packed, shape = parts["weight_zero_point"], parts["weight_scale"].shape
            state["weight_zero_point"] = unpack_from_int32(packed, 4, shape, packed_dim=0)
        if "input_scale" in parts:
            state["input_scale"] = parts["input_scale"]
        if "weight_global_scale" in parts:
            state["weight_global_scale"] = parts["weight_global_scale"]
            state["weight_scale"] = parts["weight_scale"].float()
        if group["format"].startswith("mxfp4"):
            state["weight_scale"] = torch.exp2(parts["weight_scale"].float() - 127)
        theirs = BaseCompressor.get_value_from_registry(group["format"]).compress(state, scheme)
        assert {k: (t.dtype, tuple(t.shape)) for k, t in theirs.items()} == {
            k: (t.dtype, tuple(t.shape)) for k, t in parts.items()
        }
        # The codes, too: rounding a decoded weight again finds its code.
        for key in parts.keys() & {"weight_packed", "weight", "weight_zero_point"}:
            found, ours = (t[key].flatten().view(torch.uint8) for t in (theirs, parts))
            if "fp4" in group["format"]:  # its rounding drops the sign of a zero
                found, ours = unsigned_zeros(found), unsigned_zeros(ours)
            assert torch.equal(found, ours)


@pytest.mark.parametrize("name", ["w8a8_static", "w8a8_fp8_static"])
def test_its_codes_of_an_input_with_a_static_scale(name, exports):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    model, path = exports(name)
    group = config_of(path)["quantization_config"]["config_groups"]["group_0"]
    args, scale = QuantizationArgs(**group["input_activations"]), load_all(path)[f"{PROJECTION}.input_scale"]
    format = model.get_submodule(PROJECTION).scheme.activation.format
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(1)) * scale * row_max(format) / 2
    codes, _ = quantize_static(x, scale, format=format)
    theirs = quantize(x, scale, None, args, dtype=codes.dtype).float()
    if format == "int8":  # of which they use -128, too
        theirs = theirs.clamp(min=-127)
    assert torch.equal(codes.float(), theirs) and (codes.float().abs() == codes.float().abs().max()).sum() > 1


@pytest.mark.parametrize("name", ALL)
def test_transformers_decodes_it_on_load(name, exports, request):
    if name == "mixed":
        reason = "transformers 5.23 decodes every dense layer by the first group (integrations/compressed_tensors.py)"
        request.applymarker(pytest.mark.xfail(strict=True, raises=RuntimeError, reason=reason))
    model, path = exports(name)
    loaded = AutoModelForCausalLM.from_pretrained(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert mismatches(weights_of(model), {n: loaded.get_submodule(n).weight for n in weights_of(model)})[0] == 0


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("w4a16", None),
        ("w4a16_asym", "cannot load zero points (W4A16_ASYM) as codes: load it decoded"),
        ("mixed", "as if all were the first: load it as codes"),
    ],
)
def test_what_transformers_cannot_load_is_said_at_the_export(name, limit, exports, tmp_path, caplog):
    model = exports(name)[0]
    caplog.clear()  # the fixture may have exported it just now
    notes = export_compressed_tensors(model, tmp_path / "out", reader="transformers")
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("hf_quant")]
    assert warned == list(notes) and ([limit in note for note in notes] == [True] if limit else notes == ())
    assert not any("transformers" in note for note in export_compressed_tensors(model, tmp_path / "engines"))


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, "mixed", "w4a16_asym"])
def test_transformers_loads_it_compressed(name, exports, request):
    if name == "w4a16_asym":
        reason = (
            "transformers 5.23 with compressed-tensors 0.20 allocates zero points unpacked and refuses packed ones"
        )
        request.applymarker(pytest.mark.xfail(strict=True, raises=RuntimeError, reason=reason))
    model, path = exports(name)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert hasattr(loaded.get_submodule("model.layers.0.self_attn.q_proj"), "weight_packed")
    ids, expected = torch.arange(12)[None], weights_of(model)
    if name == "mixed":  # it loads the fp32 scales of 8-bit weights in the model's dtype
        expected = {module: weight for module, weight in expected.items() if ".mlp." not in module}
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits  # decodes all weights
        assert mismatches(expected, {n: loaded.get_submodule(n).weight for n in expected})[0] == 0
        if name != "mixed":
            assert (logits - model(input_ids=ids).logits).abs().max() < 0.05 * logits.abs().max()


@pytest.mark.parametrize("name", ["gpt_neox", "llava"])
@pytest.mark.parametrize("config", [{"weights": "W4A16", "group_size": 32}, STRAIGHT, "mixed"])
def test_transformers_finds_modules_that_have_other_names_in_the_checkpoint(name, config, tmp_path):
    if name == "gpt_neox":
        sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        model, ids = (
            transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)).bfloat16(),
            torch.arange(12)[None],
        )
        arguments = {"input_ids": ids}
    else:
        model, arguments = build(name), inputs(name)
    if config == "mixed":  # layers are named in the config then
        config = STRAIGHT | {"modules": {"*.dense_4h_to_h" if name == "gpt_neox" else "*.down_proj": "W8A16"}}
    quantize_(model.eval(), QuantizerConfig(**config))
    export_compressed_tensors(model, tmp_path / "out", reader="transformers")
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert sqnr(loaded(**arguments).logits, model(**arguments).logits) > 20


@pytest.mark.parametrize("config", [{"weights": "W4A16", "group_size": 32}, {"weights": "W8A16"}])
def test_transformers_merges_the_experts_again(config, tmp_path):
    architecture = ARCHITECTURES["qwen3_moe"]
    torch.manual_seed(0)
    model = getattr(transformers, architecture.model)(architecture.config()).bfloat16()
    quantize_(model, QuantizerConfig(**config))
    export_compressed_tensors(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    experts = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedModule) and m.kind == "experts"}
    assert len(experts) == 2
    for name, module in experts.items():
        for weight in ("gate_up_proj", "down_proj"):
            assert torch.equal(module.dequantize_weight(weight), getattr(loaded.get_submodule(name), weight))


def test_its_converter_of_awq_finds_the_same_codes(tmp_path):
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    foreign_checkpoint(tmp_path / "awq", make_llama(tmp_path / "fp16", torch.float16), "awq", symmetric=False)
    import_checkpoint(tmp_path / "awq", tmp_path / "ours")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ours.config.dtype = torch.float16
    export_compressed_tensors(ours, tmp_path / "exported")
    theirs = AutoAWQConverter(group_size=32).process(load_all(tmp_path / "awq"))
    exported = load_all(tmp_path / "exported")
    assert theirs.keys() == exported.keys()
    assert [key for key in theirs if not torch.equal(theirs[key], exported[key])] == []


@pytest.mark.parametrize("config", [STRAIGHT, {"weights": "W8A16", "modules": {"*experts*": None}}])
def test_experts_that_transformers_cannot_load_are_mentioned(config, tmp_path):
    model = quantize_(build("qwen3_moe"), QuantizerConfig(**config))
    (note,) = export_compressed_tensors(model, tmp_path / "out", reader="transformers")
    assert note.startswith("transformers 5.23 cannot load experts in int8 with quantized inputs, or in 16 bit")
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):  # else the note is out of date
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def asymmetric(path, source, strategy: str, format: str, dtype: torch.dtype, rounds_inputs: bool):
    """Write a checkpoint of int8 weights with zero points, as the package compresses it; return decoded weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": strategy, "dynamic": False}
    weights["group_size"] = 32 if strategy == "group" else None
    dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": dynamic if rounds_inputs else None}
    scheme, compressor = QuantizationScheme.model_validate(group), BaseCompressor.get_value_from_registry(format)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tensors, decoded = {key: value.clone() for key, value in model.state_dict().items()}, {}
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            N, K = module.weight.shape
            shape = (N, K // 32 if strategy == "group" else 1)
            state = {"weight": module.weight.detach(), "weight_scale": (torch.rand(shape) * 0.01 + 0.001).to(dtype)}
            state["weight_zero_point"] = torch.randint(-128, 128, shape, dtype=torch.int8)
            parts = compressor.compress(state, scheme)
            decoded[name] = compressor.decompress(dict(parts), scheme)["weight"]
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in parts.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    own = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    own |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    (path / "config.json").write_text(json.dumps({**config_of(source), "quantization_config": own}))
    return decoded


@pytest.mark.parametrize(
    ("strategy", "format", "dtype", "rounds_inputs"),
    [
        ("group", "pack-quantized", torch.bfloat16, False),
        ("channel", "pack-quantized", torch.float16, False),
        ("channel", "int-quantized", torch.bfloat16, True),
        ("group", "naive-quantized", torch.float16, False),
        ("channel", "int-quantized", torch.float32, True),
    ],
)
def test_zero_points_of_int8_arrive(strategy, format, dtype, rounds_inputs, tmp_path):
    decoded = asymmetric(tmp_path / "in", make_llama(tmp_path / "model"), strategy, format, dtype, rounds_inputs)
    notes = import_checkpoint(tmp_path / "in", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    first, second = load_all(tmp_path / "out"), load_all(tmp_path / "again")
    codes = [key for key in first if "qdata" in key or "zero_point" in key or key.endswith("scale")]
    assert len(codes) == 3 * len(decoded) and all(torch.equal(first[key], second[key]) for key in codes)
    extent = "g32" if strategy == "group" else "row"
    for name, meant in decoded.items():
        module = model.get_submodule(name)
        assert str(module.scheme.weight) == f"int8 {extent} floating-point zero points"
        assert (module.scheme.activation is not None) == rounds_inputs
        found = module.dequantize_weight("weight", torch.float32)
        if dtype == torch.float32:  # rounded products of zero points and scales
            torch.testing.assert_close(found, meant, rtol=0, atol=3e-7)
        else:  # the package decodes in the dtype of scales
            assert torch.equal(found.to(dtype), meant) and not torch.equal(found[1:].to(dtype), meant[:-1])
    assert ("rounded to fp32" in str(notes)) == (dtype == torch.float32)
