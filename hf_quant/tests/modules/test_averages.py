"""Averages of quantized and of prepared models, by torch's `AveragedModel`."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_quant import prepare_qat_, quantize_


@pytest.mark.parametrize("change", [quantize_, prepare_qat_])
@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}], ids=["mean", "moving"])
def test_codes_are_copied_and_the_rest_is_averaged(change, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    change(model, "int4")
    average = AveragedModel(model, **options)
    average.update_parameters(model)
    with torch.no_grad():
        model[1].weight += 1
    average.update_parameters(model)
    assert torch.equal(average.module[1].weight, torch.full((64,), 1.5))
    assert any(not parameter.is_floating_point() for parameter in model.parameters())
    for mean, own in zip(average.module[0].parameters(), model[0].parameters(), strict=True):
        assert torch.equal(mean, own)
