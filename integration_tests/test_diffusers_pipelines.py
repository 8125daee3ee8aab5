"""Pipelines of diffusers with quantized parts: loading, a new process, offloading, LoRA, compiled blocks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_quant import QuantizerConfig, quantize_
from hf_quant.modules import QuantizedModule, QuantLinear
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

import accelerate  # noqa: E402
from diffusers import FluxPipeline, PipelineQuantizationConfig  # noqa: E402
from peft import LoraConfig  # noqa: E402

from integration_tests.tiny_diffusion import (  # noqa: E402
    assert_same_bytes,
    make_flux_pipeline,
    make_inputs,
    make_model,
    run,
)
from integration_tests.tiny_diffusion import run_flux_pipeline as run_pipeline  # noqa: E402


NO_TOKENIZERS = {"tokenizer": None, "tokenizer_2": None}


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


def test_reload_in_a_new_process(pipeline_dir, tmp_path):
    configs = {"transformer": QuantizerConfig("W8A8"), "text_encoder_2": QuantizerConfig("int4")}
    pipe = load_pipeline(pipeline_dir, quantization_config=PipelineQuantizationConfig(quant_mapping=configs))
    pipe.save_pretrained(tmp_path)
    torch.save(run_pipeline(pipe), tmp_path / "image.pt")
    code = """
import sys
import hf_quant, torch
from integration_tests.test_diffusers_pipelines import load_pipeline, quantized_parts, run_pipeline
pipe = load_pipeline(sys.argv[1])
assert quantized_parts(pipe) == {"transformer", "text_encoder_2"}
assert torch.equal(run_pipeline(pipe), torch.load(sys.argv[1] + "/image.pt"))
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def test_errors_of_pipelines(pipeline_dir):
    config = PipelineQuantizationConfig(quant_backend="hf_quant", quant_kwargs={"weight": "int8"})
    with pytest.raises(ValueError, match="unknown field 'weight'; did you mean 'weights'"):
        load_pipeline(pipeline_dir, quantization_config=config)
    pipe = load_pipeline(pipeline_dir)
    quantize_(pipe.transformer, "int8")
    with pytest.raises(ValueError, match="Casting a quantized model"):
        pipe.to(torch.float32)


# Offloading: exact, and the codes are really elsewhere.


def _model_cpu_offload(pipe: FluxPipeline, path: Path) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def _group_offload(offload_type: str, to_disk: bool) -> Any:
    def offload(pipe: FluxPipeline, path: Path) -> None:
        cpu = torch.device("cpu")
        pipe.transformer.enable_group_offload(
            cpu,
            cpu,
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
            offload_to_disk_path=str(path) if to_disk else None,
        )
        if to_disk:
            assert list(path.glob("*.safetensors"))

    return offload


def _accelerate_cpu(pipe: FluxPipeline, path: Path) -> None:
    accelerate.cpu_offload(pipe.transformer, execution_device="cpu")
    assert {p.device.type for p in pipe.transformer.parameters()} == {"meta"}


def _accelerate_disk(pipe: FluxPipeline, path: Path) -> None:
    accelerate.disk_offload(pipe.transformer, str(path), execution_device="cpu")
    assert {p.device.type for p in pipe.transformer.parameters()} == {"meta"}


@pytest.mark.parametrize("weights", ["int4", "W8A8"])
@pytest.mark.parametrize(
    "offload",
    [
        _model_cpu_offload,
        _group_offload("leaf_level", False),
        _group_offload("block_level", False),
        _group_offload("leaf_level", True),
        _group_offload("block_level", True),
        _accelerate_cpu,
        _accelerate_disk,
    ],
    ids=["model", "group-leaf", "group-block", "group-leaf-disk", "group-block-disk", "accelerate", "accelerate-disk"],
)
def test_offloading_is_exact(pipeline_dir, tmp_path, offload, weights):
    config = PipelineQuantizationConfig(quant_mapping={"transformer": QuantizerConfig(weights)})
    pipe, offloaded = (load_pipeline(pipeline_dir, quantization_config=config) for _ in range(2))
    offload(offloaded, tmp_path)
    # One step: from the second use of a weight another kernel may serve, and a weight that was moved is a new one.
    assert torch.equal(run_pipeline(offloaded, steps=1), run_pipeline(pipe, steps=1))


# LoRA.


_ATTENTION = "transformer_blocks.0.attn"
TARGETS = (f"{_ATTENTION}.to_q", f"{_ATTENTION}.to_out.0", "single_transformer_blocks.0.proj_mlp")


