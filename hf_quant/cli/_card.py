"""`hf-quant card`: write a model card."""

import argparse
from pathlib import Path

from hf_quant.cards import (
    CARD,
    hub_id,
    is_untouched,
    merge_cards,
    model_card,
    read_card,
    read_measurements,
    replace_card,
    repository_of,
)
from hf_quant.checkpoint import refuse_file
from hf_quant.cli._models import check_writable


def card(args: argparse.Namespace) -> None:
    """Write the card of a checkpoint; merge it with the card that is already there."""
    refuse_file(args.checkpoint)
    base, base_card = args.base_model, None
    if base is not None and Path(base).is_dir():
        base, base_card = hub_id(base), Path(base)
    out = args.checkpoint / CARD if args.output is None else args.output
    if out.is_dir():
        raise ValueError(f"{out} is a directory; -o takes a file")
    check_writable(out)
    existing = read_card(out) if out.is_file() else None
    if out.is_file() and existing is None:
        raise ValueError(f"{out} has metadata that cannot be read: repair it, or write to another file by -o")
    is_ours = existing is not None and is_untouched(existing)
    made = model_card(
        args.checkpoint,
        read_measurements(args.measurements),
        repo_id=args.repo or (repository_of(existing) if is_ours else None),
        base_model=base,
        base_card=base_card,
        license=args.license,
    )
    merged = replace_card(existing, made) if is_ours else merge_cards(existing, made)
    merged.save(out)
    if merged.text == made.text:
        print(f"{out}: written")
        return
    print(f"{out}: the text that was there is kept, its metadata are completed")
    if args.measurements:
        print("the measurements are not in it: -o writes a card of its own, to copy them from")
