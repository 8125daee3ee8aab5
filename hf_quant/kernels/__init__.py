"""The shared kernel package: ops on plain tensors, registered as `torch.ops.hf_quant.*`.

It imports torch and triton only, nothing else of hf_quant. One directory per family: `op.py` (check, fake, typed
reference = the specification), `cpu.py`, `gpu.py`. Formats are made known to it by `codes.register_codes`.
"""

from hf_quant.kernels._cpu import clear_prepacked, prepacked_bytes, set_prepack_limit
from hf_quant.kernels.grouped_mm import cpu as _grouped_mm_cpu  # noqa: F401
from hf_quant.kernels.grouped_mm import gpu as _grouped_mm_gpu  # noqa: F401 - the backends register themselves
from hf_quant.kernels.grouped_mm.op import grouped_mm, grouped_mm_backward
from hf_quant.kernels.rowwise import cpu as _rowwise_cpu  # noqa: F401
from hf_quant.kernels.rowwise.op import quantize_rowwise
from hf_quant.kernels.scaled_mm import cpu as _scaled_mm_cpu  # noqa: F401
from hf_quant.kernels.scaled_mm import gpu as _scaled_mm_gpu  # noqa: F401
from hf_quant.kernels.scaled_mm.op import dynamic_mm, fp8_scaled_mm, int8_scaled_mm
from hf_quant.kernels.weight_only import cpu as _weight_only_cpu  # noqa: F401
from hf_quant.kernels.weight_only import gpu as _weight_only_gpu  # noqa: F401
from hf_quant.kernels.weight_only.op import dequantize, weight_only_mm, weight_only_mm_backward


__all__ = [
    "clear_prepacked",
    "dequantize",
    "dynamic_mm",
    "fp8_scaled_mm",
    "grouped_mm",
    "grouped_mm_backward",
    "int8_scaled_mm",
    "prepacked_bytes",
    "quantize_rowwise",
    "set_prepack_limit",
    "weight_only_mm",
    "weight_only_mm_backward",
]
