"""In diffusers' blocks: 8-bit attention, norms and activation functions computed by the quantization after them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_quant import QuantizerConfig, dequantize_, fuse_activations_, plan, quantize_, unfuse_activations_
from hf_quant.testing import assert_sqnr


diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")

from diffusers import FasterCacheConfig  # noqa: E402
from diffusers.hooks.layer_skip import LayerSkipConfig, apply_layer_skip  # noqa: E402
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from hf_quant.integrations.diffusers.attention import BACKEND, describe, int8_sdpa, set_attention_  # noqa: E402
from hf_quant.tests.recording import Calls  # noqa: E402
from integration_tests.support.tiny_architectures import ARCHITECTURES, Size  # noqa: E402
from integration_tests.support.tiny_diffusion import load, make_inputs, make_model, run  # noqa: E402


BF16 = torch.bfloat16


# Norms and activation functions.


# {model: norms, activation functions that its forward computes together with the quantization}.
FUSED = {
    "flux": (5, 2),
    "flux2": (5, 2),
    "sd3": (8, 3),
    "qwen_image": (4, 2),
    "pixart": (2, 1),
    "cogvideox": (0, 1),
    "wan": (0, 1),
    "hunyuan_video": (5, 2),
    "ltx": (0, 1),
    "sdxl": (24, 8),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_activations(name):
    model = quantize_(make_model(name, BF16), QuantizerConfig("W8A8", fuse_activations=True))
    with Calls() as calls:
        y = run(model, name)
    assert (calls.counts.get("layer_norm_quantize_rowwise", 0), calls.counts["act_quantize_rowwise"]) == FUSED[name]
    # What differs is fp32 in place of bf16 between the norm and the codes: as near to 16 bit as before, and to it.
    plain, expected = run(quantize_(make_model(name, BF16), "W8A8"), name), run(make_model(name, BF16), name)
    assert_sqnr(y, plain, at_least=28, at_most=60)
    assert_sqnr(y, expected, at_least=27, at_most=50)
    with torch.enable_grad():  # as without
        assert torch.equal(model(**make_inputs(name, BF16), return_dict=False)[0].float(), plain)


def test_fused_activations_of_copies_and_the_way_back(tmp_path):
    model = quantize_(make_model("flux", BF16), QuantizerConfig("W8A8", fuse_activations=True))
    y = run(model, "flux")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, "flux"), y)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.quantization_config.fuse_activations is None  # of this process
    with Calls() as calls:
        run(again, "flux")
    assert "act_quantize_rowwise" not in calls.counts  # None: on GPUs only
    types = [type(m) for m in make_model("flux").modules()]
    assert [type(m) for m in dequantize_(model).modules()] == types


def test_fused_activations_on_load(tmp_path, caplog):
    make_model("flux", BF16).save_pretrained(tmp_path / "flux")
    model = load(tmp_path / "flux", quantization_config=QuantizerConfig("W8A8", fuse_activations=True))
    expected = quantize_(make_model("flux", BF16), QuantizerConfig("W8A8", fuse_activations=True))
    assert torch.equal(run(model, "flux"), run(expected, "flux"))
    assert "hf_quant knows" not in caplog.text
    quantize_(make_model("lumina2", BF16), QuantizerConfig("W8A8", fuse_activations=True))
    assert "Lumina2Transformer2DModel has no block that hf_quant knows" in caplog.text
    weight_only = quantize_(make_model("flux", BF16), QuantizerConfig("int8", fuse_activations=True))
    assert torch.equal(run(weight_only, "flux"), run(quantize_(make_model("flux", BF16), "int8"), "flux"))
    with pytest.raises(ValueError, match="fuse_activations is 'yes'; needs True, False or None"):
        QuantizerConfig("W8A8", fuse_activations="yes")


def test_activations_of_a_loaded_model_are_fused_and_unfused(tmp_path):
    fused = quantize_(make_model("flux", BF16), QuantizerConfig("W8A8", fuse_activations=True))
    fused.save_pretrained(tmp_path)
    model = load(tmp_path)

    def fuses() -> bool:
        with Calls() as calls:
            run(model, "flux")
        return "act_quantize_rowwise" in calls.counts

    assert not fuses() and fuse_activations_(model) is model and fuses()
    assert torch.equal(run(model, "flux"), run(fused, "flux"))
    quantize_(model, QuantizerConfig(None, attention="int8"))  # keeps it
    assert fuses() and unfuse_activations_(model) is model and not fuses()
    types = [type(m) for m in make_model("flux").modules() if "Norm" in type(m).__name__]
    assert [type(m) for m in model.modules() if "Norm" in type(m).__name__] == types
    for name, weights, reason in (
        ("flux", "int8", "no layer that quantizes its inp"),
        ("lumina2", "W8A8", "no block"),
    ):
        other = quantize_(make_model(name, BF16), weights)
        with pytest.raises(ValueError, match=f"nothing to fuse in this .*: it has {reason}"):
            fuse_activations_(other)


def test_fused_activations_under_a_cache_that_reads_the_size_of_a_batch():
    timestep = torch.tensor(0)
    config = FasterCacheConfig(
        current_timestep_callback=timestep.item,
        attention_weight_callback=lambda module: 0.5,
        is_guidance_distilled=True,
    )
    inputs, outputs = make_inputs("flux"), {}
    other = {**inputs, "hidden_states": inputs["hidden_states"].flip(1)}
    for fuses in (True, False):
        model = quantize_(make_model("flux"), QuantizerConfig("W8A8", fuse_activations=fuses))
        with torch.no_grad():
            plain = model(**other).sample
            model.enable_cache(config)
            with Calls() as calls, model.cache_context("cond"):
                for now, given in ((900, inputs), (500, other)):
                    timestep.fill_(now)
                    outputs[fuses] = model(**given).sample
        assert calls.counts.get("act_quantize_rowwise", 0) == (4 if fuses else 0)
        assert not torch.equal(outputs[fuses], plain)  # attention is taken from the cache
    torch.testing.assert_close(outputs[True], outputs[False], rtol=0.05, atol=0.05)


def test_a_class_of_the_same_name_is_another():
    config = {"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 64}
    torch.manual_seed(0)
    model = diffusers.ZImageTransformer2DModel(in_channels=4, axes_dims=[4, 4, 8], axes_lens=[64, 32, 32], **config)
    names = {name for name, module in model.named_modules() if type(module).__name__ == "FeedForward"}
    assert names == {"noise_refiner.0.feed_forward", "context_refiner.0.feed_forward", "layers.0.feed_forward"}
    inputs = {
        "x": [torch.randn(4, 1, 16, 16)] * 2,
        "t": torch.tensor([0.3, 0.9]),
        "cap_feats": [torch.randn(8, 64)] * 2,
    }
    with torch.no_grad():
        expected = torch.stack(model.eval()(**inputs).sample)
        quantize_(model, QuantizerConfig("W8A8", fuse_activations=True))
        assert_sqnr(torch.stack(model(**inputs).sample), expected, at_least=26, at_most=52)


def test_weight_only_models_are_not_said_to_be_unknown(caplog):
    quantize_(make_model("flux", BF16), QuantizerConfig("int4", fuse_activations=True))
    assert "hf_quant knows" not in caplog.text


def test_an_adapter_reads_what_the_host_computes():
    from peft import LoraConfig

    outputs = []
    for fuses in (False, True):
        model = quantize_(make_model("flux", BF16), QuantizerConfig("W8A8", fuse_activations=fuses))
        torch.manual_seed(0)
        targets = ["to_q", "net.2", "net.0.proj", "proj_mlp"]
        model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        outputs.append(run(model, "flux"))
    assert_sqnr(outputs[1], outputs[0], at_least=35, at_most=70)


# Attention.


LARGE = Size(height=16, width=16)  # 256 tokens or more: short attention stays in 16 bit


@pytest.mark.parametrize(
    "name", ["flux", "flux2", "sd3", "pixart", "lumina2", "cogvideox", "wan", "ltx", "unet", "sdxl"]
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_attention(tmp_path, name, dtype):
    model = make_model(name, dtype)
    plain = run(model, name, LARGE)
    with Calls() as calls:
        quantize_(model, QuantizerConfig(None, attention="int8"))
        y = run(model, name, LARGE)
    assert calls.counts["int8_attention"] > 0
    assert_sqnr(y, plain, at_least=20, at_most=90)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, name, dtype)
    with Calls() as calls:
        assert_sqnr(run(again, name, LARGE), y, at_least=90 if dtype == torch.float32 else 30, at_most=float("inf"))
    assert calls.counts["int8_attention"] > 0
    assert_sqnr(run(dequantize_(model), name, LARGE), plain, at_least=300, at_most=float("inf"))
    assert not getattr(model, "is_quantized", False)


def test_attention_beside_quantized_weights(tmp_path):
    model = quantize_(make_model("cogvideox", BF16), QuantizerConfig("W8A8", attention="int8"))
    added = quantize_(quantize_(make_model("cogvideox", BF16), "W8A8"), QuantizerConfig(None, attention="int8"))
    y = run(model, "cogvideox", LARGE)
    assert torch.equal(run(added, "cogvideox", LARGE), y)
    assert added.config.quantization_config.attention == "int8" and added.config.quantization_config.plan
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, "cogvideox", LARGE), y)
    set_attention_(model, None)
    assert not torch.equal(run(model, "cogvideox", LARGE), y)


def test_attention_that_is_added_or_left_out_later():
    model = quantize_(make_model("flux", BF16), QuantizerConfig("W8A8", fuse_activations=True))
    quantize_(model, QuantizerConfig(None, attention="int8"))
    both = quantize_(make_model("flux", BF16), QuantizerConfig("W8A8", attention="int8", fuse_activations=True))
    assert torch.equal(run(model, "flux", LARGE), run(both, "flux", LARGE))
    quantize_(model, QuantizerConfig(None, attention="int8", fuse_activations=False))
    with Calls() as calls:
        run(model, "flux", LARGE)
    assert "act_quantize_rowwise" not in calls.counts and calls.counts["int8_attention"] == 2
    # A config without attention means 16 bit, here as in a checkpoint.
    model = quantize_(quantize_(make_model("flux", BF16), QuantizerConfig(None, attention="int8")), "int8")
    assert model.config.quantization_config.attention is None
    assert torch.equal(run(model, "flux", LARGE), run(quantize_(make_model("flux", BF16), "int8"), "flux", LARGE))


@pytest.mark.parametrize("name", ["flux", "sd3", "unet"])
def test_attention_stays_in_8_bit_when_processors_are_exchanged(name):
    model = quantize_(make_model(name), QuantizerConfig("int8", attention="int8"))
    y = run(model, name, LARGE)
    model.set_attn_processor({key: host_processor(value) for key, value in model.attn_processors.items()})
    assert torch.equal(run(model, name, LARGE), y)
    twin = pickle.loads(pickle.dumps(model))
    twin.set_attn_processor({key: host_processor(value) for key, value in twin.attn_processors.items()})
    assert torch.equal(run(twin, name, LARGE), y)
    quantize_(twin := dequantize_(twin), "int8")
    assert "set_attn_processor" not in vars(twin) and not torch.equal(run(twin, name, LARGE), y)


def host_processor(processor: object) -> object:
    """A new processor of the host's class."""
    return getattr(type(processor), "_hf_quant_host", type(processor))()


