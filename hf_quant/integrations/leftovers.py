"""Remove what an earlier save has left in a directory: hosts keep a whole file beside new shards, or an old index.

transformers would then load the older weights without a word, and diffusers would look for shards that are gone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def without_leftovers(weights: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Context manager of a save: of a whole file and an index of shards the one goes that the save has not written.

    weights: the host's name of a whole file, "model.safetensors"; its index has two more endings.
    given: the arguments of the host's `save_pretrained`.
    """
    directory, variant = given.get("save_directory"), given.get("variant")
    if directory is None or not given.get("is_main_process", True):
        yield
        return
    whole, index = (
        Path(directory) / (name if variant is None else f".{variant}.".join(name.rsplit(".", 1)))
        for name in (weights, f"{weights}.index.json")
    )
    before = [_written(file) for file in (whole, index)]
    yield
    is_new = [written != earlier for written, earlier in zip(map(_written, (whole, index)), before)]
    if is_new == [True, False]:
        index.unlink(missing_ok=True)
    elif is_new == [False, True]:
        whole.unlink(missing_ok=True)


def _written(file: Path) -> tuple[int, int] | None:
    """A number that changes when a file is written again; None: there is no such file."""
    if not file.is_file():
        return None
    status = file.stat()
    return status.st_ino, status.st_mtime_ns
