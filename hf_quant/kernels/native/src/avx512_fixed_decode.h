// Codes -> unsigned bytes for products with x in fixed point.
#pragma once

#include "avx512_decode.h"

namespace hfq {
namespace avx512 {

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
    value[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
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
    value[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 2), mask);
    value[2] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
    value[3] = _mm512_and_si512(_mm512_srli_epi16(bytes, 6), mask);
  }
};

// Units of 32 codes are 8 bytes with the low two bits and 4 bytes with the third.
struct Fixed3 {
  static constexpr bool WORDS = false;
  static constexpr int LANE = 16, BLOCK = 256, VECS = 4, BYTES = 96, COUNT = 8;
  __m512i low_places, third_places;

  explicit Fixed3(const Product&) {
    alignas(64) uint8_t low[64], third[64];
    for (int i = 0; i < 64; ++i) {
      low[i] = static_cast<uint8_t>(i / 8 * 12 + i % 8);
      third[i] = static_cast<uint8_t>(i / 8 * 12 + 8 + i % 8 / 2);
    }
    low_places = _mm512_load_si512(low);
    third_places = _mm512_load_si512(third);
  }
  HFQ_METHOD void codes(const uint8_t* p, Masks m, __m512i* value) const {
    const __m512i a = load_bytes(p, m.low), b = load_bytes(p + 64, m.high & 0xffffffffu);
    const __m512i low = _mm512_permutex2var_epi8(a, low_places, b);
    const __m512i both = _mm512_permutex2var_epi8(a, third_places, b);  // of this byte and its neighbour
    // The third bit of code 4 i + j is bit 2 + j of byte i.
    const __m512i third =
        _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, _mm512_slli_epi16(both, 2), _mm512_srli_epi16(both, 2));
    value[0] = join(low, third);
    value[1] = join(_mm512_srli_epi16(low, 2), _mm512_srli_epi16(third, 1));
    value[2] = join(_mm512_srli_epi16(low, 4), _mm512_srli_epi16(third, 2));
    value[3] = join(_mm512_srli_epi16(low, 6), _mm512_srli_epi16(third, 3));
  }
  // 0xCA: first ? second : third operand
  HFQ_INLINE __m512i join(__m512i low, __m512i third) {
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), low, third, 0xCA);
    return _mm512_and_si512(bits, _mm512_set1_epi8(7));
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
