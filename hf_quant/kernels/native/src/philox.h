// The random bits of `random_bits` (hf_quant.kernels.rowwise): Philox4x32-7, eight values of 16 bits a counter.
#pragma once

#if HFQ_VECTOR_BYTES >= 32
#include <immintrin.h>
#endif

#include "types.h"

namespace hfq {
namespace HFQ_SET {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhilox[4] = {0xD2511F53u, 0xCD9E8D57u, 0x9E3779B9u, 0xBB67AE85u};
constexpr int64_t kDraws = HFQ_VECTOR_BYTES < 32 ? 8 : HFQ_VECTOR_BYTES;  // values that one call makes

// Bits of `row`, columns 8 * group to 8 * group + kDraws.
static inline void draw(const uint32_t* key, uint32_t row, uint32_t group, uint16_t* bits) {
#if HFQ_VECTOR_BYTES == 64
  // A word in the lower half of each 64 bits; what is in the upper one does not count. In this order unpacking leaves
  // the counters as they follow each other.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  __m512i w0 = _mm512_add_epi64(order, _mm512_set1_epi64(group)), w1 = _mm512_set1_epi64(row);
  __m512i w2 = _mm512_setzero_si512(), w3 = w2;
  const __m512i first = _mm512_set1_epi64(kPhilox[0]), second = _mm512_set1_epi64(kPhilox[1]);
  uint32_t k0 = key[0], k1 = key[1];
  for (int i = 0; i < kPhiloxRounds; ++i, k0 += kPhilox[2], k1 += kPhilox[3]) {
    const __m512i a = _mm512_mul_epu32(w0, first), b = _mm512_mul_epu32(w2, second);
    w0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b, 32), w1, _mm512_set1_epi64(k0), 0x96);
    w2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, 32), w3, _mm512_set1_epi64(k1), 0x96);
    w1 = b;
    w3 = a;
  }
  const __m512i low = _mm512_mask_blend_epi32(0xaaaa, w0, _mm512_slli_epi64(w1, 32));
  const __m512i high = _mm512_mask_blend_epi32(0xaaaa, w2, _mm512_slli_epi64(w3, 32));
  _mm512_storeu_si512(bits, _mm512_unpacklo_epi64(low, high));
  _mm512_storeu_si512(bits + 32, _mm512_unpackhi_epi64(low, high));
#elif HFQ_VECTOR_BYTES == 32
  const __m256i order = _mm256_setr_epi64x(0, 2, 1, 3);
  __m256i w0 = _mm256_add_epi64(order, _mm256_set1_epi64x(group)), w1 = _mm256_set1_epi64x(row);
  __m256i w2 = _mm256_setzero_si256(), w3 = w2;
  const __m256i first = _mm256_set1_epi64x(kPhilox[0]), second = _mm256_set1_epi64x(kPhilox[1]);
  uint32_t k0 = key[0], k1 = key[1];
  for (int i = 0; i < kPhiloxRounds; ++i, k0 += kPhilox[2], k1 += kPhilox[3]) {
    const __m256i a = _mm256_mul_epu32(w0, first), b = _mm256_mul_epu32(w2, second);
    w0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), w1), _mm256_set1_epi64x(k0));
    w2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), w3), _mm256_set1_epi64x(k1));
    w1 = b;
    w3 = a;
  }
  const __m256i low = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), 0xaa);
  const __m256i high = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), 0xaa);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits), _mm256_unpacklo_epi64(low, high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits + 16), _mm256_unpackhi_epi64(low, high));
#else
  uint32_t words[4] = {group, row, 0, 0}, k0 = key[0], k1 = key[1];
  for (int i = 0; i < kPhiloxRounds; ++i, k0 += kPhilox[2], k1 += kPhilox[3]) {
    const uint64_t a = static_cast<uint64_t>(words[0]) * kPhilox[0], b = static_cast<uint64_t>(words[2]) * kPhilox[1];
    words[0] = static_cast<uint32_t>(b >> 32) ^ words[1] ^ k0;
    words[1] = static_cast<uint32_t>(b);
    words[2] = static_cast<uint32_t>(a >> 32) ^ words[3] ^ k1;
    words[3] = static_cast<uint32_t>(a);
  }
  memcpy(bits, words, sizeof words);
#endif
}

// Bits of columns first..first + count of a row, `first` a multiple of 8, into a buffer that is filled up to a multiple
// of kDraws.
static inline void draw_row(const uint32_t* key, uint32_t row, int64_t first, int64_t count, uint16_t* bits) {
  for (int64_t i = 0; i < count; i += kDraws) draw(key, row, static_cast<uint32_t>((first + i) / 8), bits + i);
}

}  // namespace HFQ_SET
}  // namespace hfq
