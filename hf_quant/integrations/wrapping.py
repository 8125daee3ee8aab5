"""Wrap methods of a host's classes, where no hook of the host runs."""

import functools
from collections.abc import Callable
from typing import Any


_MARK = "_knows_hf_quant"


def wrap_once(cls: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method, or class method, of a host's class by `wrap(method)`. Further calls do nothing."""
    found = getattr(cls, name)
    if hasattr(found, _MARK):
        return
    host = getattr(found, "__func__", found)
    wrapped = functools.wraps(host)(wrap(host))
    setattr(wrapped, _MARK, True)
    setattr(cls, name, wrapped if host is found else classmethod(wrapped))
