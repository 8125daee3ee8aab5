// AVX-512 with VNNI, without VBMI, GFNI and bf16 (Cascade Lake, Cooper Lake).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,bmi2")
#endif

#define HFQ_AVX512 avx512_vnni
#define HFQ_VBMI 0
#define HFQ_SET avx512_vnni_portable
#define HFQ_VECTOR_BYTES 64
#include "set.h"

#include "avx512_matmul.h"

namespace hfq {

const Kernels kAvx512Vnni = avx512_vnni_portable::kernels_of("avx512_vnni", false, true, avx512_vnni::matmul, avx512_vnni::quantize_rows,
                                                           avx512_vnni::attention);

}  // namespace hfq

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
