"""Fused projections and captured decoding through the hosts: load, generate, save, reload, adapters, training."""

import hashlib
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, capture_generate, fuse_projections_, quantize_, unfuse_activations_
from hf_quant.integrations.transformers import TransformersQuantizer
from hf_quant.modules import QuantizedModule, QuantLinear
from hf_quant.tests.recording import Recorder
from integration_tests.support.tiny_models import ARCHITECTURES, build, inputs, outputs


IDS = inputs("llama")["input_ids"]


def load(path: Path, config: QuantizerConfig | None = None, **kwargs) -> nn.Module:
    kwargs = {"dtype": torch.bfloat16, **kwargs, **({} if config is None else {"quantization_config": config})}
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def generate(model: nn.Module, **kwargs) -> torch.Tensor:
    kwargs = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, **kwargs}
    return model.generate(IDS, **kwargs)


def fused(model: nn.Module) -> list[tuple[str, ...]]:
    """The groups of a model that share a product, in its order."""
    groups = (m.fused for m in model.modules() if isinstance(m, QuantLinear) and m.fused is not None)
    return [group.names for group in dict.fromkeys(groups) if group.common is not None]


def digests(directory: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in directory.glob("*.safetensors")}


@pytest.fixture(scope="module")
def asset(asset_model_dir) -> Path:
    return asset_model_dir


def test_from_pretrained_to_reload(asset, tmp_path):
    """Load and fuse, generate by replays, save, reload: the same files, tensors and tokens as without.

    Without native attention, as on a GPU: what is recorded are ops of torch.
    """
    model = load(asset, QuantizerConfig("int4", fuse_projections=True, fuse_activations=False))
    layers = model.config.num_hidden_layers
    assert fused(model) == [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")] * layers
    alone = load(asset, QuantizerConfig("int4", fuse_activations=False))
    assert not fused(alone)  # on a CPU
    error = (model(IDS).logits - alone(IDS).logits).norm() / alone(IDS).logits.norm()
    assert error < 1e-2  # more rows may take another path, whose sums are rounded otherwise
    static = {"cache_implementation": "static", "max_cache_len": 256}
    expected = generate(model, **static)
    recorder = Recorder()
    with capture_generate(model, backend=recorder) as graphs:
        for _ in range(2):
            assert torch.equal(generate(model), expected)
        assert recorder.captures == 1 and recorder.replays == 17 and not graphs.reasons
        assert sum("weight_only_mm" in op for op in recorder.ops) == 4 * layers
        model.save_pretrained(tmp_path / "fused", max_shard_size="2MB")
    alone.save_pretrained(tmp_path / "alone", max_shard_size="2MB")
    assert digests(tmp_path / "fused") == digests(tmp_path / "alone") != {}
    stored = json.loads((tmp_path / "fused" / "config.json").read_text())["quantization_config"]
    assert stored["fuse_projections"] is None and stored == alone.config.quantization_config.to_dict()
    again = unfuse_activations_(load(tmp_path / "fused"))
    assert not fused(again)
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    assert torch.equal(again(IDS).logits, alone(IDS).logits)
    assert torch.equal(generate(fuse_projections_(again), **static), expected)


def test_a_checkpoint_is_fused_as_the_user_says(asset, tmp_path, caplog):
    load(asset, QuantizerConfig("int8")).save_pretrained(tmp_path)
    model = load(tmp_path, QuantizerConfig("int8", fuse_projections=True))
    assert len(fused(model)) == 2 * model.config.num_hidden_layers
    assert model.config.quantization_config.fuse_projections is None
    moved = model.to("meta")
    assert not fused(moved)
    with caplog.at_level(logging.WARNING):
        assert not fused(load(tmp_path, QuantizerConfig("int8", fuse_projections=False)))
    assert "nothing to fuse" not in caplog.text


def test_loading_onto_a_gpu_fuses_by_itself(asset, monkeypatch):
    """There is no GPU here: what is asked for is seen, and answered for the CPU."""
    asked = []

    def fuse(model, *, only_on):
        asked.append((only_on, model.training, sum(isinstance(m, QuantizedModule) for m in model.modules())))
        return 0, ""

    monkeypatch.setattr("hf_quant.quantize.fuse_where_possible", fuse)
    layers = load(asset, QuantizerConfig("int4")).config.num_hidden_layers
    assert asked == [(("cuda", "xpu"), False, 7 * layers)]
    load(asset, QuantizerConfig("int4", fuse_projections=False))
    assert len(asked) == 1


def test_offloaded_layers_are_not_fused(asset, tmp_path, caplog):
    device_map = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    layers = json.loads((asset / "config.json").read_text())["num_hidden_layers"]
    device_map |= {f"model.layers.{i}": "disk" if i == 0 else "cpu" for i in range(layers)}
    config = QuantizerConfig("int8", fuse_projections=True)
    with caplog.at_level(logging.WARNING):
        model = load(asset, config, device_map=device_map, offload_folder=str(tmp_path))
    expected = load(asset, QuantizerConfig("int8"))
    assert not any(isinstance(m, QuantLinear) and m.fused for m in model.model.layers[0].modules())
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    with pytest.raises(ValueError, match="not loaded, or offloaded"):
        fuse_projections_(model.model.layers[0])


@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3_moe", "gpt_oss", "bert", "t5", "whisper", "vit", "llava", "qwen2_vl"]
)
def test_architectures_give_the_same_outputs(name):
    """Their views of the parts, which are strided for several tokens, work."""
    model = quantize_(build(name), "W8A8")
    expected = outputs(model, name)
    fuse_projections_(model)
    assert fused(model)
    error = (outputs(model, name) - expected).norm() / expected.norm()
    assert error < 1e-2


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if ARCHITECTURES[n].model.endswith("ForCausalLM")])
def test_architectures_generate_by_replays(name):
    model = quantize_(build(name, torch.float32), "int8")
    kwargs = {**inputs(name, torch.float32), "max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    static = {"cache_implementation": "static", "max_cache_len": 256} if model._can_compile_fullgraph else {}
    expected = model.generate(**kwargs, **static)
    recorder = Recorder()
    with capture_generate(model, backend=recorder) as graphs:
        assert torch.equal(model.generate(**kwargs), expected)
    assert recorder.replays == 8 if model._can_compile_fullgraph else graphs.reasons


def test_adapters():
    peft = pytest.importorskip("peft", reason="peft is an optional host")
    model = fuse_projections_(quantize_(build("llama", torch.float32), "int8"))
    alone = quantize_(build("llama", torch.float32), "int8")
    recorder, found, expected = Recorder(), [], []
    for base, results in ((alone, expected), (model, found)):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
        )
        adapted.train()
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        results += [p.grad for p in adapted.parameters() if p.grad is not None]
        adapted.eval()
        static = dict(cache_implementation="static", max_cache_len=256)
        if base is model:
            graphs = capture_generate(adapted, backend=recorder)
            static = {}
        results.append(generate(adapted, **static))
        with adapted.disable_adapter():
            results.append(generate(adapted, **static))
        results.append(generate(adapted, **static))
        adapted.merge_adapter()  # writes the codes through the rows
        results.append(generate(adapted, **static))
    assert len(found) == len(expected) > 4
    assert all(torch.equal(f, e) for f, e in zip(found, expected))
    assert not torch.equal(found[-4], found[-3])
    assert len(fused(model)) == 4 and recorder.captures == 4 and not graphs.reasons


