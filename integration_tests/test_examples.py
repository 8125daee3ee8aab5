"""Every script in scripts/examples runs on a tiny pipeline and does what it says."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_quant.modules import QuantizedModule


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from peft import LoraConfig, PeftModel, get_peft_model_state_dict  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from diffusion.bench import tensor_bytes  # noqa: E402
from diffusion.models import MODELS, T5_XXL  # noqa: E402
from diffusion.run import empty_model, empty_t5  # noqa: E402
from hf_quant import QuantizerConfig, plan  # noqa: E402
from integration_tests.support.tiny_diffusion import assert_same_bytes  # noqa: E402
from integration_tests.support.tiny_pipelines import save_cogvideox, save_flux  # noqa: E402


EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
ASSET = Path(__file__).parent / "assets" / "tiny-llama-13m"
SMALL = ["--steps", "2", "--size", "16"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory) -> Path:
    return save_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def run_example(monkeypatch):
    """Runs an example on the CPU; returns its global names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name: str, *arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


def quantized_parts(pipe: diffusers.DiffusionPipeline) -> set[str]:
    return {
        name
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module) and any(isinstance(m, QuantizedModule) for m in part.modules())
    }


def test_examples_are_short_and_all_of_them_are_run():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r'run_example\(\s*"(\w+\.py)"', Path(__file__).read_text()))
    assert all(path.read_text().count("\n") < 40 for path in EXAMPLES.glob("*.py"))


def test_quantize_and_save(run_example, flux, tmp_path):
    out = tmp_path / "saved"
    found = run_example("quantize_and_save.py", flux, "--out", out, *SMALL)
    assert quantized_parts(found["pipe"]) == {"transformer", "text_encoder_2"}
    assert Image.open(out / "image.png").size == (16, 16) and (out / "model_index.json").is_file()


def test_load_in_12gb(run_example, flux, tmp_path):
    found = run_example("load_in_12gb.py", flux, "--out", tmp_path / "a.png", *SMALL)
    assert quantized_parts(found["pipe"]) == {"transformer", "text_encoder_2"}
    assert Image.open(tmp_path / "a.png").size == (16, 16)


def test_the_arithmetic_of_the_examples():
    def sizes(model: nn.Module, config: str) -> tuple[float, float]:
        model = model.to(torch.bfloat16)
        after = re.search(r"-> ([\d.]+) MB", str(plan(model, QuantizerConfig(config))))[1]
        return tensor_bytes(model) / 1e9, float(after) / 1e3

    flux_int4 = sizes(empty_model(MODELS["flux.1-dev"]), "int4")
    t5 = sizes(empty_t5(T5_XXL), "int8")
    texts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    for number in (*flux_int4, *t5, flux_int4[0] + t5[0] + 0.41, flux_int4[1] + t5[1] + 0.41):
        assert f" {number:.2f}" in texts["load_in_12gb.py"], number
    for (before, after), name in (
        (sizes(empty_model(MODELS["flux.1-dev"]), "W8A8_FP8"), "quantize_and_save.py"),
        (sizes(empty_model(MODELS["cogvideox-5b"]), "W8A8"), "cogvideox.py"),
        (t5, "cogvideox.py"),
    ):
        assert f"{before:.1f} -> {after:.1f} GB" in texts[name]


def test_with_lora(run_example, flux, tmp_path):
    pipe = diffusers.FluxPipeline.from_pretrained(flux, dtype=torch.bfloat16)
    pipe.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    layers = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(tmp_path, transformer_lora_layers=layers, weight_name="lora.safetensors")
    arguments = [flux, "--lora", tmp_path, "--weight-name", "lora.safetensors", *SMALL]
    images, pipes = [], []
    for scale in (0, 1):
        out = tmp_path / f"{scale}.png"
        pipes.append(run_example("with_lora.py", *arguments, "--scale", scale, "--out", out)["pipe"])
        images.append(Image.open(out).tobytes())
    assert images[0] != images[1], "the LoRA changes the image"
    plain = diffusers.FluxTransformer2DModel.from_pretrained(
        flux, subfolder="transformer", dtype=torch.bfloat16, quantization_config=QuantizerConfig("W8A8")
    )
    assert_same_bytes(pipes[1].transformer.state_dict(), plain.state_dict())


def test_with_compile(run_example, flux, tmp_path, capsys):
    out = tmp_path / "a.png"
    run_example("with_compile.py", flux, "--out", out, "--backend", "eager", *SMALL)
    assert Image.open(out).size == (16, 16) and "compiled: " in capsys.readouterr().out


def test_cogvideox(run_example, tmp_path):
    video, out = save_cogvideox(tmp_path / "video"), tmp_path / "a.gif"
    found = run_example("cogvideox.py", video, "--steps", 2, "--frames", 9, "--size", 32, 48, "--out", out)
    assert quantized_parts(found["pipe"]) == {"transformer", "text_encoder"}
    assert Image.open(out).n_frames == 9 and Image.open(out).size == (48, 32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """The first layer of the trained Llama, with its tokenizer."""
    directory = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_pretrained(ASSET, num_hidden_layers=1).save_pretrained(directory)
    AutoTokenizer.from_pretrained(ASSET).save_pretrained(directory)
    return directory


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((ASSET / "eval.txt").read_text()[:20_000])
    return path


def test_recover_with_teacher(run_example, llama, text, tmp_path):
    out = tmp_path / "out"
    run_example("recover_with_teacher.py", llama, "--text", text, "--steps", 2, "--length", 32, "--out", out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {str(m.scheme.weight.format) for m in model.modules() if isinstance(m, QuantizedModule)} == {"int2"}


def test_qlora(run_example, llama, text, tmp_path):
    out = tmp_path / "out"
    found = run_example("qlora.py", llama, "--text", text, "--steps", 2, "--length", 32, "--out", out)
    again = PeftModel.from_pretrained(found["base"], out, adapter_name="again")
    layer = next(m for m in again.modules() if "again" in getattr(m, "lora_A", {}))
    assert (
        torch.equal(layer.lora_A["again"].weight, layer.lora_A["default"].weight)
        and layer.lora_B["again"].weight.any()
    )
