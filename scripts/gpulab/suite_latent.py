"""A token of a model with latent attention (MLA) behind a long prompt; a section of gpu_suite.py that runs by name.

Four layers with the attention of DeepSeek-V2-Lite and a feed-forward block each, random weights, eager code: what the
host's way costs, which makes the keys and values of all tokens for each new one, is far more than its launches.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpulab.suite_models import timed_record
from gpulab.timing import Ceilings
from hf_quant import QuantizedCache, quantize_, unfuse_activations_
from hf_quant.integrations.transformers.blocks import block_reasons
from hf_quant.testing import rms_error


WIDTHS = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 4096,
}
TINY = {**WIDTHS, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "kv_lora_rank": 64, "vocab_size": 256}
PROMPT, TOKENS = 8192, 8
SCHEMES = {"int8": {"weights": "int8"}, "int4, int8 cache": {"weights": "int4", "kv_cache": "int8"}}
TOLERANCE = 0.05  # of logits in bf16, whose sums are in another order


def random_model(device: torch.device, *, tiny: bool) -> nn.Module:
    """A DeepSeek-V3 without experts in bf16, weights normal with deviation 0.02."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**(TINY if tiny else WIDTHS), attn_implementation="sdpa")
    torch.manual_seed(0)
    with device:
        return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


@torch.no_grad()
def token_seconds(model: nn.Module, prompt: Tensor, kv_cache: str | None) -> tuple[float, Tensor]:
    """(median seconds of a token behind a prompt [1, T], the logits of the tokens [n, vocabulary])."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if kv_cache is None else QuantizedCache(model.config, kv_cache)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    times, logits = [], []
    for i in range(TOKENS):
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        logits.append(model(prompt[:, i : i + 1], past_key_values=cache).logits[0, -1])
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), torch.stack(logits).float()  # the first ones compile, and try the blocks


def latent_runs(device: torch.device, *, tiny: bool) -> Iterator[Callable[[Ceilings], dict[str, Any]]]:
    """Yield the measurements of the section; one raises if logits are not those of the host."""
    plain = random_model(device, tiny=tiny)
    prompt = torch.randint(0, plain.config.vocab_size, (1, 64 if tiny else PROMPT), device=device)
    found: dict[str, float] = {}

    def run(_: Ceilings, model: nn.Module, name: str, kv_cache: str | None) -> dict[str, Any]:
        seconds, logits = token_seconds(model, prompt, kv_cache)
        reasons = {reason for of, reason in block_reasons(model).items() if of.endswith("self_attn")}
        found.setdefault("bf16", seconds)
        more: dict[str, Any] = {"x bf16": found["bf16"] / seconds, "reasons": sorted(map(str, reasons))}
        if reasons:
            slow, expected = token_seconds(unfuse_activations_(model), prompt, kv_cache)
            error = rms_error(logits, expected)
            if not error <= TOLERANCE:
                raise RuntimeError(f"{name}: logits are off by {error:.3g} of those of the host")
            more |= {"x host": slow / seconds, "rms_error": error}
        return timed_record(f"latent attention, {name}", seconds, **more)

    yield partial(run, model=plain, name="bf16", kv_cache=None)
    for name, fields in SCHEMES.items():
        model = quantize_(copy.deepcopy(plain), fields)
        yield partial(run, model=model, name=name, kv_cache=fields.get("kv_cache"))
        del model
        gc.collect()
