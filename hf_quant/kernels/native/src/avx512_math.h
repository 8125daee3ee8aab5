// The three ways to multiply, and what surrounds them: packing x into a decoder's order, scales, reductions.
#pragma once

#include <cpuid.h>

#include "avx512_decode.h"

namespace hfq {
namespace HFQ_AVX512 {

// CPUs that differ in what they multiply fastest. Intel's take four times as long for a dot product of bf16 as for one of
// bytes or words, and twice as long as for fp32 (Sapphire Rapids; older ones have none).
enum Maker { INTEL, ZEN4, ZEN5 };

#if HFQ_VBMI
static Maker maker_of_cpu() {
  static const Maker maker = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd") == 0) return INTEL;
    unsigned a = 0, b, c, d;
    __get_cpuid(1, &a, &b, &c, &d);
    return ((a >> 8) & 15) + ((a >> 20) & 255) < 0x1a ? ZEN4 : ZEN5;
  }();
  return maker;
}
#else
static constexpr Maker maker_of_cpu() { return INTEL; }  // AMD's CPUs have VBMI
#endif

HFQ_INLINE __m512 as_float(__m512i bits) { return _mm512_castsi512_ps(bits); }

// Sums of products, in each lane of 32 bits: `dot` adds those of a vector of packed x and one of a weight. X_BYTES: of an
// element of x. Of FIXED ones x has a power of two for each group of columns.

struct FloatSums {
  using Sum = __m512;
  static constexpr bool INTEGER = false, FIXED = false;

  HFQ_INLINE Sum zero() { return _mm512_setzero_ps(); }
  HFQ_INLINE Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  HFQ_INLINE __m512 to_float(Sum sum) { return sum; }
};

struct Bf16Sums : FloatSums {
  static constexpr int X_BYTES = 2;

  HFQ_INLINE Sum dot(Sum sum, __m512i x, __m512i w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
  }
};

struct F32Sums : FloatSums {
  static constexpr int X_BYTES = 4;

  HFQ_INLINE Sum dot(Sum sum, __m512i x, __m512i w) { return _mm512_fmadd_ps(as_float(x), as_float(w), sum); }
};

struct IntegerSums {
  using Sum = __m512i;

  HFQ_INLINE Sum zero() { return _mm512_setzero_si512(); }
  HFQ_INLINE Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  HFQ_INLINE __m512 to_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

// Of 4 products of signed bytes of x and unsigned codes. As assembly: around the intrinsic GCC 12 copies every sum to memory
// and back, which halves the speed.
HFQ_INLINE __m512i dot_bytes(__m512i sum, __m512i x, __m512i codes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
  return sum;
}

// Of 2 products of words.
HFQ_INLINE __m512i dot_words(__m512i sum, __m512i x, __m512i words) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(words), "v"(x));
  return sum;
}

struct ByteSums : IntegerSums {
  static constexpr int X_BYTES = 1;
  static constexpr bool INTEGER = true, FIXED = false;

  HFQ_INLINE Sum dot(Sum sum, __m512i x, __m512i w) { return dot_bytes(sum, x, w); }
};

struct WordSums : IntegerSums {
  static constexpr int X_BYTES = 2;
  static constexpr bool INTEGER = false, FIXED = true;

  HFQ_INLINE Sum dot(Sum sum, __m512i x, __m512i w) { return dot_words(sum, x, w); }
};

// A multiplication has sums, and `levels` makes vectors of what its decoder has loaded. For each vector of its decoder it has
// XVECS vectors. Table: what `table(decoder, zero point)` gives; with LANE_ZEROS `levels_lanes` takes a zero point for each
// 32-bit lane instead.

// Zero points are taken from the codes.
template <class D, class S>
struct ByLevels : S {
  using Sums = S;
  using Decoder = D;
  using Table = typename D::Table;
  static constexpr bool FOLDS = false, LANE_ZEROS = D::ZERO_POINTS;

  HFQ_INLINE Table table(const D& d, int zero) { return d.table(zero); }
};

// Levels of a block, in words.
template <class D>
HFQ_INLINE void word_levels(const D& d, const __m512i* part, typename D::Table table, __m512i* level) {
  d.indices(part, level);
  for (int j = 0; j < D::VECS; ++j) level[j] = d.level(level[j], table);
}

