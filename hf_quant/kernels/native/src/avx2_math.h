// The ways to multiply, and what surrounds them: conversions, the order of x, reductions.
#pragma once

#include "avx2_decode.h"

namespace hfq {
namespace HFQ_AVX2 {

HFQ_INLINE __m256i load_vector(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

constexpr int64_t kMostFixed = 256;  // columns of a group in fixed point: their sums fit 32 bits

// A multiplication: `values` makes V vectors of the codes of a unit, `dot` adds the products of one with packed x, of
// which an element takes X_BYTES. After at most MOST products `add` must bring what was added up, a Part, into a Sum.
// What byte `b` of a half meets is element `place` of packed x, in bytes: what vector j of word `w` of a half meets
// starts at `offset`, and 16 further on for the second half. TILE: rows of x that panels are multiplied by at once.
// FIXED: x is fixed point of 16 bits, with a power of two for each group of at most MOST_COLUMNS, and meets panels only.

// Sums in fp32.
template <class D>
struct ByF32 : D {
  using Decoder = D;
  using typename D::Table;
  using Part = __m256;
  using Sum = __m256;
  using Value = __m256;
  static constexpr int V = 4, X_BYTES = 4, TILE = 6, CHAINS = 4;
  static constexpr int64_t MOST = INT64_MAX, MOST_COLUMNS = kMostFixed;
  static constexpr bool INTEGER = false, FIXED = false;
  using D::D;

  static constexpr int place(int half, int b) { return 16 * (b / 8) + 8 * (b % 2) + 4 * half + b % 8 / 2; }
  static constexpr int offset(int word, int j) { return 4 * place(0, 4 * word + j); }
  HFQ_INLINE Part zero() { return _mm256_setzero_ps(); }
  HFQ_INLINE Part dot(Part sum, __m256i x, Value w) { return _mm256_fmadd_ps(as_float(x), w, sum); }
  HFQ_INLINE Part join(Part a, Part b) { return _mm256_add_ps(a, b); }
  HFQ_INLINE Sum add(Sum sum, Part part) { return _mm256_add_ps(sum, part); }
  HFQ_INLINE __m256 to_float(Sum sum) { return sum; }
};

// What products of integers share: exact sums, from which zero points are taken.
struct IntegerSums {
  using Table = NoTable;
  using Part = __m256i;
  using Sum = __m256i;
  using Value = __m256i;
  static constexpr int64_t MOST_COLUMNS = kMostFixed;
  static constexpr bool INTEGER = true, FIXED = false;

  explicit IntegerSums(const Product&) {}
  HFQ_METHOD Table table(int, int = 0) const { return {}; }
  HFQ_INLINE Part zero() { return _mm256_setzero_si256(); }
  HFQ_INLINE __m256 to_float(Sum sum) { return _mm256_cvtepi32_ps(sum); }
  // Or GCC 12 adds the products of many steps in an order of its own, and keeps them in memory until then.
  HFQ_INLINE Part in_order(Part sum) {
    asm("" : "+x"(sum));
    return sum;
  }
};

#ifdef HFQ_DOT_BYTES
// Four products of an unsigned byte of a and a signed one of b, added to each element. As assembly: around the intrinsic
// GCC 12 copies sums to memory and back.
HFQ_INLINE __m256i dot_bytes(__m256i sum, __m256i a, __m256i b) {
  asm(HFQ_DOT_BYTES " %2, %1, %0" : "+x"(sum) : "x"(a), "xm"(b));
  return sum;
}

// Codes as unsigned bytes, OFFSET more than they stand for.
template <class L, int OFFSET_OF_CODES>
struct ByteDots : IntegerSums {
  using Loader = L;
  static constexpr int V = 1, X_BYTES = 1, OFFSET = OFFSET_OF_CODES, TILE = 6, CHAINS = 4;
  static constexpr int64_t MOST = INT64_MAX;
  using IntegerSums::IntegerSums;

  static constexpr int place(int half, int b) { return 16 * half + b; }
  static constexpr int offset(int word, int) { return 4 * word; }
  HFQ_INLINE void values(__m256i codes, Table, Value* value) { value[0] = unsigned_codes<L>(codes); }
  HFQ_INLINE Part dot(Part sum, __m256i x, Value w) { return dot_bytes(sum, w, x); }
  HFQ_INLINE Part join(Part a, Part b) { return _mm256_add_epi32(a, b); }
  HFQ_INLINE Sum add(Sum sum, Part part) { return _mm256_add_epi32(sum, part); }
};

using Int2ByInt8 = ByteDots<Packed2, 2>;
using Int4ByInt8 = ByteDots<Packed4, 8>;
using Int8ByInt8 = ByteDots<Bytes, 128>;
#else
// Codes of up to 4 bits, OFFSET more than they stand for. A pair of products is at most 2 * 15 * 128, and 8 of them fit 16
// bits.
template <class L, int OFFSET_OF_CODES>
struct PackedDots : IntegerSums {
  using Loader = L;
  static constexpr int V = 1, X_BYTES = 1, OFFSET = OFFSET_OF_CODES, TILE = 4, CHAINS = 1;
  static constexpr int64_t MOST = 8;
  using IntegerSums::IntegerSums;

  static constexpr int place(int half, int b) { return 16 * half + b; }
  static constexpr int offset(int word, int) { return 4 * word; }
  HFQ_INLINE void values(__m256i codes, Table, Value* value) { value[0] = codes; }
  HFQ_INLINE Part product(__m256i x, Value w) {
    Part product;
    asm("vpmaddubsw %2, %1, %0" : "=x"(product) : "x"(w), "x"(x));
    return product;
  }
  HFQ_INLINE Part dot(Part sum, __m256i x, Value w) { return in_order(_mm256_add_epi16(sum, product(x, w))); }
  HFQ_INLINE Part join(Part a, Part b) { return _mm256_add_epi16(a, b); }
  HFQ_INLINE Sum add(Sum sum, Part part) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
};

using Int2ByInt8 = PackedDots<Packed2, 2>;
using Int4ByInt8 = PackedDots<Packed4, 8>;

// Both sides as 16 bits: bytes times bytes would saturate, and -128 has no magnitude in 8 bits.
struct Int8ByInt8 : IntegerSums {
  using Loader = Bytes;
  static constexpr int V = 2, X_BYTES = 2, OFFSET = 0, TILE = 4, CHAINS = 2;
  static constexpr int64_t MOST = INT64_MAX;
  using IntegerSums::IntegerSums;

  static constexpr int place(int half, int b) { return 16 * (b % 2) + 8 * half + b / 2; }
  static constexpr int offset(int word, int j) { return 32 * j + 4 * word; }
  HFQ_INLINE void values(__m256i codes, Table, Value* value) {
    value[0] = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
    value[1] = _mm256_srai_epi16(codes, 8);
  }
  HFQ_INLINE Part dot(Part sum, __m256i x, Value w) {
    return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(w, x)));
  }
  HFQ_INLINE Part join(Part a, Part b) { return _mm256_add_epi32(a, b); }
  HFQ_INLINE Sum add(Sum sum, Part part) { return _mm256_add_epi32(sum, part); }
};
#endif

// x in fixed point of 14 or 15 bits: of 15 what lies within 2**-8 of the largest value of its group is exact if x is bf16, the
// rest to 2**-16 of that; sums are exact. That takes half as many instructions as fp32 with dot products of words, and 3/4
// without.
template <class L, int OFFSET_OF_CODES>
struct ByFixed : IntegerSums {
  using Loader = L;
  static constexpr int V = 2, X_BYTES = 2, OFFSET = OFFSET_OF_CODES;
  static constexpr int64_t MOST = INT64_MAX;
  static constexpr bool FIXED = true;
  using IntegerSums::IntegerSums;

