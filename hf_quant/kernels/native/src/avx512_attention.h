// Panels of keys and values for `attention`, decoded in registers.
#pragma once

#include <type_traits>

#include "avx512_few_rows.h"

namespace hfq {
namespace HFQ_AVX512 {

using HFQ_SET::kTokens;

// Few rows meet codes in registers, more of them the portable panels.
template <class Few>
struct FewPanels : HFQ_SET::TokenPanels {
  static bool few(const Attention& a, int64_t rows) { return Few::fits(a, rows); }

  static void scores(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, const float* queries,
                     int64_t rows, float* scores) {
    Few few(a, a.k, b, h);
    few.load_factors(first, count);
    with_rows(rows, [&](auto n) { few.template scores<n>(first, count, queries, scores); });
  }

  static void add(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, const float* weights,
                  int64_t rows, float* out) {
    Few few(a, a.v, b, h);
    few.load_factors(first, count);
    with_rows(rows, [&](auto n) { few.template add<n>(first, count, weights, out); });
  }

 private:
  template <class Body>
  static void with_rows(int64_t rows, Body&& body) {
    switch (rows) {
      case 1: return body(std::integral_constant<int, 1>());
      case 2: return body(std::integral_constant<int, 2>());
      case 3: return body(std::integral_constant<int, 3>());
      default: return body(std::integral_constant<int, 4>());
    }
  }
};

// Packed codes of BITS bits by a table of levels, or signed bytes.
template <int BITS>
struct WordPanels : FewPanels<FewRows<BITS>> {
  static constexpr int PER = 32 / BITS;  // codes of a word: in one group, whose size is a multiple of 16

  // Words of 16 tokens at a time are transposed: lanes are tokens then.
  static void keys(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    const __m512 table = level_table<BITS>(a);
    const int64_t words = a.D / PER;
    for (int64_t part = 0; part < count; part += 16) {
      const uint8_t* rows[16];  // past the end the last one again, which nobody reads
      int64_t scales[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t t = first + min64(part + i, count - 1);
        rows[i] = a.k.row(b, h, t);
        scales[i] = a.k.scales_of(b, h, t);
      }
      int64_t group = -1;
      __m512 scale, offset;
      for (int64_t line = 0; line < words; line += 16) {
        const int64_t left = min64(words - line, 16);
        __m512i codes[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          codes[i] = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << left) - 1), rows[i] + line * 4);
        transpose(codes);
        for (int64_t w = 0; w < left; ++w) {
          const int64_t d = (line + w) * PER;
          if (d / a.group_size != group) {
            group = d / a.group_size;
            alignas(64) float scale_values[16], offset_values[16] = {};
            for (int i = 0; i < 16; ++i) {
              const int64_t at = scales[i] + group * a.k.scale_group;
              scale_values[i] = load_as_float(a.k.scale, a.k.scale_dtype, at);
              if (a.k.offset != nullptr) offset_values[i] = load_as_float(a.k.offset, a.k.scale_dtype, at);
            }
            scale = _mm512_load_ps(scale_values);
            offset = _mm512_load_ps(offset_values);
          }
#pragma GCC unroll 16
          for (int j = 0; j < PER; ++j)
            _mm512_storeu_ps(panel + (d + j) * kTokens + part, _mm512_fmadd_ps(level(codes[w], j, table), scale, offset));
        }
      }
    }
  }

  static void values(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    const __m512 table = level_table<BITS>(a);
    for (int64_t t = first; t < first + count; ++t) {
      const uint8_t* from = a.v.row(b, h, t);
      for (int64_t g = 0; g < a.groups; ++g) {
        const int64_t at = a.v.scales_of(b, h, t) + g * a.v.scale_group;
        const __m512 scale = _mm512_set1_ps(load_as_float(a.v.scale, a.v.scale_dtype, at));
        const __m512 offset =
            a.v.offset == nullptr ? _mm512_setzero_ps() : _mm512_set1_ps(load_as_float(a.v.offset, a.v.scale_dtype, at));
        for (int64_t d = 0; d < a.group_size; d += 16, from += 2 * BITS, panel += 16)
          _mm512_storeu_ps(panel, _mm512_fmadd_ps(sixteen(from, table), scale, offset));
      }
    }
  }

