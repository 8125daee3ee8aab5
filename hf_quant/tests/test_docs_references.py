"""README.md and docs/ name only pages, headings, scripts, options, make targets and code that exist.

Their snippets and commands run in `integration_tests/test_docs.py`.
"""

import re
from functools import cache
from pathlib import Path

import pytest

import hf_quant
from hf_quant.cli import main


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_quant"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
WITH_LINKS = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "model_cards" / "README.md")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
EXAMPLES = {"mps.py", "hf_quant.kernels.weight_only.mps"}  # files that a reader would write
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def names(paths: tuple[Path, ...]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


def commands(page: Path) -> list[str]:
    """The lines of code blocks that no language marks, and what stands between backticks in a line."""
    fenced = "\n".join(_FENCED.findall(page.read_text()))
    return [*re.sub(r"\\\n\s*", "", fenced).splitlines(), *_CODE.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    broken = []
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    return broken


@cache
def sources(folder: Path, pattern: str = "**/*.py") -> str:
    """Return the Python code of a folder, without the tests."""
    paths = (path for path in sorted(folder.glob(pattern)) if "tests" not in path.relative_to(ROOT).parts)
    return "\n".join(path.read_text() for path in paths)


def options(command: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", command.partition("#")[0])


@pytest.mark.parametrize("name", names(WITH_LINKS))
def test_links_lead_somewhere(name):
    assert broken_links(ROOT / name, prose(ROOT / name)) == []


def test_a_broken_link_is_found():
    page = ROOT / "README.md"
    text = "[a](docs/nothing.md) [b](docs/cpu.md#nothing) [c](#example) [d](https://x.org/y) [e](docs/cpu.md#speed)"
    assert broken_links(page, text) == ["docs/nothing.md", "docs/cpu.md#nothing"]


def test_every_page_is_linked_from_the_readme():
    linked = {link.partition("#")[0] for link in _LINK.findall(prose(ROOT / "README.md"))}
    assert {page for page in names(PAGES[1:])} <= linked
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", names(PAGES))
def test_scripts_options_and_targets_exist(name, capsys):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(ROOT / name):
        for script in re.findall(r"scripts/[\w/]+\.py", command):
            assert (ROOT / script).is_file(), command
        if match := re.match(r"python (scripts/[\w/]+\.py)", command):
            known = (ROOT / match[1]).read_text() + sources(ROOT / "scripts", "*/*.py")  # and the libraries of scripts
            assert [option for option in options(command) if f'"{option}"' not in known] == [], command
        if match := re.match(r"make ([a-z-]+)", command):
            assert match[1] in targets, command
        if match := re.match(r"hf-quant ([a-z]+)", command):
            with pytest.raises(SystemExit, match="0"):
                main([match[1], "--help"])
            shown = capsys.readouterr().out
            assert [option for option in options(command) if option not in shown] == [], command


@pytest.mark.parametrize("name", names(PAGES))
def test_public_names_exist(name):
    for public in re.findall(r"hf_quant\.([A-Za-z_]\w*)", "\n".join(commands(ROOT / name))):
        exists = public in hf_quant.__all__ or (PACKAGE / public).is_dir() or (PACKAGE / f"{public}.py").is_file()
        assert exists, f"hf_quant.{public}"


@pytest.mark.parametrize("name", names(PAGES))
def test_headings_are_no_questions(name):
    """A heading names a thing or an action: readers look for its words."""
    for heading in re.findall(r"^#+ (.*)$", prose(ROOT / name), re.MULTILINE):
        assert not re.match(r"(What|How|Whether|Which|Why|Where|When|Who)\b", heading)


def test_the_architecture_names_what_exists():
    """Files are relative to the package, else to the root; names are somewhere in the code."""
    code, missing = sources(PACKAGE) + sources(ROOT / "scripts"), []
    for token in _CODE.findall(prose(ARCHITECTURE)):
        if token in EXAMPLES or " " in token:
            continue
        if re.fullmatch(r"[\w./*]+(/|\.(py|h|cpp))", token):
            if not any(any(folder.glob(token.strip("/"))) for folder in (PACKAGE, ROOT)):
                missing += [] if "/" not in token and any(PACKAGE.rglob(token)) else [token]
        elif identifier := re.match(r"[A-Za-z_]\w{3,}", token):
            missing += [] if re.search(rf"\b{identifier[0]}\b", code) else [token]
    assert missing == []


def test_the_summary_of_speeds_repeats_what_was_printed():
    runs = [set(run.split()) for run in _FENCED.findall((ROOT / "docs" / "cpu_speed.md").read_text())]
    rows = re.findall(r"^\|[^|]*, \d \| [^|]*: `\w+` \|(.*)$", (ROOT / "docs" / "cpu.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        figures = set(re.findall(r"[\d.]+", row))
        assert any(figures <= run for run in runs), row
