"""The shared kernel package: ops on plain tensors, registered as `torch.ops.hf_quant.*`.

It imports torch and triton only, nothing else of hf_quant. One directory per family: `op.py` (check, fake, typed
reference = the specification), `cpu.py`, `gpu.py`. Formats are made known to it by `codes.register_codes`.
"""

from hf_quant.kernels.grouped_mm.op import grouped_mm, grouped_mm_backward
from hf_quant.kernels.rowwise.op import quantize_rowwise
from hf_quant.kernels.scaled_mm.op import dynamic_mm, fp8_scaled_mm, int8_scaled_mm
from hf_quant.kernels.weight_only.op import dequantize, weight_only_mm, weight_only_mm_backward


__all__ = [
    "dequantize",
    "dynamic_mm",
    "fp8_scaled_mm",
    "grouped_mm",
    "grouped_mm_backward",
    "int8_scaled_mm",
    "quantize_rowwise",
    "weight_only_mm",
    "weight_only_mm_backward",
]
