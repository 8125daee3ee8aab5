// Hadamard transforms of blocks of values: of rows of x, and of the keys and queries of a head (`rotate` of
// hf_quant.kernels.kv_attention, bit for bit).
#pragma once

#include <cmath>

#include "kernels.h"

namespace hfq {
namespace HFQ_SET {

// x [D] times the orthonormal Hadamard matrix of each block of channels, the largest power of two that divides D: sums and
// differences of neighbours, written apart, so that each pass finds as neighbours what is twice as far from each other as
// in the one before.
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

constexpr int kRotated = HFQ_VECTOR_BYTES / 4;  // values of a vector
typedef float Rotated __attribute__((vector_size(HFQ_VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(HFQ_VECTOR_BYTES)));

// Sums and differences of the values whose places differ in bit H.
template <int H>
static inline Rotated mix(Rotated a) {
  Places places{};
  Rotated signs{}, other{};
  for (int i = 0; i < kRotated; ++i) {
    places[i] = i ^ H;
    signs[i] = i & H ? -1.0f : 1.0f;
  }
#if defined(__clang__)
  for (int i = 0; i < kRotated; ++i) other[i] = a[i ^ H];
#else
  other = __builtin_shuffle(a, places);
#endif
  return a * signs + other;
}

// `out` [block], which may be `in`: in * diagonal times the orthonormal Hadamard matrix of `block`, a power of two: sums and
// differences of what is 1, 2, 4, ... places apart. VECTORS: those of the block, which stay in registers; 0: any number.
template <int VECTORS>
static inline void rotate_block(const float* in, const float* diagonal, int64_t block, float factor, float* out) {
  const int64_t count = VECTORS == 0 ? block / kRotated : VECTORS;
  Rotated fixed[VECTORS == 0 ? kMaxBlock / kRotated : VECTORS];
  for (int64_t i = 0; i < count; ++i) {
    Rotated value = *reinterpret_cast<const Rotated*>(in + i * kRotated);
    value = mix<2>(mix<1>(value * *reinterpret_cast<const Rotated*>(diagonal + i * kRotated)));
    if (kRotated > 4) value = mix<(kRotated > 4 ? 4 : 1)>(value);
    if (kRotated > 8) value = mix<(kRotated > 8 ? 8 : 1)>(value);
    fixed[i] = value;
  }
  for (int64_t size = 1; size < count; size *= 2)
    for (int64_t i = 0; i < count; ++i) {
      if (i & size) continue;
      const Rotated a = fixed[i], b = fixed[i + size];
      fixed[i] = a + b;
      fixed[i + size] = a - b;
    }
  for (int64_t i = 0; i < count; ++i) *reinterpret_cast<Rotated*>(out + i * kRotated) = fixed[i] * factor;
}

// x [K] * diagonal times the Hadamard matrix of each block of columns, a power of two that divides K.
static void rotate_blocks(float* x, const float* diagonal, int64_t K, int64_t block) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int64_t first = 0; first < K; first += block) {
    float* out = x + first;
    const float* factors = diagonal + first;
    if (block < kRotated) {
      for (int64_t i = 0; i < block; ++i) out[i] *= factors[i];
      for (int64_t size = 1; size < block; size *= 2)
        for (int64_t i = 0; i < block; ++i) {
          if (i & size) continue;
          const float a = out[i], b = out[i + size];
          out[i] = a + b;
          out[i + size] = a - b;
        }
      for (int64_t i = 0; i < block; ++i) out[i] *= factor;
    } else if (block == 4 * kRotated) {
      rotate_block<4>(out, factors, block, factor, out);
    } else if (block == 8 * kRotated) {
      rotate_block<8>(out, factors, block, factor, out);
    } else {
      rotate_block<0>(out, factors, block, factor, out);
    }
  }
}

}  // namespace HFQ_SET
}  // namespace hfq
