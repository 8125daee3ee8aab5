"""The targets of the GPU kernels, and of what is built on them: what was measured, and what is modelled.

    python scripts/gpu_targets.py             # the tables
    python scripts/gpu_targets.py --readme    # into the pages of docs/ that have them

Measured are the values in scripts/results/*.json, which gpu_suite.py alone writes. Where there is none, a value is
modelled for an H200: kernels by gpulab/roofline.py (bytes, operations, launches), whole models by the formulas below.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from common.pages import markdown, write_section
from gpulab.cells import CELLS
from gpulab.rivals import FAILURES
from gpulab.roofline import BANDWIDTH, CEILINGS, ModelTimer
from gpulab.targets import TARGETS, Target, judge


RESULTS = Path(__file__).parent / "results"
SECTION = "gpu targets"


class Formula(NamedTuple):
    """A target of whole models or of training, and what a formula gives for it."""

    id: str
    what: str
    wanted: float
    modelled: float
    how: str
    is_upper: bool = False


def _tokens(gigabytes: float) -> float:
    """Tokens a second of a Llama-3.1-8B: its bytes, and 10 launches of 1.5 us for each of 32 layers."""
    return 1 / (gigabytes * 1e9 / BANDWIDTH + 32 * 10 * 1.5e-6)


_LAYERS, _HEAD = 32 * 218.1e6, 128256 * 4096  # weights
_BF16, _INT8 = 2 * (_LAYERS + _HEAD) / 1e9, 1.01 * (_LAYERS + _HEAD) / 1e9
_INT4 = (4.25 / 8 * _LAYERS + 1.01 * _HEAD) / 1e9
_CACHE = 131072 * 32 * 2 * 8 * 128 / 1e9  # values of 131,072 tokens, 1e9
_LONG, _LONG_BF16 = _tokens(_INT4 + _CACHE * 4.5 / 8), _tokens(_BF16 + _CACHE * 2)
_BYTES = "bytes, 10 launches a layer"
FORMULAS = (
    Formula("L1", "generate, bf16 in a graph, tok/s", 235, _tokens(_BF16), _BYTES),
    Formula("L1", "generate, int8, tok/s", 430, _tokens(_INT8), _BYTES),
    Formula("L1", "generate, int4 and int8 head, tok/s", 700, _tokens(_INT4), _BYTES),
    Formula("L2", "int4, 32 sequences, x bf16", 2.0, 5.33 / 2.55, "attention and norms 20 % of bf16's time"),
    Formula("L2", "int4, 128 sequences, x bf16", 1.2, 5.33 / (3.88 / 1.2 + 1.45), "the same, with G3 as wanted"),
    Formula("L3", "131,072 tokens, int4 and int4 cache, GB", 11.0, 10.7, "stored bytes and a chunk of prefill", True),
    Formula("L4", "131,072 tokens, int4 and int4 cache, tok/s", 330, _LONG, _BYTES),
    Formula("L4", "the same, x bf16", 3.0, _LONG / _LONG_BF16, _BYTES),
    Formula("D1", "Flux.1-dev, 8 bit, compiled, s an image", 2.5, 1.91, "floor: products and attention alone", True),
    Formula("D2", "Flux.1-dev, 8 bit, not compiled, x eager bf16", 1.35, 1.4, "as D1, two launches a layer"),
    Formula("D3", "CogVideoX-5b, x compiled bf16", 1.35, 48.6 / 33.8, "8-bit attention at 750 TOP/s"),
    Formula("D4", "Flux.1-dev, int4, x bf16", 0.90, 0.94, "each weight is dequantized once"),
    Formula("T1", "AdamW, 8-bit states, x fused with bf16 states", 1.2, 0.85 * 14 / 10, "bytes, at 85 % of torch's"),
    Formula("T1", "AdamW, 4-bit states, x fused with bf16 states", 1.45, 0.85 * 14 / 8, "bytes, at 85 % of torch's"),
    Formula("T2", "peak of fine-tuning, of fused AdamW in bf16", 0.55, 4.1 / 8, "bytes a parameter", True),
    Formula("T3", "8-bit training step, x compiled bf16", 1.30, 1 / (0.25 + 0.75 / 1.45), "75 % products at 1.45"),
)


def modelled_sections() -> dict[str, dict]:
    """Model the cells of each section of gpu_suite.py; {section: as `judge` takes it}."""
    found, timer = {}, ModelTimer()
    for name, cells in CELLS.items():
        records = []
        for cell in cells(False, False):
            try:
                records.append(cell.run(timer, CEILINGS))
            except FAILURES:  # what it is compared with cannot be modelled
                continue
        found[name] = {"status": "modelled", "records": records, "ceilings": CEILINGS._asdict()}
    return found


def _key(id: str, what: str, versus: str, tokens: Iterable[int], **_: Any) -> tuple[Any, ...]:
    return id, what, versus, tuple(tokens)


def measured_values() -> dict[tuple[Any, ...], tuple[str, float]]:
    """{key of a target: (device, value)} of the results that are checked in."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        for target in run["targets"]:
            if target["value"] is not None:
                found[_key(**target)] = (run["environment"]["device"], target["value"])
    return found


