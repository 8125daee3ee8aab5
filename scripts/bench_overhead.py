"""Overhead of hf_quant: one call of a small layer against nn.Linear, and the time of the import.

    python scripts/bench_overhead.py            # both, the figures of docs/cpu_speed.md
    python scripts/bench_overhead.py call       # 64 x 64, one token, against nn.Linear
    python scripts/bench_overhead.py import     # hf_quant over torch + transformers, in new processes

Calls: the layers take turns in blocks of 200 calls; the lowest time of 50 blocks counts, which other processes disturb
least. Import: the lowest CPU time of `--rounds` processes each, with and without hf_quant in turns; what they print is
shown, too, because nothing should be.
"""

import argparse
import os
import subprocess
import sys
import time

import torch
from torch import nn

from hf_quant import quantize_
from hf_quant.evaluate import machine
from hf_quant.planning import format_table


LAYERS = ("int8", "W8A8", "int4", "W4A8", "nf4", "fp8", "int2")
HOSTS = "import torch; import transformers; transformers.AutoModelForCausalLM; import transformers.modeling_utils"
# The names that a program uses, so that what the package imports late is counted, too.
PACKAGE = "; import hf_quant; hf_quant.QuantizerConfig; hf_quant.quantize_; hf_quant.plan; hf_quant.save_quantized"


def bench_call(size: int, dtype: torch.dtype) -> str:
    """Microseconds of one eager call [1, size] -> [1, size], and the ratio to nn.Linear."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {"nn.Linear": nn.Linear(size, size, dtype=dtype)}
    for weights in LAYERS:
        layers[weights] = quantize_(nn.Sequential(nn.Linear(size, size, dtype=dtype)), weights)[0]
    x = torch.randn(1, size, dtype=dtype)
    best = dict.fromkeys(layers, float("inf"))
    with torch.no_grad():
        for _ in range(50):
            for name, layer in layers.items():
                start = time.perf_counter()
                for _ in range(200):
                    layer(x)
                best[name] = min(best[name], (time.perf_counter() - start) / 200)
    rows = [("layer", "us per call", "x nn.Linear")]
    rows += [(name, f"{t * 1e6:.1f}", f"{t / best['nn.Linear']:.2f}") for name, t in best.items()]
    return f"{size} x {size}, {str(dtype).removeprefix('torch.')}, one token\n{format_table(rows)}"


def bench_import(rounds: int) -> str:
    """Seconds of `import hf_quant` and its names over `import torch, transformers`."""
    # The hosts without the start-up hook of hf_quant, which torch's own switch turns off.
    off, on = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, dict(os.environ)
    without, with_hook, with_import, printed = [], [], [], ""
    for _ in range(rounds):
        without.append(_seconds(HOSTS, off)[0])
        with_hook.append(_seconds(HOSTS, on)[0])
        seconds, output = _seconds(HOSTS + PACKAGE, on)
        with_import.append(seconds)
        printed += output
    base, hook, full = min(without), min(with_hook), min(with_import)
    rows = [("import", "s", "over the hosts, s")]
    rows.append(("torch, transformers", f"{base:.2f}", ""))
    rows.append(("the same with hf_quant installed", f"{hook:.2f}", f"{hook - base:+.2f}"))
    rows.append(("the same and hf_quant", f"{full:.2f}", f"{full - base:+.2f}"))
    return f"{format_table(rows)}\nprinted while importing: {printed or 'nothing'}"


def _seconds(code: str, environment: dict[str, str]) -> tuple[float, str]:
    """CPU seconds of a new process that runs the code, and what it printed."""
    report = "import time; t = time.process_time(); {}; print('\\n', time.process_time() - t)"
    done = subprocess.run(
        [sys.executable, "-c", report.format(code)], env=environment, capture_output=True, text=True, check=True
    )
    *printed, last = (done.stderr + done.stdout).strip().rsplit("\n", 1)
    return float(last), "".join(printed).strip()


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("call", "import", "all"), default="all")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"python {' '.join(sys.argv)}\n{machine()}", flush=True)
    if args.what != "import":
        for dtype in (torch.bfloat16, torch.float32):
            print(f"\n{bench_call(args.size, dtype)}", flush=True)
    if args.what != "call":
        print(f"\n{bench_import(args.rounds)}")


if __name__ == "__main__":
    main()
