// Many rows of x: 64 rows of codes are decoded once into a panel whose lanes are rows of the weight, then multiplied
// with broadcast pairs (quadruples) of x, six rows of x and 24 sums at a time, or with tiles of x by matrix units.
#pragma once

#include <algorithm>
#include <optional>

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

// ZEROS: codes have zero points that are taken from them while they are decoded.
template <class C, bool ZEROS>
class Tile {
  using D = typename C::Decoder;
  using Sum = typename C::Sum;
  static constexpr int V = vecs<C>();
  // Vectors of rows of the panel that are multiplied at once. Two leave registers for the totals beside the sums of a
  // group: integers, of which a group of 32 is 16 steps, take 9 % less time so, but bf16 13 % more (Zen 5, M = 128).
  static constexpr int PARTS = C::INTEGER || C::FIXED ? 2 : 4;
  static constexpr bool KEEPS_TOTALS = PARTS == 2;
  static constexpr int STEP = V * PARTS * 64;  // bytes of a slice of the panel, of PARTS vectors of rows, per lane
  // Whole blocks in a panel.
  static constexpr int BLOCKS = kPanelBytes / (16 * V * 4 * 64) > 0 ? kPanelBytes / (16 * V * 4 * 64) : 1;
  static constexpr int BLOCKS_OF_TILES = BLOCKS > 4 ? BLOCKS / 4 : 1;  // with 32 rows of x they stay in the L1 cache
  static constexpr int SLICE = BLOCKS * 16 * STEP;  // bytes
  static constexpr bool HAS_TILES = C::INTEGER || (C::X_BYTES == 2 && !C::FIXED);  // bytes or bf16

 public:
  Tile(const Product& p, const D& decoder, const Weight& weight, const PackedX& px)
      : p_(p), d_(decoder), w_(weight), px_(px) {}

  // Rows n.. of the weight, at most 64; `memory` is `scratch_bytes`. On the way the rows from `next` on, which this thread
  // takes next, are brought into the L2 cache: 64 rows at once are more streams than the CPU's prefetcher follows.
  void run(int64_t n, int64_t next, int64_t first_x, int64_t first_y, int64_t count, char* memory) {
    ahead_ = w_.qdata + min64(next, p_.N) * p_.row_bytes;
    ahead_end_ = w_.qdata + min64(next + kPanel, p_.N) * p_.row_bytes;
    const int64_t steps = 4 / PARTS * ceil_div(p_.K, Order<C>::PER_WORD) * ceil_div(count, kTileRows);
    ahead_lines_ = ceil_div((ahead_end_ - ahead_) * kStretch, 64 * steps);
    char* panel = memory;
    float* scales = reinterpret_cast<float*>(panel + 4 / PARTS * SLICE);
    int32_t* zeros = reinterpret_cast<int32_t*>(scales + MAX_RUNS * kPanel);
    float* sums = scales + 2 * MAX_RUNS * kPanel;
    memset(sums, 0, static_cast<size_t>(count) * kPanel * 4);
    std::optional<Tiles> tiles;
    words_ = px_.in_tiles && count >= kLeastMatrixRows ? words_of_tiles() : 0;
    if (words_ > 0) tiles.emplace(words_);
    const int64_t blocks = ceil_div(p_.K, D::BLOCK), at_once = words_ > 0 ? BLOCKS_OF_TILES : BLOCKS;
    for (int64_t b = 0; b < blocks; b += at_once) {
      const int64_t end = min64(b + at_once, blocks);
      Run runs[MAX_RUNS];
      int num_runs = split(b, end, runs);
      const bool in_lanes = ZEROS || C::FOLDS || (takes_zeros() && w_.zero != nullptr);
      for (int run = 0; in_lanes && run < num_runs; ++run)  // the last one's for what lies beyond K, too, which is decoded
        for (int64_t lane = runs[run].first; lane < (run + 1 < num_runs ? runs[run].last : (end - b) * 16); ++lane)
          run_of_[lane] = static_cast<uint8_t>(run);
      load_factors(n, runs, num_runs, scales, zeros);
      unpack(n, b, end, scales, zeros, panel);
      if (C::FOLDS) {
        runs[0].last = runs[num_runs - 1].last;
        num_runs = 1;
        std::fill(scales, scales + kPanel, 1.0f);
      }
      if (words_ > 0) {
        by_tiles(b, panel, runs, num_runs, scales, first_x, count, sums);
        continue;
      }
      const char* slice = panel;
      for (int at = 0; at < kPanel; at += 16 * PARTS, slice += SLICE) {
        for (int64_t i = 0; i < count;) {
          const int rows = tile_rows(count - i);
          const char* x = px_.rows + (first_x + i) * px_.stride + b * V * 64;
          const int64_t of_groups = (first_x + i) * px_.groups;
          const int32_t* x_sums = C::INTEGER ? px_.group_sums + of_groups : nullptr;
          x_steps_ = C::FIXED ? px_.steps + of_groups : nullptr;
          float* y = sums + i * kPanel + at;
          switch (rows) {
            case 1: multiply<1>(x, slice, runs, num_runs, scales + at, zeros + at, x_sums, y); break;
            case 2: multiply<2>(x, slice, runs, num_runs, scales + at, zeros + at, x_sums, y); break;
            case 3: multiply<3>(x, slice, runs, num_runs, scales + at, zeros + at, x_sums, y); break;
            case 4: multiply<4>(x, slice, runs, num_runs, scales + at, zeros + at, x_sums, y); break;
            case 5: multiply<5>(x, slice, runs, num_runs, scales + at, zeros + at, x_sums, y); break;
            default: multiply<6>(x, slice, runs, num_runs, scales + at, zeros + at, x_sums, y);
          }
          i += rows;
        }
      }
    }
    finish(n, first_x, first_y, count, scales, sums);
  }

