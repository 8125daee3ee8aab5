// What the kernels of every instruction set share: the description of one product, and small conversions.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words of packed codes are little-endian"
#endif

// HFQ_UNFUSED costs other options of the compiler as well: loops with comparisons no longer vectorize (GCC 12, a fit of
// 64 values 230 ns instead of 60). Loops are functions of their own, therefore; none of them adds to a product.
#define HFQ_LOOP __attribute__((noinline))

namespace hfq {

enum DType : int { F32, BF16, F16, E8M0, E4M3, INT8 };

// How codes lie in memory (hf_quant.kernels.codes): packed 2, 3, 4 or 6 bits in units of 32 codes, or bytes.
// VALUES: keys and values of attention that are no codes, in the dtype of the queries.
enum Layout : int { PACKED2, PACKED3, PACKED4, PACKED6, BYTES_INT, BYTES_FLOAT, VALUES };

// What x and the codes become before they are multiplied.
enum Compute : int { BY_F32, BY_BF16, BY_INT8 };

// y [M, N] = (x [M, K] @ w [N, K].T) * row_scale [M, 1] + bias [N], for one weight or for each of several experts.
struct Product {
  int64_t M, N, K;
  int64_t group_size, groups;  // values of K per scale, scales per row
  int layout, compute;
  const float* levels;  // value of each code: 2**bits, or 256 of an 8-bit float; unused for BYTES_INT

  const void* x;  // [M, K]; INT8: codes with row_scale
  int x_dtype;
  int64_t x_stride;        // elements from row to row
  // If block is not 0: x becomes x * diagonal [K], times the orthonormal Hadamard matrix in each block of columns.
  const float* diagonal;
  int64_t block;
  const float* row_scale;  // [M] or null; with BY_INT8 and x not INT8 the rows are quantized here
  const float* input_scale;  // of all rows that are quantized here, or null: each has its own
  void* y;                 // [M, N], contiguous
  int y_dtype;

  const uint8_t* qdata;
  int64_t row_bytes;
  const void* scale;
  int scale_dtype;
  int64_t scale_stride, scale_rows;  // elements from row to row; rows of the weight that share one
  const uint8_t* zero;               // of the scale's shape, or null
  const float* global_scale;         // one per expert, or null
  const void* bias;
  int bias_dtype;
  // Of each expert [ceil(N / 16), groups, 16], what is added to a weight beside its code times its scale; null: nothing.
  const float* offsets;
  // What the offsets add to y, of which `multiply` takes one: the sums of x over the groups [M, groups], or all [M, N].
  const float *group_sums, *rest;

  int64_t experts;
  const int32_t* ends;  // [experts] end of each expert's rows of x, ascending; null for one weight
  int64_t expert_qdata, expert_scale, expert_bias;  // distances, in bytes, elements, elements
  int threads;
  // Another product with the same x, which is computed with this one: see `share_x`. null: none.
  const Product* sibling;
  bool by_tiles;  // matrix units may be used
};

// Whether two products with the same x make the same of its rows, and read them by the same groups.
static inline bool share_x(const Product& a, const Product& b) {
  return a.K == b.K && a.x_stride == b.x_stride && a.diagonal == b.diagonal && a.block == b.block &&
         a.input_scale == b.input_scale && a.group_size == b.group_size && a.groups == b.groups && a.layout == b.layout &&
         a.levels == b.levels && a.compute == b.compute && (a.zero == nullptr) == (b.zero == nullptr);
}

// Threads for `count` rows of x that meet the weights of `experts`. A team costs some microseconds, above all where its threads
// share no cache: one thread reads 100 KB in that time.
static inline int threads_of(const Product& p, int64_t count, int64_t experts) {
  if (experts == 0) return 1;
  int64_t rows = 0;
  for (const Product* each = &p; each != nullptr; each = each->sibling) rows += each->N;
  const int64_t bytes = experts * rows * p.row_bytes, fours = (count + 3 * experts) / (4 * experts);
  return bytes * fours < (96 << 10) ? 1 : p.threads;
}

constexpr int kOffsetRows = 8;  // rows of x that meet offsets of a weight together

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float bf16_to_float(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

// Rounded half to even to bf16, whose bits are the upper half; NaN stays NaN. Without a branch, for loops that vectorize.
static inline uint32_t round_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1);
  const bool is_nan = static_cast<int32_t>(bits & 0x7fffffffu) > 0x7f800000;
  return (is_nan ? bits | 0x400000u : rounded) & 0xffff0000u;
}

static inline uint16_t float_to_bf16(float value) { return static_cast<uint16_t>(round_to_bf16(value) >> 16); }

static inline float f16_to_float(uint16_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Shifted into place the exponent lacks 112; the product takes care of subnormals, too.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float((127u + 112u) << 23)));
}

static inline uint16_t float_to_f16(float value) {
  uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // subnormal: adding 2**23 units of 2**-24 rounds as the format does
    float shifted = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  uint32_t odd = (magnitude >> 13) & 1;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13));
}

static inline float e4m3_to_float(uint8_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return bits_to_float(0x7fc00000u);
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 20) * bits_to_float((127u + 120u) << 23)));
}

static inline float e8m0_to_float(uint8_t bits) {
  if (bits == 255) return bits_to_float(0x7fc00000u);
  return bits_to_float(bits == 0 ? 0x00400000u : static_cast<uint32_t>(bits) << 23);
}

