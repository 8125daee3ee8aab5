// Many rows of x: a panel of rows of the weight is decoded once, block by block of K, into a buffer that the caches
// hold, and multiplied from there by a tile of up to six rows of x at a time.
#pragma once

#include <type_traits>

#include "avx2_planes.h"

namespace hfq {
namespace HFQ_AVX2 {

// One expert's weight.
struct Weight {
  const uint8_t* qdata;
  int64_t scale_first;
};

HFQ_INLINE int64_t scale_of_row(const Product& p, const Weight& w, int64_t n) {
  const int64_t row = p.scale_rows == 1 ? n : n / p.scale_rows;  // spares a slow division
  return w.scale_first + row * p.scale_stride;
}

// The lanes of vectors are rows of the panel. For fp32 it holds scaled weights; the scales of integers are applied to
// the sums of groups.
template <class C>
class Panel {
  using L = typename C::Loader;
  using Part = typename C::Part;

 public:
  static constexpr int ROWS = 32;

  Panel(const Product& p, const C& c, const Weight& w, const PackedX& x)
      : p_(p), c_(c), w_(w), x_(x), group_size_(C::FIXED ? fixed_group(p) : p.group_size),
        groups_(C::FIXED ? p.K / group_size_ : p.groups), in_groups_(groups_ > 1 && is_whole(p, group_size_)) {}

  // Columns of a group of x in fixed point: those that share a scale, or part of them. 0: not served.
  static int64_t fixed_group(const Product& p) {
    int64_t size = p.groups > 1 ? p.group_size : 128;
    while (p.groups == 1 && size > kUnit && p.K % size != 0) size /= 2;
    return is_whole(p, size) && p.K > size ? size : 0;
  }

  static size_t scratch_bytes(int64_t count) {
    return static_cast<size_t>(BYTES + ROWS * 2 * (GROUPS + count) * 4);
  }

  // Products of rows n..n + ROWS of the weight with `count` rows of x, to y [count, ROWS].
  float* run(int64_t n, int64_t first, int64_t count, char* memory) {
    float* scales = reinterpret_cast<float*>(memory + BYTES);
    panel_ = memory;
    scales_ = scales;
    zeros_ = reinterpret_cast<int32_t*>(scales + ROWS * GROUPS);
    y_ = scales + 2 * ROWS * GROUPS;
    totals_ = reinterpret_cast<int32_t*>(y_ + count * ROWS);
    memset(y_, 0, static_cast<size_t>(count * ROWS) * 4);
    const int64_t halves = ceil_div(p_.K, kHalf);
    for (int64_t k = 0; k < halves; k += BLOCK) {
      const int64_t end = min64(k + BLOCK, halves);
      if (k % SPAN == 0) load_factors(n, k, min64(k + SPAN, halves));
      for (int pair = 0; pair < ROWS / 16; ++pair) {
        for (int part = 2 * pair; part < 2 * pair + 2; ++part) decode(n + 8 * part, k / 2, ceil_div(end, 2), part);
        for (int64_t i = 0; i < count;) {
          const int64_t rows = count - i <= C::TILE ? count - i : ceil_div(count - i, ceil_div(count - i, C::TILE));
          switch (rows) {
            case 1: tile<1>(first, i, k, end, pair); break;
            case 2: tile<2>(first, i, k, end, pair); break;
            case 3: tile<3>(first, i, k, end, pair); break;
            case 4: tile<4>(first, i, k, end, pair); break;
            case 5: tile<C::TILE < 5 ? 4 : 5>(first, i, k, end, pair); break;
            default: tile<C::TILE>(first, i, k, end, pair);
          }
          i += rows;
        }
      }
    }
    return y_;
  }

 private:
  static constexpr int64_t kHalf = kUnit / 2;            // columns that are of one group
  static constexpr int64_t BLOCK = 1024 / kHalf / C::V;  // halves of units that are decoded at once: 16 KB for 16 rows
  static constexpr int64_t SPAN = 1024 / kHalf;          // and of which the scales are loaded at once
  static constexpr int64_t GROUPS = SPAN;                // that have a scale of their own, at most
  static constexpr int64_t STEP = 64 * C::V;             // bytes of 16 rows in 4 columns
  static constexpr int64_t BYTES = BLOCK * 4 * STEP;

