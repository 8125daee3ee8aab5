// x, brought into the order in which a decoder delivers the codes; its row scales and the sums of its groups.
#pragma once

#include "avx512_math.h"

namespace hfq {
namespace HFQ_AVX512 {

// How the groups of a row, which share a scale, lie in the blocks of a decoder.
enum Grouping { ONE_GROUP, WHOLE_BLOCKS, WITHIN_BLOCK, WITHIN_BLOCK_ZEROS };  // the last: lanes have zero points

// For groups smaller than a block or that straddle them.
struct LaneGroups {
  const int32_t* relative;  // [blocks, 16]: group of each lane, relative to the block's first
  const int32_t* first;     // [blocks]
};

// Rows of x ready to multiply. Rows are 64 bytes longer than they need be: at a power of two apart they would meet in
// the same set of the cache. For products of integers, also sums of x, times -OFFSET or with zero points times -1.
struct PackedX {
  const char* rows;
  int64_t stride;             // bytes
  const int32_t* lane_sums;   // [rows, units, 16] by lane; a unit is a group, or a block if groups lie within blocks
  int64_t units;
  const int32_t* group_sums;  // [rows, groups]
  const float* steps;         // of fixed point, [rows, groups]
  int64_t group_size, groups;  // of x: those of the weight, or parts of them
  const float* row_scale;     // [rows] or null
  bool in_tiles;              // there is memory for another tile behind the last row
};

// The order of one block as a gather from natural order: vector by vector for rows of x that meet rows of codes, and lane by
// lane for those that meet panels, whose steps then read one word behind the other.
template <class C>
struct Order {
  static constexpr int PER_VEC = 64 / C::X_BYTES, PER_WORD = 4 / C::X_BYTES, V = vecs<C>();
  alignas(64) uint16_t from[V][PER_VEC];
  const BytePlaces in_lanes;  // the same of each vector

  Order() : in_lanes(places()) {
    for (int j = 0; j < V; ++j)
      for (int e = 0; e < PER_VEC; ++e) from[j][e] = static_cast<uint16_t>(source_of<C>(j, e));
  }
  static BytePlaces places() {
    uint8_t bytes[64];
    for (int byte = 0; byte < 64; ++byte) {
      const int lane = byte / 4 / V, source = source_of<C>(byte / 4 % V, lane * PER_WORD + byte % 4 / C::X_BYTES);
      bytes[byte] = static_cast<uint8_t>(source * C::X_BYTES + byte % C::X_BYTES);
    }
    return BytePlaces(bytes);
  }
};

// The largest magnitude of a row; NaN if there is one. Magnitudes of one dtype are ordered as their bits are.
HFQ_INLINE float row_amax(const void* x, int dtype, int64_t K) {
  __m512i amax = _mm512_setzero_si512();
  if (dtype == F32) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t k = 0; k < K; k += 16)
      amax = _mm512_max_epu32(amax, _mm512_and_si512(magnitude, _mm512_castps_si512(load_x(x, F32, k, K - k))));
    return bits_to_float(_mm512_reduce_max_epu32(amax));
  }
  const uint16_t* values = static_cast<const uint16_t*>(x);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 mask = static_cast<__mmask32>(first_bytes(K - k));
    amax = _mm512_max_epu16(amax, _mm512_and_si512(magnitude, _mm512_maskz_loadu_epi16(mask, values + k)));
  }
  const __m512i words = _mm512_max_epu16(_mm512_and_si512(amax, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(amax, 16));
  const uint16_t bits = static_cast<uint16_t>(_mm512_reduce_max_epu32(words));
  return dtype == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Values divided by one scale, to the bit: a product with the reciprocal and one correction (P. Markstein, "Computation of
// elementary functions on the IBM RISC System/6000 processor", 1990), or a division where that could overflow.
struct Divisor {
  __m512 scale, reciprocal;
  bool is_safe;

  // `amax`: the largest magnitude that is divided.
  HFQ_METHOD Divisor(float of, float amax)
      : scale(_mm512_set1_ps(of)), reciprocal(_mm512_set1_ps(1.0f / of)),
        is_safe(of > 1e-30f && of < 1e30f && amax < 1e30f && amax / of < 1e30f) {}
  HFQ_METHOD __m512 divide(__m512 value) const {
    if (!is_safe) return _mm512_div_ps(value, scale);
    const __m512 q = _mm512_mul_ps(value, reciprocal);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(q, scale, value), reciprocal, q);
  }
};

// 16 values -> int8 codes in 32-bit lanes, clamped to +-127 and rounded half to even.
HFQ_INLINE __m512i int8_lanes(__m512 value, const Divisor& divisor) {
  const __m512 q = _mm512_min_ps(divisor.divide(value), _mm512_set1_ps(127.0f));
  return _mm512_cvtps_epi32(_mm512_max_ps(q, _mm512_set1_ps(-127.0f)));
}

// int8 codes of a row, with zeros up to `padded`, a multiple of 64.
template <int DTYPE>
static void int8_row(const void* x, int64_t K, int64_t padded, const Divisor& divisor, char* codes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t k = 0; k < padded; k += 64) {
    __m512i lanes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int64_t at = k + 16 * i;
      const __m512 value = K - at >= 16 ? load_x(x, DTYPE, at, 16) : load_x(x, DTYPE, at, K - at);
      lanes[i] = DTYPE == INT8 ? _mm512_cvtps_epi32(value) : int8_lanes(value, divisor);
    }
    const __m512i words = _mm512_packs_epi16(_mm512_packs_epi32(lanes[0], lanes[1]), _mm512_packs_epi32(lanes[2], lanes[3]));
    const __m512i natural = _mm512_permutexvar_epi32(order, words);  // packed within 128 bits
    _mm512_mask_storeu_epi8(codes + k, first_bytes(padded - k), _mm512_maskz_mov_epi8(first_bytes(K - k), natural));
  }
}

