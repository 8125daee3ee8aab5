"""Translate schemes into the fields of compressed-tensors and back; a scheme without a counterpart has a reason.

The fields are the fields of `QuantizationScheme` and `QuantizationArgs` that every release since 0.13 has
(https://github.com/vllm-project/compressed-tensors/blob/main/src/compressed_tensors/quantization/quant_args.py).
"""

from typing import Any, NamedTuple

import torch

from hf_quant.algorithms import geometry
from hf_quant.scheme import BLOCK_SIZE, LinearScheme, TensorQuant


PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
# A cache in fp8 e4m3 with one scale for the keys, and one for the values, of each attention module.
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_STRATEGIES = {"row": "channel", "group": "group", "tensor": "tensor", "block": "block"}
_FORMAT_NAMES: dict[tuple[Any, Any], str] = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8_e4m3"}
_GRANULARITIES = {strategy: granularity for granularity, strategy in _STRATEGIES.items()}


class Inexpressible(ValueError):
    """A weight cannot be written without changing it; the message is the reason alone."""


class Group(NamedTuple):
    """One of `config_groups` without its targets: the storage format, and the quantization of weights and inputs."""

    format: str
    weights: tuple[tuple[str, Any], ...]  # items of a dict, so that equal groups hash alike
    input_activations: tuple[tuple[str, Any], ...] | None

    def to_dict(self, targets: list[str]) -> dict[str, Any]:
        inputs = None if self.input_activations is None else dict(self.input_activations)
        return {
            "targets": targets,
            "format": self.format,
            "weights": {name: list(v) if isinstance(v, tuple) else v for name, v in self.weights},
            "input_activations": inputs,
            "output_activations": None,
        }


def group_of(scheme: LinearScheme, N: int, K: int, dtype: torch.dtype) -> Group:
    """Return the group for a scheme of a linear layer [N, K] in a model of `dtype`.

    Raises Inexpressible.
    """
    quant = scheme.weight
    activation = None if scheme.activation is None else scheme.activation.format
    format = _storage(quant, activation)
    if quant.has_float_zeros:
        raise Inexpressible("its zero points are floating-point numbers, which no format of compressed-tensors has")
    if scheme.sparsity is not None:
        raise Inexpressible(f"{scheme.sparsity} sparsity has no format that is still read")
    if scheme.is_static and quant.granularity == "block":
        raise Inexpressible("no reader takes weights in blocks with a static scale of their input")
    if scheme.input_transform is not None:
        raise Inexpressible(
            "its input is rotated, which readers of this format pass over or cannot compute; for them, quantize the "
            'model with input_transform="none"'
        )
    _, columns = geometry(quant, N, K)
    if quant.granularity == "group" and K % columns:
        raise Inexpressible(f"groups of {columns} do not divide its {K} columns")
    if format == PACKED and getattr(torch, quant.scale_dtype) != dtype:
        raise Inexpressible(
            f"its scales are {quant.scale_dtype}, but readers load scales of packed codes in the model's dtype, "
            f"{_name(dtype)}: they would be rounded"
        )
    strategy = "tensor_group" if format == NVFP4 else _STRATEGIES[quant.granularity]
    weights: dict[str, Any] = {
        "num_bits": 8 if quant.format in ("int8", "fp8_e4m3") else 4,
        "type": "int" if quant.format.startswith("int") else "float",
        "symmetric": quant.symmetric,
        "strategy": strategy,
        "group_size": quant.group_size,
        "dynamic": False,
    }
    if strategy == "block":
        weights["block_structure"] = (BLOCK_SIZE, BLOCK_SIZE)
    inputs: tuple[tuple[str, Any], ...] | None = None
    if activation is not None:
        kind = ("type", "int" if activation == "int8" else "float")
        strategy = "tensor" if scheme.is_static else "token"
        inputs = (("num_bits", 8), kind, ("symmetric", True), ("strategy", strategy), ("group_size", None))
        inputs = (*inputs, ("dynamic", not scheme.is_static))
    return Group(format, tuple(weights.items()), inputs)


