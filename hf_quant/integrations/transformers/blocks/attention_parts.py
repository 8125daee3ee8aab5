"""The parts of an attention, by the names that hosts give them; a trial shows what they compute."""

from torch import nn

from hf_quant.integrations.transformers.blocks.base import QUANTIZED, Classes
from hf_quant.integrations.transformers.blocks.norm import is_norm


_PROJECTIONS = tuple(("q_proj", "k_proj", "v_proj", name) for name in ("o_proj", "out_proj", "dense"))
_JOINED = (("qkv_proj", "o_proj"), ("qkv_proj", "out_proj"), ("query_key_value", "dense"), ("c_attn", "c_proj"))
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))
LAST_NORM = "attn_sub_norm"  # of the result, before the last projection (BitNet)
_WIDTHS = ("head_dim", "head_size", "key_value_proj_dim")  # names of the width of a head


def is_attention(module: nn.Module, linear: Classes) -> bool:
    """True if a module has layers of a class, named as in attention with a cache; a trial shows what it computes."""
    return layers_of(module, linear) is not None and isinstance(getattr(module, "layer_idx", None), int)


def layers_of(module: nn.Module, linear: Classes = QUANTIZED) -> tuple[nn.Module, ...] | None:
    """The projections of an attention, the last one behind it; None if it has others."""
    linears = {name: child for name, child in module._modules.items() if isinstance(child, linear)}
    for names in _PROJECTIONS + _JOINED:
        if set(names) == set(linears):
            return tuple(linears[name] for name in names)
    return None


def norms_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """The norms of queries and of keys, if an attention has them."""
    for names in _NORMS:
        found = [module._modules.get(name) for name in names]
        if all(norm is not None and is_norm(norm) for norm in found):
            return tuple(found)
    return ()


def head_dim_of(module: nn.Module) -> int | None:
    """The width of a head, None if an attention does not tell it."""
    return next((size for name in _WIDTHS if (size := getattr(module, name, None))), None)


def width_of_norm(norm: nn.Module, D: int) -> int:
    """The width of a norm of queries or keys: of a head, D, or of all heads."""
    weight = getattr(norm, "weight", None)
    return D if weight is None else len(weight)
