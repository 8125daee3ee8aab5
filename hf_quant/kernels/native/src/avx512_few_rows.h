// Up to 4 rows of queries meet keys and values in registers: no panel is written, and each code is read once.
//
// Lines of codes are decoded to vectors of 16 levels. Of 8 bits a line is 16 codes, one vector in their order; else it is
// 16 words, and vector j holds code j of each word: queries are brought into that order, results back from it.
#pragma once

#include "attention.h"
#include "avx512_panel.h"

namespace hfq {
namespace HFQ_AVX512 {

using HFQ_SET::kFewTokens;

// By the low 4 bits of an index: levels of 2 bits are repeated. Codes of 8 bits need none.
template <int BITS>
HFQ_INLINE __m512 level_table(const Attention& a) {
  alignas(64) float values[16] = {};
  for (int i = 0; BITS < 8 && i < 16; ++i) values[i] = a.levels[i % (1 << BITS)];
  return _mm512_load_ps(values);
}

// 16 codes of e4m3 as fp32, each 256 times too small: fp16 has the same digits at the same distance from the sign, but for one
// more of the exponent, which counts 8 more for the same number.
HFQ_INLINE __m512 e4m3_levels(const uint8_t* from) {
  const __m256i codes = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 8);
  const __m256i digits = _mm256_set1_epi16(0x7f00);
  const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(codes, digits), digits);
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return _mm512_cvtph_ps(_mm256_mask_mov_epi16(halves, is_nan, digits));
}

// FLOAT: codes of 8 bits are e4m3, and no integers.
template <int BITS, bool FLOAT = false>
struct FewRows {
  static constexpr int PER = 32 / BITS;  // codes of a word
  static constexpr int VECS = BITS == 8 ? 1 : PER, LINE_CODES = 16 * VECS, LINE_BYTES = 2 * BITS * VECS;
  static constexpr int64_t kAhead = 16, MAX_ROWS = 4, MAX_LINES = kMaxHeadDim / LINE_CODES;

  static bool fits(const Attention& a, int64_t rows) {
    return rows <= MAX_ROWS && (a.groups == 1 || (BITS < 8 && a.groups <= 16));
  }

  FewRows(const Attention& a, const Cache& cache, int64_t b, int64_t h)
      : a_(a), cache_(cache), lines_(ceil_div(a.D, LINE_CODES)) {
    codes_ = cache.row(b, h, 0);
    scales_ = cache.scales_of(b, h, 0);
    table_ = level_table<BITS>(a);
    memset(group_, 0, static_cast<size_t>(lines_) * sizeof(group_[0]));
    for (int64_t line = 0; line < lines_ && a.groups > 1; ++line)
      for (int w = 0; w < 16; ++w)
        group_[line][w] = static_cast<int32_t>(min64(code(line, 0, w) / a.group_size, a.groups - 1));
  }

