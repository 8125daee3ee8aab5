"""Makes the cards in model_cards/ from the figures in model_cards/measured/; neither is edited by hand.

    python scripts/make_model_cards.py             # the cards, from the figures that are there
    python scripts/make_model_cards.py --measure   # the figures first, by `hf-quant eval` and `hf-quant bench`

The checkpoints are quantized anew each time, into a temporary directory: a card's table and sizes are those of the
files, its figures those of the JSON, and figures of a checkpoint with other bits per weight are an error.
"""

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

from hf_quant.cards import model_card, read_measurements
from hf_quant.cli import main as hf_quant


ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "integration_tests" / "assets" / "tiny-llama-13m"
CARDS = ROOT / "model_cards"
SCHEMES = {"int8": "int8", "int4": "W4A16", "nf4": "nf4"}  # {format: what to quantize with}
SERVED = "int4"  # is exported, too
WINDOW, TOKENS = 256, 16384  # the model was trained at this length


def run(*arguments: object) -> None:
    """A command of hf-quant, silently. Raises RuntimeError with what it said if it fails."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = hf_quant([str(argument) for argument in arguments])
    if status:
        raise RuntimeError(said.getvalue())


def measure(checkpoint: Path, out: Path) -> None:
    """Write quality, speed and memory of a checkpoint, each beside the 16-bit model of the same run."""
    files = [checkpoint.parent / f"{checkpoint.name}-{kind}.json" for kind in ("eval", "bench")]
    reference = ("--reference", MODEL, "--device", "cpu")
    text = ("--text", MODEL / "val_ids.npy", "--window", WINDOW)
    run("eval", checkpoint, *reference, *text, "--max-tokens", TOKENS, "--json", files[0])
    # One thread: with more, whatever else runs on the machine is waited for.
    run("bench", checkpoint, *reference, "--threads", 1, "--rounds", 9, "--json", files[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(read_measurements(files).to_dict(), indent=2) + "\n")


def main() -> int:
    """Write the cards."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure first (3 minutes)")
    parser.add_argument("--out", type=Path, default=CARDS, help="directory for the cards (default: model_cards)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for weights, scheme in SCHEMES.items():
            checkpoint = Path(work) / f"{MODEL.name}-{weights}"
            figures = CARDS / "measured" / f"{checkpoint.name}.json"
            run("quantize", MODEL, checkpoint, "--weights", scheme)
            if args.measure:
                measure(checkpoint, figures)
            card = model_card(checkpoint, figures, title=f"{MODEL.name} in {weights}")
            card.save(args.out / f"{checkpoint.name}.md")
            print(args.out / f"{checkpoint.name}.md")
            if weights == SERVED:
                export = Path(work) / f"{checkpoint.name}-serving"
                run("export", checkpoint, export, "--measurements", figures)
                shutil.copyfile(export / "README.md", args.out / f"{export.name}.md")
                print(args.out / f"{export.name}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