def lora_weights(targets: tuple[str, ...] = TARGETS, rank: int = 4, **in_features: int) -> dict[str, Tensor]:
    """Random LoRA weights for layers of the tiny Flux, as `load_lora_weights` takes them."""
    generator, model = torch.Generator().manual_seed(0), make_model("flux")
    weights = {}
    for name in targets:
        layer = model.get_submodule(name)
        width = in_features.get(name, layer.in_features)
        down = torch.randn(rank, width, generator=generator) * width**-0.5
        weights[f"transformer.{name}.lora_A.weight"] = down
        weights[f"transformer.{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * 0.3
    return weights


def flux(config: QuantizerConfig | None = None) -> FluxPipeline:
    """A tiny Flux pipeline in fp32, its transformer quantized if a config is given."""
    pipe = make_flux_pipeline()
    if config is not None:
        quantize_(pipe.transformer, config)
    return pipe


def transformer_output(pipe: FluxPipeline) -> Tensor:
    return run(pipe.transformer, "flux")


# {weights: SQNR in dB of the quantized model with an adapter, to the same in fp32; of fused to not fused}: fusing
# rounds the sum of weight and adapter to the grid of the weight.
LORA_BOUNDS = {"int8": ((30, 55), (30, 70)), "W8A8": ((26, 52), (26, 65)), "int4": ((10, 32), (12, 40))}


@pytest.mark.parametrize("weights", LORA_BOUNDS)
def test_lora(tmp_path, weights):
    plain, base = flux(), transformer_output(flux(QuantizerConfig(weights)))
    plain.load_lora_weights(lora_weights())
    expected = transformer_output(plain)
    assert_sqnr(expected, transformer_output(flux()), at_least=0, at_most=20)  # the adapter matters

    pipe = flux(QuantizerConfig(weights))
    codes = {key: tensor.clone() for key, tensor in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(lora_weights())
    assert not [key for key in pipe.transformer.state_dict() if key.endswith("base_layer.weight")]
    with_adapter = transformer_output(pipe)
    to_fp32, to_unfused = LORA_BOUNDS[weights]
    assert_sqnr(with_adapter, expected, at_least=to_fp32[0], at_most=to_fp32[1])
    pipe.set_adapters("default_0", 0.0)
    assert_sqnr(transformer_output(pipe), base, at_least=60, at_most=float("inf"))
    pipe.unload_lora_weights()
    assert_same_bytes(pipe.transformer.state_dict(), codes)

    pipe.load_lora_weights(lora_weights())
    pipe.fuse_lora(safe_fusing=True)
    pipe.unload_lora_weights()
    fused = transformer_output(pipe)
    assert_sqnr(fused, with_adapter, at_least=to_unfused[0], at_most=to_unfused[1])
    pipe.transformer.save_pretrained(tmp_path)
    again = type(pipe.transformer).from_pretrained(tmp_path)
    assert_same_bytes(again.state_dict(), pipe.transformer.state_dict())


def test_unfusing_returns_up_to_rounding():
    pipe = flux(QuantizerConfig("int8"))
    base = transformer_output(pipe)
    pipe.load_lora_weights(lora_weights())
    pipe.fuse_lora()
    assert_sqnr(transformer_output(pipe), base, at_least=0, at_most=20)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert_sqnr(transformer_output(pipe), base, at_least=30, at_most=70)


def test_adapters_are_swapped_and_combined():
    plain, pipe, outputs = flux(), flux(QuantizerConfig("int8")), {}
    for p in (plain, pipe):
        # Fresh tensors each time: the layers take them over as they are, and swapping writes into them.
        p.load_lora_weights(lora_weights(), adapter_name="a")
        halved = {key: value * (-0.5 if "lora_B" in key else 1) for key, value in lora_weights().items()}
        p.load_lora_weights(halved, adapter_name="a", hotswap=True)
        outputs[p, "swapped"] = transformer_output(p)
        p.load_lora_weights(lora_weights(), adapter_name="b")
        p.set_adapters(["a", "b"], [0.3, 0.7])
        outputs[p, "combined"] = transformer_output(p)
    for what in ("swapped", "combined"):
        assert_sqnr(outputs[pipe, what], outputs[plain, what], at_least=30, at_most=55)
    assert_sqnr(outputs[pipe, "swapped"], outputs[pipe, "combined"], at_least=0, at_most=25)


def test_an_adapter_trains():
    model = quantize_(make_model("flux"), "W8A8").requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "proj_mlp"]))
    model.enable_gradient_checkpointing()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    model.train()
    for _ in range(6):
        loss = model(**make_inputs("flux")).sample.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(trained) == 6 and losses[-1] < 0.9 * losses[0]


def test_lora_of_other_widths(tmp_path, caplog):
    config = QuantizerConfig("int8", modules={"x_embedder": "int8"})
    narrow = lora_weights(("x_embedder", *TARGETS), x_embedder=2)
    plain, pipe = flux(), flux(config)
    for p in (plain, pipe):
        p.load_lora_weights(dict(narrow))  # padded with zeros
    assert pipe.transformer.x_embedder.lora_A["default_0"].weight[:, 2:].eq(0).all()
    assert_sqnr(transformer_output(pipe), transformer_output(plain), at_least=30, at_most=55)

    wide = lora_weights(("x_embedder", *TARGETS), x_embedder=8)  # as a control adapter, which adds input channels
    inputs = make_inputs("flux")
    inputs["hidden_states"] = inputs["hidden_states"].repeat(1, 1, 2)
    plain, pipe, outputs = flux(), flux(config), []
    for p in (plain, pipe):
        p.load_lora_weights(dict(wide))
        with torch.no_grad():
            outputs.append(p.transformer(**inputs).sample)
        p.unload_lora_weights(reset_to_overwritten_params=True)
    assert_sqnr(outputs[1], outputs[0], at_least=30, at_most=55)
    assert "x_embedder: in 16 bit from now on" in caplog.text
    assert type(pipe.transformer.x_embedder) is nn.Linear
    pipe.transformer.save_pretrained(tmp_path)
    again = type(pipe.transformer).from_pretrained(tmp_path)
    assert type(again.x_embedder) is nn.Linear and isinstance(again.transformer_blocks[0].attn.to_q, QuantLinear)


# Compilation.


@pytest.mark.parametrize(("weights", "backend"), [("int8", "eager"), ("W8A8_FP8", "aot_eager"), ("int4", "aot_eager")])
def test_compiled_blocks(weights, backend):
    expected = run(quantize_(make_model("flux", torch.bfloat16), weights), "flux")
    model = quantize_(make_model("flux", torch.bfloat16), weights)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_repeated_blocks(fullgraph=True, backend=backend)
    assert torch.equal(run(model, "flux"), expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == len(model._repeated_blocks) == 2
    run(model, "flux")
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
