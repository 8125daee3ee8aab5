// Keys and queries of a head, rotated: `rotate` of hf_quant.kernels.kv_attention, bit for bit.
#pragma once

#include <cmath>

#include "kernels.h"

namespace hfq {
namespace HFQ_SET {

// x [D], D at most kMaxHeadDim, times the orthonormal Hadamard matrix of each block of channels, the largest power of two
// that divides D: sums and differences of neighbours, written apart, so that each pass finds as neighbours what is twice
// as far from each other as in the one before.
static void rotate(float* x, int64_t D) {
  const int64_t block = D & -D, half = block / 2;
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  float other[kMaxHeadDim];
  float *from = x, *to = other;
  for (int64_t size = 1; size < block; size *= 2) {
    for (int64_t first = 0; first < D; first += block) {
      const float* __restrict in = from + first;
      float* __restrict out = to + first;
      for (int64_t i = 0; i < half; ++i) {
        out[i] = in[2 * i] + in[2 * i + 1];
        out[half + i] = in[2 * i] - in[2 * i + 1];
      }
    }
    float* swapped = from;
    from = to;
    to = swapped;
  }
  for (int64_t d = 0; d < D; ++d) x[d] = from[d] * factor;
}

}  // namespace HFQ_SET
}  // namespace hfq
