"""Patterns of module names: an exact name, a glob ("*.down_proj") or a regular expression ("re:...")."""

import re
from fnmatch import fnmatchcase


def compile_pattern(pattern: str) -> re.Pattern | None:
    """The regular expression of a "re:..." pattern, None for a name or a glob. Raises ValueError if it is invalid."""
    if not pattern.startswith("re:"):
        return None
    try:
        return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:  # "a{99999999999}", 1000 brackets in each other
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def matches(pattern: str, name: str) -> bool:
    """Whether a module name is the pattern, or matches it as a glob or "re:" expression (whole name)."""
    expression = compile_pattern(pattern)
    return bool(expression.fullmatch(name)) if expression else fnmatchcase(name, pattern)


def excludes(pattern: str, name: str) -> bool:
    """Whether an entry of `modules_to_not_convert` covers a module: a match, or its path holds these components."""
    if matches(pattern, name):
        return True
    return not pattern.startswith("re:") and f".{pattern.strip('.')}." in f".{name}."