template <class D>
HFQ_INLINE void word_levels_lanes(const D& d, const __m512i* part, __m512i zeros, __m512i* level) {
  const __m512i shift = D::shift_of(zeros);
  d.indices(part, level);
  for (int j = 0; j < D::VECS; ++j) level[j] = d.level_shifted(level[j], shift);
}

template <class D>
struct ByBf16 : ByLevels<D, Bf16Sums> {
  static constexpr int XVECS = 1;

  HFQ_INLINE void levels(const D& d, const __m512i* part, typename D::Table table, __m512i* value) {
    word_levels(d, part, table, value);
  }
  HFQ_INLINE void levels_lanes(const D& d, const __m512i* part, __m512i zeros, __m512i* value) {
    word_levels_lanes(d, part, zeros, value);
  }
};

// The scales of groups are in the levels of panels, where products of both are exact in bf16: x meets one group. x may be
// integers that rows were quantized to.
template <class D>
struct Folded : ByBf16<D> {
  static constexpr bool FOLDS = true;

  // Levels of 4 significant bits, at most, and as many of a scale; differences of integers have them, too.
  static bool serves(const Product& p) {
    bool fits = p.groups > 1;
    for (const Product* each = &p; each != nullptr; each = each->sibling)
      fits = fits && (each->scale_dtype == E4M3 || each->scale_dtype == E8M0);
    for (int i = 0; i < D::COUNT; ++i) fits = fits && (float_to_bits(p.levels[i]) & 0xfffff) == 0;
    return fits;
  }
};

// fp32: each vector of bf16 words becomes one of the lower and one of the upper words.
template <class D>
struct ByF32 : ByLevels<D, F32Sums> {
  static constexpr int XVECS = 2;

  HFQ_INLINE void widen(const __m512i* level, __m512i* value) {
    for (int j = 0; j < D::VECS; ++j) {
      value[2 * j] = _mm512_slli_epi32(level[j], 16);
      value[2 * j + 1] = _mm512_and_si512(level[j], _mm512_set1_epi32(-65536));
    }
  }
  HFQ_INLINE void levels(const D& d, const __m512i* part, typename D::Table table, __m512i* value) {
    __m512i level[D::VECS];
    word_levels(d, part, table, level);
    widen(level, value);
  }
  HFQ_INLINE void levels_lanes(const D& d, const __m512i* part, __m512i zeros, __m512i* value) {
    __m512i level[D::VECS];
    word_levels_lanes(d, part, zeros, level);
    widen(level, value);
  }
};

// fp32 by a decoder that delivers it.
template <class D>
struct ByF32Levels : ByLevels<D, F32Sums> {
  static constexpr int XVECS = 1;

  HFQ_INLINE void levels(const D&, const __m512i* part, typename D::Table table, __m512i* value) {
    __m512 level[D::VECS];
    D::levels(part, table, level);
    for (int j = 0; j < D::VECS; ++j) value[j] = _mm512_castps_si512(level[j]);
  }
  HFQ_INLINE void levels_lanes(const D& d, const __m512i* part, __m512i zeros, __m512i* value) {
    __m512 level[D::VECS];
    D::levels(part, d.unsigned_table(), level);
    for (int j = 0; j < D::VECS; ++j)
      value[j] = _mm512_castps_si512(_mm512_sub_ps(level[j], _mm512_cvtepi32_ps(zeros)));
  }
};

// Exact sums of integers; zero points are taken from the sums, for which x has those of its lanes.
template <class D>
struct ByInt8 : ByteSums {
  using Sums = ByteSums;
  using Decoder = D;
  using Table = NoTable;
  static constexpr int XVECS = 1, OFFSET = D::OFFSET;
  static constexpr bool FOLDS = false, LANE_ZEROS = false;

  HFQ_INLINE Table table(const D&, int) { return {}; }
  HFQ_INLINE void levels(const D&, const __m512i* part, Table, __m512i* value) { D::codes(part, value); }
};

// x in fixed point of 14 or 15 bits, with a power of two for each group of columns, meets panels of integers: of 15 bits
// what lies within 2**-8 of the largest value of its group is exact if x is bf16, the rest to 2**-16 of that; the sums of a
// group are exact.
template <class D>
struct ByFixed : ByLevels<D, WordSums> {
  static constexpr int XVECS = 1;

