"""Blocks of transformers' models, each computed by one native call on a CPU: norms, feed-forward, attention of a token.

Decoding a token on a CPU takes as long between the products as in them: each op of torch and each call of a module
costs some microseconds. `fuse_blocks_` gives the modules that lie there a native block; `base` says when it is used.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_quant.integrations.transformers.blocks.attention import is_attention, run_attention
from hf_quant.integrations.transformers.blocks.base import fuse_, is_fused, reason_of, unfuse_
from hf_quant.integrations.transformers.blocks.mlp import is_mlp, run_mlp
from hf_quant.integrations.transformers.blocks.norm import is_norm, run_norm
from hf_quant.modules import QuantizedModule, QuantLinear


_KINDS = ((is_norm, run_norm), (is_mlp, run_mlp), (is_attention, run_attention))


def fuse_blocks_(model: nn.Module) -> int:
    """Give every module of a quantized model that may have one a native block, and return their number."""
    unfuse_blocks_(model)
    found = (
        list(_candidates(model, QuantLinear)) if any(isinstance(m, QuantizedModule) for m in model.modules()) else []
    )
    for module, run in found:
        fuse_(module, run)
    return len(found)


def unfuse_blocks_(model: nn.Module) -> None:
    """Undo `fuse_blocks_`."""
    for module in model.modules():
        unfuse_(module)


def block_reasons(model: nn.Module) -> dict[str, str | None]:
    """{name of a module with a block: why its host computes it, None if the block does or has not been tried}."""
    return {name: reason_of(module) for name, module in model.named_modules() if is_fused(module)}


def describe_blocks(model: nn.Module) -> str | None:
    """One line of a plan: the modules that may get a block once the model's linear layers are quantized."""
    counts = Counter(type(module).__name__ for module, _ in _candidates(model, nn.Linear))
    if not counts:
        return None
    found = ", ".join(f"{name} ({count})" for name, count in counts.items())
    return f"one call each on CPUs, where a trial agrees: {found}"


def _candidates(model: nn.Module, linear: type[nn.Module]) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for module in model.modules():
        for is_kind, run in _KINDS:
            if is_kind(module, linear):
                yield module, run


__all__ = ["block_reasons", "describe_blocks", "fuse_blocks_", "unfuse_blocks_"]
