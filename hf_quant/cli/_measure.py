"""`hf-quant inspect`, `eval` and `bench`: show and measure checkpoints."""

import argparse
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hf_quant.cards import measurements
from hf_quant.checkpoint import inspect_parts
from hf_quant.cli._models import (
    Source,
    check_file,
    check_not_quantized,
    find_source,
    load_model,
    load_tokenizer,
    meta_model,
    parse_device,
    progress_wanted,
)
from hf_quant.cli._parser import config_from_args, gives_scheme
from hf_quant.evaluate import (
    PeakMemory,
    Quality,
    Speed,
    bits_per_weight,
    check_causal,
    generation_speed,
    machine,
    quality,
    read_windows,
)
from hf_quant.planning import format_table


_MAX_WINDOW = 2048


def inspect(args: argparse.Namespace) -> None:
    """Print the contents of a quantized checkpoint, or of each quantized part of a pipeline."""
    summaries = inspect_parts(args.checkpoint, revision=args.revision)
    print("\n\n".join(f"{part}\n{summary}" if part else str(summary) for part, summary in summaries.items()))


def eval(args: argparse.Namespace) -> None:
    """Print perplexity and, with a reference, the distance to it."""
    loaded = _Loaded(args)
    tokenizer = None
    if args.text.suffix != ".npy":
        names = (args.model, args.reference) if args.reference is not None else (args.model,)
        tokenizers = (load_tokenizer(find_source(n), trust_remote_code=args.trust_remote_code) for n in names)
        tokenizer = next((t for t in tokenizers if t is not None), None)
    texts = (model.config.get_text_config() for model in loaded.models.values())
    longest = (getattr(text, "max_position_embeddings", None) or _MAX_WINDOW for text in texts)
    window = args.window or min(_MAX_WINDOW, args.max_tokens, *longest)
    ids = read_windows(args.text, tokenizer, window=window, max_tokens=args.max_tokens)
    reference = loaded.reference
    found = quality(loaded.models, ids, window=window, reference=reference, progress=progress_wanted())
    rows = [("model", "bits/weight", "perplexity")]
    if reference is not None:
        rows[0] += ("change", "KL per token (nats)", "same top token")
    for name, result in found.items():
        row = (name, bits_label(loaded.models[name]), f"{result.perplexity:.4f}")
        if name == reference:
            row += ("", "", "")
        elif reference is not None:
            change = result.perplexity / found[reference].perplexity - 1
            row += (f"{change:+.2%}", f"{result.kl:.5f}", f"{result.agreement:.2%}")
        rows.append(row)
    print(format_table(rows))
    count = next(iter(found.values())).num_tokens
    print(f"{count} predictions in windows of {window} tokens of {args.text}")
    if args.json is not None:
        details = f"{count:,} predictions in windows of {window} tokens"
        _write_json(args.json, loaded, quality=_quality_figures(args, found, reference, details))


