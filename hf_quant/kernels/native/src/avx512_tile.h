// Many rows of x: 64 rows of codes are decoded once into a panel whose lanes are rows of the weight, and multiplied then.
#pragma once

#include <algorithm>
#include <optional>

#include "avx512_panel.h"

namespace hfq {
namespace HFQ_AVX512 {

// ZEROS: codes have zero points that are taken from them while they are decoded.
template <class C, bool ZEROS>
class Tile {
  using D = typename C::Decoder;
  using Products = PanelProducts<typename C::Sums>;
  static constexpr int V = vecs<C>(), PARTS = Products::PARTS, SLICE = Products::SLICE;
  static constexpr int STEP = V * PARTS * 64;         // bytes of a slice of the panel per lane
  static constexpr int BLOCKS = SLICE / (16 * STEP);  // in a panel
  static_assert(V % Products::PAIR == 0 && BLOCKS > 0, "whole pairs, and a block at least");
  static constexpr int BLOCKS_OF_TILES = BLOCKS > 4 ? BLOCKS / 4 : 1;  // with 32 rows of x they stay in the L1 cache

 public:
  Tile(const Product& p, const D& decoder, const Weight& weight, const PackedX& px)
      : p_(p), d_(decoder), w_(weight), px_(px) {}

  // Rows n.. of the weight, at most 64; `next`: what this thread takes next. `memory` is `scratch_bytes`.
  void run(int64_t n, int64_t next, int64_t first_x, int64_t first_y, int64_t count, char* memory) {
    Products products(p_, w_, px_, V, next, first_x, count);
    char* panel = memory;
    float* scales = reinterpret_cast<float*>(panel + kPanelBytes);
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
      load_factors(p_, w_, n, runs, num_runs, scales, zeros);
      unpack(n, b, end, scales, zeros, panel);
      if (C::FOLDS) {
        runs[0].last = runs[num_runs - 1].last;
        num_runs = 1;
        std::fill(scales, scales + kPanel, 1.0f);
      }
      const int64_t at = b * V * 64;
      if (words_ > 0) {
        products.by_tiles(words_, ceil_div(blocks, at_once), at, panel, runs, num_runs, scales, sums);
      } else {
        products.by_rows(at, panel, runs, num_runs, scales, zeros, sums);
      }
    }
    products.finish(n, first_y, scales, sums);
  }

  static size_t scratch_bytes(int64_t count) {
    return kPanelBytes + 2 * MAX_RUNS * kPanel * 4 + static_cast<size_t>(count) * kPanel * 4;
  }

 private:
  static constexpr int MAX_RUNS = 16 * BLOCKS;  // a lane may have a group of its own

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
    for (int64_t words = 16; Products::HAS_TILES && words >= 8; words /= 2)
      if (C::FOLDS || px_.groups == 1 || px_.group_size % (words * Order<C>::PER_WORD) == 0) return words;
    return 0;
  }

  const Product& p_;
  const D& d_;
  const Weight& w_;
  const PackedX& px_;
  uint8_t run_of_[MAX_RUNS];  // of each lane of the panel
  int64_t words_;             // see `words_of_tiles`
};

}  // namespace HFQ_AVX512
}  // namespace hfq
