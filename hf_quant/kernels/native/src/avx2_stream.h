// Few rows of x: each row of codes streams once through registers and meets up to four rows of x.
#pragma once

#include "avx2_math.h"

namespace hfq {
namespace HFQ_AVX2 {

constexpr int64_t kAhead = 8192;  // bytes of codes that are asked for in advance

// Asks for codes that are read later, into the L2 cache: into L1, W8A8 takes a quarter more time, and int8 half as much
// again (4096 x 4096, Zen 4).
HFQ_INLINE void prefetch_codes(const uint8_t* from) {
  _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1);
}

// Rows of x ready to multiply. Rows are 64 bytes longer than they need be: at a power of two apart they would meet in
// the same set of the cache. For products of integers, also sums of x: of the halves of each run, in their first
// elements or in those that the products are in, and of each group, both times -OFFSET or, with zero points, times -1.
struct PackedX {
  char* rows;
  int64_t stride;  // bytes
  int32_t* half_sums;   // [rows, runs, 8]
  int32_t* group_sums;  // [groups, most_rows]
  int64_t most_rows;
  float* steps;         // of fixed point, [groups, most_rows]
  float* scales;        // [rows]
  int64_t ahead = kAhead;  // bytes at which codes are prefetched
};

// Units whose halves are each of one group: `length` of them at a time (the last run may be shorter). Aligned: of one
// group both, that of the run's number.
struct Runs {
  bool aligned;
  int64_t count, length;
  const int32_t* groups;  // [count, 2]
};

// A row of the weight, a `Stream` or `Int4Pairs`, with `count` rows of x, up to four.
template <class Row>
static inline void run_rows(const Row& row, int64_t first, int64_t count, int64_t u, int64_t end, float* out) {
  switch (count) {
    case 1: return row.template run<1>(first, u, end, out);
    case 2: return row.template run<2>(first, u, end, out);
    case 3: return row.template run<3>(first, u, end, out);
    default: return row.template run<4>(first, u, end, out);
  }
}

// Adds what was summed up for R rows of the weight and MB of x, one of which is 1, to out[r * room + i].
template <int R, int MB>
HFQ_INLINE void add_rows(const __m256 (&y)[R][MB], float* out, int64_t room) {
  static_assert(R == 4 ? MB == 1 : R == 1, "not enough registers");
  if constexpr (R == 4) {
    alignas(16) float four[4];
    _mm_store_ps(four, reduce(y[0][0], y[1][0], y[2][0], y[3][0]));
    for (int r = 0; r < 4; ++r) out[r * room] += four[r];
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) out[i] += reduce(y[0][i]);
  }
}

// Codes of 4 bits in groups of 32, 64 or 128 columns with integer x: two units at a time, the first in the lower half of a
// vector. A byte has two neighbours, so that x lies with the even columns of both units before the odd ones. That takes half
// as many instructions for a weight as a unit at a time. ASYMMETRIC: with zero points, as fp32.
template <bool ASYMMETRIC>
struct Int4Pairs {
  const Product& p;
  const Runs& runs;
  const PackedX& x;
  const uint8_t* row;
  const float *scales, *zeros;

