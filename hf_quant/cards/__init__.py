"""Model cards of quantized models: what is in them, how well it was measured, how to load it, under which licence.

`model_card` makes a card; `merge_cards` brings it together with the one that is there already; `card_for_upload` is
what a push of a quantized model to the Hub ends with, in the place of the host's generic card.
"""

from hf_quant.cards.base import NotOnHub, find_card, hub_id, read_card
from hf_quant.cards.card import (
    CARD,
    card_for_upload,
    converted_card,
    is_untouched,
    merge_cards,
    model_card,
    replace_card,
    repository_of,
)
from hf_quant.cards.measurements import Measurements, read_measurements
from hf_quant.cards.serving import Export
from hf_quant.cards.source import origin_of


__all__ = [
    "CARD",
    "Export",
    "Measurements",
    "NotOnHub",
    "card_for_upload",
    "converted_card",
    "find_card",
    "hub_id",
    "is_untouched",
    "merge_cards",
    "model_card",
    "origin_of",
    "read_card",
    "read_measurements",
    "replace_card",
    "repository_of",
]