  static bool is_whole(const Product& p, int64_t size) {
    return size % kUnit == 0 && size <= C::MOST_COLUMNS && BLOCK * kHalf % size == 0 && p.K % size == 0;
  }
  int64_t group_of(int64_t half) const { return groups_ == 1 ? 0 : min64(half * kHalf / group_size_, groups_ - 1); }

  void load_factors(int64_t n, int64_t k, int64_t end) {
    first_group_ = group_of(k);
    const int64_t groups = group_of(end - 1) - first_group_ + 1;
    for (int64_t half = 0; !C::INTEGER && half < SPAN; ++half)
      group_[half] = static_cast<int>(group_of(k + half) - first_group_);
    float row[GROUPS];
    for (int64_t r = 0; r < ROWS; ++r) {
      const bool is_one = p_.groups == 1;
      const int64_t first = scale_of_row(p_, w_, min64(n + r, p_.N - 1)) + (is_one ? 0 : first_group_);
      load_floats(p_.scale, p_.scale_dtype, first, is_one ? 1 : groups, row);
      for (int64_t g = 1; is_one && g < groups; ++g) row[g] = row[0];
      for (int64_t g = 0; g < groups; ++g) {
        scales_[g * ROWS + r] = row[g];
        if (p_.zero != nullptr) zeros_[g * ROWS + r] = p_.zero[first + (is_one ? 0 : g)];
      }
    }
  }

  // Units u..end of rows n..n + 8.
  void decode(int64_t n, int64_t u, int64_t end, int part) const {
    const uint8_t* rows[8];  // past the end the last row again, whose lanes nobody reads
    for (int r = 0; r < 8; ++r) rows[r] = w_.qdata + min64(n + r, p_.N - 1) * p_.row_bytes + u * L::BYTES;
    char* to = panel_ + part % 2 * 32;
    const int* group = group_ + u * 2 % SPAN;
    for (const int64_t full = min64(end, p_.row_bytes / L::BYTES); u < full; ++u, group += 2, to += 8 * STEP) {
      decode_unit(rows, group, part, to);
      for (int r = 0; r < 8; ++r) {
        rows[r] += L::BYTES;
        // The CPU does not foresee that a row is read block by block.
        _mm_prefetch(reinterpret_cast<const char*>(rows[r] + BLOCK / 2 * L::BYTES), _MM_HINT_T0);
      }
    }
    if (u == end) return;
    alignas(32) uint8_t tails[8][32] = {};
    for (int r = 0; r < 8; ++r) {
      memcpy(tails[r], rows[r], static_cast<size_t>(p_.row_bytes - u * L::BYTES));
      rows[r] = tails[r];
    }
    decode_unit(rows, group, part, to);
  }

  // Four vectors of words of 32 bits, transposed within 128 bits.
  HFQ_METHOD static void transpose(const __m256i (&a)[4], __m256i (&words)[4]) {
    const __m256i low01 = _mm256_unpacklo_epi32(a[0], a[1]), high01 = _mm256_unpackhi_epi32(a[0], a[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(a[2], a[3]), high23 = _mm256_unpackhi_epi32(a[2], a[3]);
    words[0] = _mm256_unpacklo_epi64(low01, low23);
    words[1] = _mm256_unpackhi_epi64(low01, low23);
    words[2] = _mm256_unpacklo_epi64(high01, high23);
    words[3] = _mm256_unpackhi_epi64(high01, high23);
  }

  // One unit of 8 rows of 4 bits: transposed first, while two codes are one byte.
  HFQ_METHOD void split_unit(const uint8_t* const* rows, char* to) const {
    const typename C::Table table = c_.table(0);
    const __m256i low = _mm256_set1_epi8(15);
    __m256i pairs[4], words[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) pairs[r] = _mm256_set_m128i(load<__m128i>(rows[r + 4], 0), load<__m128i>(rows[r], 0));
    transpose(pairs, words);
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
      char* half = to + word / 2 * 4 * STEP + word % 2 * STEP;
      const __m256i codes[2] = {_mm256_and_si256(words[word], low), _mm256_and_si256(_mm256_srli_epi16(words[word], 4), low)};
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd, half += 2 * STEP) {
        typename C::Value value[C::V];
        C::values(codes[odd], table, value);
#pragma GCC unroll 2
        for (int j = 0; j < C::V; ++j) memcpy(half + 64 * j, &value[j], 32);
      }
    }
  }

