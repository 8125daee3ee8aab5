"""The wheel holds the package without its tests, and the entry points that make it a command and a plugin.

The list of what `make types` checks names files that exist.
"""

import configparser
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from hf_quant._version import __version__
from hf_quant.kernels import native
from hf_quant.kernels.native import extension


CHECKOUT = Path(__file__).parents[2]
NATIVE = "hf_quant/kernels/native/_native.abi3.so"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built from a copy of it, so that nothing is written into the checkout.

    The native kernels, which take minutes to compile, are those that this environment runs.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(CHECKOUT / "hf_quant", source / "hf_quant", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    if extension.module is not None:
        place = Path("build", f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}", NATIVE)
        (source / place.parent).mkdir(parents=True)
        shutil.copyfile(extension.module.__file__, source / place)  # newer than its sources
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


@pytest.mark.skipif(extension.module is None, reason="the native kernels are not built")
def test_an_empty_environment_without_a_compiler_has_the_native_kernels(wheel, tmp_path):
    assert "-cp310-abi3-" in Path(wheel.filename).name and NATIVE in wheel.namelist()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    wheel.extractall(site)
    # What hf_quant needs, without the hf_quant of this environment, which is a name in a .pth file.
    (site / "needed.pth").write_text(str(Path(torch.__file__).parents[1]))
    code = (
        "import torch, hf_quant, sys\n"
        "from hf_quant.kernels import native\n"
        "from hf_quant.kernels.native import extension\n"
        "print(hf_quant.__file__, extension.module.__file__, native.active())\n"
        "layer = hf_quant.quantize_(torch.nn.Sequential(torch.nn.Linear(256, 128)), 'int4')\n"
        "with torch.no_grad(): y = layer(torch.ones(1, 256))\n"
        "error = (y - hf_quant.dequantize_(layer)(torch.ones(1, 256))).abs().max().item()\n"
        "print(error < 1e-4)\n"
    )
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-c", code],
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    paths, is_near = done.stdout.splitlines()
    package, extension, active = paths.split()
    assert package.startswith(str(site)) and extension.startswith(str(site)) and active in native.instruction_sets()
    assert is_near == "True"


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
