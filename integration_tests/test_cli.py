"""The command line on real files: the trained model, a pipeline of diffusers, the demo."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_quant.auto import latency
from hf_quant.checkpoint import read_header
from hf_quant.cli import main
from hf_quant.modules import QuantizedModule


def run(capsys, *arguments: object) -> str:
    """Return the output of a command, which must succeed and leave stderr empty."""
    capsys.readouterr()
    assert main([str(a) for a in arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_quantize_inspect_eval(asset_model_dir, tmp_path, capsys):
    out = tmp_path / "int3"
    run(capsys, "quantize", asset_model_dir, out, "--weights", "int3", "--module", "model.embed_tokens=int8")
    assert "tokenizer.json" in {p.name for p in out.iterdir()}
    assert "43 of 44 modules quantized" in run(
        capsys, "plan", asset_model_dir, "--module", "lm_head=int8", "--skip", "*.0.mlp.up_proj"
    )
    assert "int3 g16" in run(capsys, "inspect", out)

    text = tmp_path / "text.txt"
    text.write_text((asset_model_dir / "eval.txt").read_text()[:8000])
    options = ("--reference", asset_model_dir, "--text", text, "--window", 128, "--device", "cpu")
    table = run(capsys, "eval", out, *options).splitlines()
    reference, quantized = (line.split() for line in table[2:4])
    assert float(quantized[2]) == pytest.approx(float(reference[3]), rel=0.1)
    assert 1e-4 < float(quantized[4]) < 0.1  # KL
    assert 0.85 < float(quantized[5].rstrip("%")) / 100 < 1  # the same top token


def test_calibrate(asset_model_dir, tmp_path, capsys):
    """A file of statistics, and a text, quantize; the card names the data and gives the command."""
    text, statistics = tmp_path / "text.txt", tmp_path / "imatrix.safetensors"
    text.write_text((asset_model_dir / "eval.txt").read_text()[:8000])
    options = ("--weights", "int2", "--skip", "model.layers.[1-5].*")
    made = run(capsys, "calibrate", asset_model_dir, "-o", statistics, "--text", text, "--tokens", 512, *options)
    assert "inputs of 7 layers" in made
    for algorithm, data in (("imatrix", statistics), ("gptq", text)):
        more = ("--algorithm", algorithm, "--calibrate", data)
        run(capsys, "quantize", asset_model_dir, tmp_path / algorithm, *options, *more)
    card = (tmp_path / "gptq" / "README.md").read_text()
    assert "Calibrated with `text.txt`, 2,0" in card and "--algorithm gptq --calibrate text.txt" in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq")
    assert model.config.quantization_config.calibrated_with["data"] == "text.txt"


def test_autoquant(asset_model_dir, tmp_path, capsys, monkeypatch):
    """The table, the config that carries out the choice, and what cannot go with it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(latency, "_SECONDS", 0.01)
    text, config = tmp_path / "text.txt", tmp_path / "fast.json"
    text.write_text((asset_model_dir / "eval.txt").read_text()[:8000])
    data = ("--calibrate", text, "--calibration-tokens", 512)
    options = ("--tokens", 1, 16, "--max-kl", 0.01, "--candidates", "int4", "int8", "W8A8", "none", "--gb", 0.017)
    printed = run(capsys, "autoquant", asset_model_dir, *options, *data, "-o", config)
    lines = printed.splitlines()
    assert lines[0].split("  ")[-1] == "time / 16 bit" and "ms, 16 tokens" in lines[0]
    assert sum("(chosen)" in line for line in lines) == 1 and any(line.startswith("16 bit ") for line in lines)
    run(capsys, "quantize", asset_model_dir, tmp_path / "fast", "--config", config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fast")
    assert model.get_memory_footprint() <= 0.017e9
    assert {n: m.scheme for n, m in model.named_modules() if isinstance(m, QuantizedModule)}
    smallest = run(capsys, "plan", asset_model_dir, "--weights", "auto", "--max-kl", 0.01, *data)
    assert float(smallest.split("predicted KL divergence per token: ")[1].split()[0]) <= 0.01
    for arguments, message in (
        (
            ("quantize", asset_model_dir, tmp_path / "x", "--config", config, "--weights", "int4"),
            "leave out --weights",
        ),
        (("plan", asset_model_dir, "--config", config, "--skip", "lm_head"), "leave out --skip"),
        (("plan", asset_model_dir, "--config", text), "cannot be read as JSON"),
        (("autoquant", asset_model_dir, "--bits", 4), "budget {'bits': 4.0}; needs {'kl': n}"),
    ):
        assert main([str(a) for a in arguments]) == 2
        assert message in capsys.readouterr().err


def test_pipeline(tmp_path, capsys):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    source, out = tmp_path / "pipe", tmp_path / "quantized"
    make_flux_pipeline(torch.bfloat16).save_pretrained(source)
    printed = run(capsys, "quantize", source, out, "--weights", "int4", "--module", "*.attn.to_q=int8")
    assert printed.count(" modules quantized, ") == 3  # the plans of transformer, text_encoder, text_encoder_2
    assert "left in 16 bit: vae: neither denoisers nor text encoders; to quantize such a model, too, give" in printed
    tables = run(capsys, "inspect", out)
    assert tables.count("modules quantized by hf_quant") == 3
    absent = {"tokenizer": None, "tokenizer_2": None}
    pipe = diffusers.DiffusionPipeline.from_pretrained(out, torch_dtype=torch.bfloat16, **absent)
    assert not any(isinstance(m, QuantizedModule) for m in pipe.vae.modules())
    to_q = pipe.transformer.transformer_blocks[0].attn.to_q
    assert str(to_q.scheme.weight.format) == "int8"
    assert str(pipe.transformer.transformer_blocks[0].attn.to_k.scheme.weight.format) == "int4"

    one = tmp_path / "transformer"
    run(capsys, "quantize", source / "transformer", one, "--weights", "fp8")
    assert "fp8_e4m3 row" in run(capsys, "inspect", one)
    assert read_header(one)["x_embedder.weight"].dtype == torch.bfloat16  # as it was; diffusers would load it in fp32

    assert main(["quantize", str(source), str(tmp_path / "no"), "--module", "*.nowhere=int8"]) == 2
    assert "no component has a module that matches '*.nowhere'" in capsys.readouterr().err
    assert main(["quantize", str(source), str(tmp_path / "no"), "--skip", "transformer.proj_out"]) == 2
    assert "('proj_out', not 'transformer.proj_out')" in capsys.readouterr().err
    assert main(["calibrate", str(source), "-o", str(tmp_path / "x.safetensors")]) == 2
    assert "calibrate takes one model: give the directory of a component" in capsys.readouterr().err
    assert main(["export", str(out), str(tmp_path / "no")]) == 2
    assert "it has the parts text_encoder, text_encoder_2: name one of them" in capsys.readouterr().err
    assert main(["quantize", str(source / "vae"), str(tmp_path / "no"), "--weights", "int8"]) == 2
    assert "autoencoders stay in 16 bit" in capsys.readouterr().err and not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["decoder", "unconditional_transformer", "model", "connectors"])