 private:
  HFQ_INLINE __m512 level(__m512i word, int j, __m512 table) {
    if constexpr (BITS == 8) return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(word, 24 - 8 * j), 24));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(word, BITS * j), table);
  }

  // 16 codes in their order.
  HFQ_INLINE __m512 sixteen(const uint8_t* from, __m512 table) {
    if constexpr (BITS == 8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
    if constexpr (BITS == 4) {
      const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)from));
      return _mm512_permutexvar_ps(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)), table);
    }
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(load<int32_t>(from, 0)), shifts), table);
  }
};

// Keys that are no codes: 16 channels of 16 tokens at a time are transposed.
struct ValuePanels : HFQ_SET::ValuePanels {
  static void keys(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    for (int64_t part = 0; part < count; part += 16) {
      for (int64_t d = 0; d < a.D; d += 16) {
        __m512i values[16];
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i)  // past the end the last one again, which nobody reads
          values[i] = _mm512_castps_si512(load_x(a.k.row(b, h, first + min64(part + i, count - 1)), a.q_dtype, d, 16));
        transpose(values);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (d + i) * kTokens + part, values[i]);
      }
    }
  }
};

// Sums of the products of a pair of bf16 with those of a row. As assembly, like `ByBf16`.
struct PairProducts {
  static constexpr int PER = 2;
  HFQ_INLINE void add(float left, HFQ_SET::Lanes row, HFQ_SET::Lanes& sum) {
    const __m512 pair = _mm512_set1_ps(left);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pair), "v"(row));
  }
};

// Keys and values in bf16, which the CPU multiplies: panels of pairs, of channels of a key, and of tokens.
struct PairPanels : HFQ_SET::ValuePanels {
  using Dot = PairProducts;

  static void keys(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    for (int64_t part = 0; part < count; part += 16) {
      for (int64_t line = 0; line < a.D / 2; line += 16) {
        const int64_t left = min64(a.D / 2 - line, 16);
        __m512i pairs[16];
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i)  // past the end the last one again, which nobody reads
          pairs[i] = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << left) - 1),
                                              a.k.row(b, h, first + min64(part + i, count - 1)) + line * 4);
        transpose(pairs);
        for (int64_t i = 0; i < left; ++i) _mm512_storeu_si512(panel + (line + i) * kTokens + part, pairs[i]);
      }
    }
  }

  static void values(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    for (int64_t t = 0; t < count; t += 2) {
      const uint8_t *row = a.v.row(b, h, first + t), *next = t + 1 < count ? a.v.row(b, h, first + t + 1) : nullptr;
      for (int64_t d = 0; d < a.D; d += 16, panel += 16) {
        __m512i pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(row + 2 * d)));
        if (next != nullptr) {
          const __m512i more = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(next + 2 * d)));
          pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(more, 16));
        }
        _mm512_storeu_si512(panel, pairs);
      }
    }
  }
};

static bool is_e4m3(const Attention& a) {
  bool is_same = true;
  for (int i = 0; i < 127; ++i) is_same = is_same && a.levels[i] == e4m3_to_float(static_cast<uint8_t>(i));
  return is_same;
}

static bool attention(const Attention& a) {
  switch (a.layout) {
    case VALUES:
#if HFQ_VBMI
      if (a.by_bf16 && a.q_dtype == BF16 && maker_of_cpu() != INTEL) return HFQ_SET::AttentionTasks<PairPanels>(a).run();
#endif
      return HFQ_SET::AttentionTasks<ValuePanels>(a).run();
    case PACKED2: return HFQ_SET::AttentionTasks<WordPanels<2>>(a).run();
    case PACKED4: return HFQ_SET::AttentionTasks<WordPanels<4>>(a).run();
    case BYTES_INT: return HFQ_SET::AttentionTasks<WordPanels<8>>(a).run();
    case BYTES_FLOAT:
      if (a.part == WHOLE && is_e4m3(a)) return HFQ_SET::AttentionTasks<FewPanels<FewRows<8, true>>>(a).run();
      return HFQ_SET::attention(a);
    default: return HFQ_SET::attention(a);
  }
}

}  // namespace HFQ_AVX512
}  // namespace hfq