  float unit() const { return 1.0f; }  // the difference of the levels of two neighbouring codes
  int x_bits() const { return 15; }
  static constexpr int offset(int word, int j) { return 32 * j + 4 * word; }
  // Bytes, unsigned but those of codes of 8 bits: words of even place, those of odd place.
  HFQ_INLINE void values(__m256i codes, Table, Value* value) {
    const bool is_signed = L::BYTES == 32;
    value[0] = is_signed ? _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8) : _mm256_and_si256(codes, _mm256_set1_epi16(255));
    value[1] = is_signed ? _mm256_srai_epi16(codes, 8) : _mm256_srli_epi16(codes, 8);
  }
#ifdef HFQ_DOT_WORDS
  static constexpr int TILE = 6;
  HFQ_INLINE Part dot(Part sum, __m256i x, Value w) {
    asm(HFQ_DOT_WORDS " %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
  }
#else
  static constexpr int TILE = 4;
  HFQ_INLINE Part dot(Part sum, __m256i x, Value w) {
    Part product;
    asm("vpmaddwd %2, %1, %0" : "=x"(product) : "x"(w), "x"(x));
    return in_order(_mm256_add_epi32(sum, product));
  }
#endif
};

// The same of any levels of 4 bits, as words.
struct LevelsByFixed : ByFixed<Packed4, 0> {
  struct Table {
    __m256i lower, upper;  // bytes of the words
  };
  static constexpr int64_t MOST_COLUMNS = 128;

  explicit LevelsByFixed(const Product& p) : ByFixed(p), words_(p.levels, p.groups == 1 ? MOST_COLUMNS : p.group_size) {}
  float unit() const { return words_.unit; }
  int x_bits() const { return words_.bits; }
  HFQ_METHOD Table table(int, int = 0) const { return {words_.lower, words_.upper}; }
  HFQ_INLINE void values(__m256i codes, const Table& table, Value* value) {
    const __m256i lower = _mm256_shuffle_epi8(table.lower, codes), upper = _mm256_shuffle_epi8(table.upper, codes);
    const __m256i low = _mm256_set1_epi16(255);
    value[0] = _mm256_or_si256(_mm256_and_si256(lower, low), _mm256_slli_epi16(upper, 8));
    value[1] = _mm256_or_si256(_mm256_srli_epi16(lower, 8), _mm256_andnot_si256(low, upper));
  }

