"""Merge experts that another library stores one by one into the fused weights of transformers 5."""

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.compressed_tensors.experts import merging_rules
from hf_quant.convert.foreign import ForeignWeight
from hf_quant.scheme import BLOCK_SIZE


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Rule(NamedTuple):
    """Renaming rule: names of single layers -> the name of a fused weight."""

    sources: list[re.Pattern[str]]  # of the parts (gate and up), with the groups `prefix` and `expert`
    target: str


def merge_experts(model: "PreTrainedModel", weights: list[ForeignWeight]) -> list[ForeignWeight]:
    """Return the weights with experts fused into [E, N, K], by transformers' own rules for the model.

    Raises ValueError if experts of one layer differ in scheme, or one is missing.
    """
    known, rules = dict(model.named_modules()), expert_rules(model)
    merged: list[ForeignWeight] = []
    parts: dict[str, dict[tuple[int, int], ForeignWeight]] = {}
    for weight in weights:
        found = None if weight.module in known else match_expert(rules, weight.module)
        if found is None:
            merged.append(weight)
        else:
            name, expert, part = found
            parts.setdefault(name, {})[expert, part] = weight
    return merged + [_fuse(name, found) for name, found in parts.items()]


def expert_rules(model: "PreTrainedModel") -> list[_Rule]:
    """Return the rules by which transformers fuses the single layers of a model's experts."""
    rules: list[_Rule] = []
    for names, target in merging_rules(model):
        escaped = (re.escape(name).replace(r"\*", r"(?P<expert>[0-9]+)") for name in names)
        rules.append(_Rule([re.compile(rf"(?P<prefix>.*){name}") for name in escaped], target))
    return rules


def match_expert(rules: list[_Rule], module: str) -> tuple[str, int, int] | None:
    """Return (name of the fused weight, expert, part) of a layer, or None if it is no expert."""
    for rule in rules:
        for part, source in enumerate(rule.sources):
            match = source.fullmatch(module)
            if match is not None:
                return match["prefix"] + rule.target, int(match["expert"]), part
    return None


def _fuse(name: str, parts: dict[tuple[int, int], ForeignWeight]) -> ForeignWeight:
    experts, count = max(e for e, _ in parts) + 1, max(p for _, p in parts) + 1
    if len(parts) < experts * count:  # before there is a list of as many as a name claims
        raise ValueError(f"{name} is quantized for {len(parts)} of its {experts * count} layers only")
    ordered = [[parts[e, p] for p in range(count)] for e in range(experts)]
    first = ordered[0][0]
    kinds: set[Any] = {(weight.scheme, weight.shape) for weight in parts.values()}
    if len(kinds) > 1:
        raise ValueError(f"{name} is one tensor in hf_quant, but its experts are quantized differently: {kinds}")
    N, K = first.shape
    scheme = first.scheme
    if count > 1 and scheme.weight.granularity == "block" and N % BLOCK_SIZE:
        raise ValueError(f"{name} is one tensor in hf_quant, but its {count} parts have a scale of their own each")
    if scheme.weight.granularity == "tensor":  # gate and up have a scale each, here repeated for their rows
        scheme = replace(scheme, weight=replace(scheme.weight, granularity="row"))
    keys = tuple(key for row in ordered for weight in row for key in weight.keys)
    module, _, leaf = name.rpartition(".")
    input_scale = None if first.input_scale is None else partial(_common_input_scale, name, ordered)
    shape = (experts, count * N, K)
    return ForeignWeight(module, scheme, shape, keys, partial(_stack, name, ordered), leaf, input_scale)


def _common_input_scale(name: str, ordered: list[list[ForeignWeight]]) -> Tensor:
    """Read the one static scale of the inputs of all experts. Raises ValueError if theirs differ."""
    scales = [weight.input_scale().float().reshape(1) for row in ordered for weight in row if weight.input_scale]
    if any(not torch.equal(scale, scales[0]) for scale in scales):
        raise ValueError(f"{name} has one static scale of its input in hf_quant, but those of its experts differ")
    return scales[0]


def _stack(name: str, ordered: list[list[ForeignWeight]]) -> PackedWeight:
    """Concatenate parts along rows, and stack experts along a new first dimension.

    Raises ValueError if parts that share a global scale here have different ones.
    """
    rows = [[_by_rows(weight) for weight in row] for row in ordered]
    for row in rows:
        if any(packed.global_scale is not None and packed.global_scale != row[0].global_scale for packed in row):
            raise ValueError(
                f"{name} is one tensor in hf_quant, but its {len(row)} parts have a scale of their own each"
            )
    zero_points = [[part for packed in row if (part := packed.zero_point) is not None] for row in rows]
    global_scales = [part for row in rows if (part := row[0].global_scale) is not None]

    def stack(parts: list[list[Tensor]]) -> Tensor:
        return torch.stack([torch.cat(row) for row in parts])

    return PackedWeight(
        stack([[packed.qdata for packed in row] for row in rows]),
        stack([[packed.scale for packed in row] for row in rows]),
        stack(zero_points) if zero_points[0] else None,
        torch.cat(global_scales) if global_scales else None,
    )


def _by_rows(weight: ForeignWeight) -> PackedWeight:
    """Read a weight [N, K]; a scale of all of it is repeated for each row."""
    packed = weight.unpack()
    if weight.scheme.weight.granularity != "tensor":
        return packed
    return packed._replace(scale=packed.scale.expand(weight.shape[0], 1))