  // Scales and offsets of tokens first..first + count as fp32 [count, groups]: looked up in the loops, they would have GCC
  // keep sums in memory.
  void load_factors(int64_t first, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t at = scales_ + (first + t) * cache_.scale_token;
      load_groups(cache_.scale, at, scale_ + t * a_.groups);
      if (FLOAT) scale_[t] *= 256.0f;  // of one group: see `fits`
      load_groups(cache_.offset, at, offset_ + t * a_.groups);
    }
  }

  // scores [ROWS, kFewTokens] of tokens first..first + count
  template <int ROWS>
  void scores(int64_t first, int64_t count, const float* queries, float* scores) const {
    alignas(64) float q[MAX_LINES * VECS][ROWS][16], sums[MAX_LINES][ROWS][16];
    for (int64_t line = 0; line < lines_; ++line) {
      for (int r = 0; r < ROWS; ++r) {
        for (int w = 0; w < 16; ++w) {
          sums[line][r][w] = 0.0f;
          for (int j = 0; j < VECS; ++j) {
            const int64_t d = code(line, j, w);
            sums[line][r][w] += q[line * VECS + j][r][w] = d < a_.D ? queries[r * a_.D + d] : 0.0f;
          }
        }
      }
    }
    for (int64_t t = 0; t < count; t += 16) {
      __m512i total[ROWS][16];
      for (int i = 0; i < 16; ++i) {
        const int64_t at = min64(t + i, count - 1), token = first + at;
        const __m512 scale = _mm512_loadu_ps(scale_ + at * a_.groups);
        ahead(token);
        __m512 sum[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) sum[r] = _mm512_setzero_ps();
        for (int64_t line = 0; line < lines_; ++line) {
          __m512 part[ROWS];
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) part[r] = BITS == 8 ? sum[r] : _mm512_setzero_ps();
          const __m512i words = load_line(token, line);
#pragma GCC unroll 16
          for (int j = 0; j < VECS; ++j) {
            const __m512 level = level_of(words, j);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
              part[r] = _mm512_fmadd_ps(level, _mm512_load_ps(q[line * VECS + j][r]), part[r]);
          }
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r)
            sum[r] = BITS == 8 ? part[r] : _mm512_fmadd_ps(part[r], spread(scale, line), sum[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
          if (BITS == 8) sum[r] = _mm512_mul_ps(sum[r], spread(scale, 0));
        if (cache_.offset != nullptr) {
          const __m512 offset = _mm512_loadu_ps(offset_ + at * a_.groups);
          for (int64_t line = 0; line < lines_; ++line) {
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
              sum[r] = _mm512_fmadd_ps(spread(offset, line), _mm512_load_ps(sums[line][r]), sum[r]);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) total[r][i] = _mm512_castps_si512(sum[r]);
      }
      for (int r = 0; r < ROWS; ++r) {
        transpose(total[r]);
        __m512 sum = as_float(total[r][0]);
        for (int i = 1; i < 16; ++i) sum = _mm512_add_ps(sum, as_float(total[r][i]));
        _mm512_storeu_ps(scores + r * kFewTokens + t, sum);
      }
    }
  }

  // out [ROWS, D] += weights [ROWS, kFewTokens] of the tokens @ values
  template <int ROWS>
  void add(int64_t first, int64_t count, const float* weights, float* out) const {
    constexpr int WIDTH = ROWS <= 2 ? 8 : 4;  // vectors at a time: their sums stay in registers
    if constexpr (BITS == 8) {
      int64_t line = 0;
      for (; line + WIDTH <= lines_; line += WIDTH) add_vectors<ROWS, WIDTH>(first, count, line, 0, weights, out);
      for (; line < lines_; ++line) add_vectors<ROWS, 1>(first, count, line, 0, weights, out);
    } else {
      for (int64_t line = 0; line < lines_; ++line)
        for (int j = 0; j < VECS; j += WIDTH) add_vectors<ROWS, WIDTH>(first, count, line, j, weights, out);
    }
  }

 private:
  // With room for 16 floats; zeros if there are none.
  void load_groups(const void* from, int64_t at, float* to) const {
    if (from == nullptr || cache_.scale_group == 1) {
      const __m512 zeros = _mm512_setzero_ps();
      _mm512_storeu_ps(to, from == nullptr ? zeros : load_scales(from, cache_.scale_dtype, at, a_.groups));
      return;
    }
    for (int64_t g = 0; g < a_.groups; ++g) to[g] = load_as_float(from, cache_.scale_dtype, at + g * cache_.scale_group);
  }

  static int64_t code(int64_t line, int j, int w) { return line * LINE_CODES + w * VECS + j; }

  // Factors of groups -> of the codes of a line, before whose order lanes are.
  HFQ_METHOD __m512 spread(__m512 factors, int64_t line) const {
    return _mm512_permutexvar_ps(_mm512_load_si512(group_[line]), factors);
  }

  // What comes some tokens later: there is too much work per token for the CPU to look that far ahead by itself.
  HFQ_METHOD void ahead(int64_t token) const {
    const uint8_t* from = codes_ + (token + kAhead) * cache_.code_token;
    for (int64_t at = 0; at < a_.D * BITS / 8; at += 64) __builtin_prefetch(from + at);
  }

  HFQ_METHOD __m512i load_line(int64_t token, int64_t line) const {
    const uint8_t* from = codes_ + token * cache_.code_token + line * LINE_BYTES;
    if constexpr (FLOAT) return _mm512_castps_si512(e4m3_levels(from));
    if constexpr (BITS == 8) return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const int64_t words = min64((a_.D - line * LINE_CODES) / PER, 16);
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << words) - 1), from);
  }
  HFQ_METHOD __m512 level_of(__m512i words, int j) const {
    if constexpr (FLOAT) return as_float(words);
    if constexpr (BITS == 8) return _mm512_cvtepi32_ps(words);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, BITS * j), table_);
  }

  // COUNT vectors: of 8 bits those of as many lines, else vectors j.. of a line.
  template <int ROWS, int COUNT>
  void add_vectors(int64_t first, int64_t count, int64_t line, int j, const float* weights, float* out) const {
    __m512 sums[ROWS][COUNT], offsets[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      offsets[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int i = 0; i < COUNT; ++i) sums[r][i] = _mm512_setzero_ps();
    }
    const __m128i shift = _mm_cvtsi32_si128(BITS * j);
    for (int64_t t = 0; t < count; ++t) {
      const __m512 scale = spread(_mm512_loadu_ps(scale_ + t * a_.groups), line);
      if (line == 0 && j == 0) ahead(first + t);
      const __m512 offset = spread(_mm512_loadu_ps(offset_ + t * a_.groups), line);
      __m512 weight[ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const __m512 plain = _mm512_set1_ps(weights[r * kFewTokens + t]);
        offsets[r] = _mm512_fmadd_ps(plain, offset, offsets[r]);
        weight[r] = _mm512_mul_ps(plain, scale);
      }
      __m512i words = load_line(first + t, line);
      if (BITS < 8) words = _mm512_srl_epi32(words, shift);
#pragma GCC unroll 8
      for (int i = 0; i < COUNT; ++i) {
        const __m512 level = BITS == 8 ? level_of(load_line(first + t, line + i), 0) : level_of(words, i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) sums[r][i] = _mm512_fmadd_ps(weight[r], level, sums[r][i]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < COUNT; ++i) {
        alignas(64) float values[16];
        _mm512_store_ps(values, _mm512_add_ps(sums[r][i], offsets[r]));
        for (int w = 0; w < 16; ++w) {
          const int64_t d = BITS == 8 ? code(line + i, 0, w) : code(line, j + i, w);
          if (d < a_.D) out[r * a_.D + d] += values[w];
        }
      }
    }
  }

  const Attention& a_;
  const Cache& cache_;
  const int64_t lines_;
  const uint8_t* codes_;
  int64_t scales_;
  __m512 table_;
  alignas(64) int32_t group_[MAX_LINES][16];
  float scale_[kFewTokens * 16 + 16], offset_[kFewTokens * 16 + 16];
};

}  // namespace HFQ_AVX512
}  // namespace hfq
