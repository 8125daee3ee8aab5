"""Attention on CPUs: a decoding step over a quantized KV cache, and that of a prompt, against what bf16 takes.

A part of bench_cpu.py.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cpulab.timing import Turn, interleaved, kernels_in_use, print_table
from hf_quant.formats import FORMATS
from hf_quant.kernels import kv_attention
from hf_quant.kernels.kv_attention.op import code_width
from hf_quant.kernels.native.attention import attention_of_values


SDPA, MATMUL, NATIVE = "bf16 SDPA", "bf16, two matmuls", "bf16, native"
GROUPS = {"int8": None, "int4": 64, "int2": 32, "fp8_e4m3": None}  # channels that share a scale; None: all of a head
TARGETS = {"int8": 1.6, "int4": 2.2}  # ratio to SDPA, 8192 tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the subcommand."""
    parser.add_argument("--heads", nargs="+", default=["32/8x128", "8/8x128", "16/8x64"], metavar="H/H_KVxD")
    parser.add_argument("--context", nargs="+", type=int, default=[8192], help="tokens in the cache")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--copies", type=int, default=4, help="different caches to rotate through")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--json", type=Path, help="write the records there, too")
    parser.set_defaults(run=bench)


def random_cache(H_kv: int, T: int, D: int, format: str) -> list[Tensor | None]:
    """Codes, scales and, of packed formats, offsets of keys and then of values [1, H_kv, T, D]."""
    spec, group = FORMATS[format].spec, GROUPS[format] or D
    parts: list[Tensor | None] = []
    for _ in range(2):
        if spec.is_packed:
            codes = torch.randint(-(2**31), 2**31, (1, H_kv, T, code_width(spec, D)), dtype=torch.int64).int()
        else:
            codes = torch.randn(1, H_kv, T, D).mul_(30).to(spec.dtype)
        scale = (torch.rand(1, H_kv, T, max(D // group, 1)) + 0.5).div_(FORMATS[format].max).half()
        parts += [codes, scale, torch.randn_like(scale) if spec.is_packed else None]
    return parts


def matmuls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same without torch's kernel for it, which is slow for one query."""
    B, H, S, D = q.shape
    scores = q.view(B, k.shape[1], -1, D) @ k.transpose(2, 3)
    return (scores.float().mul_(D**-0.5).softmax(-1).to(q.dtype) @ v).view(B, H, S, D)


def measure(heads: str, T: int, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """{name: (seconds of one step, GB/s at which the cache is read)}."""
    (H, H_kv), D = map(int, heads.split("x")[0].split("/")), int(heads.split("x")[1])
    q = torch.randn(1, H, 1, D).bfloat16()
    plain = [torch.randn(2, 1, H_kv, T, D).bfloat16() for _ in range(args.copies)]
    sdpa = lambda kv: F.scaled_dot_product_attention(q, *kv, enable_gqa=H != H_kv)  # noqa: E731
    turns = {SDPA: _turn(sdpa, plain), MATMUL: _turn(lambda kv: matmuls(q, *kv), plain)}
    turns[NATIVE] = _turn(lambda kv: attention_of_values(q, *kv, None, is_causal=False, scale=D**-0.5), plain)
    for format in args.formats:
        caches = [random_cache(H_kv, T, D, format) for _ in range(args.copies)]
        # As a cache reads its codes: in a frame, rotated.
        options = {"format": format, "is_causal": True, "window": 0, "scale": None, "rotates_keys": True}
        options |= {"rotates_values": True, "k_frame": torch.rand(1, H_kv, 2, D), "k_first": torch.rand(1, H_kv, D)}
        turns[format] = _turn(lambda parts, options=options: kv_attention(q, *parts, None, None, **options), caches)
    seconds = {name: each / args.copies for name, each in interleaved(turns, args.rounds).items()}
    return {name: (each, turns[name].nbytes / each / 1e9) for name, each in seconds.items()}


def _turn(call: Callable, arguments: list) -> Turn:
    nbytes = sum(part.nbytes for part in arguments[0] if part is not None)
    return Turn(lambda: [call(argument) for argument in arguments], len(arguments), nbytes)


def bench(args: argparse.Namespace) -> None:
    """Every format against bf16, for all heads, contexts and thread counts."""
    print(f"kernels: {kernels_in_use()}")
    records = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for heads in args.heads:
            for T in args.context:
                torch.manual_seed(0)
                found = measure(heads, T, args)
                print(f"\n{heads} heads, {T} tokens, {threads} thread(s); load {os.getloadavg()[0]:.1f}")
                rows = {}
                for name, (each, gbps) in found.items():
                    ratios = [found[base][0] / each for base in (SDPA, MATMUL)]
                    target = TARGETS.get(name) if T == 8192 else None
                    verdict = "" if target is None else f"{'PASS' if ratios[0] >= target else 'short of'} {target}"
                    rows[name] = [f"{each * 1e3:.2f}", f"{gbps:.1f}", *(f"{ratio:.2f}" for ratio in ratios), verdict]
                    record = {
                        "heads": heads,
                        "tokens": T,
                        "threads": threads,
                        "name": name,
                        "seconds": each,
                        "gbps": gbps,
                    }
                    records.append({**record, "ratio_to_sdpa": ratios[0], "ratio_to_matmuls": ratios[1]})
                print_table(["", "ms", "GB/s", "x SDPA", "x matmuls", "target"], rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"environment": args.environment, "records": records}, indent=1))


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand for prompts."""
    parser.add_argument("--heads", nargs="+", default=["9/3x64", "32/8x128"], metavar="H/H_KVxD")
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048], help="of the prompt")
    parser.add_argument("--encoder", action="store_true", help="each token sees all others, as in BERT and ViT")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.set_defaults(run=bench_prompt)


def bench_prompt(args: argparse.Namespace) -> None:
    """The native attention of a prompt in bf16 against torch's, for all heads, lengths and thread counts."""
    B, is_causal = args.batch, not args.encoder
    print(f"kernels: {kernels_in_use()}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        rows = {}
        for heads in args.heads:
            (H, H_kv), D = map(int, heads.split("x")[0].split("/")), int(heads.split("x")[1])
            for S in args.tokens:
                q, k, v = (torch.randn(B, S, count, D).bfloat16().transpose(1, 2) for count in (H, H_kv, H_kv))
                sdpa = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(  # noqa: E731
                    q, k, v, is_causal=is_causal, enable_gqa=True
                )
                ours = lambda q=q, k=k, v=v, D=D: attention_of_values(  # noqa: E731
                    q, k, v, None, is_causal=is_causal, scale=D**-0.5
                )
                found = interleaved({SDPA: Turn(sdpa, 1, 0), "ours": Turn(ours, 1, 0)}, args.rounds)
                rows[f"{heads}, {S} tokens"] = [
                    *(f"{each * 1e3:.2f}" for each in found.values()),
                    f"{found[SDPA] / found['ours']:.2f}",
                ]
        print(f"\n{threads} thread(s); load {os.getloadavg()[0]:.1f}")
        print_table(["", "SDPA, ms", "ours, ms", "x SDPA"], rows)