  static bool serves(const Product& p, const Runs& runs) {
    const bool is_short = runs.length == 1 || runs.length == 2 || runs.length == 4;
    const bool is_whole = p.K % (max64(2, runs.length) * kUnit) == 0;
    return p.groups > 1 && runs.aligned && is_short && is_whole;
  }
  static void reorder(const int8_t* values, int64_t units, char* to) {
    const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                           0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int64_t u = 0; u < units; u += 2, values += 2 * kUnit, to += 2 * kUnit) {
      __m256i unit[2];  // the even columns of each, then its odd ones
      for (int i = 0; i < 2; ++i)
        unit[i] = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load_vector(values + i * kUnit), apart), 0xD8);
      const __m256i packed[2] = {_mm256_permute2x128_si256(unit[0], unit[1], 0x20),
                                 _mm256_permute2x128_si256(unit[0], unit[1], 0x31)};
      memcpy(to, packed, sizeof packed);
    }
  }
  // Where the sum of a unit of x goes among the half sums: units of one group are added up.
  static int64_t place_of_sum(int64_t u, int64_t length) {
    return length == 1 ? u / 2 * 8 + u % 2 * 4 : u / length * 8;
  }

  // As `Stream::run`, of R rows of the weight, which follow each other as their scales do; `out` of each is `room` on.
  template <int R, int MB, int LENGTH>
  void run(int64_t first, int64_t u, int64_t end, float* out, int64_t room) const {
    constexpr int PAIRS = LENGTH > 2 ? LENGTH / 2 : 1;
    const uint8_t* from = row + u * 16;
    const char* from_x = x.rows + first * x.stride + u * kUnit;
    const int32_t* sums = x.half_sums + first * runs.count * 8 + place_of_sum(u, LENGTH);
    int64_t g = u / LENGTH;
    const __m256i low = _mm256_set1_epi8(15);
    auto of_groups = [&](const float* of_row) HFQ_LAMBDA {
      if (LENGTH > 1) return _mm256_broadcast_ss(of_row);
      const __m256 two = _mm256_castsi256_ps(_mm256_set1_epi64x(load<int64_t>(of_row, 0)));
      return _mm256_permutevar8x32_ps(two, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    };
    __m256 y[R][MB];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) y[r][i] = _mm256_setzero_ps();
    for (; u < end; u += 2 * PAIRS, sums += 8, g += LENGTH == 1 ? 2 : 1) {
      __m256i part[R][MB];  // of 16 bits, or with dot products of bytes of 32
#pragma GCC unroll 2
      for (int pair = 0; pair < PAIRS; ++pair, from += 32, from_x += 2 * kUnit) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          prefetch_codes(from + r * p.row_bytes + x.ahead);
          const __m256i codes = load_vector(from + r * p.row_bytes);
          const __m256i even = _mm256_and_si256(codes, low), odd = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
#pragma GCC unroll 4
          for (int i = 0; i < MB; ++i) {
            const char* of_row = from_x + i * x.stride;
#ifdef HFQ_DOT_BYTES
            if (pair == 0) part[r][i] = ASYMMETRIC ? _mm256_setzero_si256() : load_vector(sums + i * runs.count * 8);
            part[r][i] = dot_bytes(dot_bytes(part[r][i], even, load_vector(of_row)), odd, load_vector(of_row + kUnit));
#else
            const __m256i own = _mm256_add_epi16(_mm256_maddubs_epi16(even, load_vector(of_row)),
                                                 _mm256_maddubs_epi16(odd, load_vector(of_row + kUnit)));
            part[r][i] = pair == 0 ? own : _mm256_add_epi16(part[r][i], own);
#endif
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256 factor = of_groups(scales + r * p.groups + g);
#pragma GCC unroll 4
        for (int i = 0; i < MB; ++i) {
          __m256i sum = part[r][i];
          const __m256i of_x = load_vector(sums + i * runs.count * 8);
#ifndef HFQ_DOT_BYTES
          sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
          if (!ASYMMETRIC) sum = _mm256_add_epi32(sum, of_x);
#endif
          __m256 product = _mm256_cvtepi32_ps(sum);  // exact, as are its parts
          if (ASYMMETRIC) product = _mm256_fmadd_ps(_mm256_cvtepi32_ps(of_x), of_groups(zeros + r * p.groups + g), product);
          y[r][i] = _mm256_fmadd_ps(product, factor, y[r][i]);
        }
      }
    }
    add_rows<R, MB>(y, out, room);
  }

  template <int R, int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out, int64_t room) const {
    switch (runs.length) {
      case 1: return run<R, MB, 1>(first, u, end, out, room);
      case 2: return run<R, MB, 2>(first, u, end, out, room);
      default: return run<R, MB, 4>(first, u, end, out, room);
    }
  }
  template <int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    run<1, MB>(first, u, end, out, 0);
  }
};

// Codes of 8 bits without zero points, in whole units and groups of them, with one row of integer x, which four rows of the
// weight share.
template <class C>
struct FourOfInt8 {
  const Product& p;
  const Runs& runs;
  const PackedX& x;
  const uint8_t* row;
  const float* scales;

