"""Training by products in 8 bits on CPUs: time against bf16, and the loss of what is trained so.

    python scripts/bench_low_bit.py --threads 1                                # times
    python scripts/bench_low_bit.py --threads 1 --rounds 0 --seeds 3           # losses of a byte model, from scratch
    python scripts/bench_low_bit.py --threads 1 --rounds 0 --fine-tune build/real_models/smollm2 --recipes int8
    ... --plot docs/low_bit.svg                                                # and the curves of these losses

Times: forward and backward of one linear layer, and a whole step (AdamW with 8-bit states) of a Llama of 98M
parameters, with weights that are quantized anew each time, beside bf16 in the same run. Losses: that of
bench_training.py's byte model on held-out text, or of a checkpoint that is fine-tuned on the sources of Python's
library; the same seeds, batches and learning rates as in bf16.
"""

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from bench_training import ASSET_TEXT, BATCH, HELD_OUT, STEPS, WARM_UP, byte_model, loss_of, sample
from common import curves
from cpulab.text import library_text
from cpulab.timing import Turn, command, environment, interleaved, print_table
from hf_quant import finish_training_, prepare_training_
from hf_quant.optim import AdamW
from hf_quant.training.products import RECIPES


BASE = "bf16"
LINEARS = ((512, 1024, 1024), (2048, 1024, 1024), (2048, 1024, 2816), (2048, 2816, 1024))  # tokens, K, N
STEPS_TIMED = ((4, 256), (2, 512))  # sequences, tokens of each
EVERY = 5  # steps between the points of a curve


def linear_times(rounds: int, linears: tuple[tuple[int, int, int], ...] = LINEARS) -> dict[str, dict[str, float]]:
    """{sizes: {"bf16" or "int8": seconds of forward and backward of one layer}}."""

    def turn(M: int, K: int, N: int, recipe: str) -> Turn:
        layer, x = nn.Linear(K, N, bias=False).bfloat16(), torch.randn(M, K).bfloat16().requires_grad_()
        if recipe != BASE:
            prepare_training_(layer, recipe, min_size=1)
        grad = torch.randn(M, N).bfloat16()

        def run() -> None:
            layer(x).backward(grad)
            layer.weight.grad = x.grad = None  # which makes the codes of the weight anew

        return Turn(run, 1, 0)

    return {
        f"{M} tokens, {K} -> {N}": interleaved({kind: turn(M, K, N, kind) for kind in (BASE, "int8")}, rounds)
        for M, K, N in linears
    }


