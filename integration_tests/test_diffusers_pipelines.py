"""Pipelines of diffusers with quantized parts: loading, saving, a new process, errors."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_quant import QuantizerConfig, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from diffusers import FluxPipeline, PipelineQuantizationConfig  # noqa: E402

from integration_tests.support.tiny_diffusion import (  # noqa: E402
    NO_TOKENIZERS,
    make_flux_pipeline,
    make_model,
)
from integration_tests.support.tiny_diffusion import run_flux_pipeline as run_pipeline  # noqa: E402


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory) -> Path:
    """Directory of a tiny Flux pipeline in bf16."""
    directory = tmp_path_factory.mktemp("pipeline")
    make_flux_pipeline(torch.bfloat16).save_pretrained(directory)
    return directory


def load_pipeline(directory: Path, **kwargs: Any) -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(directory, dtype=torch.bfloat16, **NO_TOKENIZERS, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def quantized_parts(pipe: FluxPipeline) -> set[str]:
    return {
        name
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module) and any(isinstance(m, QuantizedModule) for m in part.modules())
    }


# Loading and saving.


def test_another_pipeline_of_the_same_parts(pipeline_dir):
    config = PipelineQuantizationConfig(quant_mapping={"transformer": QuantizerConfig("int8")})
    pipe = load_pipeline(pipeline_dir, quantization_config=config)
    expected = run_pipeline(pipe)
    again = diffusers.FluxPipeline.from_pipe(pipe, dtype=torch.bfloat16)
    assert again.transformer is pipe.transformer
    assert torch.equal(run_pipeline(again.to("cpu", torch.bfloat16).to(torch.bfloat16)), expected)
    with pytest.raises(ValueError, match="from_pipe casts to float32 unless it is given dtype=torch.bfloat16"):
        diffusers.FluxPipeline.from_pipe(pipe)
    pipe = load_pipeline(pipeline_dir)
    quantize_(pipe.text_encoder, "int8")
    with pytest.raises(ValueError, match="from_pipe casts to float32 unless it is given dtype=torch.bfloat16"):
        diffusers.FluxPipeline.from_pipe(pipe)


@pytest.mark.parametrize(
    ("arguments", "parts", "bounds"),
    [
        (
            {
                "quant_backend": "hf_quant",
                "quant_kwargs": {"weights": "fp8", "activations": "fp8"},
                "components_to_quantize": ["transformer", "text_encoder_2"],
            },
            {"transformer", "text_encoder_2"},
            (20, 50),
        ),
        (
            {"quant_backend": "hf_quant", "quant_kwargs": {"weights": "int8"}},  # the VAE gets the config, too
            {"transformer", "text_encoder", "text_encoder_2"},
            (30, 60),
        ),
        (
            {
                "quant_mapping": {
                    "transformer": QuantizerConfig("int4"),
                    "text_encoder_2": QuantizerConfig("W8A8"),
                    "vae": QuantizerConfig(None, modules={"decoder.*.conv1": "int8"}),
                }
            },
            {"transformer", "text_encoder_2", "vae"},
            (20, 45),
        ),
    ],
    ids=["components", "everything", "mapping"],
)
def test_quantized_pipeline_saves_and_reloads(pipeline_dir, tmp_path, arguments, parts, bounds):
    pipe = load_pipeline(pipeline_dir, quantization_config=PipelineQuantizationConfig(**arguments))
    assert quantized_parts(pipe) == parts
    image = run_pipeline(pipe)
    assert_sqnr(image, run_pipeline(load_pipeline(pipeline_dir)), at_least=bounds[0], at_most=bounds[1])
    pipe.save_pretrained(tmp_path, max_shard_size="60KB")
    again = load_pipeline(tmp_path)
    assert quantized_parts(again) == parts
    assert torch.equal(run_pipeline(again), image)


class WithConvolutions(diffusers.DiffusionPipeline):
    """A pipeline with parts of convolutions alone, of both libraries."""

    def __init__(self, transformer: nn.Module, adapter: nn.Module, vocoder: nn.Module) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, adapter=adapter, vocoder=vocoder)


def test_parts_with_nothing_to_quantize(tmp_path, caplog):
    upsampling = {"upsample_initial_channel": 4, "upsample_rates": [2], "upsample_kernel_sizes": [4]}
    vocoder = transformers.SpeechT5HifiGanConfig(model_in_dim=4, **upsampling)
    WithConvolutions(
        transformer=make_model("flux"),
        adapter=diffusers.T2IAdapter(channels=[4], num_res_blocks=1),
        vocoder=transformers.SpeechT5HifiGan(vocoder),
    ).save_pretrained(tmp_path / "plain")
    config = {"quant_backend": "hf_quant", "quant_kwargs": {"weights": "int8", "attention": "int8"}}
    load = partial(WithConvolutions.from_pretrained, dtype=torch.float32)
    pipe = load(tmp_path / "plain", quantization_config=PipelineQuantizationConfig(**config))
    assert quantized_parts(pipe) == {"transformer"}
    assert "attention is 'int8', but T2IAdapter has none that can be in 8 bit: it stays in 16 bit" in caplog.text
    for name in ("T2IAdapter", "SpeechT5HifiGan"):
        assert re.search(f"nothing to quantize in {name}: conv: only if named .*; it stays in 16 bit", caplog.text)
    pipe.save_pretrained(tmp_path / "quantized")
    for part in ("adapter", "vocoder"):
        assert not getattr(pipe, part).half().is_quantized
        assert "quantization_config" not in (tmp_path / "quantized" / part / "config.json").read_text()
    again = load(tmp_path / "quantized", quantization_config=PipelineQuantizationConfig(**config))
    assert quantized_parts(again) == {"transformer"}
    named = PipelineQuantizationConfig(**config, components_to_quantize=["adapter"])
    with pytest.raises(ValueError, match="T2IAdapter is no diffusion model whose attention could be in 8 bit"):
        load(tmp_path / "plain", quantization_config=named)
    for part, cls in (("adapter", diffusers.T2IAdapter), ("vocoder", transformers.SpeechT5HifiGan)):
        with pytest.raises(ValueError, match="nothing to quantize"):
            cls.from_pretrained(tmp_path / "plain" / part, quantization_config=QuantizerConfig("int8"))


def test_a_part_of_several_models_with_nothing_to_quantize(tmp_path, caplog):
    adapter = diffusers.MultiAdapter([diffusers.T2IAdapter(channels=[4], num_res_blocks=1) for _ in range(2)])
    WithConvolutions(make_model("flux"), adapter, make_model("flux")).save_pretrained(tmp_path)
    config = PipelineQuantizationConfig(quant_backend="hf_quant", quant_kwargs={"weights": "int8"})
    pipe = WithConvolutions.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    assert quantized_parts(pipe) == {"transformer", "vocoder"}
    assert caplog.text.count("nothing to quantize in T2IAdapter") == 2


def test_errors_of_pipelines(pipeline_dir):
    config = PipelineQuantizationConfig(quant_backend="hf_quant", quant_kwargs={"weight": "int8"})
    with pytest.raises(ValueError, match="unknown field 'weight'; did you mean 'weights'"):
        load_pipeline(pipeline_dir, quantization_config=config)
    pipe = load_pipeline(pipeline_dir)
    quantize_(pipe.transformer, "int8")
    with pytest.raises(ValueError, match="Casting a quantized model"):
        pipe.to(torch.float32)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])  # the host casts parts in an order that varies
def test_a_cast_that_one_part_refuses_changes_no_other(pipeline_dir, part):
    pipe = load_pipeline(pipeline_dir)
    quantize_(getattr(pipe, part), "int8")
    casts = ((torch.float32,), {}), ((), {"dtype": torch.float32}), (("cpu", torch.float32), {})
    for args, kwargs in casts:
        with pytest.raises(ValueError, match=r"[Cc]asting .*dequantize\(\) it first"):
            pipe.to(*args, **kwargs)
    assert {p.dtype for p in pipe.components.values() if isinstance(p, nn.Module)} == {torch.bfloat16}
