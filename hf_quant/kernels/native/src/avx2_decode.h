// Codes -> vectors in registers, 32 codes of a row (a unit) at a time. The order of K inside a dot product is free, so
// codes stay where shifts put them, and x is brought into the same order once per call.
//
// A loader brings the codes of a unit into the bytes of a vector, those of its first 16 into the lower 128 bits: group
// sizes are multiples of 16, so that each half has one scale. Zero points are taken from the codes, not from the sums:
// what is exactly zero stays so.
#pragma once

#include <immintrin.h>

#include "types.h"

namespace hfq {
namespace HFQ_AVX2 {

#define HFQ_INLINE static inline __attribute__((always_inline))
#define HFQ_METHOD inline __attribute__((always_inline))
#define HFQ_LAMBDA __attribute__((always_inline))

constexpr int kUnit = 32;

// Loaders: BYTES of a unit in memory; byte b of either half gets its code `code(b)`. Those whose
// codes are integers also bring PLANES units at a time into as many vectors, in fewer instructions: byte b of vector s
// gets code PLANES * b + s.

// A value for each half.
HFQ_INLINE __m256i in_halves(__m256i first, __m256i second) { return _mm256_blend_epi32(first, second, 0xF0); }

struct Packed4 {
  static constexpr int BYTES = 16;
  static constexpr int code(int b) { return b < 8 ? 2 * b : 2 * b - 15; }

  HFQ_INLINE __m256i load(const uint8_t* p) {
    const __m256i first = _mm256_set1_epi64x(hfq::load<int64_t>(p, 0));
    const __m256i twice = in_halves(first, _mm256_set1_epi64x(hfq::load<int64_t>(p, 1)));
    return _mm256_and_si256(_mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 4, 0, 4)), _mm256_set1_epi8(15));
  }

  static constexpr int PLANES = 2;
  HFQ_INLINE void planes(const uint8_t* p, __m256i* to) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), low = _mm256_set1_epi8(15);
    to[0] = _mm256_and_si256(codes, low);
    to[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
  }
};

struct Packed2 {
  static constexpr int BYTES = 8;
  static constexpr int code(int b) { return 4 * (b % 4) + b / 4; }

  HFQ_INLINE __m256i load(const uint8_t* p) {
    const __m256i first = _mm256_set1_epi32(hfq::load<int32_t>(p, 0));
    const __m256i spread = in_halves(first, _mm256_set1_epi32(hfq::load<int32_t>(p, 1)));
    return _mm256_and_si256(_mm256_srlv_epi32(spread, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)), _mm256_set1_epi8(3));
  }

  static constexpr int PLANES = 4;
  HFQ_INLINE void planes(const uint8_t* p, __m256i* to) {
    split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), to);
  }
  HFQ_INLINE void split(__m256i codes, __m256i* to) {
    const __m256i low = _mm256_set1_epi8(3);
    to[0] = _mm256_and_si256(codes, low);
    to[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 2), low);
    to[2] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
    to[3] = _mm256_and_si256(_mm256_srli_epi16(codes, 6), low);
  }
};

// 8 bytes with the low two bits and 4 bytes with the third.
struct Packed3 {
  static constexpr int BYTES = 12;
  static constexpr int code(int b) { return Packed2::code(b); }

  HFQ_INLINE __m256i load(const uint8_t* p) {
    const __m256i from = _mm256_setr_epi32(0x01010000, 0x01010000, 0x01010000, 0x01010000,  //
                                           0x03030202, 0x03030202, 0x03030202, 0x03030202);
    const __m256i bit = _mm256_setr_epi32(0x10011001, 0x20022002, 0x40044004, static_cast<int>(0x80088008),  //
                                          0x10011001, 0x20022002, 0x40044004, static_cast<int>(0x80088008));
    const __m256i third = _mm256_shuffle_epi8(_mm256_set1_epi32(hfq::load<int32_t>(p + 8, 0)), from);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(third, bit), bit);
    return _mm256_or_si256(Packed2::load(p), _mm256_and_si256(set, _mm256_set1_epi8(4)));
  }

  static constexpr int PLANES = 4;
  HFQ_INLINE void planes(const uint8_t* p, __m256i* to) {
    auto word = [p](int unit) HFQ_LAMBDA { return hfq::load<int64_t>(p + unit * BYTES, 0); };
    auto thirds = [p](int unit) HFQ_LAMBDA { return hfq::load<int32_t>(p + unit * BYTES + 8, 0); };
    Packed2::split(_mm256_setr_epi64x(word(0), word(1), word(2), word(3)), to);
    // The third bits of the four codes of a byte, as a byte.
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_setr_epi32(thirds(0), thirds(1), thirds(2), thirds(3)));
    const __m256i bits = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15));
    const __m256i third = _mm256_set1_epi8(4);
    to[0] = _mm256_or_si256(to[0], _mm256_and_si256(_mm256_slli_epi16(bits, 2), third));
    to[1] = _mm256_or_si256(to[1], _mm256_and_si256(_mm256_slli_epi16(bits, 1), third));
    to[2] = _mm256_or_si256(to[2], _mm256_and_si256(bits, third));
    to[3] = _mm256_or_si256(to[3], _mm256_and_si256(_mm256_srli_epi16(bits, 1), third));
  }
};

