"""Peak memory and time of quantizing on load, and of loading a quantized checkpoint; prints one table.

    python scripts/bench_load.py [--weights int4 int8] [--runs 5] [--layers 4] [--hidden 2048]

Writes a random Llama (0.4 GB in bf16, sharded) and loads it in fresh processes. Growth is that of anonymous memory
(RssAnon, what cannot be dropped and read again from the file), from before `from_pretrained` to its largest value
while it runs, sampled every 2 ms from outside; "after" is what stays. The files are in the page cache.
"""

import argparse
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers


LIMITS = {"int4": 0.45, "int8": 0.65}  # largest growth, relative to the size in bf16
CHILD = """
import sys, time
import torch, transformers
from transformers import AutoModelForCausalLM
import hf_quant.integrations.transformers

directory, weights = sys.argv[1:]
arguments = {} if weights == "-" else {"quantization_config": hf_quant.QuantizerConfig(weights)}
transformers.LlamaForCausalLM  # the host imports models at first use
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **arguments)
print(time.perf_counter() - start, model.get_memory_footprint(), flush=True)
sys.stdin.readline()
if len(arguments):
    model.save_pretrained(directory + "-" + weights)
print("saved", flush=True)
"""


class Load(NamedTuple):
    """One load: growth of anonymous memory at its peak and afterwards, size of the model, in bytes; seconds."""

    peak: int
    after: int
    footprint: int
    seconds: float


def write_model(directory: Path, hidden: int, layers: int, max_shard_size: str = "100MB") -> int:
    """Save a random Llama in bf16 and return its size in bytes."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model.get_memory_footprint()


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no RssAnon: this needs Linux 4.5 or newer")


def measure(directory: Path, weights: str | None) -> Load:
    """Load the checkpoint in a new process, quantizing it to `weights` (None: as it is), and watch its memory.

    What was quantized is saved beside it, as "<directory>-<weights>".
    """
    command = [sys.executable, "-c", CHILD, str(directory), weights or "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        _answer(child)
        before = peak = anonymous_bytes(child.pid)
        _go_on(child)
        while not select.select([child.stdout], [], [], 0.002)[0]:
            peak = max(peak, anonymous_bytes(child.pid))
        seconds, footprint = _answer(child).split()
        after = anonymous_bytes(child.pid)
        _go_on(child)
        _answer(child)
    return Load(max(peak, after) - before, after - before, int(footprint), float(seconds))


def _answer(child: subprocess.Popen) -> str:
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"the loading process ended with status {child.wait()}")
    return line


def _go_on(child: subprocess.Popen) -> None:
    child.stdin.write("\n")
    child.stdin.flush()


def main() -> int:
    """Measure and print; exit status 1 if a run is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", nargs="+", default=["int4", "int8"], help="formats or presets")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 512")
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as parent:
        directory = Path(parent) / "model"
        size = write_model(directory, arguments.hidden, arguments.layers)
        shards = len(list(directory.glob("*.safetensors")))
        print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
        print(f"random Llama, {size / 1e6:.0f} MB in bf16, {shards} shards; {arguments.runs} runs each\n")
        print("                 peak growth, MB (x bf16 size)    after   model     load, s")
        for weights in [None, *arguments.weights]:
            for label, source, given in (
                ("bf16" if weights is None else f"{weights}, on load", directory, weights),
                *([] if weights is None else [(f"{weights}, saved", Path(f"{directory}-{weights}"), None)]),
            ):
                loads = [measure(source, given) for _ in range(1 if weights is None else arguments.runs)]
                peaks = sorted(load.peak for load in loads)
                limit = LIMITS.get(weights, float("inf")) if given else float("inf")
                above = sum(peak > limit * size for peak in peaks)
                failed |= above > 0
                print(
                    f"{label:15s} {peaks[0] / 1e6:6.0f} ..{peaks[-1] / 1e6:5.0f} "
                    f"({peaks[0] / size:.2f} ..{peaks[-1] / size:5.2f}) "
                    f"{statistics.median(load.after for load in loads) / 1e6:12.0f} {loads[0].footprint / 1e6:7.0f} "
                    f"{statistics.median(load.seconds for load in loads):9.2f}"
                    + (f"   limit {limit}: {len(loads) - above} of {len(loads)} below" if limit < 9 else ""),
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    start = time.perf_counter()
    status = main()
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    sys.exit(status)
