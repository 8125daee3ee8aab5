// Which instruction sets this CPU has.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hfq {

#if defined(__x86_64__)
// AVX2's kernels with products by dot products of bytes.
static const Kernels* avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_vex = __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
  const bool has_evex = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  static Kernels kernels;
  kernels = kAvx2;
  kernels.name = "avx_vnni";
  kernels.matmul = has_vex && kAvxVnniMatmul != nullptr ? kAvxVnniMatmul : has_evex ? kAvxVnniEvexMatmul : nullptr;
  return kernels.matmul == nullptr ? nullptr : &kernels;
}
#endif

int find_kernels(const Kernels* (&found)[kMostSets], bool* has_bf16) {
  int count = 0;
  *has_bf16 = false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni")) {
      if (const Kernels* kernels = amx_kernels()) found[count++] = kernels;
      found[count++] = &kAvx512;
      *has_bf16 = __builtin_cpu_supports("avx512bf16");
    }
    found[count++] = &kAvx512Vnni;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("bmi2")) {
    if (const Kernels* kernels = avx_vnni()) found[count++] = kernels;
    found[count++] = &kAvx2;
  }
#elif defined(__aarch64__)
  if (has_dot_products()) found[count++] = &kNeon;
#endif
  found[count++] = &kPortable;
  return count;
}

}  // namespace hfq
