"""The benchmark of denoising loops on tiny models: every variant runs, and what is extrapolated is right."""

import json
import math

import pytest
import torch


pytest.importorskip("diffusers", reason="diffusers is an optional host")

import bench_pipeline  # noqa: E402
from diffusion import bench as diffusion_bench  # noqa: E402
from diffusion.bench import (  # noqa: E402
    SCHEMES,
    Subject,
    Variant,
    add_variant,
    measure,
    nbytes,
    of_blocks,
    pair_of_sizes,
    quantized,
    seconds_per_step,
    tensor_bytes,
)
from diffusion.models import MODELS  # noqa: E402
from diffusion.run import make_step, random_model  # noqa: E402
from diffusion.spec import shrunk  # noqa: E402
from hf_quant import QuantizerConfig, quantize_  # noqa: E402


CPU = torch.device("cpu")
FLUX = shrunk(MODELS["flux.1-dev"], blocks=3)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def make_subject(blocks=None, steps=2):
    spec, smaller = pair_of_sizes(FLUX, blocks)
    return Subject(spec, FLUX, smaller, make_step(spec), steps, CPU)


def test_the_whole_benchmark(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(diffusion_bench, "SLOW", math.inf)  # a busy machine would shorten a loop
    path = tmp_path / "found.json"
    arguments = [
        "--model",
        "tiny-cogvideox",
        "--scheme",
        "int8-dynamic,int4:group_size=64",
        "--steps",
        "2",
        "--rounds",
        "1",
    ]
    assert bench_pipeline.main([*arguments, "--compile", "--backend", "eager", "--rivals", "--json", str(path)]) == 0
    output = capsys.readouterr().out
    found = json.loads(path.read_text())
    rows = {row["name"]: row for row in found["variants"]}
    assert list(rows) == [
        f"{name}, {how}" for name in ("bf16", "int8-dynamic", "int4:group_size=64") for how in ("eager", "compiled")
    ]
    assert rows["bf16, eager"]["end_snr_db"] == "same"
    assert rows["int8-dynamic, eager"]["call_snr_db"] > 20 > rows["int4:group_size=64, eager"]["call_snr_db"] > 5
    assert rows["int8-dynamic, compiled"]["transformer_bytes"] == rows["int8-dynamic, eager"]["transformer_bytes"]
    assert all(row["peak_bytes"] is None and not row["extrapolated"] for row in rows.values())
    assert "no GPU: a tiny model" in output and "torchao fp8 dynamic: absent: torchao is not installed" in output
    assert "~" in output, "2 of 50 steps: the seconds of an image are extrapolated"


def test_errors_of_use(capsys):
    for arguments, message in (
        (["--model", "flux.1-dev"], "needs a GPU"),
        (["--steps", "0"], "below 1"),
    ):
        with pytest.raises(SystemExit):
            bench_pipeline.main(arguments)
        assert message in capsys.readouterr().err
    assert bench_pipeline.main(["--blocks", "3"]) == 2
    assert "allows 1 to 4" in capsys.readouterr().err


def test_bytes_are_extrapolated_to_those_of_the_whole_model():
    subject = make_subject(blocks=1)
    found = []
    base = random_model(subject.spec)
    add_variant(found, subject, "bf16", lambda: base)
    add_variant(found, subject, "int4", lambda: quantized(base, SCHEMES["int4"], None))
    assert (subject.spec.units, subject.smaller.units) == (2, 1)
    whole = random_model(FLUX)
    assert nbytes(found[0], subject) == tensor_bytes(whole)
    assert nbytes(found[1], subject) == tensor_bytes(quantize_(whole, QuantizerConfig("int4")))
    one = Variant("x", None, times=[5.0, 5.0, 9.0], short_times=[3.0])
    assert seconds_per_step(one, subject) == pytest.approx(7.0), "1 + 2 for each of 3 groups"
    assert seconds_per_step(one, make_subject()) == 5.0


def test_a_variant_that_fails_costs_only_itself(monkeypatch, capsys):
    def breaks(model, spec):
        raise RuntimeError("not on this device\nmore")

    def stops(model, spec):
        model.transformer_blocks[0].forward = lambda *args, **kwargs: breaks(model, spec)

    rivals = {"bad": ("torch", breaks), "late": ("torch", stops), "absent": ("no_such_package", breaks)}
    monkeypatch.setattr(bench_pipeline, "RIVALS", rivals)
    monkeypatch.setattr(diffusion_bench, "RIVALS", rivals)
    arguments = ["--scheme", "int8", "--steps", "1", "--rounds", "1", "--blocks", "1", "--rivals"]
    assert bench_pipeline.main(arguments) == 0
    output = capsys.readouterr().out
    assert "bad: FAILED: RuntimeError: not on this device\n" in output
    assert "late, eager: FAILED: RuntimeError: not on this device" in output
    assert "absent: absent: no_such_package is not installed" in output and "int8, eager" in output
    monkeypatch.setattr(bench_pipeline, "quantized", breaks)
    assert bench_pipeline.main(arguments) == 1


def test_slow_variants_run_fewer_steps(monkeypatch):
    monkeypatch.setattr(diffusion_bench, "SLOW", 0.0)
    subject, found = make_subject(steps=3), []
    base = random_model(subject.spec)
    add_variant(found, subject, "bf16", lambda: base)
    measure(found, subject, 1)
    assert found[0].steps == 2 and found[0].end is None and found[0].worst == float("inf")


def test_attention_is_asked_for_only_where_it_is_wanted(monkeypatch):
    seen = []
    monkeypatch.setattr(diffusion_bench, "QuantizerConfig", lambda **fields: seen.append(fields) or "int8")
    base = random_model(FLUX)
    quantized(base, {"weights": "int8"}, None)
    quantized(base, {"weights": "int8"}, "int8")
    assert seen == [{"weights": "int8"}, {"weights": "int8", "attention": "int8"}]


def test_rivals_leave_modulations_and_embeddings_out():
    for name, published in MODELS.items():
        spec = shrunk(published, blocks=1)
        model = random_model(spec)
        chosen = of_blocks(spec)
        names = [n for n, module in model.named_modules() if chosen(module, n)]
        assert any(n.endswith("to_q") for n in names), name
        assert any("ff" in n or "feed_forward" in n or "mlp" in n for n in names), name
        assert not any("norm" in n or "emb" in n or n == "proj_out" for n in names), name
