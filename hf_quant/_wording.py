"""Wording that messages of all parts of the package share."""

from collections.abc import Sequence


def first_few(texts: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Join the first texts and count the others: "a, b, c and 5 more"."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
