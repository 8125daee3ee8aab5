"""Make the model card of a quantized model, a pipeline, a checkpoint directory or an export."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard
from torch import nn

from hf_quant.cards.base import (
    NotOnHub,
    base_models,
    check_hub_id,
    describes_quantized,
    find_card,
    hub_id,
    inherited,
    is_directory,
    read_card,
)
from hf_quant.cards.content import content, tags_of
from hf_quant.cards.measurements import Measurements, as_measurements
from hf_quant.cards.merge import LICENSE_FIELDS, assemble, mark
from hf_quant.cards.serving import Export
from hf_quant.cards.source import CardSource, read_source
from hf_quant.cards.text import render
from hf_quant.cards.usage import pipeline_tag


def model_card(
    source: "nn.Module | Path | str | Any",
    measurements: "Measurements | dict[str, Any] | Path | str | None" = None,
    *,
    repo_id: str | None = None,
    base_model: str | Sequence[str] | None = None,
    base_card: ModelCard | Path | str | None = None,
    license: str | None = None,
    title: str | None = None,
    token: str | bool | None = None,
) -> ModelCard:
    """Make the card of a quantized model.

    `card.save("README.md")` writes the result, `card.push_to_hub("user/name")` uploads it.

    Args:
        source: a quantized model of transformers or diffusers, a pipeline of diffusers with quantized parts, or the
            directory of any of these; of a directory, configs and headers are read and no weights.
        measurements: measured figures or a file of them, see `hf_quant.cards.measurements`. Without them the card
            says "not evaluated".
        repo_id: the repository of the card, which its snippets name.
        base_model: names on the Hub of the models that were quantized. Default: the names in the source; a path is
            never written.
        base_card: the card of the base model, or a directory or file with it. Default: the card beside the model that
            was quantized, on this machine or on the Hub. Licence, language and task are copied from it.
        license: identifier of a licence, which replaces the copied one.
        title: the heading. Default: the name of the repository, else the name of the base model, else the class.
        token: for the Hub.

    Raises:
        ValueError: if nothing in the source is quantized, a name or figure is invalid, or the measurements are of
            another model.
    """
    if repo_id is not None:
        check_hub_id(repo_id, "repo_id")
    facts = read_source(source)
    own = _card_of(source) if isinstance(source, str | Path) else None
    base = find_base(facts, base_model, base_card, own=own, token=token)
    return make_card(facts, as_measurements(measurements), base, repo_id=repo_id, license=license, title=title)


def converted_card(
    directory: Path | str,
    original: Path | str,
    *,
    origin: tuple[str | None, bool] | None = None,
    export: Export | None = None,
    measurements: "Measurements | dict[str, Any] | Path | str | None" = None,
    repo_id: str | None = None,
    token: str | bool | None = None,
) -> ModelCard:
    """Make the card of a checkpoint that was converted from another format, or of an export into another format.

    Args:
        directory: the checkpoint of hf_quant.
        original: the directory of the checkpoint that was converted; its card names the base model and the licence.
        origin: the result of `origin_of`, if a model in memory was exported.
        export: the other format, if the card is for the export.
        measurements, repo_id, token: see `model_card`.

    Raises:
        ValueError: see `model_card`.
    """
    facts = read_source(directory)
    if origin is not None:
        facts = replace(facts, origin=origin[0], origin_is_quantized=origin[1])
    base = find_base(facts, own=_card_of(original), token=token)
    return make_card(facts, as_measurements(measurements), base, repo_id=repo_id, export=export)


class Base(NamedTuple):
    """The model that was quantized: its names on the Hub, and the metadata that are copied from its card."""

    names: list[str]
    inherited: dict[str, Any]


def find_base(
    facts: CardSource,
    names: str | Sequence[str] | None = None,
    card: ModelCard | Path | str | None = None,
    *,
    own: ModelCard | None,
    token: str | bool | None,
) -> Base:
    """Find the base model: as the caller gives it, else in the model's own card, else where it was loaded from."""
    given = [names] if isinstance(names, str) else list(names or ())
    given = [check_hub_id(name, "base_model") for name in given]
    if isinstance(card, str | Path):
        where, card = card, read_card(Path(card)) if Path(card).is_file() else _card_of(card, token)
        if card is None:
            raise ValueError(f"{where} has no model card that can be read")
    if given or card is not None:
        card = card if card is not None else _card_of(given[0], token)
        return Base(given, {} if card is None else inherited(card, given[0] if given else None))
    known = {} if own is None else inherited(own, None)
    names = [] if own is None else base_models(own)
    found = Base(names, {}) if names else _from_origin(facts, token)
    others = {key: v for key, v in found.inherited.items() if "license" not in known or key not in LICENSE_FIELDS}
    return Base(found.names, {**others, **known})


def _from_origin(facts: CardSource, token: str | bool | None) -> Base:
    """Read the card at the origin of a model: the origin is the base model, or the same quantized model."""
    name = hub_id(facts.origin)
    if facts.origin is None or (name is None and not is_directory(facts.origin)):
        return Base([], {})
    try:
        card = find_card(name or facts.origin, token=token)
    except NotOnHub:  # a path of another machine that looks like a name
        return Base([], {})
    if facts.origin_is_quantized or (card is not None and describes_quantized(card)):
        return Base([], {}) if card is None else Base(base_models(card), inherited(card, name))
    return Base([] if name is None else [name], {} if card is None else inherited(card, name))


def _card_of(name: str | Path, token: str | bool | None = None) -> ModelCard | None:
    try:
        return find_card(str(name), token=token)
    except NotOnHub:
        return None


def make_card(
    facts: CardSource,
    figures: Measurements,
    base: Base,
    *,
    repo_id: str | None,
    license: str | None = None,
    title: str | None = None,
    export: Export | None = None,
) -> ModelCard:
    """Make a card of the collected facts. Raises ValueError if the figures are of a model with other true bits."""
    bits = facts.bits_per_weight
    measured = figures.bits_per_weight
    if measured is not None and bits is not None and abs(measured - bits) > 0.01 * bits:
        raise ValueError(
            f"the measurements are of a model with {measured:.3f} bits per weight, this one has "
            f"{bits:.3f}: measure this one"
        )
    known = dict(base.inherited)
    if license is not None:
        known = {key: value for key, value in known.items() if key not in LICENSE_FIELDS} | {"license": license}
    fields = {
        "base_model": base.names or None,
        "base_model_relation": "quantized",
        **{key: known.get(key) for key in (*LICENSE_FIELDS, "language")},
        "library_name": facts.library,
        "pipeline_tag": known.get("pipeline_tag") or pipeline_tag(facts),
        "tags": tags_of(facts, export),
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    values = content(facts, figures, fields, repo_id=repo_id, bases=base.names, title=title, export=export)
    return assemble(fields, mark(render("card.jinja", values)))
