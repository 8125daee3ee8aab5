"""Speed of `generate`: 16 bit, our formats and, where they are installed, other libraries and engines, in turns.

    python scripts/bench_generate.py                          # the figures of docs/cpu_speed.md
    python scripts/bench_generate.py --rivals                 # with all libraries and engines that are installed
    python scripts/bench_generate.py --rivals llama.cpp vLLM --head --formats int4 W4A8 --kv-cache int8 --batch 8
    python scripts/bench_generate.py --compile --formats int8 int4
    python scripts/bench_generate.py --compile --head --formats int8 int4   # with a quantized output embedding
    python scripts/bench_generate.py --graphs --device cuda   # decoding captured, by hf_quant.capture_generate
    python scripts/bench_generate.py --graphs --formats W4A8 --kv-cache int8 --only-both   # on a CPU beside eager ones
    python scripts/bench_generate.py --threads 1 --clock cpu  # on a machine that others use, too
    python scripts/bench_generate.py --threads 1 --head --formats int4 W4A8 --kv-cache int8 --only-both --unfused
    python scripts/bench_generate.py --shape moe --threads 1 --head --formats int4 W4A8 --kv-cache int8 --only-both
    python scripts/bench_generate.py --context 8192 --kv-cache int8 int4 --formats int4     # quantized KV caches
    python scripts/bench_generate.py --shape llama-3.1-8b --device cuda --graphs --context 131072 --kv-cache int4 \
        --formats int4 --only-both

The model is a Llama of 468M parameters with random weights in bf16 (hidden 1024, 24 layers, intermediate 4096,
vocabulary 32000), of another --shape (moe: a small Qwen3-MoE; hybrid: a Qwen3.5 of 12 layers), or a directory given by
--model. Every library leaves the output embedding in 16 bit; ours quantizes it with --head. The models take turns, one
generation each; the medians count: of the time to the first token, and of the interval between tokens. With --kv-cache
the 16-bit model and each format are measured with each quantized cache, too (--only-both: only formats with a cache,
next to 16 bit with one of 16 bit). --context is the length of the prompt; memory is then measured as well: a
generation's peak beside the weights. --rivals adds torchao, optimum-quanto and bitsandbytes as far as they are
installed, llama.cpp, if the packages llama-cpp-python and gguf are (a Llama on the CPU), and vLLM's CPU build, if
`make engines` has installed it (wall time only, because it runs in a process of its own); or those of them whose names
begin as given.
"""

import argparse
import copy
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from common import vllm_engine
from common.cache_quality import parse_cache
from common.checkout import commit
from common.engine import Engine
from hf_quant import QuantizerConfig, capture_generate, quantize_
from hf_quant.evaluate import PeakMemory, bits_per_weight, generation_speed, machine
from hf_quant.integrations.loading import trim_memory
from hf_quant.planning import format_table


HEAD = "lm_head"
FORMATS = ("int8", "W8A8", "int4", "W4A8", "nf4", "fp8", "int3", "int2")


SHAPES = {
    "468m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 32000},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "moe": {"hidden_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 32000}
    | {"num_experts": 64, "num_experts_per_tok": 8, "head_dim": 64},
    "hybrid": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12, "vocab_size": 32000}
    | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
}
# Of queries, of keys and values.
HEADS = {"468m": (16, 16), "llama-3.1-8b": (32, 8), "moe": (16, 4), "hybrid": (8, 2)}
CONFIGS = {"moe": Qwen3MoeConfig, "hybrid": Qwen3_5TextConfig}


