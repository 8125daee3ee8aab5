"""Trials of attention: a host's module is called with an attention function that records its calls."""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_quant import kv_cache
from hf_quant.integrations.transformers.blocks.base import Unproven, host_class, random_rows


Trial = tuple[Tensor, Tensor, Tensor, int]  # x [2, S, K], cos and sin [2, S, turned], position


def has_own_code(attention: nn.Module) -> bool:
    """True if an attention asks no registry for the function that computes it, so that none can be recorded."""
    return _has_own_code(host_class(attention))


@cache
def _has_own_code(host: type[nn.Module]) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(host.forward).__globals__


class Recorded(NamedTuple):
    """A call of a host's module: what it asked the attention function for, what it was given, what it returned."""

    q: Tensor
    k: Tensor
    v: Tensor
    function: Callable[..., Any]  # the attention function
    options: dict[str, Any]  # of it
    result: Tensor  # [B, S, H, D]
    output: Any


class _NoCache:
    """A cache that returns what it is given; it takes no more arguments than the block gives.

    `kwargs`: those of the module, which transformers 5.24 hands on. Blocks know none that a cache reads.
    """

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *, kwargs: Any = None) -> tuple[Tensor, Tensor]:
        return k, v


def probe(
    K: int,
    turned: int,
    position: int,
    dtype: torch.dtype,
    S: int = 1,
    *,
    angle_dtype: torch.dtype,
    device: torch.device | None = None,
) -> Trial:
    """Random arguments of a trial: (x [2, S, K], cos and sin [2, S, turned], position)."""
    x = random_rows(2, S, K, dtype=dtype, seed=position, device=device)
    angles = random_rows(2, S, max(turned, 1), dtype=torch.float32, seed=position + 1, device=device)
    angles = angles[..., : turned // 2].repeat(1, 1, 2) if turned else angles
    return x, angles.cos().to(angle_dtype), angles.sin().to(angle_dtype), position


def records(host: Callable[..., Any], module: nn.Module, trial: Trial, **more: Any) -> list[Recorded]:
    """Call a host's `forward` for tokens from a position on, with an attention function that records.

    Returns each of its calls, with the output of the host. `more`: further arguments.
    """
    seen: list[tuple] = []

    def attend(function: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        B, H, S, _ = q.shape
        result = random_rows(B, S, H, v.shape[-1], dtype=q.dtype, seed=77 + len(seen), device=q.device)
        seen.append((q.clone(), k.clone(), v.clone(), function, options, result))
        return result

    kv_cache.register_attention()
    with kv_cache.recorded_attention(attend):
        output = output_of(host, module, trial, _NoCache(), **more)
    return [Recorded(*call, output) for call in seen]


def output_of(host: Callable[..., Any], module: nn.Module, trial: Trial, past: Any, **more: Any) -> Any:
    """The output of a host's `forward` for tokens from a position on, with a cache. `more`: further arguments."""
    x, cos, sin, position = trial
    named = inspect.signature(host).parameters
    more.setdefault(kv_cache.cache_name(host), past)
    more.setdefault("attention_mask", None)
    if cos.shape[-1] > 1:
        more["position_embeddings"] = (cos, sin)
    elif "position_embeddings" in named:  # what a host does not know it may hand on (GPT-2)
        more["position_embeddings"] = None
    positions = torch.arange(position, position + x.shape[1], device=x.device).expand(len(x), -1)
    more |= {"position_ids": positions, "cache_position": positions[0]}
    return host(module, hidden_states=x, **more)


def given_complex(host: Callable[..., Any]) -> Callable[..., Any]:
    """A host's `forward` that is given complex angles in place of cos and sin."""

    @wraps(host)
    def forward(*args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        cos, sin = (part[..., : part.shape[-1] // 2].contiguous() for part in position_embeddings)
        return host(*args, position_embeddings=torch.complex(cos, sin), **kwargs)

    return forward


def record(host: Callable[..., Any], module: nn.Module, trial: Trial) -> Recorded:
    """The one call of the attention function in `records`. Raises Unproven if there is not one."""
    found = records(host, module, trial)
    if len(found) != 1:
        raise Unproven(f"{type(module).__name__} does not call one attention function")
    return found[0]
