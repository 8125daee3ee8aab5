"""Layers as torchao stores them, packed by hand: flattened into safetensors files, or pickled under its names."""

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from integration_tests.support.foreign_checkpoints import config_of, load_all
from integration_tests.support.packed_libraries import E2M1, randint, uniform


class Subclass(NamedTuple):
    """A tensor subclass: its class, fields and tensors, and the weight that torchao decodes from them."""

    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    meant: Tensor


def spread(values: Tensor, N: int, K: int) -> Tensor:
    """One value for each weight."""
    rows, columns = values.shape
    return values.repeat_interleave(N // rows, 0).repeat_interleave(K // columns, 1)


def int8(N: int, K: int, dtype: torch.dtype, seed: int, **fields: Any) -> Subclass:
    codes, scale = randint(seed, -128, 128, N, K).to(torch.int8), uniform(seed, N, 1)
    tensors = {"qdata": codes, "scale": scale, "zero_point": torch.zeros(N, 1, dtype=torch.int8)}
    meant = (codes.to(torch.int32) * scale).to(dtype)
    return Subclass("Int8Tensor", {"block_size": [1, K], "dtype": dtype, **fields}, tensors, meant)


def intx(bits: int, group: int, symmetric: bool):
    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
        low, shape = -(2 ** (bits - 1)), (N, K // group)
        codes, scale = randint(seed, low, -low, N, K).to(torch.int8), uniform(seed, *shape).to(dtype)
        zeros = torch.zeros(shape) if symmetric else randint(seed, low, -low, *shape)
        tensors = {"qdata": codes, "scale": scale, "zero_point": zeros.to(torch.int8)}
        fields = {"target_dtype": getattr(torch, f"int{bits}"), "block_size": [1, group], "dtype": dtype}
        meant = ((codes - spread(zeros, N, K)) * spread(scale.float(), N, K)).to(dtype)
        return Subclass("IntxUnpackedToInt8Tensor", {**fields, "activation_quantization": None}, tensors, meant)

    return pack


def decoded_int4(codes: Tensor, scale: Tensor, zeros: Tensor, group: int) -> Tensor:
    """code * scale + zero, where fp32 rounds what the code -8 means, and the sum."""
    lowest = (zeros.double() - 8 * scale.double()).float()
    scale, lowest = (part.repeat_interleave(group, 1)[:, : codes.shape[1]] for part in (scale.float(), lowest))
    return (codes + 8) * scale + lowest


def int4_pairs(group: int):
    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
        codes, groups = randint(seed, -8, 8, N, K), -(-K // group)
        scale, zeros = uniform(seed, N, groups).to(dtype), (uniform(seed + 1, N, groups) - 0.002).to(dtype)
        pairs = torch.zeros(N, K // 2, dtype=torch.int8)
        for column in range(K):
            pairs[:, column // 2] |= ((codes[:, column] & 15) << 4 * (column % 2)).to(torch.uint8).view(torch.int8)
        tensors = {"qdata": pairs, "scale": scale.T, "zero_point": zeros.T}
        fields = {"block_size": [1, group], "shape": [N, K], "activation_dtype": torch.bfloat16}
        return Subclass("Int4Tensor", fields, tensors, decoded_int4(codes, scale, zeros, group).to(dtype))

    return pack


def int4_tiles(group: int):
    """Words as `_convert_weight_to_int4pack` has them for 8 inner tiles, and padding to 8 rows and 1024 columns."""

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
        rows, columns = -(-N // 8) * 8, -(-K // 1024) * 1024
        codes = randint(seed, 0, 16, rows, columns)
        scale, zeros = uniform(seed, rows, columns // group).to(dtype), uniform(seed + 1, rows, columns // group)
        zeros = (zeros - 0.002).to(dtype)
        words = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64)
        for lane in range(32):
            for word in range(4):
                for i, place in enumerate((0, 16, 4, 20, 8, 24, 12, 28)):  # pairs of columns, 8 apart
                    column = 32 * word + 8 * (i // 2) + 2 * (lane % 4) + i % 2
                    words[:, :, lane, word] |= codes[lane // 4 :: 8, column::128] << place
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        tensors = {"qdata": words, "scale_and_zero": torch.stack([scale, zeros], -1).transpose(0, 1)}
        fields, meant = {"block_size": [1, group], "shape": [N, K]}, decoded_int4(codes - 8, scale, zeros, group)
        return Subclass("Int4TilePackedTo4dTensor", fields, tensors, meant[:N, :K].to(dtype))

    return pack


def float8(extent: str, kind: torch.dtype = torch.float8_e4m3fn):
    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
        codes = randint(seed, 0, 0x70, N, K).to(torch.uint8).view(kind)
        block = {"row": [1, K], "tensor": [N, K], "block": [128, 128], "group": [1, 32]}[extent]
        scale = uniform(seed, -(-N // block[0]), -(-K // block[1]))
        if scale.numel() > 1:
            scale[0, 0] = 0
        meant = (codes.float() * scale.repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]).to(
            dtype
        )
        stated = [] if extent == "tensor" else block
        return Subclass(
            "Float8Tensor", {"block_size": stated, "dtype": dtype}, {"qdata": codes, "scale": scale}, meant
        )

    return pack


def fp4(kind: str, swizzled: bool = False):
    """MXTensor or NVFP4Tensor, its scales in order or in the blocks of 128 x 4 of cuBLAS."""

    def pack(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
        codes, size = randint(seed, 0, 16, N, K), 32 if kind == "MXTensor" else 16
        pairs = codes.to(torch.uint8).view(N, K // 2, 2)
        if kind == "MXTensor":
            stored = randint(seed, 117, 127, N, K // 32).to(torch.uint8)
            scale, values = stored.view(torch.float8_e8m0fnu), torch.ldexp(torch.tensor(1.0), stored.int() - 127)
            fields: dict[str, Any] = {"elem_dtype": torch.float4_e2m1fn_x2, "block_size": 32}
            tensors: dict[str, Tensor] = {}
        else:
            scale, total = uniform(seed, N, K // 16).mul(1e4).to(torch.float8_e4m3fn), torch.tensor(0.0007)
            stored, values = scale.view(torch.uint8), scale.float() * total
            fields, tensors = {"block_size": 16, "orig_dtype": dtype}, {"per_tensor_scale": total}
        if swizzled:
            scale = _blocked(stored).view(scale.dtype)
        tensors |= {"qdata": pairs[..., 0] | pairs[..., 1] << 4, "scale": scale}
        meant = (E2M1[codes] * values.repeat_interleave(size, 1)).to(dtype)
        return Subclass(kind, {**fields, "is_swizzled_scales": swizzled, "act_quant_kwargs": None}, tensors, meant)

    return pack


def _blocked(scales: Tensor) -> Tensor:
    """Element by element: of each tile of 128 x 4, row r and column c lie at (r % 32) * 16 + (r // 32) * 4 + c."""
    rows, columns = scales.shape
    tiles = torch.zeros(-(-rows // 128), -(-columns // 4), 512, dtype=scales.dtype)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tiles[r // 128, c // 4, r % 128 % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales
    return tiles


def _json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    return value


def torchao_checkpoint(path: Path, source: Path, pack: Any, *, pickled: bool = False, ends: str = "_proj.weight"):
    """Replace weights of `source` by subclasses; returns the weights meant, by module."""
    path.mkdir()
    tensors, config, meant = load_all(source), config_of(source), {}
    dtype, records = tensors[next(iter(tensors))].dtype, {}
    for seed, key in enumerate([key for key in tensors if key.endswith(ends)]):
        records[key] = pack(*tensors.pop(key).shape, dtype, seed)
        meant[key.removesuffix(".weight")] = records[key].meant
    stem = "diffusion_pytorch_model" if "_class_name" in config else "pytorch_model" if pickled else "model"
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {"default": {"_type": "X"}}}
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        with fake_torchao() as modules:
            stored = {key: wrapped(modules, record, dtype) for key, record in records.items()}
            torch.save({**tensors, **stored}, path / f"{stem}.bin")
        return meant
    metadata = {key: json.dumps({"_type": "Tensor"}) for key in tensors}
    for key, record in records.items():
        module = key.removesuffix(".weight")
        tensors |= {f"{module}._weight_{part}": tensor.contiguous() for part, tensor in record.tensors.items()}
        fields = {name: _json(value) for name, value in record.fields.items()}
        described = {"_type": record.kind, "_data": fields, "_tensor_data_names": list(record.tensors)}
        metadata[key] = json.dumps(described)
    metadata["tensor_names"] = json.dumps(list(metadata))
    save_file(tensors, path / f"{stem}.safetensors", metadata={"format": "pt", **metadata})
    return meant


@contextlib.contextmanager
def fake_torchao() -> Iterator[dict[str, type]]:
    """Modules named as torchao's, whose classes a pickle names; the package itself may be installed or not."""
    names = {"torchao": (), "torchao.quantization": ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")}
    names |= {"torchao.dtypes.uintx.plain_layout": ("PlainAQTTensorImpl",), "torchao.dtypes": ()}
    flows = "torchao.quantization.quantize_.workflows.int4"
    names |= {f"{flows}.int4_tile_packed_to_4d_tensor": ("Int4TilePackedTo4dTensor",)}
    names |= {"torchao.dtypes.uintx.q_dq_layout": ("QDQTensorImpl",)}
    names |= {"torchao.dtypes.affine_quantized_tensor": ("AffineQuantizedTensor",), "torchao.dtypes.uintx": ()}
    before = {name: sys.modules.get(name) for name in names}
    for name, classes in names.items():
        module = sys.modules[name] = types.ModuleType(name)
        for kind in classes:
            members = {"__module__": name, "__torch_dispatch__": classmethod(_dispatch)}
            setattr(module, kind, type(kind, (torch.Tensor,), members))
    try:
        yield {kind: getattr(sys.modules[name], kind) for name, kinds in names.items() for kind in kinds}
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def _dispatch(cls, func, types, args=(), kwargs=None):
    if func is torch.ops.aten.detach.default:
        return args[0]
    raise NotImplementedError(func)


def wrapped(modules: Any, record: Subclass, dtype: torch.dtype) -> Tensor:
    """The record as an object of a class that is named as torchao's."""
    made = torch.Tensor._make_wrapper_subclass(modules[record.kind], record.meant.shape, dtype=dtype)
    if record.kind == "AffineQuantizedTensor":
        kind = modules["PlainAQTTensorImpl" if record.fields["quant_min"] is None else "QDQTensorImpl"]
        inner = torch.Tensor._make_wrapper_subclass(kind, record.meant.shape, dtype=torch.int8)
        inner.__dict__.update(record.tensors)
        made.tensor_impl = inner
        made.__dict__.update(record.fields)
        return made
    made.__dict__.update(record.tensors)
    made.__dict__.update({name: value for name, value in record.fields.items() if name not in ("dtype", "shape")})
    return made


def affine(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
    """The int8 weight of releases before 0.15: codes in a tensor inside of the tensor."""
    found = int8(N, K, dtype, seed)
    scale = found.tensors["scale"].to(dtype)
    zeros = torch.zeros(N, dtype=torch.int64)
    tensors = {"int_data": found.tensors["qdata"], "scale": scale.view(N), "zero_point": zeros}
    meant = (found.tensors["qdata"].float() * scale.float()).to(dtype)
    return Subclass("AffineQuantizedTensor", {"block_size": (1, K), "quant_min": None}, tensors, meant)


def affine4(N: int, K: int, dtype: torch.dtype, seed: int) -> Subclass:
    """The same of 4 bits, with a byte for each code."""
    found = affine(N, K, dtype, seed)
    codes = found.tensors["int_data"] >> 4
    meant = (codes.float() * found.tensors["scale"].float()[:, None]).to(dtype)
    return found._replace(
        fields={**found.fields, "quant_min": -8, "quant_max": 7},
        tensors={**found.tensors, "int_data": codes},
        meant=meant,
    )
