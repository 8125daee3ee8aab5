"""Small models of every architecture that GGUF holds, and tokenizers of every kind."""

import json
import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_quant import QuantizerConfig, quantize_
from hf_quant.convert.gguf.vocabulary import LLAMA3, QWEN2


ASSET = Path(__file__).parents[1] / "assets" / "tiny-llama-13m"
_SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None}
_SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# With it the bound of yarn for heads of 32 channels is a whole number, to which llama.cpp rounds it.
_WHOLE = math.exp(16 * math.log(64 / (2 * math.pi)) / 3.999999)
_LLAMA31 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA31 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# {name: (class of the config, fields)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("LlamaConfig", {"rope_parameters": _LLAMA31, "max_position_embeddings": 16384, "head_dim": 32}),
    "llama, linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, yarn": ("Qwen2Config", {"rope_parameters": _YARN}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3moe": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    "gpt-oss": (
        "GptOssConfig",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16},
            "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": _WHOLE},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 16, "num_hidden_layers": 6},
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3, half rotated": ("Phi3Config", {"sliding_window": None, "rope_parameters": _PART}),
}


def make_model(name: str, **fields: Any) -> torch.nn.Module:
    """A random fp32 model with norms that are not 1, and biases that are not 0."""
    kind, own = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**_SIZES, **own, **fields}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in key:
                parameter.mul_(4)
    return model.eval()


def with_one_silent_layer(name: str) -> torch.nn.Module:
    """A model in fp32 but for one quantized layer, whose weights are 0: it shows every other difference of an engine.

    llama.cpp rounds the inputs of quantized layers to 8 bits; of this layer they make no difference.
    """
    model = make_model(name)
    experts = getattr(model.model.layers[0].mlp, "experts", None)
    (model.model.layers[0].mlp.down_proj.weight if experts is None else experts.down_proj).data.zero_()
    scheme = {"weights": "int8", "group_size": 32, "scale_dtype": "float16"}
    silent = "down_proj" if experts is None else "experts"
    quantize_(model, QuantizerConfig(None, modules={f"model.layers.0.mlp.{silent}": scheme}))
    return model


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of about 700 tokens, of a split that llama.cpp has a name for, "spm", or "spm without space"."""
    lines = (ASSET / "eval.txt").read_text()[:30000].splitlines(keepends=True)
    if kind.startswith("spm"):
        return _pieces(lines, adds_space=kind == "spm")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        parts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), plain]
        return pre_tokenizers.Sequence(parts)

    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    llama3 = split(LLAMA3)
    made = tokenizers.Tokenizer(models.BPE())
    kinds = {"gpt-2": whole, "smollm": digits, "llama-bpe": llama3, "dbrx": llama3, "qwen2": split(QWEN2)}
    made.pre_tokenizer, made.decoder = kinds[kind], decoders.ByteLevel()
    special, alphabet = ["<|end|>", "<|start|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    made.model.ignore_merges = kind == "llama-bpe"
    made.add_tokens(["<think>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|start|>", eos_token="<|end|>", chat_template="{{ messages }}"
    )


def _pieces(lines: list[str], *, adds_space: bool) -> PreTrainedTokenizerFast:
    """A tokenizer as conversions from sentencepiece make it: spaces are a letter, unknown letters become bytes."""
    space = "\u2581"
    first = tokenizers.Tokenizer(models.BPE())
    first.normalizer = normalizers.Replace(" ", space)
    trainer = trainers.BpeTrainer(vocab_size=500, limit_alphabet=70, max_token_length=10, show_progress=False)
    first.train_from_iterator([line.strip() for line in lines], trainer)
    stored = json.loads(first.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in stored["merges"]]
    letters = [token for token in stored["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [*dict.fromkeys("".join(merge) for merge in merges), *letters]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend(space)] if adds_space else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", space)])
    made.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TEXTS = (
    "Hello  world 12345 it's   fine\n\n\n don't DON'T \t x\u00e9\u4e2d\U0001f600 end",
    "  leading spaces, def f(x):\n    return x + 1.5e-3\r\n",
    "one<|end|>two </s> three <think>four",
    "",
)