  static size_t scratch_bytes(int64_t count) {
    return 4 / PARTS * SLICE + 2 * MAX_RUNS * kPanel * 4 + static_cast<size_t>(count) * kPanel * 4;
  }

 private:
  static constexpr int MAX_RUNS = 16 * BLOCKS;  // a lane may have a group of its own

  // 13 rows as 5 + 4 + 4, not 6 + 6 + 1.
  static int tile_rows(int64_t left) {
    return left <= kTileRows ? static_cast<int>(left) : static_cast<int>(ceil_div(left, ceil_div(left, kTileRows)));
  }

  // Packed codes of 16 rows are transposed first, 16 x 16 words of 32 bits, and decoded then: lanes are rows.
  void unpack(int64_t n, int64_t b, int64_t end, const float* scales, const int32_t* zeros, char* panel) const {
    for (int part = 0; part < 4; ++part) {
      const uint8_t* rows[16];  // past the end the last row again, whose lanes nobody reads
      for (int r = 0; r < 16; ++r) rows[r] = w_.qdata + min64(n + 16 * part + r, p_.N - 1) * p_.row_bytes;
      for (int64_t block = b; block < end; ++block) {
        const int64_t at = block * D::BYTES;
        const Masks m = masks_of(p_.row_bytes - at);
        __m512i codes[D::PARTS][16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) {
          __m512i loaded[D::PARTS];
          d_.load(rows[r] + at, m, loaded);
          for (int i = 0; i < D::PARTS; ++i) codes[i][r] = loaded[i];
        }
        for (int i = 0; i < D::PARTS; ++i) transpose(codes[i]);
        char* out = panel + part / PARTS * SLICE + (block - b) * 16 * STEP + part % PARTS * 64;
        for (int lane = 0; lane < 16; ++lane, out += STEP) {
          __m512i lane_codes[D::PARTS], value[V];
          for (int i = 0; i < D::PARTS; ++i) lane_codes[i] = codes[i][lane];
          if constexpr (ZEROS) {
            const int run = run_of_[(block - b) * 16 + lane];
            C::levels_lanes(d_, lane_codes, _mm512_load_si512(zeros + run * kPanel + part * 16), value);
          } else {
            C::levels(d_, lane_codes, C::table(d_, 0), value);
          }
          if (C::FOLDS) {
            const __m512 scale = _mm512_load_ps(scales + run_of_[(block - b) * 16 + lane] * kPanel + part * 16);
            for (int j = 0; j < V; ++j) value[j] = scaled(value[j], scale);
          }
          if constexpr (C::INTEGER) {
            if (takes_zeros()) {
              __m512i zero = _mm512_set1_epi8(static_cast<char>(C::OFFSET));
              if (w_.zero != nullptr) {
                const int run = run_of_[(block - b) * 16 + lane];
                zero = _mm512_mullo_epi32(_mm512_load_si512(zeros + run * kPanel + part * 16), _mm512_set1_epi32(0x01010101));
              }
              for (int j = 0; j < V; ++j) value[j] = _mm512_sub_epi8(value[j], zero);
            }
          }
#pragma GCC unroll 8
          for (int j = 0; j < V; ++j) _mm512_store_si512(out + j * (PARTS * 64), value[j]);
        }
      }
    }
  }

  int64_t group_of(int64_t k) const { return px_.groups == 1 ? 0 : min64(k / px_.group_size, px_.groups - 1); }

