"""The sanitizers find defects, and a machine without sanitizers is not reported as one without findings."""

import shutil

import pytest

import sanitize_native
from sanitize_native import SOURCES, builds, find_compiler, launcher, main


@pytest.fixture
def only_address(monkeypatch, tmp_path):
    """The quicker of the builds, made in a folder of its own and not optimized."""
    monkeypatch.setattr(sanitize_native, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sanitize_native, "COMMON", ("-std=c++17", "-O0", "-w", "-pthread"))
    monkeypatch.setattr(
        sanitize_native,
        "builds",
        lambda is_clang: {
            name: build._replace(driver=("-O0", "-DGUARD_SCRATCH"))
            for name, build in list(builds(is_clang).items())[:1]
        },
    )


@pytest.mark.parametrize(
    "correct, wrong, finding",
    [
        ("memcpy(codes, row + first, static_cast<size_t>(count))", "memcpy(codes, row + first, count + 1)", "SEGV"),
        ("load<uint16_t>(x, first + i)", "static_cast<const uint16_t*>(x)[first + i]", "misaligned address"),
        ("weight[i] = p.levels[codes[i]] * scale;", "weight[i] = p.levels[codes[i]];", "the case: portable"),
    ],
    ids=["reads beyond the end", "aligned loads", "no scale"],
)
def test_finds_what_is_wrong(only_address, tmp_path, capsys, correct, wrong, finding):
    compiler = find_compiler()
    if compiler is None or launcher(compiler[0], next(iter(builds(compiler[1]).values()))) is None:
        pytest.skip("no compiler with AddressSanitizer")
    sources = shutil.copytree(SOURCES, tmp_path / "src")
    (file,) = (path for path in sources.iterdir() if correct in path.read_text())
    file.write_text(file.read_text().replace(correct, wrong))
    assert main(["--sources", str(sources), "--sets", "--cases", "100"]) == 1
    said = capsys.readouterr().out
    assert finding in said and "found something" in said


def test_without_sanitizers_says_so(only_address, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main([]) == 1 and main(["--optional"]) == 0
    assert capsys.readouterr().out.count("no C++ compiler found") == 2
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    assert main([]) == 1 and main(["--optional"]) == 0
    assert capsys.readouterr().out.count("no program with the sanitizers address") == 2