def bench(args: argparse.Namespace) -> None:
    """Print load time, speed of `generate`, memory and, with a reference, the ratio to it."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    # Pages of a mapped 16-bit file are in memory only once they are read: by a first generation.
    loaded = _Loaded(
        args, lambda model: generation_speed(model, prompt_tokens=args.prompt_tokens, new_tokens=2, rounds=1)
    )
    speeds = generation_speed(
        loaded.models,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        progress=progress_wanted(),
    )
    base = None if loaded.reference is None else speeds[loaded.reference]
    ratio = () if base is None else ("x ref",)
    rows = [("model", "bits/weight", "load s", "peak MB", "prefill ms", *ratio, "decode tok/s", *ratio)]
    for name, speed in speeds.items():
        loading = (f"{loaded.seconds[name]:.2f}", f"{loaded.peaks[name] / 1e6:.0f}")
        prefill, decode = [f"{speed.prefill * 1e3:.1f}"], [f"{speed.decode:.1f}"]
        if base is not None:
            prefill.append(f"{base.prefill / speed.prefill:.2f}")
            decode.append(f"{speed.decode / base.decode:.2f}")
        rows.append((name, bits_label(loaded.models[name]), *loading, *prefill, *decode))
    print(format_table(rows))
    device = next(iter(loaded.models.values())).device
    count = torch.get_num_threads()
    threads = f" with {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
    print(
        f"batch 1, {args.prompt_tokens} + {args.new_tokens} tokens on {device}{threads}, the median of {args.rounds} "
        f"round{'s' if args.rounds > 1 else ''}; peak MB: by how much the memory in use grows while loading and in a "
        "first generation"
    )
    if args.json is not None:
        details = f"batch 1, {args.prompt_tokens} + {args.new_tokens} tokens"
        _write_json(args.json, loaded, **_speed_figures(args, loaded, speeds, details))


def _quality_figures(
    args: argparse.Namespace, found: dict[str, Quality], reference: str | None, details: str
) -> tuple[measurements.Quality, ...]:
    *_, measured = found.values()
    base = None if reference is None else found[reference]
    about = {"dataset": args.text.name, "details": details, "command": _command(args)}
    perplexity = base and base.perplexity
    figures = [measurements.Quality(metric="perplexity", value=measured.perplexity, reference=perplexity, **about)]
    if base is not None:
        figures.append(measurements.Quality(metric="KL per token to 16 bit (nats)", value=measured.kl, **about))
        figures.append(measurements.Quality(metric="same top token as 16 bit", value=measured.agreement, **about))
    return tuple(figures)


def _speed_figures(
    args: argparse.Namespace, loaded: "_Loaded", speeds: dict[str, Speed], details: str
) -> dict[str, tuple]:
    """Return speed and memory of the last model, beside those of the reference."""
    *_, name = speeds
    measured, reference = speeds[name], loaded.reference
    prefill, decode, peak = None, None, None
    if reference is not None:
        prefill, decode = 1e3 * speeds[reference].prefill, speeds[reference].decode
        peak = loaded.peaks[reference]
    rows = (
        measurements.SpeedRow("prefill", 1e3 * measured.prefill, "ms", prefill),
        measurements.SpeedRow("decode", measured.decode, "tokens/s", decode),
    )
    versions, _, device = machine().partition("; ")
    figures = {"speed": (measurements.Speed(device, versions, _command(args), rows, details),)}
    # A peak below the bytes of its model shows that memory in use before was reused: then no peak says anything.
    if all(loaded.peaks[n] >= model.get_memory_footprint() for n, model in loaded.models.items()):
        label = "peak while loading and in a first generation"
        figures["memory"] = (measurements.Memory(label, loaded.peaks[name], peak),)
    return figures


def _command(args: argparse.Namespace) -> str:
    """Return the command line that was typed, with names of files instead of paths on this machine."""
    shown = []
    for word in args.typed:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        path = Path(value)
        is_path = path.is_absolute() or path.exists() or path == args.json
        shown.append(f"{option}{equals}{path.name}" if value and is_path else word)
    return shlex.join(["hf-quant", *shown])


def _write_json(path: Path, loaded: "_Loaded", **figures: tuple) -> None:
    *_, model = loaded.models.values()
    found = measurements.Measurements(**figures, bits_per_weight=bits_per_weight(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found.to_dict(), indent=2) + "\n")


class _Loaded:
    """The models of a measurement, with the time and memory that loading them took."""

    def __init__(self, args: argparse.Namespace, warm_up: Callable[[dict[str, nn.Module]], object] | None = None):
        if args.json is not None:
            check_file(args.json, "--json")
        device = parse_device(args.device)
        config = config_from_args(args) if gives_scheme(args) else None
        source = find_source(args.model)
        wanted: dict[str, tuple[Source, object]] = {}
        self.reference: str | None = None  # name of the model to compare with
        if args.reference is not None:
            reference = find_source(args.reference)
            check_not_quantized(reference)
            self.reference = f"{args.reference} (reference)"
            wanted[self.reference] = (reference, None)
        wanted[args.model if config is None else f"{args.model} {args.weights or 'quantized'}"] = (source, config)
        self.models: dict[str, nn.Module] = {}  # the reference first
        self.seconds: dict[str, float] = {}  # of loading
        self.peaks: dict[str, int] = {}  # bytes by which the memory grows while loading and in `warm_up`
        for name, (source, scheme) in wanted.items():
            if source.kind != "transformers":
                raise ValueError(f"{source.name} is of diffusers; needs a causal language model")
            # Imports the model's code, which is not what `load s` and `peak MB` are about.
            options = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
            meta_model(source, **options)
            with PeakMemory(device) as memory:
                start = time.perf_counter()
                model = load_model(source, config=scheme, device=str(device), **options)
                self.seconds[name] = time.perf_counter() - start
                check_causal(model, name)
                if warm_up is not None:
                    warm_up({name: model})
            self.models[name], self.peaks[name] = model, memory.nbytes


def bits_label(model: nn.Module) -> str:
    """Return the true bits per quantized weight, or the dtype of a model that is not quantized."""
    bits = bits_per_weight(model)
    return str(model.dtype).removeprefix("torch.") if bits is None else f"{bits:.2f}"