  static bool serves(const Product& p, const Runs& runs) { return runs.aligned && p.K % kUnit == 0 && p.zero == nullptr; }

  // As `Int4Pairs::run`, of all units; of one group sums that are not scaled, as `Stream::run`.
  void run(int64_t first, float* out, int64_t room) const {
    const uint8_t* from = row;
    const char* from_x = x.rows + first * x.stride;
    const int32_t* half_sums = x.half_sums + first * runs.count * 8;
    __m256i part[4];
    __m256 y[4][1];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) y[r][0] = _mm256_setzero_ps();
    for (int64_t g = 0; g < runs.count; ++g) {
      const __m256i begin = C::OFFSET == 0 ? C::zero() : load_vector(half_sums + g * 8);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) part[r] = begin;
      const int64_t units = min64(runs.length, p.K / kUnit - g * runs.length);  // the last group may be shorter
      for (int64_t u = 0; u < units; ++u, from += C::Loader::BYTES, from_x += C::V * 32) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          typename C::Value value[C::V];
          prefetch_codes(from + r * p.row_bytes + x.ahead);
          C::values(C::Loader::load(from + r * p.row_bytes), {}, value);
#pragma GCC unroll 2
          for (int j = 0; j < C::V; ++j) part[r] = C::dot(part[r], load_vector(from_x + j * 32), value[j]);
        }
      }
      if (p.groups == 1) break;
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
        y[r][0] = _mm256_fmadd_ps(C::to_float(part[r]), _mm256_broadcast_ss(scales + r * p.groups + g), y[r][0]);
    }
    if (p.groups > 1) return add_rows<4, 1>(y, out, room);
    for (int r = 0; r < 4; ++r) out[r * room] = bits_to_float(static_cast<uint32_t>(reduce(part[r])));
  }
};

// One row of an expert's weight with rows of x.
template <class C>
struct Stream {
  using L = typename C::Loader;
  const Product& p;
  const C& c;
  const Runs& runs;
  const PackedX& x;
  const uint8_t* row;
  const float* scales;  // of the row, as fp32
  const uint8_t* zeros;