@pytest.mark.parametrize("size", [1, "auto"])
def test_attention_after_it_was_sliced(size):
    plain, model = make_model("unet"), quantize_(make_model("unet"), QuantizerConfig(None, attention="int8"))
    y = run(model, "unet", LARGE)
    for each in (plain, model):
        each.set_attention_slice(size)
    assert torch.equal(run(model, "unet", LARGE), run(plain, "unet", LARGE))
    model.set_attention_slice(None)  # as `pipe.disable_attention_slicing()`
    assert torch.equal(run(model, "unet", LARGE), y)


@pytest.mark.parametrize("scores", [False, True])
def test_attention_that_a_guider_skips(scores):
    """The processor as a whole, or the scores of perturbed attention guidance."""
    plain = make_model("unet")
    model = quantize_(copy.deepcopy(plain), QuantizerConfig(None, attention="int8"))
    unperturbed = run(plain, "unet", LARGE)
    for each in (plain, model):
        blocks = "down_blocks.0.attentions.0.transformer_blocks"
        apply_layer_skip(each, LayerSkipConfig([0], blocks, not scores, scores, skip_ff=False))
    expected = run(plain, "unet", LARGE)
    assert_sqnr(expected, unperturbed, at_least=0, at_most=10)
    assert_sqnr(run(model, "unet", LARGE), expected, at_least=25, at_most=90)


