// A matrix quantized to int8 by rows and by columns at once, and sums of int8 products scaled, in plain C++, compiled
// once for every instruction set: what training in 8 bits computes beside its products.
#pragma once

#include <atomic>

#include "philox.h"
#include "portable.h"

#if defined(__clang__) || __GNUC__ >= 12
#define HFQ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HFQ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bytes16{__VA_ARGS__})
#endif

namespace hfq {
namespace HFQ_SET {

typedef int8_t Bytes16 __attribute__((vector_size(16)));
constexpr int64_t kSide = 64;  // of a tile that is quantized at once: 16 KB in fp32

// Rows [16] of 16 bytes to columns, in four perfect shuffles.
static inline void transpose16(const int8_t* from, int64_t from_stride, int8_t* to, int64_t to_stride) {
  Bytes16 a[16], b[16];
  for (int i = 0; i < 16; ++i) memcpy(&a[i], from + i * from_stride, 16);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = HFQ_SHUFFLE(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      b[2 * i + 1] = HFQ_SHUFFLE(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    memcpy(a, b, sizeof a);
  }
  for (int i = 0; i < 16; ++i) memcpy(to + i * to_stride, &a[i], 16);
}

// A value in steps of its scale lies between -127 and 127 but for the last place, or has a scale with which its code
// means nothing. The minimum keeps the compiler from fusing the product before it with the sum, which rounds once less.
static inline int8_t int8_code(float value) {
  const float q = value < 127.0f ? value : 127.0f;
  return static_cast<int8_t>(float_to_bits(q + 12582912.0f));  // 1.5 * 2**23: the low byte is the integer
}

static inline uint32_t magnitude(float value) { return float_to_bits(value) & 0x7fffffffu; }

class TwoWay {
 public:
  explicit TwoWay(const TwoWayQuantization& q) : q_(q), strips_(ceil_div(q.M, kSide)) {}

  bool run() {
    const int threads = q_.M * q_.K < (1 << 16) ? 1 : q_.threads;
    if (q_.codes_t == nullptr) {
      parallel_for(q_.M, threads, [&](int64_t i) { quantize_row(i); });
      return true;
    }
    // The largest magnitudes of each strip's columns; as integers they have the order of their values, NaN last.
    tops_ = static_cast<uint32_t*>(thread_scratch(0, static_cast<size_t>(strips_ * q_.K) * 4));
    if (tops_ == nullptr) return false;
    parallel_for(strips_, threads, [&](int64_t strip) { measure(strip); });
    for (int64_t k = 0; k < q_.K; ++k) {
      uint32_t top = 0;
      for (int64_t strip = 0; strip < strips_; ++strip) {
        const uint32_t own = tops_[strip * q_.K + k];
        top = own > top ? own : top;
      }
      q_.column_scale[k] = int8_row_scale(bits_to_float(top), nullptr);
    }
    parallel_for(strips_, threads, [&](int64_t strip) { quantize(strip); });
    return true;
  }

 private:
  int64_t rows_of(int64_t strip) const { return min64(kSide, q_.M - strip * kSide); }

  void quantize_row(int64_t i) {
    const void* x = static_cast<const char*>(q_.x) + i * q_.x_stride * element_size(q_.x_dtype);
    float values[kColumns];
    const float scale = q_.row_scale[i] = int8_row_scale(row_top(x, q_.x_dtype, q_.K, values), nullptr);
    const float inverse = 1.0f / scale;
    for (int64_t k = 0; k < q_.K; k += kColumns) {
      const int64_t count = min64(kColumns, q_.K - k);
      if (q_.K > kColumns) to_float(x, q_.x_dtype, k, count, values);
      int8_t* __restrict codes = q_.codes + i * q_.K + k;
      for (int64_t j = 0; j < count; ++j) codes[j] = int8_code(values[j] * inverse);
    }
  }

  void measure(int64_t strip) {
    uint32_t* __restrict tops = tops_ + strip * q_.K;
    memset(tops, 0, static_cast<size_t>(q_.K) * 4);
    float values[kColumns];
    for (int64_t i = strip * kSide; i < strip * kSide + rows_of(strip); ++i) {
      uint32_t row_top = 0;
      for (int64_t k = 0; k < q_.K; k += kColumns) {
        const int64_t count = min64(kColumns, q_.K - k);
        to_float(q_.x, q_.x_dtype, i * q_.x_stride + k, count, values);
        for (int64_t j = 0; j < count; ++j) {
          const uint32_t bits = magnitude(values[j]);
          row_top = bits > row_top ? bits : row_top;
          tops[k + j] = bits > tops[k + j] ? bits : tops[k + j];
        }
      }
      q_.row_scale[i] = int8_row_scale(bits_to_float(row_top), nullptr);
    }
  }

  void quantize(int64_t strip) {
    const int64_t first = strip * kSide, rows = rows_of(strip);
    float values[kSide], inverses[kSide];
    int8_t tile[kSide * kSide];
    for (int64_t k = 0; k < q_.K; k += kSide) {
      const int64_t columns = min64(kSide, q_.K - k);
      for (int64_t j = 0; j < columns; ++j) inverses[j] = 1.0f / q_.column_scale[k + j];
      for (int64_t i = 0; i < rows; ++i) {
        to_float(q_.x, q_.x_dtype, (first + i) * q_.x_stride + k, columns, values);
        const float inverse = 1.0f / q_.row_scale[first + i];
        int8_t* __restrict codes = q_.codes + (first + i) * q_.K + k;
        int8_t* __restrict by_columns = tile + i * kSide;
        for (int64_t j = 0; j < columns; ++j) {
          codes[j] = int8_code(values[j] * inverse);
          by_columns[j] = int8_code(values[j] * inverses[j]);
        }
      }
      store_transposed(tile, first, rows, k, columns);
    }
  }

  // tile [rows, columns] to rows k.. and columns first.. of codes_t [K, M].
  void store_transposed(const int8_t* tile, int64_t first, int64_t rows, int64_t k, int64_t columns) {
    alignas(64) int8_t turned[kSide * kSide];  // so that whole lines of the cache are written at once
    for (int64_t j = 0; j < columns; j += 16)
      for (int64_t i = 0; i < rows; i += 16) transpose16(tile + i * kSide + j, kSide, turned + j * kSide + i, kSide);
    int8_t* to = q_.codes_t + k * q_.M + first;
    if (rows == kSide) {
      for (int64_t j = 0; j < columns; ++j) memcpy(to + j * q_.M, turned + j * kSide, kSide);
    } else {
      for (int64_t j = 0; j < columns; ++j) memcpy(to + j * q_.M, turned + j * kSide, static_cast<size_t>(rows));
    }
  }

  const TwoWayQuantization& q_;
  const int64_t strips_;
  uint32_t* tops_ = nullptr;
};

static bool quantize_two_way(const TwoWayQuantization& q) { return TwoWay(q).run(); }

static void scale_sums(const ScaledSums& s) {
  parallel_for(s.M, s.M * s.N < (1 << 16) ? 1 : s.threads, [&](int64_t i) {
    float values[kColumns];
    const float row_scale = s.row_scale[i];
    for (int64_t n = 0; n < s.N; n += kColumns) {
      const int64_t count = min64(kColumns, s.N - n);
      const int32_t* __restrict sums = s.sums + i * s.N + n;
      const float *__restrict scales = s.column_scale + n, *__restrict bias = s.bias;
      for (int64_t j = 0; j < count; ++j) values[j] = static_cast<float>(sums[j]) * row_scale * scales[j];
      if (bias != nullptr)
        for (int64_t j = 0; j < count; ++j) values[j] += bias[n + j];
      store_row(values, count, s.y, s.y_dtype, i * s.N + n);
    }
  });
}

// Codes between -127 and 127 of a part of a row, `bits` null for the nearest: the others of `requantize_rows_`.
static inline void requantize(const float* __restrict values, const uint16_t* __restrict bits, int64_t count,
                              float old_scale, float scale, bool stays, int8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) {
    float q = values[i] / scale;
    q = q < 127.0f ? q : 127.0f;  // NaN, too
    q = q > -127.0f ? q : -127.0f;
    if (bits != nullptr) {
      const float offset = (static_cast<float>(bits[i]) + 0.5f) * bits_to_float((127u - 16u) << 23) - 0.5f;  // exact
      q += offset;
    }
    const int8_t found = int8_code(q);
    const bool is_same = stays && values[i] == static_cast<float>(codes[i]) * old_scale;
    codes[i] = is_same ? codes[i] : found;
  }
}

static void requantize_rows(const RowUpdate& u) {
  parallel_for(u.N, u.N * u.K < (1 << 15) ? 1 : u.threads, [&](int64_t n) {
    const float* values = u.values + n * u.K;
    uint32_t top = 0;
    for (int64_t k = 0; k < u.K; ++k) {
      const uint32_t own = magnitude(values[k]);
      top = own > top ? own : top;
    }
    const float amax = bits_to_float(top), old = u.scale[n], fresh = amax / 120.0f;
    const bool stays = amax >= old * 60.0f && amax <= old * 127.0f;
    const float scale = stays ? old : fresh < bits_to_float((127u - 90u) << 23) ? 1.0f : fresh;
    uint16_t bits[kColumns];
    for (int64_t k = 0; k < u.K; k += kColumns) {
      const int64_t count = min64(kColumns, u.K - k);
      if (u.stochastic) draw_row(u.key, static_cast<uint32_t>(u.row + n), k, count, bits);
      requantize(values + k, u.stochastic ? bits : nullptr, count, old, scale, stays, u.codes + n * u.K + k);
    }
    u.scale[n] = scale;
  });
}

}  // namespace HFQ_SET
}  // namespace hfq
