"""A writer of GGUF files, from the description of the format, and random blocks of every type.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np


ALIGNMENT = 32
_KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
# {type: bytes of its fp16 numbers in a block}
HALVES = {
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "TQ2_0": (64,),
    "TQ1_0": (52,),
}


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> tuple[int, bytes]:
    """(number of the type, bytes) of a value of the metadata."""
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, list):
        kind = _value(value[0])[0]
        return 9, struct.pack("<IQ", kind, len(value)) + b"".join(_value(item)[1] for item in value)
    kind, layout = _KINDS[type(value)]
    return kind, struct.pack(layout, value)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """Write a file. A tensor is (type, array): floating-point numbers, or blocks as uint8 [N, bytes]."""
    data, table, offset = b"", b"", 0
    for name, (kind, array) in tensors.items():
        number = gguf.GGMLQuantizationType[kind]
        size, nbytes = gguf.GGML_QUANT_SIZES[number]
        shape = array.shape if array.dtype != np.uint8 else (*array.shape[:-1], array.shape[-1] // nbytes * size)
        table += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset)
        stored = array.tobytes()
        data += stored + bytes(-len(stored) % ALIGNMENT)
        offset = len(data)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, stored = _value(value)
        head += _text(key) + struct.pack("<I", kind) + stored
    head += table
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path


def random_rows(kind: str, N: int, K: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a type, uint8 [N, bytes]; scales as large as those of real weights, of either sign."""
    rng = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (N, K // size, nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(110, 125, blocks.shape[:2])
        return blocks.reshape(N, -1)
    for at in HALVES.get(kind, (0,)):
        scale = (rng.standard_normal(blocks.shape[:2]) * 0.002).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    if kind == "Q8_0":
        blocks[..., 2:][blocks[..., 2:] == 128] = 0  # -128, which no writer makes
    return blocks.reshape(N, -1)


def values_of(kind: str, rows: np.ndarray) -> np.ndarray:
    """The fp32 values of blocks, by the package gguf."""
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])


def llama_metadata(
    *, layers: int = 1, hidden: int = 256, heads: int = 4, kv_heads: int = 2, ffn: int = 256
) -> dict[str, Any]:
    """The metadata of a llama of 64 tokens without a tokenizer."""
    own = {
        "context_length": 128,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": ffn,
        "vocab_size": 64,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": hidden // heads,
        "rope.freq_base": 10000.0,
    }
    return {"general.architecture": "llama", **{f"llama.{key}": value for key, value in own.items()}}


def llama_tensors(
    kinds: dict[str, str], *, hidden: int = 256, ffn: int = 256, kv: int = 128
) -> dict[str, tuple[str, Any]]:
    """The tensors of a llama of 1 layer and 64 tokens: types by name in GGUF, "*" for all others."""
    shapes = {
        "token_embd": (64, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (ffn, hidden),
        "blk.0.ffn_up": (ffn, hidden),
        "blk.0.ffn_down": (hidden, ffn),
        "output": (64, hidden),
    }
    rng, found = np.random.default_rng(1), {}
    for seed, (name, (N, K)) in enumerate(shapes.items()):
        kind = kinds.get(name, kinds["*"])
        if kind == "F32":
            found[f"{name}.weight"] = (kind, (rng.standard_normal((N, K)) * 0.05).astype(np.float32))
        elif kind == "F16":
            found[f"{name}.weight"] = (kind, (rng.standard_normal((N, K)) * 0.05).astype(np.float16))
        elif kind != "none":
            found[f"{name}.weight"] = (kind, random_rows(kind, N, K, seed))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        halves = rng.integers(0x3F00, 0x3FC0, hidden).astype(np.uint32) << 16  # bf16 numbers from 0.5 to 1.5
        found[f"{name}.weight"] = ("F32", halves.view(np.float32))
    return found


MOE = ("llama", "qwen2moe", "qwen3moe", "gpt-oss")


def moe_metadata(name: str, **more: Any) -> dict[str, Any]:
    """The metadata of a model of 64 tokens and 1 layer with 4 experts of 256 channels, of which a token has 2."""
    own = {key.removeprefix("llama."): value for key, value in llama_metadata().items() if key.startswith("llama.")}
    own |= {"expert_count": 4, "expert_used_count": 2}
    if name == "gpt-oss":
        own |= {"expert_feed_forward_length": 256, "attention.sliding_window": 32}
    elif name != "llama":
        own |= {"feed_forward_length": 512, "expert_feed_forward_length": 256}
    if name == "qwen2moe":
        own["expert_shared_feed_forward_length"] = 512
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in {**own, **more}.items()}}


def moe_tensors(name: str, kinds: dict[str, str]) -> dict[str, tuple[str, Any]]:
    """The tensors of that model: types by name in GGUF without its layer, "*" for all others."""
    kinds = {f"blk.0.{key}" if key not in ("*", "output", "token_embd") else key: kind for key, kind in kinds.items()}
    dense = {key: kind for key, kind in kinds.items() if "exp" not in key}
    found = llama_tensors({**dense, "blk.0.ffn_gate": "none", "blk.0.ffn_up": "none", "blk.0.ffn_down": "none"})
    rng = np.random.default_rng(2)

    def numbers(*shape: int, scale: float = 1.0) -> tuple[str, Any]:
        return "F32", (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)

    for seed, part in enumerate(("gate", "up", "down"), 20):
        kind = kinds.get(f"blk.0.ffn_{part}_exps", kinds["*"])
        found[f"blk.0.ffn_{part}_exps.weight"] = kind, random_rows(kind, 4 * 256, 256, seed).reshape(4, 256, -1)
        if name == "qwen2moe":
            shape = (256, 512) if part == "down" else (512, 256)
            kind = kinds.get(f"blk.0.ffn_{part}_shexp", kinds["*"])
            found[f"blk.0.ffn_{part}_shexp.weight"] = kind, random_rows(kind, *shape, seed + 3)
    found["blk.0.ffn_gate_inp.weight"] = numbers(4, 256)
    if name == "qwen2moe":
        found["blk.0.ffn_gate_inp_shexp.weight"] = numbers(256)
        found |= {f"blk.0.attn_{p}.bias": numbers(256 if p == "q" else 128, scale=0.1) for p in "qkv"}
    if name == "gpt-oss":
        found["blk.0.post_attention_norm.weight"] = found.pop("blk.0.ffn_norm.weight")
        found |= {f"blk.0.attn_{p}.bias": numbers(128 if p in "kv" else 256) for p in ("q", "k", "v", "output")}
        found |= {f"blk.0.ffn_{p}_exps.bias": numbers(4, 256, scale=0.1) for p in ("gate", "up", "down")}
        found |= {"blk.0.ffn_gate_inp.bias": numbers(4), "blk.0.attn_sinks.weight": numbers(4)}
    if name == "qwen3moe":
        found |= {f"blk.0.attn_{part}_norm.weight": ("F32", np.ones(64, np.float32)) for part in "qk"}
    return found
