// x, brought into the order in which a decoder delivers the codes; its row scales and the sums of its groups.
#pragma once

#include "avx512_math.h"

namespace hfq {
namespace avx512 {

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
  const float* row_scale;     // [rows] or null
};

// The order of one block as a gather from natural order.
template <class C>
struct Order {
  static constexpr int PER_VEC = 64 / C::X_BYTES;
  alignas(64) uint16_t from[vecs<C>()][PER_VEC];

  Order() {
    for (int j = 0; j < vecs<C>(); ++j)
      for (int e = 0; e < PER_VEC; ++e) from[j][e] = static_cast<uint16_t>(source_of<C>(j, e));
  }
};

HFQ_INLINE float row_amax(const void* x, int dtype, int64_t K) {
  __m512 amax = _mm512_setzero_ps();
  __mmask16 nan = 0;
  for (int64_t k = 0; k < K; k += 16) {
    const __m512 value = load_x(x, dtype, k, K - k);
    nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    amax = _mm512_max_ps(amax, _mm512_abs_ps(value));
  }
  return nan ? bits_to_float(0x7fc00000u) : _mm512_reduce_max_ps(amax);
}

// 16 values -> int8 codes in the low bytes of 32-bit lanes, clamped to +-127 and rounded half to even.
HFQ_INLINE __m128i int8_codes(__m512 value, __m512 scale) {
  const __m512 limit = _mm512_set1_ps(127.0f);
  __m512 q = _mm512_div_ps(value, scale);
  q = _mm512_max_ps(_mm512_min_ps(q, limit), _mm512_set1_ps(-127.0f));
  return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(q));
}

// One row, in `dtype`. `natural` has room for a padded row of X_BYTES elements.
template <class C>
static void pack_row(const Product& p, const Order<C>& order, const void* x, int dtype, float scale, char* natural,
                     char* out) {
  using D = typename C::Decoder;
  const int64_t blocks = ceil_div(p.K, D::BLOCK);
  const __m512 scales = _mm512_set1_ps(scale);
  for (int64_t k = 0; k < blocks * D::BLOCK; k += 16) {
    const __m512 value = load_x(x, dtype, k, p.K - k);
    if (C::INTEGER) {
      const __m128i codes = dtype == INT8 ? _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(value))
                                          : int8_codes(value, scales);
      const __mmask16 inside = p.K - k >= 16 ? 0xffff : p.K > k ? static_cast<__mmask16>((1u << (p.K - k)) - 1) : 0;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(natural + k), _mm_maskz_mov_epi8(inside, codes));
    } else if (C::X_BYTES == 2) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(natural + 2 * k), to_bf16(value));
    } else {
      _mm512_storeu_ps(natural + 4 * k, value);
    }
  }
  constexpr int PER_VEC = Order<C>::PER_VEC;
  for (int64_t b = 0; b < blocks; ++b) {
    const char* block = natural + b * D::BLOCK * C::X_BYTES;
    char* target = out + b * vecs<C>() * 64;
    if (C::X_BYTES == 1) {
      const __m512i z0 = _mm512_loadu_si512(block);
      const __m512i z1 = D::BLOCK > 64 ? _mm512_loadu_si512(block + 64) : z0;
      for (int j = 0; j < vecs<C>(); ++j) {
        const __m512i index =
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(_mm512_load_si512(order.from[j]))),
                               _mm512_cvtepi16_epi8(_mm512_load_si512(order.from[j] + PER_VEC / 2)), 1);
        _mm512_storeu_si512(target + 64 * j, _mm512_permutex2var_epi8(z0, index, z1));
      }
    } else if (C::X_BYTES == 2) {
      const uint16_t* words = reinterpret_cast<const uint16_t*>(block);
      const __m512i z0 = _mm512_loadu_si512(words);
      const __m512i z1 = D::BLOCK > 32 ? _mm512_loadu_si512(words + 32) : z0;
      const __m512i z2 = D::BLOCK > 64 ? _mm512_loadu_si512(words + 64) : z0;
      const __m512i z3 = D::BLOCK > 64 ? _mm512_loadu_si512(words + 96) : z0;
      for (int j = 0; j < vecs<C>(); ++j) {  // bit 6 of an index chooses the second pair
        const __m512i index = _mm512_load_si512(order.from[j]);
        __m512i value = _mm512_permutex2var_epi16(z0, index, z1);
        if (D::BLOCK > 64) {
          const __mmask32 second = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
          value = _mm512_mask_mov_epi16(value, second, _mm512_permutex2var_epi16(z2, index, z3));
        }
        _mm512_storeu_si512(target + 64 * j, value);
      }
    } else {
      for (int j = 0; j < vecs<C>(); ++j) {
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

// The sums of one row of packed codes.
template <class C>
static void sum_lanes(const Product& p, Grouping grouping, const LaneGroups& lanes, const char* packed,
                      int32_t* lane_sums, int32_t* group_sums) {
  using D = typename C::Decoder;
  const int64_t blocks = ceil_div(p.K, D::BLOCK);
  const int64_t per_unit = grouping == ONE_GROUP ? blocks : grouping == WHOLE_BLOCKS ? p.group_size / D::BLOCK : 1;
  const int64_t run = p.group_size * 16 / D::BLOCK;  // lanes of a group within a block
  const bool in_runs = D::BLOCK % p.group_size == 0 && (run == 2 || run == 4 || run == 8);
  const __m512i ones = _mm512_set1_epi8(1), factor = _mm512_set1_epi32(p.zero == nullptr ? -C::OFFSET : -1);
  for (int64_t g = 0; g < p.groups; ++g) group_sums[g] = 0;
  for (int64_t unit = 0; unit * per_unit < blocks; ++unit) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t b = unit * per_unit; b < min64((unit + 1) * per_unit, blocks); ++b)
      for (int j = 0; j < vecs<C>(); ++j) sum = C::dot(sum, _mm512_loadu_si512(packed + (b * vecs<C>() + j) * 64), ones);
    sum = _mm512_mullo_epi32(sum, factor);
    int32_t* target = lane_sums + unit * 16;
    _mm512_storeu_si512(target, sum);
    if (grouping != WITHIN_BLOCK) {
      group_sums[unit] = _mm512_reduce_add_epi32(sum);
    } else if (in_runs) {
      const int64_t first = unit * (16 / run), count = min64(16 / run, p.groups - first);
      _mm512_mask_storeu_epi32(group_sums + first, static_cast<__mmask16>((1u << count) - 1), sum_runs(sum, run));
    } else {
      for (int lane = 0; lane < 16; ++lane)
        group_sums[min64(lanes.first[unit] + lanes.relative[16 * unit + lane], p.groups - 1)] += target[lane];
    }
  }
}

}  // namespace avx512
}  // namespace hfq