// 16 bytes with the low four bits and 8 bytes with the other two.
struct Packed6 {
  static constexpr int BYTES = 24;
  static constexpr int code(int b) { return Packed4::code(b); }

  HFQ_INLINE __m256i load(const uint8_t* p) {
    const __m256i from = _mm256_setr_epi32(0x01010000, 0x03030202, 0x01010000, 0x03030202,  //
                                           0x05050404, 0x07070606, 0x05050404, 0x07070606);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(hfq::load<int64_t>(p + 16, 0)), from);
    const __m256i top = _mm256_srlv_epi64(spread, _mm256_setr_epi64x(0, 2, 0, 2));  // even bytes: bits 0, 1; odd: 4, 5
    const __m256i placed = _mm256_blendv_epi8(_mm256_slli_epi16(top, 4), top, _mm256_set1_epi16(-256));
    return _mm256_or_si256(Packed4::load(p), _mm256_and_si256(placed, _mm256_set1_epi8(0x30)));
  }
};

struct Bytes {
  static constexpr int BYTES = 32;
  static constexpr int code(int b) { return b; }

  HFQ_INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

  static constexpr int PLANES = 1;
  HFQ_INLINE void planes(const uint8_t* p, __m256i* to) { to[0] = load(p); }
};

// Codes of 8 bits are signed: 128 more than they are they fit an unsigned byte, as the others do.
template <class L>
HFQ_INLINE __m256i unsigned_codes(__m256i codes) {
  return L::BYTES == 32 ? _mm256_xor_si256(codes, _mm256_set1_epi8(-128)) : codes;
}

