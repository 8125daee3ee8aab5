"""`quantize_` and `from_pretrained` with data of every kind, and without; passes, records, files of statistics."""

import copy
import logging

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_quant
from hf_quant import Calibration, QuantizerConfig, calibrate, quantize_
from hf_quant.calibration import StatisticsFile, sensitivities
from hf_quant.calibration.data import prepare
from hf_quant.calibration.sample import sample
from hf_quant.modules import PACKED_NAMES, QuantizedModule
from hf_quant.tests.calibration.test_observe import IDS, SIZES, llama


GPTQ = QuantizerConfig("int4", algorithm="gptq")


class Tokenizer:
    """Letters are tokens; every text begins with token 1."""

    eos_token_id = 2

    def __call__(self, texts, add_special_tokens=True, truncation=False, max_length=None, padding=False, **kwargs):
        if isinstance(texts, str):
            ids = [1] * add_special_tokens + [3 + ord(c) % 60 for c in texts]
            return {"input_ids": ids[:max_length]}
        rows = [self(t, max_length=max_length)["input_ids"] for t in texts]
        longest = max(map(len, rows))
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
        return {"input_ids": torch.tensor([r + [0] * (longest - len(r)) for r in rows]), "attention_mask": mask}


def codes(model: nn.Module) -> list[torch.Tensor]:
    modules = [m for m in model.modules() if isinstance(m, QuantizedModule)]
    assert modules
    return [m._parameters[part] for m in modules for part in PACKED_NAMES if part in m._parameters]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(codes(a), codes(b), strict=True))


def solved(calibration, **options) -> nn.Module:
    return quantize_(llama(), GPTQ, calibration=calibration, **options)


def error(model: nn.Module) -> float:
    with torch.no_grad():
        return (model(IDS).logits - llama()(IDS).logits).square().mean().item()


def test_forms_of_the_same_ids_give_the_same_codes(tmp_path):
    numpy.save(tmp_path / "ids.npy", IDS.flatten().numpy())
    run = lambda model: model(input_ids=IDS, use_cache=False)  # noqa: E731
    expected = solved(IDS)
    for data in (
        IDS.tolist(),
        list(IDS),
        {"data": tmp_path / "ids.npy", "length": 40},
        {"data": IDS.flatten(), "length": 40},
        {"input_ids": IDS},
        [{"input_ids": IDS}],
        ({"input_ids": part} for part in [IDS]),
        DataLoader([{"input_ids": row} for row in IDS], batch_size=3),
        run,
        IDS.numpy(),
        list(IDS.numpy()),
        {"input_ids": IDS.tolist(), "attention_mask": torch.ones_like(IDS).tolist()},
    ):
        assert same(solved(data), expected), data
    assert not same(solved(IDS.flip(1)), expected)
    assert error(expected) < 0.6 * error(quantize_(llama(), QuantizerConfig("int4", input_transform="hadamard")))


class Rows(Dataset):
    """A map-style dataset without an end of its own, as one is that reads files."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, i: int) -> dict:
        assert 0 <= i < len(IDS)
        return {"input_ids": IDS[i], "attention_mask": torch.ones_like(IDS[i]), "text": "of which the ids are"}


def test_rows_of_a_dataset_are_batches_of_one():
    expected = solved([{"input_ids": row[None]} for row in IDS])
    rows = [Rows()[i] for i in range(len(IDS))]
    lists = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in IDS]
    arrays = [{"input_ids": row.numpy()} for row in IDS]
    for data in (Rows(), rows, lists, arrays):
        assert same(solved(data), expected), data


class Packed(nn.Module):
    """A model of sequences in one row and of a list of images, as Cosmos 3, and of a dict, as the UNet of SDXL."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor, images: list, added: dict) -> torch.Tensor:
        device = self.linear.weight.device
        assert all(x.device == device for x in (input_ids, *images, added["size"]))
        assert input_ids.shape == (12,) and added["size"].shape == (2,)
        return self.linear(torch.cat(images)) * added["size"].sum()


