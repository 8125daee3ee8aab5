"""A file imports only from lower layers or from its own directory; the hosts are known in few places."""

import ast
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1]

# The house plan's layers, lowest first; those that it numbers 2 stand in the order in which they build on each other.
LAYERS = (
    ("_boot", "_lazy_ops", "_version", "_wording", "scheme", "kernels"),
    ("formats",),
    ("algorithms", "weight_proxy"),
    ("modules", "kv_cache", "resolve", "patterns"),
    ("config",),
    ("planning",),
    ("quantize",),
    ("checkpoint",),
    ("cards",),
    ("integrations",),
    ("convert",),
    ("evaluate",),
    ("cli",),
    ("__init__", "__main__"),
    ("testing",),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "tests")
# What a part may import besides the standard library and, by its layer, the package itself.
ALLOWED = {"scheme": set(), "_boot": set(), "_version": set(), "kernels": {"torch", "triton"}}
HOSTS_OF_INTEGRATIONS = {"diffusers", "peft"}


def imported_modules(source: str, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every module that the source imports, anywhere in it, as name parts; `package` resolves relative imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = base + tuple(node.module.split(".") if node.module else ())
            # `from hf_quant import planning` names a module; `from hf_quant.planning import QuantPlan` does not.
            found += [module + (alias.name,) for alias in node.names] if len(module) == 1 else [module]
    return found


def violations(path: Path, source: str) -> list[str]:
    """What the file at `path` (relative to the package) imports against the rules, one line each."""
    unit = path.parts[0].removesuffix(".py")
    if unit not in LAYER_OF:
        return [f"{path}: give {unit!r} its layer in LAYERS"]
    wrong = []
    for module in imported_modules(source, ("hf_quant", *path.parts[:-1])):
        if module[0] == "hf_quant":
            target = module[1] if len(module) > 1 else "__init__"
            if target != unit and LAYER_OF.get(target, LAYER_OF["__init__"]) >= LAYER_OF[unit]:
                wrong.append(f"{path}: {unit!r} may not import {'.'.join(module)}, which is not in a lower layer")
        elif unit in ALLOWED and module[0] not in ALLOWED[unit] | sys.stdlib_module_names:
            wrong.append(f"{path}: {unit!r} may not import {module[0]}")
        elif module[0] in HOSTS_OF_INTEGRATIONS and LAYER_OF[unit] < LAYER_OF["integrations"]:
            wrong.append(f"{path}: only integrations/ and what is above it imports {module[0]}")
    return wrong


def test_files_import_only_from_lower_layers():
    assert len(FILES) > 10
    assert [line for path in FILES for line in violations(path.relative_to(PACKAGE), path.read_text())] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("formats/int4.py", "from hf_quant.planning import QuantPlan"),
        ("formats/int4.py", "def f():\n    import hf_quant.modules.linear"),
        ("formats/int4.py", "from ..algorithms import absmax"),
        ("formats/int4.py", "from hf_quant import quantize_"),
        ("kernels/rowwise/op.py", "from hf_quant.scheme import TensorQuant"),
        ("kernels/rowwise/op.py", "import numpy"),
        ("scheme.py", "import torch"),
        ("planning.py", "from diffusers import DiffusionPipeline"),
        ("brand_new.py", "import torch"),
    ],
)
def test_the_check_finds_what_it_forbids(path, source):
    assert len(violations(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "formats/int4.py",
            "import math\nimport torch\nfrom hf_quant.formats._format import Format\nfrom . import _format",
        ),
        ("formats/int4.py", "from hf_quant.kernels.codes import CodeSpec"),
        (
            "kernels/rowwise/gpu.py",
            "import triton\nfrom .op import check\nfrom hf_quant.kernels.dispatch import implements",
        ),
        ("integrations/diffusers/quantizer.py", "import diffusers\nfrom hf_quant.planning import plan"),
    ],
)
def test_the_check_lets_pass_what_is_allowed(path, source):
    assert violations(Path(path), source) == []