def test_the_default_processors_of_the_host():
    model, plain = make_model("unet"), make_model("unet")
    for each in (quantize_(model, QuantizerConfig(None, attention="int8")), plain):
        each.set_default_attn_processor()
    assert torch.equal(run(model, "unet", LARGE), run(plain, "unet", LARGE))


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl", "wan"])
def test_attention_under_autocast(name):
    plain, model = make_model(name), quantize_(make_model(name), QuantizerConfig(None, attention="int8"))
    with torch.autocast("cpu", dtype=BF16), Calls() as calls:
        y = run(model, name, LARGE)  # some norms of queries and keys return fp32, beside values in bf16
    assert calls.counts["int8_attention"] > 0
    with torch.autocast("cpu", dtype=BF16):
        assert_sqnr(y, run(plain, name, LARGE), at_least=20, at_most=70)


def test_the_backend_of_the_dispatcher():
    q, k, v = (torch.randn(2, 300, 4, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = dispatch_attention_fn(q, k, v)
    assert AttentionBackendName(BACKEND) is AttentionBackendName.HF_QUANT_INT8 in list(AttentionBackendName)
    with Calls() as calls, attention_backend(BACKEND):
        y = dispatch_attention_fn(q, k, v)
        assert calls.counts == {"int8_attention": 1}
        mask = torch.ones(2, 300, dtype=torch.bool)
        mask[:, 250:] = False
        masked = dispatch_attention_fn(q, k, v, attn_mask=mask)
        assert calls.counts == {"int8_attention": 1}
    assert_sqnr(y, expected, at_least=25, at_most=60)
    assert torch.equal(masked, dispatch_attention_fn(q, k, v, attn_mask=mask))
    model = make_model("flux")
    with attention_backend("native"), Calls() as calls:  # diffusers makes it the default of all models: until here
        model.set_attention_backend(BACKEND)
        run(model, "flux", LARGE)
    assert calls.counts == {"int8_attention": 2}
    model.reset_attention_backend()
    with pytest.raises(ValueError, match="no context parallelism"), attention_backend(BACKEND):
        dispatch_attention_fn(q, k, v, parallel_config=object())


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"scale": 0.3}, True),
        ({"is_causal": True}, True),
        ({"enable_gqa": True}, True),
        ({"dropout_p": 0.0}, True),
        ({"attn_mask": torch.zeros(300, 300)}, False),
        ({"keys": 255}, False),
        ({"keys": 256}, True),
        ({"head": 160}, False),
    ],
    ids=str,
)
def test_which_attention_is_in_8_bit(change, served):
    change = dict(change)
    keys, head = change.pop("keys", 300), change.pop("head", 32)
    heads = 2 if change.get("enable_gqa") else 4
    q, k, v = torch.randn(1, 4, 300, head), torch.randn(1, heads, keys, head), torch.randn(1, heads, keys, head)
    with Calls() as calls:
        y = int8_sdpa(q, k, v, **change)
    assert bool(calls.counts) == served
    expected = F.scaled_dot_product_attention(q, k, v, **change)
    if served:
        assert_sqnr(y, expected, at_least=25, at_most=60)
    else:
        assert torch.equal(y, expected)
    leaf = q.clone().requires_grad_()
    int8_sdpa(leaf, k, v, **change).sum().backward()
    assert torch.isfinite(leaf.grad).all()