HFQ_INLINE __m256i in_both(const uint8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

HFQ_INLINE __m256 as_float(__m256i bits) { return _mm256_castsi256_ps(bits); }

// Words that are bf16 -> those of even place, those of odd place.
HFQ_INLINE void widen(__m256i words, __m256* value) {
  value[0] = as_float(_mm256_slli_epi32(words, 16));
  value[1] = as_float(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
}

// Decoders turn the bytes of a unit into four vectors of fp32: vector j has bytes 8 * (j / 2) + 2 * e + j % 2 of either
// half as its elements e. Table: what `table` makes of the zero points of the halves.

// Up to 16 levels that are exact in bf16, whose bytes are looked up by shuffles; a table for each zero point.
template <class L>
struct Levels {
  using Loader = L;
  struct Table {
    __m256i low, high;
  };
  alignas(16) uint8_t low[16][16], high[16][16];

  explicit Levels(const Product& p) {
    const int count = p.layout == PACKED2 ? 4 : p.layout == PACKED3 ? 8 : 16;
    for (int zero = 0; zero < 16; ++zero) {
      for (int i = 0; i < 16; ++i) {
        const float level = p.levels[i % count] - (p.zero == nullptr ? 0.0f : static_cast<float>(zero));
        low[zero][i] = static_cast<uint8_t>(float_to_bf16(level));
        high[zero][i] = static_cast<uint8_t>(float_to_bf16(level) >> 8);
      }
    }
  }
  HFQ_METHOD Table table(int zero) const { return {in_both(low[zero & 15]), in_both(high[zero & 15])}; }
  HFQ_METHOD Table table(int first, int second) const {
    const Table a = table(first), b = table(second);
    return {in_halves(a.low, b.low), in_halves(a.high, b.high)};
  }
  HFQ_METHOD void values(__m256i codes, const Table& t, __m256* value) const {
    const __m256i lower = _mm256_shuffle_epi8(t.low, codes), upper = _mm256_shuffle_epi8(t.high, codes);
    widen(_mm256_unpacklo_epi8(lower, upper), value);
    widen(_mm256_unpackhi_epi8(lower, upper), value + 2);
  }
};

struct NoTable {};

// 16 levels as words, for which `columns` products fit 32 bits, as bytes to look up.
struct LevelWords {
  __m256i lower, upper;
  float unit;  // the level of 1
  int bits;    // of the fixed point that they meet

  LevelWords(const float* levels, int64_t columns) {
    int16_t words[16];
    const LevelsAsWords as_words(levels, 16, columns, words);
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < 16; ++i) {
      bytes[0][i] = static_cast<uint8_t>(words[i]);
      bytes[1][i] = static_cast<uint8_t>(words[i] >> 8);
    }
    lower = in_both(bytes[0]);
    upper = in_both(bytes[1]);
    unit = as_words.unit;
    bits = as_words.bits;
  }
  // 32 bytes of codes -> those of even columns, those of odd ones, ordered so that `of` leaves columns that are neighbours
  // in the same elements of two vectors.
  HFQ_INLINE void planes(const uint8_t* from, __m256i* to) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m256i codes = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), order);
    to[0] = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    to[1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
  }
  // The levels of 32 codes: those of the first 8 bytes of either half, those of the others.
  HFQ_METHOD void of(__m256i codes, __m256i* to) const {
    const __m256i low = _mm256_shuffle_epi8(lower, codes), high = _mm256_shuffle_epi8(upper, codes);
    to[0] = _mm256_unpacklo_epi8(low, high);
    to[1] = _mm256_unpackhi_epi8(low, high);
  }
};

// 16 levels in fp32, as those of nf4.
struct WideLevels {
  using Loader = Packed4;
  using Table = NoTable;
  __m256i byte[4];
  LevelWords words;

  explicit WideLevels(const Product& p) : words(p.levels, 8) {
    alignas(16) uint8_t bytes[16];
    for (int b = 0; b < 4; ++b) {
      for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(float_to_bits(p.levels[i]) >> (8 * b));
      byte[b] = in_both(bytes);
    }
  }
  HFQ_METHOD Table table(int, int = 0) const { return {}; }
  HFQ_METHOD void values(__m256i codes, Table, __m256* value) const {
    __m256i b[4];
    for (int i = 0; i < 4; ++i) b[i] = _mm256_shuffle_epi8(byte[i], codes);
    join(_mm256_unpacklo_epi8(b[0], b[1]), _mm256_unpacklo_epi8(b[2], b[3]), value);
    join(_mm256_unpackhi_epi8(b[0], b[1]), _mm256_unpackhi_epi8(b[2], b[3]), value + 2);
  }

 private:
  HFQ_INLINE void join(__m256i lower, __m256i upper, __m256* value) {
    value[0] = as_float(_mm256_blend_epi16(lower, _mm256_slli_epi32(upper, 16), 0xAA));
    value[1] = as_float(_mm256_blend_epi16(_mm256_srli_epi32(lower, 16), upper, 0xAA));
  }
};

// 64 levels (6 bits), or 128 magnitudes beside a sign (8 bits), that are exact in bf16: 16 to a table.
template <class L, int TABLES>
struct ManyLevels {
  using Loader = L;
  using Table = NoTable;
  alignas(32) uint8_t low[TABLES][32], high[TABLES][32];