static void int8_row(const void* x, int dtype, int64_t K, int64_t padded, const Divisor& divisor, char* codes) {
  switch (dtype) {
    case F32: return int8_row<F32>(x, K, padded, divisor, codes);
    case BF16: return int8_row<BF16>(x, K, padded, divisor, codes);
    case F16: return int8_row<F16>(x, K, padded, divisor, codes);
    default: return int8_row<INT8>(x, K, padded, divisor, codes);
  }
}

// A row in fixed point of so many bits, with zeros up to `padded`, and the value of 1 of each group, times `unit`.
static void fixed_row(const void* x, int dtype, int64_t K, int64_t padded, int64_t group_size, int bits, float unit,
                      char* words, float* steps) {
  for (int64_t k = 0; k < padded; k += group_size) {
    const int64_t count = max64(min64(group_size, K - k), 0);
    const void* from = static_cast<const char*>(x) + k * element_size(dtype);
    const FixedPoint fixed(float_to_bits(row_amax(from, dtype, count)), bits);
    const __m512 inverse = _mm512_set1_ps(fixed.inverse);
    float values[kMostFixed], kept[kMostFixed];
    if (!fixed.is_finite) {
      for (int64_t at = 0; at < count; at += 16) _mm512_storeu_ps(values + at, load_x(from, dtype, at, count - at));
      keep_infinite(values, count, kept);
    }
    for (int64_t at = 0; at < min64(group_size, padded - k); at += 16) {
      const __m512 own = fixed.is_finite ? load_x(from, dtype, at, count - at) : load_x(kept, F32, at, count - at);
      const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(own, inverse));
      // Saturated: rounding may exceed a word by 1.
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 2 * (k + at)), _mm512_cvtsepi32_epi16(value));
    }
    if (count > 0) *steps++ = unit * fixed.step;
  }
}

// `vectors` of 64 bytes from their natural order into that of lanes.
template <class C>
static void to_lanes(const Order<C>& order, const char* natural, int64_t vectors, char* out) {
  const BytePlaces places = order.in_lanes;
  for (int64_t at = 0; at < vectors * 64; at += 64)
    _mm512_storeu_si512(out + at, places.of(_mm512_loadu_si512(natural + at)));
}

// Bytes 0, 1, .. VECS - 1 of each VECS neighbours to VECS vectors, from the BLOCK bytes at `from`.
template <int VECS>
HFQ_INLINE void deal_bytes(const char* from, __m512i (&to)[VECS]) {
  for (int j = 0; j < VECS; ++j) {
    if (VECS == 1) {
      to[j] = _mm512_loadu_si512(from);
    } else if (VECS == 2) {
      const __m512i a = _mm512_srli_epi16(_mm512_loadu_si512(from), 8 * j);
      const __m512i b = _mm512_srli_epi16(_mm512_loadu_si512(from + 64), 8 * j);
      to[j] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
    } else {
      alignas(64) char bytes[64];
      for (int i = 0; i < 4; ++i)
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes + 16 * i),
                        _mm512_cvtepi32_epi8(_mm512_srli_epi32(_mm512_loadu_si512(from + 64 * i), 8 * j)));
      to[j] = _mm512_load_si512(bytes);
    }
  }
}

