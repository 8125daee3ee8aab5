"""`hf-quant card`."""

import argparse
from pathlib import Path

from hf_quant.integrations.hub import (
    CARD,
    hub_id,
    is_untouched,
    merge_cards,
    model_card,
    read_card,
    read_measurements,
    replace_card,
)


def card(args: argparse.Namespace) -> None:
    """Write the card of a checkpoint; one that is there is merged with it."""
    base, base_card = args.base_model, None
    if base is not None and Path(base).is_dir():
        base, base_card = hub_id(base), Path(base)
    made = model_card(
        args.checkpoint,
        read_measurements(args.measurements),
        repo_id=args.repo,
        base_model=base,
        base_card=base_card,
        license=args.license,
    )
    out = args.checkpoint / CARD if args.output is None else args.output
    if out.is_dir():
        raise ValueError(f"{out} is a directory; -o takes a file")
    existing = read_card(out) if out.is_file() else None
    if out.is_file() and existing is None:
        raise ValueError(f"{out} has metadata that cannot be read: repair it, or write to another file by -o")
    if existing is not None and is_untouched(existing):
        merged = replace_card(existing, made)
    else:
        merged = merge_cards(existing, made)
    merged.save(out)
    written = merged.text == made.text
    print(f"{out}: {'written' if written else 'the text that was there is kept, its metadata are completed'}")
