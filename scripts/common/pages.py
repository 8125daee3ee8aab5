"""Generated sections of README.md and of the pages in docs/: their tables, and their place between two markers."""

from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Make a table in Markdown; the first row is its header."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_section(text: str, name: str, body: str) -> str:
    """The text with `body` between the markers of a section. Raises ValueError if it does not have them once."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"a page needs {begin!r} and {end!r} once, in this order")
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    return f"{head}\n{body}\n{tail}"


def page_with(name: str) -> Path:
    """Find the page (README.md or one of docs/) with the markers of a section.

    Raises ValueError unless exactly one page has them.
    """
    found = [page for page in PAGES if f"<!-- {name}: begin -->" in page.read_text()]
    if len(found) != 1:
        raise ValueError(f"{len(found)} pages have the section {name!r}; README.md and docs/ need it once")
    return found[0]


def is_current(name: str, body: str) -> bool:
    """True if the section of that name holds exactly `body`."""
    text = page_with(name).read_text()
    return replace_section(text, name, body) == text


def write_section(name: str, body: str) -> None:
    """Put `body` between the markers of a section, on the page that has them."""
    page = page_with(name)
    page.write_text(replace_section(page.read_text(), name, body))
