"""Architectures that models of transformers and files of llama.cpp share: names, order of rows, hyperparameters.

Names are those of the package gguf (`gguf.get_tensor_name_map`). What differs is read in llama.cpp's converter
(https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py) and its models (src/models):

- of llama, channels of queries and keys that are rotated together lie side by side; transformers has them half a head
  apart. Rows are put in another order, and with them their scales and codes.
- of gemma3, norms hold 1 + weight.
- of gpt-oss, transformers has experts transposed, and their gate and up in turn.
"""

import math
import re
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.checkpoint import shorten
from hf_quant.convert.gguf.layouts import Layout
from hf_quant.convert.gguf.package import gguf_package


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_SUFFIXES = (".weight", ".bias")
# Fused experts of transformers: gate and up are one parameter there, and two in files.
_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<parts>gate_up|down)_proj(?P<bias>_bias)?")
FACTORS = "rope_freqs.weight"  # divisors of the frequencies of rotation, by which llama.cpp knows the kind "llama3"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_WINDOWS = ("gemma3", "gpt-oss")  # of tokens, to which some layers attend
_UNSCALED = ("qwen2_moe",)  # the probabilities of the experts of a token are not scaled to the sum 1
_PATTERN = 6  # of gemma3: each sixth layer attends to all tokens
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
_SWIGLU = (1.702, 7.0)
_LOCAL_THETA = 10000.0
_LARGEST_GEMMA3 = 62  # layers of the model that scales queries by the width of a head other than its own


class Architecture(NamedTuple):
    """An architecture of llama.cpp, and the models of transformers that compute the same."""

    name: str
    model_types: tuple[str, ...]
    pairs_are_neighbors: bool = False  # rows of queries and keys are in the order of rotated pairs
    offset: float = 0.0  # that norms hold beside their weight
    has_experts: bool = False  # in every layer
    alternates: bool = False  # transformers has rows of gate and up in turn, and matrices of experts transposed
    is_read_by_host: bool = True  # transformers makes a config of its metadata

    def layouts(self, model: "PreTrainedModel") -> dict[str, Layout]:
        """Return {name of a parameter in transformers: its layout in a file}. Raises ValueError if one has none."""
        gguf, config = gguf_package(), model.config
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        known = gguf.get_tensor_name_map(kinds[self.name], config.num_hidden_layers)
        found: dict[str, Layout] = {}
        for name, values in model.state_dict().items():
            experts = _EXPERTS.fullmatch(name)
            if experts is not None:
                names = [f"{experts['prefix']}.{part}_proj" for part in experts["parts"].split("_")]
                suffix, axis = ".bias" if experts["bias"] else ".weight", 1
            else:
                names, suffix, axis = [name], "" if name.endswith(_SUFFIXES) else ".weight", 0
            own = [known.get_name(part, try_suffixes=_SUFFIXES) for part in names]
            if None in own:
                raise ValueError(f"{name} of this {type(model).__name__} has no name in files of {self.name}")
            order = self._order(name, config, values.shape[0])
            if self.alternates and len(names) > 1:
                order = torch.arange(values.shape[-1]).view(-1, 2).T.flatten()
            offset = self.offset if name.endswith("norm.weight") else 0.0
            is_transposed = self.alternates and experts is not None and values.dim() == 3
            found[name] = Layout(tuple(f"{part}{suffix}" for part in own), axis, order, offset, is_transposed)
        return found

    def _order(self, name: str, config: "PreTrainedConfig", rows: int) -> Tensor | None:
        """Return the rows, as transformers counts them, in the order of the file; None if that is the same."""
        part = name.split(".")[-2] if "." in name else name
        if not self.pairs_are_neighbors or part not in ("q_proj", "k_proj"):
            return None
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).flatten()


ARCHITECTURES = (
    Architecture("llama", ("llama", "mistral"), pairs_are_neighbors=True),
    Architecture("llama", ("mixtral",), pairs_are_neighbors=True, has_experts=True, is_read_by_host=False),
    Architecture("qwen2", ("qwen2",)),
    Architecture("qwen2moe", ("qwen2_moe",), has_experts=True),
    Architecture("qwen3", ("qwen3",)),
    Architecture("qwen3moe", ("qwen3_moe",), has_experts=True),
    Architecture("gpt-oss", ("gpt_oss",), has_experts=True, alternates=True, is_read_by_host=False),
    Architecture("gemma3", ("gemma3_text",), offset=1.0),
    Architecture("phi3", ("phi3",)),
)


