// Codes -> vectors that a dot instruction takes, in registers. The order of K inside a dot product is free, so codes
// stay where shifts put them, and x is brought into the same order once per call.
//
// A decoder turns BLOCK codes of a row (BYTES bytes) into VECS vectors of 64 bytes: `load` reads them, into PARTS
// vectors, and what follows works on each 32-bit lane by itself, so that lanes can be rows of the weight as well. Lane l
// of a block holds the codes of one stretch of K, from code lane_code(l) on. Zero points are taken from the codes, not
// from the sums: what is exactly zero stays so. Where all lanes have one zero point, a table for each value of it does
// that at no cost (`Table`); where they differ, the index is shifted by the zero point of its lane.
#pragma once

#include <immintrin.h>

#include "types.h"

namespace hfq {
namespace HFQ_AVX512 {

#define HFQ_INLINE static inline __attribute__((always_inline))
#define HFQ_METHOD inline __attribute__((always_inline))

HFQ_INLINE __m512i load_bytes(const uint8_t* p, __mmask64 mask) {
  __m512i value = __builtin_constant_p(mask) && mask == ~__mmask64{0} ? _mm512_loadu_si512(p)
                                                                      : _mm512_maskz_loadu_epi8(mask, p);
  asm("" : "+v"(value));  // or every shift would load again: there is one load of 64 bytes a cycle
  return value;
}

HFQ_INLINE __mmask64 first_bytes(int64_t count) {
  return count >= 64 ? ~__mmask64{0} : count <= 0 ? __mmask64{0} : (__mmask64{1} << count) - 1;
}

// Bytes of two vectors to the places that `from` names; with VBMI any, without it each 128 bits have bytes of up to four
// 32-bit words. A place of kNowhere is zero.
constexpr uint8_t kNowhere = 0x80;

class BytePlaces {
 public:
  explicit BytePlaces(const uint8_t (&from)[64]) {
#if HFQ_VBMI
    bytes_ = _mm512_loadu_si512(from);
    exists_ = ~_mm512_movepi8_mask(bytes_);
#else
    alignas(64) uint8_t places[64];
    alignas(64) uint32_t words[16] = {};
    for (int lane = 0; lane < 16; lane += 4) {
      int count = 0;
      for (int i = 4 * lane; i < 4 * lane + 16; ++i) {
        int at = 0;
        while (at < count && words[lane + at] != from[i] / 4u) ++at;
        if (from[i] != kNowhere && at == count) words[lane + count++] = from[i] / 4u;
        places[i] = from[i] == kNowhere ? kNowhere : static_cast<uint8_t>(4 * at + from[i] % 4);
      }
    }
    words_ = _mm512_load_si512(words);
    bytes_ = _mm512_load_si512(places);
#endif
  }
#if HFQ_VBMI
  HFQ_METHOD __m512i of(__m512i a) const { return _mm512_maskz_permutexvar_epi8(exists_, bytes_, a); }
  HFQ_METHOD __m512i of(__m512i a, __m512i b) const { return _mm512_maskz_permutex2var_epi8(exists_, a, bytes_, b); }
#else
  HFQ_METHOD __m512i of(__m512i a) const { return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words_, a), bytes_); }
  HFQ_METHOD __m512i of(__m512i a, __m512i b) const {
    return _mm512_shuffle_epi8(_mm512_permutex2var_epi32(a, words_, b), bytes_);
  }
#endif

 private:
  __m512i bytes_;
#if HFQ_VBMI
  __mmask64 exists_;
#else
  __m512i words_;
#endif
};

// Bits FIRST, FIRST + 1, .. of each byte as a number: with GFNI a product of each byte, 8 bits, with a matrix of bits.
template <int FIRST, int COUNT>
HFQ_INLINE __m512i bits_of_bytes(__m512i bytes) {
#if !HFQ_VBMI
  return _mm512_and_si512(_mm512_srli_epi16(bytes, FIRST), _mm512_set1_epi8((1 << COUNT) - 1));
#else
  int64_t matrix = 0;
  for (int i = 0; i < COUNT; ++i) matrix |= int64_t{1} << (8 * (7 - i) + FIRST + i);
  return _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(matrix), 0);
#endif
}

