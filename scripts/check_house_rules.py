"""Check the rules of CONTRIBUTING.md that neither ruff nor typos knows; print one line per finding, exit status 1.

    python scripts/check_house_rules.py

- a source file of the package has at most 500 lines (the aim is 400), a function at most 80 (the aim is 60; kernels,
  which are one function by nature, are free)
- no make_block_ptr, which Triton deprecates; no note of a task for later without a link or version beside it
- no path of somebody's machine, no address of a package index, no tracked file above 64 MiB
- a private module `a/_b.py`, and a private name `_x` of a module in `a`, are imported inside the directory `a` only
- the first line of a docstring is a sentence with a verb, or "Noun: ...": it does not begin with What, How, Whether,
  Which, Why, Where, Of, As, None or All
- a tensor that torch makes names its dtype: the default one is the user's (`torch.set_default_dtype`), and native code
  writes fp32 into what it is given
- the picture of the architecture in CONTRIBUTING.md is the one that scripts/draw_architecture.py draws
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from draw_architecture import is_current


MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FILE_BYTES = 500, 80, 64 << 20
ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN_FIRST_WORDS = {"What", "How", "Whether", "Which", "Why", "Where", "Of", "As", "None", "All"}
# Of torch, whose results have the default dtype.
MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "logspace", "eye"}
# The character classes keep this file from containing what it forbids.
FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:home|root|work|Users)[/]\w"),
    "the address of a package index": re.compile(r"--(?:extra-)?index[-]url|pypi[.]org/simple|--find[-]links"),
    "make_block_ptr, which Triton deprecates": re.compile(r"\bmake_block[_]ptr\b(?!, which)"),
    "a task for later without a link or version": re.compile(r"\bTOD[O]\b(?!.*(?:https?://|[<>=]=?\s*\d))"),
}


def tracked_files() -> list[Path]:
    """Files that git tracks and that are in the work tree, relative to the root."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a function that Triton compiles."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def size_findings(path: Path, source: str) -> list[str]:
    """Files and functions of the package that have grown too long."""
    findings = []
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        findings.append(f"{path}: {num_lines} lines, more than {MAX_FILE_LINES}: split it by responsibility")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                findings.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
                )
    return findings


def imported_names(source: str) -> list[tuple[int, str, str]]:
    """Return (line, module, imported name or "") for every import in the source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
    return found


def import_findings(path: Path, source: str) -> list[str]:
    """Imports of private modules and names from outside of the directory that they belong to."""
    findings, here = [], path.parent.parts
    for line, module, name in imported_names(source):
        parts = (*module.split("."), *([name] if name else []))
        if parts[0] != "hf_quant":
            continue
        for position, part in enumerate(parts):
            if not part.startswith("_") or part.startswith("__"):
                continue
            owner = parts[:position]
            if not (ROOT / Path(*owner)).is_dir():  # a name in a file belongs to the file's directory
                owner = owner[:-1]
            if here[: len(owner)] != owner:
                findings.append(f"{path}:{line}: imports {'.'.join(parts)}, which is private to {'/'.join(owner)}/")
                break
    return findings


def docstring_findings(path: Path, source: str) -> list[str]:
    """Docstrings whose first line begins with a word that begins no sentence."""
    findings = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        first = re.match(r"[A-Za-z]*", (ast.get_docstring(node) or "") if isinstance(node, kinds) else "")[0]
        if first in FORBIDDEN_FIRST_WORDS:
            name = getattr(node, "name", "the module")
            findings.append(f"{path}:{getattr(node, 'lineno', 1)}: the docstring of {name} begins with {first!r}")
    return findings


def dtype_findings(path: Path, source: str) -> list[str]:
    """Calls of torch that make a tensor of the default dtype."""
    findings = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in MAKERS:
            continue
        names = {keyword.arg for keyword in node.keywords}  # None: **options, which are not looked into
        if ast.unparse(node.func.value) == "torch" and not names & {"dtype", None}:
            findings.append(f"{path}:{node.lineno}: torch.{node.func.attr} without dtype")
    return findings


def text_findings(path: Path, source: str) -> list[str]:
    """Lines that contain what no file of the project may contain."""
    return [
        f"{path}:{number}: contains {what}"
        for number, line in enumerate(source.splitlines(), 1)
        for what, pattern in FORBIDDEN_TEXT.items()
        if pattern.search(line)
    ]


def main() -> int:
    """Check every tracked file; return the exit status."""
    findings = []
    for path in tracked_files():
        num_bytes = (ROOT / path).stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            findings.append(f"{path}: {num_bytes >> 20} MiB, more than {MAX_FILE_BYTES >> 20}")
        if "assets" in path.parts or path.suffix in {".png", ".safetensors", ".npy", ".pt"} or path.name == "LICENSE":
            continue
        source = (ROOT / path).read_text()
        findings += text_findings(path, source)
        is_package = path.parts[0] == "hf_quant" and path.parts[1] != "tests"
        if path.suffix == ".py" and is_package:
            findings += size_findings(path, source) + dtype_findings(path, source)
        if path.suffix == ".py" and (is_package or path.parts[0] == "scripts"):
            findings += import_findings(path, source) + docstring_findings(path, source)
    if not is_current():
        findings.append("CONTRIBUTING.md: the architecture has changed: run python scripts/draw_architecture.py")
    print("\n".join(findings) or "house rules: nothing found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
