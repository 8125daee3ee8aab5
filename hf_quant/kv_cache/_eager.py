"""The attention functions that models bring themselves, "eager": which of them are the attention over codes.

Such a function lies in the file of its model and may compute anything from anything that its module holds: capped
scores (Gemma 2), learned sinks (gpt-oss), or what no kernel knows. It is tried once for each module, with a mask and
without one, on random inputs and with the options of the call, and must compute what the kernel would.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_quant.kernels.dispatch import is_plain
from hf_quant.kernels.kv_attention.op import capped


_PROVEN = "_hf_quant_attention"  # attribute of a module: {what was tried: whether it is the kernel's attention}
_OPTIONS = {"softcap", "s_aux", "sliding_window", "is_causal"}
# Of a call of attention or of a layer: what does not change the result.
IGNORED_OPTIONS = {"position_ids", "use_cache", "cache_position", "output_hidden_states", "output_router_logits"}
IGNORED_OPTIONS |= {"logits_to_keep", "return_dict"}  # of the model, handed on by GOT-OCR 2.0 and HuBERT
_WINDOW = 2  # of a trial: the mask has it, and the function must not apply it again
_TOLERANCE = 5e-3  # of the largest value: products in TF32 pass, other attention is off by some percent at least


def is_attention(
    host: Callable[..., Any], name: str, module: nn.Module, q: Tensor, kv_heads: int, scale: float | None, options: Any
) -> bool:
    """True if an attention function computes what the kernel does from codes, for queries q [B, H, S, D].

    `name` of the function, `options` of a call besides mask, dropout and scale. Where a trial is impossible (while
    torch compiles, or a CUDA graph is captured), the result of an earlier one counts.
    """
    given = {key: value for key, value in options.items() if value is not None and value is not False}
    if not _OPTIONS.issuperset(given.keys() - IGNORED_OPTIONS - {"dropout"}):
        return False
    sinks, softcap = given.get("s_aux"), given.get("softcap")
    kind = (name, q.shape[1], q.shape[3], kv_heads, scale, softcap, sinks is None, given.get("sliding_window") is None)
    proven = getattr(module, _PROVEN, None)
    found = None if proven is None else proven.get(kind)
    if found is not None:
        return found
    if torch.compiler.is_compiling() or not is_plain(q) or not _has_kernels(q.device):
        return False
    given = {key: value for key, value in given.items() if key in _OPTIONS}
    found = _passes_on_weights(module, options) and _is_equal(host, module, q, kv_heads, scale, given)
    if proven is None:
        proven = module.__dict__.setdefault(_PROVEN, {})
    proven[kind] = found
    return found


def _has_kernels(device: torch.device) -> bool:
    """True if results can be read on the host now."""
    return device.type == "cpu" or not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _passes_on_weights(module: nn.Module, options: dict[str, Any]) -> bool:
    """True if the function can know whether somebody wants its weights: see `wants_weights`."""
    return "output_attentions" in options or "output_attentions" not in inspect.signature(module.forward).parameters


def wants_weights(module: nn.Module, options: dict[str, Any]) -> bool:
    """True if somebody may look at the weights that the attention of a module returns, which no kernel makes."""
    if options.get("output_attentions"):
        return True
    hooks = module._forward_hooks
    return bool(hooks) and (torch.compiler.is_compiling() or _are_watched(list(hooks.values())))


def _are_watched(hooks: list[Any]) -> bool:
    """True if a hook is not transformers' own, or that one collects weights in this call."""
    from transformers.utils import output_capturing

    if any(getattr(hook, "__module__", None) != output_capturing.__name__ for hook in hooks):
        return True
    collected = output_capturing._active_collector.get()
    return any("attentions" in name for name in collected or ())


def _is_equal(
    host: Callable[..., Any],
    module: nn.Module,
    like: Tensor,
    kv_heads: int,
    scale: float | None,
    options: dict[str, Any],
) -> bool:
    """True if the function's results for random inputs are those of the kernel."""
    (_, H, _, D), device = like.shape, like.device
    softcap, factor = options.get("softcap"), D**-0.5 if scale is None else scale
    generator = torch.Generator().manual_seed(0)
    q, k, v, mask = (
        torch.randn(2, heads, tokens, width, generator=generator, dtype=torch.float32).to(device)
        for heads, tokens, width in ((H, 3, D), (kv_heads, 7, D), (kv_heads, 7, D), (1, 3, 7))
    )
    mask = torch.zeros_like(mask).masked_fill(mask < -0.5, torch.finfo(mask.dtype).min)
    mask[..., 0] = 0
    if softcap is not None:  # scores of about the cap, which it changes
        k, q = k + 1, q + softcap / (factor * D)
    if options.get("sliding_window") is not None:
        options = {**options, "sliding_window": _WINDOW}
    for added in (None, mask):
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            try:
                found = host(module, q, k, v, added, dropout=0.0, scaling=scale, **options)
            except Exception:  # noqa: BLE001  (a model's own code runs in the trial; the call itself will say what it lacks)
                return False
            expected = _expected(q, k, v, added, factor, softcap, options.get("s_aux"))
        y = found[0] if isinstance(found, tuple) else found
        if not isinstance(y, Tensor) or y.shape != expected.shape:
            return False
        if not (y.float() - expected).abs().max() <= _TOLERANCE * expected.abs().max():
            return False
    return True


def _expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention of a kernel in fp32 [B, S, H, D], with one more score `sinks` [H] for each head."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = scores if softcap is None else capped(scores, softcap)
    scores = scores if mask is None else scores + mask
    if sinks is not None:
        more = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return (torch.cat([scores, more], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    return (scores.softmax(-1) @ v).transpose(1, 2)
