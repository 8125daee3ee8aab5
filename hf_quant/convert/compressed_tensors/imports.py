"""Read compressed-tensors checkpoints: the config group of each layer, and its scheme in hf_quant.

Layout and fields: see `hf_quant.convert.compressed_tensors.export`.
"""

import re
from math import prod
from typing import Any

import torch
from torch import Tensor

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import TensorInfo, expected_tensors
from hf_quant.convert.compressed_tensors.schemes import (
    FLOAT,
    INT,
    MXFP4,
    NAIVE,
    NVFP4,
    PACKED,
    Inexpressible,
    scheme_of,
)
from hf_quant.convert.compressed_tensors.tensors import from_compressed
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.formats import FORMATS
from hf_quant.patterns import compile_pattern
from hf_quant.scheme import LinearScheme


_PARTS = ("weight_packed", "weight", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale")
_INPUT_PARTS = ("input_scale", "input_zero_point")  # of a static scale
_FORMATS = (PACKED, INT, FLOAT, NAIVE, NVFP4, MXFP4)
_ONE_VALUE = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder")
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale")


def read_compressed_tensors(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a compressed-tensors checkpoint. Raises ValueError with the reason if one is unsupported."""
    for name in ("sparsity_config", "transform_config"):
        given = fields.get(name) or {}
        is_known = isinstance(given, dict) and given.get("format", "dense") == "dense"
        if not is_known or given.get("config_groups"):
            raise ValueError(f"it has a {name}, which hf_quant has no form for: {given}")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or fields.get("quantization_status", "compressed") != "compressed":
        raise ValueError(
            f"its quantization_status is {fields.get('quantization_status')!r} with config_groups "
            f"{groups!r}; needs 'compressed' and a table of groups"
        )
    for group in groups.values():
        _check_group(group)
    modules = [name for key in files.tensors for name, _, leaf in [key.rpartition(".")] if leaf == "weight_scale"]
    if not modules:
        raise ValueError("it holds no tensor named `weight_scale`: no layer of it is quantized")
    weights = [_weight(files, module, _group_of(module, groups), fields, dtype) for module in modules]
    cache = {key for key in files.tensors if key.rpartition(".")[2] in _CACHE_SCALES}
    notes = ["the calibrated scales of the KV cache are left out: hf_quant computes one for every token"]
    if any(weight.scheme.activation and weight.scheme.weight.granularity == "block" for weight in weights):
        notes.append("inputs of fp8 blocks are quantized with one scale per token, not per 128 values")
    quants = {weight.scheme.weight for weight in weights}
    if any(quant.has_float_zeros and quant.scale_dtype == "float32" for quant in quants):
        notes.append("products of zero points and fp32 scales are rounded to fp32: the last bits of weights differ")
    return Foreign(weights, cache, notes if cache or fields.get("kv_cache_scheme") else notes[1:])


def _check_group(group: Any) -> None:
    """Raise ValueError if one of `config_groups` has no list of targets, or no tables for weights and inputs."""
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"its config_groups have {group!r}; needs a table with a list of targets")
    for target in targets:
        compile_pattern(target)
    for name in ("weights", "input_activations"):
        values: Any = {} if group.get(name) is None else group[name]
        if not isinstance(values, dict) or any(isinstance(values.get(field), (dict, list)) for field in _ONE_VALUE):
            raise ValueError(f"its config_groups have {name} {values!r}; needs a table of single values")


def _group_of(module: str, groups: dict[str, Any]) -> dict[str, Any]:
    """Return the config group of a layer: by exact name, then by pattern, then by class."""

    def rank(target: str) -> int | None:
        if target.startswith("re:"):
            return 1 if re.match(target[3:], module) else None
        if target == module:
            return 0
        return 2 if target == "Linear" else None

    ranked = [(r, i) for i, g in enumerate(groups.values()) for t in g["targets"] if (r := rank(t)) is not None]
    if not ranked:
        raise ValueError(f"{module} is quantized, but no group of its config_groups names it")
    return list(groups.values())[min(ranked)[1]]


def _weight(
    files: TensorFiles, module: str, group: dict[str, Any], fields: dict[str, Any], dtype: torch.dtype | None
) -> ForeignWeight:
    found = {part: files.tensors[f"{module}.{part}"] for part in _PARTS if f"{module}.{part}" in files.tensors}
    format = group.get("format") or fields.get("format")
    if format not in _FORMATS:
        raise ValueError(f"{module} is stored as {format!r}; readable: {', '.join(_FORMATS)}")
    main = "weight_packed" if format in (PACKED, NVFP4, MXFP4) else "weight"
    if main not in found or len(found[main].shape) != 2 or f"{module}.weight_g_idx" in files.tensors:
        given = "an order of columns by activation" if main in found else f"no {main}"
        raise ValueError(f"{module}, stored as {format}, has {given}; hf_quant needs the matrix in its own order")
    try:
        scheme = scheme_of(group, format, found["weight_scale"].dtype)
    except ValueError as reason:
        raise ValueError(f"{module}: {reason}") from None
    N, width = found[main].shape
    K = {PACKED: None, NVFP4: 2 * width, MXFP4: 2 * width}.get(format, width)
    if K is None:
        K = _columns(files, module, found, scheme)
    expected = expected_tensors(scheme, {"weight": (N, K)})["scale"].shape
    if prod(found["weight_scale"].shape) != prod(expected):
        raise ValueError(
            f"{module}.weight_scale is {found['weight_scale']}; weights of [{N}, {K}] as {scheme.weight}, which its "
            f"group of config_groups says, need {list(expected)}"
        )
    _check_parts(module, found, format, scheme, N)
    own = {name: files.tensors[f"{module}.{name}"] for name in _INPUT_PARTS if f"{module}.{name}" in files.tensors}
    if scheme.is_static:
        _check_input(module, own)
    elif "input_zero_point" in own or "input_scale" in own:
        raise ValueError(f"{module} has a scale of its input, which its group does not name")
    keys = (f"{module}.{main}", *(f"{module}.{part}" for part in (*found, *own) if part != main))

    def unpack() -> PackedWeight:
        tensors = {part: files.read(f"{module}.{part}") for part in found}
        if scheme.weight.symmetric and "weight_zero_point" in tensors and tensors["weight_zero_point"].any():
            raise ValueError(f"{module}.weight_zero_point is not 0, but its group is symmetric")
        try:
            return from_compressed(tensors, format, scheme.weight, (N, K), dtype or torch.bfloat16)
        except Inexpressible as reason:
            raise ValueError(f"{module}: {reason}") from None

    def input_scale() -> Tensor:
        zeros = files.read(f"{module}.input_zero_point") if "input_zero_point" in own else None
        if zeros is not None and zeros.float().any():
            raise ValueError(f"{module}.input_zero_point is not 0, but its group is symmetric")
        return files.read(f"{module}.input_scale")

    return ForeignWeight(module, scheme, (N, K), keys, unpack, input_scale=input_scale if scheme.is_static else None)


def _check_input(module: str, own: dict[str, TensorInfo]) -> None:
    """Raise ValueError unless there is one floating-point scale of the input, and no more than one zero point."""
    scale, zeros = own.get("input_scale"), own.get("input_zero_point")
    if scale is None or prod(scale.shape) != 1 or scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{module}: input_scale is {scale or 'missing'}; needs one number")
    if zeros is not None and prod(zeros.shape) != 1:
        raise ValueError(f"{module}: input_zero_point is {zeros}; needs one number")


def _columns(files: TensorFiles, module: str, found: dict[str, TensorInfo], scheme: LinearScheme) -> int:
    """Return K of a weight in words, from its `weight_shape`."""
    info, words = found.get("weight_shape"), found["weight_packed"]
    if info is None or info.shape != (2,) or info.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{module} has {info or 'no weight_shape'} beside its weight_packed; needs two integers")
    N, K = files.read(f"{module}.weight_shape").tolist()
    needed = (N, -(-K * FORMATS[scheme.weight.format].bits // 32))
    if min(N, K) < 1 or words.shape != needed or words.dtype != torch.int32:
        raise ValueError(f"{module}.weight_packed is {words}, its weight_shape {[N, K]} needs {list(needed)} int32")
    return K


def _check_parts(module: str, found: dict[str, TensorInfo], format: str, scheme: LinearScheme, N: int) -> None:
    """Raise ValueError unless the tensors of a weight have the dtypes and shapes of their meaning."""
    scale, zeros, factor = found["weight_scale"], found.get("weight_zero_point"), found.get("weight_global_scale")
    if format in (NVFP4, MXFP4) and (found["weight_packed"].dtype != torch.uint8 or scale.dtype.itemsize != 1):
        raise ValueError(f"{module}: its codes are {found['weight_packed']}, its scales {scale}; needs bytes")
    if format == NVFP4 and (factor is None or prod(factor.shape) != 1 or not factor.dtype.is_floating_point):
        raise ValueError(f"{module}.weight_global_scale is {factor or 'missing'}; needs one number")
    if not scheme.weight.symmetric:
        words = (-(-N * FORMATS[scheme.weight.format].bits // 32), prod(scale.shape) // N)
        is_packed = format == PACKED and zeros is not None and (zeros.dtype, zeros.shape) == (torch.int32, words)
        if not is_packed and (zeros is None or zeros.dtype != torch.int8 or prod(zeros.shape) != prod(scale.shape)):
            needed = f"as many int8{f', or {list(words)} int32' if format == PACKED else ''}"
            raise ValueError(
                f"{module}.weight_zero_point is {zeros or 'missing'} beside scales of {scale}; needs {needed}"
            )
