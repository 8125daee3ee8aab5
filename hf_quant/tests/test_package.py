"""The wheel holds the package without its tests, and the entry points that make it a command and a plugin.

The list of what `make types` checks names files that exist.
"""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_quant._version import __version__


CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built from a copy of it, so that nothing is written into the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(CHECKOUT / "hf_quant", source / "hf_quant", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})"
    result = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_holds_every_module_and_no_test(wheel):
    modules = {name for name in wheel.namelist() if name.endswith(".py")}
    expected = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "hf_quant").rglob("*.py")}
    assert modules == {name for name in expected if not name.startswith("hf_quant/tests/")}
    assert not [name for name in wheel.namelist() if "tests/" in name]
    assert {"hf_quant/cards/card.jinja", "hf_quant/py.typed"} <= set(wheel.namelist())


def test_name_version_and_entry_points(wheel):
    info = f"hf_quant-{__version__}.dist-info"
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    assert dict(entry_points["console_scripts"]) == {"hf-quant": "hf_quant.cli:main"}
    assert dict(entry_points["torch.backends"]) == {"hf_quant": "hf_quant._boot:boot"}
    assert f"\nVersion: {__version__}\n" in wheel.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_what_make_types_checks_exists():
    listed = (CHECKOUT / "pyproject.toml").read_text().partition("project-includes = [")[2].partition("]")[0]
    patterns = re.findall(r'"(.+)"', listed)
    assert patterns == sorted(patterns) and "hf_quant/__init__.py" in patterns
    assert [pattern for pattern in patterns if not any(CHECKOUT.glob(pattern))] == []
