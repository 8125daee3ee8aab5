"""Quantized diffusion models as files: variants, subfolders, dtypes, and files that are not what they should.

What is refused is refused before anything is quantized, or leaves nothing behind.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_quant import QuantizerConfig, quantize_
from hf_quant.modules import QuantizedModule


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from diffusers import FluxPipeline, PipelineQuantizationConfig  # noqa: E402
from diffusers.training_utils import EMAModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from hf_quant.tests.recording import Calls  # noqa: E402
from integration_tests.support.tiny_architectures import Size  # noqa: E402
from integration_tests.support.tiny_diffusion import (  # noqa: E402
    NO_TOKENIZERS,
    assert_same_bytes,
    load,
    make_flux_pipeline,
    make_model,
    run,
)


INT8 = QuantizerConfig("int8")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A quantized Flux in bf16."""
    return quantize_(make_model("flux", torch.bfloat16), "W8A8")


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def test_variants_and_subfolders(model, tmp_path):
    model.save_pretrained(tmp_path / "pipe" / "transformer", variant="q", max_shard_size="60KB")
    assert len(files(tmp_path / "pipe" / "transformer")) > 1
    assert all(".q-0" in file.name for file in files(tmp_path / "pipe" / "transformer"))
    again = load(tmp_path / "pipe", subfolder="transformer", variant="q")
    assert_same_bytes(again.state_dict(), model.state_dict())
    assert torch.equal(run(again, "flux"), run(model, "flux"))
    for arguments in ({}, {"variant": "fp16"}):
        with pytest.raises(OSError, match="no file named"):
            load(tmp_path / "pipe" / "transformer", **arguments)

    make_model("flux", torch.float16).save_pretrained(tmp_path / "half", variant="fp16", max_shard_size="200KB")
    half = load(tmp_path / "half", dtype=torch.float16, variant="fp16", quantization_config=INT8)
    half.save_pretrained(tmp_path / "packed", variant="fp16")
    again = load(tmp_path / "packed", dtype=torch.float16, variant="fp16")
    assert_same_bytes(again.state_dict(), half.state_dict())
    assert torch.equal(run(again, "flux"), run(half, "flux"))


def test_a_save_replaces_an_earlier_one_in_other_files(tmp_path):
    for size in ("30KB", "1GB", "30KB"):
        model = quantize_(make_model("flux", torch.bfloat16), "int8")
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert_same_bytes(load(tmp_path).state_dict(), model.state_dict())
        assert len([file for file in tmp_path.glob("*.safetensors*") if "-of-" not in file.name]) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
def test_reload_in_another_dtype(model, tmp_path, dtype):
    model.save_pretrained(tmp_path)
    again, expected = load(tmp_path, dtype=dtype), dtype or torch.float32  # None is the host's fp32
    layers = [m for m in again.modules() if isinstance(m, QuantizedModule)]
    assert {layer.compute_dtype for layer in layers} == {again.dtype} == {expected}
    assert {p.dtype for p in again.parameters() if p.is_floating_point()} == {expected}
    for layer, source in zip(layers, (m for m in model.modules() if isinstance(m, QuantizedModule))):
        assert torch.equal(layer.qdata, source.qdata) and torch.equal(layer.scale, source.scale)
    assert run(again, "flux").isfinite().all()


def test_a_dtype_for_each_part(tmp_path):
    make_flux_pipeline(torch.bfloat16).save_pretrained(tmp_path / "plain")
    dtypes = {"transformer": torch.bfloat16, "text_encoder_2": torch.float16, "default": torch.float32}
    mapping = {"transformer": QuantizerConfig("W8A8"), "text_encoder_2": QuantizerConfig("int4")}
    config = PipelineQuantizationConfig(quant_mapping=mapping)
    arguments = {"torch_dtype": dtypes, **NO_TOKENIZERS}
    pipe = FluxPipeline.from_pretrained(tmp_path / "plain", quantization_config=config, **arguments)
    pipe.save_pretrained(tmp_path / "packed", variant="q", max_shard_size="60KB")
    again = FluxPipeline.from_pretrained(tmp_path / "packed", variant="q", **arguments)
    for p in (pipe, again):
        for name, part in p.components.items():
            if isinstance(part, nn.Module):
                assert part.dtype == dtypes.get(name, torch.float32)
                for layer in part.modules():
                    assert getattr(layer, "compute_dtype", part.dtype) == part.dtype
    for name in ("transformer", "text_encoder_2", "text_encoder", "vae"):
        assert_same_bytes(getattr(again, name).state_dict(), getattr(pipe, name).state_dict())


# What is wrong is named.


def _truncate(source: Path, length: int) -> None:
    file = files(source)[-1]
    file.write_bytes(file.read_bytes()[:length])


def _nan(source: Path) -> None:
    for file in files(source):
        tensors = load_file(file)
        name = "single_transformer_blocks.0.proj_mlp.weight"
        if name in tensors:
            tensors[name].view(-1)[-1] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})


def _configure(**changes: Any) -> Any:
    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **changes}))

    return change


