// Panels of 64 tokens of quantized keys or values, decoded to fp32, and their products with rows of queries.
#pragma once

#include "kernels.h"
#include "portable.h"

namespace hfq {
namespace HFQ_SET {

constexpr int64_t kTokens = 64;       // of a panel
constexpr int64_t kFewTokens = 256;   // that few rows meet at once
constexpr int64_t kQueryRows = 48;    // that meet a panel
constexpr int64_t kSplitTokens = 1024;
constexpr int64_t kMaxSplits = 64;

// A vector of the instruction set, at any address; sums of ROWS x VECS of them fit its registers.
constexpr int kLanes = HFQ_VECTOR_BYTES / 4;
constexpr int kVecs = HFQ_VECTOR_BYTES == 64 ? 4 : 2;
typedef float Lanes __attribute__((vector_size(HFQ_VECTOR_BYTES), aligned(4), may_alias));

// Sums of the products of a value with those of a row, in fp32.
struct Products {
  static constexpr int PER = 1;  // values of an element of 32 bits
  static inline void add(float left, Lanes row, Lanes& sum) { sum += left * row; }
};

// One row of codes of one token and head, as fp32.
static inline void decode_token(const Attention& a, const Cache& cache, int64_t b, int64_t h, int64_t t,
                                float* __restrict values) {
  const uint8_t* row = cache.row(b, h, t);
  uint8_t codes[kMaxHeadDim + 32];
  switch (a.layout) {
    case PACKED4: unpack_plane<4, false>(row, a.D / 2, 0, codes); break;
    case PACKED2: unpack_plane<2, false>(row, a.D / 4, 0, codes); break;
    case PACKED3:
    case PACKED6: unpack(row, a.layout, 0, a.D, codes); break;
    default: memcpy(codes, row, static_cast<size_t>(a.D));
  }
  const int64_t first = cache.scales_of(b, h, t);
  for (int64_t g = 0; g < a.groups; ++g) {
    const float scale = load_as_float(cache.scale, cache.scale_dtype, first + g * cache.scale_group);
    const float offset =
        cache.offset == nullptr ? 0.0f : load_as_float(cache.offset, cache.scale_dtype, first + g * cache.scale_group);
    const int64_t begin = g * a.group_size, end = begin + a.group_size;
    if (a.layout == BYTES_INT) {
      for (int64_t d = begin; d < end; ++d)
        values[d] = static_cast<float>(static_cast<int8_t>(codes[d])) * scale + offset;
    } else if (a.equally_spaced) {  // vectorizes, unlike a table
      for (int64_t d = begin; d < end; ++d) values[d] = (static_cast<float>(codes[d]) + a.levels[0]) * scale + offset;
    } else {
      for (int64_t d = begin; d < end; ++d) values[d] = a.levels[codes[d]] * scale + offset;
    }
  }
}

// How tokens first..first + count of a head become panels. With `few` rows, up to kFewTokens tokens at a time need none:
// `scores` makes those of all rows, kFewTokens apart, `add` adds values weighted by them to out [rows, D].
struct TokenPanels {
  using Dot = Products;
  static constexpr int64_t STEP = kTokens;  // tokens whose scores are made before values are added
  static constexpr bool ROUNDS = false;     // exponentials, to the dtype of the queries

  static bool few(const Attention&, int64_t) { return false; }
  static void scores(const Attention&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t, float*) {}
  static void add(const Attention&, int64_t, int64_t, int64_t, int64_t, const float*, int64_t, float*) {}

  // panel [D, kTokens]
  static void keys(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    float values[kMaxHeadDim];
    for (int64_t t = 0; t < count; ++t) {
      decode_token(a, a.k, b, h, first + t, values);
      for (int64_t d = 0; d < a.D; ++d) panel[d * kTokens + t] = values[d];
    }
  }
  // panel [kTokens, D]
  static void values(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    for (int64_t t = 0; t < count; ++t) decode_token(a, a.v, b, h, first + t, panel + t * a.D);
  }
};

// The same of keys and values that are no codes, with the steps and roundings of torch's own attention on CPUs
// (cpu_flash_attention in ATen/native/cpu/FlashAttentionKernel.cpp).
struct ValuePanels : TokenPanels {
  static constexpr int64_t STEP = 512;
  static constexpr bool ROUNDS = true;

  static void keys(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    float values[kMaxHeadDim];
    for (int64_t t = 0; t < count; ++t) {
      to_float(a.k.row(b, h, first + t), a.q_dtype, 0, a.D, values);
      for (int64_t d = 0; d < a.D; ++d) panel[d * kTokens + t] = values[d];
    }
  }
  static void values(const Attention& a, int64_t b, int64_t h, int64_t first, int64_t count, float* panel) {
    for (int64_t t = 0; t < count; ++t) to_float(a.v.row(b, h, first + t), a.q_dtype, 0, a.D, panel + t * a.D);
  }
};

template <class Dot, int ROWS, int VECS>
static inline void multiply_tile(const float* left, int64_t left_stride, const float* panel, int64_t panel_stride,
                                 int64_t depth, float* out, int64_t out_stride) {
  Lanes sums[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) sums[r][j] = *reinterpret_cast<const Lanes*>(out + r * out_stride + j * kLanes);
  for (int64_t i = 0; i < depth; ++i) {
    Lanes row[VECS];
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) row[j] = *reinterpret_cast<const Lanes*>(panel + i * panel_stride + j * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int j = 0; j < VECS; ++j) Dot::add(left[r * left_stride + i], row[j], sums[r][j]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) *reinterpret_cast<Lanes*>(out + r * out_stride + j * kLanes) = sums[r][j];
}

template <class Dot, int ROWS>
static void multiply_rows(const float* left, int64_t left_stride, const float* panel, int64_t columns, int64_t depth,
                          float* out) {
  int64_t c = 0;
  for (; c + kVecs * kLanes <= columns; c += kVecs * kLanes)
    multiply_tile<Dot, ROWS, kVecs>(left, left_stride, panel + c, columns, depth, out + c, columns);
  for (; c < columns; c += kLanes)
    multiply_tile<Dot, ROWS, 1>(left, left_stride, panel + c, columns, depth, out + c, columns);
}

// out [rows, columns] += left [rows, depth] @ panel [depth, columns]; columns a multiple of 16.
template <class Dot>
static void multiply(const float* left, int64_t left_stride, int64_t rows, const float* panel, int64_t columns,
                     int64_t depth, float* out) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6)
    multiply_rows<Dot, 6>(left + r * left_stride, left_stride, panel, columns, depth, out + r * columns);
  left += r * left_stride;
  out += r * columns;
  switch (rows - r) {
    case 1: return multiply_rows<Dot, 1>(left, left_stride, panel, columns, depth, out);
    case 2: return multiply_rows<Dot, 2>(left, left_stride, panel, columns, depth, out);
    case 3: return multiply_rows<Dot, 3>(left, left_stride, panel, columns, depth, out);
    case 4: return multiply_rows<Dot, 4>(left, left_stride, panel, columns, depth, out);
    case 5: return multiply_rows<Dot, 5>(left, left_stride, panel, columns, depth, out);
  }
}

}  // namespace HFQ_SET
}  // namespace hfq
