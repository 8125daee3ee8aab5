// AVX-512 with VNNI, VBMI and GFNI (Ice Lake, Zen 4 and later); dot products of bf16 where the CPU has them, too.

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,gfni,fma,f16c,amx-tile,amx-int8,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx512bf16,gfni,fma,f16c")
#endif

#define HFQ_AVX512 avx512
#define HFQ_VBMI 1
#define HFQ_SET avx512_portable
#define HFQ_VECTOR_BYTES 64
#include "adam.h"
#include "append.h"
#include "avx512_matmul.h"
#include "fake.h"
#include "mixture.h"
#include "recurrent.h"
#include "steps.h"
#include "two_way.h"

namespace hfq {

const Kernels kAvx512 = {"avx512", true, true, avx512::matmul, avx512_portable::dequantize, avx512::quantize_rows,
                         avx512::attention, avx512_portable::quantize, avx512_portable::append, avx512_portable::adam_step,
                         avx512_portable::fake_quantize, avx512_portable::quantize_two_way, avx512_portable::scale_sums,
                         avx512_portable::requantize_rows, avx512_portable::norm_rows, avx512_portable::turn_rows, avx512_portable::gate_rows, avx512_portable::add_rows,
                         avx512_portable::small_product, avx512_portable::combine_rows, avx512_portable::convolve_rows, avx512_portable::delta_rows,
                         avx512_portable::scan_rows};

const Kernels* amx_kernels() {
  static Kernels kernels;
  kernels = kAvx512;
  kernels.name = "amx";
  kernels.matmul = avx512::matmul_by_tiles;
  return avx512::has_matrix_units() ? &kernels : nullptr;
}

}  // namespace hfq

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
