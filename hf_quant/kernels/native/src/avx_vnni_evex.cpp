// The same in the encoding of AVX-512: CPUs with its VNNI have faster kernels, but these can be tested there.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2,avx512vl,avx512vnni")
#endif

#define HFQ_AVX2 avx_vnni_evex
#define HFQ_SET avx_vnni_evex_portable
#define HFQ_VECTOR_BYTES 32
#define HFQ_DOT_BYTES "vpdpbusd"
#define HFQ_DOT_WORDS "vpdpwssd"
#include "avx_vnni.h"

namespace hfq {

bool (*const kAvxVnniEvexMatmul)(const Product&) = avx_vnni_evex::matmul;

}  // namespace hfq

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
