"""Plans of published diffusion models at their true sizes, on the meta device."""

import pytest
import torch
from torch import nn

from hf_quant import QuantizerConfig, plan


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from diffusion.models import MODELS, T5_XXL  # noqa: E402
from diffusion.run import empty_model, empty_t5  # noqa: E402
from integration_tests.support.tiny_diffusion import make_autoencoder, make_model  # noqa: E402


# GB in bf16, with 8-bit weights, with int4; of the whole model, what stays in 16 bit included.
SIZES = {
    "flux.1-dev": (23.8, 12.0, 6.5),
    "flux.2-dev": (64.4, 33.1, 18.3),
    "cogvideox-5b": (11.1, 5.6, 3.0),
    "wan2.1-t2v-14b": (28.6, 14.5, 7.95),
    "qwen-image": (40.9, 20.6, 11.0),
    "sd3.5-large": (16.5, 8.5, 4.7),
    "pixart-sigma-xl": (1.24, 0.65, 0.368),
    "hunyuanvideo": (25.6, 12.9, 6.97),
    "ltx-video": (3.85, 1.97, 1.09),
    "lumina2": (5.22, 2.63, 1.42),
    "sdxl": (5.14, 2.92, 1.87),  # two fifths of what is left are convolutions
}


@pytest.mark.parametrize("name", SIZES)
def test_true_sizes(name):
    model = empty_model(MODELS[name])
    plans = [plan(model, weights, dtype=torch.bfloat16) for weights in ("W8A8_FP8", "int4")]
    gb = (plans[0].nbytes_before / 1e9, *(p.nbytes / 1e9 for p in plans))
    assert gb == pytest.approx(SIZES[name], rel=0.01)
    for p in plans:
        kept = [e for e in p.entries.values() if e.scheme is None]
        assert all(e.reason for e in kept)
        # Left alone is little, and all of it is said: nothing that counts is forgotten in 16 bit.
        linear = sum(e.bytes_before for e in kept if e.kind == "linear")
        assert linear < 0.03 * p.nbytes_before


def test_true_size_of_the_text_encoder():
    p8, p4 = (plan(empty_t5(T5_XXL), weights, dtype=torch.bfloat16) for weights in ("int8", "int4"))
    gb = (p8.nbytes_before / 1e9, p8.nbytes / 1e9, p4.nbytes / 1e9)
    assert gb == pytest.approx((9.53, 4.90, 2.72), rel=0.01)
    small = plan(empty_t5(T5_XXL), QuantizerConfig("int8", modules={"shared": "int8"}), dtype=torch.bfloat16)
    assert small.nbytes / 1e9 == pytest.approx(4.77, rel=0.01)


