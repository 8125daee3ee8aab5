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
#include "set.h"

#include "avx512_matmul.h"

namespace hfq {

const Kernels kAvx512 = avx512_portable::kernels_of("avx512", true, true, avx512::matmul, avx512::quantize_rows, avx512::attention);

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
