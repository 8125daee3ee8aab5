// Codes -> unsigned bytes for products with x in fixed point.
#pragma once

#include "avx512_decode.h"

namespace hfq {
namespace HFQ_AVX512 {

// Decoders: BLOCK codes, BYTES bytes, become VECS vectors of unsigned bytes; byte i of vector j is made of code VECS * i + j,
// so that a lane of 32 bits has 4 * VECS neighbours, which are of one group. The last decoder makes words.

// 4 bits, as they are.
struct Fixed4 {
  static constexpr bool WORDS = false;
  static constexpr int LANE = 8, BLOCK = 128, VECS = 2, BYTES = 64, COUNT = 16;

  explicit Fixed4(const Product&) {}
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    const __m512i bytes = load_bytes(p, m.low), mask = _mm512_set1_epi8(15);
    value[0] = _mm512_and_si512(bytes, mask);
    value[1] = bits_of_bytes<4, 4>(bytes);
  }
};

// 4 bits whose levels are halves of integers, as those of fp4: twice the level, plus OFFSET.
struct Fixed4Halves : Fixed4 {
  static constexpr int OFFSET = 12;
  __m512i table;

  static bool fits(const Product& p) {
    for (int i = 0; i < COUNT; ++i) {
      const float twice = 2.0f * p.levels[i];
      if (!(twice >= -OFFSET && twice <= 127.0f) || twice != static_cast<float>(static_cast<int>(twice))) return false;
    }
    return true;
  }
  explicit Fixed4Halves(const Product& p) : Fixed4(p) {
    alignas(64) uint8_t bytes[64];
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(2.0f * p.levels[i % 16] + OFFSET);
    table = _mm512_load_si512(bytes);
  }
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    Fixed4::codes(p, m, value);
    for (int j = 0; j < VECS; ++j) value[j] = _mm512_shuffle_epi8(table, value[j]);
  }
};

struct Fixed2 {
  static constexpr bool WORDS = false;
  static constexpr int LANE = 16, BLOCK = 256, VECS = 4, BYTES = 64, COUNT = 4;

  explicit Fixed2(const Product&) {}
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    const __m512i bytes = load_bytes(p, m.low), mask = _mm512_set1_epi8(3);
    value[0] = _mm512_and_si512(bytes, mask);
    value[1] = bits_of_bytes<2, 2>(bytes);
    value[2] = bits_of_bytes<4, 2>(bytes);
    value[3] = bits_of_bytes<6, 2>(bytes);
  }
};

// Units of 32 codes are 8 bytes with the low two bits and 4 bytes with the third.
struct Fixed3 {
  static constexpr bool WORDS = false;
  static constexpr int LANE = 16, BLOCK = 256, VECS = 4, BYTES = 96, COUNT = 8;
  BytePlaces low_places, third_places;
  __m512i third[4];

  explicit Fixed3(const Product&) : low_places(places(true)), third_places(places(false)) {
    alignas(64) uint8_t bytes[4][64];
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 4; ++j) bytes[j][i] = third_of(i, j);
    for (int j = 0; j < 4; ++j) third[j] = _mm512_load_si512(bytes[j]);
  }
  static BytePlaces places(bool low) {
    uint8_t from[64];
    for (int i = 0; i < 64; ++i) from[i] = static_cast<uint8_t>(i / 8 * 12 + (low ? i % 8 : 8 + third_place(i % 8)));
    return BytePlaces(from);
  }
#if HFQ_VBMI
  // The 4 bytes of third bits, twice: that of code 4 i + j is bit 4 i + j of 8 bytes, and shall be bit 2 of byte i.
  static int third_place(int i) { return i % 4; }
  static uint8_t third_of(int i, int j) { return static_cast<uint8_t>((4 * (i % 8) + j + 62) % 64); }
  HFQ_INLINE __m512i thirds(__m512i bytes) { return bytes; }
  HFQ_INLINE __m512i join(__m512i low, __m512i third, __m512i thirds) {
    const __m512i bits = _mm512_multishift_epi64_epi8(third, thirds);
    return _mm512_ternarylogic_epi32(low, bits, _mm512_set1_epi8(4), 0xF8);  // low | (bits & 4)
  }
#else
  // Each of the 4 bytes of third bits, twice: byte i gets the bits of codes 4 i to 4 i + 3, by which a table has bit 2.
  static int third_place(int i) { return i / 2; }
  static uint8_t third_of(int i, int j) { return static_cast<uint8_t>((i >> j & 1) << 2); }
  HFQ_INLINE __m512i thirds(__m512i bytes) {
    const __m512i upper = _mm512_srli_epi16(bytes, 4), even = _mm512_set1_epi16(255);
    return _mm512_and_si512(_mm512_ternarylogic_epi32(even, bytes, upper, 0xCA), _mm512_set1_epi8(15));
  }
  HFQ_INLINE __m512i join(__m512i low, __m512i third, __m512i thirds) {
    return _mm512_or_si512(low, _mm512_shuffle_epi8(third, thirds));
  }
