"""Read torchao's tensor subclasses: integers, fp8, mxfp8, mxfp4 and nvfp4.

Weights are (qdata - zero_point) * scale, in blocks of `block_size`; for others of int4 see `int4`
(https://github.com/pytorch/ao/tree/main/torchao/quantization/quantize_/workflows).
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import TensorInfo, shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.layers import (
    FLOATS,
    float_zero_points,
    fp4_words,
    groups_of,
    nvfp4_weight,
    rows_of_scale,
    tensor_info,
    without_zero_scales,
)
from hf_quant.convert.torchao.int4 import PAIRS, TILES, int4_pairs, int4_tiles
from hf_quant.convert.torchao.pickles import PickledFiles
from hf_quant.convert.torchao.records import Record, stored_records
from hf_quant.formats import FORMATS
from hf_quant.scheme import BLOCK_SIZE, LinearScheme, TensorQuant


_REFUSED = dict.fromkeys(
    (
        *("Int4PreshuffledTensor", "Int4PlainInt32Tensor", "Int4OpaqueTensor"),
        "Int4CPUAQTTensorImpl",
    ),
    "its codes are in the order of a device's kernels",
)
_INT_FORMATS = {
    **{"int1": "int2", "int2": "int2", "int3": "int3", "int4": "int4"},
    **dict.fromkeys(("int5", "int6", "int7", "int8"), "int8"),  # torchao stores a byte for each
}
_BOUNDS: dict[Any, str] = {(-8, 7): "int4", (-4, 3): "int3", (-2, 1): "int2"}
_INT8_INPUT, _FP8_INPUT = TensorQuant("int8", "row"), TensorQuant("fp8_e4m3", "row")
_STATIC_INPUT = TensorQuant("int8", "tensor", dynamic=False)
_IN_16_BIT = "inputs stay in 16 bit where torchao quantizes them in a way that hf_quant does not have"
_PER_TOKEN = "inputs are quantized with one scale per token, where torchao has one for all tokens or several per token"


class _Weight(NamedTuple):
    """A record, the format of its codes in hf_quant, and how its input is quantized."""

    record: Record
    format: str
    input: TensorQuant | None
    notes: tuple[str, ...] = ()

    def key(self, part: str) -> str:
        """Return the key of a tensor, as `Record.key`."""
        return self.record.key(part)


def read_torchao(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a torchao checkpoint. Raises ValueError with the reason if one is unsupported."""
    records = files.records if isinstance(files, PickledFiles) else stored_records(files)
    if not records:
        raise ValueError("no file of it describes a tensor subclass of torchao: no layer of it is quantized")
    weights: list[ForeignWeight] = []
    notes: set[str] = set()
    dropped: set[str] = set()
    for record in records:
        found = _classify(record)
        weights.append(_KINDS[record.kind](files, found))
        notes |= set(found.notes)
        dropped |= set(record.parts.values())
    return Foreign(weights, dropped, sorted(notes))