def make_model(path: Path | None, shape: str, layers: int | None, context: int, device: str) -> nn.Module:
    """The model to measure, in bf16."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    heads, kv_heads = HEADS[shape]
    config = CONFIGS.get(shape, LlamaConfig)(
        **{**SHAPES[shape], **({} if layers is None else {"num_hidden_layers": layers})},
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max(2048, context),
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are not parameters
    return model


# Other libraries. Each function quantizes a model in place, as that library's documentation says for the CPU.


def _torchao_int8(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    torchao_quantize_(model, Int8WeightOnlyConfig(), _not_head)


def _torchao_int4(model: nn.Module) -> None:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    torchao_quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=128), _not_head)


def _not_head(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != HEAD


def _quanto(weights: str) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, weights), exclude=HEAD)
        quanto.freeze(model)

    return run


def _bitsandbytes_nf4(model: nn.Module) -> None:
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if not _not_head(module, name):
            continue
        new = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        new.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
        new.bias = module.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new.to(module.weight.device))


RIVALS: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    "torchao int8": ("torchao", _torchao_int8),
    "torchao int4 g128": ("torchao", _torchao_int4),
    "quanto qint8": ("optimum.quanto", _quanto("qint8")),
    "quanto qint4": ("optimum.quanto", _quanto("qint4")),
    "bitsandbytes nf4": ("bitsandbytes", _bitsandbytes_nf4),
}


def installed(package: str) -> bool:
    """Return True if a package, perhaps inside another, can be imported."""
    parts = package.split(".")
    return all(importlib.util.find_spec(".".join(parts[: i + 1])) is not None for i in range(len(parts)))


def wanted(name: str, args: argparse.Namespace) -> bool:
    """Return True if --rivals asks for this one."""
    return not args.rivals or name.startswith(tuple(args.rivals))


def make_variants(base: nn.Module, args: argparse.Namespace) -> tuple[dict[str, nn.Module], dict[str, float]]:
    """({name: model}, {name: seconds to quantize it}), the 16-bit one first."""
    todo: dict[str, Callable[[nn.Module], object]] = {}
    for weights in (*args.formats, None):
        for cache in (None, *args.kv_cache):
            if (weights is None and cache is None) or (args.only_both and (weights is None or cache is None)):
                continue
            name = (weights or "bf16") + ("" if cache is None else f", {cache} cache")
            for fuses in (False, None) if args.unfused and weights is not None else (None,):
                # By name: it may be tied.
                heads = None if args.head is None or weights is None else {HEAD: args.head or weights}
                kv_cache = None if cache is None else parse_cache(cache)
                config = QuantizerConfig(weights, kv_cache=kv_cache, fuse_activations=fuses, modules=heads)
                title = name if fuses is None else f"{name}, unfused"
                todo[title] = lambda model, config=config: quantize_(model, config)
    if args.rivals is not None:
        for name, (package, function) in RIVALS.items():
            if not wanted(name, args):
                continue
            if installed(package):
                todo[name] = function
            else:
                print(f"{name}: {package} is not installed")
    models, seconds = {"bf16": base}, {"bf16": 0.0}
    for name, function in todo.items():
        shares = name.startswith("bf16")  # only the cache differs
        model = copy.deepcopy(base, {id(p): p for p in base.parameters()} if shares else None)
        start = time.perf_counter()
        function(model)
        seconds[name] = time.perf_counter() - start
        models[name] = model.to(args.device).eval()  # bitsandbytes has a fast CPU path in evaluation mode only
        print(f"{name}: quantized in {seconds[name]:.1f} s", file=sys.stderr)
    base.to(args.device)
    return models, seconds


def make_engines(base: nn.Module, args: argparse.Namespace, work: Path) -> dict[str, Engine]:
    """{name: engine}: llama.cpp in two formats, vLLM in 16 bit and in two schemes, as far as they are installed."""
    sizes = {"batch_size": args.batch, "context": args.prompt_tokens + args.new_tokens}
    todo: dict[str, Callable[[], Engine]] = {}
    if installed("llama_cpp") and installed("gguf"):
        from common.llama_engine import LlamaCpp, write_gguf

        for kind in ("Q4_0", "Q8_0"):
            path = work / f"{kind}.gguf"
            todo[f"llama.cpp {kind}"] = lambda path=path, kind=kind: LlamaCpp(
                base.config, write_gguf(base, path, kind), **sizes
            )
    elif wanted("llama.cpp", args):
        print("llama.cpp: the packages llama-cpp-python and gguf are not installed")
    if args.clock == "wall" and vllm_engine.PYTHON.exists():
        for scheme in (None, "W8A8", "W4A16"):
            name = "vLLM " + (scheme or "bf16")
            todo[name] = lambda scheme=scheme: vllm_engine.Vllm(copy.deepcopy(base), scheme, **sizes)
    elif wanted("vLLM", args):
        print("vLLM: `make engines` installs it; it is measured in wall time only")
    found = {}
    for name, make in todo.items():
        if not wanted(name, args):
            continue
        try:
            found[name] = make()
        except (RuntimeError, ValueError) as error:
            print(f"{name}: {error}")
    return found


def report(models: dict[str, nn.Module], seconds: dict[str, float], args: argparse.Namespace) -> str:
    """Measure, and make the table."""
    memory = {name: () for name in models} if args.context is None else peaks(models, args)
    speeds = generation_speed(
        models,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        warm_up=3 if args.compile or args.graphs else 1,
        batch_size=args.batch,
        clock=time.thread_time if args.clock == "cpu" else time.perf_counter,
        progress=sys.stderr.isatty(),
    )
    base = speeds["bf16"]
    rows = [("weights", "bits/weight", "quantize s", f"prefill of {args.prompt_tokens}, ms", "x bf16", "decode tok/s")]
    rows[0] += ("x bf16",) if args.context is None else ("x bf16", "peak GB beside the weights", "weights GB")
    for name, speed in speeds.items():
        bits = bits_per_weight(models[name])
        quantized = f"{seconds[name]:.1f}" if name in seconds and name != "bf16" else ""
        rows.append(
            (
                name,
                "16.00" if name == "bf16" else "" if bits is None else f"{bits:.2f}",
                quantized,
                f"{speed.prefill * 1e3:.0f}",
                f"{base.prefill / speed.prefill:.2f}",
                f"{speed.decode:.1f}",
                f"{speed.decode / base.decode:.2f}",
                *memory[name],
            )
        )
    return format_table(rows)


def peaks(models: dict[str, nn.Module], args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """{name: (GB that a generation takes at its peak beside the weights, GB of the weights)}."""
    found = {}
    for name, model in models.items():
        trim_memory()  # what the one before has freed would serve this one
        prompt = torch.randint(0, model.config.vocab_size, (args.batch, args.prompt_tokens), device=model.device)
        with PeakMemory(model.device) as peak:
            mask = torch.ones_like(prompt)
            model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=2, min_new_tokens=2)
        found[name] = (f"{peak.nbytes / 1e9:.2f}", f"{model.get_memory_footprint() / 1e9:.2f}")
    return found


def compile_(models: dict[str, nn.Module]) -> None:
    """Compile every forward and give it a cache of fixed shape: one graph to prefill, one to decode."""
    torch._dynamo.config.recompile_limit = 16 * len(models)  # the models share their code
    for model in models.values():
        model.generation_config.cache_implementation = "static"
        model.forward = torch.compile(model.forward, dynamic=False)


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a causal language model instead of the random one")
    parser.add_argument("--shape", choices=SHAPES, default="468m", help="of the random model (default: 468m)")
    parser.add_argument("--layers", type=int, help="of the random model (default: its shape's)")
    parser.add_argument("--formats", nargs="*", default=FORMATS, help=f"(default: {' '.join(FORMATS)})")
    parser.add_argument(
        "--head",
        nargs="?",
        const="",
        metavar="FORMAT",
        help="quantize the output embedding, too (default: as all)",
    )
    parser.add_argument("--rivals", nargs="*", metavar="NAME", help="measure others, too, where installed (or these)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default: 1)")
    parser.add_argument("--compile", action="store_true", help="torch.compile, with a static cache")
    parser.add_argument(
        "--graphs", action="store_true", help="decode by hf_quant.capture_generate (on CPUs: quantized caches, too)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time, with --threads 1")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--context", type=int, help="length of the prompt; measures memory, too")
    help = "with quantized caches, too: int4, int4:sink_tokens=4:recent_tokens=32"
    parser.add_argument("--kv-cache", nargs="*", default=(), metavar="FORMAT", help=help)
    parser.add_argument(
        "--only-both", action="store_true", help="no format without a cache, no cache without a format"
    )
    parser.add_argument("--unfused", action="store_true", help="with fuse_activations=False, too")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.clock == "cpu" and torch.get_num_threads() != 1:
        parser.error("--clock cpu measures one thread: give --threads 1")
    torch.set_grad_enabled(False)
    args.prompt_tokens = args.context or args.prompt_tokens
    length = args.prompt_tokens + args.new_tokens
    base = make_model(args.model, args.shape, args.layers, length, args.device).eval()
    print(f"python {' '.join(sys.argv)}")
    print(f"{machine()}; commit {commit()}; {args.clock} time")
    count = sum(p.numel() for p in base.parameters())
    print(
        f"{type(base).__name__}, {count / 1e6:.0f}M parameters, batch {args.batch}, {args.rounds} rounds", flush=True
    )
    models, seconds = make_variants(base, args)
    if args.compile:
        compile_(models)
    if args.graphs and args.device == "cpu":
        models |= {f"{name}, captured": copy.deepcopy(models[name]) for name in models if name.endswith(" cache")}
    graphs = {
        name: capture_generate(model)
        for name, model in models.items()
        if args.graphs and (args.device != "cpu" or name.endswith(", captured"))
    }
    with tempfile.TemporaryDirectory() as work:
        has_engines = args.rivals is not None and args.context is None and args.device == "cpu"
        engines = make_engines(base, args, Path(work)) if has_engines else {}
        print(f"\n{report({**models, **engines}, seconds, args)}")
        for engine in engines.values():
            engine.close()
    for name, captured in graphs.items():
        print(f"{name}: {captured}")


if __name__ == "__main__":
    main()