# {model: (module: a part of the reason why it stays in 16 bit), modules that read one vector per image}.
KEPT = {
    "flux.1-dev": (
        {
            "x_embedder": "input projection",
            "context_embedder": "input projection",
            "time_text_embed.guidance_embedder.linear_1": "embedding",
            "single_transformer_blocks.0.norm.linear": "first block",
            "norm_out.linear": "output projection",
            "proj_out": "output projection",
        },
        ("transformer_blocks.0.norm1.linear", "single_transformer_blocks.1.norm.linear"),
    ),
    "flux.2-dev": (
        {"double_stream_modulation_img.linear": "modulation of all blocks", "proj_out": "output projection"},
        (),
    ),
    "cogvideox-5b": (
        {"patch_embed.text_proj": "input projection", "time_embedding.linear_1": "embedding"},
        ("transformer_blocks.41.norm2.linear",),
    ),
    "wan2.1-t2v-14b": ({"condition_embedder.time_proj": "embedding", "proj_out": "output projection"}, ()),
    "qwen-image": (
        {"img_in": "input projection", "txt_in": "input projection", "transformer_blocks.0.img_mod.1": "first block"},
        ("transformer_blocks.0.txt_mod.1", "transformer_blocks.59.img_mod.1"),
    ),
    "pixart-sigma-xl": (
        {"adaln_single.linear": "modulation of all blocks", "caption_projection.linear_1": "input projection"},
        (),
    ),
    "sdxl": (
        {"time_embedding.linear_1": "embedding", "add_embedding.linear_2": "embedding"},
        ("down_blocks.1.resnets.0.time_emb_proj",),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_in_16_bit_and_why(name):
    kept, one_vector = KEPT[name]
    model = empty_model(MODELS[name])
    entries = plan(model, "W8A8", dtype=torch.bfloat16).entries
    for module, reason in kept.items():
        assert entries[module].scheme is None and reason in entries[module].reason, module
    for module in one_vector:
        assert entries[module].scheme.activation is None and "one vector" in entries[module].reason
    activations = [e for e in entries.values() if e.scheme is not None and e.scheme.activation is not None]
    assert len(activations) > 0.5 * len([e for e in entries.values() if e.kind == "linear"])
    # A list of one's own takes the place of this one, and an entry of `modules` beats both.
    first, *_ = kept
    own = plan(model, QuantizerConfig("W8A8", modules_to_not_convert=[]), dtype=torch.bfloat16).entries
    assert (own[first].scheme is None) == ("fewer than" in (own[first].reason or ""))
    named = plan(model, QuantizerConfig("int8", modules={first: "fp8"}), dtype=torch.bfloat16).entries
    assert named[first].scheme.weight.format == "fp8_e4m3"


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        ("DiTTransformer2DModel", ("transformer_blocks.3.norm1.emb.timestep_embedder.linear_1",)),
        ("UNetSpatioTemporalConditionModel", ("mid_block.attentions.0.time_pos_embed.linear_2",)),
        ("Kandinsky3UNet", ("down_blocks.2.attentions.0.in_norm.context_mlp.1",)),
        ("StableCascadeUNet", ("down_blocks.0.1.mapper", "up_blocks.1.1.mapper_sca")),
    ],
)
def test_embeddings_inside_of_blocks_read_one_vector(cls, names):
    with torch.device("meta"):
        model = getattr(diffusers, cls)()
    entries = plan(model, "W8A8", dtype=torch.bfloat16).entries
    for name in names:
        assert entries[name].scheme.activation is None and "one vector" in entries[name].reason, name


def test_a_list_of_layers_that_conditions_all_blocks_is_none_of_them():
    with torch.device("meta"):
        model = diffusers.ChromaTransformer2DModel(num_layers=1, num_single_layers=1)
    entries = plan(model, "int4", dtype=torch.bfloat16).entries
    guidance = [entry for name, entry in entries.items() if name.startswith("distilled_guidance_layer.layers.")]
    assert len(guidance) == 10 and all(entry.reason == "embedding of what all blocks read" for entry in guidance)
    assert entries["single_transformer_blocks.0.proj_mlp"].scheme is not None


def test_models_of_no_known_class_and_other_hosts():
    class Denoiser(type(make_model("pixart"))):
        pass

    model = make_model("pixart")
    model.__class__ = Denoiser
    assert plan(model, "int8").entries["proj_out"].reason.startswith("output projection")
    plain = nn.Sequential(nn.Linear(64, 64), nn.ModuleDict({"proj_out": nn.Linear(64, 64)}))
    assert plan(plain, "int8").entries["1.proj_out"].scheme is not None
    vae = make_autoencoder()
    assert plan(vae, QuantizerConfig(None, modules={"decoder.*.conv1": "int8"})).quantized
    # As `from_pretrained` does, also where other exclusions are lifted.
    for config in (QuantizerConfig("int8"), QuantizerConfig("int8", modules_to_not_convert=[])):
        with pytest.raises(ValueError, match="autoencoders stay in 16 bit"):
            plan(vae, config)
    entries = plan(vae, QuantizerConfig("int8", modules={"decoder.*.to_q": "int4"})).entries
    assert [name for name, entry in entries.items() if entry.scheme] == ["decoder.mid_block.attentions.0.to_q"]
    assert entries["decoder.mid_block.attentions.0.to_k"].reason.startswith("autoencoders stay in 16 bit")


def test_the_table_says_it():
    text = str(plan(make_model("flux"), QuantizerConfig("W8A8", attention="int8")))
    assert "modulation of the first block of its kind" in text and "its input is one vector per image" in text
    assert "attention: int8 scores in 2 modules" in text