def _classify(record: Record) -> _Weight:
    """Return the format and the input of a weight. Raises ValueError if hf_quant has none for its class."""
    name, fields = f"{record.module}.{record.weight}", record.fields
    if record.kind not in _KINDS:
        known = ", ".join(_KINDS)
        reason = _REFUSED.get(record.kind, f"readable: {known}")
        raise ValueError(f"{name} is a {shorten(record.kind)} of torchao: {reason}")
    if "act_pre_scale" in record.parts:
        raise ValueError(f"{name} has an act_pre_scale: its input is multiplied with a vector, which hf_quant has not")
    given = fields.get("act_quant_kwargs") or fields.get("input_quant_func") or fields.get("activation_quantization")
    kwargs = given.get("_data") if isinstance(given, dict) else None
    data = kwargs if isinstance(kwargs, dict) else {}
    per_token = not isinstance(data.get("granularity"), dict) or data["granularity"].get("_type") == "PerRow"
    notes = () if per_token else (_PER_TOKEN,)
    if record.kind in ("Float8Tensor", "Float8AQTTensorImpl"):
        return _Weight(record, "", None if given is None else _FP8_INPUT, notes)
    if record.kind in ("MXTensor", "NVFP4Tensor"):
        return _Weight(record, "", None, () if given is None else (_IN_16_BIT,))
    if record.kind in (PAIRS, *TILES):
        in_fp8 = fields.get("activation_dtype") == "float8_e4m3fn"
        return _Weight(record, "int4", None, (_IN_16_BIT,) if in_fp8 else ())
    bounds = (fields.get("quant_min"), fields.get("quant_max"))  # of older releases
    target = str(fields.get("target_dtype") or _BOUNDS.get(bounds, "int8"))
    if target not in _INT_FORMATS:
        raise ValueError(f"{name} has {shorten(target)} codes; readable: {', '.join(_INT_FORMATS)}")
    format = _INT_FORMATS[target]
    if "act_quant_scale" in record.parts:
        if "act_quant_zero_point" in record.parts:
            raise ValueError(f"{name} has a static zero point of its input; hf_quant has symmetric scales")
        return _Weight(record, format, _STATIC_INPUT)
    if given is None:
        return _Weight(record, format, None)
    mapping = data.get("mapping_type")
    symmetric = isinstance(mapping, dict) and mapping.get("_data") == "SYMMETRIC"
    if symmetric or (isinstance(given, str) and given.startswith("_int8_symm_per_token")):
        return _Weight(record, format, _INT8_INPUT, notes)
    return _Weight(record, format, None, (_IN_16_BIT,))


def _matrix(files: TensorFiles, weight: _Weight, dtypes: list[torch.dtype]) -> tuple[int, int]:
    N, K = tensor_info(files, weight.key("qdata"), dtypes, dims=2).shape
    return N, K


