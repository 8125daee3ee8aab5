// Rows of x to int8 codes.
#pragma once

#include "avx2_math.h"

namespace hfq {
namespace HFQ_AVX2 {

// Of 8 elements that are ordered as unsigned integers of 16 or 32 bits are.
HFQ_INLINE uint32_t largest(__m256i v) {
  __m128i top = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4E));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(top, _mm_shuffle_epi32(top, 0xB1))));
}

// The largest magnitude of a row; NaN if there is one. Magnitudes of one dtype are ordered as their bits are.
static float row_amax(const void* x, int dtype, int64_t K) {
  __m256i amax = _mm256_setzero_si256();
  int64_t k = 0;
  if (dtype == F32) {
    const float* values = static_cast<const float*>(x);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (; k + 8 <= K; k += 8) amax = _mm256_max_epu32(amax, _mm256_and_si256(magnitude, load_vector(values + k)));
    uint32_t top = largest(amax);
    for (; k < K; ++k) {
      const uint32_t bits = float_to_bits(load<float>(x, k)) & 0x7fffffffu;
      top = bits > top ? bits : top;
    }
    return bits_to_float(top);
  }
  const uint16_t* values = static_cast<const uint16_t*>(x);
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  for (; k + 16 <= K; k += 16) amax = _mm256_max_epu16(amax, _mm256_and_si256(magnitude, load_vector(values + k)));
  uint32_t top = largest(_mm256_max_epu32(_mm256_and_si256(amax, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(amax, 16)));
  for (; k < K; ++k) {
    const uint32_t bits = load<uint16_t>(x, k) & 0x7fffu;
    top = bits > top ? bits : top;
  }
  return dtype == BF16 ? bf16_to_float(static_cast<uint16_t>(top)) : f16_to_float(static_cast<uint16_t>(top));
}

// Values divided by one scale, to the bit, as in `avx512::Divisor`.
struct Divisor {
  __m256 scale, reciprocal;
  bool is_safe;

  // `amax`: the largest magnitude that is divided.
  HFQ_METHOD Divisor(float of, float amax)
      : scale(_mm256_set1_ps(of)), reciprocal(_mm256_set1_ps(1.0f / of)),
        is_safe(of > 1e-30f && of < 1e30f && amax < 1e30f && amax / of < 1e30f) {}
  HFQ_METHOD __m256 divide(__m256 value) const {
    if (!is_safe) return _mm256_div_ps(value, scale);
    const __m256 q = _mm256_mul_ps(value, reciprocal);
    return _mm256_fmadd_ps(_mm256_fnmadd_ps(q, scale, value), reciprocal, q);
  }
};

// 32 values from `first` on -> int8 codes, clamped to +-127 and rounded half to even.
template <int DTYPE>
HFQ_INLINE __m256i int8_codes(const void* x, int64_t first, const Divisor& divisor) {
  const __m256 most = _mm256_set1_ps(127.0f), least = _mm256_set1_ps(-127.0f);
  __m256i codes[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 q = divisor.divide(load_floats(x, DTYPE, first + 8 * i));
    codes[i] = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(q, most), least));
  }
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));  // packed within 128 bits
}

template <int DTYPE>
static void int8_row(const void* x, int64_t K, const Divisor& divisor, int8_t* codes) {
  int64_t k = 0;
  for (; k + 32 <= K; k += 32)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + k), int8_codes<DTYPE>(x, k, divisor));
  if (k == K) return;
  float last[32] = {};
  load_floats(x, DTYPE, k, K - k, last);
  const __m256i bytes = int8_codes<F32>(last, 0, divisor);
  memcpy(codes + k, &bytes, static_cast<size_t>(K - k));
}

// Codes of one row, and its scale, which may be given: as in portable.h, in less time.
static float quantize_row(const void* x, int dtype, int64_t K, const float* given, int8_t* codes) {
  const float amax = row_amax(x, dtype, K), scale = int8_row_scale(amax, given);
  const Divisor divisor(scale, amax);
  switch (dtype) {
    case F32: int8_row<F32>(x, K, divisor, codes); break;
    case BF16: int8_row<BF16>(x, K, divisor, codes); break;
    default: int8_row<F16>(x, K, divisor, codes);
  }
  return scale;
}

// A row of x [groups * size] in fixed point of so many bits, in the order of the codes of L. Of each group the sum, times
// `factor`, and the value of 1, times `unit`, both `apart`.
template <class L>
static void fixed_row(const float* values, int64_t groups, int64_t size, int bits, int32_t factor, float unit, char* to,
                      int32_t* sums, float* steps, int64_t apart) {
  alignas(32) uint8_t codes[32];
  for (int b = 0; b < 32; ++b) codes[b] = static_cast<uint8_t>(L::code(b % 16));
  const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes)), low = _mm256_set1_epi16(255);
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int64_t g = 0; g < groups; ++g, values += size, sums += apart, steps += apart) {
    __m256i tops = _mm256_setzero_si256(), sum = tops;
    for (int64_t k = 0; k < size; k += 8) tops = _mm256_max_epu32(tops, _mm256_and_si256(magnitude, load_vector(values + k)));
    const FixedPoint fixed(largest(tops), bits);
    const __m256 inverse = _mm256_set1_ps(fixed.inverse);
    float kept[kMostFixed];
    if (!fixed.is_finite) keep_infinite(values, size, kept);
    const float* scaled = fixed.is_finite ? values : kept;
    for (int64_t k = 0; k < size; k += kUnit, to += 2 * kUnit) {
      __m256i words[2];  // saturated: rounding may exceed them by 1
      for (int half = 0; half < 2; ++half) {
        const float* from = scaled + k + 16 * half;
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), inverse));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8), inverse));
        words[half] = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words[half], _mm256_set1_epi16(1)));
      }
      auto sorted = [&](__m256i a, __m256i b) {
        return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8), order);
      };
      const __m256i lower = sorted(_mm256_and_si256(words[0], low), _mm256_and_si256(words[1], low));
      const __m256i upper = sorted(_mm256_srli_epi16(words[0], 8), _mm256_srli_epi16(words[1], 8));
      const __m256i packed[2] = {_mm256_or_si256(_mm256_and_si256(lower, low), _mm256_slli_epi16(upper, 8)),
                                 _mm256_or_si256(_mm256_srli_epi16(lower, 8), _mm256_andnot_si256(low, upper))};
      memcpy(to, packed, sizeof packed);
    }
    *sums = factor * reduce(sum);
    *steps = unit * fixed.step;
  }
}

}  // namespace HFQ_AVX2
}  // namespace hfq
