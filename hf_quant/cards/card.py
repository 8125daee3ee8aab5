"""Makes model cards, merges them with those that are there, and writes them into uploads."""

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # comes with huggingface_hub
from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from hf_quant.cards import base as _base
from hf_quant.cards.base import NotOnHub, find_card, hub_id, is_hub_id, read_card
from hf_quant.cards.content import content, is_format_tag, tags_of
from hf_quant.cards.measurements import Measurements, as_measurements
from hf_quant.cards.serving import Export
from hf_quant.cards.source import CardSource, origin_of, read_source
from hf_quant.cards.text import render
from hf_quant.cards.usage import PLACEHOLDER, pipeline_tag
from hf_quant.checkpoint import Directory, holds_quantized


CARD = _base.CARD
_logger = logging.getLogger("hf_quant")
# At the end of each card: of what quantization it speaks, and a digest of its text, which an edit changes.
_MARK = re.compile(r"<!-- hf_quant card ([0-9a-f]{16}) ([0-9a-f]{16}) -->\s*$")
# The first paragraph of the cards that transformers and diffusers write where there is none.
_GENERIC = re.compile(
    r"^This is the model card of a \S+ (?:transformers|diffusers)[^\n]* that has been pushed on the Hub\. "
    r"This model card has been automatically generated\.$",
    re.MULTILINE,
)
_LICENSE_FIELDS = ("license", "license_name", "license_link")
_ORDER = (
    *("base_model", "base_model_relation", *_LICENSE_FIELDS),
    *("language", "library_name", "pipeline_tag", "tags"),
)


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
    """A card of a quantized model; `card.save("README.md")` writes it, `card.push_to_hub("user/name")` uploads it.

    Args:
        source: a quantized model of transformers or diffusers, a pipeline of diffusers with quantized parts, or the
            directory of any of these, of which configs and headers are read and no weights.
        measurements: what was measured, see `hf_quant.cards.measurements`, or a file of it. Without: the
            card says "not evaluated".
        repo_id: the repository of the card, which its snippets name.
        base_model: names on the Hub of what was quantized. Default: what the source says; a path is never written.
        base_card: the card of the base model, or a directory or file with it. Default: the one beside the model that
            was quantized, on this machine or on the Hub. Licence, language and task are copied from it.
        license: identifier of a licence, in the place of that.
        title: the heading. Default: the name of the repository, else that of the base model, else the class.
        token: for the Hub.

    Raises:
        ValueError: if nothing in the source is quantized, a name or figure cannot be right, or the measurements are of
            another model.
    """
    if repo_id is not None:
        _base.check_hub_id(repo_id, "repo_id")
    facts = read_source(source)
    own = _card_of(str(source), None) if isinstance(source, str | Path) else None
    base = _find_base(facts, base_model, base_card, _if_of(facts, own), token)
    return _make(facts, as_measurements(measurements), base, repo_id=repo_id, license=license, title=title)


def merge_cards(existing: ModelCard | None, card: ModelCard) -> ModelCard:
    """The card to keep where there is one already; `card` is of this package.

    The text of a card that somebody has written stays as it is, and so does a card of this package for the same
    quantization, which may hold measurements; what their metadata lack is added. Replaced are the hosts' generic
    cards, and cards of this package that nobody has edited and that speak of another model or quantization.
    """
    if existing is None:
        return card
    if _is_generic(existing) or (is_untouched(existing) and _subject(existing) != _subject(card)):
        return replace_card(existing, card)
    known, new = existing.data.to_dict(), card.data.to_dict()
    # A licence's name and link belong to the licence.
    left_out = () if known.get("license") is None else _LICENSE_FIELDS
    added = {key: value for key, value in new.items() if known.get(key) is None and key not in left_out}
    merged = ModelCard(str(existing), ignore_metadata_errors=True)
    tags = _tags(existing)
    if "hf_quant" in tags:  # of what was there before
        tags = [tag for tag in tags if not is_format_tag(tag)]
    for key, value in {**added, "tags": _union(tags, new["tags"])}.items():
        merged.data[key] = value
    return merged


