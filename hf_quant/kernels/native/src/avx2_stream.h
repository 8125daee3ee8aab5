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

// Codes of 4 bits without zero points, in groups of 32, 64 or 128 columns, with integer x: two units at a time, the
// first in the lower half of a vector. A byte has two neighbours, so that x lies with the even columns of both units
// before the odd ones. That takes half as many instructions for a weight as a unit at a time.
struct Int4Pairs {
  const Product& p;
  const Runs& runs;
  const PackedX& x;
  const uint8_t* row;
  const float* scales;

  static bool serves(const Product& p, const Runs& runs) {
    const bool is_short = runs.length == 1 || runs.length == 2 || runs.length == 4;
    const bool is_whole = p.K % (max64(2, runs.length) * kUnit) == 0;
    return p.groups > 1 && runs.aligned && is_short && is_whole && p.zero == nullptr;
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
    const float* scale = scales + u / LENGTH;
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i twice = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    __m256 y[R][MB];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) y[r][i] = _mm256_setzero_ps();
    for (; u < end; u += 2 * PAIRS, sums += 8, scale += LENGTH == 1 ? 2 : 1) {
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
            if (pair == 0) part[r][i] = load_vector(sums + i * runs.count * 8);
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
        const float* own = scale + r * p.groups;
        const __m256 two = _mm256_castsi256_ps(_mm256_set1_epi64x(load<int64_t>(own, 0)));
        const __m256 factor = LENGTH == 1 ? _mm256_permutevar8x32_ps(two, twice) : _mm256_broadcast_ss(own);
#pragma GCC unroll 4
        for (int i = 0; i < MB; ++i) {
          __m256i sum = part[r][i];
#ifndef HFQ_DOT_BYTES
          sum = _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), load_vector(sums + i * runs.count * 8));
#endif
          y[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, y[r][i]);
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

// How whole vectors of units lie among the groups of a row: the same for all rows.
struct PlaneGroups {
  int64_t size, steps, count;  // columns of a group; vectors of a group, or groups of a vector, at least 1
  alignas(32) int32_t low[8], high[8];  // of each element of a sum of either half of the bytes: its group
  alignas(32) int32_t sums[8];          // the same of a sum of neighbours
};

// Codes of 4 bits and less without zero points, with x in fp32: as many units at a time as make whole vectors.
template <class C>
struct Planes {
  using L = typename C::Loader;
  static constexpr int UNITS = L::PLANES, WIDTH = UNITS * kUnit;
  const Product& p;
  const C& c;
  const PlaneGroups& groups;
  const PackedX& x;
  const uint8_t* row;
  const float* scales;

  // Whether whole vectors and whole groups lie side by side.
  static bool fits(const Product& p) {
    const bool is_whole = p.group_size % 16 == 0 && (WIDTH % p.group_size == 0 || p.group_size % WIDTH == 0);
    return p.K % WIDTH == 0 && (p.groups == 1 || is_whole);
  }
  static bool serves(const Product& p) { return p.zero == nullptr && fits(p); }
  static PlaneGroups groups_of(const Product& p) {
    PlaneGroups groups;
    groups.size = p.groups == 1 ? p.K : p.group_size;
    groups.steps = max64(groups.size / WIDTH, 1);
    groups.count = max64(WIDTH / groups.size, 1);
    for (int e = 0; e < 8; ++e) {
      groups.low[e] = static_cast<int32_t>(UNITS * byte_of(0, e) / groups.size);
      groups.high[e] = static_cast<int32_t>(UNITS * byte_of(2, e) / groups.size);
      groups.sums[e] = static_cast<int32_t>(4 * UNITS * e / groups.size);
    }
    return groups;
  }
  // The byte of a plane that element e of vector j is made of.
  static constexpr int byte_of(int j, int e) { return 16 * (e / 4) + 8 * (j / 2) + 2 * (e % 4) + j % 2; }

  static void reorder(const float* values, int64_t units, float* to) {
    for (int64_t u = 0; u < units; u += UNITS, values += WIDTH)
      for (int s = 0; s < UNITS; ++s)
        for (int j = 0; j < 4; ++j)
          for (int e = 0; e < 8; ++e) *to++ = values[UNITS * byte_of(j, e) + s];
  }

