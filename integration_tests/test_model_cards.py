"""Model cards end to end: what a push leaves on the Hub, snippets and commands of cards that do what they say."""

import copy
import gc
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hf_quant import QuantizerConfig, model_card, quantize_
from hf_quant.cards import card_for_upload, find_card, is_untouched, read_card
from hf_quant.cli import main
from hf_quant.modules import QuantizedModule
from integration_tests.support.hub_server import Hub
from integration_tests.support.tiny_models import build


ROOT = Path(__file__).parents[1]
BASE_CARD = """---
license: other
license_name: tiny-license
license_link: LICENSE.md
language:
- en
pipeline_tag: text-generation
tags:
- tiny
datasets:
- me/text
---
# The base
"""
USER_CARD = "---\ntags:\n- mine\nlicense: mit\n---\n# Mine\n\nWritten by a person.\n"
GENERIC = "has been automatically generated"


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def card_of(hub: Hub, repository: str, revision: str = "main") -> ModelCard:
    return ModelCard(hub.files(repository, revision)["README.md"].decode())


def run(code: str, hub: Hub, directory: Path) -> None:
    """Run in a new process: huggingface_hub reads its endpoint when it is imported."""
    environment = hub.environment(directory / "home")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=directory, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


# Pushes.

PUSH_MODELS = """
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM
from hf_quant import QuantizerConfig, quantize_

def load(name, weights=None):
    options = {} if weights is None else {"quantization_config": QuantizerConfig(weights)}
    return AutoModelForCausalLM.from_pretrained(name, **options)

model = load("me/model", "int4")
for name in ("me/first", "me/first", "me/changed", "me/own", "me/generic"):
    model.push_to_hub(name, tags=["pushed"])
model.save_pretrained("out", push_to_hub=True, repo_id="me/saved")
load("me/first").push_to_hub("me/copy")
load("me/model", "int8").push_to_hub("me/changed")
quantize_(load("me/model"), "fp8").push_to_hub("me/quantized", revision="main")
HfApi().create_branch("me/first", branch="v2")
load("me/model", "int8").push_to_hub("me/first", revision="v2")
load("me/model").push_to_hub("me/plain")
model.dequantize().push_to_hub("me/dequantized")
"""


