"""scripts/check_house_rules.py and scripts/draw_architecture.py: the rules find what they forbid."""

from pathlib import Path

import pytest

import check_house_rules
import draw_architecture


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("hf_quant/cli/_plan.py", "from hf_quant.kv_cache._layers import BLOCK", 1),
        ("hf_quant/cli/_plan.py", "from hf_quant.kv_cache import _layers", 1),
        ("hf_quant/cli/_plan.py", "def f():\n    import hf_quant.kv_cache._layers", 1),
        ("hf_quant/cli/_plan.py", "from hf_quant.planning.decide import _fp32_patterns", 1),
        ("scripts/tune.py", "from hf_quant.cli._parser import build_parser", 1),
        ("hf_quant/cli/_plan.py", "from hf_quant.cli._parser import build_parser", 0),
        ("hf_quant/kv_cache/_cache.py", "from hf_quant.kv_cache._layers import BLOCK", 0),
        ("hf_quant/planning/decide.py", "from hf_quant.planning.names import _fold_numbers", 0),
        ("hf_quant/cli/_plan.py", "from hf_quant._version import __version__", 0),
        ("hf_quant/cli/_plan.py", "from torch._dynamo import reset", 0),
    ],
)
def test_private_imports_are_found(path, source, count):
    assert len(check_house_rules.import_findings(Path(path), source)) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""What the bytes are."""', 1),
        ('"""Whether it is one."""', 1),
        ('def f():\n    """Of every request."""\nclass A:\n    """How it works."""', 2),
        ('"""None, if there is none."""', 1),
        ('"""Number formats: grids and bytes."""', 0),
        ('"""Often used functions."""', 0),
        ("x = 1", 0),
    ],
)
def test_first_words_of_docstrings_are_found(source, count):
    assert len(check_house_rules.docstring_findings(Path("hf_quant/a.py"), source)) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.empty(3)", 1),
        ("x = [torch.zeros(2, device=d), torch.ones(1, dtype=torch.float32)]", 1),
        ("torch.empty(3, **options), torch.zeros_like(x), x.new_empty(3), numpy.empty(3)", 0),
    ],
)
def test_tensors_without_a_dtype_are_found(source, count):
    assert len(check_house_rules.dtype_findings(Path("hf_quant/a.py"), source)) == count


def test_a_picture_that_is_old_is_found(monkeypatch, tmp_path):
    assert draw_architecture.is_current()
    page = tmp_path / "CONTRIBUTING.md"
    text = draw_architecture.PAGE.read_text()
    page.write_text(text.replace(" planning ", " planing "))
    monkeypatch.setattr(draw_architecture, "PAGE", page)
    assert not draw_architecture.is_current()
    page.write_text(draw_architecture.redrawn(page.read_text()))
    assert page.read_text() == text and draw_architecture.is_current()
    with pytest.raises(ValueError, match="no <!-- architecture"):
        draw_architecture.redrawn("no markers")
