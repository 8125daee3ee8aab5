"""Engines that bench_generate measures beside `generate`: an `Engine` decodes what the model of transformers does."""

import argparse

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import bench_generate
from common.engine import Engine
from hf_quant import QuantizerConfig, export_gguf
from hf_quant.evaluate import generation_speed
from real_models import TEXT


ASSET = TEXT.parent


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).eval()


class Counting(Engine):
    """Continues each prompt with the numbers behind its last token."""

    def steps(self, prompts, new_tokens):
        for step in range(1, new_tokens + 1):
            yield [ids[-1] + step for ids in prompts]


def test_an_engine_generates_and_is_timed(model):
    engine = Counting(model.config)
    found = engine.generate(torch.tensor([[1, 2], [5, 9]]), max_new_tokens=3)
    assert found.tolist() == [[1, 2, 3, 4, 5], [5, 9, 10, 11, 12]]
    speeds = generation_speed({"engine": engine}, prompt_tokens=4, new_tokens=3, rounds=1, batch_size=2)
    assert speeds["engine"].decode > 0


def test_engines_that_are_not_installed_are_named(model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_generate, "installed", lambda package: False)
    monkeypatch.setattr(bench_generate.vllm_engine, "PYTHON", tmp_path / "none")
    args = argparse.Namespace(rivals=[], batch=1, prompt_tokens=8, new_tokens=4, clock="wall")
    assert bench_generate.make_engines(model, args, tmp_path) == {}
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == {"llama.cpp", "vLLM"}
    args.rivals = ["torchao"]
    assert bench_generate.make_engines(model, args, tmp_path) == {}
    assert not capsys.readouterr().out


def test_llama_cpp_decodes_the_same_tokens(model, tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    pytest.importorskip("gguf", reason="needs gguf")
    from common.llama_engine import LlamaCpp, write_gguf

    model.config.eos_token_id = model.generation_config.eos_token_id = None
    prompts = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.float().generate(prompts, max_new_tokens=8, do_sample=False, pad_token_id=0)
    path = write_gguf(model.bfloat16(), tmp_path / "model.gguf", "BF16")
    engine = LlamaCpp(model.config, path, batch_size=2, context=32)
    try:
        found = engine.generate(prompts, max_new_tokens=8)
    finally:
        engine.close()
    assert (found == expected).float().mean() > 0.9  # ties in bf16


def test_an_import_beside_llama_cpp_on_the_same_file(tmp_path, capsys):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    pytest.importorskip("gguf", reason="needs gguf")
    import bench_gguf

    config = QuantizerConfig("int4", symmetric=False, group_size=32)
    quantized = AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.bfloat16, quantization_config=config)
    quantized.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(ASSET).save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.gguf")
    bench_gguf.main([str(file), "--prompt-tokens", "16", "--new-tokens", "4", "--rounds", "1"])
    said = capsys.readouterr().out
    (distance,) = [float(line.split()[-1]) for line in said.splitlines() if "model in fp32" in line]
    assert 0 < distance < 0.05 and "x llama.cpp" in said
