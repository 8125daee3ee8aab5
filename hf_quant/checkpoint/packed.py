"""Checks of packed tensors: the shapes, dtypes and values that a scheme allows."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_quant.checkpoint.header import TensorInfo
from hf_quant.formats import FORMATS
from hf_quant.kernels.codes import SMALLEST_SCALE
from hf_quant.modules import INPUT_SCALE, PACKED_NAMES, STORED_NAMES, QuantizedModule, packed_key, stored_dtype
from hf_quant.modules.sparse24 import empty_stored, parts_of
from hf_quant.scheme import LinearScheme, TensorQuant


_CHUNK = 2**24  # elements checked at a time, which bounds the temporaries


class StoredWeight(NamedTuple):
    """The packed tensors of one weight, as described by the headers of a checkpoint."""

    module: str  # name in the checkpoint
    weight: str  # name of the 16-bit weight in its module
    parts: dict[str, TensorInfo]  # by parameter name: "qdata", "scale_gate_up_proj", ...


def stored_weights(tensors: dict[str, TensorInfo]) -> Iterator[StoredWeight]:
    """Yield every quantized weight of a checkpoint, found by its `qdata`."""
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        weight = leaf.removeprefix("qdata_") if leaf != "qdata" else "weight"
        prefix = f"{module}." if module else ""
        if not weight or name != f"{prefix}{packed_key('qdata', weight)}":
            continue
        keys = [packed_key(part, weight) for part in STORED_NAMES]
        yield StoredWeight(module, weight, {k: tensors[f"{prefix}{k}"] for k in keys if f"{prefix}{k}" in tensors})


def expected_tensors(scheme: LinearScheme, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """Return {parameter name: TensorInfo} of a module whose weights have these matrix shapes [..., N, K]."""
    expected = {}
    for weight, shape in shapes.items():
        for part, tensor in zip(PACKED_NAMES, empty_stored(shape, scheme, "meta")):
            if tensor is not None:
                expected[packed_key(part, weight)] = TensorInfo(stored_dtype(tensor.dtype), tuple(tensor.shape))
        if scheme.is_static:
            expected[packed_key(INPUT_SCALE, weight)] = TensorInfo(stored_dtype(torch.float32), (1,))
    return expected


def check_packed(module: QuantizedModule, name: str = "") -> None:
    """Raise ValueError unless the scheme of a loaded module can have produced its codes and scales.

    Right shapes and dtypes; no NaN or inf among fp8 codes; zero points below 2**bits; scales finite and not 0,
    negative ones for symmetric packed integers only; a static scale of the input set. int8 codes may be -128: hf_quant
    does not produce it, but other libraries do, and every kernel supports it. `name` is the name of the module in
    errors. Every code is read once.
    """
    expected = expected_tensors(module.scheme, {n: module.matrix_shape(n) for n in module.weight_names})
    columns = {packed_key("qdata", n): module.matrix_shape(n)[-1] for n in module.weight_names}
    for key, info in expected.items():
        where = f"{name}.{key}" if name else key
        tensor = module._parameters.get(key)
        found = None if tensor is None else TensorInfo(tensor.dtype, tuple(tensor.shape))
        check_info(found, info, where)
        stored = module.get_parameter(key).detach()
        if module.scheme.sparsity is not None and key in columns:
            stored = _checked_places(stored, module.scheme.weight, columns[key], where)
        check_values(stored, key, module.scheme.weight, where)


def _checked_places(stored: Tensor, quant: TensorQuant, K: int, where: str) -> Tensor:
    """The codes of stored sparse ones, as stored. Raises ValueError if the places of a four are not two, ascending."""
    values, places = parts_of(stored, quant, K)
    if bool((places[..., 0] >= places[..., 1]).any()):
        raise ValueError(f"{where} has places of codes that are not ascending; the file is damaged")
    return values.view(torch.uint8)


def check_info(found: TensorInfo | None, expected: TensorInfo, where: str) -> None:
    """Raise ValueError if a tensor is missing (None), or its dtype or shape is not the expected one."""
    if found is None:
        raise ValueError(f"{where} is missing; the scheme needs it as {expected}")
    if found != expected:
        raise ValueError(f"{where} is {found}; the model and its scheme need {expected}")


def check_values(stored: Tensor, key: str, quant: TensorQuant, where: str) -> None:
    """Raise ValueError if a packed tensor, as stored, has values outside of what `quant` allows.

    `key` is its parameter name, e.g. "qdata" or "scale_down_proj".
    """
    part = next(p for p in STORED_NAMES if key == p or key.startswith(f"{p}_"))
    spec = FORMATS[quant.format].spec
    if part == "zero_point" and quant.has_float_zeros:
        limit = _largest_finite(getattr(torch, quant.zero_point_dtype))
        bits = stored & torch.iinfo(stored.dtype).max
        _check_range(bits, 0, limit, where, f"{quant.zero_point_dtype} zero points, as bits without sign,")
    elif part == "zero_point":
        _check_range(stored, 0, 2**spec.bits - 1, where, "zero points")
    elif part == INPUT_SCALE:
        lowest = int(torch.tensor(SMALLEST_SCALE, dtype=torch.float32).view(torch.int32))
        _check_range(stored, lowest, _largest_finite(torch.float32), where, "scales of inputs, as bits,")
    elif part == "scale" or part == "global_scale":
        dtype = torch.float32 if part == "global_scale" else getattr(torch, quant.scale_dtype)
        # The bits of positive floating-point numbers are ordered like the numbers: 0 (absent in e8m0, whose bits 0
        # mean 2**-127) and negative ones are below the range, inf and NaN above it.
        lowest = 0 if dtype == torch.float8_e8m0fnu else 1
        has_sign = quant.symmetric or quant.has_float_zeros
        if part == "scale" and has_sign and spec.is_packed and spec.minifloat is None:
            # The grid is not symmetric; a negative scale reverses it (see `algorithms.mse`).
            stored = stored & torch.iinfo(stored.dtype).max if stored.is_signed() else stored & 0x7F
        _check_range(stored, lowest, _largest_finite(dtype), where, f"{quant.scale_dtype} scales, as bits,")
    elif spec.dtype.is_floating_point:
        limit = _largest_finite(spec.dtype)
        for chunk in stored.reshape(-1).split(_CHUNK):
            _check_range(chunk & 0x7F, 0, limit, where, f"{quant.format} codes, as bits without sign,")


def guard_entry(model: nn.Module) -> tuple[str, Tensor] | None:
    """Return (name, tensor of size 0) to store beside the tensors of a quantized model; None if it is not quantized.

    The name is the one of a quantized layer's 16-bit weight. A host without this package looks for that weight, finds
    a wrong shape, and stops, instead of initializing the layer with random values.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedModule)]
    if not found:
        return None

    def codes(module: QuantizedModule) -> int:
        return id(module._parameters[packed_key("qdata", module.weight_names[0])])

    owners = Counter(codes(module) for _, module in found)
    # Hosts merge, split and drop the names of experts and of tied weights: a plain linear layer is safest.
    name, module = min(found, key=lambda pair: (pair[1].kind != "linear", owners[codes(pair[1])] > 1))
    weight = module.weight_names[0]
    return f"{name}.{weight}" if name else weight, torch.empty(0, dtype=module.compute_dtype)


def _largest_finite(dtype: torch.dtype) -> int:
    """Return the bits, as an integer, of the largest finite number of a floating-point dtype."""
    return int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(stored_dtype(dtype)))


def _check_range(tensor: Tensor, low: int, high: int, where: str, what: str) -> None:
    if tensor.numel() == 0:
        return
    lowest, highest = (bound.item() for bound in torch.aminmax(tensor))
    if lowest < low or highest > high:
        raise ValueError(
            f"{where} is corrupt: {what} lie in [{low}, {high}], but it has {lowest if lowest < low else highest}"
        )