// One row, in `dtype`, in the order of rows or of lanes. `natural` has room for a padded row of X_BYTES elements.
template <class C>
static void pack_row(const Product& p, const Order<C>& order, bool in_lanes, const void* x, int dtype, const Divisor& divisor,
                     char* natural, char* out) {
  using D = typename C::Decoder;
  constexpr int V = vecs<C>();
  const int64_t blocks = ceil_div(p.K, D::BLOCK), padded = blocks * D::BLOCK;
  if (C::INTEGER) {
    int8_row(x, dtype, p.K, padded, divisor, natural);
  } else {
    for (int64_t k = 0; k < padded; k += 16) {
      const __m512 value = load_x(x, dtype, k, p.K - k);
      if (C::X_BYTES == 2) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(natural + 2 * k), to_bf16(value));
      } else {
        _mm512_storeu_ps(natural + 4 * k, value);
      }
    }
  }
  if (in_lanes) return to_lanes<C>(order, natural, blocks * V, out);
  for (int64_t b = 0; b < blocks; ++b) {
    const char* block = natural + b * D::BLOCK * C::X_BYTES;
    char* target = out + b * V * 64;
    if (C::X_BYTES == 1) {
      __m512i codes[V];
      deal_bytes<V>(block, codes);
      for (int j = 0; j < V; ++j) _mm512_storeu_si512(target + 64 * j, codes[j]);
    } else if (C::X_BYTES == 2) {
      const uint16_t* words = reinterpret_cast<const uint16_t*>(block);
      const __m512i z0 = _mm512_loadu_si512(words);
      const __m512i z1 = D::BLOCK > 32 ? _mm512_loadu_si512(words + 32) : z0;
      const __m512i z2 = D::BLOCK > 64 ? _mm512_loadu_si512(words + 64) : z0;
      const __m512i z3 = D::BLOCK > 64 ? _mm512_loadu_si512(words + 96) : z0;
      for (int j = 0; j < V; ++j) {  // bit 6 of an index chooses the second pair
        const __m512i index = _mm512_load_si512(order.from[j]);
        __m512i value = _mm512_permutex2var_epi16(z0, index, z1);
        if (D::BLOCK > 64) {
          const __mmask32 second = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
          value = _mm512_mask_mov_epi16(value, second, _mm512_permutex2var_epi16(z2, index, z3));
        }
        _mm512_storeu_si512(target + 64 * j, value);
      }
    } else {
      for (int j = 0; j < V; ++j) {
        const __m512i index =
            _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(order.from[j])));
        _mm512_storeu_ps(target + 64 * j, _mm512_i32gather_ps(index, block, 4));
      }
    }
  }
}

// Sums of `lanes` neighbouring lanes, 2, 4 or 8, one behind the other: the first 16 / lanes are of use.
HFQ_INLINE __m512i sum_runs(__m512i x, int64_t lanes) {
  x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
  if (lanes == 2) return _mm512_maskz_compress_epi32(0x5555, x);
  x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
  if (lanes == 4) return _mm512_maskz_compress_epi32(0x1111, x);
  x = _mm512_add_epi32(x, _mm512_shuffle_i32x4(x, x, 0xb1));
  return _mm512_maskz_compress_epi32(0x0101, x);
}

// The sums of one row of packed codes in the order of rows.
template <class C>
static void sum_lanes(const Product& p, Grouping grouping, const char* packed, int32_t* sums) {
  using D = typename C::Decoder;
  const int64_t blocks = ceil_div(p.K, D::BLOCK);
  const int64_t per_unit = grouping == ONE_GROUP ? blocks : grouping == WHOLE_BLOCKS ? p.group_size / D::BLOCK : 1;
  const __m512i ones = _mm512_set1_epi8(1), factor = _mm512_set1_epi32(p.zero == nullptr ? -C::OFFSET : -1);
  for (int64_t unit = 0; unit * per_unit < blocks; ++unit) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t b = unit * per_unit; b < min64((unit + 1) * per_unit, blocks); ++b)
      for (int j = 0; j < vecs<C>(); ++j) sum = C::dot(sum, _mm512_loadu_si512(packed + (b * vecs<C>() + j) * 64), ones);
    _mm512_storeu_si512(sums + unit * 16, _mm512_mullo_epi32(sum, factor));
  }
}

// The sums of the groups of one row of packed codes in the order of lanes, words of 4 codes: that is the order of K.
template <class C>
static void sum_groups(const Product& p, const char* packed, int32_t* sums) {
  using D = typename C::Decoder;
  const int64_t vectors = ceil_div(p.K, D::BLOCK) * vecs<C>(), words = p.groups == 1 ? vectors * 16 : p.group_size / 4;
  const __m512i ones = _mm512_set1_epi8(1), factor = _mm512_set1_epi32(p.zero == nullptr ? -C::OFFSET : -1);
  const auto sums_of_words = [&](int64_t first, int64_t end) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t v = first; v < end; ++v) sum = C::dot(sum, _mm512_loadu_si512(packed + v * 64), ones);
    return _mm512_mullo_epi32(sum, factor);
  };
  if (words % 16 == 0) {
    for (int64_t g = 0, per = words / 16; g < p.groups; ++g)
      sums[g] = _mm512_reduce_add_epi32(sums_of_words(g * per, min64((g + 1) * per, vectors)));
  } else if (words == 2 || words == 4 || words == 8) {
    for (int64_t g = 0, v = 0, per = 16 / words; g < p.groups; g += per, ++v)
      _mm512_mask_storeu_epi32(sums + g, static_cast<__mmask16>(first_bytes(min64(per, p.groups - g))),
                               sum_runs(sums_of_words(v, v + 1), words));
  } else {
    memset(sums, 0, static_cast<size_t>(p.groups) * 4);
    for (int64_t v = 0; v < vectors; ++v) {
      alignas(64) int32_t each[16];
      _mm512_store_si512(each, sums_of_words(v, v + 1));
      for (int i = 0; i < 16; ++i) sums[min64((v * 16 + i) / words, p.groups - 1)] += each[i];
    }
  }
}

}  // namespace HFQ_AVX512
}  // namespace hfq
