"""Model cards: metadata, sections, commands that give the config back, cards that are there already, hostile text."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM

import hf_quant
from hf_quant import QuantizerConfig, model_card, quantize_
from hf_quant.cards import hub_id, is_untouched, merge_cards
from hf_quant.cards.base import base_models, inherited, read_card
from hf_quant.cards.measurements import Measurements, read_measurements
from hf_quant.cards.source import CardSource, Part
from hf_quant.cards.text import code, number, plain, size
from hf_quant.cards.usage import auto_class, pipeline_tag, quantize_command, reproduce, usage
from hf_quant.checkpoint import CheckpointSummary
from hf_quant.cli._parser import build_parser, config_from_args


def llama(**fields) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, max_position_embeddings=32, **sizes, **fields)).bfloat16()


@pytest.fixture(scope="module")
def int4_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("int4")
    config = QuantizerConfig("int4", modules={"lm_head": "int8", "*.0.self_attn.q_proj": None}, kv_cache="int8")
    quantize_(llama(), config).save_pretrained(path)
    return path


def metadata(card: ModelCard) -> dict:
    """The YAML as any other program reads it."""
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", str(card), re.DOTALL)[1])


def section(card: ModelCard, title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |<!--)", card.text, re.MULTILINE | re.DOTALL)[1].strip()


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"data": "wiki.txt", "num_tokens": 512, "length": 64}, " --calibrate wiki.txt --calibration-tokens 512"),
        (
            {"data": "text that the model wrote", "num_tokens": 64, "seed": 0, "temperature": 1.0},
            " --calibration-tokens 64",
        ),
        ({"data": "<lambda>"}, " --calibrate DATA"),
    ],
)
def test_calibration_data_is_named(record, options, tmp_path):
    model = quantize_(llama(), QuantizerConfig("int4", algorithm="gptq"), calibration=torch.randint(3, 96, (2, 32)))
    model.config.quantization_config.calibrated_with = record
    model.save_pretrained(tmp_path)
    card = model_card(tmp_path, base_model="me/llama")
    assert f"Calibrated with `{record['data']}`" in section(card, "Quantization") and "gptq" in card.text
    again = section(card, "Reproduce")
    assert f"--algorithm gptq{options} --dtype" in again
    assert ("`DATA` stands for" in again) == ("DATA" in options)


# Sources.


def test_a_directory_and_the_model_give_the_same_card(int4_dir):
    model = LlamaForCausalLM.from_pretrained(int4_dir)
    options = {"base_model": "me/llama", "repo_id": "me/llama-int4", "license": "mit"}
    assert (
        str(model_card(model, **options))
        == str(model_card(int4_dir, **options))
        == str(model_card(str(int4_dir), **options))
    )
    fused = hf_quant.fuse_projections_(model)  # its weights are views now
    assert str(model_card(fused, **options)) == str(model_card(int4_dir, **options))


def test_metadata_and_sections(int4_dir):
    card = model_card(int4_dir, base_model="me/llama", repo_id="me/llama-int4")
    assert metadata(card) == {
        "base_model": ["me/llama"],
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_quant", "quantized", "int4", "int8", "4-bit", "8-bit", "kv-cache-int8"],
    }
    titles = re.findall(r"^## (.*)", card.text, re.MULTILINE)
    assert titles == ["Usage", "Quantization", "Size", "Quality", "Reproduce", "Licence and base model"]
    assert section(card, "Quality") == "not evaluated"
    assert section(card, "Usage").index("pip install hf-quant") < section(card, "Usage").index("import hf_quant")
    table = section(card, "Quantization")
    assert "14 modules quantized, " in table
    assert "| int8 row | 8.250 | `lm_head` | 1 | absmax |" in table
    assert "`model.layers.{0-1}.mlp.down_proj`" in table and "| 13 | mse |" in table
    assert "kept by `modules['*.0.self_attn.q_proj']`" in table
    assert re.search(r"`model.embed_tokens.weight \[96x64\]` \| 16 bit \| 1 \| 12.3 kB \| embedding", table)
    assert "keeps keys and values in int8" in table
    assert f"hf_quant {hf_quant.__version__}, transformers " in table
    assert "Speed" not in card.text and "None" not in card.text
    assert "licence is not recorded" in section(card, "Licence and base model")


def test_the_bytes_are_those_of_the_files(int4_dir):
    from safetensors.torch import load_file

    stored = sum(t.nbytes for t in load_file(int4_dir / "model.safetensors").values())
    before = sum(p.nbytes for p in llama().parameters())
    text = section(model_card(int4_dir), "Size")
    assert f"| {size(before)} |" in text and f"| {size(stored)} ({stored / before:.1%}) |" in text


def test_what_is_not_quantized_is_refused(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="is in 16 bit; a card is made of a model that hf_quant has quantized"):
        model_card(tmp_path / "model")
    with pytest.raises(ValueError, match="LlamaForCausalLM is not quantized by hf_quant"):
        model_card(llama())
    with pytest.raises(ValueError, match="is not a directory"):
        model_card(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no config.json"):
        model_card(tmp_path / "empty")
    with pytest.raises(ValueError, match="got a int; needs a quantized model"):
        model_card(3)
    layers = quantize_(torch.nn.Sequential(torch.nn.Linear(128, 64)), "int8")
    with pytest.raises(ValueError, match="Sequential is not quantized by"):
        model_card(layers)
    hf_quant.save_quantized(layers, tmp_path / "plain")
    with pytest.raises(ValueError, match="holds a plain module"):
        model_card(tmp_path / "plain")
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="was quantized by something else"):
        model_card(tmp_path / "model")
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ValueError, match="a pipeline without a component"):
        model_card(tmp_path / "pipe")


def test_a_cache_alone(tmp_path):
    quantize_(llama(), QuantizerConfig(None, kv_cache={"format": "int4", "sink_tokens": 4})).save_pretrained(tmp_path)
    card = model_card(tmp_path)
    assert metadata(card)["tags"] == ["hf_quant", "quantized", "kv-cache-int4"]
    assert "keeps keys and values in int4 (sink_tokens 4)." in card.text
    assert "The weights are as they were" in card.text
    assert "16 bit with an int4 KV cache" in card.text


# The base model.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        (f"/h/hub/models--meta-llama--Llama-3.1-8B/snapshots/{'a' * 40}/vae", "meta-llama/Llama-3.1-8B"),
        (f"/h/hub/models--gpt2/snapshots/{'0' * 40}", "gpt2"),
        ("/srv/models/llama", None),
        ("./models/llama", None),
        ("../llama", None),
        ("~/llama", None),
        ("llama", None),  # a directory that is gone, for all that is known
        ("a/b/c", None),
        ("C:\\models\\llama", None),
        ("a/b\n- evil", None),
        ("a/<b>", None),
        ("x" * 5000 + "/y", None),
        ("", None),
        (None, None),
    ],
)
def test_no_path_becomes_a_base_model(name, expected):
    assert hub_id(name) == expected


def test_a_directory_that_looks_like_a_name_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "llama").mkdir(parents=True)
    assert hub_id("me/llama") is None
    llama().save_pretrained("me/llama")
    model = LlamaForCausalLM.from_pretrained("me/llama", quantization_config=QuantizerConfig("int8"))
    card = model_card(model)
    assert "base_model" not in metadata(card)
    assert str(tmp_path) not in str(card) and "me/llama" not in str(card)
    (tmp_path / "me" / "llama" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n")
    assert metadata(model_card(model))["license"] == "apache-2.0"
    assert metadata(model_card(model, license="mit"))["license"] == "mit"
    assert metadata(model_card(model))["language"] == "en"


def test_what_the_caller_says_of_the_base(int4_dir, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: x\nlicense_link: https://x.org/l\n---\n")
    card = model_card(int4_dir, base_model=["me/a", "me/b"], base_card=tmp_path)
    found = metadata(card)
    assert found["base_model"] == ["me/a", "me/b"]
    assert (found["license"], found["license_name"], found["license_link"]) == ("other", "x", "https://x.org/l")
    assert "Licence: `x` (`https://x.org/l`)" in card.text
    only = metadata(model_card(int4_dir, base_card=tmp_path / "README.md", license="mit"))
    assert only["license"] == "mit" and not {"license_name", "license_link", "base_model"} & set(only)
    with pytest.raises(ValueError, match="base_model is '/srv/x'; needs the name of a repository"):
        model_card(int4_dir, base_model="/srv/x")
    with pytest.raises(ValueError, match="repo_id is"):
        model_card(int4_dir, repo_id='a"b')
    with pytest.raises(ValueError, match="has no model card that can be read"):
        model_card(int4_dir, base_card=int4_dir)


@pytest.mark.parametrize("text", ["---\nlicense: [\n---\n", "---\n- a\n---\n", "---\nlicense: 3\ntags: x\n---\nhello"])
def test_cards_that_say_nonsense_give_nothing(text, tmp_path):
    (tmp_path / "README.md").write_text(text)
    card = read_card(tmp_path / "README.md")
    assert card is None or (inherited(card, None) == {} and base_models(card) == [])


def test_only_plain_words_are_inherited():
    text = yaml.safe_dump({"license": "mit\nx: y", "language": ["en", 3], "pipeline_tag": "a b", "tags": ["t"]})
    assert inherited(ModelCard(f"---\n{text}---\n"), None) == {}
    text = yaml.safe_dump({"license": ["mit", "gpl"], "license_link": "LICENSE", "language": ["en", "zh-CN"]})
    assert inherited(ModelCard(f"---\n{text}---\n"), "me/x") == {
        "license": ["mit", "gpl"],
        "license_link": "https://huggingface.co/me/x/blob/main/LICENSE",
        "language": ["en", "zh-CN"],
    }


# Classes, tasks, commands.


def source(kind: str = "transformers", class_name: str | None = "LlamaForCausalLM", **fields) -> CardSource:
    config = fields.pop("config", QuantizerConfig("int4"))
    part = Part("", class_name, CheckpointSummary(config, (), 1), torch.bfloat16)
    known = {"others": {}, "absent": (), "origin": None, "origin_is_quantized": None, "auto_class": None}
    return CardSource(kind, class_name, (part,), has_tokenizer=True, versions={}, **{**known, **fields})


@pytest.mark.parametrize(
    ("class_name", "auto", "task"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM", "text-generation"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM", "text-generation"),
        ("LlamaForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
        ("BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask"),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", None),
        ("LlavaForConditionalGeneration", "AutoModelForImageTextToText", "image-text-to-text"),
        ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
        ("ViTForImageClassification", "AutoModelForImageClassification", "image-classification"),
        ("NomicBertModel", "AutoModel", None),
        ("T5EncoderModel", "T5EncoderModel", None),
        ("ZebraModel", "AutoModel", None),
        (None, "AutoModel", None),
    ],
)
def test_class_and_task(class_name, auto, task):
    found = source(class_name=class_name)
    assert (auto_class(found), pipeline_tag(found)) == (auto, task)
    text = usage(found, "me/x", None, task)
    compile(text, "card", "exec")
    assert text.startswith("import hf_quant") and f'{auto}.from_pretrained("me/x"' in text


@pytest.mark.parametrize(
    ("class_name", "task"),
    [
        ("FluxPipeline", "text-to-image"),
        ("CogVideoXPipeline", "text-to-video"),
        ("WanPipeline", "text-to-video"),
        ("WanImageToVideoPipeline", "image-to-video"),
        ("FluxImg2ImgPipeline", "image-to-image"),
        ("Flux2Pipeline", None),  # both from text and from images
        ("ZebraPipeline", None),
    ],
)
def test_tasks_of_pipelines(class_name, task):
    pytest.importorskip("diffusers", reason="diffusers is an optional host")
    assert pipeline_tag(source("pipeline", class_name)) == task


def test_code_that_a_model_brings_along():
    found = source(class_name="Own", auto_class="AutoModelForCausalLM")
    assert "trust_remote_code=True" in usage(found, "me/x", None, None)
    assert reproduce(found, "me/base")[1].endswith("--trust-remote-code")


CONFIGS = [
    QuantizerConfig(),
    QuantizerConfig("W4A8", group_size=64, algorithm="hqq"),
    QuantizerConfig("int4", cpu_activations="int8", symmetric=False),
    QuantizerConfig("int3", symmetric=True),
    QuantizerConfig("fp8", granularity="tensor", activations="fp8"),
    QuantizerConfig(None, kv_cache="int2"),
    QuantizerConfig(
        "int4",
        modules={
            "re:.*layers\\.0\\..*": None,
            "lm_head": "int8",
            "it's a $name": "nf4",
            "*.down_proj": {"weights": "int4", "group_size": 64, "symmetric": False, "algorithm": None},
        },
    ),
    QuantizerConfig(None, modules={"lm_head": "W8A8_FP8"}),
    QuantizerConfig("nf4", group_size=32, scale_dtype="float8_e4m3fn", input_transform="hadamard"),
    QuantizerConfig("W8A8", input_transform="none"),
    QuantizerConfig("W8A8", activation_scale="static"),
]
WITHOUT_A_COMMAND = [
    QuantizerConfig("int4", input_transform={"block_size": 64}),
    QuantizerConfig("int4", modules_to_not_convert=["lm_head"]),
    QuantizerConfig("int4", kv_cache={"format": "int4", "recent_tokens": 32}),
    QuantizerConfig("int4", modules={"re:.*(?=x)v": "int8"}),
    QuantizerConfig("int4", modules={"a\n```\nb": "int8"}),
    QuantizerConfig("int4", modules={"lm_head": {"weights": "int8"}}),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_the_command_gives_the_config(config):
    language, command = reproduce(source(config=config), "me/base")
    assert language == "sh"
    program, *arguments = shlex.split(command)
    args = build_parser().parse_args(arguments)
    assert (program, args.model, str(args.out), args.dtype) == ("hf-quant", "me/base", "OUT", "bf16")
    assert config_from_args(args) == config


@pytest.mark.parametrize("config", [*CONFIGS, *WITHOUT_A_COMMAND], ids=repr)
@pytest.mark.parametrize("kind", ["transformers", "diffusers", "pipeline"])
def test_the_snippet_gives_the_config(config, kind):
    found = source(kind, "FluxPipeline" if kind == "pipeline" else "FluxTransformer2DModel", config=config)
    if kind == "transformers" and config in WITHOUT_A_COMMAND:
        assert quantize_command(found.parts[0], "me/base") is None
    language, text = reproduce(found, "me/base")
    if language == "python":
        compile(text, "card", "exec")
        expression = re.search(r"QuantizerConfig\(.*\)", text)[0]
        assert eval(expression, {"QuantizerConfig": QuantizerConfig}) == config
        assert "```" not in [line.strip() for line in text.splitlines()]


# Text of strangers.

HOSTILE = "x`</code>\n---\nlicense: mit\n---\n# Owned <script>alert(1)</script> [a](http://e.vil) | y | ```\n"


def test_text_is_shown_and_never_markup():
    assert code("a`b\nc|d") == "`a'b c\\|d`"
    assert code("") == "` `"
    assert len(code("x" * 10_000)) < 300
    shown = plain(HOSTILE)
    assert "\n" not in shown and "<" not in shown and "://" not in shown
    assert not re.search(r"(?<!\\)[`\[\]|*_]", shown)
    assert (number(1234567.0), number(0.5), number(12.3456), number(2.5e-7), number(0)) == (
        *("1,234,567", "0.5000", "12.35", "2.5e-07"),
        "0.000",
    )


def test_a_hostile_config_injects_nothing(int4_dir, tmp_path):
    path = tmp_path / "hostile"
    shutil.copytree(int4_dir, path)
    fields = json.loads((path / "config.json").read_text())
    fields["architectures"] = [HOSTILE]
    fields["_name_or_path"] = "me/base\nlicense: mit"
    fields["transformers_version"] = HOSTILE
    fields["auto_map"] = {HOSTILE: f"x.{HOSTILE}"}
    fields["quantization_config"]["modules"] = {HOSTILE: None, "lm_head": "int8"}
    fields["quantization_config"]["modules_to_not_convert"] = [HOSTILE]
    fields["quantization_config"]["plan"].append(
        {"scheme": fields["quantization_config"]["plan"][0]["scheme"], "modules": [" ".join(HOSTILE.split()), "a`|b"]}
    )
    (path / "config.json").write_text(json.dumps(fields))
    figures = {"dataset": HOSTILE, "metric": HOSTILE, "value": 1, "details": HOSTILE, "command": HOSTILE}
    run = {"device": HOSTILE, "versions": HOSTILE, "command": HOSTILE, "details": HOSTILE}
    run["rows"] = [{"name": HOSTILE, "value": 1, "unit": HOSTILE}]
    measured = {"quality": [figures], "speed": run, "memory": {"name": HOSTILE, "value": 3}}
    card = model_card(path, measured, repo_id="me/card")
    assert set(metadata(card)) == {"base_model_relation", "library_name", "tags"}
    text = str(card)
    assert ModelCard(text).data.license is None
    assert text.count("\n---\n") == 1  # the end of the metadata
    assert re.findall(r"^#+ .*", card.text, re.MULTILINE)[:2] == ["# card", "## Usage"]
    assert "# Owned" not in re.findall(r"^#+ .*", card.text, re.MULTILINE)
    fences = re.findall(r"^ {0,3}(```.*)", card.text, re.MULTILINE)
    assert fences == ["```sh", "```", "```python", "```", "```python", "```"]
    outside = re.sub(r"^```.*?^```$", "", card.text, flags=re.MULTILINE | re.DOTALL)
    assert all(line.count("`") % 2 == 0 for line in outside.splitlines())
    outside = re.sub(r"(?<!\\)`[^`\n]*`", "", outside)
    assert "<script>" not in outside and "](http://e.vil)" not in outside.replace("\\]", "")
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(widths) <= {4, 5, 6, 7, 3}, widths
    for origin in ("x" * 5000, "a\0b", "../..", 5):
        (path / "config.json").write_text(json.dumps({**fields, "_name_or_path": origin}))
        assert model_card(path).data.base_model is None


# Cards that are there already.


def cards(int4_dir: Path, tmp_path: Path) -> tuple[ModelCard, ModelCard]:
    """Of an int4 and of an int8 model."""
    quantize_(llama(), "int8").save_pretrained(tmp_path / "int8")
    return model_card(int4_dir, base_model="me/a"), model_card(tmp_path / "int8", base_model="me/a", license="mit")


def test_merging(int4_dir, tmp_path):
    int4, int8 = cards(int4_dir, tmp_path)
    assert is_untouched(int4) and is_untouched(ModelCard(str(int4).replace("\n", "\r\n")))
    assert merge_cards(None, int8) is int8
    # Not edited: replaced, whatever it measured; what somebody has added to the metadata stays.
    measured = {"quality": [{"dataset": "wiki", "metric": "perplexity", "value": 7.0, "reference": 6.9}]}
    first = model_card(int4_dir, measured, base_model="me/a")
    assert is_untouched(first) and first.text != int4.text
    first.data["datasets"] = ["me/data"]
    for card in (int4, int8):
        merged = merge_cards(first, card)
        assert merged.text == card.text and merged.data.datasets == ["me/data"]
    assert "int4" not in merged.data.tags
    # The mark of earlier cards had two numbers.
    assert is_untouched(ModelCard(str(int4).replace("<!-- hf_quant card ", f"<!-- hf_quant card {'0' * 16} ")))
    # Edited by somebody: kept.
    edited = ModelCard(str(int4).replace("not evaluated", "It is good."))
    assert not is_untouched(edited)
    merged = merge_cards(edited, int8)
    assert merged.text == edited.text
    assert "int8" in merged.data.tags and "int4" not in merged.data.tags and merged.data.license == "mit"
    assert str(merge_cards(merged, int8)) == str(merged)


def test_a_card_without_metadata_keeps_its_text(int4_dir):
    card = model_card(int4_dir, base_model="me/a")
    merged = merge_cards(ModelCard("# Mine\n\ntext\n"), card)
    assert merged.text.strip() == "# Mine\n\ntext"
    assert merged.data.base_model == ["me/a"] and merged.data.tags == card.data.tags
    assert merge_cards(ModelCard("---\ntags: mine\n---\n"), card).text == card.text


def test_a_directory_s_own_card_names_its_base(int4_dir, tmp_path):
    path = tmp_path / "again"
    shutil.copytree(int4_dir, path)
    model_card(int4_dir, base_model="me/a", license="mit").save(path / "README.md")
    found = metadata(model_card(path))
    assert (found["base_model"], found["license"]) == (["me/a"], "mit")
    model = LlamaForCausalLM.from_pretrained(path)
    assert metadata(model_card(model))["base_model"] == ["me/a"]


# Measurements.

SPEED = {"device": "cpu", "versions": "torch", "command": "bench"}


def test_measured_figures_are_shown(int4_dir, tmp_path):
    quality = {
        "dataset": "wiki",
        "metric": "perplexity",
        "value": 7.07,
        "reference": 7.0,
        "command": "hf-quant eval x",
    }
    run = {**SPEED, "rows": [{"name": "decode", "value": 30, "unit": "tokens/s", "reference": 15}]}
    (tmp_path / "a.json").write_text(json.dumps({"quality": quality, "unknown": 1, "bits_per_weight": 4.6}))
    (tmp_path / "b.json").write_text(json.dumps({"speed": [run], "memory": [{"name": "peak", "value": 2e9}]}))
    found = read_measurements([tmp_path / "a.json", tmp_path / "b.json"])
    assert Measurements.from_dict(found.to_dict()) == found
    with pytest.raises(ValueError, match="the measurements are of a model with 9.000 bits per weight, this one has 4"):
        model_card(int4_dir, {**found.to_dict(), "bits_per_weight": 9.0})
    card = model_card(int4_dir, {**found.to_dict(), "bits_per_weight": None})
    assert "| wiki | perplexity | 7.000 | 7.070 | +1.00% |" in section(card, "Quality")
    assert "Measured by `hf-quant eval x`." in section(card, "Quality")
    assert "| decode | 15.00 | 30.00 | tokens/s |" in section(card, "Speed")
    assert "cpu; torch. Measured by `bench`." in section(card, "Speed")
    assert "| peak | 2.00 GB |" in section(card, "Size")
    assert "not evaluated" not in card.text
    assert model_card(int4_dir, tmp_path / "b.json").text.count("not evaluated") == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is a list; needs an object"),
        ({"qualty": []}, "has 'qualty'; needs any of quality, speed"),
        ({"quality": [3]}, "needs objects"),
        ({"quality": [{"dataset": "a", "metric": "m"}]}, r"quality\[0\].value is missing"),
        ({"quality": [{"dataset": "a", "metric": "m", "value": "7"}]}, "needs a number"),
        ({"quality": [{"dataset": "a", "metric": "m", "value": float("nan")}]}, "needs a number"),
        ({"quality": [{"dataset": "a", "metric": "m", "value": True}]}, "needs a number"),
        ({"quality": [{"dataset": "a", "metric": "m", "value": 10**400}]}, r"quality\[0\].value is .* needs a number"),
        ({"quality": [{"dataset": " ", "metric": "m", "value": 1}]}, "needs text"),
        ({"speed": {**SPEED, "rows": []}}, "has no rows"),
        ({"speed": {"device": "cpu", "versions": "t", "rows": [{}]}}, r"rows\[0\].name is missing"),
        ({"speed": {**SPEED, "device": None, "rows": [{"name": "a", "value": 1, "unit": "s"}]}}, "device is missing"),
        (
            {"speed": {**SPEED, "command": None, "rows": [{"name": "a", "value": 1, "unit": "s"}]}},
            "command is missing",
        ),
        ({"speed": {**SPEED, "rows": [{"name": "a", "value": 0, "unit": "s"}]}}, "a number above 0"),
        ({"memory": [{"name": "peak", "value": -1}]}, "a number above 0"),
        ({"bits_per_weight": "4", "quality": []}, "bits_per_weight is '4'"),
    ],
)
def test_nonsense_is_refused(value, message, int4_dir):
    with pytest.raises(ValueError, match=message) as caught:
        model_card(int4_dir, value)
    assert len(str(caught.value)) < 200


def test_files_of_measurements(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        read_measurements([tmp_path / "none.json"])
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="a.json is not JSON"):
        read_measurements([tmp_path / "a.json"])
    for name, bits in (("a", 4.1), ("b", 8.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"bits_per_weight": bits}))
    with pytest.raises(ValueError, match="models of 4.100 and of 8.000 bits"):
        read_measurements([tmp_path / "a.json", tmp_path / "b.json"])
    assert not Measurements()
