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


# Defects of two headers behind a switch, so that one build has them all: what is correct, what is not, what is found.
DEFECTS = {
    "long": ("first, static_cast<size_t>(count))", "first, static_cast<size_t>(count) + has('l'))", "SEGV"),
    "aligned": (
        "load<uint16_t>(x, first + i)",
        "(has('a') ? static_cast<const uint16_t*>(x)[first + i] : load<uint16_t>(x, first + i))",
        "misaligned address",
    ),
    "no scale": ("p.levels[codes[i]] * scale;", "p.levels[codes[i]] * (has('n') ? 1 : scale);", "the case: portable"),
}
SWITCH = """#pragma once
#include <cstdlib>
static bool has(char first) { static const char* defect = getenv("DEFECT"); return defect && *defect == first; }
"""


def test_finds_what_is_wrong(only_address, tmp_path, capsys, monkeypatch):
    compiler = find_compiler()
    if compiler is None or launcher(compiler[0], next(iter(builds(compiler[1]).values()))) is None:
        pytest.skip("no compiler with AddressSanitizer")
    sources = shutil.copytree(SOURCES, tmp_path / "src")
    (sources / "switch.h").write_text(SWITCH)
    for correct, wrong, _ in DEFECTS.values():
        (header,) = [path for path in sources.glob("[op]*.h") if correct in path.read_text()]
        text = header.read_text().replace(correct, wrong)
        header.write_text(text.replace("#pragma once\n", '#pragma once\n#include "switch.h"\n', 1))
    arguments = ["--sources", str(sources), "--sets", "--cases", "100"]
    for name, (_, _, finding) in DEFECTS.items():
        monkeypatch.setenv("DEFECT", name)
        assert main(arguments) == 1
        said = capsys.readouterr().out
        assert finding in said and "found something" in said, name
    monkeypatch.delenv("DEFECT")
    assert main(arguments) == 0


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
