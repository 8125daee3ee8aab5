"""Measured figures of a checkpoint: shown by model cards, written by `hf-quant eval --json` and `bench --json`.

    {
      "bits_per_weight": 4.125,
      "quality": [
        {"dataset": "wiki.txt", "metric": "perplexity", "value": 7.1, "reference": 6.9,
         "details": "16,320 predictions in windows of 256 tokens", "command": "hf-quant eval ..."}
      ],
      "speed": [
        {"device": "...", "versions": "torch 2.13.0, ...", "command": "hf-quant bench ...", "details": "batch 1, ...",
         "rows": [{"name": "decode", "value": 30.4, "unit": "tokens/s", "reference": 12.3}]}
      ],
      "memory": [{"name": "peak while loading", "value": 1200000, "reference": 2600000}]
    }

`reference` is the same figure of the 16-bit model. Sizes are bytes. Every part may be missing; a list of one object
may be the object itself; fields of other names are ignored, so that a file may hold more than a card shows.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from hf_quant.checkpoint import parse_json, shorten


MAX_BYTES = 10_000_000  # of a file of measurements
_Record = TypeVar("_Record", "Quality", "SpeedRow", "Speed", "Memory")


@dataclass(frozen=True)
class Quality:
    """A figure of quality: `metric` on `dataset`, and the figure of the 16-bit model as `reference`."""

    dataset: str
    metric: str
    value: float
    reference: float | None = None
    details: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class SpeedRow:
    """A time or a rate in `unit`."""

    name: str
    value: float
    unit: str
    reference: float | None = None


@dataclass(frozen=True)
class Speed:
    """Figures of one run on one machine, and the command that measured them."""

    device: str
    versions: str
    command: str
    rows: tuple[SpeedRow, ...]
    details: str | None = None


@dataclass(frozen=True)
class Memory:
    """A number of bytes."""

    name: str
    value: float
    reference: float | None = None


@dataclass(frozen=True)
class Measurements:
    """The measured figures of one checkpoint."""

    quality: tuple[Quality, ...] = ()
    speed: tuple[Speed, ...] = ()
    memory: tuple[Memory, ...] = ()
    bits_per_weight: float | None = None  # true bits; a card of another checkpoint refuses the figures

    @classmethod
    def from_dict(cls, value: Any, where: str = "measurements") -> "Measurements":
        """Read the result of `to_dict`. Raises ValueError on impossible figures, naming the field."""
        if not isinstance(value, dict):
            raise ValueError(f"{where} is a {type(value).__name__}; needs an object with quality, speed or memory")
        known = [field.name for field in fields(cls)]
        if value and not set(value) & set(known):
            raise ValueError(f"{where} has {', '.join(sorted(map(repr, value))[:5])}; needs any of {', '.join(known)}")
        speed = []
        for number, entry in enumerate(_entries(value.get("speed"), f"{where}.speed")):
            at = f"{where}.speed[{number}]"
            rows = _records(SpeedRow, entry.get("rows"), f"{at}.rows")
            if not rows:
                raise ValueError(f"{at} has no rows")
            speed.append(_record(Speed, {**entry, "rows": rows}, at))
        bits = value.get("bits_per_weight")
        return cls(
            _records(Quality, value.get("quality"), f"{where}.quality"),
            tuple(speed),
            _records(Memory, value.get("memory"), f"{where}.memory"),
            None if bits is None else _number(bits, f"{where}.bits_per_weight", positive=True),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-native fields, without those that are None."""
        given = asdict(self, dict_factory=lambda items: {name: value for name, value in items if value is not None})
        return json.loads(json.dumps(given))

    def __bool__(self) -> bool:
        return bool(self.quality or self.speed or self.memory)


def read_measurements(paths: Iterable[Path | str]) -> Measurements:
    """Read and join several files of measurements. Raises ValueError if they are of different models."""
    found = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"{path} is not a file; needs measurements as `hf-quant eval --json` writes them")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are measurements")
        found.append(Measurements.from_dict(parse_json(path.read_bytes(), str(path)), str(path)))
    bits = sorted({m.bits_per_weight for m in found if m.bits_per_weight is not None})
    if bits and bits[-1] > 1.01 * bits[0]:
        raise ValueError(
            f"the files measure models of {bits[0]:.3f} and of {bits[-1]:.3f} bits per weight; a card is of one model"
        )
    return Measurements(
        tuple(figure for m in found for figure in m.quality),
        tuple(figure for m in found for figure in m.speed),
        tuple(figure for m in found for figure in m.memory),
        bits[0] if bits else None,
    )


def as_measurements(value: "Measurements | dict[str, Any] | Path | str | None") -> Measurements:
    """Return the measurements in an argument: measurements, a dict of their fields, the path of a file, or None."""
    if value is None:
        return Measurements()
    if isinstance(value, Measurements):
        return Measurements.from_dict(value.to_dict())  # the constructor checks nothing
    return read_measurements([value]) if isinstance(value, str | Path) else Measurements.from_dict(value)


def _entries(value: Any, where: str) -> list[dict[str, Any]]:
    entries = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError(f"{where} has {str(entry)[:80]!r}; needs objects")
    return list(entries)


def _records(cls: type[_Record], value: Any, where: str) -> tuple[_Record, ...]:
    return tuple(_record(cls, entry, f"{where}[{i}]") for i, entry in enumerate(_entries(value, where)))


def _record(cls: type[_Record], entry: dict[str, Any], where: str) -> _Record:
    """Read one record; numbers are finite and texts are not empty."""
    values: dict[str, Any] = {}
    for field in fields(cls):
        value, at = entry.get(field.name), f"{where}.{field.name}"
        if value is None:
            if field.name not in ("reference", "details", "command") or (cls is Speed and field.name == "command"):
                raise ValueError(f"{at} is missing")
        elif field.name in ("value", "reference"):
            value = _number(value, at, positive=cls is not Quality)
        elif field.name != "rows" and (not isinstance(value, str) or not value.strip()):
            raise ValueError(f"{at} is {value!r}; needs text")
        values[field.name] = value
    return cls(**values)


def _number(value: Any, where: str, *, positive: bool) -> float:
    # Integers of JSON may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where} is {shorten(repr(value))}; needs a number")
    if positive and value <= 0:
        raise ValueError(f"{where} is {value!r}; needs a number above 0")
    return value
