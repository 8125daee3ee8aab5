"""The support matrix in docs/formats.md is that of the code; sections of pages are found by their markers."""

import importlib.util
from pathlib import Path

import pytest

from hf_quant import FORMATS
from hf_quant.kernels import native
from hf_quant.kernels.cpu import product
from hf_quant.kernels.cpu.product import PATHS


SCRIPT = Path(__file__).parents[2] / "scripts" / "support_matrix.py"
# The matrix is for a large weight in bf16, on a machine with native kernels.
ELSEWHERE = {
    "native kernels (C++)",
    "bf16 (fp32) copy of a tiny weight",
    "int8 GEMM, x in three bytes (oneDNN)",
    "int8pack",
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("support_matrix", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script):
    assert script.is_current(script.NAME, script.matrix()), "run scripts/support_matrix.py"


@pytest.mark.parametrize(("kernels", "vnni"), [(None, False), (None, True), ("portable", True)])
def test_the_matrix_is_the_same_on_every_machine(script, monkeypatch, kernels, vnni):
    expected = script.matrix()
    monkeypatch.setattr(native, "_active", kernels)
    monkeypatch.setattr(product, "_VNNI", vnni)
    assert script.matrix() == expected
    assert native.active() == kernels and product._VNNI == vnni


def test_the_matrix_says_what_serves_without_native_kernels(script):
    sentence = script.matrix().splitlines()[-1]
    named = {path.name for path in PATHS if path.name in sentence}
    assert named == {path.name for path in PATHS} - ELSEWHERE


def test_the_matrix_has_every_format_and_explains_every_letter(script):
    table, _, legend = script.matrix().partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0].split("`")[1] for row in rows] == list(FORMATS)
    used = {letter for row in rows for cell in row[3:] for letter in cell.split()}
    assert all(cell for row in rows for cell in row)
    assert used == {line[4] for line in legend.splitlines() if line.startswith("- **")}


def test_a_section_needs_its_markers(script):
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb"
    assert script.replace_section(text, "x", "new") == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb"
    for broken in ("a", text + text, "<!-- x: end --><!-- x: begin -->"):
        with pytest.raises(ValueError, match="a page needs"):
            script.replace_section(broken, "x", "new")


def test_a_section_is_on_one_page(script, tmp_path, monkeypatch):
    first, second = tmp_path / "a.md", tmp_path / "b.md"
    first.write_text("<!-- x: begin -->\nold\n<!-- x: end -->")
    second.write_text("nothing")
    monkeypatch.setattr(script, "PAGES", (first, second))
    script.write_section("x", "new")
    assert script.is_current("x", "new") and not script.is_current("x", "old")
    second.write_text(first.read_text())
    for name in ("x", "y"):
        with pytest.raises(ValueError, match="need it once"):
            script.page_with(name)
