"""Automatic bits on trained and tiny models: less KL than one format for all layers, as predicted."""

import copy

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, auto_plan, auto_plans, plan, quantize_
from hf_quant.evaluate import quality
from integration_tests.support import tiny_diffusion
from integration_tests.support.tiny_models import build


ASSET = "integration_tests/assets/tiny-llama-13m"


@pytest.fixture(scope="module")
def trained():
    model = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32)
    ids = torch.from_numpy(numpy.load(f"{ASSET}/val_ids.npy").astype("int64"))
    return model, ids[: 8 * 128], ids[-16 * 128 :].view(-1, 128)


def test_less_kl_than_one_format_for_all_layers(trained):
    model, ids, data = trained
    config = QuantizerConfig("auto", budget={"bits": 3.5})
    found = auto_plan(model, config, calibration=data)
    models = {
        "base": model,
        "int3": quantize_(copy.deepcopy(model), "int3"),
        "auto": quantize_(copy.deepcopy(model), config, quant_plan=found),
    }
    kl = {name: quality(models, ids, window=128, reference="base")[name].kl for name in models}
    assert kl["auto"] < 0.8 * kl["int3"]
    assert 0.6 < sum(found.scores.values()) / kl["auto"] < 1.5
    # The control: layers get the bits that another one needs.
    names = list(found.scores)
    others = dict(zip(names, [found.entries[n].scheme.weight.format for n in names[::-1]]))
    shuffled = QuantizerConfig(None, modules={name: format for name, format in others.items()})
    models["shuffled"] = quantize_(copy.deepcopy(model), shuffled)
    assert quality(models, ids, window=128, reference="base")["shuffled"].kl > 1.1 * kl["auto"]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gpt2", "bert", "vit", "phi3"])
def test_architectures(name):
    model = build(name, torch.float32)
    if name == "vit":
        data = [{"pixel_values": torch.randn(2, 3, model.config.image_size, model.config.image_size)}]
    else:
        data = torch.randint(3, 90, (4, 16))
    candidates = ["int2", "int4", "int8"]
    found = auto_plan(model, QuantizerConfig("auto", budget={"bits": 5.0}, candidates=candidates), calibration=data)
    assert found.is_kl and all(score >= 0 for score in found.scores.values())
    used = sum(found.entries[n].bytes_after for n in found.scores)
    assert used <= 5.0 * sum(found.entries[n].num_weights for n in found.scores) / 8


class TestDiffusers:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

    def test_a_denoiser_by_the_steps_of_its_pipeline(self, tmp_path):
        pipe = tiny_diffusion.make_flux_pipeline()
        config = QuantizerConfig("auto", budget={"bits": 5.0}, candidates=["int4", "int8"])
        quantize_(pipe.transformer, config, calibration=lambda model: tiny_diffusion.run_flux_pipeline(pipe, steps=2))
        expected = tiny_diffusion.run_flux_pipeline(pipe)
        pipe.save_pretrained(tmp_path)
        again = self.diffusers.FluxPipeline.from_pretrained(tmp_path, **tiny_diffusion.NO_TOKENIZERS)
        assert torch.equal(tiny_diffusion.run_flux_pipeline(again), expected)
        assert again.transformer.config.quantization_config.budget == {"bits": 5.0}

    def test_one_budget_for_all_models_of_a_pipeline(self):
        pipe = tiny_diffusion.make_flux_pipeline()
        parts = ("transformer", "text_encoder", "text_encoder_2")
        with torch.no_grad():  # the result of the pipeline hardly depends on what T5 writes
            pipe.transformer.context_embedder.weight.mul_(1e-3)
        expected = tiny_diffusion.run_flux_pipeline(pipe)
        config = QuantizerConfig("auto", budget={"bits": 5.0}, candidates=["int2", "int4", "int8"])
        found = auto_plans(pipe, config, calibration=tiny_diffusion.run_flux_pipeline)
        assert torch.equal(tiny_diffusion.run_flux_pipeline(pipe), expected)
        assert set(found) == set(parts) and all(each.is_kl is False for each in found.values())
        entries = [each.entries[name] for each in found.values() for name in each.scores]
        bits = 8 * sum(e.bytes_after for e in entries) / sum(e.num_weights for e in entries)
        assert 4.5 < bits <= 5.0
        assert found["text_encoder_2"].bits_per_weight < 2.6 < found["transformer"].bits_per_weight
        for name, each in found.items():
            quantize_(getattr(pipe, name), config, quant_plan=each)
        error = (tiny_diffusion.run_flux_pipeline(pipe) - expected).square().sum() / expected.square().sum()
        assert 0.1 < sum(each.loss for each in found.values()) / error < 10

        pipe = tiny_diffusion.make_flux_pipeline()
        run = tiny_diffusion.run_flux_pipeline
        other = sum(m.get_memory_footprint() for n, m in pipe.components.items() if n in (*parts[1:], "vae"))
        size = other + plan(pipe.transformer, "int4").nbytes
        config.budget = {"gb": size / 1e9}
        found = auto_plans(pipe, config, calibration=run, components=["transformer"])
        assert 0.98 * size < found["transformer"].nbytes + other <= size
        config.budget = {"gb": other / 1e9}
        with pytest.raises(ValueError, match=r"smallest candidates of the pipeline take 0.00\d+ GB"):
            auto_plans(pipe, config, calibration=run)
        config.budget = {"bits": 5.0}
        for options, message in (
            ({"components": ["unet"]}, "components names unet; the models of the pipeline are"),
            ({"calibration": lambda pipe: None}, "calibration returns no tensors"),
            ({"calibration": lambda pipe: torch.zeros(1)}, "does not run text_encoder, text_encoder_2, transformer"),
        ):
            with pytest.raises(ValueError, match=message):
                auto_plans(pipe, config, **{"calibration": run, **options})
        numbers = iter(range(9))
        with pytest.raises(ValueError, match="differs from run to run"):
            auto_plans(pipe, config, calibration=lambda pipe: run(pipe) + next(numbers))

    def test_a_denoiser_is_not_searched_while_it_loads(self, tmp_path):
        model = tiny_diffusion.make_model("flux")
        model.save_pretrained(tmp_path)
        config = QuantizerConfig("auto", budget={"bits": 5.0})
        with pytest.raises(ValueError, match="load it in 16 bit, then call hf_quant.quantize_"):
            type(model).from_pretrained(tmp_path, quantization_config=config)
