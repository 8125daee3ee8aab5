"""Puts measured figures into README.md or a page of docs/, between the markers of a section.

    hf-quant demo && python scripts/readme_section.py demo demo_output/results.json
    python scripts/bench_generate.py --rivals > generate.txt && python scripts/readme_section.py generate generate.txt
    python scripts/real_models.py --json real.json && python scripts/readme_section.py real-models real.json

`demo` makes a table of the demo's results, `real-models` one of what that script has written; `generate`, `overhead`
and `engines` take what the script of that name has printed.
"""

import argparse
import json
import sys
from pathlib import Path

from common.pages import markdown, write_section
from real_models import HEADER, cells


def demo_table(results: dict) -> str:
    """The demo's results in Markdown, with the machine that they were measured on."""
    header = ["weights", "bits/weight", "MB on disk", "load s", "perplexity", "KL to bf16", "decode tok/s", "x bf16"]
    base = results["rows"][0]
    lines = [header]
    for row in results["rows"]:
        change = "" if row is base else f" ({row['perplexity'] / base['perplexity'] - 1:+.2%})"
        lines.append(
            [
                row["name"],
                f"{row['bits']:.2f}",
                f"{row['size'] / 1e6:.2f}",
                f"{row['load']:.2f}",
                f"{row['perplexity']:.4f}{change}",
                "" if row is base else f"{row['kl']:.5f}",
                f"{row['decode']:.1f}",
                f"{row['decode'] / base['decode']:.2f}",
            ]
        )
    return (
        f"{markdown(lines)}\n\n`hf-quant demo`: {results['model']}, {results['tokens']:,} predictions, batch 1; "
        f"{results['machine']}."
    )


def real_models_table(record: dict) -> str:
    """The cost of schemes to trained models in Markdown: a row per scheme, the models side by side."""
    models = [[dict(zip(HEADER, cells(row))) for row in model["rows"]] for model in record["models"].values()]
    if any([row["weights"] for row in model] != [row["weights"] for row in models[0]] for model in models):
        raise ValueError("the models were measured with other schemes each; needs the same for all")
    columns = [name for name in HEADER[5:] if name in models[0][0] and name != "decode tok/s"]
    lines = [["weights", "bits/weight"]]
    for model in record["models"].values():
        lines[0] += [f"{model['title']}: perplexity", *(name.replace("x bf16", "decode x bf16") for name in columns)]
    for rows in zip(*models):
        lines.append([rows[0]["weights"], ", ".join(dict.fromkeys(row["bits/weight"] for row in rows))])
        for row in rows:
            change = f" ({row['change']})" if row["change"] else ""
            lines[-1] += [row["perplexity"] + change, *(row[name] for name in columns)]
    counts = " and ".join(f"{model['predictions']:,}" for model in record["models"].values())
    timed = f", decoding at batch 1 in {record['clock']}" if "x bf16" in columns else ""
    return f"{markdown(lines)}\n\n`{record['command']}`: {counts} predictions{timed}; {record['machine']}."


TABLES = {"demo": demo_table, "real-models": real_models_table}


def main() -> None:
    """Read the arguments, write the page that has the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("demo", "real-models", "generate", "overhead", "engines"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    text = args.file.read_text()
    make = TABLES.get(args.section)
    body = f"```\n{text.strip()}\n```" if make is None else make(json.loads(text))
    write_section(f"{args.section.replace('-', ' ')} table", body)


if __name__ == "__main__":
    sys.exit(main())
