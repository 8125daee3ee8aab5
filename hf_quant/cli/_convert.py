"""`hf-quant export` and `hf-quant import`: convert checkpoints."""

import argparse

from hf_quant.cards import read_measurements
from hf_quant.convert.compressed_tensors.export import export_compressed_tensors
from hf_quant.convert.importer import import_checkpoint


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint of hf_quant in another format."""
    notes = export_compressed_tensors(
        args.checkpoint,
        args.out,
        reader=args.reader,
        measurements=read_measurements(args.measurements),
        repo_id=args.repo,
        revision=args.revision,
    )
    _report(args, notes)


def import_(args: argparse.Namespace) -> None:
    """Make a checkpoint of hf_quant from one of another library."""
    _report(args, import_checkpoint(args.checkpoint, args.out, revision=args.revision))


def _report(args: argparse.Namespace, notes: tuple[str, ...]) -> None:
    size = sum(path.stat().st_size for path in args.out.rglob("*.safetensors"))
    print(f"{args.out}: {size / 1e6:.2f} MB; every weight is what it was in {args.checkpoint}")
    for note in notes:
        print(f"note: {note}")