def _verdict(value: float, wanted: float, is_upper: bool) -> str:
    short = value / wanted - 1 if is_upper else 1 - value / wanted
    return f"misses by {short:.0%}" if short > 0.005 else "meets"


def _line(target: Target) -> str:
    least, most = min(target.tokens), max(target.tokens)
    tokens = f", M = {least}" + (f" to {most}" if most > least else "")
    return f"{target.what}{tokens if target.section not in ('models', 'diffusion') else ''}, {target.versus}"


def rows() -> list[tuple[str, ...]]:
    """The table: its header, then a row for each target."""
    measured, table = measured_values(), [("target", "what", "wanted", "found", "", "how")]
    modelled = modelled_sections()
    for verdict in judge(TARGETS, modelled):
        target = verdict.target
        key = _key(**target._asdict())
        if target.section not in modelled and key not in measured:
            continue
        can_tell = target.versus in ("bf16", "copy") or target.id == "K1"  # other rivals are code of others
        model = verdict.value if can_tell else None
        device, value = measured.get(key, (None, model))
        sign = "<=" if target.is_upper else ">="
        text = "" if value is None else _verdict(value, target.limit, target.is_upper)
        how = f"measured ({device})" if device else "modelled" if value is not None else "a rival: only a GPU can tell"
        found = "" if value is None else f"{value:.0f}" if value > 100 else f"{value:.2f}"
        table.append((target.id, _line(target), f"{sign} {target.limit:g}", found, text, how))
    known = {(row[0], row[1]) for row in table}
    for one in FORMULAS:
        if (one.id, one.what) in known:
            continue
        sign = "<=" if one.is_upper else ">="
        value = f"{one.modelled:.0f}" if one.modelled > 100 else f"{one.modelled:.2f}"
        text = _verdict(one.modelled, one.wanted, one.is_upper)
        table.append((one.id, one.what, f"{sign} {one.wanted:g}", value, text, f"modelled: {one.how}"))
    return sorted(table[:1]) + sorted(table[1:], key=lambda row: (row[0][0], int(row[0][1:])))


MEASURED = "gpu measured"
_NAMES = {"weights": "weights alone", "dynamic": "with quantized inputs", "experts": "weights of experts"}


def _against(records: list[dict]) -> float:
    """Return their speed in units of 16 bit, all together; of attention over a cache in units of the best rival."""
    others = [record["bf16_ms"] or min(record["rivals_ms"].values()) for record in records]
    return sum(others) / sum(record["ms"] for record in records)


def _place(section: str, record: dict) -> tuple[str, str]:
    """(what a record is of, its size) for the table of what was measured."""
    what, size = record["candidate"], str(record["M"])
    if section == "attention":
        cache, _, place = what.partition(" cache ")  # batch x tokens
        return (f"{cache} cache", place) if place else (f"{what}, {record['linear']}", size)
    return f"{what}, {'product of codes' if record['op'].endswith('_scaled_mm') else _NAMES[section]}", size


def measured_rows() -> list[tuple[str, ...]]:
    """The table of what each results file has: times as fast as 16 bit on the same GPU in the same run."""
    table = [("device", "what", "tokens", "x 16 bit")]
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        groups: dict[str, dict[str, list[dict]]] = {}
        for section in (*_NAMES, "attention"):
            for record in run["sections"].get(section, {"records": ()})["records"]:
                if record["bf16_ms"] is not None or record["rivals_ms"]:
                    what, size = _place(section, record)
                    groups.setdefault(what, {}).setdefault(size, []).append(record)
        for what, by_size in groups.items():
            sizes = sorted(by_size, key=lambda size: [int(number) for number in size.split("x")])
            ratios = [f"{_against(by_size[size]):.2f}" for size in sizes]
            table.append((run["environment"]["device"], what, ", ".join(sizes), ", ".join(ratios)))
    return table


def main() -> None:
    """Print both tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write the tables into docs/")
    args = parser.parse_args()
    for section, found in ((MEASURED, measured_rows()), (SECTION, rows())):
        if args.readme:
            write_section(section, markdown(found))
        else:
            print(markdown(found))


if __name__ == "__main__":
    main()
