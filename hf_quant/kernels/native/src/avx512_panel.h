// Rows of x with a panel, whose lanes are rows of the weight: with broadcast pairs (quadruples) of x, six rows of x and 24 sums
// at a time, or with tiles of x by matrix units. Panels of all codes are multiplied by the same code.
#pragma once

#include "avx512_dot.h"
#include "avx512_matrix.h"

namespace hfq {
namespace HFQ_AVX512 {

constexpr int kPanelBytes = 65536;   // what a panel takes at most: it stays in the L2 cache
constexpr int kTileRows = 6;         // rows of x
constexpr int64_t kStretch = 8;      // steps between two times that codes are prefetched

// 16 vectors of 16 lanes, transposed in place.
HFQ_INLINE void transpose(__m512i (&a)[16]) {
  __m512i b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88);
    a[8 + i] = _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd);
    a[4 + i] = _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd);
  }
}

// A stretch of lanes (16 to a block) that share a scale.
struct Run {
  int64_t first, last;  // lanes from the start of the panel's K range
  int64_t group;
  bool starts;  // the group begins here
};

// Scales (and zero points) of the panel's rows, [runs, kPanel]: runs are groups one after the other, so 16 groups of 16
// rows at a time are converted and transposed.
static void load_factors(const Product& p, const Weight& weight, int64_t n, const Run* runs, int num_runs, float* scales,
                         int32_t* zeros) {
  alignas(64) float in_rows[16][kScalesAtOnce];
  for (int64_t r = 0; r < kPanel; r += 16) {
    for (int i = 0; i < num_runs; i += 16) {
      const int64_t count = min64(num_runs - i, 16);
      __m512i scale[16], zero[16];
      for (int row = 0; row < 16; ++row) {
        const int64_t first = scale_of_row(p, min64(n + r + row, p.N - 1));
        if (p.groups == 1) {
          scale[row] = _mm512_castps_si512(_mm512_set1_ps(load_as_float(weight.scale, p.scale_dtype, first)));
          if (weight.zero != nullptr) zero[row] = _mm512_set1_epi32(weight.zero[first]);
          continue;
        }
        const int64_t at = first + runs[i].group;
        if (i % kScalesAtOnce == 0)
          load_scales(weight.scale, p.scale_dtype, at, min64(num_runs - i, kScalesAtOnce), in_rows[row]);
        scale[row] = _mm512_loadu_si512(in_rows[row] + i % kScalesAtOnce);
        if (weight.zero != nullptr) zero[row] = load_zeros(weight.zero, at, count);
      }
      transpose(scale);
      for (int g = 0; g < count; ++g) _mm512_store_si512(scales + (i + g) * kPanel + r, scale[g]);
      if (weight.zero == nullptr) continue;
      transpose(zero);
      for (int g = 0; g < count; ++g) _mm512_store_si512(zeros + (i + g) * kPanel + r, zero[g]);
    }
  }
}

// S: the sums; a panel consists of slices, of PARTS vectors of rows, whose lanes have `vectors` vectors each.
template <class S>
class PanelProducts {
  using Sum = typename S::Sum;

 public:
  // Vectors of rows of the panel that are multiplied at once. Two leave registers for the totals beside the sums of a
  // group: integers, of which a group of 32 is 16 steps, take 9 % less time so, but bf16 13 % more (Zen 5, M = 128).
  static constexpr int PARTS = S::INTEGER || S::FIXED ? 2 : 4;
  static constexpr int SLICE = kPanelBytes / 4 * PARTS;  // bytes
  static constexpr int PAIR = S::INTEGER ? 1 : 2;  // vectors of words and floats come in pairs: it makes stretches simpler
  static constexpr bool HAS_TILES = S::INTEGER || (S::X_BYTES == 2 && !S::FIXED);  // bytes or bf16

