"""Automatic bits: the scheme of each layer chosen for a budget, by what it costs the model and by its speed."""

from hf_quant.auto.allocate import Unit, allocate
from hf_quant.auto.frontier import Frontier, autoquant
from hf_quant.auto.pipeline import PIPELINE_PARTS, auto_plans
from hf_quant.auto.search import auto_plan, check_search, search


__all__ = [
    "Frontier",
    "PIPELINE_PARTS",
    "Unit",
    "allocate",
    "auto_plan",
    "auto_plans",
    "autoquant",
    "check_search",
    "search",
]
