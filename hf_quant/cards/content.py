"""The sections of a card, as values of its template."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

from hf_quant._wording import first_few
from hf_quant.algorithms import default_algorithm
from hf_quant.cards import serving
from hf_quant.cards.measurements import Measurements
from hf_quant.cards.serving import Export
from hf_quant.cards.source import CardSource, Part
from hf_quant.cards.text import Markdown, code, plain, size
from hf_quant.cards.usage import not_recorded, reproduce, usage
from hf_quant.checkpoint import CheckpointRow, CheckpointSummary
from hf_quant.config import QuantizerConfig
from hf_quant.formats import FORMATS
from hf_quant.kv_cache import KVCacheConfig
from hf_quant.patterns import excludes, matches
from hf_quant.planning import MIN_WEIGHTS, schemes_from_list
from hf_quant.resolve import resolve_scheme
from hf_quant.scheme import LinearScheme


MAX_ROWS = 16  # of what is not quantized; the rest is summed up
MAX_NAMES = 12  # of modules in one cell
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_positions|\w*_embeddings?|wte|wpe|shared)\.weight$")
_FORMAT_TAG = re.compile(r"[1-8]-bit|kv-cache-\w+")
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$")


def formats_of(source: CardSource) -> list[str]:
    """Return the weight formats, the one with most bytes first."""
    sizes: Counter[str] = Counter()
    for part in source.parts:
        for row in part.summary.rows:
            if row.scheme is not None:
                sizes[row.scheme.weight.format] += row.nbytes
    return [name for name, _ in sizes.most_common()]


def caches_of(source: CardSource, export: Export | None) -> list[str]:
    """Return the formats of the KV caches; an export has none."""
    if export is not None:
        return []
    found = (part.config.kv_cache for part in source.parts)
    return sorted({KVCacheConfig.of(cache).format for cache in found if cache is not None})


def tags_of(source: CardSource, export: Export | None) -> list[str]:
    """Return the tags for the Hub."""
    formats = formats_of(source)
    bits = sorted({FORMATS[name].bits for name in formats})
    caches = [f"kv-cache-{name}" for name in caches_of(source, export)]
    tags = ["hf_quant", "quantized", *formats, *(f"{n}-bit" for n in bits), *caches]
    return tags if export is None else serving.tags(source, export, tags)


def is_format_tag(tag: str) -> bool:
    """Return True for those of `tags_of` that say how a model is quantized."""
    return tag in FORMATS or _FORMAT_TAG.fullmatch(tag) is not None


def content(
    source: CardSource,
    measurements: Measurements,
    data: dict[str, Any],
    *,
    repo_id: str | None,
    bases: list[str],
    title: str | None,
    export: Export | None,
) -> dict[str, Any]:
    """Return the values of `card.jinja`."""
    base, task = bases[0] if bases else None, data.get("pipeline_tag")
    made, unknown = reproduce(source, base), not_recorded(source, base)
    language, again = made if export is None else serving.reproduce(made, export)
    commands = dict.fromkeys(row.command for row in measurements.quality if row.command is not None)
    package = "'hf-quant[diffusers]'" if source.library == "diffusers" else "hf-quant"
    versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
    values = {
        "title": plain(title) if title is not None else _title(source, repo_id, base, export),
        "summary": _summary(source, bases, export),
        "serve": None,
        "served": None,
        "container": Markdown(f"checkpoint format {source.parts[0].config.format_version}"),
        "install": Markdown(f"pip install {package}"),
        "usage": Markdown(usage(source, repo_id, base, task)),
        "trust": source.auto_class is not None,
        "parts": [_part(part, export) for part in source.parts],
        "others": Markdown(", ".join(f"{code(name)} ({size(n)})" for name, n in source.others.items())),
        "versions": Markdown(versions or "hf_quant"),
        "dtype": Markdown(" and ".join(sorted({str(part.dtype).removeprefix("torch.") for part in source.parts}))),
        "before": size(source.nbytes_before),
        "after": size(source.nbytes),
        "ratio": Markdown(f"{source.nbytes / max(source.nbytes_before, 1):.1%}"),
        "memory": measurements.memory,
        "quality": measurements.quality,
        "quality_commands": Markdown(", ".join(map(code, commands))),
        "speed": measurements.speed,
        "language": Markdown(language),
        "reproduce": Markdown(again),
        "not_recorded": None if unknown is None else Markdown(unknown),
        "legal": _legal(data, bases),
    }
    return values if export is None else values | serving.sections(source, export, repo_id, task)


def _link(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})"


def _what(source: CardSource, export: Export | None) -> str:
    """Return e.g. "int4", "int4 and int8", "16 bit with an int8 KV cache", "fp8_e4m3 with int8 attention"."""
    formats, caches = formats_of(source), caches_of(source, export)
    attention = sorted({a for part in source.parts if (a := part.config.attention) is not None})
    weights = " and ".join(filter(None, (", ".join(formats[:-1]), *formats[-1:]))) or "16 bit"
    weights += f" with an {' or '.join(caches)} KV cache" if caches else ""
    return weights + (f" with {attention[0]} attention" if attention else "")


def _title(source: CardSource, repo_id: str | None, base: str | None, export: Export | None) -> Markdown:
    if repo_id is not None:
        return Markdown(repo_id.rpartition("/")[2])
    name = base.rpartition("/")[2] if base is not None else source.class_name or "A model"
    return Markdown(f"{name} in {_what(source, export)}")


def _summary(source: CardSource, bases: list[str], export: Export | None) -> Markdown:
    name = " and ".join(map(_link, bases)) or ("A model" if source.class_name is None else code(source.class_name))
    bits = source.bits_per_weight
    weights = "" if bits is None else f", {bits:.3f} bits per quantized weight"
    origin = source.parts[0].config.imported_from
    made = "quantized by hf_quant" if origin is None else f"quantized by {origin['method']}, imported by hf_quant"
    return Markdown(
        f"{name} in {_what(source, export)}, {made}{weights}: {size(source.nbytes_before)} -> {size(source.nbytes)}."
    )


def _legal(data: dict[str, Any], bases: list[str]) -> Markdown:
    base = f"Base model: {', '.join(map(_link, bases))}." if bases else "The base model is not recorded."
    licence = data.get("license")
    if licence is None:
        return Markdown(f"{base} Its licence is not recorded here and applies to this model, too.")
    named = code(data.get("license_name") or (", ".join(licence) if isinstance(licence, list) else licence))
    link = data.get("license_link")
    where = f" ({code(link)})" if link else ""
    return Markdown(f"{base} Licence: {named}{where}.")


# Quantization.


def _part(part: Part, export: Export | None) -> dict[str, Any]:
    summary, config = part.summary, part.config
    quantized = [row for row in summary.rows if row.scheme is not None]
    totals = f"{size(part.nbytes_before)} -> {size(summary.nbytes)}"
    if quantized:
        count = sum(row.count for row in quantized)
        modules = f"{count} module{'s' if count > 1 else ''}"
        totals = f"{modules} quantized, {summary.bits_per_weight:.3f} bits per weight; {totals}."
    else:
        totals = f"The weights are as they were ({size(summary.nbytes)})."
    if part.name and part.class_name is not None:
        totals = f"{code(part.class_name)}: {totals}"
    cache = None
    if config.kv_cache is not None and export is None:
        fields = KVCacheConfig.of(config.kv_cache).to_dict()
        fields = ", ".join(f"{name} {value}" for name, value in fields.items() if name != "format")
        cache = f"`generate` keeps keys and values in {KVCacheConfig.of(config.kv_cache).format}"
        cache = Markdown(cache + (f" ({fields})." if fields else "."))
    return {
        "name": None if not part.name else code(part.name),
        "totals": Markdown(totals),
        "schemes": _scheme_rows(part, export),
        "kept": _kept_rows(summary, config),
        "cache": cache,
        "calibration": _calibration(config),
        "attention": None if config.attention is None else Markdown(f"Scores of attention are in {config.attention}."),
    }


def _calibration(config: QuantizerConfig) -> Markdown | None:
    """Return a sentence on the data that a part was calibrated with."""
    record = config.calibrated_with
    if record is None:
        return None
    tokens = f", {record['num_tokens']:,} tokens" if "num_tokens" in record else ""
    tokens += f" in sequences of up to {record['length']}" if "length" in record else ""
    digest = f" (SHA-256 of the tokens: {code(record['sha256'])})" if "sha256" in record else ""
    written = f", seed {record['seed']}, temperature {record['temperature']}" if "seed" in record else ""
    return Markdown(f"Calibrated with {code(record['data'])}{tokens}{written}{digest}.")


def _scheme_rows(part: Part, export: Export | None) -> list[dict[str, Any]]:
    """Return a row for each scheme of the plan; in exports `cpu_activation` is left out."""
    folded: dict[LinearScheme, list[str]] = {}
    for group in part.config.plan or []:
        folded.setdefault(LinearScheme.from_dict(group["scheme"]), []).extend(group["modules"])
    counts = Counter(schemes_from_list(part.config.plan).values())
    rows = []
    for scheme, names in folded.items():
        found = [row for row in part.summary.rows if row.scheme == scheme]
        nbytes, weights = sum(row.nbytes for row in found), sum(row.num_weights for row in found)
        rows.append(
            {
                "scheme": Markdown(str(scheme if export is None else replace(scheme, cpu_activation=None))),
                "bits": Markdown(f"{8 * nbytes / weights:.3f}" if weights else ""),
                "modules": Markdown(first_few([code(name or "(model)") for name in names], MAX_NAMES)),
                "count": counts[scheme],
                "algorithm": Markdown(", ".join(_algorithms(part, scheme))),
                "size": size(nbytes),
            }
        )
    return rows


def _algorithms(part: Part, scheme: LinearScheme) -> list[str]:
    """Return the algorithms that chose the codes of a scheme, as far as the config names them."""
    config = part.config
    if config.imported_from is not None:
        return [f"of {config.imported_from['method']}"]
    found = set()
    for fields in config.all_fields():
        resolved, algorithm = resolve_scheme(fields, part.dtype)
        if resolved.weight == scheme.weight:
            found.add(algorithm or default_algorithm(scheme.weight))
    return sorted(found)


def _kept_rows(summary: CheckpointSummary, config: QuantizerConfig) -> list[dict[str, Any]]:
    """Return rows for unquantized tensors: matrices by name, the largest first, then all vectors together."""
    kept = [row for row in summary.rows if row.scheme is None]
    matrices = sorted((r for r in kept if "x" in r.shape), key=lambda row: (-row.nbytes, row.modules, row.shape))
    vectors = [row for row in kept if "x" not in row.shape]
    rows = [(code(f"{row.modules} [{row.shape}]"), [row], _reason(row, config)) for row in matrices[:MAX_ROWS]]
    rows += [(f"{len(matrices) - MAX_ROWS} more", matrices[MAX_ROWS:], "")] if len(matrices) > MAX_ROWS else []
    rows += [("vectors (norms, biases)", vectors, "")] if vectors else []
    found = []
    for name, group, reason in rows:
        bits = sorted({round(8 * row.nbytes / max(row.num_weights, 1)) for row in group})
        found.append(
            {
                "modules": Markdown(name),
                "dtype": Markdown(" and ".join(map(str, bits)) + " bit"),
                "count": sum(row.count for row in group),
                "size": size(sum(row.nbytes for row in group)),
                "reason": Markdown(reason),
            }
        )
    return found


def _reason(row: CheckpointRow, config: QuantizerConfig) -> str:
    """Return the reason why a tensor is not quantized, if the config, its size or its name shows it."""
    template = row.modules
    name = template.rpartition(".")[0].replace("*", "0")
    for pattern, entry in config.modules.items():
        if entry is None and (pattern == template.rpartition(".")[0] or matches(pattern, name)):
            return f"kept by {code(f'modules[{pattern!r}]')}"
    for pattern in config.modules_to_not_convert or ():
        if excludes(pattern, name):
            return f"kept by {code(f'modules_to_not_convert: {pattern!r}')}"
    if row.num_weights < MIN_WEIGHTS * row.count:
        return f"fewer than {MIN_WEIGHTS} weights"
    if _HEADS.search(template):
        return "output embedding"
    return "embedding" if _EMBEDDINGS.search(template) else ""
