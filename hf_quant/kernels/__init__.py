"""The shared kernel package: ops on plain tensors, registered as `torch.ops.hf_quant.*`.

It imports torch and triton only, nothing else of hf_quant. One directory per family: `op.py` (check, fake, typed
reference = the specification), `cpu.py`, `gpu.py`. The formats of the package are in `codes.CODES`; `register_codes`
adds others.
"""

from hf_quant.kernels.adam_step import cpu as _adam_step_cpu  # noqa: F401 - the backends register themselves
from hf_quant.kernels.adam_step.op import adam_step_
from hf_quant.kernels.dispatch import implements_lazily
from hf_quant.kernels.fake_quantize import cpu as _fake_quantize_cpu  # noqa: F401
from hf_quant.kernels.fake_quantize.op import fake_quantize, fake_quantize_backward
from hf_quant.kernels.grouped_mm import cpu as _grouped_mm_cpu  # noqa: F401
from hf_quant.kernels.grouped_mm.op import grouped_mm, grouped_mm_backward
from hf_quant.kernels.grouped_scaled_mm import cpu as _grouped_scaled_mm_cpu  # noqa: F401
from hf_quant.kernels.grouped_scaled_mm.op import grouped_scaled_mm, grouped_scaled_sums
from hf_quant.kernels.hadamard import cpu as _hadamard_cpu  # noqa: F401
from hf_quant.kernels.hadamard.op import differentiable_hadamard, hadamard, hadamard_quantize_rowwise
from hf_quant.kernels.int8_attention import cpu as _int8_attention_cpu  # noqa: F401
from hf_quant.kernels.int8_attention.op import int8_attention
from hf_quant.kernels.kv_attention import cpu as _kv_attention_cpu  # noqa: F401
from hf_quant.kernels.kv_attention.op import kv_append, kv_attention
from hf_quant.kernels.prepack import clear_prepacked, prepacked_bytes, set_prepack_limit
from hf_quant.kernels.requantize import cpu as _requantize_cpu  # noqa: F401
from hf_quant.kernels.requantize.op import requantize_rows_
from hf_quant.kernels.rowwise import cpu as _rowwise_cpu  # noqa: F401
from hf_quant.kernels.rowwise.op import (
    act_quantize_rowwise,
    layer_norm_quantize_rowwise,
    quantize_rowwise,
    quantize_static,
    rms_norm_quantize_rowwise,
)
from hf_quant.kernels.scaled_mm import cpu as _scaled_mm_cpu  # noqa: F401
from hf_quant.kernels.scaled_mm.op import dynamic_mm, fp8_scaled_mm, int8_scaled_mm, quantized_mm
from hf_quant.kernels.steps.op import add_rms_norm, gate, rms_norm, rotary
from hf_quant.kernels.two_way import cpu as _two_way_cpu  # noqa: F401
from hf_quant.kernels.two_way.op import quantize_two_way
from hf_quant.kernels.weight_only import cpu as _weight_only_cpu  # noqa: F401
from hf_quant.kernels.weight_only.op import dequantize, weight_only_mm, weight_only_mm_backward


implements_lazily("hf_quant.kernels.adam_step.gpu", adam_step_)
implements_lazily("hf_quant.kernels.fake_quantize.gpu", fake_quantize, fake_quantize_backward)
implements_lazily("hf_quant.kernels.grouped_mm.gpu_backward", grouped_mm_backward)
implements_lazily("hf_quant.kernels.grouped_mm.gpu", grouped_mm)
implements_lazily("hf_quant.kernels.grouped_scaled_mm.gpu", grouped_scaled_mm, grouped_scaled_sums)
implements_lazily("hf_quant.kernels.hadamard.gpu", hadamard, hadamard_quantize_rowwise)
implements_lazily("hf_quant.kernels.int8_attention.gpu", int8_attention)
implements_lazily("hf_quant.kernels.kv_attention.gpu_append", kv_append)
implements_lazily("hf_quant.kernels.kv_attention.gpu", kv_attention)
implements_lazily("hf_quant.kernels.requantize.gpu", requantize_rows_)
implements_lazily(
    "hf_quant.kernels.rowwise.gpu",
    act_quantize_rowwise,
    layer_norm_quantize_rowwise,
    quantize_rowwise,
    quantize_static,
    rms_norm_quantize_rowwise,
)
implements_lazily("hf_quant.kernels.scaled_mm.gpu", dynamic_mm, fp8_scaled_mm, int8_scaled_mm, quantized_mm)
implements_lazily("hf_quant.kernels.steps.gpu", add_rms_norm, gate, rms_norm, rotary)
implements_lazily("hf_quant.kernels.two_way.gpu", quantize_two_way)
implements_lazily("hf_quant.kernels.weight_only.gpu_dequantize", dequantize)
implements_lazily("hf_quant.kernels.weight_only.gpu", weight_only_mm, weight_only_mm_backward)

__all__ = [
    "act_quantize_rowwise",
    "adam_step_",
    "add_rms_norm",
    "clear_prepacked",
    "dequantize",
    "differentiable_hadamard",
    "dynamic_mm",
    "fake_quantize",
    "fake_quantize_backward",
    "fp8_scaled_mm",
    "gate",
    "grouped_mm",
    "grouped_mm_backward",
    "grouped_scaled_mm",
    "grouped_scaled_sums",
    "hadamard",
    "hadamard_quantize_rowwise",
    "int8_attention",
    "int8_scaled_mm",
    "kv_append",
    "kv_attention",
    "layer_norm_quantize_rowwise",
    "prepacked_bytes",
    "quantized_mm",
    "quantize_rowwise",
    "quantize_static",
    "quantize_two_way",
    "requantize_rows_",
    "rms_norm",
    "rms_norm_quantize_rowwise",
    "rotary",
    "set_prepack_limit",
    "weight_only_mm",
    "weight_only_mm_backward",
]