// Which bytes of a block exist: all but in the last block of a row.
struct Masks {
  __mmask64 low, high;
};

HFQ_INLINE Masks masks_of(int64_t bytes) { return {first_bytes(bytes), first_bytes(bytes - 64)}; }

// Levels of 2 to 4 bits in bf16, by the low bits of a 16-bit index: for each zero point (one, if there are none) a table
// of 32, in which the levels are repeated, so that what stands above an index does not matter.
template <int BITS>
struct Levels {
  static constexpr int COUNT = 1 << BITS, SHIFT = 16;
  using Table = __m512i;
  alignas(64) uint16_t values[COUNT][32];
  alignas(64) uint16_t shifted[32];  // of 2 bits, by zero point * 4 + code; else by 16 + code - zero point

  explicit Levels(const Product& p) {
    for (int zero = 0; zero < (p.zero == nullptr ? 1 : COUNT); ++zero)
      for (int i = 0; i < 32; ++i)
        values[zero][i] = float_to_bf16(p.levels[i % COUNT] - (p.zero == nullptr ? 0.0f : static_cast<float>(zero)));
    for (int i = 0; i < 32; ++i)
      shifted[i] = float_to_bf16(static_cast<float>(BITS == 2 ? i % COUNT - i / COUNT % COUNT : i - SHIFT));
  }
  void set_words(const int16_t* words) {
    for (int i = 0; i < 32; ++i) values[0][i] = static_cast<uint16_t>(words[i % COUNT]);
  }
  HFQ_METHOD Table table(int zero) const { return _mm512_load_si512(values[zero & (COUNT - 1)]); }
  HFQ_INLINE __m512i level(__m512i index, Table table) { return _mm512_permutexvar_epi16(index, table); }

  // Zero points of lanes, in 32 bits -> what `level_shifted` takes.
  HFQ_INLINE __m512i shift_of(__m512i zeros) {
    const __m512i pairs = _mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16));
    return BITS == 2 ? _mm512_slli_epi16(pairs, 2) : _mm512_sub_epi16(_mm512_set1_epi16(SHIFT), pairs);
  }
  HFQ_METHOD __m512i level_shifted(__m512i index, __m512i shift) const {
    const __m512i mask = _mm512_set1_epi16(COUNT - 1);
    index = BITS == 2 ? _mm512_ternarylogic_epi32(index, mask, shift, 0xEA)  // index & mask | shift
                      : _mm512_add_epi16(_mm512_and_si512(index, mask), shift);
    return _mm512_permutexvar_epi16(index, _mm512_load_si512(shifted));
  }
};

// Formats without zero points.
struct NoTable {};

constexpr int64_t kMostFixed = 256;  // columns of a group in fixed point: their sums fit 32 bits

// The same of levels that are integers, or with UNITS = 2 halves of them, as words of units.
template <class D, int UNITS = 1>
struct Words : D {
  static constexpr int64_t MOST_COLUMNS = kMostFixed;

  explicit Words(const Product& p) : D(p) {
    for (int zero = 0; zero < (p.zero == nullptr ? 1 : D::COUNT); ++zero)
      for (uint16_t& level : this->values[zero]) level = to_integer(level);
    for (uint16_t& level : this->shifted) level = to_integer(level);
  }
  static uint16_t to_integer(uint16_t level) { return static_cast<uint16_t>(static_cast<int16_t>(UNITS * bf16_to_float(level))); }
  float unit() const { return 1.0f / UNITS; }
  int x_bits() const { return 15; }
};

// Any levels as words.
template <class D>
class LevelWords : public D {
 public:
  static constexpr int64_t MOST_COLUMNS = 128;

  explicit LevelWords(const Product& p) : LevelWords(p, p.groups == 1 ? MOST_COLUMNS : p.group_size) {}
  LevelWords(const Product& p, int64_t columns) : D(p), levels_(p.levels, D::COUNT, columns, words_) { this->set_words(words_); }
  float unit() const { return levels_.unit; }
  int x_bits() const { return levels_.bits; }

 private:
  int16_t words_[D::COUNT];
  LevelsAsWords levels_;
};

