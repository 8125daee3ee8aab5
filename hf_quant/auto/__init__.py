"""Automatic bits: the scheme of each layer chosen for a budget, by what it costs the model."""

from hf_quant.auto.allocate import Unit, allocate
from hf_quant.auto.search import auto_plan, check_search, search


__all__ = ["Unit", "allocate", "auto_plan", "check_search", "search"]
