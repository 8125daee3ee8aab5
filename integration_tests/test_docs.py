"""Every snippet and command of README.md and docs/ runs; models of the Hub are replaced by small ones."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_quant.auto import latency
from hf_quant.cli import main


ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# In the order of README.md's table of pages: a command may read what an earlier page has written.
_LINKED = re.findall(r"^\| \[.+\]\((docs/\w+\.md)\)", README.read_text(), re.MULTILINE)
PAGES = [README, *(ROOT / name for name in _LINKED)]
LLAMA, FLUX = "meta-llama/Llama-3.1-8B", "black-forest-labs/FLUX.1-dev"


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language on a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


SNIPPETS = {f"{page.stem}-{i}": code for page in PAGES for i, code in enumerate(blocks(page, "python"))}
COMMANDS = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines() if line]


def needs(text: str) -> None:
    """Skip where an optional package that the text uses is missing."""
    for package in ("peft", "diffusers"):
        if package in text:
            pytest.importorskip(package, reason=f"{package} is an optional host")


@pytest.fixture(scope="module")
def small_llama(asset_model_dir, tmp_path_factory) -> Path:
    """A random Llama of one narrow layer, with the tokenizer and the card of the trained one."""
    directory = tmp_path_factory.mktemp("llama")
    config = AutoConfig.from_pretrained(asset_model_dir)
    config.update({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64})
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    for path in (*asset_model_dir.glob("*token*"), asset_model_dir / "README.md"):
        shutil.copy(path, directory)
    return directory


@pytest.fixture
def small_models(tmp_path, asset_model_dir, small_llama, monkeypatch) -> Path:
    """A working directory in which the names of the Hub are small models; relative paths of snippets end up here."""
    for name in (LLAMA, FLUX):
        (tmp_path / name).parent.mkdir()
    os.symlink(small_llama, tmp_path / LLAMA)
    (tmp_path / "wiki.txt").write_text((asset_model_dir / "eval.txt").read_text()[:8000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(latency, "_SECONDS", 0.01)  # the times that it finds are not looked at
    return tmp_path


def make_flux(directory: Path) -> None:
    """A tiny Flux pipeline where the name of the real one says."""
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(torch.bfloat16).save_pretrained(directory / FLUX)


def test_there_is_something_to_test():
    assert len(SNIPPETS) >= 8
    assert len(COMMANDS) >= 10
    assert len(PAGES) == 1 + len(list((ROOT / "docs").glob("*.md")))
    languages = {name for page in PAGES for name in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)}
    assert languages == {"python", "sh"}  # a block in another language would not run


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet(name, small_models):
    snippet = SNIPPETS[name]
    needs(snippet)
    if FLUX in snippet:
        make_flux(small_models)
        # The tiny pipeline has no tokenizers; everything else is as the page has it.
        snippet = snippet.replace("torch_dtype=", "tokenizer=None, tokenizer_2=None, torch_dtype=")
    exec(compile(snippet, name, "exec"), {"__name__": "snippet"})


def test_commands_in_order(small_models, capsys):
    """One command may read what an earlier one has written."""
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "hf-quant"
        if FLUX in command:
            pytest.importorskip("diffusers", reason="diffusers is an optional host")
            make_flux(small_models)
        if arguments[0] == "bench":
            arguments += ["--rounds", "1", "--new-tokens", "2"]
        assert main(arguments) == 0, capsys.readouterr().err
    capsys.readouterr()


def test_the_error_of_a_snippet_is_the_one_in_its_comment(capsys):
    (snippet,) = (s for s in SNIPPETS.values() if "int9" in s)
    exec(compile(snippet, "python.md", "exec"), {})
    promised = re.search(r"# (unknown .*) \.\.\.$", snippet, re.MULTILINE)[1]
    assert capsys.readouterr().out.startswith(promised)
