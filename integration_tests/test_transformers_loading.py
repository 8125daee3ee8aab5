"""Loading weights: shards, dtypes, device maps, tied weights, heads, other classes."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import hf_quant
from hf_quant import QuantizerConfig, quantize_
from hf_quant.modules import QuantEmbedding, QuantizedModule, QuantLinear
from hf_quant.testing import assert_sqnr, sqnr
from integration_tests.support.tiny_models import build, inputs, outputs


INT4 = QuantizerConfig("int4")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Directory of a small Llama in bf16."""
    directory = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama_int4(llama, tmp_path_factory) -> Path:
    """Directory of the same, quantized to int4."""
    directory = tmp_path_factory.mktemp("llama-int4")
    load(llama, INT4).save_pretrained(directory)
    return directory


def load(directory: Path, config=None, cls=transformers.LlamaForCausalLM, **kwargs) -> nn.Module:
    if config is not None:  # auto classes take None for: forget what config.json says
        kwargs["quantization_config"] = config
    return cls.from_pretrained(directory, **{"dtype": "auto", **kwargs})


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    expected, found = model.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def codes_on_disk(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}


def test_shards_in_and_out(llama, llama_int4, tmp_path):
    build("llama").save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    model = load(tmp_path / "shards", INT4)
    assert_same_weights(load(llama, INT4), model)
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    # The tensors of one layer are in several files, and a converter that needs them together would fail.
    reloaded = load(tmp_path / "out")
    assert_same_weights(model, reloaded)
    reloaded.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    reloaded.save_pretrained(tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (llama_int4 / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "phi3", "nomic_bert"])
def test_shards_of_a_model_whose_weights_the_host_merges(name, tmp_path):
    build(name).save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    cls = type(build(name))
    model = load(tmp_path / "shards", INT4, cls)
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    assert_same_weights(model, load(tmp_path / "out", cls=cls))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_checkpoints_with_separate_and_with_fused_experts_give_the_same_codes(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "separate")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = [set(codes_on_disk(tmp_path / kind)) for kind in ("separate", "fused")]
    assert any(".experts.0." in key for key in names[0]) and not any(".experts.0." in key for key in names[1])
    quantized = [load(tmp_path / kind, INT4, type(model)) for kind in ("separate", "fused")]
    assert_same_weights(*quantized)
    for kind, model in zip(("separate", "fused"), quantized):
        model.save_pretrained(tmp_path / f"{kind}-int4")
        reloaded = load(tmp_path / f"{kind}-int4", cls=type(model))
        assert_same_weights(model, reloaded)
        reloaded.dequantize()
        reloaded.save_pretrained(tmp_path / f"{kind}-plain")
        plain = load(tmp_path / f"{kind}-plain", cls=type(model))
        assert_same_weights(reloaded, plain)


# dtypes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float16, torch.float32, "auto", None])
def test_dtype(stored, asked, tmp_path):
    build("llama", stored).save_pretrained(tmp_path)
    kwargs = {} if asked is None else {"dtype": asked}
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **kwargs)
    config = QuantizerConfig("W4A16")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, **kwargs)
    assert model.dtype == plain.dtype
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {plain.dtype}
    layer = model.model.layers[0].mlp.down_proj
    assert layer.weight.dtype == plain.dtype
    assert layer.scheme.weight.scale_dtype == str(plain.dtype).removeprefix("torch.")
    # What is quantized is what the model without quantization would have: the weight in the model's dtype.
    assert_same_weights(model, quantize_(plain, config))


@pytest.mark.parametrize("asked", [torch.float16, torch.float32])
def test_another_dtype_for_a_quantized_checkpoint(asked, llama_int4):
    """The codes and their scales stay; what is not quantized, and what is computed, gets the dtype."""
    model, other = load(llama_int4), load(llama_int4, dtype=asked)
    assert other.dtype == asked
    first, second = (m.model.layers[1].mlp.up_proj for m in (model, other))
    assert second.weight.dtype == asked and first.weight.dtype == torch.bfloat16
    assert torch.equal(first.qdata, second.qdata) and torch.equal(first.scale, second.scale)
    assert_sqnr(outputs(other, "llama"), outputs(model, "llama"), at_least=30, at_most=80)