def architecture_of(config: "PreTrainedConfig") -> Architecture:
    """Return the architecture of a model. Raises ValueError if there is none."""
    for found in ARCHITECTURES:
        if config.model_type in found.model_types:
            return found
    known = ", ".join(sorted(kind for found in ARCHITECTURES for kind in found.model_types))
    raise ValueError(f"it is a {config.model_type} model; models with a form in GGUF here: {known}")


# From transformers to GGUF.


def hyperparameters(found: Architecture, config: Any) -> dict[str, Any]:
    """Return {key in GGUF without the architecture: value}. Raises ValueError if llama.cpp computes something else."""
    reason = next(_differences(found, config), None)
    if reason is not None:
        raise ValueError(f"llama.cpp has no such {config.model_type} model: {reason}")
    D = head_dim(config)
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": D,
        "attention.value_length": D,
    }
    rope = _rope(config)
    values["rope.freq_base"] = float(rope["rope_theta"])
    values["rope.dimension_count"] = int(D * rope.get("partial_rotary_factor", 1.0))
    if rope.get("rope_type", "default") in ("linear", "yarn"):
        values["rope.scaling.type"], values["rope.scaling.factor"] = rope["rope_type"], float(rope["factor"])
        if rope["rope_type"] == "yarn":
            values["rope.scaling.original_context_length"] = _original_length(rope, config)
    if found.name in _WINDOWS:
        values["attention.sliding_window"] = config.sliding_window
    if found.has_experts:
        values |= {key: getattr(config, name) for key, name in _expert_fields(config).items()}
    return values


def _expert_fields(config: Any) -> dict[str, str]:
    """Return {key in GGUF: field of the config} of numbers and sizes of experts."""
    own = {"expert_feed_forward_length": "intermediate_size"} if config.model_type == "gpt_oss" else {}
    return {key: name for key, name in {**_EXPERT_FIELDS, **own}.items() if hasattr(config, name)}


def factors(config: Any) -> Tensor | None:
    """Return `rope_freqs.weight` [head_dim / 2] fp32 of a model with rotation of the kind "llama3", else None."""
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    return _factors(rope, head_dim(config), float(rope["rope_theta"]))


def _factors(rope: dict[str, Any], D: int, theta: float) -> Tensor:
    """Return the divisors of frequencies as llama.cpp's converter computes them."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    waves = 2 * math.pi * theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    smooth = ((length / waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def head_dim(config: Any) -> int:
    """Return the channels of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope(config: Any) -> dict[str, Any]:
    """Return the parameters of rotation; of gemma3 those of layers that attend to all tokens."""
    return config.rope_parameters.get("full_attention", config.rope_parameters)


def _original_length(rope: dict[str, Any], config: Any) -> int:
    return rope.get("original_max_position_embeddings") or config.max_position_embeddings


def _differences(found: Architecture, config: Any) -> Iterator[str]:
    """Yield the reasons why llama.cpp would compute something else with these hyperparameters."""
    rope, kinds = _rope(config), set(getattr(config, "layer_types", None) or ())
    kind = rope.get("rope_type", "default")
    is_qwen = found.name.startswith("qwen")
    allowed = ("default", "linear", "yarn", "llama3") if found.name == "llama" or is_qwen else ("default",)
    allowed = {"gemma3": ("default", "linear"), "gpt-oss": ("default", "yarn")}.get(found.name, allowed)
    if kind not in allowed:
        yield f"its rotation is of the kind {kind!r}; here: {', '.join(allowed)}"
    own = {"factor", "rope_theta", "rope_type", "original_max_position_embeddings", "partial_rotary_factor", "type"}
    own |= {name for name, value in _YARN.items() if rope.get(name) == value}
    own |= {"truncate"} if found.name == "gpt-oss" else set()  # see rounds_bounds
    more = {name for name in rope.keys() - own if rope[name] is not None}
    if kind == "yarn" and more:
        yield f"its yarn rotation has {', '.join(sorted(more))}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and found.name != "phi3":
        yield "it rotates a part of each head"
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if act != ("gelu_pytorch_tanh" if found.name == "gemma3" else "silu"):
        yield f"its activation is {act}"
    if is_qwen and (kinds - {"full_attention"} or getattr(config, "use_sliding_window", False)):
        yield "it attends to a window of tokens"
    if found.has_experts:
        yield from _differences_of_experts(config)
    if found.name == "gpt-oss":
        yield from _differences_of_gpt_oss(config)
    if found.name == "gemma3":
        yield from _differences_of_gemma3(config)