// 4 bits: word i of 64 bytes holds codes 4i..4i+3; vector j gets code 4i + j of each word.
struct Packed4 : Levels<4> {
  static constexpr int BLOCK = 128, VECS = 4, BYTES = 64, PARTS = 1;
  static constexpr bool ZERO_POINTS = true;
  using Levels::Levels;
  static int code(int vec, int word) { return 4 * word + vec; }
  static constexpr int lane_code(int lane) { return 8 * lane; }

  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { part[0] = load_bytes(p, m.low); }
  HFQ_INLINE void indices(const __m512i* part, __m512i* index) {
    index[0] = part[0];
    index[1] = _mm512_srli_epi16(index[0], 4);
    index[2] = _mm512_srli_epi16(index[0], 8);
    index[3] = _mm512_srli_epi16(index[0], 12);
  }
};

// 2 bits: each of 32 bytes, widened to a word, holds codes 4i..4i+3.
struct Packed2 : Levels<2> {
  static constexpr int BLOCK = 128, VECS = 4, BYTES = 32, PARTS = 1;
  static constexpr bool ZERO_POINTS = true;
  using Levels::Levels;
  static int code(int vec, int word) { return 4 * word + vec; }
  static constexpr int lane_code(int lane) { return 8 * lane; }

  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) {
    part[0] = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(m.low), p));
  }
  HFQ_INLINE void indices(const __m512i* part, __m512i* index) {
    index[0] = part[0];
    index[1] = _mm512_srli_epi16(index[0], 2);
    index[2] = _mm512_srli_epi16(index[0], 4);
    index[3] = _mm512_srli_epi16(index[0], 6);
  }
};

// 3 bits: units of 32 codes are 8 bytes with the low two bits and 4 bytes with the third.
struct Packed3 : Levels<3> {
  static constexpr int BLOCK = 128, VECS = 4, BYTES = 48, PARTS = 1;
  static constexpr bool ZERO_POINTS = true;
  BytePlaces spread;
  __m512i third[4];

  explicit Packed3(const Product& p) : Levels(p), spread(places()) {
    alignas(64) uint16_t shift[4][32];
    for (int i = 0; i < 32; ++i)
      for (int j = 0; j < 4; ++j) shift[j][i] = static_cast<uint16_t>(6 + 4 * (i & 1) + j);
    for (int j = 0; j < 4; ++j) third[j] = _mm512_load_si512(shift[j]);
  }
  static BytePlaces places() {
    uint8_t from[64];
    for (int i = 0; i < 32; ++i) {  // word i: low byte for codes 4i..4i+3, high byte with their third bits
      from[2 * i] = static_cast<uint8_t>(i / 8 * 12 + i % 8);
      from[2 * i + 1] = static_cast<uint8_t>(i / 8 * 12 + 8 + i % 8 / 2);
    }
    return BytePlaces(from);
  }
  static int code(int vec, int word) { return 4 * word + vec; }
  static constexpr int lane_code(int lane) { return 8 * lane; }

  HFQ_METHOD void load(const uint8_t* p, Masks m, __m512i* part) const {
    part[0] = spread.of(load_bytes(p, m.low & ((__mmask64{1} << 48) - 1)));
  }
  HFQ_METHOD void indices(const __m512i* part, __m512i* index) const {
    const __m512i words = part[0], two = _mm512_set1_epi16(3);
    // bits 0, 1 from the first, the others from the second (0xCA: first ? second : third operand)
    index[0] = _mm512_ternarylogic_epi32(two, words, _mm512_srlv_epi16(words, third[0]), 0xCA);
    index[1] = _mm512_ternarylogic_epi32(two, _mm512_srli_epi16(words, 2), _mm512_srlv_epi16(words, third[1]), 0xCA);
    index[2] = _mm512_ternarylogic_epi32(two, _mm512_srli_epi16(words, 4), _mm512_srlv_epi16(words, third[2]), 0xCA);
    index[3] = _mm512_ternarylogic_epi32(two, _mm512_srli_epi16(words, 6), _mm512_srlv_epi16(words, third[3]), 0xCA);
  }
};

