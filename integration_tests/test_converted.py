"""Exports and imports: cards that say how they are served and where they came from; and names of the Hub."""

import json
import re
import shlex

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_quant import QuantizerConfig, export_compressed_tensors, import_checkpoint, model_card, quantize_
from hf_quant.cards import is_untouched, repository_of
from hf_quant.cli import main
from integration_tests.support.foreign_checkpoints import config_of, load_all, make_llama
from integration_tests.support.hub_server import Hub
from integration_tests.support.tiny_models import build
from integration_tests.test_importing import foreign_checkpoint
from integration_tests.test_model_cards import BASE_CARD, files_of, run


VLLM, SGLANG = "vllm serve", "python -m sglang.launch_server --model-path"
SOURCE_CARD = "---\nbase_model: me/base\nlicense: mit\nlanguage: en\n---\n# Theirs\n"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "model")


def quantized(llama, **config):
    return AutoModelForCausalLM.from_pretrained(llama, quantization_config=QuantizerConfig(**config))


def card_in(directory) -> ModelCard:
    return ModelCard.load(directory / "README.md")


@pytest.mark.parametrize(
    ("config", "reader", "commands"),
    [
        ({"weights": "W4A16"}, "engines", [VLLM, SGLANG]),
        ({"weights": "W8A8_FP8"}, "engines", [VLLM, SGLANG]),
        ({"weights": "mxfp4"}, "engines", [VLLM]),
        ({"weights": "W4A16", "modules": {"*.mlp.*": "mxfp4"}}, "engines", [VLLM]),
        ({"weights": "nvfp4"}, "transformers", []),
    ],
)
def test_cards_of_exports_name_the_engines_that_read_the_format(config, reader, commands, llama, tmp_path):
    export_compressed_tensors(quantized(llama, **config), tmp_path / "out", reader=reader, repo_id="me/served")
    card = card_in(tmp_path / "out")
    assert is_untouched(card)
    serving = card.text.partition("## Serving")[2].partition("## Usage with hf_quant")[0]
    block = re.search(r"```sh\n(.*?)\n```", serving, re.DOTALL)
    assert ([] if block is None else block[1].splitlines()) == [f"{command} me/served" for command in commands]
    assert ("transformers reads it" in serving) == (reader == "transformers")
    said = "no engine was run on it when it was written; exports of a small Llama in W4A16,"
    assert (said in serving) == (reader == "engines")
    engines = [tag for tag in card.data.tags if tag in ("vllm", "sglang")]
    assert (card.data.tags[0], "hf_quant" in card.data.tags, len(engines)) == (
        "compressed-tensors",
        False,
        len(commands),
    )
    assert "hf-quant import me/served OUT" in card.text and 'from_pretrained("OUT"' in card.text
    reproduce = card.text.partition("## Reproduce")[2]
    assert f"hf-quant export OUT EXPORTED{'' if reader == 'engines' else ' --reader transformers'}" in reproduce
    assert card.data.base_model_relation == "quantized" and card.data.library_name == "transformers"


@pytest.mark.parametrize("cache", ["int8", "fp8", "int4", "int2"])
def test_the_option_of_vllm_for_a_quantized_cache(cache, llama, tmp_path):
    (note,) = export_compressed_tensors(quantized(llama, weights="W4A16", kv_cache=cache), tmp_path / "out")
    option = f"--kv-cache-dtype {cache}_per_token_head"
    card = card_in(tmp_path / "out")
    assert (option in note, option in card.text) == (cache != "int2",) * 2
    assert f"kv-cache-{cache}" not in card.data.tags


def test_engines_are_not_said_to_have_every_architecture(tmp_path):
    model = quantize_(build("vit"), "int8")
    export_compressed_tensors(model, tmp_path / "out")
    card = card_in(tmp_path / "out")
    assert VLLM not in card.text and "Whether they have this architecture is in their documentation." in card.text
    assert not {"vllm", "sglang"} & set(card.data.tags)


