"""The support matrix in docs/formats.md is that of the code; sections of pages are found by their markers."""

import pytest

import support_matrix
from common import pages
from hf_quant import FORMATS
from hf_quant.kernels import native
from hf_quant.kernels.cpu import product
from hf_quant.kernels.cpu.product import PATHS


# The matrix is for a large weight in bf16, on a machine with native kernels.
ELSEWHERE = {
    "native kernels (C++)",
    "bf16 (fp32) copy of a tiny weight",
    "int8 GEMM, x in three bytes (oneDNN)",
    "int8pack",
}


def test_the_page_is_current():
    assert pages.is_current(support_matrix.NAME, support_matrix.matrix()), "run scripts/support_matrix.py"


@pytest.mark.parametrize(("kernels", "vnni"), [(None, False), (None, True), ("portable", True)])
def test_the_matrix_is_the_same_on_every_machine(monkeypatch, kernels, vnni):
    expected = support_matrix.matrix()
    monkeypatch.setattr(native.extension, "_active", kernels)
    monkeypatch.setattr(product, "_VNNI", vnni)
    assert support_matrix.matrix() == expected
    assert native.active() == kernels and product._VNNI == vnni


def test_the_matrix_says_what_serves_without_native_kernels():
    sentence = support_matrix.matrix().splitlines()[-1]
    named = {path.name for path in PATHS if path.name in sentence}
    assert named == {path.name for path in PATHS} - ELSEWHERE


def test_the_matrix_has_every_format_and_explains_every_letter():
    table, _, legend = support_matrix.matrix().partition("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0].split("`")[1] for row in rows] == list(FORMATS)
    used = {letter for row in rows for cell in row[3:] for letter in cell.split()}
    assert all(cell for row in rows for cell in row)
    assert used == {line[4] for line in legend.splitlines() if line.startswith("- **")}


def test_a_section_needs_its_markers():
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb"
    assert pages.replace_section(text, "x", "new") == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb"
    for broken in ("a", text + text, "<!-- x: end --><!-- x: begin -->"):
        with pytest.raises(ValueError, match="a page needs"):
            pages.replace_section(broken, "x", "new")


def test_a_section_is_on_one_page(tmp_path, monkeypatch):
    first, second = tmp_path / "a.md", tmp_path / "b.md"
    first.write_text("<!-- x: begin -->\nold\n<!-- x: end -->")
    second.write_text("nothing")
    monkeypatch.setattr(pages, "PAGES", (first, second))
    pages.write_section("x", "new")
    assert pages.is_current("x", "new") and not pages.is_current("x", "old")
    second.write_text(first.read_text())
    for name in ("x", "y"):
        with pytest.raises(ValueError, match="need it once"):
            pages.page_with(name)
