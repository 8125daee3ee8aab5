// Hadamard transforms of blocks of values: of rows of x, and of the keys and queries of a head (`rotate` of
// hf_quant.kernels.kv_attention, bit for bit).
#pragma once

#include <cmath>

#include "kernels.h"

namespace hfq {
namespace HFQ_SET {

// Sums and differences of the neighbours among n values, n a power of two, log2(n) times: x times the Hadamard matrix of
// n with entries 1 and -1. They are written apart, so that each pass finds as neighbours what is twice as far from each
// other as in the one before. Returns x or `other` [n], where the result is.
static inline const float* mix(float* x, float* other, int64_t n) {
  const int64_t half = n / 2;
  for (int64_t size = 1; size < n; size *= 2) {
    const float* __restrict in = x;
    float* __restrict out = other;
    for (int64_t i = 0; i < half; ++i) {
      out[i] = in[2 * i] + in[2 * i + 1];
      out[half + i] = in[2 * i] - in[2 * i + 1];
    }
    float* swapped = x;
    x = other;
    other = swapped;
  }
  return x;
}

// x [K] times the orthonormal Hadamard matrix of each block of `block` values, a power of two that divides K and is at most
// kMaxBlock.
static void rotate_blocks(float* x, int64_t K, int64_t block) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  float other[kMaxBlock];
  for (int64_t first = 0; first < K; first += block) {
    const float* mixed = mix(x + first, other, block);
    for (int64_t i = 0; i < block; ++i) x[first + i] = mixed[i] * factor;
  }
}

// Rotates the channels of a head x [D] in blocks of the largest power of two that divides D.
static void rotate(float* x, int64_t D) { rotate_blocks(x, D, D & -D); }

}  // namespace HFQ_SET
}  // namespace hfq
