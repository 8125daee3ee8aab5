"""`hf-quant export` and `hf-quant import`: convert checkpoints."""

import argparse

from hf_quant.cards import read_measurements
from hf_quant.cli._parser import parse_scheme
from hf_quant.convert.compressed_tensors.export import export_compressed_tensors
from hf_quant.convert.gguf.export import export_gguf
from hf_quant.convert.importer import import_checkpoint


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint of hf_quant in another format."""
    options = {
        "measurements": read_measurements(args.measurements),
        "repo_id": args.repo,
        "revision": args.revision,
    }
    if args.format == "gguf":
        if args.reader is not None:
            raise ValueError(f"--reader {args.reader} is of compressed-tensors: leave it out with --format gguf")
        notes = export_gguf(args.checkpoint, args.out, **options)
    else:
        notes = export_compressed_tensors(args.checkpoint, args.out, reader=args.reader or "engines", **options)
    _report(args, notes)


def import_(args: argparse.Namespace) -> None:
    """Make a checkpoint of hf_quant from one of another library."""
    requantize = None if args.requantize is None else parse_scheme(args.requantize)
    notes = import_checkpoint(args.checkpoint, args.out, requantize=requantize, revision=args.revision)
    _report(args, notes, "every weight without a note" if requantize is not None else "every weight")


def _report(args: argparse.Namespace, notes: tuple[str, ...], which: str = "every weight") -> None:
    size = sum(path.stat().st_size for kind in ("safetensors", "gguf") for path in args.out.rglob(f"*.{kind}"))
    print(f"{args.out}: {size / 1e6:.2f} MB; {which} is what it was in {args.checkpoint}")
    for note in notes:
        print(f"note: {note}")