def replace_card(existing: ModelCard, card: ModelCard) -> ModelCard:
    """`card` with what the metadata of another one say beyond it."""
    new = card.data.to_dict()
    of_another = _subject(existing) not in (None, _subject(card))  # model, or quantization
    left_out = {*new, *_ORDER} if of_another else new
    further = {key: value for key, value in existing.data.to_dict().items() if key not in left_out}
    tags = _union(new["tags"], [] if of_another else _tags(existing))
    return _assemble({**new, **further, "tags": tags}, card.text)


def is_untouched(card: ModelCard) -> bool:
    """Whether a card's text is as this package has written it."""
    found = _MARK.search(card.text)
    return found is not None and found[2] == _digest(card.text[: found.start()])


def repository_of(card: ModelCard) -> str | None:
    """The repository that a card of this package names in its snippet."""
    found = re.search(r'from_pretrained\("([^"]+)"', card.text)
    name = None if found is None else found[1]
    # The snippet of an export names the directory of an import.
    return name if is_hub_id(name) and "/" in name and name != PLACEHOLDER else None


def card_for_upload(
    source: Any, directory: Path | str, repo_id: str | None, *, token: str | bool | None = None
) -> None:
    """Put a card into the directory to which a quantized model or pipeline was saved to be uploaded.

    `directory` holds the host's README.md: its generic card, or that of the repository. It stays where the directory
    holds nothing quantized (adapters alone), or somebody's card whose metadata cannot be read.
    """
    path = Path(directory) / CARD
    existing = read_card(path) if path.is_file() else None
    if path.is_file() and existing is None:
        return
    try:
        if not holds_quantized(Directory(Path(directory))):
            return
        origin, is_quantized = origin_of(source)
        facts = replace(read_source(directory), origin=origin, origin_is_quantized=is_quantized)
        base = _find_base(facts, None, None, _if_of(facts, existing), token)
        card = _make(facts, Measurements(), base, repo_id=repo_id)
    except ValueError as error:  # an upload of hours does not fail for its card
        _logger.warning("the model card is the one of the host: %s", error)
        return
    merge_cards(existing, card).save(path)


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
    """A card of a checkpoint that was converted into, or from, another format.

    Args:
        directory: hf_quant's checkpoint.
        original: the directory of what was converted, whose card says what its base model and licence are.
        origin: see `origin_of`, of a model that was in memory.
        export: the other format, if it is that one which gets the card.
        measurements, repo_id, token: see `model_card`.

    Raises:
        ValueError: see `model_card`.
    """
    facts = read_source(directory)
    if origin is not None:
        facts = replace(facts, origin=origin[0], origin_is_quantized=origin[1])
    base = _find_base(facts, None, None, _card_of(str(original), None), token)
    return _make(facts, as_measurements(measurements), base, repo_id=repo_id, export=export)


class _Base(NamedTuple):
    """What is known of the model that was quantized: names on the Hub, and what is inherited from its card."""

    names: list[str]
    inherited: dict[str, Any]


def _find_base(
    facts: CardSource,
    names: str | Sequence[str] | None,
    card: ModelCard | Path | str | None,
    own: ModelCard | None,
    token: str | bool | None,
) -> _Base:
    """From what the caller gives, else from the card that is there, else from where the model was loaded from."""
    given = [names] if isinstance(names, str) else list(names or ())
    given = [_base.check_hub_id(name, "base_model") for name in given]
    if isinstance(card, str | Path):
        where, card = card, read_card(Path(card)) if Path(card).is_file() else _card_of(str(card), token)
        if card is None:
            raise ValueError(f"{where} has no model card that can be read")
    if given or card is not None:
        card = card if card is not None else _card_of(given[0], token)
        return _Base(given, {} if card is None else _base.inherited(card, given[0] if given else None))
    known = {} if own is None else _base.inherited(own, None)
    names = [] if own is None else _base.base_models(own)
    found = _Base(names, {}) if names else _from_origin(facts, token)
    others = {key: v for key, v in found.inherited.items() if "license" not in known or key not in _LICENSE_FIELDS}
    return _Base(found.names, {**others, **known})