def _differences_of_experts(config: Any) -> Iterator[str]:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        yield "it has layers without experts"
    scales = getattr(config, "norm_topk_prob", True)
    if scales == (config.model_type in _UNSCALED):
        yield f"its norm_topk_prob is {scales}"


def _differences_of_gpt_oss(config: Any) -> Iterator[str]:
    layers = range(config.num_hidden_layers)
    if list(config.layer_types) != ["full_attention" if i % 2 else "sliding_attention" for i in layers]:
        yield "its layer_types are not sliding_attention and full_attention in turn"
    if not config.sliding_window:
        yield "it has no sliding_window"
    if (config.swiglu_alpha, config.swiglu_limit) != _SWIGLU:
        yield f"its swiglu_alpha and swiglu_limit are not {_SWIGLU}"
    if not config.attention_bias:
        yield "its attention has no biases"


def rounds_bounds(config: Any) -> bool:
    """Return True if llama.cpp rounds the bounds between which yarn interpolates frequencies, but the model does not.

    The models of OpenAI do not: llama.cpp computes the frequencies between them otherwise by some per cent.
    """
    rope = _rope(config)
    return rope.get("rope_type") == "yarn" and rope.get("truncate") is False


def _differences_of_gemma3(config: Any) -> Iterator[str]:
    layers = range(config.num_hidden_layers)
    expected = ["sliding_attention" if (i + 1) % _PATTERN else "full_attention" for i in layers]
    if list(config.layer_types) != expected:
        yield f"its layer_types are not a full_attention after each {_PATTERN - 1} of sliding_attention"
    if config.query_pre_attn_scalar != _query_scalar(config):
        yield f"it scales queries by 1 / sqrt({config.query_pre_attn_scalar})"
    local = config.rope_parameters["sliding_attention"]
    if local["rope_theta"] != _LOCAL_THETA or local.get("rope_type", "default") != "default":
        yield f"layers with a window rotate by {local}; there: {_LOCAL_THETA:g}"
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            yield f"it has {name}"


def _query_scalar(config: Any) -> int:
    """Return the number by whose root llama.cpp divides the scores of gemma3."""
    if config.num_hidden_layers == _LARGEST_GEMMA3:
        return config.hidden_size // config.num_attention_heads
    return head_dim(config)


# From GGUF to transformers.

# Of models with experts: what llama.cpp takes where a file lacks it is in `_complete_experts_`.
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_KNOWN = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_REAL = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor")
_TEXT = ("rope.scaling.type",)
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}


def config_fields(found: Architecture, metadata: dict[str, Any], tensors: Container[str]) -> dict[str, Any]:
    """Return the fields of a config that `complete_` does not set, for files that transformers does not read.

    Raises ValueError if the metadata lacks one.
    """
    keys = {name: f"{found.name}.{key}" for name, key in _FIELDS.items()}
    lost = next((key for key in keys.values() if key not in metadata), None)
    if lost is not None:
        raise ValueError(f"its metadata lacks {lost}")
    fields = {name: metadata[key] for name, key in keys.items()}
    theta = metadata.get(f"{found.name}.rope.freq_base", 10000.0)  # llama.cpp's default
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    return {
        **fields,
        "vocab_size": metadata.get(f"{found.name}.vocab_size") or len(tokens),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in tensors,
        **{f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()},
    }


