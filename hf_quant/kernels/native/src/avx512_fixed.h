// Rows of x in bf16 times codes that are integers: x in fixed point of 16 bits, as two bytes, with a power of two for each
// lane of 32 bits in a block of codes. What lies within 2**-7 of the largest value of its lane is exact, the rest to 2**-15
// of that; the sums of a lane are exact. Codes need not become words, and Intel multiplies two bytes faster than one bf16.
// Levels that are no integers become words, and meet x as words.
#pragma once

#include <atomic>

#include "avx512_dot.h"
#include "avx512_fixed_decode.h"

namespace hfq {
namespace HFQ_AVX512 {

// GCC 12 would load again for each use, and there are two loads a cycle.
HFQ_INLINE __m512i load_once(const void* from) {
  __m512i value = _mm512_loadu_si512(from);
  asm("" : "+v"(value));
  return value;
}

// x of a block: for each vector of codes the high bytes and the low ones, or the words; then of each lane the sum, times
// -OFFSET or with zero points times -1, if codes are unsigned, and the value of 1.
template <class F>
struct FixedBlock {
  static constexpr int64_t SUMS = F::VECS * (F::WORDS ? 64 : 128), UNITS = SUMS + (F::WORDS ? 0 : 64), BYTES = UNITS + 64;
};

// The larger of each value and the other ones of its lane, of 4, 8 or 16 neighbours.
template <int LANE>
HFQ_INLINE __m512i largest_of_lane(__m512i v) {
  v = _mm512_max_epu32(v, _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(0xB1)));
  v = _mm512_max_epu32(v, _mm512_shuffle_epi32(v, static_cast<_MM_PERM_ENUM>(0x4E)));
  if (LANE > 4) v = _mm512_max_epu32(v, _mm512_shuffle_i32x4(v, v, 0xB1));
  if (LANE > 8) v = _mm512_max_epu32(v, _mm512_shuffle_i32x4(v, v, 0x4E));
  return v;
}

// Words 0, 1, 2 and 3 of each four neighbours to four vectors, from the 128 words at `from`.
HFQ_INLINE void deal_words(const int16_t* from, char* to) {
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 64 * j + 16 * i),
                       _mm512_cvtepi64_epi16(_mm512_srli_epi64(_mm512_loadu_si512(from + 32 * i), 16 * j)));
}