def test_pushed_models_of_transformers(hub, tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    hub.add("me/model", {**files_of(tmp_path / "model"), "README.md": BASE_CARD.encode()})
    generic = ModelCard.from_template(
        ModelCard("---\ntags: [theirs]\n---\n").data,
        model_description="This is the model card of a \N{HUGGING FACE} transformers model that has been pushed on "
        "the Hub. This model card has been automatically generated.",
    )
    for name, card in (("own", USER_CARD), ("generic", str(generic))):
        hub.add(f"me/{name}", {"README.md": card.encode()})
    run(PUSH_MODELS, hub, tmp_path)

    for name in ("first", "saved", "copy", "quantized", "generic"):
        card = card_of(hub, f"me/{name}")
        assert GENERIC not in card.text
        assert card.data.base_model == ["me/model"], name
        assert card.data.base_model_relation == "quantized"
        assert (card.data.license, card.data.license_name) == ("other", "tiny-license")
        assert "revision" not in card.text
        if name != "copy":  # copied from a card where it is complete
            assert card.data.license_link == "https://huggingface.co/me/model/blob/main/LICENSE.md"
        assert (card.data.language, card.data.pipeline_tag) == (["en"], "text-generation")
        assert (card.data.library_name, card.data.get("datasets")) == ("transformers", None)
        assert {"hf_quant", "quantized", "fp8_e4m3" if name == "quantized" else "int4"} <= set(card.data.tags)
        assert f'from_pretrained("me/{name}"' in card.text
    assert "pushed" in card_of(hub, "me/first").data.tags
    assert 'from_pretrained("me/first", revision="v2", device_map' in card_of(hub, "me/first", "v2").text
    assert "theirs" in card_of(hub, "me/generic").data.tags
    changed = card_of(hub, "me/changed")
    assert "int8 row" in changed.text and "int4" not in str(changed)
    for name in ("plain", "dequantized"):
        assert GENERIC in card_of(hub, f"me/{name}").text

    own = card_of(hub, "me/own")
    assert own.text == ModelCard(USER_CARD).text
    assert (own.data.license, own.data.license_name, own.data.license_link) == ("mit", None, None)
    assert own.data.base_model == ["me/model"]
    assert own.data.tags[0] == "mine" and {"hf_quant", "int4"} <= set(own.data.tags)


PUSH_PIPELINES = """
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel, PipelineQuantizationConfig
from hf_quant import QuantizerConfig

options = {"torch_dtype": torch.bfloat16, "tokenizer": None, "tokenizer_2": None}
mapping = {"transformer": QuantizerConfig("int4"), "text_encoder_2": QuantizerConfig("int8")}
config = PipelineQuantizationConfig(quant_mapping=mapping)
pipe = FluxPipeline.from_pretrained("me/flux", quantization_config=config, **options)
for name in ("me/first", "me/first", "me/own"):
    pipe.push_to_hub(name)
pipe.save_pretrained("out", push_to_hub=True, repo_id="me/saved")
pipe.transformer.push_to_hub("me/transformer")
pipe.transformer.push_to_hub("me/transformer")
pipe.transformer.push_to_hub("me/folder", subfolder="transformer")
pipe.vae.push_to_hub("me/vae")
FluxPipeline.from_pretrained("me/first", **options).push_to_hub("me/copy")
FluxPipeline.from_pretrained("me/flux", **options).push_to_hub("me/plain")
FluxTransformer2DModel.from_pretrained("me/transformer", torch_dtype=torch.bfloat16).push_to_hub("me/transformer-copy")
"""


def test_pushed_pipelines_and_models_of_diffusers(hub, tmp_path):
    pytest.importorskip("diffusers", reason="diffusers is an optional host")
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(torch.bfloat16).save_pretrained(tmp_path / "flux")
    card = BASE_CARD.replace("text-generation", "text-to-image")
    hub.add("me/flux", {**files_of(tmp_path / "flux"), "README.md": card.encode()})
    hub.add("me/own", {"README.md": USER_CARD.encode()})
    run(PUSH_PIPELINES, hub, tmp_path)

    for name in ("first", "saved", "copy", "transformer", "transformer-copy"):
        card = card_of(hub, f"me/{name}")
        assert GENERIC not in card.text
        assert card.data.base_model == ["me/flux"], name
        assert (card.data.base_model_relation, card.data.license) == ("quantized", "other")
        assert (card.data.library_name, card.data.pipeline_tag) == ("diffusers", "text-to-image")
        assert {"hf_quant", "quantized", "int4"} <= set(card.data.tags)
        one = name.startswith("transformer")
        assert ("### `transformer`" in card.text, "### `text_encoder_2`" in card.text) == (not one, not one)
        assert (f'FluxTransformer2DModel.from_pretrained("me/{name}"' in card.text) == one
        assert (f'FluxPipeline.from_pretrained("me/{name}"' in card.text) != one
    for name in ("plain", "vae"):
        assert GENERIC in card_of(hub, f"me/{name}").text
    assert not [name for name in hub.files("me/folder") if name.endswith("README.md")]
    own = card_of(hub, "me/own")
    assert own.text == ModelCard(USER_CARD).text
    assert (own.data.license, own.data.base_model) == ("mit", ["me/flux"])


def test_models_of_diffusers_are_copied_and_freed_with_their_method():
    pytest.importorskip("diffusers", reason="diffusers is an optional host")
    from integration_tests.support.tiny_diffusion import make_model

    model = quantize_(make_model("flux", torch.bfloat16), "int8")
    method = model._upload_folder
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied._upload_folder.model() is copied and method.model() is model
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, method, copied
        assert gone() is None
    finally:
        gc.enable()
    model = quantize_(make_model("flux", torch.bfloat16), "int8")
    model.dequantize()
    assert "_upload_folder" not in vars(model)


# Cards do what they say.


def snippet(card: ModelCard, section: str, language: str = "python") -> str:
    text = card.text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found


def execute(code: str) -> dict:
    names: dict = {}
    exec(compile(code, "card", "exec"), names)
    return names


@pytest.fixture
def working_dir(tmp_path, monkeypatch) -> Path:
    """A directory in which names of the Hub are directories: snippets and commands run unchanged."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    return tmp_path


def test_usage_and_command_of_a_card_of_the_command_line(asset_model_dir, working_dir, capsys):
    (working_dir / "me" / "base").symlink_to(asset_model_dir)
    options = ("--weights", "int4", "--group-size", "64", "--module", "*.down_proj=int8", "--kv-cache", "int8")
    assert main(["quantize", "me/base", "me/quantized", *options]) == 0
    first = ModelCard.load("me/quantized/README.md")
    assert "USER/NAME" in first.text and "hf-quant quantize BASE OUT " in first.text
    assert first.data.base_model is None  # it was a directory
    assert main(["card", "me/quantized", "--base-model", "me/other", "--repo", "me/quantized"]) == 0
    card = ModelCard.load("me/quantized/README.md")
    assert card.data.base_model == ["me/other"]
    capsys.readouterr()
    names = execute(snippet(card, "Usage"))
    assert "The first three primes are" in capsys.readouterr().out
    command = shlex.split(snippet(card, "Reproduce", "sh"))
    assert command[:4] == ["hf-quant", "quantize", "me/other", "OUT"]
    assert main(["quantize", "me/base", *command[3:]]) == 0
    stored, again = (files_of(working_dir / name) for name in ("me/quantized", "OUT"))
    assert stored["model.safetensors"] == again["model.safetensors"]
    assert stored["config.json"] == again["config.json"]
    assert names["model"].config.quantization_config.kv_cache == "int8"


def test_a_card_of_the_command_line_beside_others(asset_model_dir, working_dir, capsys):
    (working_dir / "me" / "base").mkdir()
    for path in asset_model_dir.iterdir():
        if path.name != "README.md":
            (working_dir / "me" / "base" / path.name).symlink_to(path)
    (working_dir / "me" / "base" / "README.md").write_text(BASE_CARD)
    assert main(["quantize", "me/base", "out", "--weights", "int8"]) == 0
    assert ModelCard.load("out/README.md").data.license == "other"
    measure = ("--reference", "me/base", "--text", f"{asset_model_dir}/val_ids.npy", "--device", "cpu")
    assert main(["eval", "out", *measure, "--window", "128", "--max-tokens", "512", "--json", "eval.json"]) == 0
    bench = ("--reference", "me/base", "--rounds", "1", "--new-tokens", "2", "--device", "cpu")
    assert main(["bench", "out", *bench, "--json", f"{working_dir}/bench.json"]) == 0
    options = ("--measurements", "eval.json", "--measurements", "bench.json")
    assert main(["card", "out", *options]) == 0
    card = ModelCard.load("out/README.md")
    assert "Licence: `tiny-license`" in card.text
    options += ("--base-model", "me/base")
    assert main(["card", "out", *options]) == 0
    assert str(ModelCard.load("out/README.md")) == str(card)
    assert "| perplexity | " in card.text and "tokens/s |" in card.text and "not evaluated" not in card.text
    assert str(working_dir) not in str(card) and str(asset_model_dir) not in str(card)
    assert "--text val_ids.npy" in card.text and "--json bench.json" in card.text
    assert card.data.base_model is None and card.data.license_name == "tiny-license"

    Path("out/README.md").write_text(USER_CARD)
    assert "the text that was there is kept" in output(capsys, "card", "out", *options)
    kept = ModelCard.load("out/README.md")
    assert kept.text == ModelCard(USER_CARD).text and {"mine", "int8"} <= set(kept.data.tags)
    assert main(["quantize", "me/base", "out", "--weights", "int2", "--force"]) == 0
    assert ModelCard.load("out/README.md").text == kept.text
    assert "not evaluated" in output(capsys, "card", "out", "-o", "new/card.md") + Path("new/card.md").read_text()
    assert main(["card", "out", "--measurements", "eval.json", "-o", "x.md"]) == 2
    assert "the measurements are of a model with 8." in capsys.readouterr().err
    assert main(["card", "me/base"]) == 2
    assert "is in 16 bit" in capsys.readouterr().err
    Path("out/README.md").write_text("---\na: [\n---\n")
    assert main(["card", "out"]) == 2
    assert "metadata that cannot be read" in capsys.readouterr().err


def output(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_nothing_is_said_of_weights_that_are_no_longer_there(tmp_path):
    """Other weights in one repository: base, licence and figures of the first are gone, added metadata are not."""
    figures = {"quality": {"dataset": "wiki", "metric": "perplexity", "value": 7.125}}
    model = quantize_(build("llama"), "int4")
    model.save_pretrained(tmp_path)
    card = model_card(model, figures, base_model="me/base", base_card=card_with("mit"))
    (tmp_path / "README.md").write_text(str(card).replace("tags:", "datasets:\n- mine\ntags:"))
    assert model_card(tmp_path).data.base_model == ["me/base"]  # beside the weights, a card is about them
    card_for_upload(model, tmp_path, "me/model")  # the host put the card of the repository there
    found = ModelCard.load(tmp_path / "README.md")
    assert (found.data.base_model, found.data.license) == (None, None)
    assert "7.125" not in found.text and "me/base" not in str(found) and "not evaluated" in found.text
    assert found.data.datasets == ["mine"]


def card_with(license: str) -> ModelCard:
    return ModelCard(f"---\nlicense: {license}\n---\n# Base\n")


def test_a_card_keeps_its_repository_and_its_tags_name_one_format(tmp_path, capsys):
    for weights in ("int4", "int8"):
        quantize_(build("llama"), weights).save_pretrained(tmp_path / weights)
    assert main(["card", str(tmp_path / "int4"), "--repo", "me/model-int4"]) == 0
    assert main(["card", str(tmp_path / "int4")]) == 0
    card = ModelCard.load(tmp_path / "int4" / "README.md")
    assert card.text.startswith("\n# model-int4\n") and 'from_pretrained("me/model-int4"' in card.text
    for weights in ("int4", "int8"):
        (tmp_path / "own.md").write_text(USER_CARD if weights == "int4" else (tmp_path / "own.md").read_text())
        (tmp_path / "eval.json").write_text('{"quality": {"dataset": "a", "metric": "b", "value": 1}}')
        options = ("-o", str(tmp_path / "own.md"), "--measurements", str(tmp_path / "eval.json"))
        assert "the measurements are not in it" in output(capsys, "card", str(tmp_path / weights), *options)
    tags = ModelCard.load(tmp_path / "own.md").data.tags
    assert {"mine", "int8", "8-bit"} <= set(tags) and not {"int4", "4-bit"} & set(tags)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 6)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("metadata", "is_read"),
    [
        ("a: " + "[" * 20_000 + "]" * 20_000, False),
        ("a: !!bool x", False),
        ("a: 1:" + "59:" * 5000 + "1", False),  # an integer in base 60, of more digits than Python writes
        ("a: !!python/object/apply:os.system [ls]", False),
        (f"{LAUGHS}base_model: *a29\nlicense: *a29\ntags: *a29\nlanguage: *a29", True),
        ("base_model: [[a/b]]\nlicense: 5\ntags: {a: b}\nlanguage: [3]", True),
    ],
    ids=["deep", "bool", "digits", "object", "laughs", "types"],
)
def test_unreadable_cards_are_left_alone(metadata, is_read, tmp_path):
    """An unreadable card, of the base model or already there, is left alone, and no upload fails for it."""
    quantize_(build("llama"), "int4").save_pretrained(tmp_path / "model")
    text = f"---\n{metadata}\n---\n# Mine\n"
    (tmp_path / "README.md").write_text(text)
    assert (read_card(tmp_path / "README.md") is not None) == is_read == (find_card(tmp_path) is not None)
    (tmp_path / "model" / "README.md").write_text(text)
    model = build("llama")
    card_for_upload(model, tmp_path / "model", "me/model")
    written = (tmp_path / "model" / "README.md").read_text()
    assert written.endswith("# Mine\n") and (written == text) != is_read
    if is_read:
        card = model_card(tmp_path / "model", base_card=tmp_path)
        assert card.data.license is None and card.data.base_model is None


@pytest.mark.parametrize(
    "name", ["bert", "t5", "whisper", "vit", "llava", "nomic_bert", "qwen3_moe", "llama_tied", "mamba"]
)
def test_models_load_as_their_cards_say(name, working_dir):
    quantize_(build(name), "int8").save_pretrained("me/model")
    card = model_card("me/model", repo_id="me/model")
    model = execute(snippet(card, "Usage"))["model"]
    assert type(model) is type(build(name))
    assert any(isinstance(m, QuantizedModule) for m in model.modules())


CONNECTOR_SIZES = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1, "num_learnable_registers": 8}


@pytest.mark.parametrize("weights", ["int4", None])
def test_pipelines_and_their_models_load_as_their_cards_say(weights, working_dir):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(torch.bfloat16).save_pretrained("me/base")
    pattern = {"modules": {"*.attn.to_q": "int8"}}
    mapping = {
        "transformer": QuantizerConfig(weights, attention="int8", **pattern),
        "text_encoder_2": QuantizerConfig("int8", input_transform={"block_size": 32}),
    }
    pipe = diffusers.FluxPipeline.from_pretrained(
        "me/base",
        torch_dtype=torch.bfloat16,
        tokenizer=None,
        tokenizer_2=None,
        quantization_config=diffusers.PipelineQuantizationConfig(quant_mapping=mapping),
    )
    pipe.save_pretrained("me/pipe")
    live, card = model_card(pipe, repo_id="me/pipe"), model_card("me/pipe", repo_id="me/pipe")
    assert live.text.split() == card.text.split()
    assert card.data.pipeline_tag == "text-to-image" and card.data.base_model is None
    assert "with int8 attention" in card.text and "Scores of attention are in int8." in card.text
    assert "### `transformer`" in card.text and "### `text_encoder_2`" in card.text
    assert "int8 row, rotated by 32" in card.text
    assert "As they were: `text_encoder` (" in card.text and "`vae` (" in card.text
    assert type(execute(snippet(card, "Usage"))["pipe"]) is diffusers.FluxPipeline
    execute(snippet(model_card("me/pipe", repo_id="me/pipe", base_model="me/base"), "Reproduce"))
    assert files_of(Path("OUT")) == files_of(Path("me/pipe"))

    one = model_card("me/pipe/transformer", repo_id="me/transformer", base_model="me/one")
    os.symlink(working_dir / "me" / "pipe" / "transformer", "me/transformer")
    os.symlink(working_dir / "me" / "base" / "transformer", "me/one")
    assert type(execute(snippet(one, "Usage"))["model"]).__name__ == "FluxTransformer2DModel"
    command = shlex.split(snippet(one, "Reproduce", "sh"))
    assert main([*command[1:3], "OUT2", *command[4:]]) == 0
    configs = [json.loads((Path(name) / "config.json").read_text()) for name in ("OUT2", "me/transformer")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    weights = "diffusion_pytorch_model.safetensors"
    assert files_of(Path("OUT2"))[weights] == files_of(Path("me/transformer"))[weights]


def test_models_of_one_pipeline_alone(working_dir, capsys):
    """diffusers has their classes in the package of the pipeline: the command and the snippets find them there."""
    ltx2 = pytest.importorskip("diffusers.pipelines.ltx2", reason="diffusers is an optional host")
    sizes = {f"{kind}_connector_{name}": n for kind in ("video", "audio") for name, n in CONNECTOR_SIZES.items()}
    ltx2.LTX2TextConnectors(caption_channels=32, text_proj_in_factor=2, **sizes).save_pretrained("me/base")
    assert main(["quantize", "me/base", "me/out", "--weights", "int8", "--dtype", "fp32"]) == 0
    card = model_card("me/out", repo_id="me/out", base_model="me/base")
    assert type(execute(snippet(card, "Usage"))["model"]) is ltx2.LTX2TextConnectors
    Path("me/base/config.json").write_text('{"_class_name": "DDIMScheduler"}')
    assert main(["plan", "me/base"]) == 2
    assert "me/base is a DDIMScheduler, which is no model of diffusers" in capsys.readouterr().err


def test_the_dtype_of_a_model_whose_largest_parts_the_host_keeps_in_fp32(working_dir):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is an optional host")
    sizes = {"model_dim": 64, "ff_dim": 128, "in_text_dim": 64, "in_text_dim2": 64, "time_dim": 64}
    blocks = {"num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (8, 4, 4)}
    diffusers.Kandinsky5Transformer3DModel(**sizes, **blocks).save_pretrained("me/base")
    config = QuantizerConfig("int8")
    model = diffusers.Kandinsky5Transformer3DModel.from_pretrained(
        "me/base", dtype=torch.bfloat16, quantization_config=config
    )
    model.save_pretrained("me/model")
    card = model_card("me/model", repo_id="me/model", base_model="me/base")
    assert execute(snippet(card, "Usage"))["model"].dtype == model.dtype == torch.bfloat16
    assert "--dtype bf16" in snippet(card, "Reproduce", "sh") and "before, in bfloat16" in card.text


def test_the_cards_in_the_tree_are_those_of_the_script(tmp_path):
    """Nobody has edited a card, or its figures without it. Versions differ between environments."""

    def compared(path: Path) -> str:
        text = re.sub(r"Written by .*?;", "Written by;", path.read_text())
        return re.sub(r"<!-- hf_quant card \w+ -->", "", text)

    script = ROOT / "scripts" / "make_model_cards.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, script, "--out", tmp_path], env=environment, check=True, capture_output=True, timeout=280
    )
    made = {path.name: compared(path) for path in tmp_path.glob("*.md")}
    stored = {p.name: compared(p) for p in (ROOT / "model_cards").glob("*.md") if p.name != "README.md"}
    assert len(made) == 4 and made == stored
    for path in (ROOT / "model_cards").glob("tiny-*.md"):
        card = ModelCard.load(path)
        assert is_untouched(card)
        assert "not evaluated" not in card.text and "| perplexity | " in card.text
        assert ("## Speed" in card.text, "## Serving" in card.text) in ((True, False), (False, True))
        assert card.data.license is None and card.data.base_model is None  # neither is on the Hub
