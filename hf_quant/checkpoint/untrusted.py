"""JSON of strangers."""

import json
from collections import Counter
from typing import Any


MAX_VALUES = 2_000_000  # of one document; a header of 70 000 experts has 0.6 million


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ValueError, which calls it `what`, on anything else.

    A value of three bytes takes seventy in memory, so their number is bounded before they are made.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"{what} has more than {MAX_VALUES} values; no model has so many")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # nesting thousands deep is no header either
        raise ValueError(f"{what} is not JSON: {shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}; needs an object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values they take: what was checked must be what is loaded."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {shorten(repr(repeated))} twice")
    return fields


def one_line(error: Exception) -> str:
    """The message of an error that may quote a stranger, at most 600 characters of it."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    return text if len(text) <= 600 else f"{text[:400]} ... {text[-190:]}"


def shorten(text: str) -> str:
    """At most 80 characters of it."""
    return text if len(text) <= 80 else f"{text[:77]}..."