  // On the way the rows of the weight from `next` on, which this thread takes next, are brought into the L2 cache: 64 rows
  // at once are more streams than the CPU's prefetcher follows.
  PanelProducts(const Product& p, const Weight& weight, const PackedX& px, int vectors, int64_t next, int64_t first_x,
                int64_t count)
      : p_(p), w_(weight), px_(px), pairs_(vectors / PAIR), first_x_(first_x), count_(count) {
    ahead_ = w_.qdata + min64(next, p_.N) * p_.row_bytes;
    ahead_end_ = w_.qdata + min64(next + kPanel, p_.N) * p_.row_bytes;
    const int64_t steps = 4 / PARTS * ceil_div(p_.K, 4 / S::X_BYTES) * ceil_div(count, kTileRows);
    ahead_lines_ = ceil_div((ahead_end_ - ahead_) * kStretch, 64 * steps);
  }

  // A panel that begins `at` bytes behind the start of each row of x.
  void by_rows(int64_t at, const char* panel, const Run* runs, int num_runs, const float* scales, const int32_t* zeros,
               float* sums) {
    for (int part = 0; part < kPanel; part += 16 * PARTS, panel += SLICE) {
      for (int64_t i = 0; i < count_;) {
        const int rows = tile_rows(count_ - i);
        const char* x = px_.rows + (first_x_ + i) * px_.stride + at;
        const int64_t of_groups = (first_x_ + i) * px_.groups;
        const int32_t* x_sums = S::INTEGER ? px_.group_sums + of_groups : nullptr;
        x_steps_ = S::FIXED ? px_.steps + of_groups : nullptr;
        float* y = sums + i * kPanel + part;
        switch (rows) {
          case 1: multiply<1>(x, panel, runs, num_runs, scales + part, zeros + part, x_sums, y); break;
          case 2: multiply<2>(x, panel, runs, num_runs, scales + part, zeros + part, x_sums, y); break;
          case 3: multiply<3>(x, panel, runs, num_runs, scales + part, zeros + part, x_sums, y); break;
          case 4: multiply<4>(x, panel, runs, num_runs, scales + part, zeros + part, x_sums, y); break;
          case 5: multiply<5>(x, panel, runs, num_runs, scales + part, zeros + part, x_sums, y); break;
          default: multiply<6>(x, panel, runs, num_runs, scales + part, zeros + part, x_sums, y);
        }
        i += rows;
      }
    }
  }

  // The same by matrix units, `words` of x at once; `panels`: how many there are. What lies behind the last group is zeros.
  void by_tiles(int64_t words, int64_t panels, int64_t at, const char* panel, const Run* runs, int num_runs,
                const float* scales, float* sums) {
#if defined(HFQ_MATRIX_UNITS)
    if constexpr (HAS_TILES) {
      const int64_t lines = ceil_div(ahead_end_ - ahead_, 64), turns = panels * ceil_div(count_, 2 * kTile);
      for (int64_t i = 0; i < count_; i += 2 * kTile) {
        for (int64_t line = 0; line < ceil_div(lines, turns) && ahead_ < ahead_end_; ++line, ahead_ += 64)
          _mm_prefetch(reinterpret_cast<const char*>(ahead_), _MM_HINT_T1);
        const int64_t rows = min64(count_ - i, 2 * kTile);
        const char* x = px_.rows + (first_x_ + i) * px_.stride + at;
        for (int part = 0; part < kPanel; part += 32) {
          const char* w = panel + part / (16 * PARTS) * SLICE + part % (16 * PARTS) * 4;
          float* y = sums + i * kPanel + part;
          if (rows > kTile) {
            multiply_tiles<2>(x, w, runs, num_runs, scales + part, words, rows, y);
          } else {
            multiply_tiles<1>(x, w, runs, num_runs, scales + part, words, rows, y);
          }
        }
      }
    }
#endif
  }

