"""Quantization-aware training on a CPU: the time of a step, and what training recovers, for bench_training.py qat."""

import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel, PreTrainedTokenizerBase

from common.schemes import parse_spec
from cpulab.text import library_text
from cpulab.timing import Turn, interleaved, print_table
from hf_quant import QuantizerConfig, convert_qat_, prepare_qat_, quantize_
from hf_quant.calibration.sample import sample
from hf_quant.evaluate import Quality, quality, read_windows
from hf_quant.integrations.training import output_head
from hf_quant.optim import AdamW
from hf_quant.training import distillation_loss


ASSET = Path(__file__).parents[2] / "integration_tests" / "assets" / "tiny-llama-13m"
BASE, WARM_UP = "bf16", 10
TEXTS = {"library": "the standard library", "own": "its own text"}
OWN_TOKENS = 196_608  # a model writes one after the other; windows are read again
TIMED = ("int8", "int4", "int3", "int2", "fp8", "nf4", "int4:input_transform=hadamard", "W4A8")


class Run(NamedTuple):
    """Settings of a training: `tokens` of each step in windows of `length` of a text, with a peak learning rate."""

    steps: int
    tokens: int
    length: int
    learning_rate: float
    text: str = "library"
    seed: int = 0


def config_of(spec: str, **fields: Any) -> QuantizerConfig:
    """The config that a scheme of eval_quality.py's kind means, with other fields changed."""
    return QuantizerConfig(**{**parse_spec(spec), **fields})


def layer(width: int = 1024) -> LlamaModel:
    """One layer of a transformer in bf16; 11.3M parameters if it is 1024 wide."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": 4096}
    return LlamaModel(LlamaConfig(**sizes)).bfloat16()


def step_times(rounds: int, tokens: int, specs: tuple[str, ...] = TIMED, width: int = 1024) -> dict[str, float]:
    """{scheme, or BASE: seconds of a step}: forward, backward and AdamW with 8-bit states, in turns."""

    def step_of(spec: str) -> Callable[[], None]:
        model = layer(width)
        if spec != BASE:
            prepare_qat_(model, config_of(spec))
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, states="int8")
        x = torch.randn(1, tokens, width).bfloat16()

        def step() -> None:
            model(inputs_embeds=x, use_cache=False).last_hidden_state.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return interleaved({spec: Turn(step_of(spec), 1, 0) for spec in (BASE, *specs)}, rounds)


def print_times(rounds: int, tokens: int) -> None:
    """Print the table of times."""
    found = step_times(rounds, tokens)
    print(f"a step on {tokens} tokens of a layer of width 1024 in bf16: forward, backward, AdamW with 8-bit states\n")
    rows = {name: [f"{1e3 * s:.1f}", f"{s / found[BASE]:.2f}x"] for name, s in found.items()}
    print_table(["", "ms", "time"], rows)


def train(model: nn.Module, teacher: nn.Module, ids: Tensor, run: Run, *, log: bool = True) -> None:
    """Bring a prepared model near to its teacher by KL; embeddings and norms stay as they are.

    `ids` [num_tokens] are a text, in which windows begin anywhere, or [windows, length].
    """
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and p.dim() > 1 and "embed" not in name and "lm_head" not in name)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW(params, lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, states="bf16")
    generator, heads = torch.Generator().manual_seed(run.seed), (output_head(model), output_head(teacher))
    start = time.perf_counter()
    model.train()
    for step in range(run.steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / run.steps)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * min(1.0, (step + 1) / WARM_UP) * cosine
        count = len(ids) if ids.dim() == 2 else len(ids) - run.length
        first = torch.randint(0, count, (run.tokens // run.length, 1), generator=generator)
        batch = ids[first[:, 0]] if ids.dim() == 2 else ids[first + torch.arange(run.length)]
        hidden = [last_hidden(m, batch, trains) for m, trains in ((model, True), (teacher, False))]
        loss = distillation_loss(*hidden, *heads, mask=torch.ones(batch.shape, dtype=torch.bool))
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if log and (step % 50 == 0 or step == run.steps - 1):
            seconds = time.perf_counter() - start
            print(f"  step {step + 1}/{run.steps}: KL {loss.item():.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    model.eval()


def last_hidden(model: nn.Module, batch: Tensor, trains: bool) -> Tensor:
    """The last hidden states of a language model, what its head reads."""
    with torch.set_grad_enabled(trains):
        return model.base_model(input_ids=batch, use_cache=False).last_hidden_state


def training_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase, run: Run) -> Tensor:
    """Token ids of the library's sources [num_tokens], or of text that the model writes [windows, length]."""
    if run.text == "own":
        return sample(model, min(run.steps * run.tokens, OWN_TOKENS), run.length)
    texts = library_text((ASSET / "eval.txt").read_text())
    return torch.tensor([i for part in tokenizer(texts, verbose=False)["input_ids"] for i in part])