@pytest.mark.parametrize("reader", ["engines", "transformers"])
def test_cards_of_exports_do_not_promise_what_is_left_out(reader, llama, tmp_path):
    model = quantized(llama, weights="W4A16", kv_cache="int8", cpu_activations="int8", input_transform="none")
    export_compressed_tensors(model, tmp_path / "out", reader=reader)
    card = card_in(tmp_path / "out")
    about, serving = card.text.partition("## Reproduce")[0].split("## Serving")
    assert "LlamaForCausalLM in int4\n" in about and "cache" not in about
    assert "`generate` keeps" not in serving and "on CPUs" not in serving
    assert "The int8 KV cache of the checkpoint that was exported is no part of this format" in serving
    assert repository_of(card) is None


def test_a_config_that_is_no_command_is_exported_by_python(llama, tmp_path):
    model = quantized(llama, weights="W4A16", modules_to_not_convert=["lm_head"])
    export_compressed_tensors(model, tmp_path / "out", reader="transformers")
    reproduce = card_in(tmp_path / "out").text.partition("## Reproduce")[2]
    assert "from hf_quant import QuantizerConfig, export_compressed_tensors" in reproduce
    assert 'export_compressed_tensors("OUT", "EXPORTED", reader="transformers")' in reproduce
    compile(re.search(r"```python\n(.*?)```", reproduce, re.DOTALL)[1], "card", "exec")


def test_measured_quality_is_that_of_the_export_and_speed_is_not(llama, tmp_path, capsys):
    model = quantized(llama, weights="W4A16")
    model.save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "README.md").write_text(SOURCE_CARD)
    quality = {"dataset": "wiki", "metric": "perplexity", "value": 7.125, "reference": 7.0}
    rows = [{"name": "decode", "value": 31.5, "unit": "tokens/s"}]
    speed = {"device": "a CPU", "versions": "torch 1", "command": "hf-quant bench ours", "rows": rows}
    (tmp_path / "eval.json").write_text(json.dumps({"quality": quality, "bits_per_weight": 4.125}))
    (tmp_path / "bench.json").write_text(json.dumps({"speed": speed}))
    files = [f"--measurements={tmp_path / name}.json" for name in ("eval", "bench")]
    command = ["export", str(tmp_path / "ours"), str(tmp_path / "out"), *files, "--repo", "me/served"]
    assert main(command) == 0
    card = card_in(tmp_path / "out")
    assert (card.data.base_model, card.data.license, card.data.language) == (["me/base"], "mit", "en")
    assert "7.125" in card.text and "not evaluated" not in card.text and "31.5" not in card.text
    assert "hf-quant quantize me/base OUT --weights W4A16" in card.text
    (tmp_path / "eval.json").write_text(json.dumps({"quality": quality, "bits_per_weight": 3.0}))
    assert main([*command[:2], str(tmp_path / "other"), *files]) == 2
    assert "the measurements are of a model with 3.000 bits" in capsys.readouterr().err
    assert main([*command[:2], str(tmp_path / "other"), "--repo", "a/b/c"]) == 2
    assert "repo_id is 'a/b/c'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_an_export_is_not_inspected_and_not_put_into_its_source(llama, tmp_path, capsys):
    quantized(llama, weights="W4A16").save_pretrained(tmp_path / "ours")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "ours" / "served")]) == 2
    assert "OUT is inside of the checkpoint" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "served")]) == 0
    assert main(["inspect", str(tmp_path / "served")]) == 2
    assert "served is quantized by compressed-tensors: `hf-quant import` reads it" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_are_no_path(name, tmp_path):
    for convert in (import_checkpoint, export_compressed_tensors):
        with pytest.raises(ValueError, match="is not a directory, and not a name on the Hub either") as caught:
            convert(name, tmp_path / "out")
        assert len(str(caught.value)) < 300
    assert list(tmp_path.iterdir()) == []


def test_an_imported_checkpoint_says_who_quantized_it(tmp_path):
    llama = make_llama(tmp_path / "fp16", torch.float16)  # its scales
    foreign_checkpoint(tmp_path / "in", llama, "gptq")
    (tmp_path / "in" / "README.md").write_text(SOURCE_CARD)
    import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert config_of(tmp_path / "out")["quantization_config"]["imported_from"] == {"method": "gptq", "name": None}
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    export_compressed_tensors(tmp_path / "out", tmp_path / "exported", reader="transformers")
    for card in (card_in(tmp_path / "out"), model_card(tmp_path / "again"), card_in(tmp_path / "exported")):
        assert "quantized by gptq, imported by hf_quant" in card.text
        assert "| of gptq |" in card.text and "mse" not in card.text
        assert "hf-quant import ORIGINAL OUT" in card.text and "hf-quant quantize" not in card.text
        assert "`ORIGINAL` is the checkpoint of gptq; its name is not recorded here." in card.text
    for name in ("out", "exported"):
        card = card_in(tmp_path / name)
        assert (card.data.base_model, card.data.license) == (["me/base"], "mit")
        assert "Theirs" not in card.text