  // One unit of 8 rows; their bytes are transposed in words of 32 bits.
  HFQ_METHOD void decode_unit(const uint8_t* const* rows, const int* group, int part, char* to) const {
    if constexpr (C::INTEGER && std::is_same<L, Packed4>::value) return split_unit(rows, to);
    const typename C::Table table = c_.table(0);
    __m256i halves[2][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const __m256i upper = L::load(rows[r]), lower = L::load(rows[r + 4]);
      halves[0][r] = _mm256_permute2x128_si256(upper, lower, 0x20);
      halves[1][r] = _mm256_permute2x128_si256(upper, lower, 0x31);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i words[4];
      transpose(halves[half], words);
      const int64_t at = C::INTEGER ? 0 : group[half] * ROWS + 8 * part;
      const __m256 scale = _mm256_load_ps(scales_ + at);
      const __m256 zero = _mm256_cvtepi32_ps(load_vector(zeros_ + at));
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word, to += STEP) {
        typename C::Value value[C::V];
        if constexpr (C::INTEGER) {
          C::values(words[word], table, value);
        } else {
          // Bytes 0 and 1 of four rows, then their bytes 2 and 3: vectors of the decoder are then columns.
          const __m256i order = _mm256_setr_epi32(0x05040100, 0x0D0C0908, 0x07060302, 0x0F0E0B0A,  //
                                                  0x05040100, 0x0D0C0908, 0x07060302, 0x0F0E0B0A);
          c_.values(_mm256_shuffle_epi8(words[word], order), table, value);
#pragma GCC unroll 4
          for (int j = 0; j < C::V; ++j) {
            if (p_.zero != nullptr) value[j] = _mm256_sub_ps(value[j], zero);
            value[j] = _mm256_mul_ps(value[j], scale);
          }
        }
#pragma GCC unroll 4
        for (int j = 0; j < C::V; ++j) memcpy(to + 64 * j, &value[j], 32);
      }
    }
  }