# device maps


MAPS = {
    "auto": "auto",
    "cpu": "cpu",
    "dict": {"": "cpu"},
    "whole layers on disk": {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    },
    "all but one on disk": {
        "model.embed_tokens": "disk",
        "model.rotary_emb": "cpu",
        "model.layers.0": "disk",
        "model.layers.1": "disk",
        "model.norm": "disk",
        "lm_head": "disk",
    },
}


@pytest.mark.parametrize("pre_quantized", [False, True], ids=["on the fly", "pre-quantized"])
@pytest.mark.parametrize("label", MAPS)
def test_device_map(label, pre_quantized, llama, llama_int4, tmp_path):
    config, source = (None, llama_int4) if pre_quantized else (INT4, llama)
    expected = load(llama_int4)
    model = load(source, config, device_map=MAPS[label], offload_folder=tmp_path / "offload")
    if "disk" in label:
        offloaded = model.model.layers[1].mlp.up_proj
        assert offloaded.qdata.device.type == "meta" and offloaded.scale.device.type == "meta"
    assert torch.equal(outputs(model, "llama"), outputs(expected, "llama"))
    model.save_pretrained(tmp_path / "saved")
    for file in llama_int4.iterdir():
        assert file.read_bytes() == (tmp_path / "saved" / file.name).read_bytes(), file.name
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert_same_weights(expected, load(tmp_path / "shards"))


def test_automatic_device_map_counts_packed_bytes(llama):
    """0.6 of the 16-bit size does not hold the 16-bit model, and does hold the packed one."""
    footprint = load(llama).get_memory_footprint()
    plain = load(llama, device_map="auto", max_memory={"cpu": int(0.6 * footprint)}, offload_folder=llama / "tmp")
    assert "disk" in plain.hf_device_map.values()
    packed = load(llama, INT4, device_map="auto", max_memory={"cpu": int(0.6 * footprint)})
    assert "disk" not in getattr(packed, "hf_device_map", {}).values()
    assert all(p.device.type == "cpu" for p in packed.parameters())


def test_an_offloaded_model_is_not_dequantized(llama_int4, tmp_path):
    model = load(llama_int4, device_map=MAPS["whole layers on disk"], offload_folder=tmp_path)
    with pytest.raises(ValueError, match="offloaded and cannot be dequantized"):
        model.dequantize()
    assert len(quantized_names(model)) == 14
    with pytest.raises(ValueError, match="this model is quantized: casting"):
        model.to(torch.float32)


def test_quantization_device(llama):
    model = load(llama, QuantizerConfig("int4", quantization_device="cpu"))
    assert_same_weights(model, load(llama, INT4))
    # Where it was computed is nobody's business afterwards.
    assert model.config.quantization_config.quantization_device is None


# tied weights, exclusions


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "gpt2"])
def test_tied_head_named_in_modules(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "plain")
    head = "lm_head"
    reference = outputs(model, name)
    quantized = load(tmp_path / "plain", QuantizerConfig("int8", modules={head: "int8"}), type(model))
    embedding, output = quantized.get_input_embeddings(), quantized.get_output_embeddings()
    assert isinstance(embedding, QuantEmbedding) and isinstance(output, QuantLinear)
    assert embedding.qdata is output.qdata and embedding.scale is output.scale
    assert_sqnr(outputs(quantized, name), reference, at_least=26, at_most=55)
    quantized.save_pretrained(tmp_path / "int8")
    stored = codes_on_disk(tmp_path / "int8")
    vocabulary = [key for key, value in stored.items() if key.endswith("qdata") and value.shape[0] == 96]
    assert len(vocabulary) == 1
    reloaded, info = load(tmp_path / "int8", cls=type(model), output_loading_info=True)
    assert not any(info.values())
    embedding, output = reloaded.get_input_embeddings(), reloaded.get_output_embeddings()
    assert embedding.qdata is output.qdata and embedding.scale is output.scale
    assert torch.equal(outputs(reloaded, name), outputs(quantized, name))
    reloaded.tie_weights()
    assert reloaded.get_input_embeddings().qdata is reloaded.get_output_embeddings().qdata
    reloaded.save_pretrained(tmp_path / "again")
    for file in (tmp_path / "int8").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    reloaded.dequantize()
    assert reloaded.get_input_embeddings().weight is reloaded.get_output_embeddings().weight
    reloaded.save_pretrained(tmp_path / "dequantized")
    plain = load(tmp_path / "dequantized", cls=type(model))
    assert torch.equal(outputs(plain, name), outputs(reloaded, name))


