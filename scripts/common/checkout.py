"""The commit that figures were measured at."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of the checkout, with a mark if files differ from it; "unknown" without git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        found = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"
