"""Training on CPUs: time, memory and quality of what hf_quant trains with.

    python scripts/bench_training.py optimizers --threads 1              # ns and bytes per parameter
    python scripts/bench_training.py optimizers --losses --threads 1     # and losses: some minutes for each seed
    python scripts/bench_training.py qat --threads 1                     # a step of quantization-aware training
    python scripts/bench_training.py qat --threads 1 --train int4 int2   # and what training recovers: 10 minutes each
    python scripts/bench_training.py qat --train int2:group_size=64 --model build/real_models/smollm2 --gptq

`optimizers`: a step of each AdamW on the parameters of a transformer layer of width 1024 (11.3M), beside torch's fused
AdamW in the same run; rows quantized at random, beside rounding to the nearest. `--losses`: the loss on held-out text
of a byte model of 0.5M parameters that is trained from scratch, beside torch's AdamW with fp32 parameters and states;
one seed gives the weights, the batches and the random numbers of rounding.

`qat`: a step of each scheme beside a step in bf16 of the same run. `--train`: perplexity, and KL from the 16-bit
model, of plain rounding, of the default algorithm, of GPTQ with `--gptq`, and after training with the 16-bit teacher,
on sources of Python's library, or with `--text own` on text that the teacher writes.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from cpulab import qat
from cpulab.timing import Turn, command, environment, interleaved, print_table
from hf_quant.kernels import quantize_rowwise
from hf_quant.optim import AdamW


ASSET_TEXT = Path(__file__).parents[1] / "integration_tests" / "assets" / "tiny-llama-13m" / "eval.txt"
LAYER = (*((1024, 1024),) * 2, *((256, 1024),) * 2, *((2816, 1024),) * 2, (1024, 2816), (1024,), (1024,))
ROWS = (2048, 1024)
STATES = ("fp32", "bf16", "int8", "fp8", "int4")
STEPS, WARM_UP, BATCH, LENGTH, HELD_OUT = 250, 20, 8, 128, 60_000
PEAK_LR = 2e-3

# Makes an optimizer of parameters that a seed belongs to.
Maker = Callable[[list[nn.Parameter], int], Optimizer]


def ours(states: str, *, stochastic: bool = True) -> Maker:
    """AdamW of hf_quant; embeddings, too, have `states`."""
    return lambda params, seed: AdamW(
        params, lr=PEAK_LR, weight_decay=0.1, states=states, stochastic_rounding=stochastic, seed=seed
    )


def torchs(params: list[nn.Parameter], seed: int) -> Optimizer:
    """AdamW of torch, in one kernel for each parameter; it draws no numbers."""
    return torch.optim.AdamW(params, lr=PEAK_LR, weight_decay=0.1, fused=True)


# {row of the table: (optimizer, dtype of the parameters)}; the first is what the others are compared with.
TIMED: dict[str, tuple[Maker, torch.dtype]] = {
    "torch fused, bf16 states": (torchs, torch.bfloat16),
    "torch fused, fp32 all": (torchs, torch.float32),
    **{f"{states} states": (ours(states), torch.bfloat16) for states in STATES},
    "int8 states, nearest": (ours("int8", stochastic=False), torch.bfloat16),
}
TRAINED: dict[str, tuple[Maker, torch.dtype]] = {
    "torch, fp32 all": (torchs, torch.float32),
    **{f"{states} states, fp32": (ours(states), torch.float32) for states in STATES[1:]},
    "int4 states, nearest, fp32": (ours("int4", stochastic=False), torch.float32),
    "int8 states, bf16": (ours("int8"), torch.bfloat16),
    "int4 states, bf16": (ours("int4"), torch.bfloat16),
}


def with_gradients(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> list[nn.Parameter]:
    """Random parameters of some shapes with gradients."""
    torch.manual_seed(0)
    params = [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape) * 1e-3).to(dtype)
    return params


def measure(rounds: int, shapes: tuple[tuple[int, ...], ...] = LAYER) -> dict[str, tuple[float, float]]:
    """{row: (ns per parameter, bytes of states per parameter)}."""
    turns, sizes, count = {}, {}, sum(map(math.prod, shapes))
    for name, (make, dtype) in TIMED.items():
        params = with_gradients(dtype, shapes)
        optimizer = make(params, 0)
        optimizer.step()
        sizes[name] = sum(t.nbytes for state in optimizer.state.values() for t in state.values()) / count
        moved = sum(p.nbytes * 3 for p in params) + 2 * round(sizes[name] * count)
        turns[name] = Turn(lambda step=optimizer.step: step(), 1, moved)
    return {name: (seconds / count * 1e9, sizes[name]) for name, seconds in interleaved(turns, rounds).items()}


def print_times(rounds: int) -> None:
    """Print the tables of time and memory."""
    found = measure(rounds)
    base = found[next(iter(found))][0]
    rows = {name: [f"{ns:.3f}", f"{base / ns:.2f}x", f"{nbytes:.2f}"] for name, (ns, nbytes) in found.items()}
    print(f"one step on {sum(map(math.prod, LAYER)) / 1e6:.1f}M parameters: {', '.join(map(str, LAYER))}")
    print("bf16 parameters unless it says fp32; stochastic rounding unless it says nearest or torch\n")
    print_table(["", "ns/param", "speed", "bytes"], rows)
    x, seed = torch.randn(ROWS).bfloat16(), torch.tensor(7)
    kinds = {"nearest": None, "random": seed}
    turns = {name: Turn(lambda s=s: quantize_rowwise(x, s, format="int8"), 1, x.nbytes) for name, s in kinds.items()}
    seconds = interleaved(turns, rounds)
    cells = {name: [f"{value * 1e3:.3f}", f"{value / seconds['nearest']:.2f}x"] for name, value in seconds.items()}
    print(f"\nquantize_rowwise to int8, bf16 {ROWS[0]}x{ROWS[1]}\n")
    print_table(["", "ms", "time"], cells)


def byte_model(seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Two layers of width 128 on bytes."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes)).to(dtype)


def sample(data: Tensor, generator: torch.Generator, count: int) -> Tensor:
    """Windows [count, LENGTH + 1] of the text."""
    starts = torch.randint(0, len(data) - LENGTH - 1, (count,), generator=generator).tolist()
    return torch.stack([data[start : start + LENGTH + 1] for start in starts]).long()


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def trained_loss(make: Maker, dtype: torch.dtype, seed: int, text: Tensor, steps: int = STEPS) -> float:
    """Train the byte model, with a warm-up and a cosine; return the loss on the end of the text."""
    model = byte_model(seed, dtype)
    optimizer = make(list(model.parameters()), seed)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / WARM_UP) * cosine
        loss_of(model, sample(text[:-HELD_OUT], generator, BATCH)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        held_out = torch.Generator().manual_seed(99)
        return statistics.mean(loss_of(model, sample(text[-HELD_OUT:], held_out, 16)).item() for _ in range(12))


def print_losses(path: Path, seeds: int, steps: int) -> None:
    """Print the table of losses; the gap is the mean of those of the seeds, with its standard error."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    num = sum(p.numel() for p in byte_model(0, torch.float32).parameters())
    print(
        f"\nheld-out loss of a byte model ({num / 1e6:.1f}M parameters) after {steps} steps, {seeds} seeds, on "
        f"{path.name}\n"
    )
    rows: dict[str, list[str]] = {}
    base: list[float] = []
    for name, (make, dtype) in TRAINED.items():
        losses = [trained_loss(make, dtype, seed, text, steps) for seed in range(seeds)]
        base = base or losses
        gaps = [100 * (loss / other - 1) for loss, other in zip(losses, base)]
        error = statistics.stdev(gaps) / seeds**0.5 if seeds > 1 else math.nan
        rows[name] = [f"{statistics.mean(losses):.4f}", f"{statistics.mean(gaps):+.2f} %", f"{error:.2f}"]
    print_table(["", "loss", "gap", "+-"], rows)