  // As `Stream::run`.
  template <int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    constexpr int SUMS = MB == 1 ? 4 : 2;  // of a row of x; those of either half of the bytes are scaled alike
    const int64_t steps = groups.steps;
    const uint8_t* from = row + u * L::BYTES;
    const char* from_x = x.rows + first * x.stride + u * (kUnit * 4);
    const float* scale = u == 0 ? scales : scales + u * kUnit / groups.size;
    const __m256i low = load_vector(groups.low), high = load_vector(groups.high);
    const typename C::Table table = c.table(0);
    __m256 y[MB];
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) y[i] = _mm256_setzero_ps();
    for (; u < end; scale += groups.count) {
      __m256 part[MB][SUMS];
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < SUMS; ++j) part[i][j] = _mm256_setzero_ps();
      for (int64_t step = 0; step < steps && u < end; ++step, u += UNITS, from += UNITS * L::BYTES) {
        prefetch_codes(from + x.ahead);
        __m256i planes[UNITS];
        L::planes(from, planes);
#pragma GCC unroll 4
        for (int s = 0; s < UNITS; ++s, from_x += 4 * 32) {
          __m256 value[4];
          c.values(planes[s], table, value);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j)
#pragma GCC unroll 4
            for (int i = 0; i < MB; ++i) {
              __m256& sum = part[i][SUMS == 4 ? j : j / 2];
              sum = C::dot(sum, load_vector(from_x + i * x.stride + j * 32), value[j]);
            }
        }
      }
      const __m256 own = _mm256_loadu_ps(scale);
      const __m256 of_low = _mm256_permutevar8x32_ps(own, low), of_high = _mm256_permutevar8x32_ps(own, high);
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) {
        const bool four = SUMS == 4;
        const __m256 first_half = four ? _mm256_add_ps(part[i][0], part[i][1]) : part[i][0];
        const __m256 second_half = four ? _mm256_add_ps(part[i][2], part[i][SUMS - 1]) : part[i][1];
        y[i] = _mm256_fmadd_ps(first_half, of_low, y[i]);
        y[i] = _mm256_fmadd_ps(second_half, of_high, y[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) out[i] += reduce(y[i]);
  }
};

// The same where codes are integers and x is bf16: x in fixed point of 16 bits, as two bytes, with a power of two for
// the 4, 8 or 16 columns whose products meet in an element of a sum. What lies within 2**-7 of their largest is exact,
// the rest to 2**-15 of that; the sums are exact, zero points included. That takes half as many instructions for a weight
// as fp32 does. ASYMMETRIC: with zero points.
template <class C, bool ASYMMETRIC>
struct FixedPlanes {
  using L = typename C::Loader;
  static constexpr int UNITS = L::PLANES, WIDTH = UNITS * kUnit, COLUMNS = 4 * UNITS;
  // Of packed x, for a vector of units: high and low bytes of each plane, then sums and units of 8 elements.
  static constexpr int64_t SUMS = 64 * UNITS, SCALES = SUMS + 32, BYTES = SCALES + 32;
  const Product& p;
  const PlaneGroups& groups;
  const PackedX& x;
  const uint8_t* row;
  const float *scales, *zeros;

  static bool serves(const Product& p) {
    if (p.x_dtype != BF16 || !Planes<C>::fits(p) || (p.zero != nullptr) != ASYMMETRIC) return false;
    if (UNITS == 1) return !ASYMMETRIC;  // codes of 8 bits are what they stand for
    const int count = UNITS == 2 ? 16 : L::BYTES == 8 ? 4 : 8, zero = ASYMMETRIC ? 0 : count / 2;
    for (int i = 0; i < count; ++i)
      if (p.levels[i] != static_cast<float>(i - zero)) return false;
    return true;
  }

  // Returns whether all values are finite; else nothing is packed.
  static bool pack(const Product& p, const float* values, char* to) {
    const int32_t offset = ASYMMETRIC ? 1 : UNITS == 1 ? 128 : static_cast<int32_t>(-p.levels[0]);
    for (int64_t k = 0; k < p.K; k += WIDTH, values += WIDTH, to += BYTES)
      if (!pack_vector(values, offset, to)) return false;
    return true;
  }

