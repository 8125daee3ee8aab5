"""`generate` with a mixture of experts that does not fit into memory in 16 bit, batch 1: tokens/s, time and memory.

    python scripts/bench_moe.py                       # int4, 14.3B parameters: 28.6 GB in 16 bit, 9 GB here
    python scripts/bench_moe.py --format W4A8 --threads 1

The model is the Qwen2-MoE of transformers' defaults (hidden 2048, 24 layers, 60 experts of which 4 are taken,
vocabulary 151936) with random weights. One layer is made in bf16 and quantized; the others are copies of it, in memory
of their own: a model of 16 bit never exists. Embeddings and the output embedding stay in 16 bit, as by default.
"""

import argparse
import copy
import resource
import sys

import torch
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from hf_quant import quantize_
from hf_quant.evaluate import generation_speed, machine


def materialize(module: nn.Module) -> nn.Module:
    """Random weights for a module on the meta device: norms of one, the rest normal."""
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(std=0.02)
    return module


def make_model(format: str, config: Qwen2MoeConfig) -> Qwen2MoeForCausalLM:
    """The model with quantized layers, on the CPU."""
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(config).bfloat16().eval()
    layers = model.model.layers
    first = materialize(layers[0])
    quantize_(first, format)
    for i in range(len(layers)):
        layers[i] = first if i == 0 else copy.deepcopy(first)
        layers[i].self_attn.layer_idx = i
    for owner, name in ((model.model, "embed_tokens"), (model.model, "norm"), (model, "lm_head")):
        setattr(owner, name, materialize(getattr(owner, name)))
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def nbytes(model: nn.Module) -> int:
    """Count the bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def main(arguments: list[str] | None = None) -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int4", help="a format or preset of hf_quant (default: int4)")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--threads", type=int, help="of torch (default: torch's)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    config = Qwen2MoeConfig(num_hidden_layers=args.layers, num_experts=args.experts, dtype=torch.bfloat16)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Qwen2MoeForCausalLM(config).parameters())
    print(f"python {' '.join(sys.argv)}\n{machine()}")
    model = make_model(args.format, config)
    sizes = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "rounds": args.rounds}
    with torch.no_grad():
        speed = generation_speed({args.format: model}, **sizes)[args.format]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{count / 1e9:.2f}B parameters, {count * 2 / 1e9:.1f} GB in 16 bit")
    print(f"{args.format}: {nbytes(model) / 1e9:.2f} GB, peak memory of the process {peak / 1e9:.2f} GB")
    print(f"prefill of {args.prompt_tokens} tokens {speed.prefill * 1e3:.0f} ms, decoding {speed.decode:.2f} tokens/s")


if __name__ == "__main__":
    main()
