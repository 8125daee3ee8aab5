"""Weights in low-bit training that `fully_shard` gathers as their codes: 1 byte for each value instead of 2 or 4.

A process quantizes the rows that it has, and codes and scales are gathered. A matrix with one scale needs a number of
every process: one all-reduce gets those of all weights, when the first of them is gathered for a forward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_quant.coded_weight import CodedWeight, to_gather
from hf_quant.kernels import quantize_two_way
from hf_quant.kernels.two_way.op import rounded, scales_of
from hf_quant.training.low_bit import LowBitModule, stores_rows
from hf_quant.training.products import RECIPES, Recipe, ternary_codes, ternary_scale


def gather_in_low_bits_(model: nn.Module) -> list[str]:
    """Let FSDP2 gather the weights of layers in low-bit training as codes; return the names of these weights.

    Call it after `fully_shard`, and before the first forward pass. Weights, gradients, optimizers and checkpoints stay
    as they are. The codes by columns, which the gradient of the input takes, are made of the codes by rows then, and
    have two roundings. Layers that store their weight transposed (GPT-2's) gather it in 16 bit.

        prepare_training_(model, "int8")
        for layer in [*model.model.layers, model]:
            fully_shard(layer)
        gather_in_low_bits_(model)

    Raises:
        ValueError: no weight of a layer in low-bit training is sharded by `fully_shard` along its rows.
    """
    weights = {}
    for name, module in model.named_modules():
        if not isinstance(module, LowBitModule) or RECIPES[module.low_bit.recipe].format is None or module.stored_as:
            continue
        for weight in module.quantized.weight_names_of(module):
            parameter = module._parameters[weight]
            if _is_cut_by_rows(parameter) and stores_rows(module, (weight,)):
                weights[f"{name}.{weight}" if name else weight] = parameter, RECIPES[module.low_bit.recipe]
    if not weights:
        raise ValueError(
            f"no weight of this {type(model).__name__} could be gathered in low bits: call prepare_training_, then "
            "fully_shard, then this. Weights of recipe 'int8_weights' are gathered as codes in any case; those of "
            "'sparse24' have no codes, and layers that store their weight transposed (GPT-2's) gather it in 16 bit"
        )
    shared = _SharedScales([pair for pair in weights.values() if _has_one_scale(*pair)])
    for parameter, recipe in weights.values():
        local = parameter._local_tensor
        gathered = _Gathered(parameter, recipe, shared)
        # FSDP2 asks the local tensor for these: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = gathered.before, CodedWeight.fsdp_post_all_gather
    return list(weights)


def _is_cut_by_rows(parameter: Any) -> bool:
    placements = getattr(parameter, "placements", None)
    return placements is not None and placements[-1].is_shard(0) and all(p.is_replicate() for p in placements[:-1])


def _has_one_scale(parameter: Tensor, recipe: Recipe) -> bool:
    """True if all rows of a matrix share a scale, and processes share the matrix."""
    return (recipe.is_ternary or recipe.scaling == "tensor") and parameter.dim() == 2


def _measure(weight: Tensor, recipe: Recipe) -> Tensor:
    """The number of each matrix [..., N, K] by which it gets its one scale: a sum or a maximum of magnitudes."""
    magnitudes = weight.float().abs()
    if weight.numel() == 0:
        return magnitudes.new_zeros(weight.shape[:-2])
    return magnitudes.sum((-2, -1)) if recipe.is_ternary else magnitudes.amax((-2, -1))


class _SharedScales:
    """The numbers of matrices with one scale, which all processes compute together."""

    def __init__(self, weights: list[tuple[Any, Recipe]]) -> None:
        self.weights = weights
        self.found: dict[int, Tensor] = {}  # {id of a parameter: its number}
        self.fresh: set[int] = set()  # not asked for yet since they were computed

    def of(self, parameter: Any, mesh: Any) -> Tensor:
        """Return the number of one weight; a backward pass takes those of its forward pass.

        Every process asks in the same order, so that all of them take part in the same reductions.
        """
        is_backward = torch._C._current_graph_task_id() != -1
        if id(parameter) not in self.found or not (is_backward or id(parameter) in self.fresh):
            self._compute(mesh)
        self.fresh.discard(id(parameter))
        return self.found[id(parameter)]

    def _compute(self, mesh: Any) -> None:
        parts = [_measure(p._local_tensor, recipe) for p, recipe in self.weights]
        device = parts[0].device if mesh.device_type == "cpu" else torch.device(mesh.device_type)
        # One reduction: the largest of what each process has found, and for sums all of it, each in its own column.
        numbers = torch.zeros(len(parts), mesh.size(), dtype=torch.float32, device=device)
        numbers[:, mesh.get_local_rank()] = torch.stack(parts).to(device)
        torch.distributed.all_reduce(numbers, group=mesh.get_group())
        for (p, recipe), row in zip(self.weights, numbers):
            self.found[id(p)] = row.sum() if recipe.is_ternary else row.amax()
        self.fresh = set(self.found)


class _Gathered:
    """One parameter on its way to other processes."""

    def __init__(self, parameter: Any, recipe: Recipe, shared: _SharedScales) -> None:
        self.parameter, self.recipe, self.shared = parameter, recipe, shared

    def before(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """The codes and scales of this process's rows, filled up to as many as the first process has."""
        weight = self.parameter._local_tensor.to(mesh.device_type)
        missing = -(-self.parameter.shape[0] // mesh.size()) - weight.shape[0]
        codes, scale = (part.view(*weight.shape[:-1], -1) for part in self._codes(weight, mesh))
        padding = (0, 0) * (weight.dim() - 1) + (0, missing)
        if missing:
            codes = F.pad(codes.view(torch.int8), padding).view(codes.dtype)
            scale = F.pad(scale, padding)
        return to_gather(codes, scale, mesh)

    def _codes(self, weight: Tensor, mesh: Any) -> tuple[Tensor, Tensor]:
        recipe, K = self.recipe, weight.shape[-1]
        if not recipe.is_ternary and recipe.scaling != "tensor":
            options = {"format": recipe.format, "scaling": recipe.scaling, "columns": False}
            return quantize_two_way(weight.reshape(-1, K), **options)[:2]
        one = _has_one_scale(self.parameter, recipe)
        number = self.shared.of(self.parameter, mesh) if one else _measure(weight, recipe)
        size = self.parameter.shape[-2:].numel()
        scale = ternary_scale(number / size) if recipe.is_ternary else scales_of(number, recipe.format, "tensor")
        scale = scale.view(-1, 1, 1).expand(-1, weight.shape[-2], 1).reshape(*weight.shape[:-1], 1).contiguous()
        if recipe.is_ternary:
            return ternary_codes(weight, scale), scale
        return rounded(weight.float() * (1 / scale), recipe.format), scale