def complete_(
    config: Any, found: Architecture, metadata: dict[str, Any], tensors: Container[str], divisors: Tensor | None
) -> None:
    """Set what transformers leaves out when it makes a config of a GGUF file's metadata {key: value}.

    `tensors` are the names in the file, `divisors` the tensor `rope_freqs.weight`, if there is one. Raises ValueError
    if the file has a hyperparameter that is unknown, or that the model of transformers does not have.
    """
    for name, tensor in _BIASES.items():
        if hasattr(config, name):
            setattr(config, name, tensor in tensors)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # defaults of the host for another vocabulary
        number = getattr(config, name)
        if isinstance(number, int) and number >= config.vocab_size:
            setattr(config, name, None)
    own = {key.removeprefix(f"{found.name}."): v for key, v in metadata.items() if key.startswith(f"{found.name}.")}
    window = {"attention.sliding_window"} if found.name in ("phi3", *_WINDOWS) else set()
    unknown = sorted(own.keys() - _KNOWN - window - (_EXPERT_FIELDS.keys() if found.has_experts else set()))
    if unknown:
        raise ValueError(f"it is a {found.name} model with {', '.join(unknown[:5])}, which is not read here")
    _check_values(own)
    if found.has_experts:
        _complete_experts_(config, own)
    D = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    if own.get("attention.value_length", D) != D:
        raise ValueError(f"its keys have {D} channels, its values {own['attention.value_length']}")
    if found.name != "phi3" or D != head_dim(config):
        config.head_dim = D
    rope = _rope(config)
    rotated = own.get("rope.dimension_count", D)
    if rotated != D:
        if found.name != "phi3":
            raise ValueError(f"it rotates {rotated} of the {D} channels of a head")
        rope["partial_rotary_factor"] = rotated / D
    kind = own.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope["rope_type"], rope["factor"] = kind, own["rope.scaling.factor"]
        if kind == "yarn":
            rope["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
        if found.name == "gpt-oss":
            rope |= {**_YARN, "truncate": False}  # as all models of OpenAI, which files do not tell
    elif kind != "none":
        raise ValueError(f"its rotation is of the kind {kind!r}; readable: linear, yarn")
    if divisors is not None:
        rope.update(_llama3(divisors, D, float(rope["rope_theta"])))
    if found.name == "gemma3":
        config.query_pre_attn_scalar = _query_scalar(config)
    elif hasattr(config, "sliding_window"):  # mistral has a default
        config.sliding_window = own.get("attention.sliding_window") or None
    reason = next(_differences(found, config), None)
    if reason is not None:
        raise ValueError(f"transformers makes a model of it of which llama.cpp computes another one: {reason}")


def _check_values(own: dict[str, Any]) -> None:
    """Raise ValueError if metadata lacks a value that others need, or has one of another kind."""
    needed = {"embedding_length", "attention.head_count"}
    kind = own.get("rope.scaling.type")
    needed |= {"rope.scaling.factor"} if kind in ("linear", "yarn") else set()
    needed |= {"rope.scaling.original_context_length"} if kind == "yarn" else set()
    lost = sorted(needed - own.keys())
    if lost:
        raise ValueError(f"its metadata lacks {', '.join(lost)}")
    for key, value in own.items():
        wanted = (int, float) if key in _REAL else str if key in _TEXT else int
        if not isinstance(value, wanted) or (key in needed and not value):
            noun = "text" if key in _TEXT else "a number" if key in _REAL else "a whole number"
            raise ValueError(f"its metadata has {shorten(repr(value))} for {key}; needs {noun}")


def _complete_experts_(config: Any, own: dict[str, Any]) -> None:
    """Set the numbers and sizes of experts, and how llama.cpp weighs them."""
    length, used = own.get("feed_forward_length"), own.get("expert_used_count")
    defaults = {"expert_shared_feed_forward_length": length}
    if isinstance(length, int) and isinstance(used, int) and used > 0:
        defaults["expert_feed_forward_length"] = length // used
    for key, name in _expert_fields(config).items():
        value = own.get(key) or defaults.get(key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"its metadata has {value!r} for {key}; needs a whole number from 1")
        setattr(config, name, value)
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(f"its metadata has {used} for expert_used_count; there are {config.num_experts} experts")
    if hasattr(config, "norm_topk_prob"):
        config.norm_topk_prob = config.model_type not in _UNSCALED


def _llama3(divisors: Tensor, D: int, theta: float) -> dict[str, Any]:
    """Return the parameters of rotation of which the divisors were made. Raises ValueError if there are none."""
    rope = {"rope_type": "llama3", "factor": round(float(divisors.max()), 4), **_LLAMA3}
    if divisors.shape != (D // 2,) or not torch.allclose(_factors(rope, D, theta), divisors.float(), rtol=1e-4):
        raise ValueError(f"its {FACTORS} are not those of Llama 3: transformers has no such rotation")
    return rope