def experts_times(rounds: int, tokens: int = 2048, K: int = 1024, N: int = 512) -> dict[str, dict[str, float]]:
    """`linear_times` of eight gated experts K -> N -> K, of which each token goes through two."""
    config = MixtralConfig(hidden_size=K, intermediate_size=N, num_local_experts=8, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    index, weights = torch.rand(tokens, 8).topk(2).indices, torch.rand(tokens, 2).bfloat16()
    grad = torch.randn(tokens, K).bfloat16()

    def turn(recipe: str) -> Turn:
        module, x = MixtralExperts(config).bfloat16(), torch.randn(tokens, K).bfloat16().requires_grad_()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
        if recipe != BASE:
            prepare_training_(module, recipe)

        def run() -> None:
            module(x, index, weights).backward(grad)
            module.gate_up_proj.grad = module.down_proj.grad = x.grad = None

        return Turn(run, 1, 0)

    return {f"{tokens} tokens, {K} -> {N} -> {K}": interleaved({kind: turn(kind) for kind in (BASE, "int8")}, rounds)}


def llama(width: int = 768, layers: int = 12) -> LlamaForCausalLM:
    """A Llama in bf16, of 98M parameters by default."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, max_position_embeddings=2048, **sizes, **heads)).bfloat16()


def step_times(
    rounds: int, batches: tuple[tuple[int, int], ...] = STEPS_TIMED, model: nn.Module | None = None
) -> dict[str, dict[str, float]]:
    """{batch: {"bf16" or "int8": seconds of a step}}."""
    base = llama() if model is None else model

    def turn(batch: tuple[int, int], recipe: str) -> Turn:
        model = copy.deepcopy(base)
        if recipe != BASE:
            prepare_training_(model, recipe)
        optimizer = AdamW(model.parameters(), lr=1e-5, states="int8")
        ids = torch.randint(0, 8192, batch)

        def run() -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return Turn(run, 1, 0)

    return {
        f"{rows} x {length} tokens": interleaved({kind: turn((rows, length), kind) for kind in (BASE, "int8")}, rounds)
        for rows, length in batches
    }


def print_times(rounds: int) -> None:
    """Print the tables of times."""
    for title, found in (
        ("forward and backward of a linear layer, bf16", linear_times(rounds)),
        ("forward and backward of 8 experts, 2 for each token, bf16", experts_times(rounds)),
        ("a step of a Llama of 98M parameters, AdamW with 8-bit states", step_times(max(rounds // 3, 2))),
    ):
        rows = {
            name: [f"{1e3 * of[BASE]:.1f}", f"{1e3 * of['int8']:.1f}", f"{of[BASE] / of['int8']:.2f}x"]
            for name, of in found.items()
        }
        print(f"{title}\n")
        print_table(["", "bf16 ms", "int8 ms", "speed"], rows)
        print(flush=True)


def train(
    model: nn.Module, batch_of: Callable[[int], Tensor], recipe: str, *, steps: int, rate: float, min_size: int
) -> list[float]:
    """Train a model in bf16, with a warm-up and a cosine; return the loss of each step."""
    if recipe != BASE:
        prepare_training_(model, recipe, min_size=min_size)
    optimizer = AdamW(model.parameters(), lr=rate, weight_decay=0.1, states="bf16")
    losses, start = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        loss = loss_of(model, batch_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"  {recipe}: {time.perf_counter() - start:.0f} s, last loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses


def held_out_loss(model: nn.Module, windows: list[Tensor]) -> float:
    """The mean loss of some windows."""
    with torch.no_grad():
        return statistics.mean(loss_of(model, each).item() for each in windows)


def from_scratch(recipe: str, seed: int, text: Tensor, steps: int = STEPS) -> tuple[float, list[float]]:
    """(held-out loss in the recipe's own products, losses of the steps) of the byte model."""
    model, generator = byte_model(seed, torch.bfloat16), torch.Generator().manual_seed(seed)
    run = {"steps": steps, "rate": 2e-3, "min_size": 1}
    losses = train(model, lambda step: sample(text[:-HELD_OUT], generator, BATCH), recipe, **run)
    generator = torch.Generator().manual_seed(99)
    return held_out_loss(model, [sample(text[-HELD_OUT:], generator, 16) for _ in range(12)]), losses


def fine_tuned(path: Path, recipe: str, seed: int, args: argparse.Namespace) -> tuple[float, list[float]]:
    """(held-out loss of the 16-bit model at the end, losses of the steps) of a checkpoint on Python's library."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = library_text(ASSET_TEXT.read_text())
    ids = torch.tensor([i for part in tokenizer(texts[:400], verbose=False)["input_ids"] for i in part])
    windows = ids[: len(ids) // 257 * 257].view(-1, 257)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    held_out, rest = windows[order[:16]], windows[order[16:]]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    rows = args.tokens // 256
    batch_of = lambda step: rest[torch.arange(step * rows, (step + 1) * rows) % len(rest)]  # noqa: E731
    run = {"steps": args.steps, "rate": args.learning_rate, "min_size": 128}
    losses = train(model, batch_of, recipe, **run)
    if recipe != BASE:
        print(f"  {recipe}: held-out loss in its own products {held_out_loss(model, list(held_out.split(4))):.4f}")
        finish_training_(model)
    return held_out_loss(model, list(held_out.split(4))), losses


def print_losses(args: argparse.Namespace) -> None:
    """Print the table of losses, and draw their curves."""
    text = torch.frombuffer(bytearray(ASSET_TEXT.read_bytes()), dtype=torch.uint8)
    rows, base, lines = {}, [], {}
    for recipe in (BASE, *args.recipes):
        results = [
            from_scratch(recipe, seed, text, args.steps)
            if args.fine_tune is None
            else fine_tuned(args.fine_tune, recipe, seed, args)
            for seed in range(args.seeds)
        ]
        losses = [loss for loss, _ in results]
        base = base or losses
        gaps = [100 * (loss / other - 1) for loss, other in zip(losses, base)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else math.nan
        rows[recipe] = [f"{statistics.mean(losses):.4f}", f"{statistics.mean(gaps):+.2f} %", f"{error:.2f}"]
        curve = [statistics.mean(of) for of in zip(*(each for _, each in results))]
        parts = [curve[start : start + EVERY] for start in range(0, len(curve), EVERY)]
        lines[recipe] = [(EVERY * i + len(part) / 2, statistics.mean(part)) for i, part in enumerate(parts)]
    what = "a byte model, from scratch" if args.fine_tune is None else f"{args.fine_tune.name}, fine-tuned"
    print(f"held-out loss of {what}, after {args.steps} steps, {args.seeds} seeds\n")
    print_table(["", "loss", "gap", "+-"], rows)
    if args.plot is not None:
        curves.draw(lines, "step", f"loss, mean of {args.seeds} seeds", args.plot)


def main() -> None:
    """Print times or losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--rounds", type=int, default=12, help="(%(default)s; 0: no times)")
    parser.add_argument("--seeds", type=int, default=0, help="train so often, and print losses (%(default)s)")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, help="(all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (%(default)s)")
    parser.add_argument("--fine-tune", type=Path, metavar="CHECKPOINT", help="instead of the byte model")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step of fine-tuning (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of fine-tuning (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves, as SVG")
    args = parser.parse_args()
    if args.fine_tune is not None:
        args.seeds = max(args.seeds, 1)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    print(f"{command()}\n{environment()}, {torch.get_num_threads()} threads\n")
    if args.rounds:
        print_times(args.rounds)
    if args.seeds:
        print_losses(args)


if __name__ == "__main__":
    main()
