"""Parts that diffusers adds to quantized models, and models that it makes of their parts."""

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_quant import QuantizerConfig, dequantize_, plan, quantize_
from hf_quant.integrations.methods import stored_schemes
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from diffusers.models import MultiControlNetModel  # noqa: E402
from diffusers.pipelines.free_noise_utils import AnimateDiffFreeNoiseMixin  # noqa: E402

from integration_tests.support.tiny_diffusion import (  # noqa: E402
    assert_same_bytes,
    make_autoencoder,
    make_inputs,
    make_model,
    quantized_names,
)


def with_image_adapter(unet: nn.Module) -> nn.Module:
    """Load an IP adapter with random weights, for one image of 64 values, into the tiny UNet."""
    generator, width = torch.Generator().manual_seed(0), unet.config.cross_attention_dim

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = {}
    crossed = (name for name in unet.attn_processors if "attn2" in name)
    for index, name in enumerate(crossed):
        attention = unet.get_submodule(name.removesuffix(".processor"))
        for part in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * index + 1}.{part}.weight"] = values(attention.inner_dim, width)
    image = {"proj.weight": values(4 * width, 64), "proj.bias": values(4 * width)}
    image |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    unet._load_ip_adapter_weights([{"image_proj": image, "ip_adapter": weights}])
    return unet


@torch.no_grad()
def run_with_image(unet: nn.Module) -> Tensor:
    image = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1))
    return unet(**make_inputs("unet"), added_cond_kwargs={"image_embeds": [image]}, return_dict=False)[0]


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_image_adapters(tmp_path, is_loaded_first):
    expected = run_with_image(with_image_adapter(make_model("unet")))
    if is_loaded_first:
        model = quantize_(with_image_adapter(make_model("unet")), QuantizerConfig("int8"))
    else:
        model = with_image_adapter(quantize_(make_model("unet"), QuantizerConfig("int8")))
    assert_sqnr(run_with_image(model), expected, at_least=30, at_most=60)
    quantize_(model, QuantizerConfig(None, attention="int8"))
    model.save_pretrained(tmp_path)
    assert_sqnr(run_with_image(model), expected, at_least=30, at_most=60)
    assert_sqnr(run_with_image(dequantize_(model)), expected, at_least=30, at_most=60)


HEADS = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 1}


@pytest.mark.parametrize(
    ("name", "cls", "method", "changes"),
    [
        ("unet", "ControlNetModel", "from_unet", {}),
        ("unet", "UNetMotionModel", "from_unet2d", {}),
        ("flux", "FluxControlNetModel", "from_transformer", HEADS),
    ],
)
def test_a_model_made_of_parts_has_the_weights_that_the_codes_stand_for(tmp_path, caplog, name, cls, method, changes):
    cls = getattr(diffusers, cls)
    model = quantize_(make_model(name), QuantizerConfig("W8A8", fuse_projections=True))
    codes = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    torch.manual_seed(0)
    made = getattr(cls, method)(model, **changes)
    assert f"the new {cls.__name__} has the dequantized weights of the {type(model).__name__}" in caplog.text
    torch.manual_seed(0)
    expected = getattr(cls, method)(dequantize_(copy.deepcopy(model)), **changes)
    assert_same_bytes(made.state_dict(), expected.state_dict())
    assert_same_bytes(model.state_dict(), codes)
    quantize_(made, "int8").save_pretrained(tmp_path)
    assert quantized_names(cls.from_pretrained(tmp_path)) == quantized_names(made) != set()


def test_several_controlnets_at_once(tmp_path):
    several = quantize_(MultiControlNetModel([make_controlnet(seed) for seed in (0, 1)]), "W8A8")
    expected = plan(make_controlnet(0), "W8A8").schemes
    assert all(stored_schemes(net) == expected for net in several.nets)
    several.save_pretrained(str(tmp_path / "controlnet"))
    again = MultiControlNetModel.from_pretrained(str(tmp_path / "controlnet"))
    assert quantized_names(again) == quantized_names(several) != set()
    assert_same_bytes(again.state_dict(), several.state_dict())
    assert not quantized_names(dequantize_(several))


MOTION = {"block_out_channels": (32, 64), "motion_layers_per_block": 1, "motion_norm_num_groups": 4}


class LongVideos(AnimateDiffFreeNoiseMixin):
    """A pipeline as FreeNoise sees it."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, unet: nn.Module, motion_adapter: nn.Module) -> None:
        self.unet, self.motion_adapter = unet, motion_adapter

    def run(self) -> Tensor:
        frames = torch.randn(1, 4, 8, 4, 4, generator=torch.Generator().manual_seed(0))
        text = make_inputs("unet")["encoder_hidden_states"][:1].expand(8, -1, -1)
        with torch.no_grad():
            return self.unet(frames, torch.tensor([300]), text, return_dict=False)[0]


def test_motion_modules(tmp_path):
    torch.manual_seed(0)
    adapter = diffusers.MotionAdapter(**MOTION, motion_num_attention_heads=4, use_motion_mid_block=True)
    model = quantize_(diffusers.UNetMotionModel.from_unet2d(make_model("unet"), adapter).eval(), "int8")
    codes = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    pipe, plain = LongVideos(model, adapter), LongVideos(dequantize_(copy.deepcopy(model)), adapter)
    short = pipe.run()
    for each in (pipe, plain):
        each.enable_free_noise(context_length=4, context_stride=2)
    assert_same_bytes(model.state_dict(), codes)
    long = pipe.run()
    assert not torch.allclose(long, short, atol=1e-3)
    assert_sqnr(long, plain.run(), at_least=60, at_most=200)
    pipe.disable_free_noise()
    assert_same_bytes(model.state_dict(), codes)
    assert torch.equal(pipe.run(), short)
    model.save_motion_modules(str(tmp_path))
    found = diffusers.MotionAdapter.from_pretrained(tmp_path).state_dict()
    expected = dequantize_(model).state_dict()
    assert found and all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def test_a_container_that_its_host_cannot_save(tmp_path):
    several = diffusers.FluxMultiControlNetModel([make_model("flux")])  # of any models
    quantize_(several, "int8")
    with pytest.raises(AttributeError, match="no attribute 'save_config'"):
        several.save_pretrained(tmp_path)
    assert not hasattr(several, "hf_quantizer")
    several.nets[0].save_pretrained(tmp_path)
    assert quantized_names(type(several.nets[0]).from_pretrained(tmp_path)) == quantized_names(several.nets[0])


def test_a_container_has_the_rules_of_what_it_holds():
    parts = nn.ModuleDict({"unet": make_model("unet"), "vae": make_autoencoder()})
    entries, own = plan(parts, "W8A8").entries, plan(parts["unet"], "W8A8").entries
    for name, entry in own.items():
        assert (entries[f"unet.{name}"].scheme, entries[f"unet.{name}"].reason) == (entry.scheme, entry.reason)
    assert not any(entry.scheme for name, entry in entries.items() if name.startswith("vae."))
    with pytest.raises(ValueError, match="nothing to quantize in ModuleList: .*autoencoders stay in 16 bit"):
        plan(nn.ModuleList([parts["vae"]]), "W8A8")


def make_controlnet(seed: int) -> nn.Module:
    """A ControlNet of the tiny UNet."""
    torch.manual_seed(seed)
    return diffusers.ControlNetModel.from_unet(make_model("unet"), conditioning_embedding_out_channels=(16, 16))