// A row of x, in `dtype`. `factor` of the sums; `unit`: from the level of a code to the next.
template <class F>
static void pack_fixed(const Product& p, const void* x, int dtype, int32_t factor, float unit, char* to) {
  constexpr int LANE = F::LANE;
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), infinite = _mm512_set1_epi32(0x7f800000);
  for (int64_t k = 0; k < p.K; k += F::BLOCK, to += FixedBlock<F>::BYTES) {
    alignas(64) char high[F::BLOCK], low[F::BLOCK];
    alignas(64) int16_t words[F::BLOCK];
    float* units = reinterpret_cast<float*>(to + FixedBlock<F>::UNITS);
    for (int at = 0; at < F::BLOCK; at += 16) {
      const __m512 values = load_x(x, dtype, k + at, p.K - k - at);
      const __m512i bits = _mm512_castps_si512(values);
      // As integers magnitudes have the order of their values. From 255/256 of a power of two on the sum has the next
      // one's exponent, because the high byte of 16 bits would not fit a signed byte.
      const __m512i largest = largest_of_lane<LANE>(_mm512_and_si512(bits, magnitude));
      __m512i exponent = _mm512_srli_epi32(_mm512_add_epi32(largest, _mm512_set1_epi32(1 << 16)), 23);
      exponent = _mm512_max_epu32(exponent, _mm512_set1_epi32(16));
      exponent = _mm512_mask_mov_epi32(exponent, _mm512_testn_epi32_mask(largest, largest), _mm512_set1_epi32(127 + 14));
      const __m512i inverse = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254 + 14), exponent), 23);
      __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(values, as_float(inverse)));
      value = _mm512_min_epi32(value, _mm512_set1_epi32(32639));  // what rounding may exceed
      __m512 own = as_float(_mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(14)), 23));
      if (const __mmask16 bad = _mm512_cmpge_epu32_mask(largest, infinite)) {  // as `keep_infinite` does
        const __mmask16 kept = bad & _mm512_cmpeq_epu32_mask(_mm512_and_si512(bits, magnitude), infinite);
        const __m512i sign = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(1));
        value = _mm512_mask_mov_epi32(value, bad, _mm512_maskz_mov_epi32(kept, sign));
        own = _mm512_mask_mov_ps(own, bad, as_float(largest));
      }
      if (F::WORDS) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(words + at), _mm512_cvtepi32_epi16(value));
      } else {
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
        _mm_store_si128(reinterpret_cast<__m128i*>(high + at), _mm512_cvtepi32_epi8(upper));
        _mm_store_si128(reinterpret_cast<__m128i*>(low + at), _mm512_cvtepi32_epi8(value));
      }
      constexpr __mmask16 FIRST = LANE == 4 ? 0x1111 : LANE == 8 ? 0x0101 : 0x0001;  // one of each lane
      _mm512_mask_compressstoreu_ps(units + at / LANE, FIRST, _mm512_mul_ps(own, _mm512_set1_ps(unit)));
    }
    if constexpr (F::WORDS) {
      deal_words(words, to);
      continue;
    }
    __m512i parts[2][F::VECS], sums[2];
    deal_bytes<F::VECS>(high, parts[0]);
    deal_bytes<F::VECS>(low, parts[1]);
    for (int part = 0; part < 2; ++part) {
      sums[part] = _mm512_setzero_si512();
      for (int j = 0; j < F::VECS; ++j) {
        _mm512_storeu_si512(to + (2 * j + part) * 64, parts[part][j]);
        sums[part] = dot_bytes(sums[part], parts[part][j], _mm512_set1_epi8(1));
      }
    }
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]);
    _mm512_storeu_si512(to + FixedBlock<F>::SUMS, _mm512_mullo_epi32(sum, _mm512_set1_epi32(factor)));
  }
}

// The sums of four vectors, each added up in the order of _mm512_reduce_add_ps: `reduce_add` has another one, by which a row
// would differ in its last bits from what it is beside fewer others.
HFQ_INLINE __m128 sums_of_four(const __m512& a, const __m512& b, const __m512& c, const __m512& d) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
  __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4E));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xB1));
  return _mm512_castps512_ps128(
      _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), all));
}

// R rows of the weight, `gap` bytes apart, with MB rows of x, `stride` bytes apart.
template <class F, int R, int MB, bool ZEROS>
struct FixedRows {
  const Product& p;
  const F& decoder;
  const LaneGroups& lanes;
  const uint8_t* w;
  int64_t gap;
  const char* x;
  int64_t stride;
  const float* scales;  // those of row r start r * room floats on
  int64_t room;
  const uint8_t* zeros;  // those of row r start r * zero_gap on
  int64_t zero_gap;

