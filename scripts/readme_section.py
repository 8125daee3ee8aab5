"""Puts measured figures into README.md, between the markers of a section.

    hf-quant demo && python scripts/readme_section.py demo demo_output/results.json
    python scripts/bench_generate.py --rivals > generate.txt && python scripts/readme_section.py generate generate.txt

`demo` makes a table of the demo's results; `generate` and `overhead` take what the script of that name has printed.
"""

import argparse
import json
import sys
from pathlib import Path

from support_matrix import README, replace_section


def demo_table(results: dict) -> str:
    """The demo's results in Markdown, with the machine that they were measured on."""
    header = ["weights", "bits/weight", "MB on disk", "load s", "perplexity", "KL to bf16", "decode tok/s", "x bf16"]
    base = results["rows"][0]
    lines = [header, ["---"] * len(header)]
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
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\n`hf-quant demo`: {results['model']}, {results['tokens']:,} predictions, batch 1; "
        f"{results['machine']}."
    )


def main() -> None:
    """Read the arguments, write README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("demo", "generate", "overhead"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    text = args.file.read_text()
    body = demo_table(json.loads(text)) if args.section == "demo" else f"```\n{text.strip()}\n```"
    README.write_text(replace_section(README.read_text(), f"{args.section} table", body))


if __name__ == "__main__":
    sys.exit(main())
