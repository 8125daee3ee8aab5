"""Model cards: contents, quality, loading snippet and licence of quantized models, for the Hub.

`model_card` makes a card, `merge_cards` merges it with the card that is already there, and `card_for_upload` runs at
the end of each push of a quantized model to the Hub, where it replaces the host's generic card.
"""

from hf_quant.cards.base import CARD, NotOnHub, find_card, hub_id, read_card
from hf_quant.cards.card import converted_card, model_card
from hf_quant.cards.classes import diffusers_class
from hf_quant.cards.measurements import Measurements, read_measurements
from hf_quant.cards.merge import is_untouched, merge_cards, replace_card, repository_of
from hf_quant.cards.serving import Export
from hf_quant.cards.source import origin_of
from hf_quant.cards.upload import card_for_upload


__all__ = [
    "CARD",
    "Export",
    "Measurements",
    "NotOnHub",
    "card_for_upload",
    "converted_card",
    "diffusers_class",
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