def _if_of(facts: CardSource, card: ModelCard | None) -> ModelCard | None:
    """The card, but None if it is one of this package for another model or quantization."""
    return None if card is None or _subject(card) not in (None, facts.fingerprint) else card


def _from_origin(facts: CardSource, token: str | bool | None) -> _Base:
    """From the card of what the model was loaded from: of its base, or of the same quantized model."""
    name = hub_id(facts.origin)
    if facts.origin is None or (name is None and not _base.is_directory(facts.origin)):
        return _Base([], {})
    try:
        card = find_card(name or facts.origin, token=token)
    except NotOnHub:  # what looks like a name was a path of another machine
        return _Base([], {})
    if facts.origin_is_quantized or (card is not None and _base.describes_quantized(card)):
        return _Base([], {}) if card is None else _Base(_base.base_models(card), _base.inherited(card, name))
    return _Base([] if name is None else [name], {} if card is None else _base.inherited(card, name))


def _card_of(name: str, token: str | bool | None) -> ModelCard | None:
    try:
        return find_card(name, token=token)
    except NotOnHub:
        return None


def _make(
    facts: CardSource,
    figures: Measurements,
    base: _Base,
    *,
    repo_id: str | None,
    license: str | None = None,
    title: str | None = None,
    export: Export | None = None,
) -> ModelCard:
    bits = facts.bits_per_weight
    if None not in (figures.bits_per_weight, bits) and abs(figures.bits_per_weight - bits) > 0.01 * bits:
        raise ValueError(
            f"the measurements are of a model with {figures.bits_per_weight:.3f} bits per weight, this one has "
            f"{bits:.3f}: measure this one"
        )
    known = dict(base.inherited)
    if license is not None:
        known = {key: value for key, value in known.items() if key not in _LICENSE_FIELDS} | {"license": license}
    fields = {
        "base_model": base.names or None,
        "base_model_relation": "quantized",
        **{key: known.get(key) for key in (*_LICENSE_FIELDS, "language")},
        "library_name": facts.library,
        "pipeline_tag": known.get("pipeline_tag") or pipeline_tag(facts),
        "tags": tags_of(facts, export),
    }
    fields = {key: value for key, value in fields.items() if value is not None}
    values = content(facts, figures, fields, repo_id=repo_id, bases=base.names, title=title, export=export)
    text = render("card.jinja", values)
    return _assemble(fields, f"\n{text}\n<!-- hf_quant card {facts.fingerprint} {_digest(text)} -->\n")


def _assemble(fields: dict[str, Any], text: str) -> ModelCard:
    """A card whose metadata stand in one order."""
    ordered = {key: fields[key] for key in (*_ORDER, *fields) if key in fields}
    metadata = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=1000)
    return ModelCard(f"---\n{metadata}---\n{text}", ignore_metadata_errors=True)


def _digest(text: str) -> str:
    """Of the words in a text: the hosts and the Hub may change line ends."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def _subject(card: ModelCard) -> str | None:
    """Of which quantization a card of this package speaks."""
    found = _MARK.search(card.text)
    return None if found is None else found[1]


def _tags(card: ModelCard) -> list[str]:
    tags = card.data.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def _union(first: list[str], second: list[str]) -> list[str]:
    return list(dict.fromkeys([*first, *second]))


def _is_generic(card: ModelCard) -> bool:
    """Whether nobody has filled in a card that a host has made, or there is no text at all."""
    if not card.text.strip():
        return True
    found = _GENERIC.search(card.text)
    if found is None:
        return False
    template = ModelCard.from_template(ModelCardData(), model_description=found[0])
    return template.text.split() == card.text.split()
