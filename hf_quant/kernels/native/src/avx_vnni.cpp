// AVX-VNNI: Intel's CPUs from Alder Lake on, those without AVX-512 included.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 13 : __GNUC__ >= 11)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2,avxvnni")
#endif

#define HFQ_AVX2 avx_vnni
#define HFQ_SET avx_vnni_portable
#define HFQ_VECTOR_BYTES 32
#define HFQ_DOT_BYTES "%{vex%} vpdpbusd"
#define HFQ_DOT_WORDS "%{vex%} vpdpwssd"
#include "avx_vnni.h"

namespace hfq {

bool (*const kAvxVnniMatmul)(const Product&) = avx_vnni::matmul;

}  // namespace hfq

#if defined(__clang__)
#pragma clang attribute pop
#endif
#elif defined(__x86_64__)
#include "kernels.h"

namespace hfq {

bool (*const kAvxVnniMatmul)(const Product&) = nullptr;  // the compiler does not know it

}  // namespace hfq
#endif
