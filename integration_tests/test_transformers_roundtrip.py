"""Quantize on load, save, reload in a new process that imports transformers only: every format, many architectures."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from hf_quant import QuantizerConfig, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.testing import assert_sqnr, sqnr
from integration_tests.support.tiny_models import ARCHITECTURES, build, inputs, outputs


# {weights: (lowest, highest) SQNR of the outputs in dB}. Random weights let errors grow from layer to layer; a model
# that was not quantized at all would be beyond the upper bound.
BOUNDS = {
    "int8": (26, 55),
    "W8A8": (24, 50),
    "fp8_e4m3": (15, 45),
    "W8A8_FP8": (12, 42),
    "fp8_e5m2": (11, 39),
    "fp6_e2m3": (15, 45),
    "fp6_e3m2": (11, 39),
    "nf4": (6, 34),
    "mxfp4": (5, 32),
    "nvfp4": (5, 33),
    "int4": (5, 33),
    "W4A8": (5, 33),
    "int3": (2, 26),
    "int2": (-4, 20),
}
FEW = ("int8", "W4A8")
# Every format with linear layers, every second one with Conv1D and with experts, two on the other architectures.
FORMATS = {
    **dict.fromkeys(ARCHITECTURES, FEW),
    "llama": tuple(BOUNDS),
    "gpt2": tuple(BOUNDS)[::2],
    "qwen3_moe": (*tuple(BOUNDS)[1::2], "int4"),
}
RELOAD = """
import json, os, sys
from pathlib import Path
import torch, transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
for case in json.load(open(sys.argv[1])):
    directory = Path(case["directory"])
    cls = getattr(transformers, case["model"])
    try:
        model, info = cls.from_pretrained(directory, dtype="auto", output_loading_info=True)
    except Exception as error:
        (directory / "error.txt").write_text(f"{type(error).__name__}: {error}")
        continue
    with torch.no_grad():
        for _ in range(2):  # as `outputs` does
            output = model(**torch.load(directory / "inputs.pt"))[0].float()
    problems = {name: sorted(map(str, keys)) for name, keys in info.items() if keys}
    torch.save((output, problems), directory / "reloaded.pt")
    model.save_pretrained(directory / "again")
"""


def run(code: str, *arguments: str, **environment: str) -> None:
    """Run code in a fresh interpreter, which finds hf_quant by its entry point only."""
    subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment}, check=True, timeout=280
    )


def stored_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".json", ".safetensors")}


def test_load_save_reload_is_exact(tmp_path):
    """One process reloads all: to start it takes longer than ten models."""
    cases = []
    for name, formats in FORMATS.items():
        model = build(name)
        model.save_pretrained(tmp_path / name)
        reference = outputs(model, name)
        for weights in formats:
            config = QuantizerConfig(weights)
            quantized = type(model).from_pretrained(tmp_path / name, quantization_config=config, dtype="auto")
            modules = [m for m in quantized.modules() if isinstance(m, QuantizedModule)]
            assert len(modules) == ARCHITECTURES[name].quantized, (name, weights)
            output = outputs(quantized, name)
            lowest, highest = BOUNDS[weights]
            assert_sqnr(output, reference, at_least=lowest, at_most=highest, name=f"{name} {weights}")
            directory = tmp_path / f"{name}-{weights}"
            quantized.save_pretrained(directory)
            torch.save(output, directory / "output.pt")
            torch.save(inputs(name), directory / "inputs.pt")
            cases.append({"directory": str(directory), "model": type(model).__name__})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run(RELOAD, str(tmp_path / "cases.json"))
    for case in cases:
        directory = Path(case["directory"])
        error = directory / "error.txt"
        assert not error.exists(), f"{directory.name}: {error.read_text()}"
        output, problems = torch.load(directory / "reloaded.pt")
        assert torch.equal(output, torch.load(directory / "output.pt")), directory.name
        assert not problems, (directory.name, problems)
        assert stored_files(directory) == stored_files(directory / "again"), directory.name


# Only experts, only embeddings; checkpoints whose names the host renames, merges or splits.
GUARDED = {
    **dict.fromkeys(ARCHITECTURES, QuantizerConfig("int8")),
    "mixtral experts": QuantizerConfig(None, modules={"*.experts": "int4"}),
    "qwen3_moe experts": QuantizerConfig(None, modules={"*.experts": "int4"}),
    "gpt_oss experts": QuantizerConfig(None, modules={"*.experts": "int4"}),
    "llama embedding": QuantizerConfig(None, modules={"model.embed_tokens": "int8"}),
    "llama_tied embedding": QuantizerConfig(None, modules={"model.embed_tokens": "int8"}),
    "gpt2 embedding": QuantizerConfig(None, modules={"*.wpe": "int8"}),
    "nomic_bert projections": QuantizerConfig(None, modules={"*.k_proj": "int8"}),
    "vit convolution": QuantizerConfig(None, modules={"re:.*projection": "int8"}),
}


def test_without_hf_quant_nothing_loads(tmp_path):
    cases = []
    for label, config in GUARDED.items():
        directory = tmp_path / label
        model = build(label.split()[0])
        quantize_(model, config).save_pretrained(directory)
        torch.save(inputs(label.split()[0]), directory / "inputs.pt")
        cases.append({"directory": str(directory), "model": type(model).__name__})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run(RELOAD, str(tmp_path / "cases.json"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    for case in cases:
        directory = Path(case["directory"])
        assert not (directory / "reloaded.pt").exists(), directory.name
        assert "mismatched" in (directory / "error.txt").read_text(), directory.name
    for case in cases:  # they do load here
        _, info = getattr(transformers, case["model"]).from_pretrained(case["directory"], output_loading_info=True)
        assert not any(info.values()), (case, info)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loading_gives_the_codes_of_quantize_and_dequantizes_to_the_same_function(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=QuantizerConfig("int4"), dtype="auto")
    quantize_(model, "int4")
    expected, found = model.state_dict(), loaded.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert model.config.quantization_config == loaded.config.quantization_config
    before = outputs(loaded, name)
    loaded.dequantize()
    assert not any(isinstance(m, QuantizedModule) for m in loaded.modules())
    assert not hasattr(loaded.config, "quantization_config")
    assert 28 <= sqnr(outputs(loaded, name), before)  # they differ in rounding to bf16 only


def test_a_save_replaces_an_earlier_one_in_other_files(tmp_path):
    cls = type(build("llama"))
    for number, (variant, size) in enumerate(itertools.product((None, "fp16"), ("1GB", "60KB", "1GB"))):
        model = build("llama")
        with torch.no_grad():
            model.model.norm.weight += number
        quantize_(model, "int8").save_pretrained(tmp_path, variant=variant, max_shard_size=size)
        again = cls.from_pretrained(tmp_path, variant=variant)
        assert torch.equal(again.model.norm.weight, model.model.norm.weight)
        assert (
            len([file for file in tmp_path.glob("model*.safetensors*") if "-of-" not in file.name]) == 1 + number // 3
        )
