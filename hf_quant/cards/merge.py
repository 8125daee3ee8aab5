"""Merge a new card with the card that is already there: text that a person wrote is kept."""

import hashlib
import re
from typing import Any

import yaml  # a dependency of huggingface_hub
from huggingface_hub import ModelCard, ModelCardData

from hf_quant.cards.base import is_hub_id
from hf_quant.cards.content import is_format_tag
from hf_quant.cards.usage import PLACEHOLDER


# The last line of each card is a digest of its text: an edit changes the text but not the digest. Cards written
# before 2026-11-23 have a second number in front of it.
_MARK = re.compile(r"<!-- hf_quant card (?:[0-9a-f]{16} )?([0-9a-f]{16}) -->\s*$")
# The first paragraph of the cards that transformers and diffusers write into a repository without a card.
_GENERIC = re.compile(
    r"^This is the model card of a \S+ (?:transformers|diffusers)[^\n]* that has been pushed on the Hub\. "
    r"This model card has been automatically generated\.$",
    re.MULTILINE,
)
LICENSE_FIELDS = ("license", "license_name", "license_link")
_ORDER = (
    *("base_model", "base_model_relation", *LICENSE_FIELDS),
    *("language", "library_name", "pipeline_tag", "tags"),
)


def merge_cards(existing: ModelCard | None, card: ModelCard) -> ModelCard:
    """Return the card to keep where there is one already; `card` is a new card of this package.

    A card that a person has written or edited keeps its text, and its metadata gain the missing fields. Replaced are
    the hosts' generic cards, and unedited cards of this package: they may be about other weights.
    """
    if existing is None:
        return card
    if is_untouched(existing) or _is_generic(existing):
        return replace_card(existing, card)
    known, new = existing.data.to_dict(), card.data.to_dict()
    # A licence's name and link belong to the licence.
    left_out = () if known.get("license") is None else LICENSE_FIELDS
    added = {key: value for key, value in new.items() if known.get(key) is None and key not in left_out}
    tags = _tags(existing)
    if "hf_quant" in tags:  # then the format tags are those of an earlier quantization
        tags = [tag for tag in tags if not is_format_tag(tag)]
    merged = ModelCard(str(existing), ignore_metadata_errors=True)
    for key, value in {**added, "tags": [*dict.fromkeys([*tags, *new["tags"]])]}.items():
        merged.data[key] = value
    return merged


def replace_card(existing: ModelCard, card: ModelCard) -> ModelCard:
    """Return `card` with the metadata of another card that it does not have itself."""
    new = card.data.to_dict()
    # Base model and licence in an unedited card are those of the model that it was made for.
    left_out = {*new, *_ORDER} if is_untouched(existing) else new
    further = {key: value for key, value in existing.data.to_dict().items() if key not in left_out}
    tags = [tag for tag in _tags(existing) if not is_format_tag(tag)]
    return assemble({**new, **further, "tags": [*dict.fromkeys([*new["tags"], *tags])]}, card.text)


def mark(text: str) -> str:
    """Return the text of a card with the mark that `is_untouched` reads."""
    return f"\n{text}\n<!-- hf_quant card {_digest(text)} -->\n"


def is_untouched(card: ModelCard) -> bool:
    """Return True if the text of a card is as this package has written it."""
    found = _MARK.search(card.text)
    return found is not None and found[1] == _digest(card.text[: found.start()])


def repository_of(card: ModelCard) -> str | None:
    """Return the repository that the loading snippet of a card of this package names."""
    found = re.search(r'from_pretrained\("([^"]+)"', card.text)
    name = None if found is None else found[1]
    # The snippet of an export names a directory: the OUT of `hf-quant import`.
    return name if is_hub_id(name) and "/" in name and name != PLACEHOLDER else None


def assemble(fields: dict[str, Any], text: str) -> ModelCard:
    """Return a card whose metadata are in one fixed order."""
    ordered = {key: fields[key] for key in (*_ORDER, *fields) if key in fields}
    metadata = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=1000)
    return ModelCard(f"---\n{metadata}---\n{text}", ignore_metadata_errors=True)


def _digest(text: str) -> str:
    """Return a digest of the words in a text: hosts and the Hub may change line ends."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def _tags(card: ModelCard) -> list[str]:
    tags = card.data.get("tags")
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []


def _is_generic(card: ModelCard) -> bool:
    """Return True if a card is a host's template that nobody has filled in, or has no text at all."""
    if not card.text.strip():
        return True
    found = _GENERIC.search(card.text)
    if found is None:
        return False
    template = ModelCard.from_template(ModelCardData(), model_description=found[0])
    return template.text.split() == card.text.split()