def recovered(
    path: Path, spec: str, run: Run, *, tokens: int, window: int, gptq: bool, log: bool = True
) -> dict[str, Quality]:
    """{"bf16", "RTN", "PTQ", perhaps "GPTQ", "QAT": quality on held-out text} of a checkpoint under one scheme."""
    held_out = ASSET / "eval.txt"
    tokenizer = AutoTokenizer.from_pretrained(path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    ids = training_ids(base, tokenizer, run)
    order = torch.randperm(ids.numel() // run.length, generator=torch.Generator().manual_seed(1))
    data = ids.flatten()[: len(order) * run.length].view(-1, run.length)[order[: 16384 // run.length]]
    judged = read_windows(held_out, tokenizer, window=window, max_tokens=tokens)
    found = {}

    def judge(name: str, model: nn.Module) -> None:
        both = quality({BASE: base, name: model}, judged, window=window, reference=BASE)
        found.update({BASE: both[BASE], name: both[name]})
        print(f"  {name}: perplexity {both[name].perplexity:.4f}, KL {both[name].kl:.5f}", file=sys.stderr, flush=True)

    judge("RTN", quantize_(copy.deepcopy(base), config_of(spec, algorithm="absmax")))
    judge("PTQ", quantize_(copy.deepcopy(base), config_of(spec)))
    if gptq:
        config = config_of(spec, algorithm="gptq")
        judge("GPTQ", quantize_(copy.deepcopy(base), config, calibration=data))
    model = copy.deepcopy(base)
    prepare_qat_(model, config if gptq else config_of(spec), calibration=data if gptq else None)
    train(model, base, ids, run, log=log)
    judge("QAT", convert_qat_(model))
    return found


def print_recovered(path: Path, specs: list[str], run: Run, *, tokens: int, window: int, gptq: bool) -> None:
    """Print the table of what training recovers."""
    print(
        f"\n{path.name}: {run.steps} steps of {run.tokens} tokens of {TEXTS[run.text]}, KL from the bf16 model, "
        f"learning rate {run.learning_rate:g};\njudged on {tokens} held-out tokens. Recovered: of the distance to "
        "bf16 in the logarithm of perplexity, and in KL\n"
    )
    for spec in specs:
        found = recovered(path, spec, run, tokens=tokens, window=window, gptq=gptq)
        base = math.log(found[BASE].perplexity)
        rows = {}
        for name, of in found.items():
            rows[name] = [f"{of.perplexity:.3f}", "" if name == BASE else f"{of.kl:.5f}"]
            if name not in (BASE, "QAT"):
                left = (math.log(found["QAT"].perplexity) - base) / (math.log(of.perplexity) - base)
                rows[name] += [f"{1 - left:.0%}", f"{1 - found['QAT'].kl / of.kl:.0%}"]
        print(spec)
        print_table(["", "ppl", "KL", "ppl rec.", "KL rec."], rows)
        print(flush=True)
