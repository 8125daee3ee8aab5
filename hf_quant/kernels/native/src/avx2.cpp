// AVX2 with FMA (Haswell, Zen and later).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif

#define HFQ_AVX2 avx2
#define HFQ_SET avx2_portable
#define HFQ_VECTOR_BYTES 32
#include "set.h"

#include "avx2_matmul.h"

namespace hfq {
namespace avx2 {

static bool exact_in_bf16(const float* levels, int count) {
  for (int i = 0; i < count; ++i)
    if (float_to_bits(levels[i]) & 0xffff) return false;
  return true;
}

static bool streams_levels(const Product& p) {
  return has_few_rows(p) && FixedPlanes<ByF32<WideLevels>, false>::serves(p);
}

static bool matmul(const Product& p) {
  if (p.compute == BY_INT8) return matmul_by_int8(p);
  switch (p.layout) {
    case PACKED2: return multiply_in_fixed_point<Packed2>(p) || Matmul<ByF32<Levels<Packed2>>>(p).run();
    case PACKED3: return multiply_in_fixed_point<Packed3>(p) || Matmul<ByF32<Levels<Packed3>>>(p).run();
    case PACKED4:
      if (multiply_in_fixed_point<Packed4>(p)) return true;
      if (has_integers(p) || (exact_in_bf16(p.levels, 16) && !streams_levels(p))) return Matmul<ByF32<Levels<Packed4>>>(p).run();
      return Matmul<ByF32<WideLevels>>(p).run();
    case PACKED6: return Matmul<ByF32<ManyLevels<Packed6, 4>>>(p).run();
    case BYTES_FLOAT:
      return E4m3::has_levels(p.levels) ? Matmul<ByF32<E4m3>>(p).run() : Matmul<ByF32<ManyLevels<Bytes, 8>>>(p).run();
    default: return multiply_in_fixed_point<Bytes>(p) || Matmul<ByF32<Integers>>(p).run();
  }
}

static bool quantize_rows(const RowQuantization& q) {
  if (q.block != 0 || q.key != nullptr) return avx2_portable::quantize_rows(q);
  parallel_for(q.M, q.M * q.K < (1 << 16) ? 1 : q.threads, [&](int64_t i) {
    const char* x = static_cast<const char*>(q.x) + i * q.x_stride * element_size(q.x_dtype);
    q.scales[i] = quantize_row(x, q.x_dtype, q.K, q.input_scale, q.codes + i * q.K);
  });
  return true;
}

}  // namespace avx2

const Kernels kAvx2 = avx2_portable::kernels_of("avx2", false, true, avx2::matmul, avx2::quantize_rows, avx2_portable::attention);

}  // namespace hfq

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
