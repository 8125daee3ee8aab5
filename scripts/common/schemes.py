"""Schemes as the scripts take them on the command line."""

import json
import re
from typing import Any


def parse_spec(spec: str) -> dict[str, Any]:
    """ "int4:group_size=64:algorithm=hqq" -> fields of QuantizerConfig; values are JSON, or else text.

    A colon inside of braces belongs to a value: 'W8A8:modules={"*.down_proj": "int8"}'.
    """
    weights, *settings = re.split(r":(?![^{}]*\})", spec)
    fields: dict[str, Any] = {"weights": weights}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} in {spec!r}; needs FORMAT[:FIELD=VALUE]...")
        try:
            fields[key] = json.loads(value)
        except json.JSONDecodeError:
            fields[key] = value
    return fields