def test_a_diffusers_model_keeps_its_files(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(torch.bfloat16).transformer.save_pretrained(tmp_path / "flux")
    models = {
        name: diffusers.FluxTransformer2DModel.from_pretrained(
            tmp_path / "flux",
            torch_dtype=torch.bfloat16,
            quantization_config=QuantizerConfig("W8A8", fuse_projections=setting),
        )
        for name, setting in (("fused", True), ("alone", None))
    }
    assert ("to_q", "to_k", "to_v") in fused(models["fused"]) and not fused(models["alone"])
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    assert digests(tmp_path / "fused") == digests(tmp_path / "alone") != {}
    torch.manual_seed(0)
    config, kwargs = models["fused"].config, dict(dtype=torch.bfloat16)
    arguments = dict(
        hidden_states=torch.randn(1, 16, config.in_channels, **kwargs),
        encoder_hidden_states=torch.randn(1, 8, config.joint_attention_dim, **kwargs),
        pooled_projections=torch.randn(1, config.pooled_projection_dim, **kwargs),
        timestep=torch.tensor([0.5], **kwargs),
        img_ids=torch.zeros(16, 3, **kwargs),
        txt_ids=torch.zeros(8, 3, **kwargs),
    )
    with torch.no_grad():
        found, expected = (models[name](**arguments)[0] for name in ("fused", "alone"))
    assert torch.allclose(found, expected, atol=2e-2 * float(expected.abs().max()))


def test_fields_of_the_load_do_not_reach_the_checkpoint():
    config = QuantizerConfig("int8", fuse_projections=True)
    model = quantize_(build("llama"), config)
    assert fused(model) and config.fuse_projections is True
    assert isinstance(model.hf_quantizer, TransformersQuantizer)
    assert model.config.quantization_config.fuse_projections is None
