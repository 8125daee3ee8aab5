"""Speed, memory and error of a diffusion model's denoising loop: 16 bit, our schemes, other libraries, in one run.

    python scripts/bench_pipeline.py --model flux.1-dev --scheme fp8-dynamic,int8-dynamic,int4 --compile --rivals
    python scripts/bench_pipeline.py --model flux.1-dev --scheme fp8-dynamic --attention int8 --compile
    python scripts/bench_pipeline.py --model cogvideox-5b --scheme int8-dynamic --compile --blocks 2 --steps 3
    python scripts/bench_pipeline.py --model tiny --scheme int8-dynamic,int4      # the logic on a CPU, no real number

The models have the published architecture, resolution and number of tokens (diffusion/models.py) and random weights
with heavy tails and outlier channels (diffusion/run.py says how; --weights normal has neither); nothing is downloaded.
A loop runs in latents: no text encoder, no VAE; embeddings of the prompt are random.

Columns: seconds per step, the median over --rounds loops of all variants in turns, and half of their range; seconds of
an image with the published number of steps; speed against 16 bit as it is and compiled; memory of the transformer's
weights and the highest allocation of a call with them (CUDA only); SNR in dB against 16-bit eager, of single calls
that were given the same latents (the worst of 5), and of the latents at the end of the loop. "~" marks what was
extrapolated: with --blocks k, the time and bytes of the published number of blocks from those of k and 2 k groups
(errors are those of the model with 2 k); the seconds of an image where --steps are fewer.
"""

import argparse
import json
import math
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.schemes import parse_spec
from diffusion.bench import (
    BASE,
    RIVALS,
    SCHEMES,
    Subject,
    Variant,
    add_variant,
    measure,
    missing_rivals,
    nbytes,
    pair_of_sizes,
    quantized,
    rival,
    seconds_per_step,
    spread,
)
from diffusion.models import MODELS
from diffusion.run import NORMAL, TRAINED_LIKE, make_step, random_model
from diffusion.spec import DiffusionModel, shrunk
from gpulab.timing import environment, environment_line, gpu, installed
from hf_quant.planning import format_table


WEIGHTS = {"trained-like": TRAINED_LIKE, "normal": NORMAL}
TINY = {"tiny": "flux.1-dev", "tiny-cogvideox": "cogvideox-5b"}


def model_spec(name: str) -> DiffusionModel:
    """A published model, or a tiny version of one."""
    return shrunk(MODELS[TINY[name]], blocks=4) if name in TINY else MODELS[name]


