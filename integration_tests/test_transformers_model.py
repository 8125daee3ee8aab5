"""Uses of a loaded quantized model: move, copy, count, resize, generate, compile, train adapters' inputs."""

import copy
import gc
import io
import json
import pickle
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import hf_quant
from hf_quant import (
    QuantizerConfig,
    convert_qat_,
    dequantize_,
    finish_training_,
    prepare_qat_,
    prepare_training_,
    quantize_,
)
from hf_quant.modules import QuantizedModule
from hf_quant.testing import sqnr
from integration_tests.support.tiny_models import build, inputs, outputs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Directories of 16-bit models, by name of the architecture."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "llama_tied", "mixtral", "gpt2", "t5", "bert"):
        build(name).save_pretrained(directory / name)
    return {path.name: path for path in directory.iterdir()}


@pytest.fixture
def load(checkpoints):
    """Load an architecture quantized, once per test."""

    def load(name: str = "llama", config: str | QuantizerConfig = "int4", **kwargs) -> nn.Module:
        config = QuantizerConfig(config) if isinstance(config, str) else config
        cls = getattr(transformers, type(build(name)).__name__)
        return cls.from_pretrained(checkpoints[name], quantization_config=config, **{"dtype": "auto", **kwargs})

    return load


def test_properties(load):
    model = load()
    quantizer = model.hf_quantizer
    assert quantizer.is_trainable is True and quantizer.is_compileable is True and quantizer.is_serializable() is True
    assert model.is_quantized and model.quantization_method == "hf_quant"
    assert "hf_quant" in model.model_tags
    assert not model.training


