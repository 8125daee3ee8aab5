"""Published diffusion models: their sizes are the published ones, and small versions of them denoise."""

import pytest
import torch


pytest.importorskip("diffusers", reason="diffusers is an optional host")

import diffusion_sizes  # noqa: E402
from common import pages  # noqa: E402
from diffusion.models import MODELS, T5_XXL, T5_XXL_BILLIONS  # noqa: E402
from diffusion.run import (  # noqa: E402
    NORMAL,
    compile_blocks_,
    denoise,
    denoising,
    empty_model,
    empty_t5,
    make_step,
    outlier_channels,
    predict,
    random_model,
    shallow_copy,
    truncated,
)
from diffusion.spec import scaled, shrunk  # noqa: E402
from hf_quant import quantize_  # noqa: E402
from hf_quant.testing import sqnr  # noqa: E402


FP32 = torch.float32


def billions(model) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_parameters_is_the_published_one(name):
    assert billions(empty_model(MODELS[name])) == pytest.approx(MODELS[name].billions, rel=0.004)


def test_the_number_of_parameters_of_the_text_encoder():
    assert billions(empty_t5(T5_XXL)) == pytest.approx(T5_XXL_BILLIONS, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_small_versions_denoise(name):
    spec = shrunk(MODELS[name])
    model, step = random_model(spec, dtype=FP32), make_step(spec, dtype=FP32)
    calls = [call for call in denoising(model, spec, step, 3)]
    assert len(calls) == 4 and calls[-1].latents.shape == step.latents.shape
    assert all(call.output.isfinite().all() for call in calls)
    assert not torch.equal(calls[0].output, calls[1].output)
    expected = calls[-1].latents
    assert torch.equal(denoise(model, spec, step, 3), expected), "the same noise, the same image"


def test_native_sizes_are_those_of_the_published_figures():
    size = MODELS["flux.1-dev"].size
    assert (size.height // 2) * (size.width // 2) + size.text == 4608
    size = MODELS["cogvideox-5b"].size
    assert size.frames * (size.height // 2) * (size.width // 2) + size.text == 17776
    assert MODELS["cogvideox-5b"].batch == 2 and MODELS["flux.1-dev"].batch == 1


def test_fewer_blocks_in_the_models_proportions():
    spec = scaled(MODELS["flux.1-dev"], 2)
    assert spec.config["num_layers"] == 2 and spec.config["num_single_layers"] == 4 and spec.units == 2
    assert scaled(MODELS["flux.2-dev"], 1).blocks == {"num_layers": 1, "num_single_layers": 6}
    for name, blocks in (("flux.1-dev", 20), ("flux.1-dev", 0), ("sdxl", 1)):
        with pytest.raises(ValueError, match="allows"):
            scaled(MODELS[name], blocks)


def test_a_truncated_model_is_the_smaller_model():
    spec = shrunk(MODELS["flux.1-dev"], blocks=2)
    smaller = scaled(spec, 1)
    model, step = random_model(spec, dtype=FP32), make_step(spec, dtype=FP32)
    short = truncated(model, spec, smaller)
    assert (len(short.transformer_blocks), len(short.single_transformer_blocks)) == (1, 2)
    alone = random_model(smaller, dtype=FP32)
    alone.load_state_dict(short.state_dict())
    t = torch.tensor(500.0)
    assert torch.equal(predict(short, spec, step, step.latents, t), predict(alone, smaller, step, step.latents, t))
    assert len(model.transformer_blocks) == 2


def test_a_copy_shares_its_tensors_and_can_be_quantized_alone():
    spec = shrunk(MODELS["flux.1-dev"])
    model, step = random_model(spec, dtype=FP32), make_step(spec, dtype=FP32)
    twin = shallow_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters()))
    t = torch.tensor(500.0)
    before = predict(model, spec, step, step.latents, t)
    quantize_(twin, "int8")
    assert 20 < sqnr(predict(twin, spec, step, step.latents, t), before) < 80
    assert torch.equal(predict(model, spec, step, step.latents, t), before)


def test_weights_have_heavy_tails_and_outlier_channels():
    spec = shrunk(MODELS["flux.1-dev"])
    model = random_model(spec)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    weight = model.transformer_blocks[0].ff.net[0].proj.weight.float()
    assert weight.shape == (512, 128) and outlier_channels(512).numel() == 1
    rows = weight.square().mean(1).sqrt()
    outlier = outlier_channels(512).item()
    assert rows[outlier] > 2 * rows.median()
    normalized = weight / rows[:, None]
    assert 4.5 < normalized.pow(4).mean() < 8, "5.7 expected, 3 were normal"
    same = model.transformer_blocks[1].ff.net[0].proj.weight.float()
    assert same.square().mean(1).sqrt()[outlier] > 2 * rows.median(), "the same channel in every layer"
    plain = random_model(spec, weights=NORMAL).transformer_blocks[0].ff.net[0].proj.weight.float()
    assert (plain.square().mean(1).sqrt() / 128**-0.5 - 1).abs().max() < 0.3
    assert 2.8 < (plain * 128**0.5).pow(4).mean() < 3.2
    wan = random_model(shrunk(MODELS["wan2.1-t2v-14b"]))
    assert wan.condition_embedder.time_embedder.linear_1.weight.dtype == FP32, "as the host loads it"


def test_blocks_are_compiled_and_compute_the_same():
    spec = shrunk(MODELS["cogvideox-5b"], blocks=1)
    model, step = random_model(spec, dtype=FP32), make_step(spec, dtype=FP32)
    expected = denoise(model, spec, step, 1)
    compiled = compile_blocks_(shallow_copy(model), spec, backend="eager")
    assert torch.allclose(denoise(compiled, spec, step, 1), expected, atol=1e-5)
    assert compiled.transformer_blocks[0]._compiled_call_impl is not None
    assert model.transformer_blocks[0]._compiled_call_impl is None


def test_the_table_of_sizes_in_the_docs_is_current():
    table = pages.markdown(diffusion_sizes.size_rows())
    assert pages.is_current(diffusion_sizes.SECTION, table), "run scripts/diffusion_sizes.py --readme"


def test_errors_of_a_call_are_in_the_order_of_the_formats(monkeypatch):
    small = shrunk(MODELS["flux.1-dev"], blocks=1)
    monkeypatch.setitem(MODELS, "flux.1-dev", small)
    monkeypatch.setattr(diffusion_sizes, "SIZE", small.size)
    _, *rows = diffusion_sizes.error_rows("flux.1-dev", 1, "normal")
    error = {scheme: float(decibels) for scheme, decibels in rows}
    assert error["int8"] > error["fp8"] > error["nf4"] > 10 and error["int8-dynamic"] > error["fp8"] > error["int4"]
