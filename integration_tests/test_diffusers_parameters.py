"""Nucleus-Image, whose experts are parameters of their own, and Oobleck's convolutions under torch's older norm."""

import warnings
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from torch import Tensor, nn

from hf_quant import QuantizerConfig, dequantize_, quantize_
from hf_quant.modules import QuantizedModule
from hf_quant.testing import assert_close, sqnr


def _values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def nucleus(use_grouped_mm: bool) -> nn.Module:
    return diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        joint_attention_dim=64,
        axes_dims_rope=(4, 6, 6),
        dense_moe_strategy="all_moe",
        num_experts=4,
        moe_intermediate_dim=32,
        capacity_factors=2.0,
        use_grouped_mm=use_grouped_mm,
    )


def call_nucleus(model: nn.Module) -> Tensor:
    inputs = {"hidden_states": _values(1, 16, 16), "encoder_hidden_states": _values(1, 5, 64)}
    return model(**inputs, img_shapes=[(1, 4, 4)], timestep=torch.tensor([0.5]), return_dict=False)[0]


def oobleck() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return diffusers.AutoencoderOobleck(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=8,
            decoder_input_channels=4,
            audio_channels=2,
        )


def call_oobleck(model: nn.Module) -> Tensor:
    return model.decode(model.encode(_values(1, 2, 64)).latent_dist.mode()).sample


_CONVOLUTIONS = QuantizerConfig(None, modules={"re:.*conv.*": "int8"})
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], QuantizerConfig, set[str]]] = {
    "nucleus": (lambda: nucleus(False), call_nucleus, QuantizerConfig("int4"), {"linear", "parameters"}),
    "oobleck": (oobleck, call_oobleck, _CONVOLUTIONS, {"conv", "conv_transpose"}),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_on_load_by_quantize_and_reloaded_with_equal_bits(name, tmp_path: Path):
    _, call, config, kinds = MODELS[name]
    build(name).save_pretrained(tmp_path / "plain")
    cls = type(build(name))
    loaded = cls.from_pretrained(tmp_path / "plain", quantization_config=config)
    quantized = quantize_(build(name), config)
    loaded.save_pretrained(tmp_path / "saved")
    again = cls.from_pretrained(tmp_path / "saved")
    assert {m.kind for m in again.modules() if isinstance(m, QuantizedModule)} == kinds
    states = [model.state_dict() for model in (quantized, loaded, again)]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]) and torch.equal(tensor, states[2][key]), key
    for model in (loaded, again):  # on AMD's CPUs products of MKL depend on where 16 and 32 bit weights begin
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    with torch.no_grad():
        y = call(again)
        assert torch.equal(y, call(quantized)) and torch.equal(y, call(loaded))
        assert_close(y, call(dequantize_(quantize_(build(name), config))), rms=1e-4)
        assert 0 < sqnr(y, call(build(name))) < 60


def test_experts_compute_alike_by_the_loop_and_by_torch_s_grouped_product():
    outputs = []
    for use_grouped_mm in (False, True):
        torch.manual_seed(0)
        model = nucleus(use_grouped_mm).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)
        with torch.no_grad():
            outputs.append(call_nucleus(quantize_(model, "int4")))
    assert_close(outputs[1], outputs[0], rms=1e-5)
