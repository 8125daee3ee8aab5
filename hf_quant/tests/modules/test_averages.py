"""Averages of quantized and of prepared models, by torch's `AveragedModel`."""

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hf_quant import prepare_qat_, prepare_training_, quantize_


@pytest.mark.parametrize("change", [quantize_, prepare_qat_])
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()])
def test_codes_are_copied_and_the_rest_is_averaged(change, average):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    change(model, "int4")
    average = AveragedModel(model, multi_avg_fn=average)
    average.update_parameters(model)
    with torch.no_grad():
        model[1].weight += 1
    average.update_parameters(model)
    assert torch.equal(average.module[1].weight, torch.full((64,), 1.5))
    assert any(not parameter.is_floating_point() for parameter in model.parameters())
    for mean, own in zip(average.module[0].parameters(), model[0].parameters(), strict=True):
        assert torch.equal(mean, own)


def test_the_mean_on_an_accelerator_leaves_integers_out(monkeypatch):
    """There torch averages lists of tensors by default."""
    monkeypatch.setattr(swa_utils, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    test_codes_are_copied_and_the_rest_is_averaged(quantize_, None)


@pytest.mark.parametrize("average", [get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()])
def test_weights_of_int8_codes_are_averaged(average):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    prepare_training_(model, "int8_weights", min_size=1)
    mean = AveragedModel(model, multi_avg_fn=average)
    mean.update_parameters(model)
    first, second = model[0].weight.dequantized(), torch.randn(64, 64)
    with torch.no_grad():
        model[0].weight.copy_(second)
    mean.update_parameters(model)
    step = mean.module[0].weight.scale
    assert bool(((mean.module[0].weight.dequantized() - (first + second) / 2).abs() <= 1.1 * step).all())
