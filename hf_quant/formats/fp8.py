"""fp8_e4m3 and fp8_e5m2 (OCP 8-bit floating point v1.0, https://arxiv.org/abs/2209.05433), saturating."""

import torch
from torch import Tensor

from hf_quant.formats.format import Format
from hf_quant.formats.minifloat import minifloat_snap
from hf_quant.kernels.codes import CODES


def _fp8(name: str) -> Format:
    spec = CODES[name]
    assert spec.minifloat is not None
    _, mantissa_bits, bias = spec.minifloat
    limit = torch.finfo(spec.dtype).max

    def encode(values: Tensor) -> Tensor:
        return values.clamp_(-limit, limit).to(spec.dtype)

    return Format(
        spec=spec,
        max=limit,
        round=encode,
        snap=minifloat_snap(limit, mantissa_bits, bias),
        granularities=("row", "group", "tensor", "block"),
        scale_dtype="float32",
    )


FP8_E4M3 = _fp8("fp8_e4m3")
FP8_E5M2 = _fp8("fp8_e5m2")
