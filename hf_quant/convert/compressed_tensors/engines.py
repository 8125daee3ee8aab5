"""Facts about vLLM and SGLang: layers that they compute as one, and names under which they look for schemes.

Read in vLLM 0.33 (vllm/model_executor/layers/quantization/compressed_tensors) and SGLang 0.5.23
(python/sglang/srt/layers/quantization/compressed_tensors), and the `packed_modules_mapping` of their models.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from hf_quant.convert.compressed_tensors.schemes import NAIVE, PACKED, Group
from hf_quant.scheme import BLOCK_SIZE


# (layers that are computed as one, names of the fused layer). They must be quantized alike, or not at all. vLLM finds
# the scheme of a fused layer by the names of its parts; for most models SGLang looks for the fused name alone.
_FUSED = (
    (("q_proj", "k_proj", "v_proj"), ("qkv_proj", "kv_proj")),
    (("query", "key", "value"), ("qkv_proj",)),
    (("q", "k", "v"), ("qkv",)),
    (("gate_proj", "up_proj"), ("gate_up_proj",)),
    (("w1", "w3"), ("w13", "gate_up_proj")),
    (("q_a_proj", "kv_a_proj_with_mqa"), ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")),
    (("wq_a", "wkv"), ("fused_wqa_wkv",)),
    (("in_proj_qkv", "in_proj_z"), ("in_proj_qkvz",)),
    (("in_proj_b", "in_proj_a"), ("in_proj_ba",)),
    (
        ("f_a_proj", "q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj"),
        ("in_proj_qkvgfab", "in_proj_qkvbfg_a", "fused_qkvbfg_a_proj"),
    ),
    (("f_b_proj", "g_b_proj"), ("fused_fg_b_proj",)),
)
# Engines look for the scheme of fused experts under the names of the first expert: vLLM under its names in the
# original checkpoint, SGLang and older vLLM under its names in Llama.
_FIRST_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")
_EXPERT = re.compile(r"(?P<experts>.*experts)\.\d+\.\w+")
_TOWER = re.compile(r"vision|visual|image|audio|projector|connector")
_GROUP_SIZES = (32, 64, 128)  # supported by the Marlin kernels
LARGE_GROUP = 256  # supported by a Triton kernel of vLLM, for int4


def is_of_expert(name: str) -> bool:
    """Return True if a layer belongs to one expert."""
    return _EXPERT.fullmatch(name) is not None


def siblings(names: Iterable[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (layers among `names` that engines compute as one, names that engines may give to the fused layer)."""
    names = dict.fromkeys(names)
    for parts, fused in _FUSED:
        for name in names:
            parent, dot, leaf = name.rpartition(".")
            if leaf != parts[0]:
                continue
            found = [f"{parent}{dot}{part}" for part in parts if f"{parent}{dot}{part}" in names]
            if len(found) > 1:
                yield found, [f"{parent}{dot}{part}" for part in fused]


def aliases(names: Iterable[str]) -> set[str]:
    """Return further names under which engines look for the scheme of `names`: of fused layers and experts."""
    experts = {match["experts"] for name in names if (match := _EXPERT.fullmatch(name))}
    found = {alias for parts, fused in siblings(names) if not is_of_expert(parts[0]) for alias in fused}
    found |= {f"{name}_proj" for name in names if name.endswith("attn.qkv")}  # of SGLang's vision towers
    return found | {f"{module}.{first}" for module in experts for first in _FIRST_EXPERT}


def aliases_of_experts(modules: Iterable[str]) -> set[str]:
    """Return these names for experts that the checkpoint stores in one tensor for all."""
    return {f"{module}.{first}" for module in modules for first in (*_FIRST_EXPERT, "0.w1", "0.w2", "0.w3")}


def head_pattern(name: str) -> str:
    """Return a target for the output head: engines do not count it to the class "Linear", and may add a prefix."""
    return rf"re:(.*\.)?{re.escape(name.rpartition('.')[2])}$"


def beside_the_language_model(names: Iterable[str]) -> list[str]:
    """Return the names that belong to vision and audio towers and to their projectors."""
    return [name for name in names if _TOWER.search(name)]


def reason_against(name: str, group: Group, is_expert: bool, is_head: bool, names: Collection[str]) -> str | None:
    """Return the reason why engines cannot load one quantized layer, or None; `names` are the names of all layers."""
    parent, _, leaf = name.rpartition(".")
    weights = dict(group.weights)
    size, strategy = weights["group_size"], weights["strategy"]
    if leaf == "shared_expert_gate" or (parent.endswith("indexer") and leaf in ("wk", "weights_proj")):
        return "engines compute it in 16 bit"
    mixer = leaf in ("in_proj", "x_proj", "dt_proj", "out_proj")
    if mixer and all(f"{parent}.{part}" in names for part in ("x_proj", "dt_proj")):
        return "engines compute the mixers of Mamba 1 in 16 bit"
    is_large = size == LARGE_GROUP and weights["num_bits"] == 4 and not is_expert
    if group.format == PACKED and strategy == "group" and size not in _GROUP_SIZES and not is_large:
        return f"the kernels of engines take groups of 32, 64 or 128, and no groups of {size}"
    if is_head and strategy == "block":
        return f"engines cannot split the output head in blocks of {BLOCK_SIZE} rows"
    if is_expert and group.input_activations is not None and not dict(group.input_activations)["dynamic"]:
        return "engines quantize the inputs of experts with one scale per token only"
    if is_expert and (group.format == NAIVE or strategy == "tensor"):
        return "engines take 8-bit experts with quantized inputs, and with one scale per row or block, only"
    return None


def reason_against_fusing(parts: list[str], groups: dict[str, Group | None], rows: dict[str, int]) -> str | None:
    """Return the reason why engines cannot compute `parts` as one layer, or None; a group of None means 16 bit."""
    shown = ", ".join(part.rpartition(".")[2] for part in parts)
    group = groups[parts[0]]
    if any(groups[part] != group for part in parts):
        return f"engines compute {shown} as one layer and want them quantized alike, or all in 16 bit"
    if group is not None and dict(group.weights)["strategy"] == "block":
        odd = [part for part in parts[:-1] if rows[part] % BLOCK_SIZE]
        if odd:
            return (
                f"engines compute {shown} as one layer, and blocks of {BLOCK_SIZE} rows do not divide the "
                f"{rows[odd[0]]} rows of {odd[0].rpartition('.')[2]}"
            )
    return None