  // The groups of blocks b..end, one after the other; returns their number.
  int split(int64_t b, int64_t end, Run* runs) const {
    constexpr int64_t CODES = D::BLOCK / 16;  // of a lane
    static_assert(D::lane_code(15) == 15 * CODES, "lanes hold codes in their order");
    const int64_t first = b * D::BLOCK, lanes = min64((end - b) * 16, ceil_div(p_.K - first, CODES));
    int64_t group = group_of(first);
    bool starts = b == 0 || group != group_of(first - 1);
    int count = 0;
    for (int64_t lane = 0; lane < lanes; ++group, starts = true) {
      const bool is_last = group == px_.groups - 1;
      const int64_t last = is_last ? lanes : min64(((group + 1) * px_.group_size - first) / CODES, lanes);
      runs[count++] = {lane, last, group, starts};
      lane = last;
    }
    return count;
  }

  // Scales (and zero points) of the panel's rows, [runs, kPanel]: runs are groups one after the other, so 16 groups of 16
  // rows at a time are converted and transposed.
  void load_factors(int64_t n, const Run* runs, int num_runs, float* scales, int32_t* zeros) const {
    alignas(64) float in_rows[16][kScalesAtOnce];
    for (int64_t r = 0; r < kPanel; r += 16) {
      for (int i = 0; i < num_runs; i += 16) {
        const int64_t count = min64(num_runs - i, 16);
        __m512i scale[16], zero[16];
        for (int row = 0; row < 16; ++row) {
          const int64_t first = scale_of_row(p_, min64(n + r + row, p_.N - 1));
          if (p_.groups == 1) {
            scale[row] = _mm512_castps_si512(_mm512_set1_ps(load_as_float(w_.scale, p_.scale_dtype, first)));
            if (w_.zero != nullptr) zero[row] = _mm512_set1_epi32(w_.zero[first]);
            continue;
          }
          const int64_t at = first + runs[i].group;
          if (i % kScalesAtOnce == 0)
            load_scales(w_.scale, p_.scale_dtype, at, min64(num_runs - i, kScalesAtOnce), in_rows[row]);
          scale[row] = _mm512_loadu_si512(in_rows[row] + i % kScalesAtOnce);
          if (w_.zero != nullptr) zero[row] = load_zeros(w_.zero, at, count);
        }
        transpose(scale);
        for (int g = 0; g < count; ++g) _mm512_store_si512(scales + (i + g) * kPanel + r, scale[g]);
        if (w_.zero == nullptr) continue;
        transpose(zero);
        for (int g = 0; g < count; ++g) _mm512_store_si512(zeros + (i + g) * kPanel + r, zero[g]);
      }
    }
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
        for (int part = 0; part < PARTS; ++part) sums[i][part] = C::zero();
      if constexpr (C::INTEGER) {
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
      int64_t steps = (runs->last - runs->first) * V;
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
            for (int part = 0; part < PARTS; ++part) sums[i][part] = C::dot(sums[i][part], pair, values[part]);
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
          const __m512 own = C::FIXED ? _mm512_mul_ps(scale, _mm512_set1_ps(x_steps_[i * groups + runs->group])) : scale;
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

  // Pairs of bf16, times a number; the products are exact in bf16.
  HFQ_INLINE __m512i scaled(__m512i pairs, __m512 by) {
    const __m512i upper = _mm512_set1_epi32(-65536);
    const __m512 even = _mm512_mul_ps(as_float(_mm512_slli_epi32(pairs, 16)), by);
    const __m512 odd = _mm512_mul_ps(as_float(_mm512_and_si512(pairs, upper)), by);
    // upper ? odd : even
    return _mm512_ternarylogic_epi32(upper, _mm512_castps_si512(odd), _mm512_srli_epi32(_mm512_castps_si512(even), 16), 0xCA);
  }

  // Integers are signed in tiles: zero points are taken from the codes, not from the sums.
  bool takes_zeros() const { return C::INTEGER && words_ > 0; }

  // The words of x that are multiplied at once by matrix units, of which groups are made; 0: not by them.
  int64_t words_of_tiles() const {
    for (int64_t words = 16; HAS_TILES && words >= 8; words /= 2)
      if (C::FOLDS || px_.groups == 1 || px_.group_size % (words * Order<C>::PER_WORD) == 0) return words;
    return 0;
  }

  // The rows of x with a panel by matrix units. What lies behind the last group is zeros.
  void by_tiles(int64_t b, const char* panel, const Run* runs, int num_runs, const float* scales, int64_t first_x,
                int64_t count, float* sums) {
#if defined(HFQ_MATRIX_UNITS)
    if constexpr (HAS_TILES) {
      const int64_t lines = ceil_div(ahead_end_ - ahead_, 64), turns = ceil_div(p_.K, BLOCKS_OF_TILES * D::BLOCK) * ceil_div(count, 2 * kTile);
      for (int64_t i = 0; i < count; i += 2 * kTile) {
        for (int64_t line = 0; line < ceil_div(lines, turns) && ahead_ < ahead_end_; ++line, ahead_ += 64)
          _mm_prefetch(reinterpret_cast<const char*>(ahead_), _MM_HINT_T1);
        const int64_t rows = min64(count - i, 2 * kTile);
        const char* x = px_.rows + (first_x + i) * px_.stride + b * V * 64;
        for (int at = 0; at < kPanel; at += 32) {
          const char* w = panel + at / (16 * PARTS) * SLICE + at % (16 * PARTS) * 4;
          float* y = sums + i * kPanel + at;
          if (rows > kTile) {
            multiply_tiles<2>(x, w, runs, num_runs, scales + at, rows, y);
          } else {
            multiply_tiles<1>(x, w, runs, num_runs, scales + at, rows, y);
          }
        }
      }
    }
#endif
  }

#if defined(HFQ_MATRIX_UNITS)
  // One tile of x or two, of which `rows` rows count, with 32 rows of the weight.
  template <int TILES>
  __attribute__((noinline)) void multiply_tiles(const char* x, const char* w, const Run* runs, int num_runs,
                                                const float* scales, int64_t rows, float* y) {
    alignas(64) int32_t found[TILES * kTile][32];
    const bool one_group = px_.groups == 1;
    for (const Run* end = runs + num_runs; runs < end; ++runs, scales += kPanel) {
      HFQ_ZERO_TILE(0);
      HFQ_ZERO_TILE(1);
      HFQ_ZERO_TILE(2);
      HFQ_ZERO_TILE(3);
      for (int64_t word = runs->first * V; word < runs->last * V; word += words_) {
        const char *own_x = x + word * 4, *own_w = w + word * PARTS * 64;
        HFQ_LOAD_TILE(4, own_x, px_.stride);
        HFQ_LOAD_TILE(6, own_w, int64_t{PARTS * 64});
        HFQ_LOAD_TILE(7, own_w + 64, int64_t{PARTS * 64});
        if (TILES == 2) HFQ_LOAD_TILE(5, own_x + kTile * px_.stride, px_.stride);
        if constexpr (C::INTEGER) {
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
    if constexpr (C::INTEGER) {  // those of one group stay integers, in the place of floats, until all columns are added
      if (one_group) return as_float(_mm512_add_epi32(_mm512_castps_si512(total), sum));
    }
    return _mm512_fmadd_ps(C::to_float(sum), scale, total);
  }

  void finish(int64_t n, int64_t first_x, int64_t first_y, int64_t count, const float* scales,
              const float* sums) const {
    alignas(64) float bias[kPanel] = {};
    const int64_t columns = min64(p_.N - n, kPanel);
    for (int64_t i = 0; w_.bias != nullptr && i < columns; ++i) bias[i] = load_as_float(w_.bias, p_.bias_dtype, w_.bias_first + n + i);
    for (int64_t i = 0; i < count; ++i, sums += kPanel) {
      const __m512 factor =
          _mm512_set1_ps(px_.row_scale == nullptr ? w_.global_scale : w_.global_scale * px_.row_scale[first_x + i]);
      for (int64_t at = 0; at < columns; at += 16) {
        const __mmask16 mask = static_cast<__mmask16>(first_bytes(columns - at));
        __m512 value = _mm512_load_ps(sums + at);
        if (C::INTEGER && p_.groups == 1)
          value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(value)), _mm512_load_ps(scales + at));
        store_y(p_.y, p_.y_dtype, (first_y + i) * p_.N + n + at, mask, _mm512_fmadd_ps(value, factor, _mm512_load_ps(bias + at)));
      }
    }
  }

  const Product& p_;
  const D& d_;
  const Weight& w_;
  const PackedX& px_;
  const float* x_steps_;  // of the rows of x that are multiplied, if they are in fixed point
  uint8_t run_of_[MAX_RUNS];  // of each lane of the panel
  const uint8_t *ahead_, *ahead_end_;
  int64_t ahead_lines_;  // of 64 bytes, per stretch of steps
  int64_t words_;        // see `words_of_tiles`
};

}  // namespace HFQ_AVX512
}  // namespace hfq