// At any address: tensors made from foreign memory need not be aligned.
template <class T>
static inline T load(const void* base, int64_t i) {
  T value;
  memcpy(&value, static_cast<const char*>(base) + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

static inline float load_as_float(const void* base, int dtype, int64_t i) {
  switch (dtype) {
    case F32: return load<float>(base, i);
    case BF16: return bf16_to_float(load<uint16_t>(base, i));
    case F16: return f16_to_float(load<uint16_t>(base, i));
    case E8M0: return e8m0_to_float(load<uint8_t>(base, i));
    case E4M3: return e4m3_to_float(load<uint8_t>(base, i));
    default: return load<int8_t>(base, i);
  }
}

static inline void store_float(void* base, int dtype, int64_t i, float value) {
  switch (dtype) {
    case F32: static_cast<float*>(base)[i] = value; break;
    case BF16: static_cast<uint16_t*>(base)[i] = float_to_bf16(value); break;
    default: static_cast<uint16_t*>(base)[i] = float_to_f16(value);
  }
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Scale of a row of activations from its largest magnitude: `row_scale` of hf_quant.kernels.rowwise. Or the one that is
// given, unless the row has NaN.
static inline float row_scale(float amax, const float* given, float limit) {
  if (given != nullptr) return amax == amax ? *given : amax;
  float scale = amax / limit;
  return scale < bits_to_float((127u - 90u) << 23) ? 1.0f : scale;  // NaN and inf stay
}

static inline float int8_row_scale(float amax, const float* given) { return row_scale(amax, given, 127.0f); }

// How values become integers of magnitudes up to 2**bits, by the bits of their largest magnitude: times `inverse`, in units of
// `step`. Zeros have a step of 1: a product with a denormal number takes a hundred cycles. If a value is not finite, the step
// is infinite, or NaN, and `keep_infinite` makes what is multiplied.
struct FixedPoint {
  bool is_finite;
  float inverse, step;

  FixedPoint(uint32_t top, int bits) : is_finite(top < 0x7f800000u), inverse(1.0f), step(bits_to_float(top)) {
    if (!is_finite) return;
    const uint32_t exponent = top == 0 ? 126 + bits : top >> 23 < 16 ? 16 : top >> 23;
    inverse = bits_to_float((253 + bits - exponent) << 23);
    step = bits_to_float((exponent + 1 - bits) << 23);
  }
};

// The infinite values as one unit each, with their sign; 0 for the others.
static inline void keep_infinite(const float* values, int64_t count, float* kept) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_to_bits(values[i]);
    kept[i] = (bits & 0x7fffffffu) != 0x7f800000u ? 0.0f : bits >> 31 ? -1.0f : 1.0f;
  }
}

// Whether codes of 2 to 4 bits, or of 8, mean integers: themselves less their zero point, or less half their number.
static inline bool has_integers(const Product& p) {
  if (p.layout == BYTES_INT) return p.zero == nullptr;
  const int count = p.layout == PACKED2 ? 4 : p.layout == PACKED3 ? 8 : p.layout == PACKED4 ? 16 : 0;
  const int offset = p.zero == nullptr ? count / 2 : 0;
  for (int i = 0; i < count; ++i)
    if (p.levels[i] != static_cast<float>(i - offset)) return false;
  return count > 0;
}

// Levels as words for which the sum of so many columns fits 32 bits, and the bits of the fixed point that they meet. Multiples
// of a power of two stay so, if words hold them; of others the largest becomes the largest word, and the rest is rounded: then
// both sides have about as many bits.
struct LevelsAsWords {
  int bits = 15;
  float unit;  // the level of 1

  LevelsAsWords(const float* levels, int count, int64_t columns, int16_t* words) {
    float largest = 0.0f;
    for (int i = 0; i < count; ++i) largest = fabsf(levels[i]) > largest ? fabsf(levels[i]) : largest;
    float units = bits_to_float(float_to_bits(most(columns) / largest) & 0x7f800000u);
    bool is_exact = true;
    for (int i = 0; i < count; ++i) is_exact = is_exact && levels[i] * units == rintf(levels[i] * units);
    if (!is_exact) {
      bits = columns < 16 ? 15 : 14;
      units = most(columns) / largest;
    }
    for (int i = 0; i < count; ++i) words[i] = static_cast<int16_t>(rintf(levels[i] * units));
    unit = 1.0f / units;
  }

 private:
  float most(int64_t columns) const { return static_cast<float>(min64((int64_t{1} << (31 - bits)) / columns - 1, 32767)); }
};

static inline int element_size(int dtype) {
  return dtype == F32 ? 4 : dtype == BF16 || dtype == F16 ? 2 : 1;
}

// A part of a chunk of x that one expert takes: rows first..first + count of the chunk.
struct Segment {
  int64_t expert, first, count;
};

// Those of rows first..first + count of x, `count` at most; returns their number.
static inline int64_t split_by_experts(const Product& p, int64_t first, int64_t count, Segment* segments) {
  if (p.ends == nullptr) {
    segments[0] = {0, 0, count};
    return 1;
  }
  int64_t found = 0, start = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    const int64_t begin = max64(start, first), end = min64(p.ends[e], first + count);
    if (end > begin) segments[found++] = {e, begin - first, end - begin};
    start = max64(start, p.ends[e]);
  }
  return found;
}

}  // namespace hfq