  HFQ_METHOD void block(Masks m, int64_t b, int64_t ahead, __m512 (&y)[R][MB]) const {
    const __m512i relative = _mm512_loadu_si512(lanes.relative + 16 * b);
    const int64_t g = lanes.first[b];
    __m512i codes[R][F::VECS], zero[R];
    __m512 scale[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint8_t* from = w + r * gap + b * F::BYTES;
      _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T1);
      if (F::BYTES > 64) _mm_prefetch(reinterpret_cast<const char*>(from) + ahead + 64, _MM_HINT_T1);
      decoder.codes(from, m, codes[r]);
      scale[r] = _mm512_permutexvar_ps(relative, _mm512_loadu_ps(scales + r * room + g));
      if (ZEROS) zero[r] = _mm512_permutexvar_epi32(relative, load_zeros(zeros + r * zero_gap, g, p.groups - g));
    }
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) {
      const char* own = x + i * stride + b * FixedBlock<F>::BYTES;
      const __m512 unit = as_float(load_once(own + FixedBlock<F>::UNITS));
      if constexpr (F::WORDS) {
        __m512i sum[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < F::VECS; ++j) {
          const __m512i words = load_once(own + 64 * j);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sum[r] = dot_words(sum[r], words, codes[r][j]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          y[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_mul_ps(unit, scale[r]), y[r][i]);
        continue;
      }
      const __m512i sums = load_once(own + FixedBlock<F>::SUMS);
      __m512i high[R], low[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        high[r] = _mm512_setzero_si512();
        low[r] = ZEROS ? _mm512_mullo_epi32(sums, zero[r]) : sums;
      }
#pragma GCC unroll 4
      for (int j = 0; j < F::VECS; ++j) {
        const __m512i upper = load_once(own + 128 * j), lower = load_once(own + 128 * j + 64);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          high[r] = dot_bytes(high[r], upper, codes[r][j]);
          low[r] = dot_bytes(low[r], lower, codes[r][j]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
        y[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(unit, scale[r]), y[r][i]);
      }
    }
  }

  // out[r][i] = the dot product of row r with row i of x, scaled.
  HFQ_METHOD void run(float (&out)[R][MB]) const {
    const Masks all = {~__mmask64{0}, ~__mmask64{0}};
    const int64_t blocks = ceil_div(p.K, F::BLOCK), full = min64(p.row_bytes / F::BYTES, blocks);
    // What is asked for in advance must not be what a neighbour reads.
    const int64_t ahead = R * p.row_bytes > kAhead ? R * p.row_bytes : kAhead;
    __m512 y[R][MB];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) y[r][i] = _mm512_setzero_ps();
    for (int64_t b = 0; b < full; ++b) block(all, b, ahead, y);
    if (full < blocks) block(masks_of(p.row_bytes - full * F::BYTES), full, ahead, y);
    if constexpr (R == 4 && MB == 1) {
      _mm_storeu_ps(out[0], sums_of_four(y[0][0], y[1][0], y[2][0], y[3][0]));
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < MB; ++i) out[r][i] = _mm512_reduce_add_ps(y[r][i]);
    }
  }
};

// Up to which number of rows of x fixed point wins over other ways: any on Intel's CPUs. On Zen 5 two dot products of bytes
// take as long as one of bf16: there, codes of 2 and 3 bits win because they become bytes sooner than bf16. On Zen 4 bf16
// takes twice as long, so that one row of codes of 4 and 8 bits wins, too. scripts/bench_cpu.py linear measures it.
static int64_t max_fixed_rows(int layout) {
  const Maker maker = maker_of_cpu();
  if (maker == INTEL) return int64_t{1} << 62;
  return layout == PACKED2 ? 16 : layout == PACKED3 ? (maker == ZEN4 ? 6 : 12) : maker == ZEN4 ? 1 : 0;
}

constexpr int64_t kFixedChunk = 64;       // rows of x that are packed at once
constexpr int64_t kFixedBytes = 1 << 20;  // of them: they stay in the L2 cache

template <class F, bool ZEROS>
class FixedMatmul {
 public:
  // `offset`: the code of zero; `unit`: the difference of the levels of two neighbouring codes.
  FixedMatmul(const Product& p, int32_t offset, float unit) : p_(p), decoder_(p), offset_(offset), unit_(unit) {}
  // Of words.
  explicit FixedMatmul(const Product& p) : p_(p), decoder_(p), offset_(0), unit_(decoder_.unit()) {}

