// The same in the encoding of AVX-512, for CPUs with its VNNI that lack what the kernels for AVX-512 need besides
// (Cascade Lake, Cooper Lake).
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