def test_a_model_without_any_floating_point_parameter(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.OlmoConfig(**sizes, vocab_size=96, pad_token_id=0, eos_token_id=1)  # norms have no weights
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    quantize_(model, QuantizerConfig("int8", modules={"model.embed_tokens": "int8", "lm_head": "int8"}))
    assert not any(parameter.is_floating_point() for parameter in model.parameters())
    assert model.dtype == model.model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    again = transformers.OlmoForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and torch.equal(outputs(again, "llama"), outputs(model, "llama"))


@pytest.mark.parametrize("weights", ["int8", "int4", "int2", "nf4"])
def test_sizes_are_true(weights, load, checkpoints):
    plain = transformers.LlamaForCausalLM.from_pretrained(checkpoints["llama"], dtype="auto")
    plan = hf_quant.plan(plain, QuantizerConfig(weights))
    model = load(config=weights)
    assert model.get_memory_footprint() == plan.nbytes
    assert plan.nbytes_before == plain.get_memory_footprint()
    assert model.get_memory_footprint() < plain.get_memory_footprint()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == trainable
    # Of the quantized layers nothing trains; embeddings, norms and the head may.
    assert trainable == sum(p.numel() for n, p in plain.named_parameters() if "_proj" not in n)


def test_parameters_are_counted_as_weights(load, checkpoints, tmp_path):
    """Not the words that hold their codes; also by a model that vanishes in the same expression."""
    embeddings = QuantizerConfig("int3", modules={"model.embed_tokens": "int8", "lm_head": "int8"})
    for name, config in (
        ("llama", "int4"),
        ("mixtral", "nf4"),
        ("gpt2", "int8"),
        ("t5", "int2"),
        ("llama_tied", embeddings),
    ):
        plain = build(name)
        for options in ({}, {"exclude_embeddings": True}):
            assert load(name, config).num_parameters(**options) == plain.num_parameters(**options), name
    model = load("llama_tied", embeddings)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == build("llama_tied").num_parameters()
    restored = model.dequantize()
    assert restored.num_parameters() == plain.num_parameters() and "num_parameters" not in vars(restored)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt2", "t5"])
def test_dequantize_saves_and_loads_as_a_plain_model(name, load, tmp_path):
    model = load(name)
    before = outputs(model, name)
    restored = model.dequantize()
    assert restored is model and not getattr(model, "is_quantized", False)
    assert not any(isinstance(m, QuantizedModule) for m in model.modules())
    after = outputs(model, name)
    assert sqnr(after, before) > 28
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    plain, info = type(model).from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(outputs(plain, name), after)
    model.to(torch.float32)  # free again
    assert model.dtype == torch.float32


def test_a_model_quantized_as_a_part_of_another_saves_and_reloads(tmp_path):
    backbone = build("llama")
    outer = quantize_(nn.ModuleDict({"backbone": backbone, "head": nn.Linear(96, 64)}), "int4")
    assert backbone.is_quantized
    before = outputs(backbone, "llama")
    backbone.save_pretrained(tmp_path)
    again = type(backbone).from_pretrained(tmp_path)
    assert torch.equal(outputs(again, "llama"), before)
    dequantize_(outer)
    assert not getattr(backbone, "is_quantized", False) and "quantization_config" not in backbone.config.to_dict()


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """The models inside a model, and itself, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, transformers.PreTrainedModel)}


def _reloads(model: nn.Module, directory: Path) -> None:
    """Save and load a model, as its own class: every tensor is the same, and the saved one is unchanged."""
    before = {part: (dict(vars(part.config)), set(vars(part))) for part in _parts(model).values()}
    model.save_pretrained(directory)
    for part, (fields, attributes) in before.items():
        assert vars(part.config).get("quantization_config") == fields.get("quantization_config")
        assert set(vars(part)) - attributes <= {"_weight_conversions"}
    again, info = type(model).from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_a_model_of_which_a_part_is_quantized_saves_and_reloads(tmp_path):
    model = build("llama")
    quantize_(model.model.layers, "int4")
    _reloads(model, tmp_path / "layers")
    model = build("llava")
    quantize_(model.model.language_model, "int8")  # a model of its own, whose config is a part of the outer one
    _reloads(model, tmp_path / "language_model")
    assert "quantization_config" in model.config.text_config.to_dict()
    assert (
        "quantization_config"
        not in json.loads((tmp_path / "language_model" / "config.json").read_text())["text_config"]
    )


def test_a_part_trains_with_int8_weights_beside_a_quantized_part(tmp_path):
    model = build("llama")
    prepare_training_(model.model.layers[0].mlp, "int8_weights", min_size=1)
    quantize_(model.model.layers[1], "int4")
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert isinstance(again.model.layers[0].mlp.up_proj, QuantizedModule)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert "quantization_config" not in vars(model.config)


def test_one_of_two_tied_modules_is_quantized(tmp_path):
    model = build("llama_tied")
    quantize_(model.lm_head, "int8")
    with pytest.raises(
        ValueError, match="tie lm_head and model.embed_tokens, of which one alone is quantized: quantize"
    ):
        model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = False
    _reloads(model, tmp_path)


@pytest.mark.parametrize("name", ["llama_tied", "t5"])
def test_an_exchanged_embedding_beside_a_quantized_head(name, load, tmp_path):
    model = load(name, QuantizerConfig("int8", modules={"lm_head": "int8"}))
    old = model.get_input_embeddings()
    model.set_input_embeddings(nn.Embedding(old.num_embeddings, old.embedding_dim, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="tie lm_head and .*, of which one alone is quantized: quantize both"):
        model.save_pretrained(tmp_path)
    for embedding, is_tied in ((model.get_input_embeddings(), False), (old, True)):
        model.set_input_embeddings(embedding)
        model.config.tie_word_embeddings = is_tied
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path, dtype="auto")
        assert torch.equal(outputs(again, name), outputs(model, name))
        assert isinstance(again.get_input_embeddings(), QuantizedModule) is is_tied


@pytest.mark.parametrize("name", ["llava", "t5"])
def test_a_part_of_a_quantized_model_saves_and_reloads(name, load, tmp_path):
    model = quantize_(build(name), "int8") if name == "llava" else load(name, "int8")
    for part_name, part in _parts(model).items():
        _reloads(part, tmp_path / (part_name or "whole"))
        assert (tmp_path / (part_name or "whole") / "config.json").read_text().count("hf_quant_version") == 1


def test_an_encoder_under_names_of_its_own_is_told_from_a_missing_shard(load, tmp_path):
    load("t5", "int8").get_encoder().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="where a T5EncoderModel does not look for them: load it with the class"):
        transformers.T5EncoderModel.from_pretrained(tmp_path)


def test_exchanged_and_added_layers_save_and_reload(load, tmp_path):
    model = load()
    before = model.config.quantization_config
    up = model.model.layers[0].mlp.up_proj
    plain = nn.Linear(up.in_features, up.out_features, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(up.weight)
    model.model.layers[0].mlp.up_proj = plain
    model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
    model.model.layers[-1].self_attn.layer_idx = 2
    model.config.num_hidden_layers = 3
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.plan != before.plan
    assert model.hf_quantizer.quantization_config is model.config.quantization_config
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(outputs(again, "llama"), outputs(model, "llama"))


@pytest.mark.parametrize("cache", [None, "int8"])
def test_a_model_whose_parts_are_all_dequantized_saves_and_reloads(cache, load, tmp_path):
    model = load("llama", QuantizerConfig("int8", kv_cache=cache))
    for layer in model.model.layers:
        dequantize_(layer)
    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(outputs(again, "llama"), outputs(model, "llama"))
    config = again.config.to_dict().get("quantization_config")
    assert config is None if cache is None else config["kv_cache"] == cache
    model = load()
    for layer in model.model.layers:
        dequantize_(layer)
    assert model.dequantize().to(torch.float16).dtype == torch.float16


def test_a_given_state_is_the_one_that_is_saved(load, tmp_path):
    for config in ("int4", QuantizerConfig(None, kv_cache="int8")):
        model = load("llama", config)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state["model.norm.weight"] += 1
        for saved in ({"state_dict": state}, {}):
            model.save_pretrained(tmp_path, **saved)
            found = type(model).from_pretrained(tmp_path).state_dict()
            assert found.keys() == state.keys()
            expected = saved.get("state_dict", model.state_dict())
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_from_pretrained_needs_save_pretrained(load, tmp_path, caplog):
    model = load()
    hf_quant.save_quantized(model, tmp_path)
    assert "for load_quantized_ alone: its save_pretrained saves it for from_pretrained" in caplog.text
    assert torch.equal(outputs(hf_quant.load_quantized_(build("llama"), tmp_path), "llama"), outputs(model, "llama"))


def test_dequantize_in_another_dtype(load):
    for name in ("llama", "llama_tied", "bert"):
        model = load(name)
        expected = outputs(model, name)
        parameter = next(p for p in model.parameters() if p.is_floating_point() and p.dim() == 1)
        parameter.grad = torch.ones_like(parameter)
        model = model.dequantize(dtype=torch.float32)
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
        assert sqnr(outputs(model, name), expected) > 28
    assert {tensor.dtype for tensor in load().dequantize().parameters()} == {torch.bfloat16}


def test_dequantize_keeps_the_dtype_of_each_weight():
    model = build("llama")
    model.model.layers[0].float()  # as the trunk of EsmFold, beside a language model in fp16
    expected = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert set(expected.values()) == {torch.bfloat16, torch.float32}
    quantize_(model, "int8").dequantize()
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == expected


def test_device_moves_are_allowed_and_casts_refused(load):
    model = load()
    codes = model.model.layers[0].mlp.up_proj.qdata
    assert model.to("cpu") is model and model.to(device=torch.device("cpu")) is model
    assert model.to(torch.bfloat16) is model and model.to("cpu", torch.bfloat16) is model
    assert model.bfloat16() is model
    for cast in (
        lambda: model.to(torch.float32),
        lambda: model.to("cpu", torch.float16),
        lambda: model.to(dtype=torch.float32),
        lambda: model.to(torch.zeros(1)),
        lambda: model.double(),
    ):
        with pytest.raises(ValueError, match="this model is quantized: casting it to torch.float.*Load it with dtype"):
            cast()
    for dst_type in (torch.float16, torch.bfloat16, "torch.FloatTensor"):
        with pytest.raises(ValueError, match=r"type\(.*\) would cast its codes.*dequantize\(\) it first"):
            model.type(dst_type)
    for name in ("half", "float"):
        with pytest.raises(ValueError, match="not supported for quantized model"):
            getattr(model, name)()
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.layers[0].mlp.up_proj.qdata, codes)
    model.to("meta")
    assert model.model.layers[0].mlp.up_proj.qdata.is_meta


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mixtral", "gpt2", "t5"])
def test_deepcopy_and_pickle(name, load):
    config = QuantizerConfig("int4", modules={"lm_head": "int8"} if name == "llama_tied" else None)
    model = load(name, config)
    expected = outputs(model, name)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert torch.equal(outputs(other, name), expected)
        with pytest.raises(ValueError, match="this model is quantized"):
            other.to(torch.float32)
        assert other.to("cpu") is other
        # Nothing is shared with the original, and what is tied stays tied.
        first = next(m for m in other.modules() if isinstance(m, QuantizedModule))
        for parameter in first.parameters():
            parameter.data.zero_()
        assert torch.equal(outputs(model, name), expected)
        if name == "llama_tied":
            assert other.lm_head.qdata is other.model.embed_tokens.qdata


def test_methods_of_a_model_that_nothing_else_holds(load):
    expected = outputs(load(), "llama")
    gc.collect()
    gc.disable()
    try:
        model = load().to("cpu")
        assert torch.equal(outputs(model, "llama"), expected)
        with pytest.raises(ValueError, match="casting it to"):
            model.to(torch.float64)
        with pytest.raises(ValueError, match="casting it to"):
            load().to(torch.float64)
        gone = weakref.ref(model.model.layers[0].mlp.up_proj.qdata)
        del model
        assert gone() is None
    finally:
        gc.enable()


# embeddings


def test_resize_of_a_plain_embedding(load):
    model = load()
    before = outputs(model, "llama")
    model.resize_token_embeddings(100, mean_resizing=False)
    assert model.get_input_embeddings().weight.shape == (100, 64) and model.lm_head.weight.shape == (100, 64)
    assert torch.equal(outputs(model, "llama")[..., :96], before)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("size", [128, 64])
def test_resize_of_a_quantized_embedding(name, mean_resizing, size, load, tmp_path):
    modules = {"lm_head": "int8"} if name == "llama_tied" else {"lm_head": "int8", "model.embed_tokens": "int8"}
    model = load(name, QuantizerConfig("int4", modules=modules))
    codes = model.get_input_embeddings().qdata.clone()
    with pytest.raises(ValueError, match="is quantized and cannot be resized"):
        model.resize_token_embeddings(size, mean_resizing=mean_resizing)
    assert torch.equal(model.get_input_embeddings().qdata, codes)


@pytest.mark.parametrize(
    ("prepare", "finish", "prepared"),
    [
        (prepare_qat_, convert_qat_, QuantizerConfig("int4", modules={"lm_head": "int8"})),
        (prepare_qat_, convert_qat_, QuantizerConfig("int4", modules={"model.embed_tokens": "int8"})),
        (partial(prepare_training_, min_size=1, modules={"lm_head": "int8"}), finish_training_, "int8"),
    ],
)
def test_resize_in_training(prepare, finish, prepared):
    """The host would put a plain layer in the place of the prepared head."""
    model = build("llama")
    prepare(model, prepared)
    with pytest.raises(ValueError, match="is prepared for training and cannot be resized: resize the model before"):
        copy.deepcopy(model).resize_token_embeddings(100)
    finish(model)
    if prepared == "int8":
        assert "resize_token_embeddings" not in vars(model)
        model.resize_token_embeddings(100)


def test_resize_of_a_plain_embedding_in_training():
    model = build("llama")
    prepare_qat_(model, "int4")
    model.resize_token_embeddings(100, mean_resizing=False)
    assert convert_qat_(model).lm_head.weight.shape == (100, 64)


# generation


GENERATIONS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 8},
    "beam": {"num_beams": 3, "do_sample": False},
    "static cache": {"cache_implementation": "static", "do_sample": False, "disable_compile": True},
}


@pytest.mark.parametrize("how", GENERATIONS)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "t5"])
def test_generate(name, how, load):
    if name == "t5" and how == "static cache":
        how = "greedy"
    model = load(name, "int8", dtype=torch.float32)
    dequantized = copy.deepcopy(model).dequantize()
    ids = {"input_ids": inputs(name)["input_ids"]}
    results = []
    for m in (model, dequantized):
        transformers.set_seed(0)
        results.append(m.generate(**ids, max_new_tokens=8, min_new_tokens=8, **GENERATIONS[how]))
    assert torch.equal(*results)  # in fp32 they differ by rounding only
    assert results[0].shape[1] >= 8


# compilation


@pytest.mark.parametrize(
    ("name", "weights", "backend"),
    [
        ("llama", "W8A8", "eager"),
        ("mixtral", "int4", "eager"),
        ("llama", "int4", "aot_eager"),
    ],
)
def test_compiled_forward_has_one_graph_for_all_lengths(name, weights, backend):
    model = build(name)
    model.model.layers = model.model.layers[:1]
    hf_quant.quantize_(model, weights)
    graphs = []  # lengths at which something was compiled

    def compile_graph(graph, example_inputs):
        graphs.append(length)
        return torch._dynamo.lookup_backend(backend)(graph, example_inputs)

    compiled = torch.compile(model, backend=compile_graph, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in range(5, 15):
            ids = torch.randint(3, 96, (2, length))
            y, expected = (m(input_ids=ids, use_cache=False).logits for m in (compiled, model))
            assert sqnr(y, expected) > 30
    assert set(graphs) == {5}


# training


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")  # not so in older versions
@pytest.mark.parametrize("weights", ["int4", "W8A8"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_gradient_checkpointing_gives_the_gradients_of_the_dequantized_model(name, weights, load):
    model = load(name, weights, dtype=torch.float32)
    reference = copy.deepcopy(model).dequantize()
    gradients = []
    for m, checkpointing in ((reference, False), (model, False), (model, True)):
        m.train()
        for module in m.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointing:
            m.gradient_checkpointing_enable()
            assert m.is_gradient_checkpointing
        embeddings = m.get_input_embeddings()(inputs(name)["input_ids"]).detach().requires_grad_()
        m(inputs_embeds=embeddings, labels=inputs(name)["input_ids"], use_cache=False).loss.backward()
        gradients.append(embeddings.grad)
        m.zero_grad()
    assert torch.equal(gradients[1], gradients[2]) or sqnr(gradients[2], gradients[1]) > 80
    # With quantized activations the forward differs, and with it the loss; its gradient only by that.
    assert sqnr(gradients[1], gradients[0]) > (80 if weights == "int4" else 8)
