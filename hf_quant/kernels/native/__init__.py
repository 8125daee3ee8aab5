"""Quantized products, attention and quantizing in C++ for CPUs: codes are decoded in registers, from the stored bytes.

`_native` is an extension that is built when the package is installed where there is a compiler, and shipped in wheels;
it holds every instruction set below and chooses at run time. Without it, or where `unsupported_reason` returns a
reason, the stock-torch paths of `cpu.product`, `kv_attention` and `algorithms` serve. `attention` is for caches.

Instruction sets: "amx" (as "avx512", with tiles for products of many rows: Sapphire Rapids and later Xeons), "avx512"
(with VNNI, VBMI and GFNI: Ice Lake, Zen 4 and later; bf16 dot products where the CPU has them), "avx512_vnni" (the
same without VBMI, GFNI and bf16: Cascade Lake, Cooper Lake), "avx_vnni" (as "avx2", with dot products of int8: Alder
Lake and later), "avx2" (with FMA: Haswell, Zen and later), "neon" (Arm with dot products of int8: Armv8.2 DotProd),
"portable" (any other). HF_QUANT_NATIVE chooses one by name, or "off"; `use` does so at run time. Threads come from
torch's own OpenMP pool, as many as `torch.set_num_threads` has set.
"""

from hf_quant.kernels.native.extension import active, features, instruction_sets, unavailable_reason, use, using
from hf_quant.kernels.native.optimizer import adam_step_, requantize_rows_
from hf_quant.kernels.native.pages import page_size, use_huge_pages
from hf_quant.kernels.native.products import (
    decodes,
    dequantize,
    prepared,
    product,
    serves,
    takes_int8,
    unsupported_reason,
)
from hf_quant.kernels.native.quantization import (
    fake_quantize,
    fake_quantizes,
    quantize,
    quantize_rows,
    quantize_rows_to_e4m3,
    quantize_two_way,
    quantizes,
    scale_sums,
    scales_sums,
    transform_rows,
)


__all__ = [
    "active",
    "adam_step_",
    "dequantize",
    "fake_quantize",
    "fake_quantizes",
    "features",
    "instruction_sets",
    "page_size",
    "prepared",
    "product",
    "quantize",
    "quantize_rows",
    "quantize_rows_to_e4m3",
    "quantize_two_way",
    "quantizes",
    "requantize_rows_",
    "unsupported_reason",
    "use_huge_pages",
    "scale_sums",
    "scales_sums",
    "decodes",
    "serves",
    "takes_int8",
    "transform_rows",
    "use",
    "using",
    "unavailable_reason",
]
