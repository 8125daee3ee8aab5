"""Untrusted text: bounded parsing of JSON, and error messages that quote it safely."""

import json
from collections import Counter
from typing import Any


MAX_VALUES = 2_000_000  # in one document; the header of 70 000 experts has 0.6 million


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. Raises ValueError, which calls the text `what`, on anything else.

    A value of three bytes takes seventy bytes in memory, so the number of values is bounded before they are created.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"{what} has more than {MAX_VALUES} values; no model has so many")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        raise ValueError(f"{what} is not JSON: {shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}; needs an object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict without duplicate keys: parsers differ in the value that they take, and only one is checked."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {shorten(repr(repeated))} twice")
    return fields


def one_line(error: Exception) -> str:
    """Return the message of an error that may contain untrusted text: printable, at most 600 characters."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    return text if len(text) <= 600 else f"{text[:400]} ... {text[-190:]}"


def shorten(text: str) -> str:
    """Return at most 80 characters of a text."""
    return text if len(text) <= 80 else f"{text[:77]}..."