// 6 bits: units of 32 codes are 16 bytes with the low four bits and 8 bytes with the other two.
struct Packed6 {
  static constexpr int BLOCK = 128, VECS = 4, BYTES = 96, PARTS = 2, COUNT = 64;
  static constexpr bool ZERO_POINTS = false;
  using Table = NoTable;
  BytePlaces four, two;
  __m512i half[2];

  explicit Packed6(const Product& p) : four(places(true)), two(places(false)) {
    alignas(64) uint16_t values[64];
    for (int i = 0; i < 64; ++i) values[i] = float_to_bf16(p.levels[i]);
    set_words(reinterpret_cast<const int16_t*>(values));
  }
  static BytePlaces places(bool low) {
    uint8_t from[64];
    for (int i = 0; i < 64; ++i) {
      const int unit = i / 16 * 24;
      from[i] = low ? static_cast<uint8_t>(unit + i % 16) : i % 2 == 0 ? static_cast<uint8_t>(unit + 16 + i % 16 / 2) : kNowhere;
    }
    return BytePlaces(from);
  }
  void set_words(const int16_t* words) {
    half[0] = _mm512_loadu_si512(words);
    half[1] = _mm512_loadu_si512(words + 32);
  }
  static int code(int vec, int word) { return 4 * word + vec; }
  static constexpr int lane_code(int lane) { return 8 * lane; }
  HFQ_INLINE Table table(int) { return {}; }

  HFQ_METHOD void load(const uint8_t* p, Masks m, __m512i* part) const {
    const __m512i a = load_bytes(p, m.low), b = load_bytes(p + 64, m.high & 0xffffffffu);
    part[0] = four.of(a, b);
    part[1] = _mm512_slli_epi16(two.of(a, b), 4);
  }
  HFQ_INLINE void indices(const __m512i* part, __m512i* index) {
    const __m512i lower = part[0], upper = part[1], mask = _mm512_set1_epi16(15);
    index[0] = _mm512_ternarylogic_epi32(mask, lower, upper, 0xCA);
    index[1] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(lower, 4), _mm512_srli_epi16(upper, 2), 0xCA);
    index[2] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(lower, 8), _mm512_srli_epi16(upper, 4), 0xCA);
    index[3] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(lower, 12), _mm512_srli_epi16(upper, 6), 0xCA);
  }
  HFQ_METHOD __m512i level(__m512i index, Table) const { return _mm512_permutex2var_epi16(half[0], index, half[1]); }
};

// Bytes as words: the even ones of a lane, then the odd ones.
struct WordsOfBytes {
  static constexpr int BLOCK = 64, VECS = 2, BYTES = 64, PARTS = 1;
  static constexpr bool ZERO_POINTS = false;
  using Table = NoTable;

  static int code(int vec, int word) { return 2 * word + vec; }
  static constexpr int lane_code(int lane) { return 4 * lane; }
  HFQ_INLINE Table table(int) { return {}; }
  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { part[0] = load_bytes(p, m.low); }
  HFQ_INLINE __m512i level(__m512i value, Table) { return value; }
};

// Signed bytes as words.
struct WordBytes : WordsOfBytes {
  static constexpr int64_t MOST_COLUMNS = kMostFixed;

  explicit WordBytes(const Product&) {}
  float unit() const { return 1.0f; }
  int x_bits() const { return 15; }
  HFQ_INLINE void indices(const __m512i* part, __m512i* index) {
    index[0] = _mm512_srai_epi16(_mm512_slli_epi16(part[0], 8), 8);
    index[1] = _mm512_srai_epi16(part[0], 8);
  }
};

#if HFQ_VBMI
// Both bytes of the bf16 value from tables of the 128 magnitudes. Each is exact in bf16.
struct Bytes : WordsOfBytes {
  __m512i upper[2], lower[2];

  // level(i): the value of magnitude i.
  template <class Level>
  explicit Bytes(Level level) {
    alignas(64) uint8_t bytes[2][128];
    for (int i = 0; i < 128; ++i) {
      uint16_t value = float_to_bf16(level(i));
      bytes[0][i] = static_cast<uint8_t>(value >> 8);
      bytes[1][i] = static_cast<uint8_t>(value);
    }
    for (int half = 0; half < 2; ++half) {
      upper[half] = _mm512_load_si512(bytes[0] + 64 * half);
      lower[half] = _mm512_load_si512(bytes[1] + 64 * half);
    }
  }
  HFQ_INLINE void join(__m512i top, __m512i bottom, __m512i* value) {
    const __m512i low_bytes = _mm512_set1_epi16(255);
    value[0] = _mm512_ternarylogic_epi32(low_bytes, bottom, _mm512_slli_epi16(top, 8), 0xCA);
    value[1] = _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(bottom, 8), top, 0xCA);
  }
};

