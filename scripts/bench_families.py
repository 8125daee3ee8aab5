"""Time tokens of small models of many architectures, with random weights, on a CPU: in bf16, and in 4 bits.

    python scripts/bench_families.py --threads 1
    python scripts/bench_families.py whisper marian --rounds 5

Weights and output embedding are in int4 (BitNet's in int2 with one scale a row, and int8), activations and cache in
int8; "unfused" is the same with `fuse_activations=False`. A prompt has `--prompt-tokens`, that of Whisper 30 seconds
of sound. The time of a token is the median, over rounds in which the models take turns, of what tokens take beyond the
first one.
"""

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
import transformers
from torch import nn

from common.checkout import commit
from hf_quant import QuantizerConfig, quantize_
from hf_quant.evaluate import machine
from hf_quant.planning import format_table


def _seq2seq(width: int, layers: int) -> dict[str, int]:
    sizes = {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}
    return {"d_model": width, **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}}


# {model type: scheme of its weights, that of its output embedding}; int4 for all others.
_SCHEMES = {"bitnet": ({"weights": "int2", "granularity": "row", "input_transform": "none"}, "int8")}
_NO_CACHE = ("mamba", "mamba2")  # model types whose layers all have a state instead
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257}
# {name: (model type, fields of its config)}: the sizes of gpt2, opt-125m, falcon-rw-1b with 12 layers, GPT-J and BLOOM
# alike, pythia-160m, whisper-base, bart-base, opus-mt, flan-t5-base, of latent attention like that of MiniCPM3-4B and
# DeepSeek-V2-Lite, of mamba-130m, mamba2-130m, of a hybrid like granite-4.0-h-350m, and some layers of Ministral 3 3B
# and BitNet b1.58 2B4T.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _BASE),
    "opt": ("opt", {**_BASE, "ffn_dim": 3072, "word_embed_proj_dim": 768}),
    "falcon": ("falcon", {**_BASE, "alibi": False}),
    "gptj": ("gptj", {**_BASE, "rotary_dim": 32}),
    "bloom": ("bloom", _BASE),
    "gpt_neox": ("gpt_neox", {**_BASE, "intermediate_size": 3072}),
    "whisper": ("whisper", _seq2seq(512, 6)),
    "bart": ("bart", _seq2seq(768, 6)),
    "marian": ("marian", _seq2seq(512, 6)),
    "t5": ("t5", {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 2048, "feed_forward_proj": "gated-gelu"}),
    "minicpm3": (
        "minicpm3",
        {
            **_BASE,
            "intermediate_size": 2048,
            "q_lora_rank": 384,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_BASE,
            "num_key_value_heads": 12,
            "intermediate_size": 2048,
            "moe_intermediate_size": 384,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
        },
    ),
    "mamba": ("mamba", {**_BASE, "num_hidden_layers": 24, "state_size": 16}),
    "mamba2": ("mamba2", {**_BASE, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "n_groups": 1}),
    "granite_h": (
        "granitemoehybrid",
        {
            **_BASE,
            "num_hidden_layers": 32,
            "layer_types": (["mamba"] * 7 + ["attention"]) * 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
            "position_embedding_type": "nope",
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 32768,
        },
    ),
    "bitnet": (
        "bitnet",
        {
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 8,
            "num_attention_heads": 20,
            "num_key_value_heads": 5,
            "vocab_size": 32768,
        },
    ),
}


def make(name: str) -> nn.Module:
    """A model in bf16 that never ends a generation by itself."""
    kind, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields, dtype=torch.bfloat16)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        is_speech = kind == "whisper"
        auto = transformers.AutoModelForSpeechSeq2Seq if is_speech else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config).eval()
    for field in ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "max_length"):
        setattr(model.generation_config, field, None)
    model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = 1  # T5 names none
    return model


def inputs(model: nn.Module, tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of `generate`: ids, or 30 seconds of sound."""
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(1, model.config.num_mel_bins, 3000, dtype=model.dtype)}
    return {"input_ids": torch.randint(5, 30000, (1, tokens))}


def seconds_of(model: nn.Module, given: dict[str, torch.Tensor], new_tokens: int) -> float:
    """CPU or wall time, by the number of threads, of a generation."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    model.generate(**given, do_sample=False, num_beams=1, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    return clock() - start


def measure(name: str, args: argparse.Namespace) -> tuple[str, ...]:
    """A row of the table."""
    base = make(name)
    given, models = inputs(base, args.prompt_tokens), {"bf16": base}
    head = next(path for path, module in base.named_modules() if module is base.get_output_embeddings())
    kv_cache = None if FAMILIES[name][0] in _NO_CACHE else "int8"
    for fuses in (False, None):
        model = models[f"fused: {fuses}"] = copy.deepcopy(base)
        scheme, of_head = _SCHEMES.get(FAMILIES[name][0], ({"weights": "int4"}, "int4"))
        config = {**scheme, "cpu_activations": "int8", "kv_cache": kv_cache, "modules": {head: of_head}}
        quantize_(model, QuantizerConfig(**config, fuse_activations=fuses))
    found: dict[str, list[tuple[float, float]]] = {key: [] for key in models}
    for turn in range(args.rounds + 1):
        for key, model in models.items():
            first, whole = (seconds_of(model, given, n) for n in (1, args.new_tokens + 1))
            if turn:  # the first one makes the blocks
                found[key].append((first * 1e3, (whole - first) / args.new_tokens * 1e3))
    medians = [[statistics.median(times) for times in zip(*found[key])] for key in models]
    row = [name]
    for bf16, unfused, fused in zip(*medians):  # of the prompt, of a token
        row += [f"{bf16:.1f}", f"{unfused:.1f}", f"{fused:.1f}", f"{bf16 / fused:.2f}"]
    return tuple(row)


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"(default: {' '.join(FAMILIES)})")
    parser.add_argument("--threads", type=int, help="of torch (default: torch's); CPU time with 1")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    unknown = set(args.families) - FAMILIES.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    print(f"python {' '.join(sys.argv)}\n{machine()}; commit {commit()}\n")
    heads = [f"{what} {kind}" for what in ("prompt", "token") for kind in ("bf16, ms", "unfused", "fused", "x bf16")]
    print(format_table([("family", *heads), *(measure(name, args) for name in args.families or FAMILIES)]))


if __name__ == "__main__":
    main()
