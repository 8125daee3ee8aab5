"""Directories that are written beside their place, by one process at a time, and moved there when complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


try:
    import fcntl
except ImportError:  # Windows: nothing there tells whether who has made a directory still writes into it
    fcntl = None


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """An empty directory beside `out`, `.NAME.writing`, for the time of the block; on the same file system.

    What a process that was killed has left of it is removed by the next one that writes `out`.

    Raises ValueError if another process, or another thread, is writing `out`.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    directory = out.parent / f".{out.name}.writing"
    with _locked(directory, out):
        _clear(directory)
        try:
            yield directory
        finally:
            _clear(directory)
            # Last: from here on it may be another's.
            (directory / _LOCK).unlink()
            with contextlib.suppress(OSError):
                directory.rmdir()


_LOCK = "lock"


@contextlib.contextmanager
def _locked(directory: Path, out: Path) -> Iterator[None]:
    """Hold the lock of a directory, which is made; the system releases it with the process."""
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
        try:
            file = open(directory / _LOCK, "w")
        except FileNotFoundError:  # whoever had it has just removed all of it
            continue
        with file:
            if fcntl is not None and not _lock(file):
                raise ValueError(f"{out} is being written by another process: wait for it, or give another directory")
            if _is_there(directory / _LOCK, file):
                yield
                return


def _lock(file: Any) -> bool:
    """Lock a file; False if another has. A file system without locks counts as locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_there(path: Path, file: Any) -> bool:
    """True if an open file is the one that a path names."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _clear(directory: Path) -> None:
    """Remove everything but the lock."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