def test_parts_of_a_pipeline_by_other_names(name, tmp_path, capsys):
    pytest.importorskip("diffusers", reason="diffusers is an optional host")
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "transformer").rename(tmp_path / name)  # "decoder": as Stable Cascade and unCLIP have it
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"transformer"', f'"{name}"'))
    assert f"\n{name}\n" in (printed := "\n" + run(capsys, "plan", tmp_path, "--weights", "int8"))
    assert printed.count(" modules quantized, ") == 3


def test_a_text_encoder_whose_class_is_in_the_package_of_its_pipeline(tmp_path, capsys):
    kolors = pytest.importorskip("diffusers.pipelines.kolors.text_encoder", reason="diffusers is an optional host")
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16, "num_attention_heads": 4, "num_layers": 1}
    config = kolors.ChatGLMConfig(padded_vocab_size=96, original_rope=True, **sizes)
    encoder = kolors.ChatGLMModel(config)
    for parameter in encoder.parameters():  # its constructor leaves them empty
        torch.nn.init.normal_(parameter)
    encoder.save_pretrained(tmp_path / "text_encoder")
    index = {"_class_name": "KolorsPipeline", "text_encoder": ["kolors", "ChatGLMModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert "5 of 6 modules quantized" in run(capsys, "plan", tmp_path, "--weights", "int8")
    run(capsys, "quantize", tmp_path / "text_encoder", tmp_path / "out", "--weights", "int8")
    model = kolors.ChatGLMModel.from_pretrained(tmp_path / "out")
    assert sum(isinstance(m, QuantizedModule) for m in model.modules()) == 5


def test_demo(asset_model_dir, tmp_path, capsys):
    printed = run(capsys, "demo", "--out", tmp_path, "--tokens", 1024, "--rounds", 1)
    assert "are equal to the bit to the logits of the model before it was saved" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    assert list(rows) == ["bf16", "int8", "fp8", "nf4", "int4", "int3", "int2"]
    for name in rows:
        assert f"\n{name} " in printed
    sizes = [rows[name]["size"] for name in ("bf16", "int8", "nf4", "int4", "int3", "int2")]
    assert sizes == sorted(sizes, reverse=True)
    assert rows["int4"]["bits"] == pytest.approx(4.25, abs=1e-3)
    assert rows["bf16"]["kl"] == 0 < rows["int8"]["kl"] < rows["int4"]["kl"] < rows["int3"]["kl"] < rows["int2"]["kl"]
    assert all(row["decode"] > 0 and row["load"] > 0 and row["text"] for row in rows.values())
    plot = tmp_path / "quality_versus_size.png"
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, of the extra `demo`")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert Path(tmp_path / "tiny-llama-13m-int4" / "model.safetensors").is_file()


def test_demo_without_matplotlib_says_so(tmp_path, capsys, monkeypatch):
    from hf_quant.cli._demo import Row, _plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _plot([Row("bf16", 16.0, 100)], "model", tmp_path / "plot.png")
    assert "matplotlib is not installed (pip install 'hf-quant[demo]')" in capsys.readouterr().out
    assert not (tmp_path / "plot.png").exists()