BY_NAME = """
import json
from transformers import AutoModelForCausalLM
from hf_quant import QuantizerConfig, export_compressed_tensors, import_checkpoint
from hf_quant.cli import main

model = AutoModelForCausalLM.from_pretrained("me/base", quantization_config=QuantizerConfig("W4A16"))
model.push_to_hub("me/ours")
export_compressed_tensors("me/ours", "exported")
assert main(["export", "me/ours", "exported-again", "--revision", "main"]) == 0
export_compressed_tensors(model, "exported-model")
assert main(["import", "me/gptq", "imported"]) == 0
errors = []
for name, options in (("me/nothing", {}), ("me/gptq", {"revision": "v2"}), ("me/base", {}), ("not a name", {})):
    try:
        import_checkpoint(name, "nowhere", **options)
    except ValueError as error:
        errors.append(str(error))
try:
    export_compressed_tensors("me/gptq", "nowhere")
except ValueError as error:
    errors.append(str(error))
json.dump(errors, open("errors.json", "w"))
"""
OFFLINE = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from hf_quant import export_compressed_tensors, import_checkpoint
from hf_quant.checkpoint import inspect_checkpoint
import_checkpoint("me/gptq", "imported-offline")
assert str(inspect_checkpoint("me/ours")).startswith("modules ")
try:
    export_compressed_tensors("me/never", "nowhere")
except ValueError as error:
    assert "HF_HUB_OFFLINE is set" in str(error), error
"""


def test_names_of_the_hub_in_the_place_of_directories(llama, tmp_path):
    foreign_checkpoint(tmp_path / "gptq", llama, "gptq")
    with Hub() as hub:
        hub.add("me/base", {**files_of(llama), "README.md": BASE_CARD.encode()})
        unread = {"onnx/model.safetensors": b"x" * 100, "pytorch_model.bin": b"x" * 100}
        hub.add("me/gptq", {**files_of(tmp_path / "gptq"), **unread, "README.md": SOURCE_CARD.encode()})
        run(BY_NAME, hub, tmp_path)
        assert not [path for path in (tmp_path / "home").rglob("*") if path.name == "pytorch_model.bin"]
        run(OFFLINE, hub, tmp_path)
    exported = load_all(tmp_path / "exported")
    for name in ("exported-again", "exported-model"):
        assert {
            key: bytes(t.numpy().tobytes()) if t.dtype.itemsize == 4 else t.sum() for key, t in exported.items()
        } == {
            key: bytes(t.numpy().tobytes()) if t.dtype.itemsize == 4 else t.sum()
            for key, t in load_all(tmp_path / name).items()
        }
    for name in ("exported", "exported-model"):
        card = card_in(tmp_path / name)
        assert (card.data.base_model, card.data.license_name) == (["me/base"], "tiny-license")
    origin = {"method": "gptq", "name": "me/gptq"}
    for name in ("imported", "imported-offline"):
        assert config_of(tmp_path / name)["quantization_config"]["imported_from"] == origin
        card = card_in(tmp_path / name)
        assert shlex.split(card.text.partition("## Reproduce")[2].split("```")[1])[1:] == [
            *("hf-quant", "import", "me/gptq", "OUT")
        ]
        assert card.data.base_model == ["me/base"]
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert [len(error.splitlines()) for error in errors] == [1] * 5
    for error, expected in zip(
        errors,
        (
            "me/nothing is not a directory, and the Hub has no such model",
            "me/gptq has no revision 'v2'",
            "me/base is not quantized",
            "not a name is not a directory, and not a name on the Hub either",
            "me/gptq is quantized by gptq; needs a checkpoint that hf_quant has quantized",
        ),
    ):
        assert expected in error
    assert not (tmp_path / "nowhere").exists()
