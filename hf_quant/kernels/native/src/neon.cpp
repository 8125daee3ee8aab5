// Arm with dot products of int8 (Armv8.2 DotProd: Cortex-A76, Graviton 2, Apple M1 and later).
#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define HFQ_SDOT
#define HFQ_SET neon
#define HFQ_VECTOR_BYTES 16
#include "set.h"

namespace hfq {
const Kernels kNeon = neon::kernels_of("neon", false, false, neon::matmul, neon::quantize_rows, neon::attention);
}

// What follows runs on any Arm.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace hfq {
bool has_dot_products() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
#elif defined(__APPLE__)
  return true;
#else
  return false;
#endif
}
}  // namespace hfq
#endif