  // y of the panel of row n, from its sums; `scales`: of the only group.
  void finish(int64_t n, int64_t first_y, const float* scales, const float* sums) const {
    alignas(64) float bias[kPanel] = {};
    const int64_t columns = min64(p_.N - n, kPanel);
    for (int64_t i = 0; w_.bias != nullptr && i < columns; ++i) bias[i] = load_as_float(w_.bias, p_.bias_dtype, w_.bias_first + n + i);
    for (int64_t i = 0; i < count_; ++i, sums += kPanel) {
      const __m512 factor =
          _mm512_set1_ps(px_.row_scale == nullptr ? w_.global_scale : w_.global_scale * px_.row_scale[first_x_ + i]);
      alignas(64) float rest[kPanel];
      if (p_.offsets != nullptr) {
        memset(rest, 0, sizeof rest);
        HFQ_SET::add_rest(p_, w_.expert, first_y + i, n, columns, rest);
      }
      for (int64_t at = 0; at < columns; at += 16) {
        const __mmask16 mask = static_cast<__mmask16>(first_bytes(columns - at));
        __m512 value = _mm512_load_ps(sums + at);
        if (S::INTEGER && p_.groups == 1)
          value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(value)), _mm512_load_ps(scales + at));
        __m512 added = _mm512_load_ps(bias + at);
        if (p_.offsets != nullptr) added = _mm512_add_ps(added, _mm512_load_ps(rest + at));
        store_y(p_.y, p_.y_dtype, (first_y + i) * p_.N + n + at, mask, _mm512_fmadd_ps(value, factor, added));
      }
    }
  }

 private:
  static constexpr bool KEEPS_TOTALS = PARTS == 2;

  // 13 rows as 5 + 4 + 4, not 6 + 6 + 1.
  static int tile_rows(int64_t left) {
    return left <= kTileRows ? static_cast<int>(left) : static_cast<int>(ceil_div(left, ceil_div(left, kTileRows)));
  }

  // ROWS rows of x with a slice of the panel. Inlined, GCC 12 would keep sums of integers in memory. Rows are told by two
  // addresses and a stride, all of them opaque, or it makes addresses of their own for all, more than there are registers.
  template <int ROWS>
  __attribute__((noinline)) void multiply(const char* x, const char* w, const Run* runs, int num_runs, const float* scales,
                                          const int32_t* zeros, const int32_t* x_sums, float* y) {
    const char* x3 = x + 3 * px_.stride;
    int64_t stride = px_.stride;
    const int64_t groups = px_.groups;
    const bool one_group = groups == 1, has_zeros = w_.zero != nullptr;
    __m512 totals[ROWS][PARTS];
#pragma GCC unroll 8
    for (int i = 0; KEEPS_TOTALS && i < ROWS; ++i)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; ++part) totals[i][part] = _mm512_load_ps(y + i * kPanel + 16 * part);
    for (const Run* end = runs + num_runs; runs < end; ++runs, scales += kPanel, zeros += kPanel) {
      Sum sums[ROWS][PARTS];
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; ++part) sums[i][part] = S::zero();
      if constexpr (S::INTEGER) {
        if (runs->starts) {
          const int32_t* offsets = x_sums + runs->group;
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; ++i) {
            const __m512i offset = _mm512_set1_epi32(offsets[i * groups]);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part)
              sums[i][part] = has_zeros ? _mm512_mullo_epi32(offset, _mm512_load_si512(zeros + 16 * part)) : offset;
          }
        }
      }
      int64_t steps = (runs->last - runs->first) * pairs_ * PAIR;
      while (steps > 0) {
        for (int64_t i = 0; i < ahead_lines_ && ahead_ < ahead_end_; ++i, ahead_ += 64)
          _mm_prefetch(reinterpret_cast<const char*>(ahead_), _MM_HINT_T1);
        int64_t stretch = min64(steps, kStretch);
        steps -= stretch;
        for (; stretch > 0; --stretch, x += 4, x3 += 4, w += PARTS * 64) {
          asm("" : "+r"(x), "+r"(x3), "+r"(stride));
          __m512i values[PARTS];
#pragma GCC unroll 4
          for (int part = 0; part < PARTS; ++part) values[part] = _mm512_load_si512(w + part * 64);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; ++i) {
            int32_t word;
            memcpy(&word, i < 3 ? x + i * stride : x3 + (i - 3) * stride, 4);
            const __m512i pair = _mm512_set1_epi32(word);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) sums[i][part] = S::dot(sums[i][part], pair, values[part]);
          }
        }
      }
      if (!KEEPS_TOTALS) asm volatile("" : : : "memory");  // or GCC 12 would keep them in two places
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; ++part) {
        const __m512 scale = _mm512_load_ps(scales + 16 * part);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          float* target = y + i * kPanel + 16 * part;
          const __m512 own = S::FIXED ? _mm512_mul_ps(scale, _mm512_set1_ps(x_steps_[i * groups + runs->group])) : scale;
          const __m512 total = add_group(KEEPS_TOTALS ? totals[i][part] : _mm512_load_ps(target), sums[i][part], own, one_group);
          if (KEEPS_TOTALS) {
            totals[i][part] = total;
          } else {
            _mm512_store_ps(target, total);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; KEEPS_TOTALS && i < ROWS; ++i)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; ++part) _mm512_store_ps(y + i * kPanel + 16 * part, totals[i][part]);
  }

