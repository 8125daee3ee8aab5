"""Find the layers of a model that read one tensor, and let them share a product, or the codes of their input."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from hf_quant.modules._registry import check_model, quantized_class
from hf_quant.modules.inputs.shared_product import (
    FusedProjections,
    SharedProduct,
    rows_unsupported_reason,
    unsupported_reason,
)
from hf_quant.modules.inputs.shared_rows import SharedInput, SharedRows
from hf_quant.modules.inputs.siblings import find_siblings
from hf_quant.modules.linear import QuantLinear
from hf_quant.scheme import LinearScheme


_Model = TypeVar("_Model", bound=nn.Module)


def fusion_key(scheme: LinearScheme, K: int) -> Hashable:
    """The properties that siblings must have in common; `find_siblings` groups by them."""
    return scheme, K


def planned_projections(
    model: nn.Module, weights: Mapping[str, tuple[LinearScheme, tuple[int, ...]]]
) -> list[tuple[str, ...]]:
    """Names of the layers that `fuse_projections_` will put together, once they are quantized.

    `weights` is {module name: (scheme, shape [N, K])} of those that get quantized and are not tied.
    """
    linears = {
        name: fusion_key(scheme, shape[1])
        for name, (scheme, shape) in weights.items()
        if getattr(quantized_class(type(model.get_submodule(name))), "forward", None) is QuantLinear.forward
    }
    found = (names for names, _ in find_siblings(model, linears))
    return [n for n in found if rows_unsupported_reason(weights[n[0]][0], [weights[name][1] for name in n]) is None]


def fuse_projections_(model: _Model) -> _Model:
    """Let quantized layers that read the same tensor share one product, in place, and return the model.

    Query, key and value projections, gate and up projections and their like are then one launch instead of two or
    three wherever no gradient is needed; training computes as before. No name, byte or amount of memory changes;
    results may differ in the last bits. `unfuse_projections_` is the way back. A model that transformers loads onto a
    GPU is fused already (`QuantizerConfig(fuse_projections=None)`).

    Raises ValueError, with the reasons, if no layers can be fused.
    """
    check_model(model)
    num_groups, why = fuse_where_possible(model)
    if not num_groups:
        raise ValueError(f"nothing to fuse in this {type(model).__name__}: {why}")
    return model


def fuse_where_possible(model: nn.Module, *, only_on: Sequence[str] | None = None) -> tuple[int, str]:
    """`fuse_projections_` without the error: (groups that share a product now, why no others do).

    `only_on` are the types of the devices, e.g. "cuda", on which layers are fused; None: all.
    """
    linears = {
        name: fusion_key(module.scheme, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
        and type(module).forward is QuantLinear.forward
        and (only_on is None or module.packed_device().type in only_on)
    }
    num_groups, reasons = 0, set()
    for names, is_proven in find_siblings(model, linears):
        modules = [model.get_submodule(name) for name in names]
        reason = None if _are_fused(modules) else unsupported_reason(modules)
        if reason is not None:
            reasons.add(reason)
            continue
        num_groups += 1
        if not _are_fused(modules):
            _separate(modules)
            FusedProjections(tuple(_leaf(name) for name in names), is_proven).join_(modules)
    return num_groups, "; ".join(sorted(reasons)) or "no two of its quantized linear layers read the same tensor"


def share_inputs_(model: nn.Module) -> None:
    """Let layers with quantized activations that provably read one tensor quantize it once under torch.compile."""
    linears = {
        name: (replace(module.scheme, weight=None), module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
        and (module.scheme.activation or module.scheme.cpu_activation) is not None
        and not module.scheme.is_static  # the compiler sees no values: whether their scales are equal
    }
    for names, is_proven in find_siblings(model, linears):
        if is_proven:
            group = SharedInput(len(names))
            for index, name in enumerate(names):
                module, rule = model.get_submodule(name), SharedRows(group, index)
                if isinstance(module.rule, SharedProduct):
                    module.rule.otherwise = rule
                else:
                    module.rule = rule


def _are_fused(modules: Sequence[QuantLinear]) -> bool:
    fused = modules[0].fused
    if fused is None or fused.common is None or len(fused.names) != len(modules):
        return False
    return all(m.fused is fused and fused.common.has(m, m.rule.index) for m in modules)


def _leaf(name: str) -> str:
    """Last part of a layer's name, without PEFT's: "q_proj" of "layers.0.self_attn.q_proj.base_layer"."""
    return name.replace(".base_layer", "").rpartition(".")[2]


def unfuse_projections_(model: _Model) -> _Model:
    """Inverse of `fuse_projections_`, in place: every layer has tensors of its own again and computes alone."""
    check_model(model)
    _separate([module for module in model.modules() if isinstance(module, QuantLinear)])
    return model


@torch.no_grad()
def _separate(modules: Sequence[QuantLinear]) -> None:
    for module in modules:
        fused = module.fused
        if fused is None:
            continue
        for key, parameter in module._parameters.items():
            # Storages of rows of a common tensor are not resizable.
            if parameter is not None and not parameter.untyped_storage().resizable():
                if key == "bias":
                    parameter.data = parameter.data.clone()
                else:
                    module._parameters[key] = nn.Parameter(parameter.clone(), requires_grad=False)
        module.rule = module.rule.otherwise
        fused.release()  # siblings that are not among the modules compute alone, too