  bool run() {
    const int64_t blocks = ceil_div(p_.K, F::BLOCK);
    stride_ = blocks * FixedBlock<F>::BYTES + 64;
    const int64_t chunk = min64(p_.M, min64(kFixedChunk, max64(kFixedBytes / stride_, 4)));
    // packed rows | lane groups | segments
    const int64_t rows_bytes = chunk * stride_, lane_bytes = ceil_div(blocks * 68, 64) * 64;
    char* memory = static_cast<char*>(thread_scratch(
        0, static_cast<size_t>(rows_bytes + lane_bytes) + static_cast<size_t>(chunk) * sizeof(Segment)));
    if (memory == nullptr) return false;
    rows_ = memory;
    int32_t *relative = reinterpret_cast<int32_t*>(memory + rows_bytes), *first = relative + 16 * blocks;
    lanes_ = {relative, first};
    for (int64_t b = 0; b < blocks; ++b) {
      first[b] = static_cast<int32_t>(group_of(b * F::BLOCK));
      for (int lane = 0; lane < 16; ++lane)
        relative[16 * b + lane] = static_cast<int32_t>(group_of(b * F::BLOCK + F::LANE * lane)) - first[b];
    }
    segments_ = reinterpret_cast<Segment*>(memory + rows_bytes + lane_bytes);
    for (int64_t first = 0; first < p_.M; first += chunk) {
      const int64_t count = min64(chunk, p_.M - first);
      if (!pack(first, count) || !multiply(first, count, split_by_experts(p_, first, count, segments_))) return false;
    }
    return true;
  }

 private:
  int64_t group_of(int64_t k) const { return p_.groups == 1 ? 0 : min64(k / p_.group_size, p_.groups - 1); }

  bool pack(int64_t first, int64_t count) const {
    std::atomic<bool> ok{true};
    parallel_for(count, count * p_.K < (1 << 16) ? 1 : p_.threads, [&](int64_t i) {
      const void* x = static_cast<const char*>(p_.x) + (first + i) * p_.x_stride * element_size(p_.x_dtype);
      int dtype = p_.x_dtype;
      if (p_.block != 0) {
        float* values = static_cast<float*>(thread_scratch(1, static_cast<size_t>(p_.K) * 4));
        if (values == nullptr) {
          ok = false;
          return;
        }
        HFQ_SET::transform_row(x, dtype, p_.K, p_.diagonal, p_.block, values);
        x = values;
        dtype = F32;
      }
      pack_fixed<F>(p_, x, dtype, ZEROS ? -1 : -offset_, unit_, rows_ + i * stride_);
    });
    return ok;
  }

  bool multiply(int64_t first, int64_t count, int64_t num_segments) const {
    const int64_t panels = ceil_div(p_.N, kPanel);
    std::atomic<bool> ok{true};
    parallel_for(num_segments * panels, threads_of(p_, count, num_segments), [&](int64_t task) {
      const int64_t n = task % panels * kPanel;
      if (!multiply(segments_[task / panels], first, n, min64(n + kPanel, p_.N))) ok = false;
    });
    return ok;
  }

  // Rows n..end of the weight, two or four at a time, with the rows of a segment.
  bool multiply(const Segment& s, int64_t first, int64_t n, int64_t end) const {
    float* memory = static_cast<float*>(thread_scratch(2, static_cast<size_t>(RowScales::floats(p_)) * 4));
    if (memory == nullptr) return false;
    const RowScales scales(p_, s.expert * p_.expert_scale, n, end, memory);
    float sums[4][kPanel];
    for (int64_t i = 0; i < s.count; i += 4) {
      const int64_t count = min64(s.count - i, 4);
      int64_t row = n;
      // The sums of short rows are added up together; x of long ones does not stay in the L1 cache.
      for (; count == 1 && p_.scale_rows == 1 && row + 4 <= end; row += 4) {
        scales.load(row, 4);
        rows<4, 1>(s, row, i, scales, sums, row - n);
      }
      for (; row < end; row += 2) {
        scales.load(row, end - row > 1 ? 2 : 1);
        switch (count + 4 * (min64(end - row, 2) - 1)) {
          case 1: rows<1, 1>(s, row, i, scales, sums, row - n); break;
          case 2: rows<1, 2>(s, row, i, scales, sums, row - n); break;
          case 3: rows<1, 3>(s, row, i, scales, sums, row - n); break;
          case 4: rows<1, 4>(s, row, i, scales, sums, row - n); break;
          case 5: rows<2, 1>(s, row, i, scales, sums, row - n); break;
          case 6: rows<2, 2>(s, row, i, scales, sums, row - n); break;
          case 7: rows<2, 3>(s, row, i, scales, sums, row - n); break;
          default: rows<2, 4>(s, row, i, scales, sums, row - n);
        }
      }
      for (int64_t j = 0; j < count; ++j) {
        const int64_t y = first + s.first + i + j;
        float factor = p_.global_scale == nullptr ? 1.0f : p_.global_scale[s.expert];
        if (p_.row_scale != nullptr) factor *= p_.row_scale[y];
        store_column(p_, sums[j], factor, s.expert * p_.expert_bias, s.expert, n, end, y);
      }
    }
    return true;
  }