def make_variants(base: torch.nn.Module, subject: Subject, args: argparse.Namespace) -> list[Variant]:
    """16 bit, each scheme, each rival that is installed."""
    compiled = None
    if args.compile:
        compiled = {"backend": args.backend} if args.backend else {"mode": args.compile_mode}
    found: list[Variant] = []
    add = partial(add_variant, found, subject, compiled=compiled)
    add(BASE, lambda: base)
    for scheme in args.scheme:
        name = scheme if args.attention is None else f"{scheme}, {args.attention} attention"
        start = time.perf_counter()
        fields = SCHEMES.get(scheme) or parse_spec(scheme)
        add(name, partial(quantized, base, fields, args.attention))
        print(f"{name}: quantized in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if args.rivals:
        for name in RIVALS:
            if name not in missing_rivals():
                add(name, partial(rival, base, subject.spec, name))
    return found


def record(variant: Variant, subject: Subject) -> dict[str, Any]:
    """Make the JSON record of one measured variant."""
    if variant.model is None:
        return {"name": variant.name, "failure": variant.failure}
    seconds, size = seconds_per_step(variant, subject), nbytes(variant, subject)
    return {
        "name": variant.name,
        "seconds_per_step": seconds,
        "spread": spread(variant),
        "seconds_per_image": seconds * subject.full.steps,
        "steps_run": variant.steps,
        "transformer_bytes": size,
        "peak_bytes": None if variant.peak is None else size + variant.peak,
        "call_snr_db": _decibels(variant.worst),
        "end_snr_db": _decibels(variant.end),
        "extrapolated": subject.smaller is not None,
    }


def _decibels(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "same" if value == math.inf else value


def report(records: list[dict[str, Any]], subject: Subject) -> str:
    """The table."""
    of = {one["name"]: one["seconds_per_step"] for one in records if "failure" not in one}
    eager, compiled = of[f"{BASE}, eager"], of.get(f"{BASE}, compiled")
    blocks = "~" if subject.smaller is not None else ""
    header = ("transformer", "s/step", "+-", f"s of {subject.full.steps} steps", "x eager", "x compiled")
    rows = [(*header, "weights GB", "peak GB", "call SNR dB", "end SNR dB")]
    for one in records:
        if "failure" in one:
            continue
        seconds, peak = one["seconds_per_step"], one["peak_bytes"]
        few = blocks or ("~" if one["steps_run"] < subject.full.steps else "")
        rows.append(
            (
                one["name"],
                f"{blocks}{seconds:.4g}",
                f"{one['spread']:.0%}",
                f"{few}{one['seconds_per_image']:.4g}",
                f"{eager / seconds:.2f}",
                "" if compiled is None else f"{compiled / seconds:.2f}",
                f"{blocks}{one['transformer_bytes'] / 1e9:.4g}",
                "" if peak is None else f"{blocks}{peak / 1e9:.4g}",
                _snr(one["call_snr_db"]),
                _snr(one["end_snr_db"]),
            )
        )
    lines = [format_table(rows)]
    lines += [f"{one['name']}: FAILED: {one['failure']}" for one in records if "failure" in one]
    return "\n".join(lines)


def _snr(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.1f}"


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, *TINY], default="tiny")
    parser.add_argument(
        "--scheme",
        type=lambda text: [one for one in text.split(",") if one],
        default=["fp8-dynamic", "int8-dynamic", "int4"],
        help=f"separated by commas: {', '.join(SCHEMES)}, or FORMAT[:FIELD=VALUE]... of QuantizerConfig",
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="trained-like", help="distribution of random weights")
    parser.add_argument("--attention", choices=("int8",), help="8-bit attention in our schemes")
    parser.add_argument("--compile", action="store_true", help="each variant once more with compiled blocks")
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile")
    parser.add_argument("--backend", help="of torch.compile instead of its default: eager, ...")
    parser.add_argument("--steps", type=int, help="of a denoising loop (default: the published number)")
    parser.add_argument("--blocks", type=int, help="build 2 k groups of blocks, run k and 2 k, extrapolate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rivals", action="store_true", help="other libraries, where installed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.steps is not None and args.steps < 1:
        parser.error("--steps is below 1")
    if gpu() is None and args.model not in TINY:
        parser.error(f"{args.model} needs a GPU, and there is none; on a CPU: --model {' or '.join(TINY)}")
    return args


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if one of our schemes failed."""
    if not installed("diffusers"):
        print("bench_pipeline: diffusers is not installed", file=sys.stderr)
        return 2
    args = parse_args(arguments)
    device = gpu() or torch.device("cpu")
    full = model_spec(args.model)
    try:
        spec, smaller = pair_of_sizes(full, args.blocks)
    except ValueError as error:
        print(f"bench_pipeline: --blocks {args.blocks}: {error}", file=sys.stderr)
        return 2
    print(f"python {shlex.join(sys.argv)}\n{environment_line(device)}")
    if device.type == "cpu":
        print("no GPU: a tiny model, which shows that the variants run, not how fast real ones are; no peak memory")
    base = random_model(spec, device=device, weights=WEIGHTS[args.weights])
    subject = Subject(spec, full, smaller, make_step(spec, device=device), args.steps or full.steps, device)
    groups = "" if smaller is None else f", {spec.units} of {full.units} groups of blocks"
    what = f"{full.repo} ({spec.model_class}) with random weights, {args.weights}{groups}"
    print(f"{what}; {spec.size}; batch {spec.batch}", flush=True)
    variants = make_variants(base, subject, args)
    with torch._dynamo.config.patch(recompile_limit=256):  # all variants share the code of the blocks
        measure(variants, subject, args.rounds, say=partial(print, file=sys.stderr, flush=True))
    records = [record(variant, subject) for variant in variants]
    print(f"\n{report(records, subject)}")
    for name, reason in missing_rivals().items() if args.rivals else ():
        print(f"{name}: absent: {reason}")
    if args.json is not None:
        found = {"command": sys.argv, "environment": environment(device), "model": args.model, "steps": subject.steps}
        args.json.write_text(json.dumps({**found, "blocks": args.blocks, "variants": records}, indent=1) + "\n")
    ours = [one for one in records if one["name"].split(",")[0] in (BASE, *args.scheme)]
    return int(any("failure" in one for one in ours))


if __name__ == "__main__":
    sys.exit(main())