def test_arguments_may_be_lists_and_dicts_of_tensors():
    batch = {"input_ids": IDS.flatten()[:12], "images": [torch.randn(n, 64) for n in (48, 80)]}
    batch["added"] = {"size": torch.ones(2)}
    model = Packed()
    expected = quantize_(copy.deepcopy(model), GPTQ, calibration=lambda model: model(**batch))
    assert same(quantize_(copy.deepcopy(model), GPTQ, calibration=[batch]), expected)
    model.to("meta")
    for run in prepare([batch, tuple(batch.values())], model, None, 64, 64).runs(False):
        assert run(model).is_meta  # tensors follow the model to its device


def test_texts(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
    by_file = solved({"data": tmp_path / "text.txt", "length": 32, "num_tokens": 96}, tokenizer=Tokenizer())
    record = by_file.config.quantization_config.calibrated_with
    assert (record["data"], record["num_tokens"], record["length"]) == ("text.txt", 96, 32)
    by_texts = solved({"data": ["the quick brown fox ", "jumps over "] * 12, "length": 32}, tokenizer=Tokenizer())
    assert not same(by_file, by_texts)
    with pytest.raises(ValueError, match="cannot be read without a tokenizer"):
        solved(["a text"])


def test_an_encoder_reads_padded_texts():
    torch.manual_seed(0)
    base = BertModel(BertConfig(**SIZES, num_attention_heads=2, max_position_embeddings=64)).eval()
    texts = ["one text", "another text that is longer", "a third", "and a fourth one of them"] * 8
    batch = Tokenizer()(texts)
    with torch.no_grad():
        expected = base(**batch).last_hidden_state[batch["attention_mask"].bool()]
        answers = [
            quantize_(copy.deepcopy(base), config, **more)(**batch).last_hidden_state[batch["attention_mask"].bool()]
            for config, more in (
                (GPTQ, {"calibration": texts, "tokenizer": Tokenizer()}),
                (QuantizerConfig("int4", input_transform="hadamard"), {}),
            )
        ]
    solved, plain = ((answer - expected).square().mean() for answer in answers)
    assert solved < 0.6 * plain
    with pytest.raises(ValueError, match="cannot write its own text"):
        quantize_(base, GPTQ)


def test_sequences_are_no_longer_than_the_positions_of_the_model(tmp_path):
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}
    decoder = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=24, bos_token_id=1, eos_token_id=2))
    encoder = BertModel(BertConfig(**SIZES, num_attention_heads=2, max_position_embeddings=24))
    (tmp_path / "text.txt").write_text("the quick brown fox " * 8)
    own, texts = {"data": None, "num_tokens": 48}, ["the quick brown fox jumps over"] * 4
    for base, data in ((decoder, tmp_path / "text.txt"), (decoder, own), (encoder, texts), (encoder, IDS)):
        model = quantize_(copy.deepcopy(base), GPTQ, calibration=data, tokenizer=Tokenizer())
        assert model.config.quantization_config.calibrated_with["length"] == 24
    narrow = Tokenizer()
    narrow.model_max_length = 16
    model = quantize_(encoder, GPTQ, calibration=texts, tokenizer=narrow)
    assert model.config.quantization_config.calibrated_with["length"] == 16