  // Adds to out[i] the dot product of units u..end with row `first` + i of x, scaled. Of integers in one group `out` is
  // the sum, not scaled, in the bits of the float. The units are whole runs, but at the end of the row, or parts of one.
  // LENGTH: that of all runs, aligned ones, if it is short: a loop over their units would cost as much as they do. 0: any.
  template <int MB, bool ALIGNED, int LENGTH>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    // Several, so that the latency of sums is hidden; short runs follow each other without waiting.
    // Those of a unit go to sums in turn, or where they are one vector, those of units.
    constexpr int LONG = MB == 1 ? C::CHAINS : C::CHAINS > 1 && (C::V > 1 || MB == 2) ? 2 : 1;
    constexpr int SHORT = MB == 1 && C::V > 2 ? 2 : 1;
    constexpr int CHAINS = LENGTH > 0 && (LENGTH <= 2 || C::V == 1) ? SHORT : LONG;
    const int64_t full = min64(p.row_bytes / L::BYTES, end);
    const uint8_t* from = row + u * L::BYTES;
    const char* from_x = x.rows + first * x.stride + u * (C::V * 32);
    const int32_t* half_sums = C::INTEGER ? x.half_sums + first * runs.count * 8 : nullptr;
    typename C::Table table = c.table(0);
    typename C::Part part[MB][CHAINS];
    typename C::Sum sums[MB];
    __m256 y[MB];
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) y[i] = _mm256_setzero_ps();

    auto add_unit = [&](const uint8_t* codes, int chain) HFQ_LAMBDA {
      typename C::Value value[C::V];
      prefetch_codes(codes + x.ahead);
      c.values(L::load(codes), table, value);
#pragma GCC unroll 4
      for (int j = 0; j < C::V; ++j)
#pragma GCC unroll 4
        for (int i = 0; i < MB; ++i)
          part[i][(chain + j) % CHAINS] =
              C::dot(part[i][(chain + j) % CHAINS], load_vector(from_x + i * x.stride + j * 32), value[j]);
      from_x += C::V * 32;
    };
    auto clear = [&]() HFQ_LAMBDA {
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < CHAINS; ++j) part[i][j] = C::zero();
    };
    auto flush = [&]() HFQ_LAMBDA {
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) {
#pragma GCC unroll 4
        for (int j = 1; j < CHAINS; ++j) part[i][0] = C::join(part[i][0], part[i][j]);
        sums[i] = C::INTEGER || LENGTH == 0 ? C::add(sums[i], part[i][0]) : typename C::Sum(part[i][0]);
      }
    };
    auto begin_run = [&](int64_t r) HFQ_LAMBDA {
      const int64_t g0 = ALIGNED ? r : runs.groups[2 * r];
      const int64_t g1 = ALIGNED ? r : runs.groups[2 * r + 1];
      if (zeros != nullptr) table = ALIGNED ? c.table(zeros[g0]) : c.table(zeros[g0], zeros[g1]);
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) {
        sums[i] = typename C::Sum{};
        if constexpr (C::INTEGER) {
          if (C::OFFSET == 0 || (p.groups == 1 && u > 0)) continue;
          sums[i] = load_vector(half_sums + (i * runs.count + r) * 8);
          if (zeros == nullptr) continue;
          __m256i zero = _mm256_set1_epi32(zeros[g0]);
          if (!ALIGNED) zero = in_halves(zero, _mm256_set1_epi32(zeros[g1]));
          sums[i] = _mm256_mullo_epi32(sums[i], zero);
        }
      }
      clear();
    };
    auto end_run = [&](int64_t r) HFQ_LAMBDA {
      flush();
      __m256 scale = _mm256_set1_ps(scales[ALIGNED ? r : runs.groups[2 * r]]);
      if (!ALIGNED) scale = _mm256_blend_ps(scale, _mm256_set1_ps(scales[runs.groups[2 * r + 1]]), 0xF0);
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) y[i] = _mm256_fmadd_ps(C::to_float(sums[i]), scale, y[i]);
    };

    int64_t r = p.groups == 1 ? 0 : u / runs.length;
    if constexpr (LENGTH > 0) {
      for (; u + LENGTH <= full; u += LENGTH, ++r) {
        begin_run(r);
#pragma GCC unroll 4
        for (int i = 0; i < LENGTH; ++i, from += L::BYTES) add_unit(from, 0);
        end_run(r);
      }
    }
    for (; u < end; ++r) {
      begin_run(r);
      const int64_t stop = min64(u + runs.length, end), whole = min64(stop, full);
      while (u < whole) {
        const int64_t next = C::MOST == INT64_MAX ? whole : min64(whole, u + C::MOST);
        if constexpr (CHAINS > C::V) {
          for (; u + CHAINS <= next; u += CHAINS)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; ++chain, from += L::BYTES) add_unit(from, chain);
        }
        for (; u < next; ++u, from += L::BYTES) add_unit(from, 0);
        if (C::MOST != INT64_MAX && u < whole) {
          flush();
          clear();
        }
      }
      if (u < stop) {  // the last unit, of which only a part is there
        if (C::MOST != INT64_MAX && u > 0) {
          flush();
          clear();
        }
        alignas(32) uint8_t tail[32] = {};
        memcpy(tail, from, static_cast<size_t>(p.row_bytes - u * L::BYTES));
        add_unit(tail, 0);
        ++u;
      }
      end_run(r);
    }
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) {
      if constexpr (C::INTEGER) {
        if (p.groups == 1) {
          out[i] = bits_to_float(float_to_bits(out[i]) + static_cast<uint32_t>(reduce(sums[i])));
          continue;
        }
      }
      out[i] += reduce(y[i]);
    }
  }

  template <int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    if (!runs.aligned) return run<MB, false, 0>(first, u, end, out);
    if (p.groups == 1) return run<MB, true, 0>(first, u, end, out);
    switch (runs.length) {
      case 1: return run<MB, true, 1>(first, u, end, out);
      case 2: return run<MB, true, 2>(first, u, end, out);
      case 4: return run<MB, true, C::INTEGER ? 4 : 0>(first, u, end, out);
      default: return run<MB, true, 0>(first, u, end, out);
    }
  }
};

}  // namespace HFQ_AVX2
}  // namespace hfq