  HFQ_INLINE void levels(const D& d, const __m512i* part, typename D::Table table, __m512i* value) { word_levels(d, part, table, value); }
  HFQ_INLINE void levels_lanes(const D& d, const __m512i* part, __m512i zeros, __m512i* value) {
    word_levels_lanes(d, part, zeros, value);
  }
  // Columns that share a power of two: those of a scale, which are all there, or part of them. 0: not served.
  static int64_t group_size(const Product& p) {
    if (p.groups == 1) return 128;
    return p.group_size <= D::MOST_COLUMNS && p.groups * p.group_size == p.K ? p.group_size : 0;
  }
};

// Vectors per block after decoding.
template <class C>
constexpr int vecs() {
  return C::Decoder::VECS * C::XVECS;
}

// Where element e of vector j of a packed block comes from.
template <class C>
static int source_of(int vec, int element) {
  using D = typename C::Decoder;
  if (C::XVECS == 2) return D::code(vec / 2, 2 * element + vec % 2);
  return D::code(vec, element);
}

// 16 scales from `first` on, as fp32; those past `count` are zero.
HFQ_INLINE __m512 load_scales(const void* base, int dtype, int64_t first, int64_t count) {
  const __mmask16 mask = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
  switch (dtype) {
    case F32: return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(base) + first);
    case BF16:
      return as_float(_mm512_slli_epi32(
          _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(base) + first)), 16));
    case F16:
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(base) + first));
    case E8M0: {
      const __m512i bits = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, static_cast<const uint8_t*>(base) + first));
      __m512i value = _mm512_slli_epi32(bits, 23);
      value = _mm512_mask_mov_epi32(value, _mm512_testn_epi32_mask(bits, bits), _mm512_set1_epi32(0x00400000));
      value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(bits, _mm512_set1_epi32(255)),
                                    _mm512_set1_epi32(0x7fc00000));
      return _mm512_maskz_mov_ps(mask, as_float(value));
    }
    default: {  // E4M3: shifted into place its exponent lacks 120
      const __m512i bits = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, static_cast<const uint8_t*>(base) + first));
      const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(127));
      __m512i value = _mm512_castps_si512(_mm512_mul_ps(as_float(_mm512_slli_epi32(magnitude, 20)),
                                                        _mm512_set1_ps(bits_to_float((127u + 120u) << 23))));
      value = _mm512_or_si512(value, _mm512_slli_epi32(_mm512_andnot_si512(_mm512_set1_epi32(127), bits), 24));
      value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(127)),
                                    _mm512_set1_epi32(0x7fc00000));
      return as_float(value);
    }
  }
}

// The bf16 value of each magnitude of E4M3, and its bytes.
struct MagnitudesE4M3 {
  uint16_t words[128];
  alignas(64) uint8_t upper[128], lower[128];

  constexpr MagnitudesE4M3() : words(), upper(), lower() {
    for (int i = 0; i < 128; ++i) {
      int exponent = i >> 3, mantissa = i & 7;
      if (exponent == 0 && mantissa > 0) {  // subnormal
        for (exponent = 1; mantissa < 8; mantissa *= 2) --exponent;
        mantissa -= 8;
      }
      const int bits = i == 127 ? 0x7fc0 : i == 0 ? 0 : (exponent + 120) << 7 | mantissa << 4;
      words[i] = static_cast<uint16_t>(bits);
      upper[i] = static_cast<uint8_t>(bits >> 8);
      lower[i] = static_cast<uint8_t>(bits);
    }
  }
};
constexpr MagnitudesE4M3 kMagnitudesE4M3;
constexpr int64_t kScalesAtOnce = 64;

