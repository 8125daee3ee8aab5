"""Draw the architecture into CONTRIBUTING.md: the layers, their rooms, and the first line of each room's docstring.

    python scripts/draw_architecture.py

The layers are `LAYERS` of hf_quant/tests/test_layers.py, which a test enforces. `make check` fails if the picture is
not the one that this script draws.
"""

import ast
import textwrap
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- architecture: drawn by scripts/draw_architecture.py -->\n"
END = "<!-- end of architecture -->\n"
WIDTH = 119


def layers() -> tuple[tuple[str, ...], ...]:
    """Return the layers of the package, lowest first, from the test that enforces them."""
    tree = ast.parse((ROOT / "hf_quant/tests/test_layers.py").read_text())
    assigned = {t.id: n.value for n in tree.body if isinstance(n, ast.Assign) for t in n.targets}
    return ast.literal_eval(assigned["LAYERS"])


def summary(room: str) -> str:
    """Return the first line of a room's docstring, and the names of the rooms in it."""
    directory = ROOT / "hf_quant" / room
    file = directory / "__init__.py" if directory.is_dir() else directory.with_suffix(".py")
    first = ast.get_docstring(ast.parse(file.read_text())).partition("\n\n")[0].replace("\n", " ")
    inner = sorted(path.parent.name for path in directory.glob("*/__init__.py"))
    return f"{first} In it: {', '.join(inner)}." if inner else first


def picture() -> str:
    """Return the picture: the highest layer first, a layer imports from those below it only."""
    lines = []
    for number, rooms in reversed(list(enumerate(layers(), 1))):
        for room in rooms:
            label = f"{number if room == rooms[0] else '':>2}  {room:<13}"
            indent = " " * len(label)
            lines += textwrap.wrap(label + summary(room), WIDTH, subsequent_indent=indent, break_long_words=False)
    return "```\n" + "\n".join(lines) + "\n```\n"


def redrawn(page: str) -> str:
    """Return the text of a page with the picture between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN.strip()} ... {END.strip()}")
    return f"{before}{begin}{picture()}{end}{after}"


def is_current() -> bool:
    """True if CONTRIBUTING.md has the picture that would be drawn now."""
    return redrawn(PAGE.read_text()) == PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(redrawn(PAGE.read_text()))
