"""Huge pages for weights on CPUs with Linux: a product of one token reads each byte of them once, page after page."""

import ctypes
import os
import sys
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path
from time import monotonic

from torch import nn

from hf_quant.kernels.dispatch import is_plain


VARIABLE = "HF_QUANT_HUGE_PAGES"
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise(2)
_READ_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22  # of mmap(2)
_TO_A_PLACE = 3  # of mremap(2): MREMAP_MAYMOVE, MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value
_SECONDS, _SECONDS_PER_BYTE = 0.5, 5e-9  # to move weights, at most: 20 times what a system with free memory takes


def _read_variable() -> str:
    wanted = os.environ.get(VARIABLE) or "on"  # set to nothing is not set
    if wanted not in ("on", "off", "copy"):
        raise ValueError(f"the environment variable {VARIABLE} is {wanted!r}; allowed: on, off, copy")
    return wanted


_wanted = _read_variable()  # when this is imported, before anything is quantized


def page_size() -> int:
    """Bytes of a huge page, 0 if there are none: not on Linux, turned off there, or by HF_QUANT_HUGE_PAGES=off."""
    if _wanted == "off" or sys.platform != "linux":
        return 0
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except OSError:  # a kernel, or a container, without them
        return 0


def use_huge_pages(model: nn.Module) -> int:
    """Put parameters and buffers on CPUs into huge pages, and return the bytes of these; no value or address changes.

    A CPU knows the addresses of a few thousand pages, and looks those of others up, which takes time where weights are
    streamed. Pages are joined where weights fill three quarters of a huge one, so that little memory is added to what
    is there. Linux moves about 4 GB a second, from version 6.1 on; older ones get to it when they have time.

    Tensors of a checkpoint that was quantized before are pages of its file. With HF_QUANT_HUGE_PAGES=copy copies take
    the places of these, which are memory of this process alone.
    """
    size = page_size()
    if not size:
        return 0
    storages = {}
    for tensor in chain(model.parameters(), model.buffers()):
        if is_plain(tensor) and tensor.is_cpu:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    filled: Counter[int] = Counter()
    for begin, count in storages.items():
        for page in range(begin // size, -(-(begin + count) // size)):
            filled[page * size] += min(begin + count, (page + 1) * size) - max(begin, page * size)
    pages = [page for page, count in filled.items() if 4 * count >= 3 * size]
    copied = _of_files(pages, size) if pages and _wanted == "copy" else set()
    moved, until = 0, monotonic() + _SECONDS + _SECONDS_PER_BYTE * size * len(pages)
    for page in pages:
        if page in copied:
            moved += _copy(page, size)
        elif monotonic() < until:
            moved += _join(page, size)
        else:  # the system has to make room first: when it has time
            _libc().madvise(page, size, _HUGEPAGE)
    return size * moved


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.madvise.argtypes = (address, size, number)
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    libc.mremap.argtypes = (address, size, size, number, address)
    libc.munmap.argtypes = (address, size)
    libc.mmap.restype = libc.mremap.restype = address
    return libc


def _join(page: int, size: int) -> bool:
    """Join the small pages of a huge one, now or when the system has time; True if now."""
    if _libc().madvise(page, size, _COLLAPSE) == 0:
        return True
    _libc().madvise(page, size, _HUGEPAGE)
    return False


def _copy(page: int, size: int) -> bool:
    """Put a copy in the place of pages of a file, for all readers at once."""
    libc = _libc()
    room = libc.mmap(None, 2 * size, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    if room == _FAILED:
        return False
    copy = -(-room // size) * size
    libc.madvise(copy, size, _HUGEPAGE)
    ctypes.memmove(copy, page, size)
    has_moved = libc.mremap(copy, size, size, _TO_A_PLACE, page) == page
    for begin, end in ((room, copy), (copy + size if has_moved else copy, room + 2 * size)):
        if begin < end:
            libc.munmap(begin, end - begin)
    return has_moved


def _of_files(pages: list[int], size: int) -> set[int]:
    """Those that lie in private, writable mappings of files."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, _, _, inode, *_ = line.split()
        if inode != "0" and access == "rw-p":
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            found |= {page for page in pages if begin <= page and page + size <= end}
    return found
