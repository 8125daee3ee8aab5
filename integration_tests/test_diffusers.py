"""diffusers models: quantize on load, save, reload, dequantize, sizes and devices, errors."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from hf_quant import QuantizerConfig, dequantize_, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.quantize import stored_config
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from accelerate.utils import compute_module_sizes  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from integration_tests.support.tiny_diffusion import (  # noqa: E402
    assert_same_bytes,
    file_tensors,
    load,
    make_autoencoder,
    make_model,
    quantized_names,
    run,
)


WEIGHTS = "diffusion_pytorch_model.safetensors"


# Loading.


def test_codes_are_chosen_from_the_precision_of_the_checkpoint(checkpoints):
    config = QuantizerConfig("int8")
    model = load(checkpoints("flux", torch.float32), quantization_config=config)
    exact = make_model("flux", torch.float32)
    rounded = make_model("flux", torch.bfloat16)
    name = "transformer_blocks.0.attn.to_q"
    layer = model.get_submodule(name)
    assert layer.compute_dtype == torch.bfloat16 and layer.bias.dtype == torch.bfloat16
    codes = [layer.quantize("weight", m.get_submodule(name).weight.detach()).qdata for m in (exact, rounded)]
    assert torch.equal(layer.packed().qdata, codes[0])
    assert not torch.equal(layer.packed().qdata, codes[1])


def test_modules_kept_in_fp32_stay_so(checkpoints, tmp_path):
    source = checkpoints("wan", torch.float32)
    plain, model = load(source, "wan"), load(source, "wan", quantization_config=QuantizerConfig("W8A8"))
    model.save_pretrained(tmp_path)
    expected = {key: tensor for key, tensor in plain.state_dict().items() if key in model.state_dict()}
    assert torch.float32 in {tensor.dtype for tensor in expected.values()}
    for loaded in (model, load(tmp_path, "wan")):
        kept = {key: loaded.state_dict()[key] for key in expected}
        assert_same_bytes(kept, expected)
        assert not any("time_embedder" in name for name in quantized_names(loaded)) and loaded.dtype == torch.bfloat16


def test_convolutions_through_modules(checkpoints, tmp_path):
    source = checkpoints("unet", torch.float32)
    modules = {"*.conv1": "int8", "*.conv2": "int8", "re:.*samplers\\.0\\.conv": "int4"}
    model = load(source, "unet", torch.float32, quantization_config=QuantizerConfig("int8", modules=modules))
    plain = load(source, "unet", torch.float32)
    convolutions = [m for m in model.modules() if isinstance(m, QuantizedModule) and isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 18
    assert model.get_memory_footprint() < 0.35 * plain.get_memory_footprint()
    output = run(model, "unet")
    assert_sqnr(output, run(plain, "unet"), at_least=12, at_most=40)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert torch.equal(run(load(tmp_path, "unet", torch.float32), "unet"), output)


def test_quantize_and_dequantize_a_loaded_model(checkpoints, tmp_path):
    on_load = load(checkpoints("flux"), quantization_config=QuantizerConfig("int4"))
    model = quantize_(load(checkpoints("flux")), "int4")
    assert_same_bytes(model.state_dict(), on_load.state_dict())
    on_load.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    a, b = (json.loads((tmp_path / d / "config.json").read_text()) for d in "ab")
    assert a == b and a["quantization_config"]["plan"]
    output = run(model, "flux")
    assert torch.equal(run(load(tmp_path / "b"), "flux"), output)
    with pytest.raises(ValueError, match="quantized already"):
        quantize_(model, "int8")

    dequantize_(model)
    assert not hasattr(model, "hf_quantizer") and model.to(torch.float32).dtype == torch.float32


def test_a_dequantized_model_saves_and_loads_as_plain(checkpoints, tmp_path):
    model = load(checkpoints("flux"), quantization_config=QuantizerConfig("int8"))
    model.save_pretrained(tmp_path / "quantized")
    model = load(tmp_path / "quantized")
    weight = model.transformer_blocks[0].attn.to_q.dequantize_weight()
    model.dequantize()
    assert torch.equal(model.transformer_blocks[0].attn.to_q.weight, weight)
    assert quantized_names(model) == set() and type(model.norm_out.linear) is nn.Linear
    assert not getattr(model, "is_quantized", False) and "quantization_config" not in model.config
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    again, info = load(tmp_path / "plain", output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert torch.equal(run(again, "flux"), run(model, "flux"))
    again.fuse_qkv_projections()  # what a quantized one refuses
    again.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    with pytest.raises(ValueError, match="first quantize"):
        model.dequantize()


def test_exchanged_layers_and_models_of_which_a_part_is_quantized_save_and_reload(tmp_path):
    source, part, exchanged, plain = (make_model("flux", torch.bfloat16) for _ in range(4))
    quantize_(part.transformer_blocks, "int8")
    quantize_(exchanged, "int4")
    exchanged.transformer_blocks[0].attn.to_q = source.transformer_blocks[0].attn.to_q
    for name in quantized_names(quantize_(plain, "int8")):  # of which none stays
        plain.set_submodule(name, source.get_submodule(name))
    for number, model in enumerate((part, exchanged, plain)):
        model.save_pretrained(tmp_path / str(number))
        assert quantized_names(model) == quantized_names(load(tmp_path / str(number)))
        assert_same_bytes(load(tmp_path / str(number)).state_dict(), model.state_dict())


def test_parameters_are_counted_as_weights(checkpoints):
    plain = make_model("flux", torch.bfloat16)
    for weights in ("int4", "W8A8"):
        model = load(checkpoints("flux"), quantization_config=QuantizerConfig(weights))
        assert model.num_parameters() == plain.num_parameters()
        assert model.num_parameters(True) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_copies_and_pickles(checkpoints):
    model = load(checkpoints("flux"), quantization_config=QuantizerConfig("int4"))
    output = run(model, "flux")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(copied, "flux"), output)
        copied.dequantize()
    assert quantized_names(model)


def test_fp8_checkpoint(checkpoints, tmp_path):
    make_model("flux").save_config(tmp_path)
    tensors = {key: value.to(torch.float8_e4m3fn) for key, value in file_tensors(checkpoints("flux")).items()}
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    expected, config = run(load(tmp_path), "flux"), QuantizerConfig("int8")
    model = load(tmp_path, quantization_config=config)
    single = diffusers.FluxTransformer2DModel.from_single_file(
        str(tmp_path / WEIGHTS), config=str(tmp_path), torch_dtype=torch.bfloat16, quantization_config=config
    )
    for loaded in (model, single):
        assert {p.dtype for p in loaded.parameters() if p.is_floating_point()} == {torch.bfloat16}
        assert_sqnr(run(loaded, "flux"), expected, at_least=30, at_most=55)


def test_single_file(checkpoints, tmp_path):
    source = tmp_path / "source"
    load(checkpoints("flux")).save_pretrained(source)
    cls, config = diffusers.FluxTransformer2DModel, QuantizerConfig("int4")
    model = cls.from_single_file(
        str(source / WEIGHTS), config=str(source), torch_dtype=torch.bfloat16, quantization_config=config
    )
    assert {m.compute_dtype for m in model.modules() if isinstance(m, QuantizedModule)} == {torch.bfloat16}
    assert_same_bytes(model.state_dict(), load(source, quantization_config=config).state_dict())
    model.save_pretrained(tmp_path / "quantized")
    assert torch.equal(run(load(tmp_path / "quantized"), "flux"), run(model, "flux"))
    with pytest.raises(ValueError, match="quantized by hf_quant: load the directory"):
        cls.from_single_file(
            str(tmp_path / "quantized" / WEIGHTS), config=str(source), quantization_config=QuantizerConfig("int4")
        )


@pytest.mark.parametrize("weights", [None, "int4"])
def test_loading_shards_in_parallel(checkpoints, tmp_path, monkeypatch, weights):
    source, config = checkpoints("flux"), QuantizerConfig("int4")
    expected = load(source, quantization_config=config)
    if weights is None:
        source = tmp_path
        expected.save_pretrained(source, max_shard_size="30KB")
    quantizer = expected.hf_quantizer  # was not for a quantized checkpoint: threads would race for the names
    assert not quantizer.supports_parallel_loading
    monkeypatch.setattr("diffusers.models.modeling_utils.HF_ENABLE_PARALLEL_LOADING", True)
    model = load(source, quantization_config=config if weights else None)
    assert_same_bytes(model.state_dict(), expected.state_dict())


def test_autoencoders_stay_in_16_bit_unless_layers_are_named(tmp_path, caplog):
    make_autoencoder(torch.bfloat16).save_pretrained(tmp_path / "vae")
    cls = diffusers.AutoencoderKL
    model = cls.from_pretrained(
        tmp_path / "vae", torch_dtype=torch.bfloat16, quantization_config=QuantizerConfig("int8")
    )
    assert "AutoencoderKL stays in 16 bit" in caplog.text
    assert quantized_names(model) == set() and not model.is_quantized
    model.save_pretrained(tmp_path / "saved")
    again = cls.from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    assert_same_bytes(again.state_dict(), make_autoencoder(torch.bfloat16).state_dict())

    cls.from_pretrained(
        tmp_path / "vae", quantization_config=QuantizerConfig("int8", attention="int8")
    ).save_pretrained(tmp_path / "attention")
    assert stored_config(cls.from_pretrained(tmp_path / "attention")).attention == "int8"

    config = QuantizerConfig(None, modules={"decoder.*.conv1": "int8"})
    model = cls.from_pretrained(tmp_path / "vae", torch_dtype=torch.bfloat16, quantization_config=config)
    names = quantized_names(model)
    assert names and all(name.startswith("decoder.") and name.endswith(".conv1") for name in names)
    model.save_pretrained(tmp_path / "named")
    again = cls.from_pretrained(tmp_path / "named", torch_dtype=torch.bfloat16)
    assert_same_bytes(again.state_dict(), model.state_dict())


def test_a_kv_cache_is_for_models_of_transformers(checkpoints, caplog):
    config = QuantizerConfig("int8", kv_cache="int8")  # as a pipeline's config, for a text encoder that generates
    model = load(checkpoints("flux"), quantization_config=config)
    assert "kv_cache is 'int8', but only models of transformers have one: not FluxTransformer2DModel" in caplog.text
    assert stored_config(model).kv_cache is None and config.kv_cache == "int8" and quantized_names(model)
    with pytest.raises(ValueError, match="FluxTransformer2DModel is no model of transformers: leave it out"):
        quantize_(load(checkpoints("flux")), config)


# The hosts' registries and processes.


def test_one_config_class_in_both_registries():
    import transformers.quantizers.auto as of_transformers
    from diffusers.quantizers import auto

    from hf_quant.integrations.diffusers import quantizer as adapter

    before = dict(auto.AUTO_QUANTIZER_MAPPING), list(adapter.quantize.OBSERVERS)
    adapter.register()
    assert (dict(auto.AUTO_QUANTIZER_MAPPING), list(adapter.quantize.OBSERVERS)) == before
    assert auto.AUTO_QUANTIZER_MAPPING["hf_quant"] is adapter.DiffusersQuantizer
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["hf_quant"] is QuantizerConfig
    assert of_transformers.AUTO_QUANTIZATION_CONFIG_MAPPING["hf_quant"] is QuantizerConfig


def test_without_hf_quant_a_load_fails(checkpoints, tmp_path, monkeypatch):
    from diffusers.quantizers import auto

    load(checkpoints("flux"), quantization_config=QuantizerConfig("int4")).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "hf_quant")
        with pytest.raises(ValueError, match="Unknown quantization type, got hf_quant"):
            load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weight expected shape .* but got torch.Size\(\[0\]\)"):
        load(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load(tmp_path, low_cpu_mem_usage=False)


# Sizes and devices.


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_sizes_are_true_while_the_weights_are_not_loaded(checkpoints, tmp_path, monkeypatch, weights):
    sizes = []
    determine = diffusers.models.modeling_utils._determine_device_map

    def spy(model, device_map, max_memory, dtype, keep_in_fp32_modules, quantizer):
        special = quantizer.get_special_dtypes_update(model, dtype)
        size = compute_module_sizes(model, dtype=quantizer.adjust_target_dtype(dtype), special_dtypes=special)[""]
        elements = sum(tensor.numel() for tensor in model.state_dict().values())
        warm_up = max(1, elements // quantizer.get_cuda_warm_up_factor())  # as the host computes it
        assert type(warm_up) is int
        memory = quantizer.adjust_max_memory({0: 10**6, "cpu": 10, "disk": "1GB"})
        sizes.append((size, warm_up * dtype.itemsize, memory))
        return determine(model, device_map, max_memory, dtype, keep_in_fp32_modules, quantizer)

    monkeypatch.setattr("diffusers.models.modeling_utils._determine_device_map", spy)
    model = load(checkpoints("flux"), quantization_config=QuantizerConfig(weights), device_map="auto")
    model.save_pretrained(tmp_path)
    load(tmp_path, device_map="auto")
    largest = max(m.in_features * m.out_features * 4 for m in model.modules() if isinstance(m, QuantizedModule))
    (size, warm_up, memory), (size_again, warm_up_again, memory_again) = sizes
    assert size == size_again == model.get_memory_footprint()
    assert size - 2 <= warm_up <= size and size - 2 <= warm_up_again <= size
    assert memory == {0: 10**6 - largest, "cpu": 0, "disk": "1GB"}  # room for the weight being quantized
    assert memory_again == {0: 10**6, "cpu": 10, "disk": "1GB"}


def test_a_device_map_counts_the_quantized_size(checkpoints):
    footprint = make_model("flux").get_memory_footprint()
    model = load(
        checkpoints("flux"),
        quantization_config=QuantizerConfig("int4"),
        device_map="auto",
        max_memory={"cpu": int(0.65 * footprint)},
    )
    assert model.hf_device_map == {"": "cpu"} and model.get_memory_footprint() < 0.3 * footprint


def test_disk_is_for_packed_weights_only(checkpoints, tmp_path):
    source, config, folder = checkpoints("flux"), QuantizerConfig("int4"), tmp_path / "offload"
    parts = {name: "cpu" for name, _ in make_model("flux").named_children()}
    device_map = {**parts, "single_transformer_blocks": "disk"}
    with pytest.raises(ValueError, match="puts single_transformer_blocks on disk.*save the quantized model first"):
        load(source, quantization_config=config, device_map=device_map, offload_folder=folder)
    with pytest.raises(ValueError, match="on disk"):  # where the host makes the map
        load(source, quantization_config=config, device_map="auto", max_memory={"cpu": 9}, offload_folder=folder)

    model = load(source, quantization_config=config)
    model.save_pretrained(tmp_path / "quantized")
    offloaded = load(tmp_path / "quantized", device_map=device_map, offload_folder=folder)
    assert offloaded.single_transformer_blocks[0].attn.to_q.qdata.device.type == "meta"
    assert torch.equal(run(offloaded, "flux"), run(model, "flux"))


# Errors.


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda model, path: model.to(torch.float32), "Casting a quantized model"),
        (lambda model, path: model.to(dtype=torch.float32), "Casting a quantized model"),
        (lambda model, path: model.to(torch.float16), r"or dequantize\(\) it first$"),
        (lambda model, path: model.half(), "not supported for quantized"),
        (lambda model, path: model.double(), "Casting a quantized model to torch.float64"),
        (lambda model, path: quantize_(make_model("flux"), "int4").bfloat16(), "Casting .* to torch.bfloat16"),
        (lambda model, path: model.type(torch.float32), "would cast its codes"),
        (lambda model, path: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16), "layerwise casting"),
        (lambda model, path: model.fuse_qkv_projections(), r"hf_quant.fuse_projections_\(model\)"),
        (lambda model, path: model.save_pretrained(path, safe_serialization=False), "safetensors only"),
    ],
)
def test_what_a_quantized_model_refuses(checkpoints, tmp_path, action, message):
    model = load(checkpoints("flux"), quantization_config=QuantizerConfig("int4"))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        action(model, tmp_path)
    assert model.bfloat16() is model
    assert_same_bytes(model.state_dict(), before)
    model.to("cpu")


def test_loads_that_are_refused(checkpoints, tmp_path):
    source = checkpoints("flux")
    resolved = load(source, quantization_config=QuantizerConfig("int4")).config.quantization_config
    with pytest.raises(ValueError, match="plan of another model"):
        load(source, quantization_config=resolved)
    with pytest.raises(ValueError, match="dtype is torch.float8_e4m3fn"):
        load(source, dtype=torch.float8_e4m3fn, quantization_config=QuantizerConfig("int4"))
    with pytest.raises(ValueError, match=r"modules\['\*.to_z'\] matches no module"):
        load(source, quantization_config=QuantizerConfig("int4", modules={"*.to_z": "int8"}))
    with pytest.raises(ValueError, match="nothing to quantize in FluxTransformer2DModel"):
        load(source, quantization_config=QuantizerConfig("int4", modules_to_not_convert=["*"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, layer: tensors[f"{layer}.scale"].view(-1)[7].fill_(-1), "{layer}.scale is corrupt"),
        (lambda tensors, layer: tensors.pop(f"{layer}.scale"), "lacks {layer}.scale"),
        (lambda tensors, layer: tensors.pop(f"{layer}.qdata"), "names {layer}, but the checkpoint has no codes"),
    ],
    ids=["scale", "no scale", "no codes"],
)
def test_damaged_codes_are_named(tmp_path, change, message):
    """Damage of any checkpoint, quantized or not, is in test_diffusers_files.py."""
    layer = "transformer_blocks.0.attn.to_q"
    quantize_(make_model("flux", torch.bfloat16), "int8").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    change(tensors, layer)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message.format(layer=layer)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format_version", 99, "install a newer hf_quant"),
        ("plan", None, "has no plan: restore"),
        ("weight", "int8", "unknown field 'weight'"),
        ("quant_method", "hf_quantum", "Unknown quantization type"),
    ],
)
def test_damaged_configs_are_named(checkpoints, tmp_path, field, value, message):
    load(checkpoints("flux"), quantization_config=QuantizerConfig("int8")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
