"""Planning: decide which module gets which scheme, on which kernel, at what size, and why others stay in 16 bit."""

from hf_quant.planning.decide import HOST_RULES, MIN_WEIGHTS, NothingToQuantize, Rules, plan
from hf_quant.planning.names import MAX_PARTS, fold_names, unfold_name, unfold_names
from hf_quant.planning.records import PlanEntry, QuantPlan, resolved, schemes_from_list, schemes_to_list, updated
from hf_quant.planning.table import (
    PLAN_HEADER,
    add_mark,
    format_table,
    plan_losses,
    plan_rows,
    plan_totals,
    template,
)


__all__ = [
    "HOST_RULES",
    "MAX_PARTS",
    "MIN_WEIGHTS",
    "NothingToQuantize",
    "PLAN_HEADER",
    "PlanEntry",
    "QuantPlan",
    "Rules",
    "add_mark",
    "fold_names",
    "format_table",
    "plan",
    "plan_losses",
    "plan_rows",
    "plan_totals",
    "resolved",
    "schemes_from_list",
    "schemes_to_list",
    "template",
    "unfold_name",
    "unfold_names",
    "updated",
]
