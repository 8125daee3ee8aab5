"""The plan on a terminal: a table of its width that says what the plain text says."""

import io
import re

import pytest
from torch import nn

from hf_quant import plan
from hf_quant.cli import _terminal
from hf_quant.planning import add_mark


class Window(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def model() -> nn.Module:
    return nn.ModuleDict({f"blocks_{i}": nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256)) for i in range(2)})


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_has_the_width_of_the_window(width, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns
    window = Window()
    monkeypatch.setattr("sys.stdout", window)
    _terminal.print_plan(plan(model, {"weights": "int4", "modules": {"blocks_0.1": "int8", "blocks_1.1": None}}))
    text = re.sub(r"\x1b\[[\d;]*m", "", window.getvalue())
    assert all(len(line) <= width for line in text.split("\n")), text
    letters = "".join(text.split())  # whatever was folded
    for part in ("3of4modulesquantized", "1named", "2kept", "Acpu:", "cuda:", "256x128", "int4g32"):
        assert width == 40 or part in letters, part
    assert text.count("cuda:") < 3  # kernels that repeat are explained once


def test_elsewhere_the_plan_is_plain_text(model, capsys):
    found = plan(model, "int4")
    _terminal.print_plan(found)
    assert capsys.readouterr().out == f"{found}\n"


def test_marks_do_not_end():
    marks: dict[str, str] = {}
    found = [add_mark(marks, f"text {i}", "AB") for i in range(5)]
    assert found == ["A", "B", "AA", "BB", "AAA"] and add_mark(marks, "text 2", "AB") == "AA"