@pytest.mark.parametrize("stored", ["plain", "packed"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda path: _truncate(path, -100), "is truncated: ", id="truncated"),
        pytest.param(lambda path: _truncate(path, 5), "is truncated or not a safetensors file", id="header"),
        pytest.param(_configure(num_layers=2), r"has no fitting transformer_blocks\.1\.", id="deeper"),
        pytest.param(_configure(num_attention_heads=8), r"expected shape|the model and its scheme need", id="wider"),
    ],
)
def test_damaged_shards_and_other_models(model, tmp_path, monkeypatch, stored, damage, message):
    source = make_model("flux", torch.bfloat16) if stored == "plain" else model
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(files(tmp_path)) > 2
    damage(tmp_path)
    config = QuantizerConfig("int8")
    filled = []
    monkeypatch.setattr(QuantizedModule, "fill_", lambda *args: filled.append(args))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **({"quantization_config": config} if stored == "plain" else {}))
    assert not filled and config.plan is None


def test_an_index_of_more_than_the_shards_have(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    name = "time_text_embed.timestep_embedder.linear_2.bias"
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"][name]
    save_file({n: t for n, t in load_file(shard).items() if n != name}, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"has no fitting {name}; is it of another model"):
        load(tmp_path)


def test_nan_in_a_shard(checkpoints, tmp_path):
    shutil.copytree(checkpoints("flux"), tmp_path / "flux")
    _nan(tmp_path / "flux")
    config = QuantizerConfig("int8")
    with pytest.raises(ValueError, match=r"single_transformer_blocks\.0\.proj_mlp\.weight contains NaN or inf"):
        load(tmp_path / "flux", quantization_config=config)
    skipping = QuantizerConfig("int8", modules_to_not_convert=["single_transformer_blocks"])
    assert load(tmp_path / "flux", quantization_config=skipping).is_quantized  # as the message says
    model = load(checkpoints("flux"), quantization_config=config)  # the same object serves again
    model.save_pretrained(tmp_path / "saved")
    assert_same_bytes(load(tmp_path / "saved").state_dict(), model.state_dict())


def test_files_of_another_architecture(model, tmp_path):
    model.save_pretrained(tmp_path / "packed")
    make_model("flux", torch.bfloat16).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="the model and its scheme need"):
        load(tmp_path / "packed", "sd3")
    make_model("sd3").save_config(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no fitting pos_embed.pos_embed"):
        load(tmp_path / "plain", "sd3", quantization_config=INT8)


def test_pickles_of_quantized_models_are_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(
        ValueError, match="diffusion_pytorch_model.bin is no safetensors file but, by its name, a pickle"
    ):
        load(tmp_path, use_safetensors=False)


def test_a_config_beside_a_quantized_checkpoint(tmp_path):
    """What does not change the codes is applied, another quantization is refused."""
    plain, modules, size = make_model("flux", torch.bfloat16), {"*.to_k": "int4"}, Size(16, 16)
    quantize_(copy.deepcopy(plain), QuantizerConfig("W8A8", modules=modules)).save_pretrained(tmp_path)
    config = QuantizerConfig("W8A8", modules=modules, attention="int8", fuse_projections=True, fuse_activations=True)
    given, expected = load(tmp_path, quantization_config=config), quantize_(plain, config)
    assert_same_bytes(given.state_dict(), expected.state_dict())
    assert given.config.quantization_config.attention == "int8"
    assert "one product with" in repr(given) and repr(given) == repr(expected)
    with Calls() as calls:
        assert torch.equal(run(given, "flux", size), run(expected, "flux", size))
    assert calls.counts["int8_attention"] == 4 and calls.counts["layer_norm_quantize_rowwise"] == 10
    with pytest.raises(ValueError, match=r"quantized already, by .*weights='W8A8', modules=.* int8 row"):
        load(tmp_path, quantization_config=QuantizerConfig("int4"))


def test_averages_of_a_quantized_model_are_saved_with_it(tmp_path):
    model = quantize_(make_model("flux"), "int8")
    codes, bias = {key: tensor.clone() for key, tensor in model.state_dict().items()}, model.proj_out.bias
    averages = EMAModel(model.parameters(), model_cls=type(model), model_config=model.config)
    with torch.no_grad():
        bias.add_(1)
    averages.step(model.parameters())
    with pytest.raises(ValueError, match=r"quantized, .* copy_to\(model.parameters\(\)\), then model.save_pretrained"):
        averages.save_pretrained(tmp_path)
    with torch.no_grad():
        bias.add_(1)
    averages.copy_to(model.parameters())
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype=torch.float32).state_dict()
    moved = again.pop("proj_out.bias") - codes.pop("proj_out.bias")
    assert torch.allclose(moved, torch.ones_like(moved))
    assert_same_bytes(again, codes)
    plain = make_model("flux")
    EMAModel(plain.parameters(), model_cls=type(plain), model_config=plain.config).save_pretrained(tmp_path / "plain")
    assert_same_bytes(load(tmp_path / "plain", dtype=torch.float32).state_dict(), plain.state_dict())