def test_modules_and_modules_to_not_convert(llama, tmp_path):
    config = QuantizerConfig(
        "int4",
        modules={
            "lm_head": "int8",
            "*.down_proj": {"weights": "int4", "group_size": 64},
            "re:.*layers\\.0\\..*": None,
        },
        modules_to_not_convert=["o_proj"],
    )
    model = load(llama, config)
    layer = "model.layers.1"
    assert quantized_names(model) == {
        *(f"{layer}.self_attn.{n}_proj" for n in "qkv"),
        *(f"{layer}.mlp.{n}_proj" for n in ("gate", "up", "down")),
        "model.layers.0.mlp.down_proj",
        "lm_head",
    }
    assert model.lm_head.scheme.weight.format == "int8"
    assert model.model.layers[1].mlp.down_proj.scheme.weight.group_size == 64
    model.save_pretrained(tmp_path)
    reloaded = load(tmp_path)
    assert_same_weights(model, reloaded)
    assert model.config.quantization_config == reloaded.config.quantization_config


def test_pickled_checkpoint(llama, llama_int4, tmp_path):
    model = load(llama)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same_weights(load(tmp_path, INT4), load(llama_int4))


def test_key_mapping_is_needed_once(llama, llama_int4, tmp_path):
    model = load(llama)
    model.config.save_pretrained(tmp_path / "other")
    renamed = {key.replace("model.", "trunk."): value for key, value in model.state_dict().items()}
    save_file(renamed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    mapping = {"^trunk": "model"}
    quantized = load(tmp_path / "other", INT4, key_mapping=mapping)
    quantized.save_pretrained(tmp_path / "int4")
    for kwargs in ({}, {"key_mapping": mapping}):
        assert_same_weights(load(tmp_path / "int4", **kwargs), load(llama_int4))


def test_a_head_of_another_size(tmp_path):
    build("llama_classifier").save_pretrained(tmp_path)
    cls = transformers.LlamaForSequenceClassification
    try:
        model = load(tmp_path, INT4, cls, id2label=dict(enumerate("abcde")), ignore_mismatched_sizes=True)
    except ValueError as error:  # transformers 5.17 loads the smaller head with any quantizer
        assert "score.weight is (3, 64); the model's config needs (5, 64)" in str(error)
        return
    assert model.score.weight.shape == (5, 64) and model.score.weight.requires_grad
    assert len(quantized_names(model)) == 14


def test_modules_that_the_model_keeps_in_fp32(tmp_path):
    """T5's `wo` overflows in fp16: it stays fp32 there, and is quantized in bf16."""
    build("t5", torch.float16).save_pretrained(tmp_path / "plain")
    for dtype, kept in ((torch.float16, True), (torch.bfloat16, False)):
        model = load(tmp_path / "plain", INT4, transformers.T5ForConditionalGeneration, dtype=dtype)
        wo = model.encoder.block[0].layer[1].DenseReluDense.wo
        assert isinstance(wo, QuantizedModule) != kept
        assert wo.weight.dtype == (torch.float32 if kept else dtype)
        model.save_pretrained(tmp_path / str(dtype))
        reloaded = load(tmp_path / str(dtype), cls=type(model))
        assert_same_weights(model, reloaded)
        assert torch.equal(outputs(model, "t5"), outputs(reloaded, "t5"))


class CustomConfig(transformers.PreTrainedConfig):
    model_type = "hf_quant_custom"


class CustomModel(transformers.PreTrainedModel):
    """A model from outside of the library, which initializes weights by writing into them.

    Like XLNet it makes one of them in memory where a model is loaded on the meta device.
    """

    config_class = CustomConfig

    def __init__(self, config):
        super().__init__(config)
        self.first = nn.Linear(64, 64)
        self.first.weight = nn.Parameter(torch.FloatTensor(64, 64))
        self.rest = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.3)
            module.bias.data.zero_()
        if module is self:
            self.first.weight.data.normal_(0, 0.5)

    def forward(self, x):
        return (self.rest(self.first(x)),)


