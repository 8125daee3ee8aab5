"""`hf-quant quantize` and `hf-quant plan`: quantize a model, or show the plan."""

import argparse
import shutil
import time
from pathlib import Path

from torch import nn

from hf_quant.auto import auto_plan, check_search
from hf_quant.calibration import calibrate as record
from hf_quant.cards import CARD, find_card, hub_id, merge_cards, model_card, read_card
from hf_quant.checkpoint import workspace
from hf_quant.cli._models import (
    Source,
    check_file,
    check_not_quantized,
    check_one_model,
    check_writable,
    copy_side_files,
    find_source,
    load_model,
    load_tokenizer,
    meta_model,
    parse_device,
    progress_wanted,
)
from hf_quant.cli._parser import config_from_args
from hf_quant.cli._pipelines import load_pipeline, plan_pipeline
from hf_quant.cli._push import WEIGHT_FILES, prepare, push
from hf_quant.cli._terminal import print_plan
from hf_quant.config import QuantizerConfig
from hf_quant.evaluate import bits_per_weight
from hf_quant.planning import QuantPlan
from hf_quant.planning import plan as make_plan
from hf_quant.quantize import quantize_


def plan(args: argparse.Namespace) -> None:
    """Print the decision for every module."""
    config, source = config_from_args(args), find_source(args.model)
    if config.is_auto:
        _search(args, source, config)
    else:
        _print_plan(args, source, config)


def _search(args: argparse.Namespace, source: Source, config: QuantizerConfig) -> tuple[nn.Module, QuantPlan]:
    """Load the model in 16 bit, choose the scheme of each layer, and print the plan."""
    if source.kind == "pipeline":
        raise ValueError(
            "weights auto: the components of a pipeline are searched one by one in Python, with the pipeline as data, "
            "see docs/auto.md"
        )
    check_not_quantized(source)
    check_search(meta_model(source, dtype=args.dtype, trust_remote_code=args.trust_remote_code), config)
    model = load_model(source, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    options = {"device": config.quantization_device, "progress": progress_wanted()}
    found = auto_plan(model, config, **options)
    print_plan(found)
    return model, found


def _print_plan(args: argparse.Namespace, source: Source, config: QuantizerConfig) -> dict[str, QuantizerConfig]:
    """Print the plan, and return {component: config} of a pipeline, or {"": config} of one model."""
    if source.kind == "pipeline":
        return plan_pipeline(source, config, dtype=args.dtype)
    check_not_quantized(source)
    model = meta_model(source, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    print_plan(make_plan(model, config))
    return {"": config}


def quantize(args: argparse.Namespace) -> None:
    """Quantize MODEL into OUT, and upload it if --push is given."""
    config = config_from_args(args)
    if args.private and args.push is None:
        raise ValueError("--private belongs to --push, which says where to upload: give both, or none")
    if args.device is not None:
        config.quantization_device = str(parse_device(args.device))
    source = find_source(args.model)
    check_out(args.out, source, force=args.force)
    configs = {"": config} if config.is_auto else _print_plan(args, source, config)
    target = None if args.push is None else prepare(args.push, private=args.private, force=args.force)
    # Saved beside, then moved: neither an error nor Ctrl-C leaves half a checkpoint in OUT.
    with workspace(args.out) as place:
        check_out(args.out, source, force=args.force)  # another command may have written it since
        staged = place / "checkpoint"
        staged.mkdir()
        start = time.perf_counter()
        if source.kind == "pipeline" and not config.is_auto:
            model = load_pipeline(source, configs, dtype=args.dtype)
        elif config.is_auto:
            model, found = _search(args, source, config)
            quantize_(model, config, quant_plan=found, progress=progress_wanted())
        else:
            model = load_model(source, dtype=args.dtype, config=configs[""], trust_remote_code=args.trust_remote_code)
        loaded = time.perf_counter()
        model.save_pretrained(staged, max_shard_size=args.max_shard_size)
        if source.kind == "transformers":
            copy_side_files(source, staged)
        _write_card(source, staged, args.out, None if target is None else target.repo_id)
        print(f"\nloaded and quantized in {loaded - start:.1f} s, saved in {time.perf_counter() - loaded:.1f} s")
        parts = {part: getattr(model, part) if part else model for part in configs}
        bits = {part: bits_per_weight(module) for part, module in parts.items()}
        del model, parts
        _move(staged, args.out)
    for part, value in bits.items():
        size = sum(path.stat().st_size for path in (args.out / part).glob("*.safetensors"))
        label = "weights as they were" if value is None else f"{value:.3f} bits per quantized weight"
        print(f"{args.out / part}: {size / 1e6:.2f} MB on disk, {label}")
    if target is not None:
        push(args.out, target)


def calibrate(args: argparse.Namespace) -> None:
    """Write the statistics of a model's inputs to a file."""
    if args.output.suffix != ".safetensors":
        raise ValueError(f"{args.output} does not end in .safetensors, by which `--calibrate` knows such a file")
    check_file(args.output, "--output")
    config, source = config_from_args(args), find_source(args.model)
    check_one_model(
        source, "calibrate", "PIPELINE/text_encoder; a denoiser takes a function that runs the pipeline, in Python"
    )
    check_not_quantized(source)
    device = str(parse_device(args.device))
    model = load_model(source, dtype=args.dtype, device=device, trust_remote_code=args.trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=args.trust_remote_code) if args.text is not None else None
    options = {"num_tokens": args.tokens, "progress": progress_wanted()}
    statistics = record(model, args.text, config=config, tokenizer=tokenizer, **options)
    statistics.save(args.output)
    size = args.output.stat().st_size
    print(f"{args.output}: inputs of {len(statistics.statistics)} layers, {size / 1e3:.0f} kB")


def check_out(out: Path, source: Source, *, force: bool) -> None:
    """Raise ValueError if OUT is a file, the model itself, not writable, or not empty without `force`."""
    if out.resolve().exists() and not out.resolve().is_dir():
        raise ValueError(f"{out} is a file; OUT is a directory")
    if Path(source.name).is_dir() and out.resolve() == Path(source.name).resolve():
        raise ValueError(f"OUT is the model itself ({out}); it is read while OUT is written")
    if out.resolve().is_dir() and any(out.resolve().iterdir()) and not force:  # "new/../old" is old
        raise ValueError(f"{out} is not empty; --force replaces the checkpoint in it")
    check_writable(out)


def _move(staged: Path, out: Path) -> None:
    """Move a complete checkpoint to OUT; old weights in OUT are removed, files of the same names are replaced."""
    for pattern in WEIGHT_FILES:
        for old in list(out.rglob(pattern)):
            if (staged / old.relative_to(out).parent).is_dir():
                old.unlink()
    for path in sorted(p for p in staged.rglob("*") if p.is_file()):
        target = out / path.relative_to(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)


def _write_card(source: Source, staged: Path, out: Path, repository: str | None) -> None:
    """Put the model card beside the weights; the text of a card that somebody has written into OUT is kept."""
    existing = read_card(out / CARD) if (out / CARD).is_file() else None
    if existing is None and (out / CARD).is_file():  # its metadata cannot be read: leave it
        return
    is_local = Path(source.name).is_dir()
    base, base_card = (hub_id(source.name), find_card(source.name)) if is_local else (source.name, None)
    try:
        made = model_card(staged, repo_id=repository, base_model=base, base_card=base_card)
    except ValueError as error:  # hours of quantizing must not be lost because of a card
        print(f"no model card: {error}")
        return
    merge_cards(existing, made).save(staged / CARD)
