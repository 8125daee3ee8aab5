"""`generate` of a model of Llama-3.1-8B's shape with random weights, and quantizing it; a section of gpu_suite.py.

The decode step is captured in a CUDA graph: 16-bit and quantized models are then compared by what the GPU does, not by
what the host needs for a launch. A step takes the last token, attends to a cache of fixed size and leaves the most
likely next token in place; replaying it is greedy generation.
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

from gpulab.timing import Ceilings
from hf_quant import QuantizerConfig, capture_generate, quantize_
from hf_quant.kernels.gpu.counters import counters_of


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8", "modules": {"lm_head": "int8"}},
    "int4": {"weights": "int4", "modules": {"lm_head": "int8"}},
}
CONTEXT, PROMPT, EAGER_TOKENS, CAPTURED_TOKENS = 256, 32, 16, 96


class FixedCache:
    """Keys and values [1, heads, CONTEXT, head_dim] of every layer, written at `position`, a tensor on the device.

    transformers' StaticCache differs between versions in who holds the position; this is what a model calls of it.
    """

    is_compileable = False

    def __init__(self, config: Any, position: Tensor, dtype: torch.dtype) -> None:
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 1, config.num_key_value_heads, CONTEXT, head_dim)
        self.position = position  # [tokens] int64
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=position.device) for _ in range(2))

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return all of them."""
        self.keys[layer_idx].index_copy_(2, self.position, key)
        self.values[layer_idx].index_copy_(2, self.position, value)
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used where positions and the mask are given."""
        return 0


class Decoder:
    """Greedy generation of a causal language model by a step that can be captured."""

    def __init__(self, model: nn.Module) -> None:
        self.model, device = model, model.device
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.cache = FixedCache(model.config, self.position, model.dtype)
        self.places = torch.arange(CONTEXT, device=device)

    def step(self) -> None:
        """One token: `token` becomes the next one, `position` advances."""
        mask = (self.places <= self.position).view(1, 1, 1, CONTEXT)
        logits = self.model(
            input_ids=self.token,
            attention_mask=mask,
            position_ids=self.position.unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)

    def reset(self, prompt: Tensor) -> None:
        """Feed a prompt [n] token by token; its last token is fed by the first `step` that follows."""
        self.position.zero_()
        for token in prompt[:-1]:
            self.token.fill_(token)
            self.step()
        self.token.fill_(prompt[-1])


def random_model(device: torch.device, *, tiny: bool) -> nn.Module:
    """A Llama of 8.0 billion parameters (tiny: of 0.3 million) in bf16, weights normal with deviation 0.02."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(TINY if tiny else LLAMA_8B), attn_implementation="sdpa", dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=device).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
    with device:  # `to_empty` lost its buffers
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def decode_seconds(model: nn.Module) -> tuple[float, list[int]]:
    """(median seconds of a captured decode step, the tokens that it made); on a CPU the step runs as it is."""
    decoder = Decoder(model)
    prompt = torch.arange(1, PROMPT + 1, device=model.device)
    decoder.reset(prompt)  # compiles and warms up
    decoder.step()
    on_gpu = model.device.type == "cuda"
    replay: Callable[[], None] = decoder.step
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with counters_of(graph, model.device), torch.cuda.graph(graph):
            decoder.step()
        replay = graph.replay
    decoder.reset(prompt)
    tokens, times = [], []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(4):
            replay()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 4)
        tokens.append(int(decoder.token))
    return statistics.median(times), tokens


def generate_seconds(model: nn.Module, tokens: int) -> float:
    """Seconds per token of `model.generate`, as users call it."""
    prompt = torch.arange(1, PROMPT + 1, device=model.device).unsqueeze(0)

    def run(count: int) -> float:
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(tokens)  # what is captured, is captured here
    return (run(tokens + 2) - run(2)) / tokens


def captured_seconds(model: nn.Module) -> tuple[float, dict[str, int]]:
    """(seconds per token of `generate` under `capture_generate`, why steps ran without a graph)."""
    with capture_generate(model) as graphs:
        seconds = generate_seconds(model, CAPTURED_TOKENS)
        return seconds, dict(graphs.reasons)


def timed_record(candidate: str, seconds: float, **more: Any) -> dict[str, Any]:
    """A record of a token, or of a call, of a whole model."""
    base = {"op": "generate", "name": candidate, "candidate": candidate, "linear": "", "M": 1, "ms": seconds * 1e3}
    return {
        **base,
        "vs_bf16": None,
        "bf16_ms": None,
        "rivals_ms": {},
        "tok/s": 1 / seconds,
        "seconds": seconds,
        **more,
    }


def model_runs(device: torch.device, *, tiny: bool) -> Iterator[Callable[[Ceilings], dict[str, Any]]]:
    """Yield the measurements of the section, one after the other: the models are made between them."""
    plain = random_model(device, tiny=tiny)
    found: dict[str, float] = {}

    def eager(_: Ceilings, model: nn.Module = plain, name: str = "bf16") -> dict[str, Any]:
        seconds = generate_seconds(model, EAGER_TOKENS)
        ratio = {"x bf16 eager": found.setdefault("eager", seconds) / seconds}
        return timed_record(f"{name} eager", seconds, **ratio)

    def graph(_: Ceilings) -> dict[str, Any]:
        found["graph"], tokens = decode_seconds(plain)
        return timed_record("bf16 graph", found["graph"], tokens=tokens)

    def captured(_: Ceilings, model: nn.Module = plain, name: str = "bf16") -> dict[str, Any]:
        seconds, reasons = captured_seconds(model)
        return timed_record(f"{name} generate", seconds, reasons=reasons)

    yield graph
    yield eager
    yield captured
    for name, fields in SCHEMES.items():
        model = copy.deepcopy(plain)

        def quantize(_: Ceilings, model: nn.Module = model, name: str = name, fields: dict = fields) -> dict[str, Any]:
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            quantize_(model, QuantizerConfig(**fields))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            return timed_record(f"quantize {name}", seconds)

        def generate(_: Ceilings, model: nn.Module = model, name: str = name) -> dict[str, Any]:
            seconds, tokens = decode_seconds(model)
            ratios = {f"x bf16 {kind}": value / seconds for kind, value in found.items()}
            return timed_record(name, seconds, tokens=tokens, **ratios)

        yield quantize
        yield generate
        yield partial(captured, model=model, name=name)
        yield partial(eager, model=model, name=name)
        del model, quantize, generate
        gc.collect()
