"""A small Llama, quantized, and slow decoders of compressed-tensors, GPTQ and AWQ written from their descriptions.

Nothing here uses the package's own formats: words are taken apart bit by bit, floating-point codes by their fields.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_quant.modules import QuantizedModule


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def make_llama(path: Path, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """A random Llama of 2 layers with a tied head, with files beside its weights as real checkpoints have them."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 32, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **more, **fields}))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
    model.to(dtype).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "LICENSE").write_text("mine")
    (path / "notes.txt").write_text("not needed")
    return path


def load_all(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """{module: decoded weight} of the quantized linear layers."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedModule) and m.kind == "linear"}
    return {name: module.dequantize_weight() for name, module in found.items()}


def mismatches(expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[int, int]:
    """(weights that differ, weights): every name and every shape must be there."""
    assert expected.keys() == found.keys() and expected
    for name in expected:
        assert expected[name].shape == found[name].shape and expected[name].dtype == found[name].dtype
    return sum((expected[n] != found[n]).sum().item() for n in expected), sum(w.numel() for w in expected.values())


# compressed-tensors.


def field_of_words(words: Tensor, bits: int, count: int) -> np.ndarray:
    """int32 [R, C] -> unsigned fields [R, count], the lowest bits first."""
    unsigned = words.numpy().view(np.uint32)
    parts = [(unsigned >> np.uint32(bits * i)) & np.uint32(2**bits - 1) for i in range(32 // bits)]
    return np.stack(parts, -1).reshape(len(unsigned), -1)[:, :count].astype(np.int64)


def e4m3(bits: np.ndarray) -> np.ndarray:
    bits = bits.astype(np.int64)
    sign, exponent, mantissa = bits >> 7, (bits >> 3) & 15, bits & 7
    assert not ((exponent == 15) & (mantissa == 7)).any(), "NaN"
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -magnitude, magnitude).astype(np.float32)


def spread(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """One value for each weight: [N, groups], [1], [N, 1] or blocks of 128 x 128."""
    if scale.ndim < 2:
        return np.broadcast_to(scale.reshape(1, 1), shape)
    rows = scale if len(scale) == shape[0] else np.repeat(scale, 128, 0)[: shape[0]]
    width = 128 if len(scale) != shape[0] else -(-shape[1] // scale.shape[1])
    return np.repeat(rows, width, 1)[:, : shape[1]]


def decode_compressed(tensors: dict[str, Tensor], weights: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The weight of one module from its tensors and the `weights` of its group."""
    raw, bits = tensors["weight_scale"], weights["num_bits"]
    if weights["type"] == "int":
        if "weight_packed" in tensors:
            N, K = tensors["weight_shape"].tolist()
            codes = field_of_words(tensors["weight_packed"], bits, K) - 2 ** (bits - 1)
        else:
            codes = tensors["weight"].numpy().astype(np.int64)
        scale = raw.float().numpy()
        if not weights["symmetric"]:
            zeros = field_of_words(tensors["weight_zero_point"].T.contiguous(), bits, len(codes)).T
            codes = codes - spread(zeros - 2 ** (bits - 1), codes.shape)
        values = codes.astype(np.float32)
    elif bits == 8:
        values, scale = e4m3(tensors["weight"].view(torch.uint8).numpy()), raw.float().numpy()
    else:
        packed = tensors["weight_packed"].numpy()
        values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
        if "weight_global_scale" in tensors:
            scale = e4m3(raw.view(torch.uint8).numpy()) / tensors["weight_global_scale"].numpy()
        else:
            scale = np.float32(2.0) ** (raw.numpy().astype(np.float32) - 127)
    return torch.from_numpy(values * spread(scale, values.shape)).to(dtype)


def group_for(module: str, config: dict[str, Any]) -> dict[str, Any]:
    groups = config["config_groups"].values()
    named = [group for group in groups if module in group["targets"]]
    return (named or [group for group in groups if "Linear" in group["targets"]])[0]


def decode_compressed_checkpoint(path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """{module: weight} of an exported checkpoint."""
    config, tensors = config_of(path)["quantization_config"], load_all(path)
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        modules.setdefault(key.rpartition(".")[0], {})[key.rpartition(".")[2]] = tensor
    return {
        name: decode_compressed(parts, group_for(name, config)["weights"], dtype)
        for name, parts in modules.items()
        if "weight_scale" in parts
    }


# GPTQ and AWQ.


def words_of_fields(codes: np.ndarray, bits: int) -> Tensor:
    """Unsigned codes [R, C] -> int32 [R, C * bits / 32], low bits first along the last dimension."""
    per_word = 32 // bits
    grouped = codes.astype(np.uint32).reshape(len(codes), -1, per_word)
    words = np.zeros(grouped.shape[:2], np.uint32)
    for i in range(per_word):
        words |= grouped[:, :, i] << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy())


def random_codes(N: int, K: int, bits: int, group: int, seed: int, *, symmetric: bool, scale_dtype: torch.dtype):
    """(codes [N, K], zero points [N, groups], scales [N, groups]): every code and, if asymmetric, every zero point."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (N, K))
    groups = -(-K // group)  # of which the last may be short
    zeros = rng.integers(1, 2**bits - 1, (N, groups))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = torch.from_numpy(rng.uniform(0.001, 0.02, (N, groups))).to(scale_dtype)
    return codes, zeros, scales


def foreign_checkpoint(
    path: Path, source: Path, method: str, *, bits: int = 4, group: int = 32, symmetric: bool = True, v2: bool = False
) -> dict[str, Tensor]:
    """Replace the linear layers of `source` by random codes, as GPTQ or AWQ stores them; returns the weights meant.

    The weights are (code - zero point) * scale, in fp32, rounded to the model's dtype.
    """
    path.mkdir()
    tensors, config, meant = load_all(source), config_of(source), {}
    dtype = getattr(torch, config["dtype"])
    for seed, key in enumerate([k for k in tensors if k.endswith("_proj.weight")]):
        module = key.removesuffix(".weight")
        N, K = tensors.pop(key).shape
        size = K if group == -1 else group
        options = {"symmetric": symmetric, "scale_dtype": torch.float16}
        codes, zeros, scales = random_codes(N, K, bits, size, seed, **options)
        values = (codes - np.repeat(zeros, size, 1)[:, :K]).astype(np.float32)
        meant[module] = torch.from_numpy(values * np.repeat(scales.float().numpy(), size, 1)[:, :K]).to(dtype)
        if method == "gptq":
            tensors[f"{module}.qweight"] = words_of_fields(codes, bits).T.contiguous()
            tensors[f"{module}.qzeros"] = words_of_fields((zeros if v2 else zeros - 1).T, bits)
            tensors[f"{module}.g_idx"] = (torch.arange(K) // size).int()
        else:
            order = np.arange(N).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)  # nibble i of a word is column order[i]
            tensors[f"{module}.qweight"] = words_of_fields(codes.T[:, order], bits)
            tensors[f"{module}.qzeros"] = words_of_fields(zeros.T[:, order], bits)
        tensors[f"{module}.scales"] = scales.T.contiguous()
    own: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group}
    if method == "gptq":
        own |= {"desc_act": False, "sym": symmetric, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    else:
        own |= {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": own}))
    return meant
