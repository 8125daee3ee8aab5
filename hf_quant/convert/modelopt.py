"""Read NVIDIA ModelOpt: fp8 with one scale, or by rows, and nvfp4, alone or beside each other.

Layout (https://github.com/NVIDIA/Model-Optimizer, "unified" checkpoints): fp8 as in `hf_quant.convert.fp8`; nvfp4 as
`weight` uint8 [N, K / 2], two e2m1 codes to a byte, the first in the low half, `weight_scale` e4m3 [N, K / 16] and
`weight_scale_2` fp32. The tensors of a layer tell how it is stored, the config whether inputs are quantized.
"""

from functools import partial
from typing import Any

import torch

from hf_quant.algorithms import PackedWeight
from hf_quant.checkpoint import shorten
from hf_quant.convert.files import TensorFiles
from hf_quant.convert.foreign import Foreign, ForeignWeight
from hf_quant.convert.fp8 import fp8_weights
from hf_quant.convert.layers import nvfp4_weight, tensor_info
from hf_quant.scheme import LinearScheme, TensorQuant


_WEIGHT_ONLY = ("FP8_PB_WO", "W8A16_FP8", "W4A16_NVFP4")
_TOTAL = ".weight_scale_2"
_CACHE = (".k_scale", ".v_scale", ".k_bias", ".v_bias")
_VECTORS = (".pre_quant_scale", ".weight_scale_inv_2")
_SCHEME = LinearScheme(TensorQuant("nvfp4", "group", 16, True, "float8_e4m3fn"))


def read_modelopt(files: TensorFiles, fields: dict[str, Any], dtype: torch.dtype | None) -> Foreign:
    """Read the weights of a ModelOpt checkpoint. Raises ValueError with the reason if one is unsupported."""
    own = fields.get("quantization") if isinstance(fields.get("quantization"), dict) else fields
    algorithm = str(own.get("quant_algo", "")).upper()
    scaled = next((key for key in files.tensors if key.endswith(_VECTORS)), None)
    if scaled is not None:
        raise ValueError(f"{scaled} is multiplied with an input, column by column, which hf_quant has no form for")
    weights = fp8_weights(files, quantizes_inputs=algorithm not in _WEIGHT_ONLY)
    modules = [key.removesuffix(_TOTAL) for key in files.tensors if key.endswith(_TOTAL)]
    weights += [_nvfp4(files, module) for module in modules]
    if not weights:
        raise ValueError(
            f"none of its layers is stored as fp8 or nvfp4; its quant_algo is {shorten(repr(algorithm))}, readable: "
            "FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, and both mixed"
        )
    cache = {key for key in files.tensors if key.endswith(_CACHE)}
    inputs = {f"{module}.input_scale" for module in modules} & files.tensors.keys()
    notes: list[str] = []
    if inputs:
        notes.append("inputs of nvfp4 layers stay in 16 bit; ModelOpt rounds them to 4 bits")
    if cache:
        notes.append("the calibrated scales of the KV cache are left out: hf_quant computes one for every token")
    return Foreign(weights, cache | inputs, notes)


def _nvfp4(files: TensorFiles, module: str) -> ForeignWeight:
    N, width = tensor_info(files, f"{module}.weight", [torch.uint8], dims=2).shape
    tensor_info(files, f"{module}.weight_scale", [torch.float8_e4m3fn], [(N, width // 8)])
    tensor_info(files, f"{module}{_TOTAL}", [torch.float32], [(), (1,)])
    keys = tuple(f"{module}.{part}" for part in ("weight", "weight_scale", "weight_scale_2"))
    return ForeignWeight(module, _SCHEME, (N, 2 * width), keys, partial(_unpack, files, keys))


def _unpack(files: TensorFiles, keys: tuple[str, ...]) -> PackedWeight:
    return nvfp4_weight(*(files.read(key) for key in keys))
