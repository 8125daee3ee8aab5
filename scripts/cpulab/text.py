"""Text to train on that every machine has: the sources of Python's library."""

import sysconfig
from pathlib import Path


def library_text(held_out: str) -> list[str]:
    """The sources of the standard library, without those that the held-out text has a part of."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            parts = [text[start : start + 300] for start in range(0, len(text), 3000)]
            if len(text) > 300 and not any(len(part.strip()) > 200 and part in held_out for part in parts):
                texts.append(text)
    return texts
