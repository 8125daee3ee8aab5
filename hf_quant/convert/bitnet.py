"""Read BitNet: weights of one magnitude, its negative and 0, whose inputs are rounded to int8 for each token.

Layout (https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/bitnet.py): `weight` uint8
[N / 4, K] holds codes of two bits for -1, 0 and 1; those of a byte, the lowest first, belong to rows that are N / 4
apart. `weight_scale` [1] multiplies the products (linear_class "autobitlinear") or divides them ("bitlinear"). With
quantization_mode "online" `weight` [N, K] holds numbers, which the library rounds in each call to the mean of their
magnitudes, its negative and 0. Ma et al., "The Era of 1-bit LLMs", https://arxiv.org/abs/2402.17764.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.hosts import Empty
from hf_quant.convert.layers import FLOATS, modules_with, tensor_info, without_zero_scales
from hf_quant.formats import FORMATS
from hf_quant.patterns import check_expressions, compile_pattern
from hf_quant.scheme import LinearScheme, TensorQuant


_INPUTS = TensorQuant("int8", "row")
_LOWEST = 1e-5  # mean of the magnitudes of a weight that is rounded at each call
_ROWS = 4  # to a byte
_CLASSES = {"bitlinear": True, "autobitlinear": False}  # whether products are divided by the scale


def read_bitnet(files: TensorFiles, fields: dict[str, Any], host: Empty) -> Foreign:
    """Read the weights of a BitNet checkpoint. Raises ValueError with the reason if one is unsupported."""
    kind, mode = str(fields.get("linear_class", "bitlinear")), str(fields.get("quantization_mode", "offline"))
    if kind not in _CLASSES or mode not in ("offline", "online") or (mode == "online" and _CLASSES[kind]):
        raise ValueError(
            f"its linear_class is {shorten(repr(kind))} and its quantization_mode {shorten(repr(mode))}; can be "
            "imported: 'bitlinear' offline, 'autobitlinear' offline and online"
        )
    if fields.get("use_rms_norm"):
        raise ValueError("its layers normalize their inputs (use_rms_norm), which those of hf_quant do not")
    if mode == "online":
        weights = [_rounded(files, module) for module in _linear_layers(files, fields, host)]
        notes = ["weights are stored as the library rounds them in each call: further training needs the original"]
        return Foreign(weights, set(), notes)
    modules = modules_with(files, "weight_scale")
    return Foreign([_packed(files, module, divides=_CLASSES[kind]) for module in modules], set(), [])


def _linear_layers(files: TensorFiles, fields: dict[str, Any], host: Empty) -> Iterator[str]:
    """Yield the names in the checkpoint of the layers that the library rounds."""
    excluded = _expressions(fields.get("modules_to_not_convert"))
    output = getattr(host.model, "get_output_embeddings", lambda: None)()  # a model of diffusers has none
    for key in files.tensors:
        module, _, leaf = key.rpartition(".")
        name = host.rename(key).rpartition(".")[0]
        try:
            layer = host.model.get_submodule(name)
        except AttributeError:
            continue
        if leaf == "weight" and isinstance(layer, nn.Linear) and layer is not output:
            if should_convert_module(name, excluded):
                yield module


def _expressions(excluded: Any) -> list[str] | None:
    """Return what the library takes for names and expressions of layers that it leaves. Raises ValueError."""
    if excluded is None:
        return None
    if not isinstance(excluded, list) or not all(isinstance(name, str) for name in excluded):
        raise ValueError(f"its modules_to_not_convert is {shorten(repr(excluded))}; needs a list of names")
    expressions = [f"re:{name}" for name in excluded]
    check_expressions(expressions)
    for expression in expressions:
        compile_pattern(expression)
    return excluded


def _weight(
    module: str, shape: tuple[int, ...], keys: tuple[str, ...], scale_dtype: torch.dtype, unpack: partial[PackedWeight]
) -> ForeignWeight:
    quant = TensorQuant("int2", "row", scale_dtype=str(scale_dtype).removeprefix("torch."))
    return ForeignWeight(module, LinearScheme(quant, _INPUTS), shape, keys, unpack)


def _packed(files: TensorFiles, module: str, *, divides: bool) -> ForeignWeight:
    """A weight of codes."""
    keys = (f"{module}.weight", f"{module}.weight_scale")
    rows, K = tensor_info(files, keys[0], [torch.uint8], dims=2).shape
    dtype = tensor_info(files, keys[1], FLOATS, [(), (1,)]).dtype
    dtype = torch.float32 if divides else dtype  # a quotient has more digits
    return _weight(module, (_ROWS * rows, K), keys, dtype, partial(_unpack, files, keys, dtype, divides))


def _unpack(files: TensorFiles, keys: tuple[str, str], dtype: torch.dtype, divides: bool) -> PackedWeight:
    packed, scale = files.read(keys[0]), files.read(keys[1]).to(dtype)
    codes = torch.cat([packed >> 2 * i & 3 for i in range(_ROWS)])
    if bool((codes == 3).any()):
        raise ValueError(f"{keys[0]} has codes of 3; those of -1, 0 and 1 are 0, 1 and 2")
    return _ternary(codes, 1 / scale if divides else scale)


def _ternary(codes: Tensor, scale: Tensor) -> PackedWeight:
    """The weight of codes 0, 1 and 2 [N, K] uint8 for -1, 0 and 1, times one number."""
    N, K = codes.shape
    levels, scale = without_zero_scales(codes + 1, scale.reshape(1, 1).expand(N, 1).contiguous(), K, 2)
    return PackedWeight(FORMATS["int2"].pack(levels), scale, None, None)


def _rounded(files: TensorFiles, module: str) -> ForeignWeight:
    """A weight of numbers."""
    key = f"{module}.weight"
    shape = tensor_info(files, key, FLOATS, dims=2).shape
    return _weight(module, shape, (key,), torch.float32, partial(_round, files, key))


def _round(files: TensorFiles, key: str) -> PackedWeight:
    weight = files.read(key).float()
    scale = 1.0 / weight.abs().mean().clamp(min=_LOWEST)
    codes = (weight * scale).round().clamp(-1, 1)
    if not bool(codes.isfinite().all()):
        raise ValueError(f"{key} has NaN or inf")
    return _ternary((codes + 1).to(torch.uint8), 1.0 / scale)
