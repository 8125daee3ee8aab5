"""LoRA weights in pipelines with quantized transformers and UNets: load, scale, swap, fuse, unload, train, compile."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_quant import QuantizerConfig, fuse_projections_, quantize_
from hf_quant.modules import QuantizedModule, QuantLinear
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")
pytest.importorskip("peft", reason="peft is an optional host")

from diffusers import FluxPipeline  # noqa: E402
from peft import LoraConfig  # noqa: E402

from integration_tests.support.tiny_diffusion import (  # noqa: E402
    assert_same_bytes,
    make_flux_pipeline,
    make_inputs,
    make_model,
    run,
)


# Every mixin of the host has its own way to load: {architecture: (pipeline, the part that is adapted)}.
PIPELINES = {
    "flux": ("FluxPipeline", "transformer"),
    "flux2": ("Flux2Pipeline", "transformer"),
    "sd3": ("StableDiffusion3Pipeline", "transformer"),
    "qwen_image": ("QwenImagePipeline", "transformer"),
    "lumina2": ("Lumina2Pipeline", "transformer"),
    "cogvideox": ("CogVideoXPipeline", "transformer"),
    "wan": ("WanPipeline", "transformer"),
    "hunyuan_video": ("HunyuanVideoPipeline", "transformer"),
    "ltx": ("LTXPipeline", "transformer"),
    "unet": ("StableDiffusionPipeline", "unet"),
    "sdxl": ("StableDiffusionXLPipeline", "unet"),
}


def pipeline_of(name: str, config: str | None, **changes: Any) -> Any:
    """A pipeline of an architecture that has nothing but this one model, quantized if a config is given."""
    cls, part = PIPELINES[name]
    model = make_model(name, **changes)
    if config is not None:
        quantize_(model, config)
    parameters = list(inspect.signature(getattr(diffusers, cls).__init__).parameters.values())[1:]
    components = dict.fromkeys(p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD)
    scheduler = "FlowMatchEulerDiscreteScheduler" if part == "transformer" else "EulerDiscreteScheduler"
    components |= {part: model, "scheduler": getattr(diffusers, scheduler)()}
    return getattr(diffusers, cls)(**components)


def adapted(name: str, pipe: Any) -> nn.Module:
    return getattr(pipe, PIPELINES[name][1])


def adapter_for(name: str, rank: int = 4, seed: int = 0, kinds: Any = nn.Linear) -> dict[str, Tensor]:
    """Random LoRA weights for every third layer of the blocks of an architecture, under the names of files."""
    generator, model, weights = torch.Generator().manual_seed(seed), make_model(name), {}
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds) and n.count(".") > 1]
    for layer_name, layer in layers[::3]:
        out_features, *rest = layer.weight.shape
        down = torch.randn(rank, *rest, generator=generator)
        up = torch.randn(out_features, rank, *[1] * (len(rest) - 1), generator=generator)
        key = f"{PIPELINES[name][1]}.{layer_name}"
        weights[f"{key}.lora_A.weight"] = down * down[0].numel() ** -0.5
        weights[f"{key}.lora_B.weight"] = up * 0.3
    return weights


# Flux, whose adapters may be narrower or wider than the layers.


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


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("flux", ["to_q", "proj_mlp"]),
        ("qwen_image", ["to_q", "to_out.0"]),
        ("wan", ["to_q", "to_out.0"]),
        ("unet", ["to_k", "proj"]),
    ],
)
def test_an_adapter_trains(name, targets):
    model = quantize_(make_model(name), "W8A8").requires_grad_(False)
    adapted_layers = [key for key, _ in model.named_modules() if key.endswith(tuple(f".{t}" for t in targets))]
    model.add_adapter(LoraConfig(r=4, target_modules=targets))
    model.enable_gradient_checkpointing()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    model.train()
    for _ in range(6):
        loss = model(**make_inputs(name)).sample.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(trained) == 2 * len(adapted_layers) > 0 and losses[-1] < 0.9 * losses[0]


def test_a_model_with_adapters_is_not_saved(tmp_path):
    model = quantize_(make_model("flux"), "int8")
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
    with pytest.raises(ValueError, match=r"attn.to_q has adapters, .*unload_lora"):
        model.save_pretrained(tmp_path / "adapted")
    model.unload_lora()
    model.save_pretrained(tmp_path)
    assert_same_bytes(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict())


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


# Every loader of the host.


# {weights: SQNR in dB of the quantized model with an adapter, to the same in fp32; of fused to not fused}: fusing
# rounds the sum of weight and adapter to the grid of the weight.
LORA_BOUNDS = {"int8": ((26, 65), (30, 70)), "W8A8": ((26, 52), (26, 65)), "int4": ((10, 32), (20, 40))}


@pytest.mark.parametrize(("name", "weights"), [*((n, "int8") for n in PIPELINES), ("flux", "W8A8"), ("flux", "int4")])
def test_every_loader(tmp_path, name, weights):
    plain, pipe = pipeline_of(name, None), pipeline_of(name, weights)
    to_fp32, to_unfused = LORA_BOUNDS[weights]
    reference, model = adapted(name, plain), adapted(name, pipe)
    base, codes = run(model, name), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    outputs: dict[str, Tensor] = {}

    def both(what: str) -> None:
        outputs[what] = run(model, name)
        assert_sqnr(outputs[what], run(reference, name), at_least=to_fp32[0], at_most=to_fp32[1], name=what)

    for p in (plain, pipe):  # fresh tensors each time: the layers take them over, and swapping writes there
        p.load_lora_weights(adapter_for(name), adapter_name="a")
    both("loaded")
    assert_sqnr(outputs["loaded"], base, at_least=-5, at_most=24)  # the adapter matters
    for p in (plain, pipe):
        p.set_adapters("a", 0.5)
    both("scaled")
    for p in (plain, pipe):
        p.set_adapters("a", 1.0)
        p.load_lora_weights(adapter_for(name, seed=1), adapter_name="a", hotswap=True)
    both("swapped")
    for p in (plain, pipe):
        p.load_lora_weights(adapter_for(name, rank=2, seed=2), adapter_name="b")
        p.set_adapters(["a", "b"], [0.3, 0.7])
    both("combined")
    for one, other in (("loaded", "scaled"), ("loaded", "swapped"), ("swapped", "combined")):
        assert_sqnr(outputs[one], outputs[other], at_least=-5, at_most=25)
    pipe.delete_adapters("a")
    pipe.disable_lora()
    assert torch.equal(run(model, name), base)
    pipe.unload_lora_weights()
    assert_same_bytes(model.state_dict(), codes)

    pipe.load_lora_weights(adapter_for(name))
    pipe.fuse_lora(components=[PIPELINES[name][1]], safe_fusing=True)
    pipe.unload_lora_weights()
    assert_sqnr(run(model, name), outputs["loaded"], at_least=to_unfused[0], at_most=to_unfused[1])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert_same_bytes(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["wan", "unet"])
def test_a_model_saves_and_loads_its_own_adapter(tmp_path, name):
    model, again = quantize_(make_model(name), "int8"), quantize_(make_model(name), "int8")
    base = run(model, name)
    model.add_adapter(LoraConfig(target_modules=["to_q", "to_v"], init_lora_weights=False))
    y = run(model, name)
    assert_sqnr(y, base, at_least=-5, at_most=24)
    model.save_lora_adapter(tmp_path)
    again.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True)
    assert torch.equal(run(again, name), y)


@pytest.mark.parametrize("name", ["cogvideox", "sdxl"])
def test_files_and_unfusing(tmp_path, name):
    cls, part = PIPELINES[name]
    pipe = pipeline_of(name, "W8A8")
    model = adapted(name, pipe)
    base = run(model, name)
    layers = {key.removeprefix(f"{part}."): value for key, value in adapter_for(name).items()}
    getattr(diffusers, cls).save_lora_weights(tmp_path, **{f"{part}_lora_layers": layers})
    pipe.load_lora_weights(tmp_path, adapter_name="a", low_cpu_mem_usage=True)
    loaded = run(model, name)
    pipe.unload_lora_weights()
    pipe.load_lora_weights(adapter_for(name), adapter_name="a")
    assert torch.equal(run(model, name), loaded)
    pipe.fuse_lora(components=[part])
    assert_sqnr(run(model, name), base, at_least=-5, at_most=24)
    pipe.unfuse_lora(components=[part])
    pipe.unload_lora_weights()
    assert_sqnr(run(model, name), base, at_least=26, at_most=70)


def test_scales_of_single_blocks_and_convolutions():
    config = QuantizerConfig("int8", modules={"re:.*conv[12]": "int8", "re:.*proj_(in|out)": "int8"})
    plain, pipe = pipeline_of("unet", None), pipeline_of("unet", config)
    assert isinstance(pipe.unet.mid_block.resnets[0].conv1, QuantizedModule)
    weights = adapter_for("unet", kinds=(nn.Linear, nn.Conv2d))
    assert any(value.dim() == 4 for value in weights.values())
    for p in (plain, pipe):
        p.load_lora_weights({key: value.clone() for key, value in weights.items()}, adapter_name="a")
    whole = run(pipe.unet, "unet")
    assert_sqnr(whole, run(plain.unet, "unet"), at_least=22, at_most=55)
    for p in (plain, pipe):
        p.set_adapters("a", {"unet": {"down": 0.1, "mid": 0.5, "up": {"block_1": [0.9, 0.3]}}})
    assert_sqnr(run(pipe.unet, "unet"), run(plain.unet, "unet"), at_least=22, at_most=55)
    assert_sqnr(run(pipe.unet, "unet"), whole, at_least=-5, at_most=25)


@pytest.mark.parametrize("name", ["flux", "wan", "sdxl"])
@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_loading_while_offloaded(name, offload_type):
    pipe, offloaded = pipeline_of(name, "int8"), pipeline_of(name, "int8")
    model, cpu = adapted(name, offloaded), torch.device("cpu")
    model.enable_group_offload(cpu, cpu, offload_type=offload_type, num_blocks_per_group=1)
    base = run(model, name)
    for p in (pipe, offloaded):
        p.load_lora_weights(adapter_for(name), adapter_name="a")
    assert torch.equal(run(model, name), run(adapted(name, pipe), name))
    offloaded.unload_lora_weights()
    assert torch.equal(run(model, name), base)


@pytest.mark.parametrize(("name", "weights", "is_fused"), [("wan", "W8A8", False), ("unet", "int4", True)])
def test_hot_swapping_compiles_nothing_new(name, weights, is_fused):
    pipe = pipeline_of(name, weights)
    model = adapted(name, pipe)
    if is_fused:
        fuse_projections_(model)
    pipe.enable_lora_hotswap(target_rank=8)
    counters, graphs, outputs = torch._dynamo.utils.counters, [], []
    for seed, rank in enumerate((4, 8, 2)):
        pipe.load_lora_weights(adapter_for(name, rank, seed), adapter_name="a", hotswap=seed > 0)
        if not seed:
            model.compile_repeated_blocks(fullgraph=True, backend="eager")
        outputs.append(run(model, name))
        graphs.append(counters["stats"]["unique_graphs"])
        eager = pipeline_of(name, weights)
        eager.load_lora_weights(adapter_for(name, rank, seed))
        assert_sqnr(outputs[-1], run(adapted(name, eager), name), at_least=40, at_most=float("inf"))
    assert graphs[0] > 0 and graphs == graphs[:1] * 3 and not counters["graph_break"]
    assert_sqnr(outputs[0], outputs[1], at_least=-5, at_most=25)