def main() -> None:
    """Print the figures of one subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    optimizers = commands.add_parser("optimizers", help="AdamW with states in 16, 8 and 4 bits")
    optimizers.add_argument("--threads", type=int, help="of torch (default: torch's)")
    optimizers.add_argument("--rounds", type=int, default=20, help="(%(default)s)")
    optimizers.add_argument("--losses", action="store_true", help="train the byte model, too")
    optimizers.add_argument("--seeds", type=int, default=4, help="(%(default)s)")
    optimizers.add_argument("--steps", type=int, default=STEPS, help="of training (%(default)s)")
    optimizers.add_argument("--text", type=Path, default=ASSET_TEXT, help="(default: the text of the tests' model)")
    trains = commands.add_parser("qat", help="quantization-aware training")
    trains.add_argument("--threads", type=int, help="of torch (default: torch's)")
    trains.add_argument("--rounds", type=int, default=10, help="(%(default)s; 0: no times)")
    trains.add_argument("--tokens", type=int, default=1024, help="of a step (%(default)s)")
    trains.add_argument("--train", nargs="+", default=[], metavar="SCHEME", help="train with these schemes, too")
    trains.add_argument("--model", type=Path, default=qat.ASSET, help="a checkpoint (default: the tests' model)")
    trains.add_argument("--gptq", action="store_true", help="start from GPTQ, and compare with it")
    trains.add_argument("--steps", type=int, default=500, help="(%(default)s)")
    trains.add_argument("--length", type=int, default=256, help="of a window (%(default)s)")
    trains.add_argument("--learning-rate", type=float, default=1e-4, help="(%(default)s)")
    trains.add_argument("--text", choices=qat.TEXTS, default="library", help="to train on (%(default)s)")
    trains.add_argument("--judge", type=int, default=8192, help="held-out tokens (%(default)s)")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    print(f"{command()}\n{environment()}, {torch.get_num_threads()} threads\n")
    if args.command == "qat":
        if args.rounds:
            qat.print_times(args.rounds, args.tokens)
        run = qat.Run(args.steps, args.tokens, args.length, args.learning_rate, args.text)
        if args.train:
            judged = {"tokens": args.judge, "window": args.length}
            qat.print_recovered(args.model, args.train, run, **judged, gptq=args.gptq)
        return
    print_times(args.rounds)
    if args.losses:
        print_losses(args.text, args.seeds, args.steps)


if __name__ == "__main__":
    main()