def test_custom_model(tmp_path):
    model, x = CustomModel(CustomConfig()), torch.randn(3, 64)
    model.save_pretrained(tmp_path / "plain")
    quantized = load(tmp_path / "plain", QuantizerConfig("int8"), CustomModel)
    assert_sqnr(quantized(x)[0], model(x)[0], at_least=30, at_most=60)
    quantized.save_pretrained(tmp_path / "int8")
    assert_same_weights(quantized, load(tmp_path / "int8", cls=CustomModel))


def test_quantized_dequantized_and_quantized_again(llama, tmp_path):
    model = load(llama, QuantizerConfig("int8"))
    assert model.model_tags == ["hf_quant"]
    model.dequantize()
    assert not model.model_tags
    quantize_(model, INT4)
    model.save_pretrained(tmp_path)
    reloaded = load(tmp_path)
    assert reloaded.config.quantization_config.weights == "int4"
    assert_same_weights(model, reloaded)


@pytest.mark.parametrize(
    ("name", "pattern", "kind"),
    [
        ("vit", "*.projection", "QuantConv2d"),
        ("whisper", "model.encoder.conv?", "QuantConv1d"),
        ("gpt2", "transformer.wpe", "QuantEmbedding"),
    ],
)
def test_convolutions_and_embeddings_named_in_modules(name, pattern, kind, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "plain")
    quantized = load(tmp_path / "plain", QuantizerConfig("int8", modules={pattern: "int8"}), type(model))
    assert kind in {type(m).__name__ for m in quantized.modules()}
    assert_sqnr(outputs(quantized, name), outputs(model, name), at_least=26, at_most=55)
    quantized.save_pretrained(tmp_path / "int8")
    reloaded, info = load(tmp_path / "int8", cls=type(model), output_loading_info=True)
    assert not any(info.values())
    assert_same_weights(quantized, reloaded)
    assert torch.equal(outputs(quantized, name), outputs(reloaded, name))