#if defined(HFQ_MATRIX_UNITS)
  // One tile of x or two, of which `rows` rows count, with 32 rows of the weight.
  template <int TILES>
  __attribute__((noinline)) void multiply_tiles(const char* x, const char* w, const Run* runs, int num_runs,
                                                const float* scales, int64_t words, int64_t rows, float* y) {
    alignas(64) int32_t found[TILES * kTile][32];
    const bool one_group = px_.groups == 1;
    const int64_t vectors = pairs_ * PAIR;
    for (const Run* end = runs + num_runs; runs < end; ++runs, scales += kPanel) {
      HFQ_ZERO_TILE(0);
      HFQ_ZERO_TILE(1);
      HFQ_ZERO_TILE(2);
      HFQ_ZERO_TILE(3);
      for (int64_t word = runs->first * vectors; word < runs->last * vectors; word += words) {
        const char *own_x = x + word * 4, *own_w = w + word * PARTS * 64;
        HFQ_LOAD_TILE(4, own_x, px_.stride);
        HFQ_LOAD_TILE(6, own_w, int64_t{PARTS * 64});
        HFQ_LOAD_TILE(7, own_w + 64, int64_t{PARTS * 64});
        if (TILES == 2) HFQ_LOAD_TILE(5, own_x + kTile * px_.stride, px_.stride);
        if constexpr (S::INTEGER) {
          HFQ_MULTIPLY_BYTES(0, 4, 6);
          HFQ_MULTIPLY_BYTES(1, 4, 7);
          if (TILES == 2) HFQ_MULTIPLY_BYTES(2, 5, 6);
          if (TILES == 2) HFQ_MULTIPLY_BYTES(3, 5, 7);
        } else {
          HFQ_MULTIPLY_BF16(0, 4, 6);
          HFQ_MULTIPLY_BF16(1, 4, 7);
          if (TILES == 2) HFQ_MULTIPLY_BF16(2, 5, 6);
          if (TILES == 2) HFQ_MULTIPLY_BF16(3, 5, 7);
        }
      }
      HFQ_STORE_TILE(0, found[0], sizeof(found[0]));
      HFQ_STORE_TILE(1, found[0] + 16, sizeof(found[0]));
      if (TILES == 2) HFQ_STORE_TILE(2, found[TILES * kTile - kTile], sizeof(found[0]));
      if (TILES == 2) HFQ_STORE_TILE(3, found[TILES * kTile - kTile] + 16, sizeof(found[0]));
      const __m512 first = _mm512_load_ps(scales), second = _mm512_load_ps(scales + 16);
      for (int64_t i = 0; i < rows; ++i) {
        Sum sums[2];
        memcpy(sums, found[i], sizeof(sums));
        float* target = y + i * kPanel;
        _mm512_store_ps(target, add_group(_mm512_load_ps(target), sums[0], first, one_group));
        _mm512_store_ps(target + 16, add_group(_mm512_load_ps(target + 16), sums[1], second, one_group));
      }
    }
  }
#endif

  HFQ_INLINE __m512 add_group(__m512 total, Sum sum, __m512 scale, bool one_group) {
    if constexpr (S::INTEGER) {  // those of one group stay integers, in the place of floats, until all columns are added
      if (one_group) return as_float(_mm512_add_epi32(_mm512_castps_si512(total), sum));
    }
    return _mm512_fmadd_ps(S::to_float(sum), scale, total);
  }

  const Product& p_;
  const Weight& w_;
  const PackedX& px_;
  const int64_t pairs_, first_x_, count_;
  const float* x_steps_;  // of the rows of x that are multiplied, if they are in fixed point
  const uint8_t *ahead_, *ahead_end_;
  int64_t ahead_lines_;  // of 64 bytes, per stretch of steps
};

}  // namespace HFQ_AVX512
}  // namespace hfq
