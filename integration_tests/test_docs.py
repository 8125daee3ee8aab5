"""Every snippet and command of README.md runs; models of the Hub are replaced by small ones."""

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from hf_quant.cli import main


README = Path(__file__).parents[1] / "README.md"
LLAMA, FLUX = "meta-llama/Llama-3.1-8B", "black-forest-labs/FLUX.1-dev"


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


SNIPPETS = blocks("python")
COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line]


def needs(text: str) -> None:
    """Skip where an optional package that the text uses is missing."""
    for package in ("peft", "diffusers"):
        if package in text:
            pytest.importorskip(package, reason=f"{package} is an optional host")


@pytest.fixture
def small_models(tmp_path, asset_model_dir, monkeypatch) -> Path:
    """A working directory in which the names of the Hub are small models; relative paths of snippets end up here."""
    for name in (LLAMA, FLUX):
        (tmp_path / name).parent.mkdir()
    os.symlink(asset_model_dir, tmp_path / LLAMA)
    (tmp_path / "wiki.txt").write_text((asset_model_dir / "eval.txt").read_text()[:20000])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_flux(directory: Path) -> None:
    """A tiny Flux pipeline where the name of the real one says."""
    from integration_tests.support.tiny_diffusion import make_flux_pipeline

    make_flux_pipeline(torch.bfloat16).save_pretrained(directory / FLUX)


def test_there_is_something_to_test():
    assert len(SNIPPETS) >= 6
    assert len(COMMANDS) >= 6
    languages = set(re.findall(r"^```(\w+)$", README.read_text(), re.MULTILINE))
    assert languages == {"python", "sh"}  # what is in another language is not run


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: re.sub(r"\W+", "-", s)[:40])
def test_snippet(snippet, small_models):
    needs(snippet)
    if FLUX in snippet:
        make_flux(small_models)
        # The tiny pipeline has no tokenizers; everything else is as it stands in README.md.
        snippet = snippet.replace("torch_dtype=", "tokenizer=None, tokenizer_2=None, torch_dtype=")
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


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


def test_the_error_of_the_last_snippet_is_the_one_in_its_comment(capsys):
    (snippet,) = (s for s in SNIPPETS if "int5" in s)
    exec(compile(snippet, "README.md", "exec"), {})
    promised = re.search(r"# (unknown .*) \.\.\.$", snippet, re.MULTILINE)[1]
    assert capsys.readouterr().out.startswith(promised)
