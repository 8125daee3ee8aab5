"""Read optimum-quanto: qint8 and qfloat8 by rows, qint4 and qint2 in groups.

Layout (https://github.com/huggingface/optimum-quanto/tree/main/optimum/quanto/tensor). 8 bits: `weight._data` [N, K],
`weight._scale` [N, 1]. Fewer: `weight._data._data` bytes [groups / codes per byte, group size], where the codes of a
byte belong to rows that are as many rows apart as there are bytes, `weight._scale` and `weight._shift` [groups, 1];
groups run on from row to row. Weights are (code - shift) * scale with integer shifts, code * scale - shift with
others.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.hosts import Empty
from hf_quant.convert.layers import FLOATS, groups_of, tensor_info, without_zero_scales
from hf_quant.formats import FORMATS
from hf_quant.scheme import LinearScheme, TensorQuant


_WHOLE = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
_INPUTS = (".input_scale", ".output_scale")


def read_quanto(files: TensorFiles, fields: dict[str, Any], host: Empty) -> Foreign:
    """Read the weights of an optimum-quanto checkpoint. Raises ValueError with the reason if one is unsupported."""
    weights: list[ForeignWeight] = []
    for key in files.tensors:
        if key.endswith(".weight._data._data"):
            weights.append(_grouped(files, key.removesuffix("._data._data"), host))
        elif key.endswith(".weight._data"):
            weights.append(_whole(files, key.removesuffix("._data")))
    if not weights:
        raise ValueError("it holds no tensor named `weight._data`: no layer of it is quantized")
    dropped = {key for key in files.tensors if key.endswith(_INPUTS)}
    used = any(bool((files.read(key) != 1).any()) for key in dropped)
    notes = ["inputs and outputs stay in 16 bit; quanto rounds them by scales that calibration has set"]
    return Foreign(weights, dropped, notes if used else [])


def _whole(files: TensorFiles, name: str) -> ForeignWeight:
    """A weight of one byte for each value."""
    info = tensor_info(files, f"{name}._data", _WHOLE)
    N, K = info.shape[0], _columns(info.shape)
    scale = tensor_info(files, f"{name}._scale", FLOATS, [(N, *(1,) * (len(info.shape) - 1)), (N, 1)])
    quant = TensorQuant(_WHOLE[info.dtype], "row", None, True, str(scale.dtype).removeprefix("torch."))

    def unpack() -> PackedWeight:
        codes, scales = files.read(f"{name}._data").flatten(1), files.read(f"{name}._scale").view(N, 1)
        return PackedWeight(*without_zero_scales(codes, scales, K), None, None)

    keys = (f"{name}._data", f"{name}._scale")
    return ForeignWeight(name.removesuffix(".weight"), LinearScheme(quant), (N, K), keys, unpack)


def _columns(shape: tuple[int, ...]) -> int:
    """Return the columns of a weight as a matrix: the filters of a convolution are its rows."""
    return torch.Size(shape[1:]).numel()


def _grouped(files: TensorFiles, name: str, host: Empty) -> ForeignWeight:
    """A weight of 4 or 2 bits for each value."""
    module = name.removesuffix(".weight")
    keys = (f"{name}._data._data", f"{name}._scale", f"{name}._shift")
    shift = tensor_info(files, keys[2], (*FLOATS, torch.uint8, torch.int8), dims=2)
    shape = host.shape_of(name)
    if shape is None or len(shape) < 2:
        raise ValueError(f"{module} is no layer of the model")
    N, K = shape[0], _columns(shape)
    packed = tensor_info(files, keys[0], [torch.uint8], dims=2)
    groups, size = shift.shape[0], packed.shape[1]
    scale = tensor_info(files, keys[1], FLOATS, [shift.shape])
    bits = next((bits for bits in (4, 2) if -(-groups // (8 // bits)) == packed.shape[0]), None)
    if bits is None or groups * size != N * K or shift.shape[1] != 1:
        raise ValueError(f"{keys[0]} is {packed} beside shifts of {shift} for {N} x {K} weights")
    granularity, group_size, columns = groups_of(module, K, size)
    kind = str(shift.dtype).removeprefix("torch.") if shift.dtype.is_floating_point else "uint8"
    scale_dtype = str(scale.dtype).removeprefix("torch.")
    quant = TensorQuant(f"int{bits}", granularity, group_size, False, scale_dtype, zero_point_dtype=kind)
    unpack = partial(_unpack, files, keys, bits, (N, K), columns)
    return ForeignWeight(module, LinearScheme(quant), (N, K), keys, unpack)


def _unpack(
    files: TensorFiles, keys: tuple[str, str, str], bits: int, shape: tuple[int, int], columns: int
) -> PackedWeight:
    (N, K), packed = shape, files.read(keys[0])
    parts = [packed >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]
    shift = files.read(keys[2])
    codes = torch.cat(parts)[: shift.shape[0]].reshape(N, K)
    is_float = shift.is_floating_point()
    if not is_float and bool((shift < 0).any() | (shift >= 2**bits).any()):
        raise ValueError(f"{keys[2]} has shifts outside of the {2**bits} codes")

    def spread(values: Tensor) -> Tensor:
        """One value for each group of ours, where a group of theirs is several."""
        return values.flatten().repeat_interleave(packed.shape[1] // columns).view(N, K // columns)

    scale, zero_point = spread(files.read(keys[1])), spread(-shift if is_float else shift.view(torch.uint8))
    codes, scale = without_zero_scales(codes, scale, columns, 0 if is_float else zero_point, float_zeros=is_float)
    return PackedWeight(FORMATS[f"int{bits}"].pack(codes), scale, zero_point, None)
