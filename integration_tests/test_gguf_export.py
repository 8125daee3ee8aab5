"""Checkpoints become GGUF files and come back: no code differs, and transformers' own reader computes the same."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_quant import QuantizerConfig, export_gguf, import_checkpoint, quantize_
from hf_quant.cards import read_card
from hf_quant.cli import main
from hf_quant.convert.gguf.files import Gguf
from hf_quant.modules import QuantizedModule
from integration_tests.support.gguf_files import llama_metadata, llama_tensors, values_of, write_gguf
from integration_tests.support.gguf_models import MODELS, TEXTS, make_model, make_tokenizer, with_one_silent_layer


IDS = torch.arange(3, 51)[None]
EXACT = {"group_size": 32, "scale_dtype": "float16"}
# Of the values that transformers leaves out of metadata, see `convert.gguf.architectures.complete_`.
UNREAD = {"llama with biases", "llama 3.1", "llama, linear", "qwen2, yarn", "qwen3", "phi3, half rotated"}
UNREAD |= {"mixtral", "gpt-oss"}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def codes(path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if "qdata" in name}


def file_in(path):
    (found,) = path.glob("*.gguf")
    return found


@pytest.mark.parametrize(
    ("config", "name", "is_bf16"),
    [
        (QuantizerConfig("int4"), "out-Q4_0.gguf", True),
        (QuantizerConfig("int4", symmetric=False), "out-Q4_1.gguf", True),
        (QuantizerConfig("W4A16", group_size=64), "out-Q4_0.gguf", True),
        (QuantizerConfig("int8"), "out-Q8_0.gguf", True),
        (
            QuantizerConfig("int8", **EXACT, modules={"lm_head": None, "model.embed_tokens": "mxfp4"}),
            "out-Q8_0.gguf",
            False,
        ),
        (QuantizerConfig("mxfp4", modules={"lm_head": {"weights": "int8", **EXACT}}), "out-MXFP4.gguf", False),
    ],
)
def test_no_code_differs_there_and_back(config, name, is_bf16, tmp_path):
    model = make_model("llama", tie_word_embeddings=False)
    quantize_(model.to(torch.bfloat16) if is_bf16 else model, config)
    model.save_pretrained(tmp_path / "in")
    export_gguf(tmp_path / "in", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", name]
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    before, after = codes(tmp_path / "in"), codes(tmp_path / "back")
    assert before.keys() == after.keys() and len(before) >= 14
    assert sum(int((before[key] != after[key]).sum()) for key in before) == 0
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / p, dtype=torch.float32) for p in ("in", "back")]
    for name, module in models[0].named_modules():
        if isinstance(module, QuantizedModule):
            other = models[1].get_submodule(name)
            assert torch.equal(module.dequantize_weight(), other.dequantize_weight())
    torch.testing.assert_close(logits(models[0]), logits(models[1]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_what_it_was(name, tmp_path):
    model = with_one_silent_layer(name)
    expected = logits(model)
    export_gguf(model, tmp_path / "out")
    path = file_in(tmp_path / "out")
    import_checkpoint(path, tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    torch.testing.assert_close(logits(back), expected, atol=1e-5, rtol=1e-5)
    if name not in UNREAD:
        options = {"gguf_file": path.name, "dtype": torch.float32}
        # Of experts, it does not read their sizes.
        options |= {"config": make_model(name).config} if "moe" in name else {"pad_token_id": None}
        host = AutoModelForCausalLM.from_pretrained(path.parent, **options)
        torch.testing.assert_close(logits(host), expected, atol=1e-4, rtol=1e-4)
        back.model.layers[1].self_attn.o_proj.weight.data[:32] *= -1
        with pytest.raises(AssertionError):
            torch.testing.assert_close(logits(host), logits(back), atol=1e-4, rtol=1e-4)


def test_a_file_of_llama_cpp_goes_back_with_its_q6_k_head(tmp_path):
    kinds = {"*": "Q4_0", "output": "Q6_K", "blk.0.attn_v": "MXFP4"}
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kinds))
    import_checkpoint(path, tmp_path / "in")
    export_gguf(tmp_path / "in", tmp_path / "out")
    before, after = Gguf(path), Gguf(file_in(tmp_path / "out"))
    assert after.value("general.file_type") == 2
    for name in before.tensors:
        kind = before.kind(name)
        assert after.kind(name) == kind and after.shape(name) == before.shape(name)
        a, b = before.read(name).numpy(), after.read(name).numpy()
        assert (values_of(kind, a) == values_of(kind, b)).all() and (kind == "Q6_K" or (a == b).all()), name


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "spm", "spm without space"])
def test_tokenizers_go_there_and_back(kind, tmp_path):
    tokenizer = make_tokenizer(kind)
    model = make_model("llama", vocab_size=len(tokenizer) + 5)
    quantize_(model, QuantizerConfig("int8", **EXACT))
    model.save_pretrained(tmp_path / "in")
    tokenizer.save_pretrained(tmp_path / "in")
    assert export_gguf(tmp_path / "in", tmp_path / "out") == ()
    file = Gguf(file_in(tmp_path / "out"))
    fields = file.values("tokenizer.ggml.")
    is_spm = kind.startswith("spm")
    assert fields["tokenizer.ggml.model"] == ("llama" if is_spm else "gpt2")
    assert fields["tokenizer.ggml.pre"] == ("default" if is_spm else kind)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == len(tokenizer) + 5 and types[-5:] == [5] * 5
    eos = fields["tokenizer.ggml.eos_token_id"]
    assert tokens[eos] == tokenizer.eos_token and types[eos] == 3
    if is_spm:
        assert (types[0], types[3], fields["tokenizer.ggml.add_space_prefix"]) == (2, 6, kind == "spm")
        scores = fields["tokenizer.ggml.scores"]
        assert scores[259] == 0 and scores[260] < scores[259]  # the first merges
    else:
        assert types[tokens.index("<think>")] == 4 and file.value("tokenizer.chat_template") == "{{ messages }}"
    assert import_checkpoint(tmp_path / "out", tmp_path / "back") == (
        "the model's dtype is float32, in which all of the "
        "file's numbers are exact: dtype= of from_pretrained takes another one",
    )
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS:
        assert back(text)["input_ids"] == tokenizer(text)["input_ids"], text
    assert (back.bos_token_id, back.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "llama.cpp has no such llama model: its activation is gelu"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "it attends to a window of tokens"),
        ("gemma3", {"query_pre_attn_scalar": 64}, r"it scales queries by 1 / sqrt\(64\)"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "it has final_logit_softcapping"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "its layer_types are not"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "of the kind 'dynamic'",
        ),
    ],
)
def test_models_that_llama_cpp_computes_otherwise_are_refused(name, fields, message, tmp_path):
    model = make_model(name, **fields)
    quantize_(model, QuantizerConfig("int8", **EXACT))
    with pytest.raises(ValueError, match=message):
        export_gguf(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_other_architectures_and_schemes_are_refused_with_the_list(tmp_path):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    other = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1))
    quantize_(other, QuantizerConfig("int8", **EXACT))
    with pytest.raises(ValueError, match="it is a gpt_neox model; .* here: gemma3_text, gpt_oss, llama, mi"):
        export_gguf(other, tmp_path / "out")
    modules = {"re:.*q_proj": "nf4", "re:.*k_proj": {"weights": "int8", "input_transform": "hadamard"}}
    model = make_model("llama")
    quantize_(model, QuantizerConfig("int4", group_size=32, scale_dtype="float16", modules=modules))
    with pytest.raises(ValueError, match="4 weights would change.*nf4 is not written") as error:
        export_gguf(model, tmp_path / "out")
    assert "its input is rotated" in str(error.value) and "QuantizerConfig('int4', group_size=32" in str(error.value)
    model = make_model("llama")
    quantize_(model, QuantizerConfig("int8", group_size=32))  # scales of the model's dtype, fp32
    with pytest.raises(ValueError, match="14 weights would change.*are no fp16 numbers"):
        export_gguf(model, tmp_path / "out")
    with pytest.raises(ValueError, match="is not quantized: quantize_ it first"):
        export_gguf(make_model("llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tokenizers_without_a_name_in_llama_cpp_are_refused(tmp_path):
    from tokenizers import normalizers, pre_tokenizers

    model = make_model("llama", vocab_size=800)
    quantize_(model, QuantizerConfig("int8", **EXACT))
    model.save_pretrained(tmp_path / "in")
    tokenizer = make_tokenizer("gpt-2")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match="splits text by .*Whitespace.*without tokenizer files"):
        export_gguf(tmp_path / "in", tmp_path / "out")
    for kind in ("gpt-2", "spm"):
        tokenizer = make_tokenizer(kind)
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.save_pretrained(tmp_path / "in")
        with pytest.raises(ValueError, match="Lowercase.*llama.cpp does not compute"):
            export_gguf(tmp_path / "in", tmp_path / "out")
    small = make_model("llama", vocab_size=600)
    quantize_(small, QuantizerConfig("int8", **EXACT))
    small.save_pretrained(tmp_path / "small")
    make_tokenizer("gpt-2").save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="its tokenizer has the token [0-9]+, its model 600 tokens"):
        export_gguf(tmp_path / "small", tmp_path / "out")


def test_the_command_the_card_and_the_metadata(tmp_path, capsys):
    model = make_model("llama")
    quantize_(
        model.to(torch.bfloat16),
        QuantizerConfig("int4", kv_cache="int8", cpu_activations="int8", input_transform="none"),
    )
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in/README.md").write_text("---\nlicense: mit\nbase_model: maker/first\nlanguage: en\n---\n")
    (tmp_path / "in/LICENSE").write_text("text of the licence")
    command = ["export", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "gguf"]
    assert main([*command, "--repo", "user/tiny-gguf"]) == 0
    printed = capsys.readouterr().out
    assert "every weight is what it was" in printed and "quantized KV cache is left out" in printed
    assert "scheme of inputs is left out" in printed and "the file has no vocabulary" in printed
    file = Gguf(tmp_path / "out/tiny-gguf-Q4_0.gguf")
    assert file.value("general.license") == "mit" and file.value("general.name") == "tiny-gguf"
    assert file.value("general.base_model.0.repo_url") == "https://huggingface.co/maker/first"
    assert (tmp_path / "out/LICENSE").exists()
    card = read_card(tmp_path / "out/README.md")
    assert {"gguf", "int4", "llama.cpp", "ollama"} <= set(card.data.tags) and "hf_quant" not in card.data.tags
    assert "llama-server -hf user/tiny-gguf" in card.text and "ollama run hf.co/user/tiny-gguf" in card.text
    assert "hf-quant import user/tiny-gguf/tiny-gguf-Q4_0.gguf OUT" in card.text
    assert "hf-quant export OUT EXPORTED --format gguf" in card.text and "in GGUF (`Q4_0`)" in card.text
    import_checkpoint(tmp_path / "out/tiny-gguf-Q4_0.gguf", tmp_path / "back")
    data = read_card(tmp_path / "back/README.md").data
    assert (data.license, data.base_model, data.language) == ("mit", ["maker/first"], "en")
    assert main([*command, "--reader", "engines"]) == 2
    assert "--reader engines is of compressed-tensors" in capsys.readouterr().err
    fields = json.loads((tmp_path / "back/config.json").read_text())
    assert fields["quantization_config"]["imported_from"] == {"method": "gguf", "name": None}