  template <int R, int MB>
  void rows(const Segment& s, int64_t n, int64_t i, const RowScales& scales, float (&sums)[4][kPanel],
            int64_t at) const {
    const int64_t scale = scale_of_row(p_, n);
    const FixedRows<F, R, MB, ZEROS> all{p_,
                                         decoder_,
                                         lanes_,
                                         p_.qdata + s.expert * p_.expert_qdata + n * p_.row_bytes,
                                         p_.row_bytes,
                                         rows_ + (s.first + i) * stride_,
                                         stride_,
                                         scales.of(n),
                                         scales.gap(1),
                                         ZEROS ? p_.zero + s.expert * p_.expert_scale + scale : nullptr,
                                         scale_of_row(p_, n + (R > 1)) - scale};
    float out[R][MB];
    all.run(out);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < MB; ++j) sums[j][at + r] = out[r][j];
  }

  const Product& p_;
  const F decoder_;
  const int32_t offset_;
  const float unit_;
  LaneGroups lanes_{};
  char* rows_ = nullptr;
  int64_t stride_ = 0;
  Segment* segments_ = nullptr;
};

template <class F>
static bool fixed_codes(const Product& p) {
  return p.zero == nullptr ? FixedMatmul<F, false>(p, F::COUNT / 2, 1.0f).run() : FixedMatmul<F, true>(p, 0, 1.0f).run();
}

// The function that computes a product in fixed point, null if it is to be computed otherwise.
using FixedProduct = bool (*)(const Product&);

// Rows of x beyond which panels win.
static int64_t most_fixed_rows(const Product& p) { return 8 * (p.ends == nullptr ? 1 : p.experts); }

// Of levels as words: bf16 takes as long on other CPUs. Panels take groups of few columns only.
template <class D>
static FixedProduct fixed_levels(const Product& p) {
  if (maker_of_cpu() != INTEL || (p.M > most_fixed_rows(p) && ByFixed<LevelWords<D>>::group_size(p) == 0)) return nullptr;
  return [](const Product& p) { return FixedMatmul<FixedLevels<D>, false>(p).run(); };
}

static FixedProduct fixed_product(const Product& p) {
  if (p.compute == BY_INT8 || p.x_dtype != BF16 || p.M > max_fixed_rows(p.layout)) return nullptr;
  switch (p.layout) {
    case PACKED2: return has_integers(p) ? fixed_codes<Fixed2> : nullptr;
    case PACKED3: return has_integers(p) ? fixed_codes<Fixed3> : nullptr;
    case PACKED4:
      if (has_integers(p)) return fixed_codes<Fixed4>;
      if (p.zero != nullptr) return nullptr;
      if (!Fixed4Halves::fits(p)) return fixed_levels<Packed4>(p);
      return [](const Product& p) { return FixedMatmul<Fixed4Halves, false>(p, Fixed4Halves::OFFSET, 0.5f).run(); };
    case PACKED6:
#if HFQ_VBMI
      if (Fixed6::fits(p) && p.M <= most_fixed_rows(p))
        return [](const Product& p) { return FixedMatmul<Fixed6, false>(p, Fixed6::OFFSET, Fixed6::UNIT).run(); };
#endif
      return fixed_levels<Packed6>(p);
    case BYTES_INT:
      if (p.zero != nullptr) return nullptr;
      return [](const Product& p) { return FixedMatmul<Fixed8, false>(p, 128, 1.0f).run(); };
    default: return nullptr;
  }
}

}  // namespace HFQ_AVX512
}  // namespace hfq