def test_attention_of_models_that_have_none():
    with pytest.raises(ValueError, match="attention is 'int8', but a Linear is no diffusion model"):
        quantize_(nn.Linear(128, 128), QuantizerConfig("int8", attention="int8"))
    with pytest.raises(ValueError, match="attention is 'int4'; allowed: None, 'int8'"):
        QuantizerConfig("int8", attention="int4")
    assert plan(make_model("flux"), QuantizerConfig("int8")).attention is None


@torch.no_grad()
def test_attention_by_the_dispatcher_without_a_backend_of_its_own():
    if not hasattr(diffusers, "CosmosTransformer3DModel"):
        pytest.skip(f"diffusers {diffusers.__version__} has no CosmosTransformer3DModel")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "mlp_ratio": 2, "text_embed_dim": 32}
    latents = {"in_channels": 4, "out_channels": 4, "patch_size": (1, 2, 2), "max_size": (4, 32, 32)}
    model = diffusers.CosmosTransformer3DModel(
        **sizes, **latents, adaln_lora_dim=4, concat_padding_mask=False, extra_pos_embed_type=None
    ).eval()
    inputs = (torch.randn(1, 4, 1, 32, 32), torch.tensor([0.5]), torch.randn(1, 8, 32))  # 256 tokens
    plain = model(*inputs).sample
    assert plan(model, QuantizerConfig(None, attention="int8")).attention.startswith("attention: int8 scores in 2")
    quantize_(model, QuantizerConfig(None, attention="int8"))
    with Calls() as calls:
        y = model(*inputs).sample
    assert calls.counts == {"int8_attention": 1}  # cross attention has few keys
    assert_sqnr(y, plain, at_least=20, at_most=90)
    assert torch.equal(dequantize_(model)(*inputs).sample, plain)


