"""Untrusted text inside of Markdown: shown as it is, never as markup; and the template of the card."""

import html
import re
from functools import cache
from typing import Any

import jinja2  # comes with torch


MAX_SHOWN = 200  # characters of a name
_MARKUP = re.compile(r"([\\`*_\[\]|~$])")


class Markdown(str):
    """Text that may be written into a card as it is."""


def _printable(value: object) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return " ".join(text.split())


def code(value: object) -> Markdown:
    """Return a name or an expression as inline code, also for tables."""
    text = _printable(value)
    text = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
    # A code span has no escapes, but its table does: a bar ends the cell, and its backslash is taken away again.
    return Markdown(f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|') or ' '}`")


def plain(value: object) -> Markdown:
    """Return words without any markup, link or mention in them."""
    text = html.escape(_printable(value), quote=False)
    text = _MARKUP.sub(r"\\\1", text)
    return Markdown(text.replace("://", ":&#47;&#47;").replace("www.", "www&#46;").replace("@", "&#64;"))


def size(nbytes: float) -> Markdown:
    """Return bytes as GB, MB or kB."""
    if nbytes >= 1e9:
        return Markdown(f"{nbytes / 1e9:.2f} GB")
    return Markdown(f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB")


def number(value: float) -> Markdown:
    """Return a figure with four significant digits, and all of its integer digits."""
    if abs(value) >= 1000:
        return Markdown(f"{value:,.0f}")
    text = f"{value:#.4g}"
    return Markdown(f"{float(text):.1e}" if value and abs(value) < 1e-4 else text.rstrip("."))


def change(value: float, reference: float | None) -> Markdown:
    """Return the relative change of a figure from its reference; empty without one."""
    return Markdown("" if not reference else f"{value / reference - 1:+.2%}")


def _checked(value: Any) -> Any:
    """Assert that only numbers, and text that the functions above have escaped, reach a card."""
    assert isinstance(value, Markdown | int | float), f"{value!r} is not escaped"
    return value


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_quant.cards", ""),
        autoescape=False,  # of HTML; see `_checked`
        undefined=jinja2.StrictUndefined,
        finalize=_checked,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (code, plain, size, number, change):
        # jinja2 declares no type for its filters: to the checker only functions typed as its own are filters.
        environment.filters[function.__name__] = function  # pyrefly: ignore[unsupported-operation]
    return environment


def render(template: str, values: dict[str, Any]) -> str:
    """Return the text of a template of this package."""
    text = _environment().get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
