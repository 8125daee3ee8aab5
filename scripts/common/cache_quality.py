"""Quality of a causal language model with a quantized KV cache: `eval_quality.py --kv-cache`.

Every window of the text is read teacher-forced through the cache: `--prefill` tokens at once, then `--step` at a time,
of which each prediction is judged. The caches are measured in turns, window by window, against transformers'
DynamicCache, and next to the backends of transformers' own QuantizedCache that are installed (optimum-quanto, hqq), at
equal bits, without their residual of 16-bit tokens unless `--residual` gives them one.
"""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

from hf_quant.evaluate import machine
from hf_quant.kv_cache import KVCacheConfig, QuantizedCache
from hf_quant.planning import format_table


def stretch_keys(model: nn.Module, factor: float, channels: int = 2) -> None:
    """Give every head of keys `channels` channels that are `factor` times as large, without changing the model.

    Many models have such channels; small ones that are trained for a day have not. Rows of `k_proj` are multiplied and
    those of `q_proj` divided, in the pairs that a rotary embedding turns together (i and i + D / 2), so the scores
    stay. Raises ValueError if the model has no such layers.
    """
    D = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    layers = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    if not layers:
        raise ValueError(f"a {type(model).__name__} has no q_proj and k_proj: leave --stretch-keys out")
    chosen = torch.tensor([5 * i + 3 + half for i in range(channels) for half in (0, D // 2)])
    with torch.no_grad():
        for layer in layers:
            layer.k_proj.weight.view(-1, D, layer.k_proj.in_features)[:, chosen] *= factor
            layer.q_proj.weight.view(-1, D, layer.q_proj.in_features)[:, chosen] /= factor


def parse_cache(spec: str) -> KVCacheConfig:
    """ "int4:recent_tokens=32" -> KVCacheConfig; values are JSON."""
    format, *settings = spec.split(":")
    pairs = (setting.partition("=") for setting in settings)
    return KVCacheConfig.of({"format": format, **{key: json.loads(value) for key, _, value in pairs}})


def bits_per_element(config: KVCacheConfig, D: int) -> float:
    """Bits per stored key or value, without the tokens in 16 bit."""
    return config.bytes_per_token(D) * 8 / D


def rivals(config: Any, residual: int) -> dict[str, Callable[[], Any]]:
    """{name: a new cache} of transformers' backends that are installed."""
    from transformers.cache_utils import QuantizedCache as HostCache

    found = {}
    for backend, is_here, axis in (
        ("quanto", is_optimum_quanto_available(), 0),
        ("hqq", is_hqq_available(), 1),
    ):
        for bits in (8, 4, 2) if backend == "hqq" else (4, 2):
            options = {"nbits": bits, "axis_key": axis, "axis_value": axis, "residual_length": residual}
            if is_here:
                make = lambda b=backend, o=options: HostCache(b, config, q_group_size=64, **o)  # noqa: E731
                found[f"transformers {backend} {bits} bits g64"] = make
    return found


@torch.no_grad()
def read(model: nn.Module, ids: Tensor, cache: Any, args: argparse.Namespace) -> Tensor:
    """Logits fp32 [windows, tokens behind the prompt, vocabulary] of ids [windows, tokens], read through the cache."""
    ids = F.pad(ids, (args.padding, 0))
    mask = torch.ones_like(ids)
    mask[:, : args.padding] = 0
    positions, found, start = (mask.cumsum(1) - 1).clamp(min=0), [], 0
    for end in (*range(args.padding + args.prefill, ids.shape[1] - 1, args.step), ids.shape[1] - 1):
        where = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]} if args.padding else {}
        found.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **where).logits)
        start = end
    return torch.cat([found[0][:, -1:], *found[1:]], 1).float()


def measure(model: nn.Module, ids: Tensor, makes: dict[str, Callable], args: argparse.Namespace) -> dict[str, dict]:
    """{name: perplexity, KL and agreement with the first of `makes`} over windows of ids."""
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in makes}
    windows = ids[: ids.numel() // args.window * args.window].view(-1, args.window)[: args.windows]
    count = 0
    for batch in windows.split(10):
        batch, expected = batch.to(model.device), None
        targets = batch[:, args.prefill :]
        count += targets.numel()
        for name, make in makes.items():
            scores = F.log_softmax(read(model, batch, make(), args), -1)
            expected = scores if expected is None else expected
            nll = -scores.gather(-1, targets.unsqueeze(-1)).double().sum()
            kl = (expected.exp() * (expected - scores)).double().sum()
            same = (scores.argmax(-1) == expected.argmax(-1)).double().sum()
            sums[name] += torch.stack([nll, kl, same]).cpu()
    return {
        name: {"perplexity": math.exp(nll / count), "kl": kl / count, "same_top_token": same / count}
        for name, (nll, kl, same) in ((name, (total).tolist()) for name, total in sums.items())
    }


TARGETS = {"int8": 0.001, "int4": 0.005, "int2": 0.03}  # change of perplexity


def evaluate(model: nn.Module, ids: Tensor, args: argparse.Namespace) -> int:
    """Print the table, write kv_cache.json; 1 if a default misses its target."""
    if args.stretch_keys is not None:
        stretch_keys(model, args.stretch_keys)
    specs = args.kv_cache or ["int8", "fp8", "int4", "int2"]
    makes: dict[str, Callable] = {"16 bit": lambda: DynamicCache(config=model.config)}
    for spec in specs:
        config = parse_cache(spec)
        makes[spec] = lambda config=config: QuantizedCache(model.config, config)
    makes |= rivals(model.config, args.residual)
    found = measure(model, ids, makes, args)
    D = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    rows, missed = [("cache", "bits", "perplexity", "change", "KL", "same top token", "target")], []
    before = found["16 bit"]["perplexity"]
    for name, one in found.items():
        bits = f"{bits_per_element(parse_cache(name), D):.3f}" if name in specs else ""
        change, target = one["perplexity"] / before - 1, TARGETS.get(name)
        one["change"] = change
        if target is not None and change > target:
            missed.append(name)
        verdict = "" if target is None else f"{'PASS' if change <= target else 'short of'} {target:+.1%}"
        figures = (f"{one['perplexity']:.3f}", f"{change:+.3%}", f"{one['kl']:.6f}", f"{one['same_top_token']:.2%}")
        rows.append((name, bits, *figures, verdict))
    title = (
        f"{args.model}: {args.windows} windows of {args.window}, {args.prefill} at once, then {args.step} at a time"
        + (f"; {args.padding} tokens of padding before each" if args.padding else "")
    )
    print(f"{title}\n{machine()}\n{format_table(rows)}")
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"model": args.model, "measured": title, "machine": machine(), "stretch_keys": args.stretch_keys}
    (args.out / "kv_cache.json").write_text(json.dumps({**record, "results": found}, indent=1) + "\n")
    return int(bool(missed))