def test_an_encoder_decoder_needs_both_of_its_sequences(tmp_path):
    sizes = {"d_model": 64, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 32, "vocab_size": 64}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    (tmp_path / "text.txt").write_text("the quick brown fox " * 4)
    for data in (IDS, [{"input_ids": IDS}], tmp_path / "text.txt", ["a text"]):
        with pytest.raises(
            ValueError, match="reads two sequences: give batches with decoder_input_ids, or a function"
        ):
            quantize_(model, GPTQ, calibration=data, tokenizer=Tokenizer())
    with pytest.raises(ValueError, match="exactly one of"):
        quantize_(model, GPTQ, calibration=[{"input_ids": IDS, "inputs_embeds": torch.ones(1), "labels": IDS}])
    quantize_(model, GPTQ, calibration=[{"input_ids": IDS, "labels": IDS}])
    sizes = {"d_model": 64, "vocab_size": 64, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {
        f"{part}_{of}": n for part in ("encoder", "decoder") for of, n in (("ffn_dim", 64), ("attention_heads", 2))
    }
    quantize_(BartForConditionalGeneration(BartConfig(**sizes)), GPTQ, calibration=IDS)  # makes one of the other


def test_wrong_data_is_refused_and_the_model_stays():
    model = llama()
    for data, message in (
        ([], "is empty"),
        (7, "is a int"),
        ("no such file", "is not a file"),
        ("a text " * 1000, r"'a text a text .*' is not a file; needs .* or a text itself in a list: \["),
        ([{"input_ids": [[1, 2], [3]]}], "has input_ids that are no rows of numbers of one length"),
        (torch.full((1, 8), 64), "token 64, the vocabulary of the model 64"),
        ([[1, 2, -100]], "token -100, which is none"),
        ({"data": IDS, "tokens": 3}, r"unknown keys \['tokens'\]"),
        ({"data": IDS, "length": 1}, "length is 1"),
        (IDS[:0], "is empty"),
        ({}, "is empty"),
        ([[1, 2], []], "a sequence of no tokens"),
        ({"data": None, "seed": "x"}, "seed is 'x'"),
        ({"temperature": 0}, "temperature is 0"),
        (lambda model: None, "got no input"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_(model, GPTQ, calibration=data, tokenizer=Tokenizer())
    with pytest.raises(ValueError, match="needs none"):
        quantize_(model, "int4", calibration=IDS)
    assert not any(isinstance(m, QuantizedModule) or m._forward_pre_hooks for m in model.modules())


def test_the_model_writes_its_own_text():
    model = llama(bos_token_id=1)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, again, other = (sample(model, 128, 32, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == (4, 32) and bool((first[:, 0] == 1).all())
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(set(first[:, 1:].flatten().tolist())) > 20  # not one token again and again
    data = {"data": None, "num_tokens": 128, "length": 32, "seed": 1}
    record = quantize_(model, GPTQ, calibration=data).config.quantization_config.calibrated_with
    assert record == {**record, "data": "text that the model wrote", "num_tokens": 128, "seed": 1, "temperature": 1.0}


def test_a_config_of_ones_own_names_no_first_token(monkeypatch):
    model = llama()
    monkeypatch.delattr(type(model.config), "bos_token_id")
    vars(model.config).pop("bos_token_id", None)
    model.generation_config.bos_token_id = None
    assert sample(model, 32, 16).shape == (2, 16)


def test_passes_that_fit_the_memory(monkeypatch):
    expected, model = solved(IDS), llama()
    whole = Calibration(model, GPTQ)._passes()
    nbytes = 4 * (64 * 64 + 64)
    assert len(whole) == 1
    parts = Calibration(model, GPTQ, max_memory=4 * nbytes)._passes()
    assert len(parts) > 2 and [name for part in parts for name in part] == whole[0]
    init = Calibration.__init__
    monkeypatch.setattr(Calibration, "__init__", lambda *a, **k: init(*a, **{**k, "max_memory": 4 * nbytes}))
    runs = []
    found = solved(lambda model: runs.append(model(input_ids=IDS, use_cache=False)))
    assert same(found, expected) and len(runs) == len(parts)


def test_a_loop_of_the_user():
    model = llama()
    with Calibration(model, GPTQ) as calibration, torch.no_grad():
        model(IDS)
    other = llama()
    with pytest.raises(ValueError, match="of another model or config"):
        quantize_(other, GPTQ, calibration=calibration)
    with pytest.raises(ValueError, match="has seen no data"):
        quantize_(other, GPTQ, calibration=Calibration(other, GPTQ))
    assert same(quantize_(model, GPTQ, calibration=calibration), solved(IDS))


def test_hessians_are_weighted_by_gradients(caplog):
    with Calibration(model := llama(), GPTQ) as calibration, torch.no_grad():
        model(IDS)
    name = "model.layers.1.mlp.down_proj"
    plain = calibration.statistics(name)["weight"][0].hessian.clone()
    calibration.weight_by_gradients()
    (weighted,) = sensitivities(model, calibration._recorder.calls, {name: calibration.transform(name)}).layers[name][
        "weight"
    ]
    scaled = weighted.inputs * (plain.diagonal().mean() / weighted.inputs.diagonal().mean())
    torch.testing.assert_close(calibration.statistics(name)["weight"][0].hessian, (plain + scaled) / 2)
    assert not torch.allclose(scaled, plain, rtol=0.05)
    # A model that does not run backward is calibrated without.
    model.forward = torch.no_grad()(model.forward)
    with caplog.at_level(logging.WARNING, "hf_quant"):
        quantize_(model, GPTQ, calibration=IDS)
    assert "are not weighted by gradients, because it does not run backward" in caplog.text


def test_layers_that_see_no_data(caplog):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = Two()
    plain = quantize_(copy.deepcopy(model), QuantizerConfig("int4", input_transform="hadamard"))
    with caplog.at_level(logging.WARNING, "hf_quant"):
        quantize_(model, GPTQ, calibration=torch.randn(256, 8) @ torch.randn(8, 64))
    assert "unused got no input" in caplog.text
    assert torch.equal(model.unused.qdata, plain.unused.qdata)
    assert not torch.equal(model.used.qdata, plain.used.qdata)


def test_only_what_has_inputs_of_its_own_is_solved():
    model = llama(tie_word_embeddings=False)
    modules = {"model.embed_tokens": {"weights": "int4", "algorithm": "gptq"}, "lm_head": {"weights": "int8"}}
    config = QuantizerConfig("int4", algorithm="gptq", modules=modules)
    quant_plan = hf_quant.plan(model, config)
    assert quant_plan.entries["model.embed_tokens"].algorithm is None
    assert quant_plan.entries["lm_head"].algorithm is None
    quantize_(model, config, calibration=IDS)
    assert isinstance(model.model.embed_tokens, QuantizedModule) and error(model) < 1


def test_from_pretrained_calibrates_and_the_checkpoint_reloads(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    load = AutoModelForCausalLM.from_pretrained
    config = QuantizerConfig("int4", algorithm="gptq", calibration=IDS)
    model = load(tmp_path / "base", quantization_config=config)
    assert same(model, solved(IDS))
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    with torch.no_grad():
        assert same(model, again) and torch.equal(model(IDS).logits, again(IDS).logits)
    stored = again.config.quantization_config
    assert stored.calibrated_with["num_tokens"] == IDS.numel() and stored.calibration is None
    assert "calibration" not in stored.to_dict() and config.calibration is IDS
    with pytest.raises(ValueError, match="cannot be calibrated"):
        load(tmp_path / "out", quantization_config=config)
    config.calibration = {"num_tokens": 64, "length": 16}  # and no data: as {"data": None, ...}
    unread = load(tmp_path / "base", quantization_config=config)
    assert unread.config.quantization_config.calibrated_with["data"] == "text that the model wrote"


def test_a_new_weight_of_a_calibrated_layer_is_quantized_without_data():
    model = solved(IDS)
    layer = model.model.layers[0].mlp.up_proj
    new = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    layer.weight = new
    plain = nn.Linear(64, 96, bias=False)
    plain.weight.data = new
    quantize_(plain, QuantizerConfig("int4", input_transform="hadamard"))
    assert torch.equal(layer.qdata, plain.qdata)


@pytest.mark.parametrize("fields", [{}, {"input_transform": "hadamard"}])
def test_statistics_in_a_file_quantize_while_loading(fields, tmp_path):
    config = QuantizerConfig("int4", algorithm="imatrix", **fields)
    llama().save_pretrained(tmp_path / "base")
    statistics = calibrate(llama(), IDS, config=config)
    statistics.save(tmp_path / "imatrix.safetensors")
    assert (tmp_path / "imatrix.safetensors").stat().st_size < 40_000
    config.calibration = str(tmp_path / "imatrix.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    assert loaded.config.quantization_config.calibrated_with == statistics.record
    assert not any(m.statistics for m in loaded.modules() if isinstance(m, QuantizedModule))
    direct = quantize_(llama(), config, calibration=statistics)
    assert same(loaded, direct) and same(quantize_(llama(), config, calibration=IDS), direct)
    assert not same(direct, quantize_(llama(), QuantizerConfig("int4", **fields)))
    other = QuantizerConfig("int4", algorithm="imatrix", input_transform={"block_size": 32})
    with pytest.raises(ValueError, match="calibrate with the config that you quantize with"):
        quantize_(llama(), other, calibration=statistics)
    with pytest.raises(ValueError, match="calibrate with kind='hessian'"):
        quantize_(
            llama(),
            QuantizerConfig("int4", algorithm="gptq", **{"input_transform": "none", **fields}),
            calibration=statistics,
        )
    with pytest.raises(ValueError, match="rotated by 64, and|inputs 64 wide"):
        quantize_(llama(hidden_size=128), config, calibration=statistics)


def test_static_scales_are_set_while_loading(tmp_path):
    config = QuantizerConfig("W8A8", activation_scale="static", modules={"lm_head": None})
    llama().save_pretrained(tmp_path / "base")
    statistics = calibrate(llama(), IDS, kind="amax", config=config)
    config.calibration = statistics
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    config.calibration = None
    direct = quantize_(llama(), config, calibration=IDS)
    assert loaded.state_dict().keys() == direct.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), direct.state_dict().values()))
    loaded.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits) and torch.equal(
            loaded(IDS).logits, direct(IDS).logits
        )
    name = next(iter(statistics.statistics))
    del statistics.statistics[name]
    config.calibration = statistics
    with pytest.raises(ValueError, match=f"the statistics have none for {name}, whose static activation scales"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)


def test_files_that_hold_no_statistics(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        StatisticsFile.load(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("nothing of this")
    with pytest.raises(ValueError, match="no safetensors file"):
        StatisticsFile.load(tmp_path / "text.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds no statistics"):
        StatisticsFile.load(tmp_path / "other.safetensors")
    with Calibration(model := llama(), GPTQ) as calibration, torch.no_grad():
        model(IDS)
    name = calibration.observed[0]
    with pytest.raises(ValueError, match="Hessians are not saved"):
        StatisticsFile({name: calibration.statistics(name)}, {name: None}, {}).save(tmp_path / "h.safetensors")


def outlying() -> nn.Module:
    """A model in which token 1 alone has a channel by which the input of the last down_proj is large."""
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[0] = 0
            projection.weight[0, 0] = 1
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[1] = torch.eye(64)[0]
    return model


def test_layers_with_outlier_tokens_are_left_dynamic(caplog, tmp_path):
    ids = IDS.clone().masked_fill_(IDS == 1, 2)
    ids[:, 0] = 1
    config = QuantizerConfig("W8A8", activation_scale="static")
    name = "model.layers.1.mlp.down_proj"

    def static(model: nn.Module) -> dict[str, bool]:
        return {n: m.scheme.is_static for n, m in model.named_modules() if isinstance(m, QuantizedModule)}

    assert all(static(quantize_(outlying(), config, calibration=ids[:, 1:])).values())
    with caplog.at_level(logging.WARNING, "hf_quant"):
        model = quantize_(outlying(), config, calibration=ids)
    assert [n for n, is_static in static(model).items() if not is_static] == [name]
    assert f"more than 8 times as large as the others: {name}" in caplog.text
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    assert static(again) == static(model)
    outlying().save_pretrained(tmp_path / "base")
    config.calibration = calibrate(outlying(), ids, kind="amax", config=config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits) and torch.equal(loaded(ids).logits, model(ids).logits)
    named = {"*.down_proj": {"weights": "int8", "activations": "int8", "activation_scale": "static"}}
    named = QuantizerConfig("W8A8", activation_scale="static", modules=named)
    assert all(static(quantize_(outlying(), named, calibration=ids)).values())
    fp8 = QuantizerConfig("W8A8_FP8", activation_scale="static")
    assert all(static(quantize_(outlying(), fp8, calibration=ids)).values())


def largest_states(model: nn.Module, ids: torch.Tensor) -> dict[str, list[float]]:
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    largest = [[(states.abs().max() / 448).item() for states in (layer.keys, layer.values)] for layer in layers]
    return {f"model.layers.{i}.self_attn": both for i, both in enumerate(largest)}


def test_scales_of_an_fp8_cache(tmp_path):
    expected = largest_states(llama(), IDS)
    llama().save_pretrained(tmp_path / "base")
    config = QuantizerConfig("int8", kv_cache="fp8")
    assert quantize_(llama(), config).config.quantization_config.kv_scales is None
    for weights in ({"weights": "int8"}, {"weights": "int4", "algorithm": "gptq"}, {"weights": None}):
        model = quantize_(llama(), QuantizerConfig(**weights, kv_cache="fp8"), calibration=IDS)
        assert model.config.quantization_config.kv_scales == expected
        assert "update" not in vars(model(IDS[:1], use_cache=True).past_key_values)
    config.calibration = {"data": IDS, "num_tokens": IDS.numel()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    loaded.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.quantization_config.kv_scales == expected
    assert again.config.quantization_config.format_version == 2
    statistics = calibrate(llama(), IDS, config=config)
    statistics.save(tmp_path / "statistics.safetensors")
    config.calibration = tmp_path / "statistics.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    assert loaded.config.quantization_config.kv_scales == expected
    assert torch.equal(loaded(IDS).logits, again(IDS).logits)
    later = quantize_(quantize_(llama(), "int8"), QuantizerConfig(None, kv_cache="fp8"), calibration=IDS)
    assert later.config.quantization_config.kv_scales == largest_states(quantize_(llama(), "int8"), IDS)


def test_scales_of_a_cache_leave_padding_out_and_see_what_generate_adds():
    model, config = llama(), QuantizerConfig(None, kv_cache="fp8")
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    batch = {"input_ids": IDS, "attention_mask": mask}
    with Calibration(model, config) as calibration, torch.no_grad():
        model(**batch)
    seen = calibration.states["model.layers.0.self_attn"][0]
    assert seen.num_tokens == mask.sum()
    with Calibration(model, config) as calibration:
        model.generate(IDS[:1, :4], max_new_tokens=5, min_new_tokens=5)
    assert calibration.states["model.layers.0.self_attn"][0].num_tokens == 8  # the last token is not read
    quantized = quantize_(model, config, calibration=calibration)
    assert quantized.config.quantization_config.kv_scales is not None
    for data in (lambda model: None, lambda model: model.model.embed_tokens(IDS)):
        with pytest.raises(ValueError, match="got no keys and values other than zeros"):
            quantize_(llama(), config, calibration=data)
    with pytest.raises(ValueError, match="kv_scales is"):
        QuantizerConfig("int8", kv_cache="fp8", kv_scales={"a": [1.0, 0.0]})


@pytest.mark.parametrize(
    ("metadata", "tensors"),
    [
        ({}, {}),
        ({"record": '{"data": "text"}', "blocks": '{"a": 7}'}, {}),
        ({"record": '{"data": "text"}', "blocks": "{}"}, {"a": 1}),
        ({"record": '{"data": "text"}', "blocks": "{}"}, {"a|weight|num_tokens": 0, "a|weight|amax": 1}),
        ({"record": '{"data": "text"}', "blocks": "{}", "kv_scales": '{"a": [0.0, 1.0]}'}, {}),
    ],
)
def test_files_of_broken_statistics(metadata, tensors, tmp_path):
    values = {name: torch.full((1,), value) for name, value in tensors.items()} or {"x": torch.ones(1)}
    save_file(values, tmp_path / "broken.safetensors", {"hf_quant_statistics": "1", **metadata})
    with pytest.raises(ValueError, match=r"broken\.safetensors holds broken statistics"):
        StatisticsFile.load(tmp_path / "broken.safetensors")
