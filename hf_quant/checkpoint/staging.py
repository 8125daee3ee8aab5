"""Workspaces: directories that one process at a time writes beside their destination, and moves when complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


try:
    import fcntl
except ImportError:  # Windows, which has no lock that the system releases with the process
    fcntl = None


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Create an empty directory beside `out`, `.NAME.writing`, on the same file system, and remove it afterwards.

    If a process is killed, the next one that writes `out` removes what is left.

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
            # Last: from here on another process may use the directory.
            (directory / _LOCK).unlink()
            with contextlib.suppress(OSError):
                directory.rmdir()


_LOCK = "lock"


@contextlib.contextmanager
def _locked(directory: Path, out: Path) -> Iterator[None]:
    """Create a directory and hold its lock; the system releases the lock with the process."""
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
        try:
            file = open(directory / _LOCK, "w")
        except FileNotFoundError:  # its previous user has just removed the directory
            continue
        with file:
            if not _lock(file):
                raise ValueError(f"{out} is being written by another process: wait for it, or give another directory")
            if _is_there(directory / _LOCK, file):
                yield
                return


def _lock(file: Any) -> bool:
    """Lock a file; return False if another process holds the lock. Without support for locks, return True."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_there(path: Path, file: Any) -> bool:
    """True if the path still names the open file."""
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
