// AVX2 with dot products of bytes: the same products, with those of integers in a third of the instructions. What has no
// products of integers is AVX2's.
#pragma once

#include "portable.h"

#include "avx2_matmul.h"

namespace hfq {
namespace HFQ_AVX2 {

template <class C>
static bool multiply_by_f32(const Product& p) {
  const bool is_fixed = FixedPlanes<C, false>::serves(p) || FixedPlanes<C, true>::serves(p);
  return has_few_rows(p) && is_fixed ? Matmul<C>(p).run() : kAvx2.matmul(p);
}

static bool matmul(const Product& p) {
  if (p.compute == BY_INT8) return matmul_by_int8(p);
  switch (p.layout) {
    case PACKED2: return multiply_in_fixed_point<Packed2>(p) || multiply_by_f32<ByF32<Levels<Packed2>>>(p);
    case PACKED3: return multiply_in_fixed_point<Packed3>(p) || multiply_by_f32<ByF32<Levels<Packed3>>>(p);
    case PACKED4: return multiply_in_fixed_point<Packed4>(p) || multiply_by_f32<ByF32<Levels<Packed4>>>(p);
    case PACKED6:
    case BYTES_FLOAT: return kAvx2.matmul(p);
    default: return multiply_in_fixed_point<Bytes>(p) || multiply_by_f32<ByF32<Integers>>(p);
  }
}

}  // namespace HFQ_AVX2
}  // namespace hfq