// `count` scales from `first` on, as fp32, and zeros up to the next multiple of `kScalesAtOnce`. 64 of E4M3 take as many
// instructions as 16 would by arithmetic.
HFQ_INLINE void load_scales(const void* base, int dtype, int64_t first, int64_t count, float* to) {
  if (dtype != E4M3) {
    for (int64_t i = 0; i < count; i += 16) _mm512_storeu_ps(to + i, load_scales(base, dtype, first + i, count - i));
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(base) + first;
#if HFQ_VBMI
  // Words of 32 bits so that unpacking, which works within 128 bits, leaves the scales in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i upper0 = _mm512_load_si512(kMagnitudesE4M3.upper), upper1 = _mm512_load_si512(kMagnitudesE4M3.upper + 64);
  const __m512i lower0 = _mm512_load_si512(kMagnitudesE4M3.lower), lower1 = _mm512_load_si512(kMagnitudesE4M3.lower + 64);
  const __m512i zero = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += kScalesAtOnce, to += kScalesAtOnce) {
    const __m512i codes = _mm512_permutexvar_epi32(order, load_bytes(from + i, first_bytes(count - i)));
    __m512i upper = _mm512_permutex2var_epi8(upper0, codes, upper1);  // by the low seven bits
    upper = _mm512_ternarylogic_epi32(_mm512_set1_epi8(-128), codes, upper, 0xEA);  // (sign & codes) | upper
    const __m512i lower = _mm512_permutex2var_epi8(lower0, codes, lower1);
    const __m512i words[2] = {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
    for (int half = 0; half < 2; ++half) {
      _mm512_storeu_si512(to + 32 * half, _mm512_unpacklo_epi16(zero, words[half]));
      _mm512_storeu_si512(to + 32 * half + 16, _mm512_unpackhi_epi16(zero, words[half]));
    }
  }
#else
  const SignedMagnitudes magnitudes(kMagnitudesE4M3.words);
  for (int64_t i = 0; i < ceil_div(count, kScalesAtOnce) * kScalesAtOnce; i += 32, to += 32) {
    const __mmask32 exists = static_cast<__mmask32>(first_bytes(count - i));
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(exists, from + i));
    const __m512i values = magnitudes.of(codes, _mm512_slli_epi16(codes, 8));
    const __m256i halves[2] = {_mm512_castsi512_si256(values), _mm512_extracti64x4_epi64(values, 1)};
    for (int half = 0; half < 2; ++half)
      _mm512_storeu_si512(to + 16 * half, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves[half]), 16));
  }
#endif
}

// 16 zero points from `first` on.
HFQ_INLINE __m512i load_zeros(const uint8_t* base, int64_t first, int64_t count) {
  const __mmask16 mask = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, base + first));
}

// 16 values of x from `first` on, as fp32; those past `count` are zero.
HFQ_INLINE __m512 load_x(const void* base, int dtype, int64_t first, int64_t count) {
  if (dtype != INT8) return load_scales(base, dtype, first, count);
  const __mmask16 mask = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, static_cast<const int8_t*>(base) + first)));
}

// fp32 -> bf16 bits in 16 lanes, half to even; NaN stays NaN.
HFQ_INLINE __m256i to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

// [a, b, a, b] in each 128 bits: sums of half of the lanes.
HFQ_INLINE __m512 add_lanes(__m512 a, __m512 b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
HFQ_INLINE __m512i add_lanes(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
HFQ_INLINE __m512 add_pairs(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
HFQ_INLINE __m512i add_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
HFQ_INLINE __m512 add_quarters(__m512 a, __m512 b) {
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  return _mm512_add_ps(sums, _mm512_shuffle_f32x4(sums, sums, 0xb1));
}
HFQ_INLINE __m512 add_quarters(__m512i a, __m512i b) {
  const __m512i sums = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  return _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1)));
}

// The sums of the lanes of up to 8 vectors of floats or integers, by a third of the instructions of one at a time.
template <int COUNT, class V>
HFQ_INLINE void reduce_add(const V (&v)[COUNT], float (&out)[COUNT]) {
  static_assert(COUNT <= 8, "more than a vector holds");
  constexpr int last = COUNT - 1;
  V quads[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int at = COUNT > 4 * i ? 4 * i : 0;
    const V a = add_lanes(v[at], v[at + 1 < COUNT ? at + 1 : last]);
    quads[i] = at + 2 < COUNT ? add_pairs(a, add_lanes(v[at + 2], v[at + 3 < COUNT ? at + 3 : last])) : add_pairs(a, a);
  }
  const __m512 sums = add_quarters(quads[0], quads[1]);  // those of the first four in lane 0, of the others in lane 2
  const __m256 both = _mm512_castps512_ps256(_mm512_shuffle_f32x4(sums, sums, 0x08));
  float all[8];  // what a masked store has written cannot be read at once
  _mm256_storeu_ps(all, both);
  memcpy(out, all, sizeof(out));
}

// 16 results to y, `count` of them.
HFQ_INLINE void store_y(void* base, int dtype, int64_t first, __mmask16 mask, __m512 value) {
  switch (dtype) {
    case F32: _mm512_mask_storeu_ps(static_cast<float*>(base) + first, mask, value); break;
    case BF16: _mm256_mask_storeu_epi16(static_cast<uint16_t*>(base) + first, mask, to_bf16(value)); break;
    default:
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(base) + first, mask,
                               _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

}  // namespace HFQ_AVX512
}  // namespace hfq
