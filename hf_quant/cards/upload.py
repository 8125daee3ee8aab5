"""Put a model card into the directory that a host is about to upload."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.constants import DEFAULT_REVISION

from hf_quant.cards.base import CARD, read_card
from hf_quant.cards.card import find_base, make_card
from hf_quant.cards.measurements import Measurements
from hf_quant.cards.merge import is_untouched, merge_cards
from hf_quant.cards.source import origin_of, read_source
from hf_quant.checkpoint import Directory, holds_quantized


_logger = logging.getLogger("hf_quant")


def card_for_upload(
    source: Any,
    directory: Path | str,
    repo_id: str | None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> None:
    """Put a card into the directory to which a quantized model or pipeline was saved to be uploaded.

    `directory` holds the host's README.md: its generic card, or the card of the repository. The README.md stays as it
    is if the directory holds nothing quantized (adapters alone), or if its metadata cannot be read.
    `revision` is the branch that the directory is uploaded to; None: the default branch.
    """
    path = Path(directory) / CARD
    existing = read_card(path) if path.is_file() else None
    if path.is_file() and existing is None:
        return
    try:
        if not holds_quantized(Directory(Path(directory))):
            return
        origin, is_quantized = origin_of(source)
        branch = None if revision == DEFAULT_REVISION else revision
        facts = replace(read_source(directory), origin=origin, origin_is_quantized=is_quantized, revision=branch)
        # An unedited card in the repository may be about the weights that this upload replaces.
        own = None if existing is None or is_untouched(existing) else existing
        card = make_card(facts, Measurements(), find_base(facts, own=own, token=token), repo_id=repo_id)
    except ValueError as error:  # an upload that takes hours must not fail because of its card
        _logger.warning("the model card is the one of the host: %s", error)
        return
    merge_cards(existing, card).save(path)