def test_attention_of_a_processor_that_takes_one_backend_alone():
    if not hasattr(diffusers, "AnyFlowFARTransformer3DModel"):
        pytest.skip(f"diffusers {diffusers.__version__} has no AnyFlowFARTransformer3DModel")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 32, "text_dim": 32}
    model = diffusers.AnyFlowFARTransformer3DModel(**sizes, freq_dim=32, in_channels=4, out_channels=4)
    quantize_(model, QuantizerConfig(None, attention="int8"))
    block = model.blocks[0]  # whose self attention has masks for "flex"
    assert [attn.processor._attention_backend for attn in (block.attn1, block.attn2)] == ["flex", BACKEND]
    dequantize_(model)
    assert [attn.processor._attention_backend for attn in (block.attn1, block.attn2)] == ["flex", None]
    module = pytest.importorskip("diffusers.models.transformers.transformer_kandinsky6_sr", reason="new in 0.42")
    assert describe(module.Kandinsky6SRAttention(64, 32)) is None  # it gives "flex" to the dispatcher


def test_attention_is_of_the_denoiser(tmp_path, caplog):
    from diffusers import FluxPipeline, PipelineQuantizationConfig

    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(BF16).save_pretrained(tmp_path)
    config = PipelineQuantizationConfig(
        quant_backend="hf_quant", quant_kwargs={"weights": "int8", "attention": "int8"}
    )
    pipe = FluxPipeline.from_pretrained(tmp_path, tokenizer=None, tokenizer_2=None, quantization_config=config)
    assert pipe.transformer.config.quantization_config.attention == "int8"
    assert pipe.text_encoder_2.config.quantization_config.attention is None
    assert "only diffusion models have it: not T5EncoderModel" in caplog.text


def test_every_architecture_is_here():
    assert set(FUSED) | {"lumina2", "unet"} == set(ARCHITECTURES)


# Compiled.


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("flux", [LARGE, LARGE._replace(height=18), LARGE._replace(height=20)]),
        ("cogvideox", [LARGE]),
        ("flux2", [Size()]),
    ],
)
def test_compiled_blocks(name, sizes):
    config = QuantizerConfig("W8A8_FP8", attention="int8", fuse_activations=True)
    model = quantize_(make_model(name, BF16), config)
    expected = [run(model, name, size) for size in sizes]
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("TransformerBlock", "CogVideoXBlock"))]
    backend = "eager" if len(sizes) > 1 else "aot_eager"  # which takes 40 s more for sizes that are symbols
    for block in blocks:
        block.compile(fullgraph=True, backend=backend, dynamic=len(sizes) > 1)
    for size, y in zip(sizes, expected):
        assert torch.equal(run(model, name, size), y)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len({type(block) for block in blocks})