struct BytesFloat : Bytes {
  explicit BytesFloat(const Product& p) : Bytes([&](int i) { return p.levels[i]; }) {}

  HFQ_METHOD void indices(const __m512i* part, __m512i* value) const {
    const __m512i codes = part[0], sign = _mm512_set1_epi8(-128);
    const __m512i top = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);  // by the low seven bits
    const __m512i with_sign = _mm512_ternarylogic_epi32(sign, codes, top, 0xEA);  // (sign & codes) | top
    join(with_sign, _mm512_permutex2var_epi8(lower[0], codes, lower[1]), value);
  }
};

struct BytesInt : Bytes {
  explicit BytesInt(const Product&) : Bytes([](int i) { return static_cast<float>(i); }) {}

  HFQ_METHOD void indices(const __m512i* part, __m512i* value) const {
    const __m512i codes = part[0], magnitudes = _mm512_abs_epi8(codes), sign = _mm512_set1_epi8(-128);
    const __m512i top = _mm512_permutex2var_epi8(upper[0], magnitudes, upper[1]);
    __m512i with_sign = _mm512_ternarylogic_epi32(sign, codes, top, 0xEA);
    // The magnitude 128 is beyond the table: it finds the bytes of 0, and -128 is 0xC300.
    with_sign = _mm512_mask_mov_epi8(with_sign, _mm512_cmpeq_epi8_mask(codes, sign), _mm512_set1_epi8(-61));
    join(with_sign, _mm512_permutex2var_epi8(lower[0], magnitudes, lower[1]), value);
  }
};
#else
// The bf16 values of bytes that are a sign and one of 128 magnitudes.
struct SignedMagnitudes {
  __m512i words[4];

  explicit SignedMagnitudes(const uint16_t (&magnitudes)[128]) {
    for (int i = 0; i < 4; ++i) words[i] = _mm512_loadu_si512(magnitudes + 32 * i);
  }
  // Of the lower byte of each word; the upper one must have the sign, too.
  HFQ_METHOD __m512i of(__m512i codes, __m512i signs) const {
    const __m512i first = _mm512_permutex2var_epi16(words[0], codes, words[1]);  // by the low six bits
    const __m512i second = _mm512_permutex2var_epi16(words[2], codes, words[3]);
    const __mmask32 is_second = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(64));
    const __m512i magnitude = _mm512_mask_mov_epi16(first, is_second, second);
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(-32768), signs, magnitude, 0xEA);  // (sign & signs) | magnitude
  }
};

struct BytesFloat : WordsOfBytes {
  SignedMagnitudes magnitudes;

  explicit BytesFloat(const Product& p) : magnitudes(of_levels(p.levels)) {}
  static SignedMagnitudes of_levels(const float* levels) {
    uint16_t values[128];
    for (int i = 0; i < 128; ++i) values[i] = float_to_bf16(levels[i]);
    return SignedMagnitudes(values);
  }
  HFQ_METHOD void indices(const __m512i* part, __m512i* value) const {
    value[0] = magnitudes.of(part[0], _mm512_slli_epi16(part[0], 8));
    value[1] = magnitudes.of(_mm512_srli_epi16(part[0], 8), part[0]);
  }
};
#endif

// Signed bytes as fp32: vector j gets code 4l + j of each 32-bit lane l.
struct BytesIntFloat {
  static constexpr int BLOCK = 64, VECS = 4, BYTES = 64, PARTS = 1;
  static constexpr bool ZERO_POINTS = false;
  using Table = NoTable;

  explicit BytesIntFloat(const Product&) {}
  static int code(int vec, int lane) { return 4 * lane + vec; }
  static constexpr int lane_code(int lane) { return 4 * lane; }
  HFQ_INLINE Table table(int) { return {}; }
  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { part[0] = load_bytes(p, m.low); }
  HFQ_INLINE void levels(const __m512i* part, Table, __m512* value) {
    for (int j = 0; j < VECS; ++j)
      value[j] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(part[0], 24 - 8 * j), 24));
  }
};

