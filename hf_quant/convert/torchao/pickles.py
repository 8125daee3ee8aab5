"""Read pickled checkpoints of torchao without running anything of theirs.

`torch.load(weights_only=True)` makes no object but tensors and those of classes that are allowed by name. The names
here are those of torchao's tensor subclasses and of what they hold; each stands for a class of this file, which keeps
what the pickle has, and computes nothing. torchao is not needed.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from hf_quant.checkpoint import Directory, TensorInfo, one_line, shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.torchao.records import Record, part_key


_QUANT = "torchao.quantization"
_FLOWS = f"{_QUANT}.quantize_.workflows"
# Subclasses of Tensor by their modules: the classes of torchao 0.13 and newer under both of their names, and those of
# older releases, which hold the codes in a tensor of their own.
_TENSORS = {
    f"{_FLOWS}.int8.int8_tensor": ("Int8Tensor",),
    f"{_FLOWS}.float8.float8_tensor": ("Float8Tensor",),
    f"{_FLOWS}.intx.intx_unpacked_to_int8_tensor": ("IntxUnpackedToInt8Tensor",),
    f"{_FLOWS}.intx.intx_unpacked_tensor": ("IntxUnpackedTensor",),
    f"{_FLOWS}.int4.int4_tensor": ("Int4Tensor",),
    f"{_FLOWS}.int4.int4_preshuffled_tensor": ("Int4PreshuffledTensor",),
    f"{_FLOWS}.int4.int4_plain_int32_tensor": ("Int4PlainInt32Tensor",),
    f"{_FLOWS}.int4.int4_tile_packed_to_4d_tensor": ("Int4TilePackedTo4dTensor",),
    f"{_FLOWS}.int4.int4_opaque_tensor": ("Int4OpaqueTensor",),
    _QUANT: (
        *("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Int4PreshuffledTensor"),
        *("Int4PlainInt32Tensor", "Int4TilePackedTo4dTensor", "Int4OpaqueTensor"),
    ),
    "torchao.prototype.mx_formats.mx_tensor": ("MXTensor",),
    "torchao.prototype.mx_formats.nvfp4_tensor": ("NVFP4Tensor",),
    "torchao.dtypes.affine_quantized_tensor": ("AffineQuantizedTensor",),
    "torchao.dtypes": ("AffineQuantizedTensor",),
    "torchao.dtypes.uintx.plain_layout": ("PlainAQTTensorImpl",),
    "torchao.dtypes.uintx.q_dq_layout": ("QDQTensorImpl",),
    "torchao.dtypes.uintx.tensor_core_tiled_layout": ("TensorCoreTiledAQTTensorImpl",),
    "torchao.dtypes.uintx.int4_cpu_layout": ("Int4CPUAQTTensorImpl",),
    "torchao.dtypes.floatx.float8_layout": ("Float8AQTTensorImpl",),
    f"{_QUANT}.linear_activation_quantized_tensor": ("LinearActivationQuantizedTensor",),
}
# Other classes, enums and functions.
_OBJECTS = {
    f"{_QUANT}.granularity": ("PerRow", "PerTensor", "PerGroup", "PerBlock", "PerToken", "PerAxis"),
    f"{_QUANT}.quant_primitives": ("MappingType", "ZeroPointDomain"),
    f"{_QUANT}.quantize_.common.kernel_preference": ("KernelPreference",),
    f"{_FLOWS}.int8.int8_tensor": ("QuantizeTensorToInt8Kwargs",),
    f"{_FLOWS}.float8.float8_tensor": ("QuantizeTensorToFloat8Kwargs",),
    f"{_FLOWS}.intx.intx_unpacked_to_int8_tensor": ("IntxUnpackedToInt8TensorActivationQuantization",),
    "torchao.float8.inference": ("Float8MMConfig",),
    "torchao.prototype.mx_formats.mx_tensor": ("QuantizeTensorToMXKwargs",),
    "torchao.prototype.mx_formats.nvfp4_tensor": ("QuantizeTensorToNVFP4Kwargs",),
    "torchao.prototype.mx_formats.config": ("ScaleCalculationMode", "MXGemmKernelChoice"),
    "torchao.dtypes.utils": ("PlainLayout", "Layout"),
    "torchao.dtypes.uintx.tensor_core_tiled_layout": ("TensorCoreTiledLayout",),
    "torchao.dtypes.uintx.int4_cpu_layout": ("Int4CPULayout",),
    "torchao.dtypes.uintx.q_dq_layout": ("QDQLayout",),
    "torchao.dtypes.floatx.float8_layout": ("Float8Layout",),
    f"{_QUANT}.quant_api": (
        *("_int8_symm_per_token_reduced_range_quant", "_int8_asymm_per_token_quant"),
        *("_int8_symm_per_token_reduced_range_quant_noop_decode", "_input_activation_quant_func_fp8"),
    ),
}
# {enum: {stored value: name}}; others are stored by their name, in small letters.
_ENUMS = {
    "MappingType": {1: "SYMMETRIC", 2: "SYMMETRIC_NO_CLIPPING_ERR", 3: "ASYMMETRIC"},
    "ZeroPointDomain": {1: "INT", 2: "FLOAT", 3: "NONE"},
}
_CODES = dict.fromkeys(("int_data", "float8_data", "packed_weight"), "qdata")  # their names in older releases
_PLAIN = ("PlainAQTTensorImpl", "QDQTensorImpl")
_WITH_INPUT = "LinearActivationQuantizedTensor"
_FILES = ("pytorch_model", "diffusion_pytorch_model", "model")

_GLOBAL = re.compile(r"GLOBAL (\S+)")  # in torch's refusal


class _Object:
    """Stand-in for a class of torchao that is no tensor."""

    kind = ""

    def __new__(cls, *args: Any) -> "_Object":
        made = object.__new__(cls)
        made.__dict__["_args"] = args
        return made


class _Subclass(Tensor):
    """Stand-in for a tensor subclass of torchao; its tensors are attributes."""

    kind = ""
    # torch's own way to have no override; its stub has another signature.
    # pyrefly: ignore[bad-override]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    # torch's documented signature; its stub lacks `func`.
    # pyrefly: ignore[bad-override]
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"a {cls.kind} is read, not computed with")


def _stand_ins() -> Iterator[tuple[type, str]]:
    for base, table in ((_Subclass, _TENSORS), (_Object, _OBJECTS)):
        for module, names in table.items():
            for name in names:
                yield type(name, (base,), {"kind": name}), f"{module}.{name}"


class PickledFiles(TensorFiles):
    """The tensors of pickled files, as `TensorFiles` gives them, and the records of their tensor subclasses.

    Data are mapped into memory, and read when they are asked for. Raises ValueError if a file is missing, is no
    checkpoint, or holds anything but tensors and the classes above.
    """

    def __init__(self, directory: Path) -> None:
        self.files: dict[Path, dict[str, TensorInfo]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.records: list[Record] = []
        self._values: dict[str, Tensor] = {}
        for file in _files(directory):
            before = set(self._values)
            for name, value in _load(file).items():
                self._add(str(name), value, file)
            added = [name for name in self._values if name not in before]
            self.files[file] = {name: self.tensors[name] for name in added}

    def __enter__(self) -> "PickledFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self._values.clear()

    def read(self, name: str) -> Tensor:
        """Return one tensor; a copy, as files of safetensors hold none twice."""
        return self._values[name].detach().clone(memory_format=torch.contiguous_format)

    def _add(self, name: str, value: Any, file: Path) -> None:
        if isinstance(value, _Subclass):
            module, _, weight = name.rpartition(".")
            kind, fields, tensors = _described(value)
            self.records.append(
                Record(module, weight, kind, fields, {part: part_key(module, weight, part) for part in tensors})
            )
            for part, tensor in tensors.items():
                self._put(part_key(module, weight, part), tensor)
        elif isinstance(value, Tensor):
            self._put(name, value)
        else:
            raise ValueError(f"{file} has {shorten(repr(name))} as a {type(value).__name__}; needs a tensor")

    def _put(self, name: str, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(f"{name} has no values")
        self._values[name], self.tensors[name] = tensor, TensorInfo(tensor.dtype, tuple(tensor.shape))


def _files(directory: Path) -> list[Path]:
    """Return the pickled files of a checkpoint, those of its index if it has one."""
    folder = Directory(directory)
    for stem in _FILES:
        if (directory / f"{stem}.bin.index.json").is_file():
            weight_map = folder.load_json(f"{stem}.bin.index.json").get("weight_map")
            names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
            if not names or any("/" in name or "\\" in name or not name.endswith(".bin") for name in names):
                raise ValueError(f"{directory}/{stem}.bin.index.json names no shards beside it")
            missing = [name for name in names if not (directory / name).is_file()]
            if missing:
                raise ValueError(f"{directory} lacks {len(missing)} of {len(names)} shards: {missing[0]}")
            return [directory / name for name in names]
        if (directory / f"{stem}.bin").is_file():
            return [directory / f"{stem}.bin"]
    raise ValueError(f"{directory} holds no safetensors file, and no {_FILES[0]}.bin")


@contextlib.contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Context manager: a pickle may name the classes of this file, and no others, not even torchao's own."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(_stand_ins()))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def _load(file: Path) -> dict[str, Any]:
    try:
        with _only_stand_ins():
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, EOFError, TypeError, AttributeError, OSError, ValueError) as error:
        named = _GLOBAL.search(str(error))
        reason = one_line(error) if named is None else f"it names {shorten(repr(named[1]))}, which is none of them"
        raise ValueError(f"{file} is a pickle, and only tensors and classes of torchao are read: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}; needs a table of tensors")
    return found


def _described(value: _Subclass) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Return (class, fields, tensors) of a subclass; of older releases, those of the class inside of it."""
    own, kind = dict(value.__dict__), type(value).kind
    if kind == _WITH_INPUT:
        inner = own.get("original_weight_tensor")
        if not isinstance(inner, _Subclass):
            raise ValueError(f"a {kind} has no weight")
        kind, fields, tensors = _described(inner)
        given = own.get("input_quant_func")
        return kind, {**fields, "input_quant_func": getattr(given, "kind", str(type(given).__name__))}, tensors
    impl = own.pop("tensor_impl", None)
    if isinstance(impl, _Subclass):
        kind = kind if type(impl).kind in _PLAIN else type(impl).kind
        own |= {_CODES.get(k, k): v for k, v in impl.__dict__.items()}
    tensors = {name: part for name, part in own.items() if type(part) is Tensor}
    fields = {name: _field(part) for name, part in own.items() if name not in tensors}
    return kind, {"shape": list(value.shape), **fields}, tensors


def _field(value: Any) -> Any:
    """Return a field as torchao writes it in JSON."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if type(value) in (list, tuple, torch.Size):
        return [_field(part) for part in value]
    if isinstance(value, _Object):
        fields = {name: _field(part) for name, part in value.__dict__.items() if name != "_args"}
        args = value.__dict__["_args"]
        if not fields and len(args) == 1:  # an enum
            names = _ENUMS.get(type(value).kind, {})
            return {"_type": type(value).kind, "_data": names.get(args[0], str(args[0]).upper())}
        return {"_type": type(value).kind, "_data": fields}
    return value if isinstance(value, str | int | float | bool | None) else str(type(value).__name__)
