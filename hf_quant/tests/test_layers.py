"""Layers: a file imports only from lower layers or from its own directory; the hosts are known in few places."""

import ast
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1]

# The parts of the package, lowest layer first; scripts/draw_architecture.py draws them into CONTRIBUTING.md.
LAYERS = (
    ("_boot", "_lazy_ops", "_version", "_wording", "machine", "patterns", "scheme", "weight_proxy", "kernels"),
    ("coded_weight",),
    ("formats", "optim"),
    ("algorithms", "kv_cache"),
    ("modules", "resolve"),
    ("config", "evaluate"),
    ("planning",),
    ("calibration",),
    ("auto",),
    ("quantize",),
    ("training",),
    ("checkpoint",),
    ("cards",),
    ("integrations",),
    ("convert",),
    ("cli",),
    ("__init__", "testing"),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "tests")
# What a part may import besides the standard library and, by its layer, the package itself.
ALLOWED = {"scheme": set(), "_boot": set(), "_version": set(), "kernels": {"torch", "triton"}}
HOSTS_OF_INTEGRATIONS = {"diffusers", "peft"}
# Inside of a part: rooms that may not import each other.
APART = {"integrations": ("diffusers", "transformers")}


def imported_modules(source: str, package: tuple[str, ...], *, depth: int = 1) -> list[tuple[str, ...]]:
    """Every module that the source imports, anywhere in it, as name parts; `package` resolves relative imports.

    What is imported from a module of up to `depth` parts is taken for a module, too.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = base + tuple(node.module.split(".") if node.module else ())
            # `from hf_quant import planning` names a module; `from hf_quant.planning import QuantPlan` does not.
            found += [module + (alias.name,) for alias in node.names] if len(module) <= depth else [module]
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


def families() -> set[str]:
    """The op families of kernels/."""
    return {path.parent.name for path in (PACKAGE / "kernels").glob("*/op.py")}


def inner_violations(path: Path, source: str) -> list[str]:
    """Return the imports of a file that break the rules inside of its part, one line each."""
    part, room = path.parts[0], path.parts[1].removesuffix(".py") if len(path.parts) > 1 else "__init__"
    forbidden = {name for name in APART.get(part, ()) if room in APART[part] and name != room}
    if part == "kernels" and room not in families() | {"__init__"}:
        forbidden = families()
    modules = imported_modules(source, ("hf_quant", *path.parts[:-1]), depth=2)
    targets = {module[2] for module in modules if module[:2] == ("hf_quant", part) and len(module) > 2}
    return [f"{path}: may not import {part}/{name}" for name in sorted(targets & forbidden)]


def imports_on_loading(tree: ast.AST) -> list[tuple[str, ...]]:
    """Every module, or name in a module, that is imported outside of functions and of `if TYPE_CHECKING`."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            found += [(*(node.module or "").split("."), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif not isinstance(node, ast.FunctionDef) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            found += imports_on_loading(node)
    return found


def circles(sources: dict[tuple[str, ...], str]) -> list[str]:
    """Modules that import themselves by way of others; `sources` is {module: source}.

    Loading `a.b.c` from outside of `a.b` loads `a.b` first.
    """
    reached = {}
    for module, source in sources.items():
        targets = set()
        for name in imports_on_loading(ast.parse(source)):
            target = name if name in sources else name[:-1]
            packages = (target[:length] for length in range(2, len(target)))
            targets |= {target, *(package for package in packages if module[: len(package)] != package)}
        reached[module] = targets & sources.keys()
    for step in reached:  # Warshall's transitive closure
        for targets in reached.values():
            if step in targets:
                targets |= reached[step]
    return sorted(".".join(module) for module, targets in reached.items() if module in targets)


def test_no_file_imports_one_that_imports_it():
    names = [("hf_quant", *path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES]
    modules = [name[:-1] if name[-1] == "__init__" else name for name in names]
    assert circles({module: path.read_text() for module, path in zip(modules, FILES)}) == []


def test_the_check_of_circles_finds_them():
    sources = {
        ("p", "a"): "from p.b.c import f",
        ("p", "b"): "from p.b.d import g",
        ("p", "b", "c"): "def f():\n    import p.a",
        ("p", "b", "d"): "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
    }
    assert circles(sources) == []
    assert circles({**sources, ("p", "b", "d"): "from p import a"}) == ["p.a", "p.b", "p.b.d"]


def test_every_part_has_a_layer_and_every_layer_its_parts():
    assert {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} == set(LAYER_OF)
    assert len(LAYER_OF) == sum(map(len, LAYERS))


def test_rooms_inside_of_a_part_stay_apart():
    assert {"grouped_mm", "kv_attention", "rowwise", "weight_only"} <= families()
    for part, rooms in APART.items():
        assert all((PACKAGE / part / room).is_dir() for room in rooms)
    assert [line for path in FILES for line in inner_violations(path.relative_to(PACKAGE), path.read_text())] == []


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("kernels/codes.py", "from hf_quant.kernels.rowwise.op import row_amax", 1),
        ("kernels/cpu/product.py", "def f():\n    import hf_quant.kernels.weight_only.op", 1),
        ("kernels/gpu/tile.py", "from hf_quant.kernels.codes import CODES", 0),
        ("kernels/rowwise/cpu.py", "from hf_quant.kernels.rowwise.op import row_amax", 0),
        ("integrations/diffusers/rules.py", "from hf_quant.integrations.transformers.names import NAMES", 1),
        ("integrations/diffusers/rules.py", "from hf_quant.integrations import transformers", 1),
        ("integrations/diffusers/rules.py", "from hf_quant.integrations.loading import read_keys", 0),
        ("integrations/loading.py", "from hf_quant.integrations.transformers.names import NAMES", 0),
    ],
)
def test_the_check_of_rooms_finds_what_it_forbids(path, source, count):
    assert len(inner_violations(Path(path), source)) == count


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
            "import math\nimport torch\nfrom hf_quant.formats.format import Format\nfrom . import format",
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
