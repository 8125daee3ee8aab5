"""Offloading and placement of diffusion models and pipelines: exact, and the codes are really elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_quant import QuantizerConfig, fuse_projections_, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.modules.inputs import rule
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")
group_offloading = pytest.importorskip("diffusers.hooks.group_offloading", reason="comes with diffusers")

import accelerate  # noqa: E402
from diffusers import FluxPipeline, PipelineQuantizationConfig  # noqa: E402

from integration_tests.support.stand_in_accelerator import Accelerator, enable_group_offload  # noqa: E402
from integration_tests.support.tiny_diffusion import (  # noqa: E402
    NO_TOKENIZERS,
    assert_same_bytes,
    load,
    make_flux_pipeline,
    make_model,
    quantized_names,
    run,
)
from integration_tests.support.tiny_diffusion import run_flux_pipeline as run_pipeline  # noqa: E402


CPU = torch.device("cpu")
SCHEMES = {
    "int4": QuantizerConfig("int4"),
    "W8A8": QuantizerConfig("W8A8"),
    "W8A8-fused": QuantizerConfig("W8A8", fuse_projections=True),
}


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory) -> Path:
    """Directory of a tiny Flux pipeline in bf16."""
    directory = tmp_path_factory.mktemp("pipeline")
    make_flux_pipeline(torch.bfloat16).save_pretrained(directory)
    return directory


def load_pipeline(directory: Path, scheme: str, **kwargs: Any) -> FluxPipeline:
    """The transformer quantized by one of SCHEMES, the text encoder T5 in int8."""
    configs = {"transformer": SCHEMES[scheme], "text_encoder_2": QuantizerConfig("int8")}
    config = PipelineQuantizationConfig(quant_mapping=configs)
    pipe = FluxPipeline.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=config, **NO_TOKENIZERS, **kwargs
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def codes(pipe: FluxPipeline) -> list[Tensor]:
    return [m.qdata for m in pipe.transformer.modules() if isinstance(m, QuantizedModule)]


# What the CPU can do itself.


def _model(pipe: FluxPipeline, path: Path) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def _group(offload_type: str, to_disk: bool = False) -> Callable:
    def offload(pipe: FluxPipeline, path: Path) -> None:
        pipe.transformer.enable_group_offload(
            CPU,
            CPU,
            offload_type=offload_type,
            num_blocks_per_group=1,
            offload_to_disk_path=str(path) if to_disk else None,
        )
        if to_disk:
            assert list(path.glob("*.safetensors"))

    return offload


def _group_of_pipeline(offload_type: str) -> Callable:
    def offload(pipe: FluxPipeline, path: Path) -> None:
        pipe.enable_group_offload(CPU, CPU, offload_type=offload_type, num_blocks_per_group=1)
        for model in (pipe.transformer, pipe.text_encoder_2):
            assert group_offloading._is_group_offload_enabled(model)

    return offload


def _sequential(pipe: FluxPipeline, path: Path) -> None:
    to_cpu = accelerate.cpu_offload
    with pytest.MonkeyPatch.context() as patch:
        # The host says "cpu:0", which accelerate takes for another device than "cpu", quantized or not.
        patch.setattr(
            accelerate,
            "cpu_offload",
            lambda model, _, offload_buffers: to_cpu(model, CPU, offload_buffers),
        )
        pipe.enable_sequential_cpu_offload(device="cpu")
    assert {p.device.type for p in codes(pipe)} == {"meta"}


def _accelerate(to_disk: bool) -> Callable:
    def offload(pipe: FluxPipeline, path: Path) -> None:
        if to_disk:
            accelerate.disk_offload(pipe.transformer, str(path), execution_device="cpu")
        else:
            accelerate.cpu_offload(pipe.transformer, execution_device="cpu")
        assert {p.device.type for p in pipe.transformer.parameters()} == {"meta"}

    return offload


OFFLOADS = {
    "model": _model,
    "sequential": _sequential,
    "group-leaf": _group("leaf_level"),
    "group-block": _group("block_level"),
    "group-leaf-disk": _group("leaf_level", to_disk=True),
    "group-block-disk": _group("block_level", to_disk=True),
    "pipeline-leaf": _group_of_pipeline("leaf_level"),
    "pipeline-block": _group_of_pipeline("block_level"),
    "accelerate": _accelerate(to_disk=False),
    "accelerate-disk": _accelerate(to_disk=True),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("how", OFFLOADS)
def test_offloading_is_exact(pipeline_dir, tmp_path, how, scheme):
    pipe, offloaded = (load_pipeline(pipeline_dir, scheme) for _ in range(2))
    OFFLOADS[how](offloaded, tmp_path)
    # One step: from the second use of a weight another kernel may serve, and a weight that was moved is a new one.
    assert torch.equal(run_pipeline(offloaded, steps=1), run_pipeline(pipe, steps=1))
    assert torch.equal(run_pipeline(offloaded, steps=1), run_pipeline(pipe, steps=1))


def test_from_one_offloading_to_another(pipeline_dir):
    pipe, offloaded = (load_pipeline(pipeline_dir, "W8A8-fused") for _ in range(2))
    expected = run_pipeline(pipe)
    for enable in (_model, _sequential, _model):
        enable(offloaded, Path())
        assert torch.equal(run_pipeline(offloaded), expected)
        offloaded.remove_all_hooks()
    assert_same_bytes(offloaded.transformer.state_dict(), pipe.transformer.state_dict())
    offloaded.to("cpu")
    assert torch.equal(run_pipeline(offloaded), expected)


def test_saving_while_offloaded(tmp_path):
    model = quantize_(make_model("flux", torch.bfloat16), "int4")
    output, state = run(model, "flux"), {k: v.clone() for k, v in model.state_dict().items()}
    model.enable_group_offload(CPU, CPU, offload_type="leaf_level")
    run(model, "flux")
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_bytes(again.state_dict(), state)
    assert torch.equal(run(again, "flux"), output)


@pytest.mark.parametrize("device_map", ["balanced", "cpu"])
def test_device_map_of_a_pipeline(pipeline_dir, tmp_path, monkeypatch, device_map):
    # "balanced" leaves CPUs out; under this name it takes the only one for an accelerator.
    monkeypatch.setattr("diffusers.pipelines.pipeline_loading_utils.get_max_memory", lambda _: {CPU: 10**9})
    pipe, plain = load_pipeline(pipeline_dir, "int4", device_map=device_map), load_pipeline(pipeline_dir, "int4")
    placed = pipe.hf_device_map if device_map == "balanced" else dict.fromkeys(("transformer", "vae"), CPU)
    assert {placed["transformer"], placed["vae"]} == {CPU}
    assert quantized_names(pipe.transformer) == quantized_names(plain.transformer) != set()
    assert torch.equal(run_pipeline(pipe), run_pipeline(plain))
    pipe.save_pretrained(tmp_path)
    again = FluxPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map=device_map, **NO_TOKENIZERS)
    assert_same_bytes(again.transformer.state_dict(), plain.transformer.state_dict())
    if device_map == "balanced":
        again.reset_device_map()
        again.to("cpu")
    assert torch.equal(run_pipeline(again), run_pipeline(plain))


# Group offloading to an accelerator, which a stand-in plays.


TRANSFERS = {
    "plain": {"use_stream": False, "record_stream": False},
    "stream": {"use_stream": True, "record_stream": False},
    "record": {"use_stream": True, "record_stream": True},
    "record-little-memory": {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": True},
}


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
@pytest.mark.parametrize(
    ("name", "weights", "is_fused"),
    [
        ("flux", "int4", False),
        ("flux", "W8A8", True),
        ("cogvideox", "W8A8_FP8", False),
        ("wan", "int8", True),
        ("unet", "nf4", True),
    ],
)
def test_streamed_group_offloading(monkeypatch, name, weights, is_fused, offload_type, transfer):
    model = quantize_(make_model(name, torch.bfloat16), weights)
    if is_fused:
        fuse_projections_(model)
    expected, state = run(model, name), {k: v.clone() for k, v in model.state_dict().items()}
    arguments = TRANSFERS[transfer]
    with Accelerator().installed(monkeypatch) as accelerator:
        enable_group_offload(model, offload_type, **arguments)
        names = {id(p): key for key, p in model.named_parameters()}
        for _ in range(3):  # the second learns the order, the third prefetches
            assert torch.equal(run(model, name), expected)
            # Streams find the copies in pinned memory by the parameter object.
            assert {id(p): key for key, p in model.named_parameters()} == names
        assert_same_bytes(model.state_dict(), state)
    assert accelerator.onloaded >= 3 * len(names)
    assert (accelerator.pinned > 0) == arguments["use_stream"]
    assert (accelerator.recorded > 0) == arguments["record_stream"]


FUSED = QuantizerConfig("W8A8", fuse_activations=True)


@pytest.mark.parametrize("name", ["flux", "sdxl", "pixart"])
def test_norms_whose_weights_are_offloaded_before_they_are_computed(name):
    model = quantize_(make_model(name, torch.bfloat16), FUSED)
    expected = run(model, name)
    accelerate.cpu_offload(model, execution_device=CPU)
    y = run(model, name)  # its hooks ask for 16-bit inputs
    assert_sqnr(y, expected, at_least=25, at_most=70)
    assert torch.equal(run(model, name), y)


@pytest.mark.parametrize("transfer", ["plain", "stream"])
@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_group_offloading_with_fused_activations(monkeypatch, name, offload_type, transfer):
    model = quantize_(make_model(name, torch.bfloat16), FUSED)
    expected = run(model, name)
    with Accelerator().installed(monkeypatch):
        enable_group_offload(model, offload_type, **TRANSFERS[transfer])
        for _ in range(3):
            assert_sqnr(run(model, name), expected, at_least=25, at_most=float("inf"))


def test_the_stand_in_catches_what_outlives_its_group(monkeypatch):
    model = quantize_(make_model("flux", torch.bfloat16), "int8")
    layer, expected = model.transformer_blocks[0].attn.to_q, run(model, "flux")
    with Accelerator().installed(monkeypatch):
        enable_group_offload(model, "leaf_level", use_stream=True, record_stream=False)
        product, kept = rule.layer_product, []

        def stale(module: Any, x: Tensor, bias: Tensor | None, parameters: Any) -> Tensor:
            if module is layer:
                kept.append(dict(layer._parameters, qdata=layer.qdata.data))
                parameters = kept[0]
            return product(module, x, bias, parameters)

        monkeypatch.setattr(rule, "layer_product", stale)
        assert torch.equal(run(model, "flux"), expected)
        assert not torch.equal(run(model, "flux"), expected)
