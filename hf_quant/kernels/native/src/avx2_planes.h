// Few rows of x with codes whose products are sums in fp32 or fixed point: whole vectors of codes at a time.
#pragma once

#include "avx2_stream.h"

namespace hfq {
namespace HFQ_AVX2 {

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

// The same where x is bf16 and codes are integers, or levels of 4 bits: x in fixed point of 16 bits, as two bytes or a
// word, with a power of two for the 4, 8 or 16 columns whose products meet in an element of a sum. What lies within 2**-7
// of their largest is exact, the rest to 2**-15 of that; the sums are exact, zero points included. That takes half as many
// instructions for a weight as fp32 does. ASYMMETRIC: with zero points.
template <class C, bool ASYMMETRIC>
struct FixedPlanes {
  using L = typename C::Loader;
  static constexpr int UNITS = L::PLANES, WIDTH = UNITS * kUnit, COLUMNS = 4 * UNITS;
  // Of packed x, for a vector of units: high and low bytes of each plane, then sums and units of 8 elements.
  static constexpr int64_t SUMS = 64 * UNITS, SCALES = SUMS + 32, BYTES = SCALES + 32;
  // Levels are words, which `LevelsAsWords` explains. So are codes of 8 bits without dot products of bytes, because the sum
  // of two products of bytes does not fit 16 bits.
  static constexpr bool LEVELS = std::is_same<C, ByF32<WideLevels>>::value;
#ifdef HFQ_DOT_BYTES
  static constexpr bool WORDS = LEVELS;
#else
  static constexpr bool WORDS = LEVELS || UNITS == 1;
#endif
  const Product& p;
  const C& c;
  const PlaneGroups& groups;
  const PackedX& x;
  const uint8_t* row;
  const float *scales, *zeros;

  static bool serves(const Product& p) {
    const bool has_codes = LEVELS ? !ASYMMETRIC : has_integers(p);
    return p.x_dtype == BF16 && Planes<C>::fits(p) && (p.zero != nullptr) == ASYMMETRIC && has_codes;
  }

  static void pack(const Product& p, const C& c, const float* values, char* to) {
    const int32_t offset = ASYMMETRIC ? 1 : WORDS ? 0 : UNITS == 1 ? 128 : static_cast<int32_t>(-p.levels[0]);
    float unit = 1.0f;
    if constexpr (LEVELS) unit = c.words.unit;
    for (int64_t k = 0; k < p.K; k += WIDTH, values += WIDTH, to += BYTES) pack_vector(values, offset, unit, to);
  }

  // The word that column `i` of element `e` is.
  static constexpr int word_of(int e, int i) {
    return LEVELS ? i % 2 * 32 + i / 4 * 16 + 2 * e + i / 2 % 2 : i % 2 * 16 + 2 * e + i / 2;
  }

  static void pack_vector(const float* values, int32_t offset, float unit, char* to) {
    int32_t sums[8];
    float units[8];
    for (int e = 0; e < 8; ++e) {
      const float* own = values + e * COLUMNS;
      uint32_t top = 0;  // as integers magnitudes have the order of their values
      for (int i = 0; i < COLUMNS; ++i) {
        const uint32_t bits = float_to_bits(own[i]) & 0x7fffffffu;
        top = bits > top ? bits : top;
      }
      const FixedPoint fixed(top, 15);
      units[e] = fixed.step * unit;
      float kept[COLUMNS];
      if (!fixed.is_finite) {
        keep_infinite(own, COLUMNS, kept);
        own = kept;
      }
      sums[e] = 0;
      for (int i = 0; i < COLUMNS; ++i) {
        const int32_t nearest = static_cast<int32_t>(float_to_bits(own[i] * fixed.inverse + 12582912.0f)) - 0x4B400000;
        const int32_t value = nearest > 32639 ? 32639 : nearest, high = (value + 128) >> 8;  // both fit 8 bits
        if constexpr (WORDS) {
          reinterpret_cast<int16_t*>(to)[word_of(e, i)] = static_cast<int16_t>(value);
        } else {
          char* at = to + i % UNITS * 64 + 4 * e + i / UNITS;
          at[0] = static_cast<char>(high);
          at[32] = static_cast<char>(value - 256 * high);
        }
        sums[e] -= offset * value;
      }
    }
    const __m256i of_codes = load_vector(sums);
    const __m256i stored = ASYMMETRIC ? _mm256_castps_si256(_mm256_cvtepi32_ps(of_codes)) : of_codes;
    memcpy(to + SUMS, &stored, 32);
    memcpy(to + SCALES, units, 32);
  }

  // The products of a vector of codes with packed x, in each element those of COLUMNS columns, less `zero` times x.
  HFQ_METHOD __m256 dot(const __m256i (&planes)[UNITS], const char* own, __m256 zero) const {
    if constexpr (LEVELS) {
      __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 2
      for (int s = 0; s < UNITS; ++s) {
        __m256i words[2];
        c.words.of(planes[s], words);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words[0], load_vector(own + 64 * s)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words[1], load_vector(own + 64 * s + 32)));
      }
      return _mm256_cvtepi32_ps(sum);
    }
    if constexpr (WORDS) {
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(planes[0], 8), 8), odd = _mm256_srai_epi16(planes[0], 8);
      return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(even, load_vector(own)),
                                                 _mm256_madd_epi16(odd, load_vector(own + 32))));
    }
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
      __m256 factor[R], of_zero[R] = {};
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
          if constexpr (LEVELS) {
            c.words.planes(codes, planes);
          } else {
            L::planes(codes, planes);
          }
          if (UNITS == 1 && !WORDS) planes[0] = unsigned_codes<L>(planes[0]);
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

}  // namespace HFQ_AVX2
}  // namespace hfq
