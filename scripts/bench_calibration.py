"""Time and memory of calibrating a causal language model and quantizing it by GPTQ.

    python scripts/bench_calibration.py MODEL TEXT [--weights nf4] [--tokens 8192] [--threads 1] [--max-memory BYTES]
    python scripts/bench_calibration.py MODEL TEXT --search    # and the time of choosing the bits of each layer

Prints the time of the pass over the text and of solving, the latter for a million weights (target: 0.35 s where layers
have up to 1024 inputs), both as processor time of all threads and as wall time; and by how much the memory of the
process grows at most, beside its bound: the statistics, the codes, three matrices of the widest layer's K x K in fp32,
and 256 MB. `real_models.py --prepare-only` makes models to try.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_quant import Calibration, QuantizerConfig, auto_plan, quantize_
from hf_quant.evaluate import PeakMemory, machine, read_windows
from hf_quant.planning import plan


WINDOW = 512


def clocks() -> tuple[float, float]:
    """Wall time and processor time."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Print the figures of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory of a 16-bit causal language model")
    parser.add_argument("text", metavar="TEXT", type=Path, help="a text file, or token ids as .npy")
    parser.add_argument("--weights", default="nf4", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument(
        "--max-memory", type=int, help="bytes of statistics at a time (default: a quarter of the free)"
    )
    parser.add_argument("--search", action="store_true", help="time `auto_plan` with weights='auto', too")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    ids = read_windows(args.text, AutoTokenizer.from_pretrained(args.model), window=WINDOW, max_tokens=args.tokens)
    config = QuantizerConfig(args.weights, algorithm="gptq")
    quant_plan = plan(model, config)
    entries = quant_plan.quantized.values()
    solved = sum(entry.num_weights for entry in entries if entry.algorithm == "gptq")
    codes = sum(entry.bytes_after for entry in entries)
    widest = max(shape[-1] for entry in entries for shape in entry.shapes.values())
    calibration = Calibration(model, config, max_memory=args.max_memory)
    print(f"{args.model}: {solved / 1e6:.1f}M weights in {args.weights}; {ids.numel()} tokens; {machine()}")
    if args.search:
        search = QuantizerConfig("auto", budget={"bits": 4.0}, algorithm="gptq")
        start = clocks()
        auto_plan(model, search, calibration=ids.view(-1, WINDOW))
        wall, cpu = (b - a for a, b in zip(start, clocks()))
        print(f"{'search':8} {wall:7.1f} s  {cpu:7.1f} s of processors")
    with PeakMemory() as memory:
        start = clocks()
        with calibration, torch.no_grad():
            for batch in ids.view(-1, WINDOW).split(8):
                model(input_ids=batch, use_cache=False, logits_to_keep=1)
        middle = clocks()
        # Those of siblings are shared, but each has its own Hessian weighted by gradients.
        statistics = calibration.nbytes + sum(
            4 * shape[-1] ** 2 for entry in entries for shape in entry.shapes.values()
        )
        quantize_(model, config, calibration=calibration)
        end = clocks()
    for name, first, last in (("pass", start, middle), ("solving", middle, end)):
        wall, cpu = (b - a for a, b in zip(first, last))
        print(f"{name:8} {wall:7.1f} s  {cpu:7.1f} s of processors  {cpu / solved * 1e6:.3f} s a million weights")
    bound = statistics + codes + 3 * 4 * widest**2 + 2**28
    print(f"memory   +{memory.nbytes / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB (statistics {statistics / 1e6:.0f} MB)")


if __name__ == "__main__":
    main()
