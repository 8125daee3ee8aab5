// The products for AVX2 with FMA (Haswell, Zen and later).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif

#define HFQ_SET avx2
#define HFQ_VECTOR_BYTES 32
#include "attention.h"
#include "quantize.h"

namespace hfq {
const Kernels kAvx2 = {"avx2", false, avx2::matmul, avx2::dequantize, avx2::quantize_rows,
                         avx2::attention, avx2::quantize};
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