def _storage(quant: TensorQuant, activation: str | None) -> str:
    """Return the storage format of a weight, by its number format, granularity and activations."""
    name, granularity = quant.format, quant.granularity
    if name not in ("int4", "int8", "fp8_e4m3", "mxfp4", "nvfp4"):
        raise Inexpressible(f"no format of compressed-tensors that engines read holds {name} codes")
    if quant.scale_dtype == "float8_e4m3fn" and name != "nvfp4":
        hint = ": quantize it as W4A16, or with scale_dtype='model'" if name == "int4" else ""
        raise Inexpressible(f"its scales are quantized themselves (float8_e4m3fn), which no engine reads{hint}")
    if activation is None:
        if name in ("int4", "int8") and granularity in ("row", "group"):
            return PACKED
        if name == "fp8_e4m3" and granularity in ("row", "tensor"):
            return NAIVE
        if name in ("mxfp4", "nvfp4"):
            return MXFP4 if name == "mxfp4" else NVFP4
    elif name == activation == "int8" and granularity in ("row", "tensor"):
        return INT
    elif name == activation == "fp8_e4m3" and granularity in ("row", "tensor", "block"):
        return FLOAT
    inputs = "16-bit" if activation is None else activation
    raise Inexpressible(f"no reader takes {name} weights with one scale per {granularity} and {inputs} inputs")


def scheme_of(group: dict[str, Any], format: str, scale_dtype: torch.dtype) -> LinearScheme:
    """Return the scheme of one of `config_groups`, for weights stored as `format` and scales stored as `scale_dtype`.

    Raises Inexpressible.
    """
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise Inexpressible("it has no quantized weights")
    if group.get("output_activations") is not None:
        raise Inexpressible("its outputs are quantized")
    if weights.get("actorder") not in (None, "static", "weight"):  # these leave the order of the columns as it was
        raise Inexpressible(f"its columns are reordered (actorder {weights['actorder']!r})")
    bits, kind, symmetric = weights.get("num_bits"), weights.get("type", "int"), weights.get("symmetric", True)
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    size = size if strategy in ("group", "tensor_group") else None
    if strategy == "block" and weights.get("block_structure") != [BLOCK_SIZE, BLOCK_SIZE]:
        raise Inexpressible(f"its blocks are {weights.get('block_structure')}; hf_quant has 128 x 128 alone")
    if format in (NVFP4, MXFP4):
        name = "nvfp4" if format == NVFP4 else "mxfp4"
        granularity, scale = "group", "float8_e4m3fn" if format == NVFP4 else "float8_e8m0fnu"
    else:
        name = _FORMAT_NAMES.get((kind, bits))
        granularity, scale = _GRANULARITIES.get(strategy), _name(scale_dtype)
    if name is None or granularity is None or (format in (INT, FLOAT, NAIVE) and name == "int4"):
        raise Inexpressible(f"hf_quant has no {bits}-bit {kind} weights stored as {format} with strategy {strategy!r}")
    if not symmetric and name not in ("int4", "int8"):
        raise Inexpressible(f"{name} has no zero point here")
    zeros = "float32" if not symmetric and name == "int8" else "uint8"
    if zeros == "float32" and granularity not in ("row", "group"):
        raise Inexpressible(
            f"its zero points are shared by strategy {strategy!r}; hf_quant has those of int8 by strategy 'channel' "
            "or 'group' alone: quantize the model with one of these, or symmetric"
        )
    quant = TensorQuant(name, granularity, size, symmetric, scale, zero_point_dtype=zeros)
    return LinearScheme(quant, _activation(inputs))


def _activation(inputs: Any) -> TensorQuant | None:
    if inputs is None:
        return None
    kind, bits = inputs.get("type", "int"), inputs.get("num_bits")
    name = {("int", 8): "int8", ("float", 8): "fp8_e4m3"}.get((kind, bits))
    if name is None:
        raise Inexpressible(f"its inputs are quantized to {bits}-bit {kind}")
    if not inputs.get("symmetric", True):
        raise Inexpressible("its inputs are quantized with zero points; hf_quant has symmetric scales")
    if not inputs.get("dynamic"):
        if inputs.get("strategy", "tensor") != "tensor":
            raise Inexpressible(
                f"its inputs have static scales by strategy {inputs['strategy']!r}; hf_quant has one per layer"
            )
        return TensorQuant(name, "tensor", dynamic=False)
    if inputs.get("strategy") not in ("token", "group"):
        raise Inexpressible(f"its inputs share scales by strategy {inputs.get('strategy')!r}; hf_quant: per token")
    return TensorQuant(name, "row")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