  explicit ManyLevels(const Product& p) {
    for (int i = 0; i < 16 * TABLES; ++i) {
      for (int half = 0; half < 32; half += 16) {
        low[i / 16][i % 16 + half] = static_cast<uint8_t>(float_to_bf16(p.levels[i]));
        high[i / 16][i % 16 + half] = static_cast<uint8_t>(float_to_bf16(p.levels[i]) >> 8);
      }
    }
  }
  HFQ_METHOD Table table(int, int = 0) const { return {}; }
  HFQ_METHOD void values(__m256i codes, Table, __m256* value) const {
    const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(127));
    const __m256i lower = look_up(low, index);
    __m256i upper = look_up(high, index);
    if (TABLES == 8) upper = _mm256_or_si256(upper, _mm256_andnot_si256(_mm256_set1_epi8(127), codes));
    widen(_mm256_unpacklo_epi8(lower, upper), value);
    widen(_mm256_unpackhi_epi8(lower, upper), value + 2);
  }

 private:
  // The bits of an index above the lowest four choose the table, the highest of them first.
  HFQ_INLINE __m256i look_up(const uint8_t (*tables)[32], __m256i index) {
    __m256i found[TABLES];
#pragma GCC unroll 8
    for (int t = 0; t < TABLES; ++t)
      found[t] = _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(tables[t])), index);
    __m256i chooser = _mm256_slli_epi16(index, TABLES == 8 ? 1 : 2);
#pragma GCC unroll 3
    for (int step = TABLES / 2; step > 0; step /= 2) {
#pragma GCC unroll 4
      for (int t = 0; t < step; ++t) found[t] = _mm256_blendv_epi8(found[t], found[t + step], chooser);
      chooser = _mm256_add_epi8(chooser, chooser);
    }
    return found[0];
  }
};

// float8_e4m3fn, by arithmetic: bf16 has the same bits, and an exponent that is 120 larger, but for the codes below 8, which
// have no leading bit, and for NaN.
struct E4m3 {
  using Loader = Bytes;
  using Table = NoTable;
  __m256i top, small_low, small_high;  // the high byte by sign and exponent; what differs for small codes

  static bool has_levels(const float* levels) {
    for (uint32_t code = 0; code < 127; ++code)
      if (levels[code] != value_of(code)) return false;
    return levels[127] != levels[127];
  }
  explicit E4m3(const Product&) {
    alignas(16) uint8_t bytes[3][16] = {};
    for (uint32_t i = 0; i < 16; ++i) bytes[0][i] = static_cast<uint8_t>((i & 8) << 4 | (0x3C + (i & 7)));
    for (uint32_t code = 0; code < 8; ++code) {
      const uint32_t differs = float_to_bits(value_of(code)) >> 16 ^ (0x3C00 + (code << 4));
      bytes[1][8 + code] = static_cast<uint8_t>(differs);
      bytes[2][8 + code] = static_cast<uint8_t>(differs >> 8);
    }
    top = in_both(bytes[0]);
    small_low = in_both(bytes[1]);
    small_high = in_both(bytes[2]);
  }
  HFQ_METHOD Table table(int, int = 0) const { return {}; }
  HFQ_METHOD void values(__m256i codes, Table, __m256* value) const {
    // 8 to 15 for the codes below 8, from 128 on, which finds no entry, for the others; 247 for NaN.
    const __m256i index = _mm256_add_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(127)), _mm256_set1_epi8(0x78));
    const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    const __m256i mantissa = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi8(-16));
    const __m256i lower = _mm256_xor_si256(mantissa, _mm256_shuffle_epi8(small_low, index));
    __m256i upper = _mm256_xor_si256(_mm256_shuffle_epi8(top, exponent), _mm256_shuffle_epi8(small_high, index));
    upper = _mm256_or_si256(upper, _mm256_cmpeq_epi8(index, _mm256_set1_epi8(-9)));
    widen(_mm256_unpacklo_epi8(lower, upper), value);
    widen(_mm256_unpackhi_epi8(lower, upper), value + 2);
  }

 private:
  static float value_of(uint32_t code) {
    return code < 8 ? static_cast<float>(code) / 512.0f : bits_to_float((code << 20) + (120u << 23));
  }
};

struct Integers {
  using Loader = Bytes;
  using Table = NoTable;

  explicit Integers(const Product&) {}
  HFQ_METHOD Table table(int, int = 0) const { return {}; }
  HFQ_METHOD void values(__m256i codes, Table, __m256* value) const {
    split(_mm256_unpacklo_epi8(codes, codes), value);
    split(_mm256_unpackhi_epi8(codes, codes), value + 2);
  }

 private:
  // Each byte is there twice.
  HFQ_INLINE void split(__m256i bytes, __m256* value) {
    value[0] = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 16), 24));
    value[1] = _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 24));
  }
};

}  // namespace HFQ_AVX2
}  // namespace hfq
