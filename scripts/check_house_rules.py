"""Checks the rules of CONTRIBUTING.md that neither ruff nor typos knows; prints one line per finding, exit status 1.

    python scripts/check_house_rules.py

- a source file of the package has at most 500 lines (the aim is 400), a function at most 80 (the aim is 60; kernels,
  which are one function by nature, are free)
- no make_block_ptr, which Triton deprecates; no note of a task for later without a link or version beside it
- no path of somebody's machine, no address of a package index, no tracked file above 64 MiB
"""

import ast
import re
import subprocess
import sys
from pathlib import Path


MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FILE_BYTES = 500, 80, 64 << 20
ROOT = Path(__file__).resolve().parents[1]
# The character classes keep this file from containing what it forbids.
FORBIDDEN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:home|root|work|Users)[/]\w"),
    "the address of a package index": re.compile(r"--(?:extra-)?index[-]url|pypi[.]org/simple|--find[-]links"),
    "make_block_ptr, which Triton deprecates": re.compile(r"\bmake_block[_]ptr\b(?!, which)"),
    "a task for later without a link or version": re.compile(r"\bTOD[O]\b(?!.*(?:https?://|[<>=]=?\s*\d))"),
}


def tracked_files() -> list[Path]:
    """What git tracks, relative to the root, as far as it is in the work tree."""
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
        if path.suffix == ".py" and path.parts[0] == "hf_quant" and path.parts[1] != "tests":
            findings += size_findings(path, source)
    print("\n".join(findings) or "house rules: nothing found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
