"""Automatic bits and autoquant: the predicted loss and time of each plan of a frontier, against the measured ones.

    python scripts/bench_autoquant.py smollm2 --threads 1                    # time and loss, calls of 1 and 512 tokens
    python scripts/bench_autoquant.py smollm2 gemma3 asset --objective loss --algorithm gptq --plot docs/frontier.svg
    python scripts/bench_autoquant.py smollm2 --candidates int4 nf4 int8 --max-kl 0.1

The plans of `hf_quant.autoquant` are carried out one by one. Each is timed in turns with the 16-bit model, the least
of some calls, and judged by its KL divergence from it. With `--objective loss` nothing is timed: the bounds
are those of the size, and automatic bits stand beside each candidate alone. "asset" is the small model of the tests;
scripts/real_models.py makes the others. With one thread times are those of the processor.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import scatter
from hf_quant import Frontier, QuantizerConfig, QuantPlan, autoquant, quantize_
from hf_quant.evaluate import machine, quality, read_windows
from hf_quant.planning import format_table
from real_models import MODELS, ROOT, TEXT, load


ASSET = ROOT / "integration_tests" / "assets" / "tiny-llama-13m"
WINDOW = 512
CALLS = 3
HEADER = ("scheme", "bits", "MB", "KL predicted", "measured", "ratio")


def load_model(name: str, tokens: int, num_tokens: int) -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    """(model, tokenizer, ids to judge it on, windows to calibrate with)."""
    if name == "asset":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(ASSET).eval(), AutoTokenizer.from_pretrained(ASSET)
        ids = read_windows(TEXT, tokenizer, window=WINDOW, max_tokens=tokens)
    else:
        model, tokenizer, ids = load(name, window=WINDOW, tokens=tokens)
    rows = read_windows(TEXT, tokenizer, window=WINDOW, max_tokens=tokens + num_tokens)
    return model, tokenizer, ids, rows[ids.numel() :].view(-1, WINDOW)


def seconds_of(models: dict[str, nn.Module], num_tokens: int, rounds: int) -> dict[str, float]:
    """The least seconds of a call with so many tokens; the models take turns, in blocks of `CALLS` after one more."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    ids = torch.randint(models["16 bit"].config.vocab_size, (1, num_tokens))
    best = dict.fromkeys(models, float("inf"))
    with torch.inference_mode():
        for _ in range(rounds):
            for name, model in models.items():
                for number in range(CALLS + 1):
                    start = now()
                    model(input_ids=ids, use_cache=False)
                    if number:
                        best[name] = min(best[name], now() - start)
    return best


def check(
    base: nn.Module, label: str, point: QuantPlan, config: QuantizerConfig, ids: Any, data: Any, args: Any
) -> dict[str, Any]:
    """Carry out one plan, and measure what was predicted of it."""
    model = quantize_(copy.deepcopy(base), config, quant_plan=point, calibration=data)
    found = quality({"16 bit": base, label: model}, ids, window=WINDOW, reference="16 bit")[label]
    row = {"scheme": label, "bits": point.bits_per_weight, "nbytes": point.nbytes, "predicted_kl": point.loss}
    row |= {"kl": found.kl, "perplexity": found.perplexity, "seconds": {}}
    for call, predicted in point.seconds.items():
        times = seconds_of({"16 bit": base, label: model}, int(call.split()[0]), args.rounds)
        row["seconds"][call] = {"predicted": predicted, "measured": times[label], "16 bit": times["16 bit"]}
    return row


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    kl = (f"{row['predicted_kl']:.4f}", f"{row['kl']:.4f}", f"{row['predicted_kl'] / row['kl']:.2f}")
    times: list[str] = []
    for of in row["seconds"].values():
        times += [f"{1e3 * of['predicted']:.2f}", f"{1e3 * of['measured']:.2f}"]
        times += [f"{of['predicted'] / of['measured']:.2f}", f"{of['measured'] / of['16 bit']:.2f}"]
    return (row["scheme"], f"{row['bits']:.3f}", f"{row['nbytes'] / 1e6:.1f}", *kl, *times)


def report(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Search, carry out every plan of the frontier, print."""
    base, tokenizer, ids, data = load_model(name, args.tokens, args.calibration_tokens)
    fields: dict[str, Any] = {"algorithm": args.algorithm, "candidates": args.candidates}
    if args.objective == "latency":
        fields |= {"objective": {"latency": args.latency}, "budget": {"kl": args.max_kl}}
    else:
        fields |= {"budget": {"bits": args.bits}}
    config = QuantizerConfig("auto", **fields)
    start = time.perf_counter()
    found: Frontier = autoquant(base, config, calibration={"data": data, "num_tokens": data.numel()})
    print(f"\n{name}: searched in {time.perf_counter() - start:.0f} s\n{found}\n", flush=True)
    calls = [
        title for call in found.seconds for title in (f"ms, {call}", "measured", "predicted / measured", "x 16 bit")
    ]
    rows, lines = [], [(*HEADER, *calls)]
    for label, point in found.points.items():
        if point.quantized:
            given = data if args.algorithm is not None else None
            rows.append(check(base, label, point, config, ids, given, args))
            lines.append(cells(rows[-1]))
            print("  ".join(lines[-1]), flush=True)
    print(f"\n{format_table(lines)}", flush=True)
    return {"chosen": found.chosen, "rows": rows}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", choices=[*MODELS, "asset"])
    parser.add_argument("--objective", choices=("latency", "loss"), default="latency", help="(%(default)s)")
    parser.add_argument("--latency", nargs="+", type=int, default=[1, 512], metavar="N", help="tokens of the calls")
    parser.add_argument("--max-kl", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--bits", type=float, default=4.25, help="with --objective loss (%(default)s)")
    parser.add_argument("--candidates", nargs="+", help="(those of QuantizerConfig)")
    parser.add_argument("--algorithm", help="such as gptq")
    parser.add_argument("--tokens", type=int, default=2048, help="to judge on (%(default)s)")
    parser.add_argument("--calibration-tokens", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of calls that are timed (%(default)s)")
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw measured KL against bits per weight, as SVG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def main() -> None:
    """Search, measure, print."""
    args = parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(machine())
    record = {name: report(name, args) for name in args.model}
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "models": record}, indent=1) + "\n")
    if args.plot is not None:
        panels = [
            scatter.Panel(name, {row["scheme"]: (row["bits"], row["kl"]) for row in model["rows"]})
            for name, model in record.items()
        ]
        scatter.draw(panels, "true bits per weight, scales included", "KL to bf16, nats per token", args.plot)


if __name__ == "__main__":
    main()