def test_pipeline(asset_model_dir, tmp_path):
    """The trained model, by the host's pipeline: quantized on load, saved, and from the checkpoint by its path."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(asset_model_dir)
    model = load(asset_model_dir, INT4, transformers.AutoModelForCausalLM)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [
        transformers.pipeline("text-generation", **arguments)(
            "def main(", max_new_tokens=8, do_sample=False, return_full_text=False
        )[0]["generated_text"]
        for arguments in ({"model": model, "tokenizer": tokenizer}, {"model": str(tmp_path)})
    ]
    assert texts[0] == texts[1] and texts[0].strip()


def test_config_as_a_dict(llama, llama_int4):
    model = load(llama, {"quant_method": "hf_quant", "weights": "int4"})
    assert_same_weights(model, load(llama_int4))


# other classes than the one that was saved


@pytest.fixture(scope="module")
def base_and_head(tmp_path_factory) -> dict[str, Path]:
    """Quantized checkpoints of a Llama with its head, and of its base model alone."""
    directory = tmp_path_factory.mktemp("classes")
    model = build("llama")
    model.save_pretrained(directory / "plain")
    model.model.save_pretrained(directory / "plain-base")
    load(directory / "plain", INT4).save_pretrained(directory / "head")
    load(directory / "plain", INT4, transformers.LlamaModel).save_pretrained(directory / "base")
    return {name: directory / name for name in ("plain", "plain-base", "head", "base")}


@pytest.mark.parametrize("source", ["plain-base", "base", "plain", "head"])
def test_a_new_head_stays_plain_initialized_and_trainable(source, base_and_head, tmp_path):
    config = INT4 if source.startswith("plain") else None
    cls = transformers.LlamaForSequenceClassification
    transformers.set_seed(0)
    model, info = load(base_and_head[source], config, cls, num_labels=3, output_loading_info=True)
    assert set(info["missing_keys"]) == {"score.weight"}
    assert type(model.score) is nn.Linear and model.score.weight.requires_grad
    assert 0.01 < model.score.weight.std() < 0.03  # initializer_range is 0.02
    assert len(quantized_names(model)) == 14
    model.config.pad_token_id = 2
    out = model(**inputs("llama"), labels=torch.tensor([0, 1]))
    assert torch.isfinite(out.loss)
    out.loss.backward()
    assert model.score.weight.grad.abs().sum() > 0
    model.save_pretrained(tmp_path)
    reloaded, info = load(tmp_path, cls=cls, output_loading_info=True)
    assert not any(info.values())
    assert_same_weights(model, reloaded)


@pytest.mark.parametrize("source", ["plain-base", "base"])
def test_a_new_head_that_modules_names_stays_plain(source, base_and_head, tmp_path):
    config = QuantizerConfig("int4", modules={"lm_head": "int8"}) if source == "plain-base" else None
    transformers.set_seed(0)
    model = load(base_and_head[source], config)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight.requires_grad
    assert 0.01 < model.lm_head.weight.std() < 0.03
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["plan"]
    assert "lm_head" not in json.dumps(stored)
    reloaded, info = load(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert_same_weights(model, reloaded)


def test_a_checkpoint_with_a_head_in_the_base_class_and_back(base_and_head, tmp_path):
    base = load(base_and_head["head"], cls=transformers.AutoModel)
    assert type(base) is transformers.LlamaModel
    assert_same_weights(base, load(base_and_head["base"], cls=transformers.LlamaModel))
    base.save_pretrained(tmp_path)
    model, info = load(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    expected = load(base_and_head["head"])
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in expected.named_parameters() if "lm_head" not in n)
    model.lm_head.weight.data.copy_(expected.lm_head.weight)
    assert torch.equal(outputs(model, "llama"), outputs(expected, "llama"))


CODES = {"qdata": torch.int32, "scale": torch.uint8, "global_scale": torch.int32}


def test_the_checkpoint_itself(llama_int4):
    """Names, dtypes and metadata of the file: integers for whatever is quantized, one empty guard."""
    with safe_open(llama_int4 / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    stored = codes_on_disk(llama_int4)
    empty = [key for key, value in stored.items() if value.numel() == 0]
    assert len(empty) == 1 and empty[0].endswith(".weight")
    for key, value in stored.items():
        assert value.dtype == CODES.get(key.rpartition(".")[2], torch.bfloat16)
    config = json.loads((llama_int4 / "config.json").read_text())
    fields = config["quantization_config"]
    assert (fields["quant_method"], fields["format_version"]) == ("hf_quant", 1)
    assert fields["hf_quant_version"] == hf_quant.__version__
    assert QuantizerConfig.from_dict(fields).to_dict() == fields
    assert os.fspath(llama_int4) not in json.dumps(config)


def test_nothing_is_warned_about(llama, llama_int4, caplog):
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        for model in (load(llama, INT4), load(llama_int4)):
            model.generation_config.pad_token_id = 2
            assert sqnr(outputs(model, "llama"), outputs(load(llama), "llama")) > 5
    assert not caplog.records
