// Codes -> unsigned bytes for products with x in fixed point.
#pragma once

#include "avx512_decode.h"

namespace hfq {
namespace avx512 {

// Decoders: BLOCK codes, BYTES bytes, become VECS vectors of unsigned bytes; byte i of vector j is made of code VECS * i + j,
// so that a lane of 32 bits has 4 * VECS neighbours, which are of one group. The last decoder makes words.

// Bits FIRST, FIRST + 1, .. of each byte as a number: a product of each byte, 8 bits, with a matrix of bits.
template <int FIRST, int COUNT>
HFQ_INLINE __m512i bits_of_bytes(__m512i bytes) {
  int64_t matrix = 0;
  for (int i = 0; i < COUNT; ++i) matrix |= int64_t{1} << (8 * (7 - i) + FIRST + i);
  return _mm512_gf2p8affine_epi64_epi8(bytes, _mm512_set1_epi64(matrix), 0);
}

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
  __m512i low_places, third_places, third[4];

  explicit Fixed3(const Product&) {
    alignas(64) uint8_t low[64], bytes[64], shifts[4][64];
    for (int i = 0; i < 64; ++i) {
      low[i] = static_cast<uint8_t>(i / 8 * 12 + i % 8);
      bytes[i] = static_cast<uint8_t>(i / 8 * 12 + 8 + i % 4);
      // The third bit of code 4 i + j is bit 4 i + j of 8 bytes, and shall be bit 2 of byte i.
      for (int j = 0; j < 4; ++j) shifts[j][i] = static_cast<uint8_t>((4 * (i % 8) + j + 62) % 64);
    }
    low_places = _mm512_load_si512(low);
    third_places = _mm512_load_si512(bytes);
    for (int j = 0; j < 4; ++j) third[j] = _mm512_load_si512(shifts[j]);
  }
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    const __m512i a = load_bytes(p, m.low), b = load_bytes(p + 64, m.high & 0xffffffffu);
    const __m512i low = _mm512_permutex2var_epi8(a, low_places, b);
    const __m512i words = _mm512_permutex2var_epi8(a, third_places, b);  // the 4 bytes of third bits, twice
    value[0] = join(bits_of_bytes<0, 2>(low), _mm512_multishift_epi64_epi8(third[0], words));
    value[1] = join(bits_of_bytes<2, 2>(low), _mm512_multishift_epi64_epi8(third[1], words));
    value[2] = join(bits_of_bytes<4, 2>(low), _mm512_multishift_epi64_epi8(third[2], words));
    value[3] = join(bits_of_bytes<6, 2>(low), _mm512_multishift_epi64_epi8(third[3], words));
  }
  // 0xF8: first | (second & third operand)
  HFQ_INLINE __m512i join(__m512i low, __m512i third) {
    return _mm512_ternarylogic_epi32(low, third, _mm512_set1_epi8(4), 0xF8);
  }
};

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

}  // namespace avx512
}  // namespace hfq