#endif
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    const __m512i a = load_bytes(p, m.low), b = load_bytes(p + 64, m.high & 0xffffffffu);
    const __m512i low = low_places.of(a, b), of_bytes = thirds(third_places.of(a, b));
    value[0] = join(bits_of_bytes<0, 2>(low), third[0], of_bytes);
    value[1] = join(bits_of_bytes<2, 2>(low), third[1], of_bytes);
    value[2] = join(bits_of_bytes<4, 2>(low), third[2], of_bytes);
    value[3] = join(bits_of_bytes<6, 2>(low), third[3], of_bytes);
  }
};

#if HFQ_VBMI
// 6 bits whose levels are eighths of integers, as those of fp6_e2m3: eight times the level, plus OFFSET. Units of 32 codes
// are 16 bytes with the low four bits and 8 bytes with the other two.
struct Fixed6 {
  static constexpr bool WORDS = false;
  static constexpr int LANE = 8, BLOCK = 128, VECS = 2, BYTES = 96, COUNT = 64, OFFSET = 64;
  static constexpr float UNIT = 0.125f;
  __m512i four, two, shift[2], table;

  static bool fits(const Product& p) {
    for (int i = 0; i < COUNT; ++i) {
      const float value = p.levels[i] / UNIT;
      if (!(value >= -OFFSET && value < OFFSET) || value != static_cast<float>(static_cast<int>(value))) return false;
    }
    return true;
  }
  explicit Fixed6(const Product& p) {
    alignas(64) uint8_t bytes[3][64];
    alignas(64) int32_t words[2][16];
    for (int i = 0; i < 64; ++i) {
      // Of 8 codes that lie side by side in a vector the word of upper bits is there: those of each shall be bits 4 and 5.
      for (int j = 0; j < 2; ++j) bytes[j][i] = static_cast<uint8_t>((4 * (i % 8) + 2 * j + 60) % 64);
      bytes[2][i] = static_cast<uint8_t>(p.levels[i] / UNIT + OFFSET);
    }
    for (int i = 0; i < 16; ++i) {
      words[0][i] = place(i / 4 * 6 + i % 4);
      words[1][i] = place(i / 4 * 6 + 4 + i / 2 % 2);
    }
    four = _mm512_load_si512(words[0]);
    two = _mm512_load_si512(words[1]);
    for (int j = 0; j < 2; ++j) shift[j] = _mm512_load_si512(bytes[j]);
    table = _mm512_load_si512(bytes[2]);
  }
  // Of a word of 32 bits, in the first 16 words and the last 16 of 24.
  static int32_t place(int word) { return word < 16 ? word : word + 8; }
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    const __m512i a = load_bytes(p, m.low), b = load_bytes(p + 32, m.low >> 32 | m.high << 32);
    const __m512i lower = _mm512_permutex2var_epi32(a, four, b), upper = _mm512_permutex2var_epi32(a, two, b);
    const __m512i mask = _mm512_set1_epi8(15);
    // The lower four bits of the first, the others of the second, of which a table takes two.
    value[0] = _mm512_ternarylogic_epi32(mask, lower, _mm512_multishift_epi64_epi8(shift[0], upper), 0xCA);
    value[1] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(lower, 4), _mm512_multishift_epi64_epi8(shift[1], upper), 0xCA);
    for (int j = 0; j < VECS; ++j) value[j] = _mm512_permutexvar_epi8(value[j], table);
  }
};
#endif

struct Fixed8 {
  static constexpr bool WORDS = false;
  static constexpr int LANE = 4, BLOCK = 64, VECS = 1, BYTES = 64, COUNT = 256;

  explicit Fixed8(const Product&) {}
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    value[0] = _mm512_xor_si512(load_bytes(p, m.low), _mm512_set1_epi8(-128));
  }
};

// Levels that are no integers, as signed words: word i of vector j is made of code VECS * i + j.
template <class D>
struct FixedLevels : LevelWords<D> {
  static constexpr bool WORDS = true;
  static constexpr int LANE = 2 * D::VECS;

  explicit FixedLevels(const Product& p) : LevelWords<D>(p, LANE) {}
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    __m512i part[D::PARTS];
    this->load(p, m, part);
    this->indices(part, value);
    for (int j = 0; j < D::VECS; ++j) value[j] = this->level(value[j], this->table(0));
  }
};

}  // namespace HFQ_AVX512
}  // namespace hfq