def _extent(files: TensorFiles, weight: _Weight, N: int, K: int) -> tuple[str, int | None, int, TensorInfo]:
    """Return (granularity, group_size, columns of a scale, the scales as stored) by the block size of a weight."""
    record = weight.record
    given = record.fields.get("block_size")
    block = given or [N, K]  # none: one scale for all
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"{record.module} has the block_size {shorten(str(block))}; needs two positive integers")
    rows, columns = (min(size, whole) for size, whole in zip(block, (N, K)))
    if given == [BLOCK_SIZE, BLOCK_SIZE] and weight.format.startswith("fp8"):
        granularity, size, width = "block", None, BLOCK_SIZE
    elif rows == 1 and K % columns == 0:
        granularity, size, width = groups_of(record.module, K, columns)
    elif (rows, columns) == (N, K):
        granularity, size, width = "tensor", None, K
    else:
        raise ValueError(
            f"{record.module} has one scale for {rows} x {columns} of its {N} x {K} weights, which "
            "hf_quant does not have"
        )
    info = tensor_info(files, weight.key("scale"), (*FLOATS, torch.float8_e8m0fnu))
    if prod(info.shape) != -(-N // rows) * -(-K // columns):
        raise ValueError(
            f"{weight.key('scale')} is {info}; {N} x {K} weights in blocks of {rows} x {columns} need "
            f"{-(-N // rows)} x {-(-K // columns)}"
        )
    return granularity, size, width, info


def _spread(values: Tensor, *, rows: int, columns: int) -> Tensor:
    """Return scales, or zero points, as [rows, columns], each repeated along its row as often as it takes."""
    values = values.reshape(rows, -1)
    return values.repeat_interleave(columns // values.shape[1], 1)


def _foreign(
    files: TensorFiles, weight: _Weight, quant: TensorQuant, shape: tuple[int, int], unpack: Any
) -> ForeignWeight:
    """Return the weight, whose tensors are replaced in the file of its codes."""
    record, scheme = weight.record, LinearScheme(quant, weight.input)
    keys = (weight.key("qdata"), *(key for part, key in record.parts.items() if part != "qdata"))
    static = None
    if scheme.is_static:
        tensor_info(files, weight.key("act_quant_scale"), FLOATS, [(), (1,), (1, 1)])
        static = partial(files.read, weight.key("act_quant_scale"))
    return ForeignWeight(record.module, scheme, shape, keys, unpack, record.weight, static)


def _integers(files: TensorFiles, weight: _Weight) -> ForeignWeight:
    """Int8Tensor, IntxUnpackedToInt8Tensor, and the AffineQuantizedTensor of older releases in plain layout."""
    N, K = _matrix(files, weight, [torch.int8])
    granularity, size, columns, info = _extent(files, weight, N, K)
    record, spec = weight.record, FORMATS[weight.format].spec
    domain = record.fields.get("zero_point_domain")
    if isinstance(domain, dict) and domain.get("_data") == "FLOAT":
        raise ValueError(f"{record.module} has zero points of a domain that only releases before 0.15 have")
    middle = 2 ** (spec.bits - 1)
    zeros = _zero_points(files, weight, info)
    are_codes = zeros is None or not bool((zeros < -middle).any() | (zeros >= middle).any() | (zeros % 1 != 0).any())
    kind = "uint8" if zeros is None or (are_codes and spec.is_packed) else "float32"
    scale_dtype = str(info.dtype).removeprefix("torch.")
    quant = TensorQuant(weight.format, granularity, size, zeros is None, scale_dtype, zero_point_dtype=kind)

    spread = partial(_spread, rows=-(-N // rows_of_scale(N, granularity)), columns=-(-K // columns))

    def unpack() -> PackedWeight:
        rows = rows_of_scale(N, granularity)
        codes, scale = files.read(weight.key("qdata")), spread(files.read(weight.key("scale")))
        first = middle if spec.is_packed else 0  # what is added to a code that is stored
        if spec.is_packed:
            if bool((codes.min() < -middle) | (codes.max() >= middle)):
                raise ValueError(f"{weight.key('qdata')} has codes outside of {weight.format}")
            codes = (codes + middle).view(torch.uint8)
        zero_point, zero = None, first
        if zeros is not None and quant.has_float_zeros:
            zero_point, zero = float_zero_points(spread(zeros), scale, -first), 0
        elif zeros is not None:
            zero_point = zero = spread((zeros + middle).to(torch.uint8))
        codes, scale = without_zero_scales(codes, scale, columns, zero, rows=rows, float_zeros=quant.has_float_zeros)
        return PackedWeight(FORMATS[weight.format].pack(codes), scale, zero_point, None)

    return _foreign(files, weight, quant, (N, K), unpack)


def _zero_points(files: TensorFiles, weight: _Weight, scale: TensorInfo) -> Tensor | None:
    """Return the zero points of a weight in fp64, or None if all are 0."""
    if "zero_point" not in weight.record.parts:
        return None
    key = weight.key("zero_point")
    info = tensor_info(files, key, (*FLOATS, torch.int8, torch.int32, torch.int64))
    if prod(info.shape) != prod(scale.shape):
        raise ValueError(f"{key} is {info} beside scales of {scale}")
    stored = files.read(key).double()
    if not bool(stored.isfinite().all()):
        raise ValueError(f"{key} has NaN or inf; needs finite zero points")
    return stored if bool(stored.any()) else None


def _int4(files: TensorFiles, weight: _Weight) -> ForeignWeight:
    """Int4Tensor, and Int4TilePackedTo4dTensor or what it was called before."""
    quant, shape, unpack = (int4_tiles if weight.record.kind in TILES else int4_pairs)(files, weight.record)
    return _foreign(files, weight, quant, shape, unpack)


def _fp8(files: TensorFiles, weight: _Weight) -> ForeignWeight:
    """Float8Tensor, and the one of older releases."""
    record = weight.record
    if record.fields.get("transposed"):
        raise ValueError(f"{record.module} has a transposed weight")
    N, K = _matrix(files, weight, [torch.float8_e4m3fn, torch.float8_e5m2])
    is_e4m3 = files.tensors[weight.key("qdata")].dtype == torch.float8_e4m3fn
    weight = weight._replace(format="fp8_e4m3" if is_e4m3 else "fp8_e5m2")
    granularity, size, columns, info = _extent(files, weight, N, K)
    is_power = info.dtype == torch.float8_e8m0fnu
    quant = TensorQuant(weight.format, granularity, size, True, "float32" if is_power else str(info.dtype)[6:])

    def unpack() -> PackedWeight:
        scale = files.read(weight.key("scale"))
        scale = scale.float() if is_power else scale
        rows = rows_of_scale(N, granularity)
        scale = _spread(scale, rows=-(-N // rows), columns=-(-K // columns))
        codes, scale = without_zero_scales(files.read(weight.key("qdata")), scale, columns, rows=rows)
        return PackedWeight(codes, scale, None, None)

    return _foreign(files, weight, quant, (N, K), unpack)


def _mx(files: TensorFiles, weight: _Weight) -> ForeignWeight:
    """MXTensor: fp8 or e2m1 codes with a power of two for each 32."""
    record, kind = weight.record, str(weight.record.fields.get("elem_dtype"))
    names = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float4_e2m1fn_x2": "mxfp4"}
    if kind not in names or record.fields.get("block_size") != 32:
        raise ValueError(
            f"{record.module} has {shorten(kind)} codes in blocks of {record.fields.get('block_size')}; "
            f"readable: {', '.join(names)} in blocks of 32"
        )
    format = names[kind]
    N, width = _matrix(files, weight, [torch.uint8 if format == "mxfp4" else getattr(torch, kind)])
    K = 2 * width if format == "mxfp4" else width
    # bfloat16 has every power of two that e8m0 has.
    scale_dtype = "float8_e8m0fnu" if format == "mxfp4" else "bfloat16"
    tensor_info(files, weight.key("scale"), [torch.float8_e8m0fnu])

    def unpack() -> PackedWeight:
        scale = _in_order(files, weight, N, K // 32)
        if format == "mxfp4":
            return PackedWeight(fp4_words(files.read(weight.key("qdata"))), scale, None, None)
        return PackedWeight(files.read(weight.key("qdata")), scale.to(torch.bfloat16), None, None)

    return _foreign(files, weight, TensorQuant(format, "group", 32, True, scale_dtype), (N, K), unpack)


def _nvfp4(files: TensorFiles, weight: _Weight) -> ForeignWeight:
    """NVFP4Tensor: e2m1 codes with an e4m3 scale for each 16, and one fp32 scale for all."""
    N, width = _matrix(files, weight, [torch.uint8])
    tensor_info(files, weight.key("scale"), [torch.float8_e4m3fn])
    if "per_tensor_scale" in weight.record.parts:
        tensor_info(files, weight.key("per_tensor_scale"), [torch.float32], [(), (1,)])

    def unpack() -> PackedWeight:
        scale = _in_order(files, weight, N, width // 8)
        total = torch.ones(1, dtype=torch.float32)
        if "per_tensor_scale" in weight.record.parts:
            total = files.read(weight.key("per_tensor_scale")).reshape(1)
        return nvfp4_weight(files.read(weight.key("qdata")), scale, total)

    quant = TensorQuant("nvfp4", "group", 16, True, "float8_e4m3fn")
    return _foreign(files, weight, quant, (N, 2 * width), unpack)


def _in_order(files: TensorFiles, weight: _Weight, rows: int, columns: int) -> Tensor:
    """Return scales [rows, columns], turned back from the blocks of 128 x 4 in which cuBLAS wants them.

    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    stored, key = files.read(weight.key("scale")), weight.key("scale")
    if not weight.record.fields.get("is_swizzled_scales"):
        if stored.numel() != rows * columns:
            raise ValueError(f"{key} has {stored.numel()} scales; needs {rows} x {columns}")
        return stored.reshape(rows, columns)
    blocks = (-(-rows // 128), -(-columns // 4))
    if stored.numel() != prod(blocks) * 512:
        raise ValueError(f"{key} has {stored.numel()} scales; {rows} x {columns} in blocks need {prod(blocks) * 512}")
    tiles = stored.contiguous().view(torch.uint8).reshape(*blocks, 32, 4, 4)
    ordered = tiles.transpose(2, 3).permute(0, 2, 3, 1, 4).reshape(blocks[0] * 128, blocks[1] * 4)
    return ordered[:rows, :columns].contiguous().view(stored.dtype)


_KINDS = {
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
    "AffineQuantizedTensor": _integers,
    "Float8Tensor": _fp8,
    "Float8AQTTensorImpl": _fp8,
    **dict.fromkeys((PAIRS, *TILES), _int4),
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
