"""Calibration of models of transformers and diffusers: every layer of a plan sees data, and GPTQ gains by it."""

import pytest
import torch
from torch import nn

import hf_quant
from hf_quant import Calibration, QuantizerConfig, calibrate, quantize_
from hf_quant.modules import PACKED_NAMES, QuantizedModule
from integration_tests.support import tiny_diffusion, tiny_models


INT3 = QuantizerConfig("int3", algorithm="gptq")
TRANSFORMERS = ("gemma3", "qwen3_moe", "gpt_oss", "gpt2", "bert", "t5", "whisper", "vit", "llava", "mamba")
FEW_TOKENS = ("vit", "llava")  # fewer than a layer has inputs: the error falls, but not by much
DIFFUSERS = ("flux", "sd3", "cogvideox", "wan", "sdxl")


def assert_gains(make, run, bound: float = 0.75) -> None:
    """Every layer is given inputs, and the error on them falls to a part below `bound`."""
    base, plain = make(), quantize_(make(), QuantizerConfig("int3", input_transform="hadamard"))
    with torch.no_grad():
        expected, without = run(base).float(), run(plain).float()
        with Calibration(base, INT3) as calibration:
            run(base)
        assert calibration.unseen == []
        solved = run(quantize_(base, INT3, calibration=calibration)).float()
    assert (solved - expected).square().mean() < bound * (without - expected).square().mean()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_architectures_of_transformers(name):
    assert_gains(
        lambda: tiny_models.build(name, torch.float32),
        lambda model: tiny_models.outputs(model, name),
        1.0 if name in FEW_TOKENS else 0.75,
    )


def codes(model: nn.Module) -> list[torch.Tensor]:
    modules = [m for m in model.modules() if isinstance(m, QuantizedModule)]
    return [m._parameters[part] for m in modules for part in PACKED_NAMES if part in m._parameters]


class TestDiffusers:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

    @pytest.mark.parametrize("name", DIFFUSERS)
    def test_architectures(self, name):
        assert_gains(lambda: tiny_diffusion.make_model(name), lambda model: tiny_diffusion.run(model, name))

    def test_a_pipeline_by_its_own_steps(self, tmp_path):
        pipe = tiny_diffusion.make_flux_pipeline()
        expected = tiny_diffusion.run_flux_pipeline(pipe)
        steps = []
        hook = pipe.transformer.register_forward_pre_hook(lambda *args: steps.append(1))
        quantize_(pipe.transformer, INT3, calibration=lambda model: tiny_diffusion.run_flux_pipeline(pipe, steps=3))
        hook.remove()
        assert len(steps) == 6  # each once more, with gradients
        solved = tiny_diffusion.run_flux_pipeline(pipe)
        pipe.save_pretrained(tmp_path)
        again = self.diffusers.FluxPipeline.from_pretrained(tmp_path, **tiny_diffusion.NO_TOKENIZERS)
        assert all(torch.equal(a, b) for a, b in zip(codes(again.transformer), codes(pipe.transformer), strict=True))
        assert again.transformer.config.quantization_config.calibrated_with == {"data": "<lambda>"}
        other = tiny_diffusion.make_flux_pipeline()
        quantize_(other.transformer, QuantizerConfig("int3", input_transform="hadamard"))
        plain = tiny_diffusion.run_flux_pipeline(other)
        assert (solved - expected).square().mean() < (plain - expected).square().mean()

    def test_statistics_in_a_file_quantize_while_loading(self, tmp_path):
        base = tiny_diffusion.make_model("flux")
        base.save_pretrained(tmp_path / "flux")
        statistics = calibrate(base, lambda model: tiny_diffusion.run(model, "flux"))
        statistics.save(tmp_path / "imatrix.safetensors")
        config = QuantizerConfig("int4", algorithm="imatrix", calibration=tmp_path / "imatrix.safetensors")
        loaded = tiny_diffusion.load(tmp_path / "flux", dtype=torch.float32, quantization_config=config)
        direct = quantize_(base, QuantizerConfig("int4", algorithm="imatrix"), calibration=statistics)
        assert all(torch.equal(a, b) for a, b in zip(codes(loaded), codes(direct), strict=True))
        config = QuantizerConfig("int4", algorithm="gptq")
        with pytest.raises(ValueError, match="for a pipeline with a function that runs it"):
            tiny_diffusion.load(tmp_path / "flux", quantization_config=config)

    def test_static_scales_are_set_while_loading(self, tmp_path):
        base, config = tiny_diffusion.make_model("flux"), QuantizerConfig("W8A8_FP8", activation_scale="static")
        base.save_pretrained(tmp_path / "flux")
        statistics = calibrate(base, lambda model: tiny_diffusion.run(model, "flux"), kind="amax", config=config)
        statistics.save(tmp_path / "amax.safetensors")
        config.calibration = tmp_path / "amax.safetensors"
        loaded = tiny_diffusion.load(tmp_path / "flux", dtype=torch.float32, quantization_config=config)
        config.calibration = None
        direct = quantize_(base, config, calibration=statistics)
        assert loaded.state_dict().keys() == direct.state_dict().keys()
        assert all(torch.equal(t, direct.state_dict()[name]) for name, t in loaded.state_dict().items())
        assert torch.equal(tiny_diffusion.run(loaded, "flux"), tiny_diffusion.run(direct, "flux"))


def test_generate_is_a_function_that_runs_the_model():
    model = tiny_models.build("t5", torch.float32)
    ids = tiny_models.inputs("t5", torch.float32)["input_ids"]
    quantize_(model, INT3, calibration=lambda model: model.generate(ids, max_new_tokens=8))
    assert model.generate(ids, max_new_tokens=4).shape[0] == len(ids)
    with pytest.raises(ValueError, match="reads two sequences"):
        quantize_(tiny_models.build("t5", torch.float32), INT3, calibration=["a text"], tokenizer=object())
    assert hf_quant.quantization_map(model)