  static bool pack_vector(const float* values, int32_t offset, char* to) {
    int32_t sums[8];
    float units[8];
    for (int e = 0; e < 8; ++e) {
      const float* own = values + e * COLUMNS;
      uint32_t top = 0;  // as integers magnitudes have the order of their values
      for (int i = 0; i < COLUMNS; ++i) {
        const uint32_t bits = float_to_bits(own[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
      }
      if (top >= 0x7f800000u) return false;
      const uint32_t exponent = top >> 23 < 16 ? 16 : top >> 23;
      units[e] = bits_to_float((exponent - 14) << 23);
      const float inverse = bits_to_float((254 + 14 - exponent) << 23);
      sums[e] = 0;
      for (int i = 0; i < COLUMNS; ++i) {
        const int32_t nearest = static_cast<int32_t>(float_to_bits(own[i] * inverse + 12582912.0f)) - 0x4B400000;
        const int32_t value = nearest > 32639 ? 32639 : nearest, high = (value + 128) >> 8;  // both fit 8 bits
        char* at = to + i % UNITS * 64 + 4 * e + i / UNITS;
        at[0] = static_cast<char>(high);
        at[32] = static_cast<char>(value - 256 * high);
        sums[e] -= offset * value;
      }
    }
    const __m256i of_codes = load_vector(sums);
    const __m256i stored = ASYMMETRIC ? _mm256_castps_si256(_mm256_cvtepi32_ps(of_codes)) : of_codes;
    memcpy(to + SUMS, &stored, 32);
    memcpy(to + SCALES, units, 32);
    return true;
  }

  // The products of a vector of codes with packed x, in each element those of COLUMNS columns, less `zero` times x.
  HFQ_METHOD __m256 dot(const __m256i (&planes)[UNITS], const char* own, __m256 zero) const {
    if constexpr (!ASYMMETRIC) return _mm256_cvtepi32_ps(dot(planes, own, load_vector(own + SUMS)));
    const __m256 products = _mm256_cvtepi32_ps(dot(planes, own, _mm256_setzero_si256()));
    return _mm256_fmadd_ps(as_float(load_vector(own + SUMS)), zero, products);
  }
  HFQ_METHOD __m256i dot(const __m256i (&planes)[UNITS], const char* own, __m256i sums) const {
#ifdef HFQ_DOT_BYTES
    __m256i high = _mm256_setzero_si256(), low = sums;
#pragma GCC unroll 4
    for (int s = 0; s < UNITS; ++s) {
      high = dot_bytes(high, planes[s], load_vector(own + 64 * s));
      low = dot_bytes(low, planes[s], load_vector(own + 64 * s + 32));
    }
    return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low);
#else
    __m256i high = _mm256_maddubs_epi16(planes[0], load_vector(own));
    __m256i low = _mm256_maddubs_epi16(planes[0], load_vector(own + 32));
#pragma GCC unroll 4
    for (int s = 1; s < UNITS; ++s) {
      high = _mm256_add_epi16(high, _mm256_maddubs_epi16(planes[s], load_vector(own + 64 * s)));
      low = _mm256_add_epi16(low, _mm256_maddubs_epi16(planes[s], load_vector(own + 64 * s + 32)));
    }
    const __m256i of_high = _mm256_madd_epi16(high, _mm256_set1_epi16(256));
    return _mm256_add_epi32(_mm256_add_epi32(of_high, _mm256_madd_epi16(low, _mm256_set1_epi16(1))), sums);
#endif
  }

  // As `Int4Pairs::run`.
  template <int R, int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out, int64_t room) const {
    const uint8_t* from = row + u * L::BYTES;
    const char* from_x = x.rows + first * x.stride + u / UNITS * BYTES;
    const int64_t g = u == 0 ? 0 : u * kUnit / groups.size;
    const float *scale = scales + g, *zero = ASYMMETRIC ? zeros + g : nullptr;
    const __m256i places = load_vector(groups.sums);
    auto of_groups = [&](const float* of_row) HFQ_LAMBDA {
      return _mm256_permutevar8x32_ps(_mm256_loadu_ps(of_row), places);
    };
    __m256 y[R][MB];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) y[r][i] = _mm256_setzero_ps();
    for (; u < end; scale += groups.count, zero += ASYMMETRIC ? groups.count : 0) {
      __m256 factor[R], of_zero[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        factor[r] = of_groups(scale + r * p.groups);
        if constexpr (ASYMMETRIC) of_zero[r] = of_groups(zero + r * p.groups);
      }
      for (int64_t step = 0; step < groups.steps && u < end; ++step, u += UNITS, from += UNITS * L::BYTES) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const uint8_t* codes = from + r * p.row_bytes;
          prefetch_codes(codes + x.ahead);
          __m256i planes[UNITS];
          L::planes(codes, planes);
          if (UNITS == 1) planes[0] = unsigned_codes<L>(planes[0]);
#pragma GCC unroll 4
          for (int i = 0; i < MB; ++i) {
            const char* own = from_x + i * x.stride;
            const __m256 sum = dot(planes, own, of_zero[r]);
            const __m256 unit = _mm256_loadu_ps(reinterpret_cast<const float*>(own + SCALES));
            y[r][i] = _mm256_fmadd_ps(sum, _mm256_mul_ps(unit, factor[r]), y[r][i]);
          }
        }
        from_x += BYTES;
      }
    }
    add_rows<R, MB>(y, out, room);
  }
  template <int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    run<1, MB>(first, u, end, out, 0);
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
