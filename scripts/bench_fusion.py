"""Time `fuse_projections_`: query, key and value, or gate and up, as one product instead of three or two.

    python scripts/bench_fusion.py                     # one CPU thread
    python scripts/bench_fusion.py --device cuda       # inside a CUDA graph, where launches cost least
    python scripts/bench_fusion.py --formats int4 W8A8 --rows 1 16 256

Schemes that rotate their inputs are timed without that, too.

The shapes are those of Llama-3.2-1B and Llama-3.1-8B, the weights random; copies take turns, four or as many as the L2
cache of a GPU asks for, so that no cache keeps one. The 16-bit layers, the quantized and the fused ones alternate; the
median of the rounds counts. CPU: process time, which other processes disturb least.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpulab.timing import num_copies
from hf_quant import QuantizerConfig, fuse_projections_, quantize_, unfuse_projections_
from hf_quant.evaluate import machine
from hf_quant.integrations.transformers.graphs import CudaGraphs
from hf_quant.planning import format_table
from hf_quant.resolve import entry_fields, resolve_scheme


SHAPES = {  # in_features, {name: out_features}
    "1B qkv": (2048, {"q_proj": 2048, "k_proj": 512, "v_proj": 512}),
    "1B gate, up": (2048, {"gate_proj": 8192, "up_proj": 8192}),
    "8B qkv": (4096, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}),
    "8B gate, up": (4096, {"gate_proj": 14336, "up_proj": 14336}),
}


class Projections(nn.Module):
    """Layers that read one tensor, called one after the other; the names are those by which siblings are known."""

    def __init__(self, in_features: int, out_features: dict[str, int], device: str) -> None:
        super().__init__()
        for name, size in out_features.items():
            self.add_module(name, nn.Linear(in_features, size, bias=False, device=device, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.children()]


def copies(module: Projections) -> list[Projections]:
    """The module and others like it, so many that no cache keeps the weights of one until its turn."""
    parameters = list(module.parameters())
    count = num_copies(sum(parameter.nbytes for parameter in parameters), parameters[0].device)
    return [module, *(copy.deepcopy(module) for _ in range(count - 1))]


def configs(formats: list[str]) -> list[tuple[str, dict[str, str]]]:
    """(label, configuration) of each format; of those with an input transform also one without it."""
    found = []
    for name in formats:
        config = {"weights": name}
        found.append((name, config))
        if resolve_scheme(entry_fields(config), torch.bfloat16)[0].input_transform is not None:
            found.append((f"{name}, not rotated", config | {"input_transform": "none"}))
    return found


def variants(
    shape: str, config: dict[str, str] | QuantizerConfig, device: str
) -> tuple[list[Projections], list[Projections], list[Projections]]:
    """Copies of the layers in 16 bits, quantized each with a product of its own, and fused."""
    plain = Projections(*SHAPES[shape], device).eval()
    single = unfuse_projections_(quantize_(copy.deepcopy(plain), config))  # `quantize_` fuses what is on a GPU
    fused = [fuse_projections_(copy.deepcopy(module)) for module in copies(single)]
    return copies(plain), copies(single), fused


def timer(modules: list[Projections], x: Tensor) -> Callable[[], float]:
    """A function that gives the seconds of one call: of all modules in turns, at least 16 rows."""
    calls = len(modules) * max(1, 16 // x.shape[1])

    def run() -> None:
        for i in range(calls):
            modules[i % len(modules)](x)

    run()
    if x.device.type == "cpu":

        def measure() -> float:
            start = time.process_time()
            run()
            return (time.process_time() - start) / calls

        return measure
    backend = CudaGraphs()
    backend.warm_up(run, x.device)
    _, replay = backend.capture(run, x.device)
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure_graph() -> float:
        events[0].record()
        replay()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3 / calls

    return measure_graph


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4", "W8A8", "W4A8"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"python {' '.join(sys.argv)}\n{machine()}", flush=True)
    table = [("layers", "weights", "rows", "16-bit, us", "single, us", "fused, us", "single / fused")]
    with torch.no_grad():
        for shape in args.shapes:
            for label, config in configs(args.formats):
                compared = variants(shape, config, args.device)
                for rows in args.rows:
                    x = torch.randn(1, rows, SHAPES[shape][0], device=args.device, dtype=torch.bfloat16)
                    timers = [timer(modules, x) for modules in compared]
                    rounds = [[measure() for measure in timers] for _ in range(args.rounds)]
                    plain_s, single_s, fused_s = (statistics.median(r) for r in zip(*rounds))
                    row = (f"{t * 1e6:.1f}" for t in (plain_s, single_s, fused_s))
                    table.append((shape, label, str(rows), *row, f"{single_s / fused_s:.2f}"))
    print(f"\n{format_table(table)}")


if __name__ == "__main__":
    main()
