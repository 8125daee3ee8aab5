"""Blocks of Flux.1-dev and CogVideoX-5b at their native sizes; a section of gpu_suite.py.

Each model is built with one and with two groups of its blocks; a line through both times gives a step of the whole
model, so every second and byte here is extrapolated. The loop of diffusion/bench.py is the same as that of
bench_pipeline.py, which measures whole models.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from diffusion.bench import (
    BASE,
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
)
from diffusion.models import MODELS
from diffusion.run import make_step, random_model
from diffusion.spec import shrunk


class Part(NamedTuple):
    """Variants of a model that are measured in turns.

    Attributes:
        model: name in MODELS.
        label: of the records.
        compiled: whether blocks are compiled, beside running as they are.
        schemes: {name: (scheme, attention)}.
        rival: the library that takes part, None: none.
    """

    model: str
    label: str
    compiled: bool
    schemes: dict[str, tuple[str, str | None]]
    rival: str | None = None


EIGHT_BIT = {"fp8 attention": ("fp8-dynamic", "int8"), "int8 attention": ("int8-dynamic", "int8")}
FP8_ONLY = {name: scheme for name, scheme in EIGHT_BIT.items() if name.startswith("fp8")}
PARTS = (  # those that compile nothing first: they are sure to be done in time
    Part("flux.1-dev", "flux eager", False, {**EIGHT_BIT, "int4": ("int4", None)}, "torchao fp8 dynamic"),
    Part("cogvideox-5b", "cogvideox eager", False, {"int4": ("int4", None)}),
    Part("flux.1-dev", "flux compiled", True, FP8_ONLY, "torchao fp8 dynamic"),
    Part("cogvideox-5b", "cogvideox compiled", True, FP8_ONLY, "torchao fp8 dynamic"),
)
STEPS, ROUNDS = 2, 3


def tokens_of(name: str) -> int:
    """Count the tokens of one call of the published model: latents and prompt together."""
    size = MODELS[name].size
    return size.frames * (size.height // 2) * (size.width // 2) + size.text


def measure_part(part: Part, device: torch.device, *, tiny: bool) -> list[dict[str, Any]]:
    """A record of each variant."""
    full = shrunk(MODELS[part.model], blocks=4) if tiny else MODELS[part.model]
    spec, smaller = pair_of_sizes(full, 1)
    subject = Subject(spec, full, smaller, make_step(spec, device=device), STEPS, device)
    base = random_model(spec, device=device)
    compiled = ({"backend": "eager"} if tiny else {}) if part.compiled else None
    found: list[Variant] = []
    add_variant(found, subject, BASE, lambda: base, compiled=compiled)
    add = partial(add_variant, found, subject, eager=not part.compiled, compiled=compiled)
    for name, (scheme, attention) in part.schemes.items():
        add(name, partial(quantized, base, SCHEMES[scheme], attention))
    if part.rival is not None and part.rival not in missing_rivals():
        add(part.rival, partial(rival, base, spec, part.rival))
    measure(found, subject, 1 if tiny else ROUNDS)
    return records_of(part, found, subject)


def records_of(part: Part, found: list[Variant], subject: Subject) -> list[dict[str, Any]]:
    """Make the records for the targets: speed against 16 bit and a rival of the same part, seconds, weights."""
    seconds = {one.name: seconds_per_step(one, subject) for one in found if one.model is not None}
    eager, compiled = (seconds.get(f"{BASE}, {how}") for how in ("eager", "compiled"))
    theirs = next((value for name, value in seconds.items() if name.startswith(f"{part.rival}, ")), None)
    plain = nbytes(found[0], subject)
    records = []
    for one in found:
        name = one.name.removesuffix(", eager").removesuffix(", compiled")
        label = f"{part.label} {one.name if name == BASE else name}"
        record = {"op": "diffusion", "name": one.name, "candidate": label, "linear": "", "extrapolated": True}
        record["M"] = tokens_of(part.model)
        if one.model is None:
            records.append({**record, "failure": one.failure, "is_ours": name in part.schemes})
            continue
        size, step = nbytes(one, subject), seconds[one.name]
        record |= {"ms": step * 1e3, "bf16_ms": None if eager is None else eager * 1e3, "rivals_ms": {}}
        if name in part.schemes and theirs is not None:
            record["rivals_ms"] = {"torchao": theirs * 1e3}
        record |= {"s/image": step * subject.full.steps, "GB": size / 1e9, "of bf16 weights": size / plain}
        record |= {"call SNR dB": one.worst}
        record |= {"x eager bf16": eager / step} if eager is not None else {}
        record |= {"x compiled bf16": compiled / step} if compiled is not None else {}
        records.append(record)
    return records


def diffusion_runs(device: torch.device, *, tiny: bool) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Yield the measurements of the section, one part after the other."""
    if not tiny:
        torch._dynamo.config.recompile_limit = 64  # all variants share the code of the blocks
    for part in PARTS:
        yield partial(measure_part, part, device, tiny=tiny)
        gc.collect()
