"""Comparable snapshots of everything that a captured step depends on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.modules.ready import READY


COUNTER = "cumulative_length_int"  # of sliding windows in transformers: a full window changes the step
CACHE = object()  # replaces the cache in inputs and outputs that are kept


def is_full(layer: Any) -> bool:
    """Return True if a sliding window is full: from then on a step differs."""
    return layer.cumulative_length_int >= layer.max_cache_len


def is_made(mask: Any) -> bool:
    """True if a mask is an attention mask, not a padding mask."""
    return isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4)


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Return the tensors among the attributes of a cache layer."""
    return {name: value for name, value in layer.__dict__.items() if isinstance(value, Tensor)}


def host_state(layer: Any) -> dict[str, Any]:
    """Return the attributes of a cache layer that are no tensors."""
    return {name: value for name, value in layer.__dict__.items() if not isinstance(value, Tensor)}


def holds_tensors(value: Any) -> bool:
    """True if a dict, list, tuple or set contains tensors."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        return False
    return any(isinstance(v, Tensor) or holds_tensors(v) for v in value)


def flatten(inputs: dict[str, Any], cache: Any) -> tuple[list[Tensor], tuple] | None:
    """Split inputs into (tensors, everything else that a graph depends on); None if that is not comparable."""
    tensors: list[Tensor] = []
    spec: list[Any] = []
    return (tensors, tuple(spec)) if _add(inputs, cache, tensors, spec) else None


def _add(value: Any, cache: Any, tensors: list[Tensor], spec: list[Any]) -> bool:
    if isinstance(value, Tensor):
        tensors.append(value)
        spec.append((value.shape, value.dtype, value.device))
    elif value is cache:
        spec.append(CACHE)
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
        spec.append((type(value), value))
    elif type(value) is dict:
        spec.append(tuple(value))
        return all([_add(v, cache, tensors, spec) for v in value.values()])
    elif type(value) in (list, tuple):
        spec.append(len(value))
        return all([_add(v, cache, tensors, spec) for v in value])
    else:
        return False
    return True


def rebuild(value: Any, buffers: Iterator[Tensor]) -> Any:
    """Rebuild the inputs of `flatten` with buffers in place of tensors."""
    return map_leaves(value, lambda v: next(buffers) if isinstance(v, Tensor) else v)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every leaf of dicts (ModelOutput, too), lists and tuples."""
    if isinstance(value, dict):
        return type(value)(**{k: map_leaves(v, function) for k, v in value.items()})
    if type(value) in (list, tuple):
        return type(value)([map_leaves(v, function) for v in value])
    return function(value)


def globals_of(model: nn.Module) -> tuple:
    """Return the settings outside of the model that a step depends on."""
    device = model.device.type
    cuda = torch.backends.cuda
    return (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        tuple(getattr(c, "_attn_implementation", None) for c in (model.config, model.config.get_text_config())),
    )


# Attributes of every module, and what layers remember of earlier calls.
_PLAIN_STATE = frozenset(nn.Module().__dict__) - {"training"} | {READY}


def fingerprint(model: nn.Module) -> tuple:
    """Return the state of a model's modules: addresses of tensors, values of attributes, identities of the rest."""
    found: list[Any] = []
    for module in model.modules():
        state = module.__dict__
        found.append(type(module))
        for name in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
            if state[name]:
                found.append(frozen(state[name]))
        if module is not model:  # generate keeps its own records in the model
            found += [(name, frozen(value)) for name, value in state.items() if name not in _PLAIN_STATE]
    return tuple(found)


def frozen(value: Any) -> Any:
    """Return a hashable snapshot of a value; snapshots are equal while the value does not visibly change."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.dtype
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | type):
        return value
    if isinstance(value, dict):
        return tuple([(str(k), frozen(v)) for k, v in value.items()])
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), *[frozen(v) for v in value])
    return id(value)
