// Hadamard transforms of blocks of values: of rows of x, and of the keys and queries of a head (`rotate` of
// hf_quant.kernels.kv_attention, bit for bit).
#pragma once

#include <cmath>

#include "kernels.h"

namespace hfq {
namespace HFQ_SET {

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

// x [block] times the orthonormal Hadamard matrix of `block`, a power of two: sums and differences of what is 1, 2, 4, ...
// places apart. SCALED: of x * diagonal. VECTORS: those of the block, which stay in registers; 0: any number.
template <int VECTORS, bool SCALED>
static inline void rotate_block(float* x, const float* diagonal, int64_t block, float factor) {
  const int64_t count = VECTORS == 0 ? block / kRotated : VECTORS;
  Rotated fixed[VECTORS == 0 ? kMaxBlock / kRotated : VECTORS];
  for (int64_t i = 0; i < count; ++i) {
    Rotated value = *reinterpret_cast<const Rotated*>(x + i * kRotated);
    if (SCALED) value *= *reinterpret_cast<const Rotated*>(diagonal + i * kRotated);
    value = mix<2>(mix<1>(value));
    if (kRotated > 4) value = mix<(kRotated > 4 ? 4 : 1)>(value);
    if (kRotated > 8) value = mix<(kRotated > 8 ? 8 : 1)>(value);
    fixed[i] = value;
  }
  int64_t size = 1;
  for (; VECTORS == 0 && size * 2 < count; size *= 4)  // in memory: two steps at once
    for (int64_t first = 0; first < count; first += 4 * size)
      for (int64_t i = first; i < first + size; ++i) {
        const Rotated a = fixed[i], b = fixed[i + size], c = fixed[i + 2 * size], d = fixed[i + 3 * size];
        const Rotated sums[2] = {a + b, c + d}, differences[2] = {a - b, c - d};
        fixed[i] = sums[0] + sums[1];
        fixed[i + size] = differences[0] + differences[1];
        fixed[i + 2 * size] = sums[0] - sums[1];
        fixed[i + 3 * size] = differences[0] - differences[1];
      }
  for (; size < count; size *= 2)
    for (int64_t i = 0; i < count; ++i) {
      if (i & size) continue;
      const Rotated a = fixed[i], b = fixed[i + size];
      fixed[i] = a + b;
      fixed[i + size] = a - b;
    }
  for (int64_t i = 0; i < count; ++i) *reinterpret_cast<Rotated*>(x + i * kRotated) = fixed[i] * factor;
}

// `rotate_block` of each block of x [K].
template <bool SCALED>
static void rotate_each(float* x, const float* diagonal, int64_t K, int64_t block) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int64_t first = 0; first < K; first += block) {
    float* out = x + first;
    const float* factors = SCALED ? diagonal + first : nullptr;
    if (block < kRotated) {
      for (int64_t i = 0; SCALED && i < block; ++i) out[i] *= factors[i];
      for (int64_t size = 1; size < block; size *= 2)
        for (int64_t i = 0; i < block; ++i) {
          if (i & size) continue;
          const float a = out[i], b = out[i + size];
          out[i] = a + b;
          out[i + size] = a - b;
        }
      for (int64_t i = 0; i < block; ++i) out[i] *= factor;
    } else if (block == 4 * kRotated) {
      rotate_block<4, SCALED>(out, factors, block, factor);
    } else if (block == 8 * kRotated) {
      rotate_block<8, SCALED>(out, factors, block, factor);
    } else {
      rotate_block<0, SCALED>(out, factors, block, factor);
    }
  }
}

// x [K] * diagonal times the Hadamard matrix of each block of columns, a power of two that divides K.
static void rotate_blocks(float* x, const float* diagonal, int64_t K, int64_t block) {
  rotate_each<true>(x, diagonal, K, block);
}

// The inverse of `rotate_blocks`.
static void rotate_back(float* x, const float* diagonal, int64_t K, int64_t block) {
  rotate_each<false>(x, nullptr, K, block);
  for (int64_t i = 0; i < K; ++i) x[i] *= diagonal[i];
}

// x [D] times the Hadamard matrix of each block of channels, the largest power of two that divides D.
static void rotate(float* x, int64_t D) { rotate_each<false>(x, nullptr, D, D & -D); }

}  // namespace HFQ_SET
}  // namespace hfq
