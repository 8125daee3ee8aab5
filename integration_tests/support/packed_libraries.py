"""Checkpoints as other libraries store them, packed by hand, each with the weights that its library would decode.

A packer makes one layer: `(N, K, dtype, seed) -> ({name in the module: tensor}, the weight meant)`. The formulas are
those of the libraries, in ops of torch; nothing here uses the package's own formats.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from integration_tests.support.foreign_checkpoints import config_of, load_all


Packer = Callable[[int, int, torch.dtype, int], tuple[dict[str, Tensor], Tensor]]
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def packed_checkpoint(
    path: Path,
    source: Path,
    own: dict[str, Any] | None,
    pack: Packer,
    *,
    is_packed: Callable[[str], bool] = lambda key: key.endswith("_proj.weight"),
    join: str = ".",
    metadata: dict[str, str] | None = None,
) -> dict[str, Tensor]:
    """Replace weights of `source` by what `pack` makes; returns the weights meant, by module."""
    path.mkdir()
    tensors, config, meant = load_all(source), config_of(source), {}
    default = tensors[next(iter(tensors))].dtype
    for seed, key in enumerate([key for key in tensors if is_packed(key)]):
        module = key.removesuffix(".weight")
        N, K = tensors.pop(key).shape
        parts, meant[module] = pack(N, K, default, seed)
        tensors |= {f"{module}{join}{name}": part.contiguous() for name, part in parts.items()}
    stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
    save_file(tensors, path / f"{stem}.safetensors", metadata={"format": "pt", **(metadata or {})})
    if own is not None:
        config["quantization_config"] = own
    (path / "config.json").write_text(json.dumps(config))
    return meant


def randint(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, *shape: int) -> Tensor:
    """Scales, fp32, in [0.001, 0.02]; two of them are 0."""
    found = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.019 + 0.001
    found.view(-1)[1:3] = 0
    return found


FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # of bitsandbytes, in twelfths


def json_bytes(fields: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


def bnb_nf4(*, nested: bool = False, block: int = 64, storage: torch.dtype = torch.uint8, kind: str = "nf4") -> Packer:
    """bitsandbytes in 4 bits: blocks of the flattened weight, the first code of a byte in its high half."""

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        codes, blocks = randint(seed, 0, 16, N * K), -(-N * K // block)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": str(dtype)[6:], "shape": [N, K]}
        table = torch.tensor(NF4) if kind == "nf4" else torch.tensor([*FP4, *(-level for level in FP4)]) / 12
        parts = {"weight.quant_map": table}
        if nested:
            offset, stored = 0.01, randint(seed, 0, 256, blocks).to(torch.uint8)
            levels, outer = torch.linspace(-1, 1, 256), uniform(seed, -(-blocks // 256)).abs() / 4 + 0.001
            absmax = levels[stored.int()] * outer.repeat_interleave(256)[:blocks] + torch.tensor(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {"weight.absmax": stored, "weight.nested_absmax": outer, "weight.nested_quant_map": levels}
        else:
            absmax = parts["weight.absmax"] = uniform(seed, blocks)
        pairs = codes.to(torch.uint8).view(-1, 2)
        parts["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).view(storage)[:, None]
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = json_bytes(state)
        values = table[codes] * absmax.repeat_interleave(block)[: N * K]
        return parts, values.view(N, K).to(dtype)

    return pack


def bnb_int8(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """LLM.int8: codes of rows, and the largest magnitude of each, which fp16 has computed."""
    codes = randint(seed, -127, 128, N, K).to(torch.int8)
    largest = (uniform(seed, N) * 30).half().float()
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, (codes * largest[:, None] * 7.874015718698502e-3).to(dtype)


def fp8(
    extent: str, *, name: str = "weight_scale", scale_dtype: torch.dtype = torch.float32, static: str | None = None
) -> Packer:
    """Codes of one byte, times a scale of "block" (128 x 128), "row" or "tensor"; `static` names a scale of inputs."""

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        bits = randint(seed, 0, 256, N, K)
        bits[(bits & 127) == 127] = 5  # NaN
        codes = bits.to(torch.uint8).view(torch.float8_e4m3fn)
        shape = {"block": (-(-N // 128), -(-K // 128)), "row": (N, 1), "tensor": ()}[extent]
        scale = (uniform(seed, *shape) if shape else torch.tensor(0.01 + seed / 1000)).to(scale_dtype)
        parts = {"weight": codes, name: scale}
        if static is not None:
            parts[static] = torch.tensor(0.05).to(scale_dtype)
        spread = scale.float()
        if extent == "block":
            spread = spread.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
        return parts, (codes.float() * spread).to(dtype)

    return pack


def quanto_whole(kind: torch.dtype) -> Packer:
    """quanto's qint8 and qfloat8: one scale for each row, in the model's dtype, in which quanto multiplies."""

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        bits = randint(seed, 0, 256, N, K).to(torch.uint8)
        codes = (bits if kind == torch.int8 else bits & 0x77).view(kind)
        scale = uniform(seed, N, 1).to(dtype)
        ones = {"input_scale": torch.ones(()), "output_scale": torch.ones(())}
        parts = {"weight._data": codes, "weight._scale": scale, **ones}
        return parts, scale * (codes if kind == torch.int8 else codes.to(dtype))

    return pack


def quanto_grouped(bits: int, group: int, *, integer: bool = True) -> Packer:
    """quanto's qint4 and qint2: the codes of a byte are a part of the rows apart; shifts are zero points, or not."""

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        rows, each = N * K // group, 8 // bits
        codes = randint(seed, 0, 2**bits, rows, group).to(torch.uint8)
        scale, shift = uniform(seed, rows, 1).to(dtype), randint(seed, 0, 2**bits, rows, 1).to(torch.uint8)
        packed = torch.zeros(rows // each, group, dtype=torch.uint8)
        for i, part in enumerate(codes.split(rows // each)):
            packed |= part << bits * i
        stored = shift if integer else (shift * scale).to(dtype)
        parts = {"weight._data._data": packed, "weight._scale": scale, "weight._shift": stored}
        if not integer:  # rounded once
            return parts, (codes.double() * scale.double() - stored.double()).to(dtype).view(N, K)
        return parts, (scale * (codes.to(torch.int8) - shift.to(torch.int8))).view(N, K)

    return pack


def hqq(bits: int, group: int, *, axis: int = 1, fraction: float = 0.0, as_float: bool = False) -> Packer:
    """HQQ: codes of one integer are a part of the groups apart, the first in its highest bits; fields are tensors."""
    name, shifts = {
        8: ("8bit_u8", [0]),
        4: ("4bit_u8", [4, 0]),
        3: ("3bit_32", list(range(27, -1, -3))),
        2: ("2bit_u8", [6, 4, 2, 0]),
    }[bits]

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        groups, integer = N * K // group, torch.int32 if bits == 3 else torch.uint8
        codes, scale = randint(seed, 0, 2**bits, groups, group), uniform(seed, groups, 1).to(dtype)
        zero = torch.full((groups, 1), 128) if bits == 8 else randint(seed, 0, 2**bits, groups, 1)
        rows = -(-groups // len(shifts))
        padded = torch.zeros(rows * len(shifts), group, dtype=integer)
        padded[:groups] = codes.to(integer)
        stored = torch.zeros(rows, group, dtype=integer)
        for shift, part in zip(shifts, padded.split(rows)):
            stored |= part << shift
        meta = {"axis": axis, "nbits": bits, "view_as_float": as_float, "quant_scale": False, "quant_zero": False}
        parts = {key: torch.tensor(int(value), dtype=torch.int32) for key, value in meta.items()}
        parts |= {"packing": torch.tensor(list(name.encode()), dtype=torch.uint8), "shape": torch.tensor([N, K])}
        parts |= {
            "W_q": stored.view(dtype) if as_float else stored,
            "scale": scale,
            "zero": (zero + fraction).to(dtype),
        }
        if fraction:  # rounded once
            return parts, ((codes - parts["zero"].double()) * scale.double()).to(dtype).reshape(N, K)
        return parts, ((codes.to(dtype) - zero.to(dtype)) * scale).reshape(N, K)

    return pack


def bitnet(
    N: int, K: int, dtype: torch.dtype, seed: int, *, divides: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """BitNet: codes of -1, 0 and 1, of four rows in a byte, and a number that multiplies or divides the products."""
    codes, scale = randint(seed, -1, 2, N, K), torch.tensor([0.37 + seed], dtype=dtype)
    packed = sum((part + 1).to(torch.uint8) << 2 * i for i, part in enumerate(codes.chunk(4)))
    meant = codes / scale.float() if divides else codes * scale
    return {"weight": packed, "weight_scale": scale}, meant.to(dtype)


def bitnet_online(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """BitNet as it is trained: numbers, which each call rounds."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).to(dtype)
    scale = 1.0 / weight.float().abs().mean()
    return {"weight": weight}, ((weight.float() * scale).round().clamp(-1, 1) / scale).to(dtype)


def modelopt_nvfp4(N: int, K: int, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """ModelOpt's NVFP4: e2m1 codes, an e4m3 scale for each 16, one fp32 scale, and one of the input."""
    codes, scale = randint(seed, 0, 16, N, K), uniform(seed, N, K // 16).mul(1e4).to(torch.float8_e4m3fn)
    pairs, total = codes.to(torch.uint8).view(N, K // 2, 2), torch.tensor(0.00071)
    parts = {"weight": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": scale, "weight_scale_2": total}
    meant = (E2M1[codes] * (scale.float() * total).repeat_interleave(16, 1)).to(dtype)
    return {**parts, "input_scale": torch.tensor(0.01)}, meant


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def gpt_oss(path: Path, source: Path) -> dict[str, Tensor]:
    """Store the experts [E, K, N] of a gpt-oss model as blocks of [E, N, K]; returns the weights meant, by name."""
    path.mkdir()
    tensors, config, meant = load_all(source), config_of(source), {}
    for seed, key in enumerate(
        [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    ):
        E, K, N = tensors[key].shape
        codes, exponents = randint(seed, 0, 16, E, N, K), randint(seed, 117, 127, E, N, K // 32)
        values = E2M1[codes] * torch.ldexp(torch.tensor(1.0), exponents - 127).repeat_interleave(32, -1)
        meant[key] = values.transpose(1, 2).to(tensors.pop(key).dtype)
        pairs = codes.to(torch.uint8).view(E, N, K // 32, 16, 2)
        tensors[f"{key}_blocks"] = pairs[..., 0] | pairs[..., 1] << 4
        tensors[f"{key}_scales"] = exponents.to(torch.uint8)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return meant