  template <int MR>
  HFQ_METHOD static void clear(Part (&part)[MR][2]) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) part[m][0] = part[m][1] = C::zero();
  }

  // Adds the products of halves k.. of rows of x with 16 rows of the panel.
  template <int MR>
  HFQ_METHOD void multiply(const char* x, int64_t k, int64_t end, const char* w, Part (&part)[MR][2]) const {
    for (; k < end; ++k) {
      const char* rows = x + (C::V == 1 ? 16 * k : k / 2 * (32 * C::V) + k % 2 * 16);
      const char* more_rows = rows + 3 * x_.stride;
      // Or GCC 12 makes a pointer of each place, more than there are registers.
      asm("" : "+r"(rows), "+r"(more_rows));
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word, w += STEP) {
#pragma GCC unroll 4
        for (int j = 0; j < C::V; ++j) {
          typename C::Value w0, w1;
          memcpy(&w0, w + 64 * j, 32);
          memcpy(&w1, w + 64 * j + 32, 32);
#pragma GCC unroll 8
          for (int m = 0; m < MR; ++m) {
            const char* from = (m < 3 ? rows + m * x_.stride : more_rows + (m - 3) * x_.stride) + C::offset(word, j);
            const __m256i value = _mm256_set1_epi32(load<int32_t>(from, 0));
            part[m][0] = C::dot(part[m][0], value, w0);
            part[m][1] = C::dot(part[m][1], value, w1);
          }
        }
      }
    }
  }

  // `multiply` of one unit that begins what is summed up.
  template <int MR>
  HFQ_METHOD void multiply_first(const char* x, const char* w, Part (&part)[MR][2]) const {
    const char *rows = x, *more_rows = x + 3 * x_.stride;
    asm("" : "+r"(rows), "+r"(more_rows));
#pragma GCC unroll 8
    for (int word = 0; word < 8; ++word, w += STEP) {
      const __m256i w0 = load_vector(w), w1 = load_vector(w + 32);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const char* from = (m < 3 ? rows + m * x_.stride : more_rows + (m - 3) * x_.stride) + 4 * word;
        const __m256i value = _mm256_set1_epi32(load<int32_t>(from, 0));
        part[m][0] = word == 0 ? C::product(value, w0) : C::dot(part[m][0], value, w0);
        part[m][1] = word == 0 ? C::product(value, w1) : C::dot(part[m][1], value, w1);
      }
    }
  }

  template <int MR, class F>
  HFQ_INLINE void for_each(F of_sum) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) of_sum(m, 0), of_sum(m, 1);
  }

  // As `tile`, of integers whose groups are whole units and lie in one block each.
  template <int MR, bool ZEROS>
  void tile_of_groups(int64_t first, int64_t i, int64_t k, int64_t end, int pair) const {
    constexpr int64_t X_UNIT = kUnit * C::X_BYTES;
    const __m256 begin_of_sums = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23
    const int64_t units = group_size_ / kUnit, most_rows = x_.most_rows;
    const char *w = panel_, *x = x_.rows + (first + i) * x_.stride + k / 2 * X_UNIT;
    const char* x_end = x + (end - k) / 2 * X_UNIT;
    const float* scale = scales_ + (group_of(k) - first_group_) * ROWS + 16 * pair;
    const int32_t* zero = zeros_ + (scale - scales_);
    const int32_t* sums = x_.group_sums + group_of(k) * most_rows + first + i;
    const float* steps = C::FIXED ? x_.steps + (sums - x_.group_sums) : nullptr;
    float* y = y_ + i * ROWS + 16 * pair;
    for (; x < x_end; scale += ROWS, zero += ROWS, sums += most_rows, steps += C::FIXED ? most_rows : 0) {
      auto offset = [&](int m, int h) HFQ_LAMBDA {
        const __m256i sum = _mm256_set1_epi32(sums[m]);
        return ZEROS ? _mm256_mullo_epi32(sum, load_vector(zero + 8 * h)) : sum;
      };
      auto add_scaled = [&](int m, int h, __m256 total) HFQ_LAMBDA {
        float* to = y + m * ROWS + 8 * h;
        __m256 factor = _mm256_load_ps(scale + 8 * h);
        if constexpr (C::FIXED) factor = _mm256_mul_ps(factor, _mm256_set1_ps(steps[m]));
        _mm256_store_ps(to, _mm256_fmadd_ps(total, factor, _mm256_load_ps(to)));
      };
      Part part[MR][2];
      if constexpr (C::MOST == INT64_MAX) {
        // Sums begin at the bits of 1.5 * 2^23, from which an integer is a float without a conversion: that would take
        // turns with the products. Those of fixed point are too large.
        const __m256i begin = C::FIXED ? _mm256_setzero_si256() : _mm256_castps_si256(begin_of_sums);
        for_each<MR>([&](int m, int h) HFQ_LAMBDA { part[m][h] = _mm256_add_epi32(offset(m, h), begin); });
        multiply<MR>(x, 0, 2 * units, w, part);
        x += units * X_UNIT;
        w += units * 8 * STEP;
        for_each<MR>([&](int m, int h) HFQ_LAMBDA {
          const __m256i sum = part[m][h];
          add_scaled(m, h, C::FIXED ? _mm256_cvtepi32_ps(sum) : _mm256_sub_ps(as_float(sum), begin_of_sums));
        });
      } else {
        static_assert(C::MOST == INT64_MAX || (C::MOST == 8 && C::V == 1), "a unit at a time");
        __m256i totals[MR][2];  // of more than one unit, in memory: registers are for `part`
        for (int64_t unit = 1;; ++unit, x += X_UNIT, w += 8 * STEP) {
          multiply_first<MR>(x, w, part);
          if (unit == units) break;
          for_each<MR>([&](int m, int h) HFQ_LAMBDA {
            totals[m][h] = C::add(unit == 1 ? offset(m, h) : totals[m][h], part[m][h]);
          });
        }
        x += X_UNIT;
        w += 8 * STEP;
        if (units == 1) {
          for_each<MR>([&](int m, int h) HFQ_LAMBDA { add_scaled(m, h, _mm256_cvtepi32_ps(C::add(offset(m, h), part[m][h]))); });
        } else {
          for_each<MR>([&](int m, int h) HFQ_LAMBDA { add_scaled(m, h, _mm256_cvtepi32_ps(C::add(totals[m][h], part[m][h]))); });
        }
      }
      asm volatile("" : : : "memory");  // or GCC 12 keeps y in two places
    }
  }

  // Rows first + i.. of x with 16 rows of the panel, which holds halves from `k` on.
  template <int MR>
  void tile(int64_t first, int64_t i, int64_t k, int64_t end, int pair) const {
    if constexpr (C::INTEGER) {
      if (in_groups_ && p_.zero == nullptr) return tile_of_groups<MR, false>(first, i, k, end, pair);
      if (in_groups_) return tile_of_groups<MR, true>(first, i, k, end, pair);
    }
    const char *w = panel_, *x = x_.rows + (first + i) * x_.stride;
    Part part[MR][2];
    float* y = y_ + i * ROWS + 16 * pair;
    if constexpr (!C::INTEGER) {
      clear(part);
      multiply<MR>(x, k, end, w, part);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h, y += 8) {
          _mm256_store_ps(y, _mm256_add_ps(_mm256_load_ps(y), part[m][h]));
          if (h == 1) y += ROWS - 16;
        }
    } else {
      const int64_t halves = ceil_div(p_.K, kHalf);
      int32_t* kept = totals_ + i * ROWS + 16 * pair;  // of a group that goes on in the next block
      for (int64_t g = group_of(k); k < end; ++g) {
        const int64_t group_end = g == p_.groups - 1 ? halves : (g + 1) * p_.group_size / kHalf;
        const bool begins = k == 0 || k == g * p_.group_size / kHalf;
        const int64_t at = (g - first_group_) * ROWS + 16 * pair;
        __m256i totals[MR][2];
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          const __m256i sum_x = _mm256_set1_epi32(x_.group_sums[g * x_.most_rows + first + i + m]);
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            totals[m][h] = !begins ? load_vector(kept + m * ROWS + 8 * h)
                           : p_.zero == nullptr ? sum_x
                                                : _mm256_mullo_epi32(sum_x, load_vector(zeros_ + at + 8 * h));
          }
        }
        for (const int64_t stop = min64(group_end, end); k < stop;) {
          const int64_t next = C::MOST == INT64_MAX ? stop : min64(stop, k + C::MOST / 4);
          if constexpr (C::MOST == INT64_MAX) {
            multiply<MR>(x, k, next, w, totals);
          } else {
            clear(part);
            multiply<MR>(x, k, next, w, part);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
              for (int h = 0; h < 2; ++h) totals[m][h] = C::add(totals[m][h], part[m][h]);
          }
          w += (next - k) * 4 * STEP;
          k = next;
        }
        if (k < group_end) {
#pragma GCC unroll 8
          for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h)
              _mm256_store_si256(reinterpret_cast<__m256i*>(kept + m * ROWS + 8 * h), totals[m][h]);
          break;
        }
        const __m256 scale[2] = {_mm256_load_ps(scales_ + at), _mm256_load_ps(scales_ + at + 8)};
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            float* to = y + m * ROWS + 8 * h;
            _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[m][h]), scale[h], _mm256_load_ps(to)));
          }
      }
    }
  }

  const Product& p_;
  const C& c_;
  const Weight& w_;
  const PackedX& x_;
  const int64_t group_size_, groups_;  // of x and the weight
  const bool in_groups_;
  char* panel_;
  float* scales_;   // [groups of the span, ROWS]
  int32_t* zeros_;  // the same
  float* y_;
  int32_t* totals_;
  int64_t first_group_;
  int group_[SPAN];  // of each half, less the first
};

}  // namespace HFQ_AVX2
}  // namespace hfq