// 4 bits as fp32 levels, which need not be exact in bf16: vector j gets code 8l + j of each 32-bit lane l.
struct Packed4Float {
  static constexpr int BLOCK = 128, VECS = 8, BYTES = 64, PARTS = 1;
  static constexpr bool ZERO_POINTS = true;
  using Table = __m512;
  alignas(64) float values[16][16];
  alignas(64) float unsigned_levels[16];

  explicit Packed4Float(const Product& p) {
    for (int zero = 0; zero < 16; ++zero)
      for (int i = 0; i < 16; ++i)
        values[zero][i] = p.levels[i] - (p.zero == nullptr ? 0.0f : static_cast<float>(zero));
    memcpy(unsigned_levels, p.levels, sizeof(unsigned_levels));
  }
  static int code(int vec, int lane) { return 8 * lane + vec; }
  static constexpr int lane_code(int lane) { return 8 * lane; }
  HFQ_METHOD Table table(int zero) const { return _mm512_load_ps(values[zero & 15]); }
  HFQ_METHOD Table unsigned_table() const { return _mm512_load_ps(unsigned_levels); }

  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { part[0] = load_bytes(p, m.low); }
  HFQ_INLINE void levels(const __m512i* part, Table table, __m512* value) {
    for (int j = 0; j < VECS; ++j) value[j] = _mm512_permutexvar_ps(_mm512_srli_epi32(part[0], 4 * j), table);
  }
};

// Unsigned bytes for products with int8 x; OFFSET is the code of zero. What it adds to a sum is taken from the integer.

struct Packed4Unsigned {
  static constexpr int BLOCK = 128, VECS = 2, BYTES = 64, PARTS = 1, OFFSET = 8;
  using Table = NoTable;

  explicit Packed4Unsigned(const Product&) {}
  static int code(int vec, int byte) { return 2 * byte + vec; }
  static constexpr int lane_code(int lane) { return 8 * lane; }

  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { part[0] = load_bytes(p, m.low); }
  HFQ_INLINE void codes(const __m512i* part, __m512i* value) {
    const __m512i mask = _mm512_set1_epi8(15);
    value[0] = _mm512_and_si512(part[0], mask);
    value[1] = bits_of_bytes<4, 4>(part[0]);
  }
};

// Each of 32 bytes, widened to a word, moves its upper two codes into the upper byte: then the codes lie as those of 4 bits.
struct Packed2Unsigned {
  static constexpr int BLOCK = 128, VECS = 2, BYTES = 32, PARTS = 1, OFFSET = 2;
  using Table = NoTable;

  explicit Packed2Unsigned(const Product&) {}
  static int code(int vec, int byte) { return Packed4Unsigned::code(vec, byte); }
  static constexpr int lane_code(int lane) { return Packed4Unsigned::lane_code(lane); }

  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { Packed2::load(p, m, part); }
  HFQ_INLINE void codes(const __m512i* part, __m512i* value) {
    const __m512i mask = _mm512_set1_epi8(3), pairs = _mm512_or_si512(part[0], _mm512_slli_epi16(part[0], 4));
    value[0] = _mm512_and_si512(pairs, mask);
    value[1] = bits_of_bytes<2, 2>(pairs);
  }
};

struct BytesUnsigned {
  static constexpr int BLOCK = 64, VECS = 1, BYTES = 64, PARTS = 1, OFFSET = 128;
  using Table = NoTable;

  explicit BytesUnsigned(const Product&) {}
  static int code(int, int byte) { return byte; }
  static constexpr int lane_code(int lane) { return 4 * lane; }

  HFQ_INLINE void load(const uint8_t* p, Masks m, __m512i* part) { part[0] = load_bytes(p, m.low); }
  HFQ_INLINE void codes(const __m512i* part, __m512i* value) {
    value[0] = _mm512_xor_si512(part[0], _mm512_set1_epi8(-128));
  }
};

}  // namespace HFQ_AVX512
}  // namespace hfq