 private:
  LevelWords words_;
};

HFQ_INLINE float reduce(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Four of them, each added up in the same order.
HFQ_INLINE __m128 reduce(__m256 a, __m256 b, __m256 c, __m256 d) {
  auto halves = [](__m256 v) HFQ_LAMBDA { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); };
  auto quarters = [](__m128 v, __m128 w) HFQ_LAMBDA { return _mm_add_ps(_mm_movelh_ps(v, w), _mm_movehl_ps(w, v)); };
  return _mm_hadd_ps(quarters(halves(a), halves(b)), quarters(halves(c), halves(d)));
}

HFQ_INLINE int32_t reduce(__m256i v) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}

// 8 values of E4M3, none of which is NaN. Shifted into place an exponent lacks 120.
HFQ_INLINE __m256 load_finite_e4m3(const void* from) {
  const __m256i bits = _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
  const __m256i placed = _mm256_and_si256(_mm256_slli_epi32(bits, 20), _mm256_set1_epi32(static_cast<int>(0x87F00000u)));
  return _mm256_mul_ps(as_float(placed), _mm256_set1_ps(bits_to_float((127u + 120u) << 23)));
}

// Values of E4M3, as far as they come 32 at a time, none of which is NaN; returns how many.
static inline int64_t load_e4m3(const uint8_t* from, int64_t count, float* to) {
  const __m256i magnitude = _mm256_set1_epi8(127);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(load_vector(from + i), magnitude), magnitude);
    if (!_mm256_testz_si256(nan, nan)) break;
#pragma GCC unroll 4
    for (int64_t at = i; at < i + 32; at += 8) _mm256_storeu_ps(to + at, load_finite_e4m3(from + at));
  }
  return i;
}

// 8 values from `first` on, as fp32.
HFQ_INLINE __m256 load_floats(const void* base, int dtype, int64_t first) {
  const char* from = static_cast<const char*>(base) + first * element_size(dtype);
  if (dtype == F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  if (dtype == BF16 || dtype == F16) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return dtype == F16 ? _mm256_cvtph_ps(words) : as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  const __m256i nan = _mm256_set1_epi32(0x7fc00000);
  if (dtype == E8M0) {
    const __m256i value = _mm256_max_epi32(_mm256_slli_epi32(bits, 23), _mm256_set1_epi32(0x00400000));
    return as_float(_mm256_blendv_epi8(value, nan, _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(255))));
  }
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(127));
  const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(127));
  return _mm256_blendv_ps(load_finite_e4m3(from), as_float(nan), as_float(is_nan));
}

static inline void load_floats(const void* base, int dtype, int64_t first, int64_t count, float* to) {
  int64_t i = 0;
  if (dtype == E4M3) i = load_e4m3(static_cast<const uint8_t*>(base) + first, count, to);
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, load_floats(base, dtype, first + i));
  for (; i < count; ++i) to[i] = load_as_float(base, dtype, first + i);
}

// Bytes without a sign.
static inline void load_floats(const uint8_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i)));
    _mm256_storeu_ps(to + i, _mm256_cvtepi32_ps(bytes));
  }
  for (; i < count; ++i) to[i] = from[i];
}

// 8 values as bf16 in the upper half of each element, half to even; NaN stays NaN.
HFQ_INLINE __m256i round_to_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}

// 16 values to y.
HFQ_INLINE void store_floats(void* base, int dtype, int64_t first, __m256 a, __m256 b) {
  if (dtype == F32) {
    _mm256_storeu_ps(static_cast<float*>(base) + first, a);
    _mm256_storeu_ps(static_cast<float*>(base) + first + 8, b);
    return;
  }
  __m256i words;
  if (dtype == F16) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    words = _mm256_set_m128i(_mm256_cvtps_ph(b, nearest), _mm256_cvtps_ph(a, nearest));
  } else {  // packed within 128 bits
    const __m256i upper = _mm256_packus_epi32(_mm256_srli_epi32(round_to_bf16(a), 16), _mm256_srli_epi32(round_to_bf16(b), 16));
    words = _mm256_permute4x64_epi64(upper, 0xD8);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(base) + first), words);
}

static inline void store_floats(void* base, int dtype, int64_t first, int64_t count, const float* from) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    store_floats(base, dtype, first + i, _mm256_loadu_ps(from + i), _mm256_loadu_ps(from + i + 8));
  for (; i < count; ++i) store_float(base, dtype, first + i, from[i]);
}

}  // namespace HFQ_AVX2
}  // namespace hfq
