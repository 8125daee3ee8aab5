"""Patterns of module names: an exact name, a glob ("*.down_proj") or a regular expression ("re:...")."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


# Compiling a regular expression takes 0.1 ms or more: limits on their number, on the length of one and of all.
MAX_EXPRESSIONS, MAX_EXPRESSION, MAX_EXPRESSION_TEXT = 1000, 10_000, 100_000


def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """Compile the expression of a "re:..." pattern; None for a name or a glob. Raises ValueError if it is invalid."""
    if not pattern.startswith("re:"):
        return None
    try:
        return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError) as error:  # "a{99999999999}", 1000 nested brackets
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def check_expressions(patterns: Iterable[object]) -> None:
    """Raise ValueError if a configuration, which may come from an untrusted checkpoint, has too many expressions."""
    lengths = [len(pattern) for pattern in patterns if isinstance(pattern, str) and pattern.startswith("re:")]
    if len(lengths) > MAX_EXPRESSIONS or max(lengths, default=0) > MAX_EXPRESSION:
        raise ValueError(
            f"modules and modules_to_not_convert have {len(lengths)} regular expressions; at most "
            f"{MAX_EXPRESSIONS}, of {MAX_EXPRESSION} characters each, are read: write globs"
        )
    if sum(lengths) > MAX_EXPRESSION_TEXT:
        raise ValueError(
            f"the regular expressions of modules and modules_to_not_convert have {sum(lengths)} characters; at "
            f"most {MAX_EXPRESSION_TEXT} are read: write globs"
        )


def matches(pattern: str, name: str) -> bool:
    """True if a module name equals the pattern, or the glob or "re:" expression matches the whole name."""
    expression = compile_pattern(pattern)
    return bool(expression.fullmatch(name)) if expression else fnmatchcase(name, pattern)


def excludes(pattern: str, name: str) -> bool:
    """True if an entry of `modules_to_not_convert` covers a module: a match, or its path has these components."""
    if matches(pattern, name):
        return True
    return not pattern.startswith("re:") and f".{pattern.strip('.')}." in f".{name}."
