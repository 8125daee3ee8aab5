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
#include "adam.h"
#include "append.h"
#include "attention.h"
#include "fake.h"
#include "mixture.h"
#include "recurrent.h"
#include "steps.h"
#include "two_way.h"

namespace hfq {
const Kernels kNeon = {"neon", false, false, neon::matmul, neon::dequantize, neon::quantize_rows,
                       neon::attention, neon::quantize, neon::append, neon::adam_step,
                         neon::fake_quantize, neon::quantize_two_way, neon::scale_sums,
                         neon::requantize_rows, neon::norm_rows, neon::turn_rows, neon::gate_rows, neon::add_rows,
                         neon::small_product, neon::combine_rows, neon::convolve_rows, neon::delta_rows,
                         neon::scan_rows};
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
