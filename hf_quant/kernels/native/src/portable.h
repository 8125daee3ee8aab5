// The same products in plain C++, compiled once for every instruction set: 8 rows of the weight at a time are decoded
// to fp32 (int8 for products with int8 x), and the compiler vectorizes the dot products.
#pragma once

#include <atomic>

#include "kernels.h"
#include "parallel.h"

namespace hfq {
namespace HFQ_SET {

constexpr int64_t kRows = 8;        // rows of the weight that are decoded at once
constexpr int64_t kColumns = 1024;  // columns: 32 KB in fp32

// Code k of a packed row.
static inline int code_at(const uint8_t* row, int layout, int64_t k) {
  const int64_t unit = k / 32, i = k % 32;
  switch (layout) {
    case PACKED2: return row[8 * unit + i / 4] >> (2 * (i % 4)) & 3;
    case PACKED3: {
      const uint8_t* from = row + 12 * unit;
      return (from[i / 4] >> (2 * (i % 4)) & 3) | (from[8 + i / 8] >> (i % 8) & 1) << 2;
    }
    case PACKED4: return row[16 * unit + i / 2] >> (4 * (i % 2)) & 15;
    case PACKED6: {
      const uint8_t* from = row + 24 * unit;
      return (from[i / 2] >> (4 * (i % 2)) & 15) | (from[16 + i / 4] >> (2 * (i % 4)) & 3) << 4;
    }
    default: return row[k];
  }
}

// Codes first..first + count of a row; `first` is a multiple of 32.
static inline void unpack(const uint8_t* row, int layout, int64_t first, int64_t count, uint8_t* __restrict codes) {
  switch (layout) {
    case PACKED4: {
      const uint8_t* from = row + first / 2;
      for (int64_t i = 0; i < count / 2; ++i) {
        codes[2 * i] = from[i] & 15;
        codes[2 * i + 1] = from[i] >> 4;
      }
      if (count % 2) codes[count - 1] = from[count / 2] & 15;
      return;
    }
    case PACKED2: {
      const uint8_t* from = row + first / 4;
      for (int64_t i = 0; i < count / 4; ++i)
        for (int j = 0; j < 4; ++j) codes[4 * i + j] = from[i] >> (2 * j) & 3;
      for (int64_t k = count / 4 * 4; k < count; ++k) codes[k] = from[k / 4] >> (2 * (k % 4)) & 3;
      return;
    }
    case PACKED3:
    case PACKED6:
      for (int64_t k = 0; k < count; ++k) codes[k] = static_cast<uint8_t>(code_at(row, layout, first + k));
      return;
    default: memcpy(codes, row + first, static_cast<size_t>(count));
  }
}

struct Segment {
  int64_t expert, first, count;
};

// What one thread works in.
struct Scratch {
  float weight[kRows * kColumns];
  uint8_t codes[kRows * kColumns];
};

static inline float dot(const float* __restrict a, const float* __restrict b, int64_t count) {
  float lanes[16] = {};
  int64_t k = 0;
  for (; k + 16 <= count; k += 16)
    for (int i = 0; i < 16; ++i) lanes[i] += a[k + i] * b[k + i];
  float total = 0;
  for (; k < count; ++k) total += a[k] * b[k];
  for (int i = 0; i < 16; ++i) total += lanes[i];
  return total;
}

static inline int32_t dot(const int8_t* __restrict a, const uint8_t* __restrict b, int64_t count) {
  int32_t total = 0;
  for (int64_t k = 0; k < count; ++k) total += static_cast<int16_t>(a[k]) * static_cast<int16_t>(b[k]);
  return total;
}

class Matmul {
 public:
  explicit Matmul(const Product& p) : p_(p), integer_(p.compute == BY_INT8) {}

  bool run() {
    const int64_t chunk = p_.M < kChunk ? p_.M : kChunk, width = integer_ ? 1 : 4;
    const int64_t x_bytes = ceil_div(chunk * p_.K * width, 64) * 64, scale_bytes = ceil_div(chunk * 4, 64) * 64;
    const int64_t sum_bytes = integer_ ? ceil_div(chunk * p_.groups * 4, 64) * 64 : 0;
    char* memory = static_cast<char*>(
        thread_scratch(0, static_cast<size_t>(x_bytes + scale_bytes + sum_bytes + chunk * sizeof(Segment))));
    if (memory == nullptr) return false;
    x_ = memory;
    scales_ = reinterpret_cast<float*>(memory + x_bytes);
    sums_ = reinterpret_cast<int32_t*>(memory + x_bytes + scale_bytes);
    segments_ = reinterpret_cast<Segment*>(memory + x_bytes + scale_bytes + sum_bytes);
    for (int64_t first = 0; first < p_.M; first += kChunk) {
      const int64_t count = min64(kChunk, p_.M - first);
      parallel_for(count, count * p_.K < (1 << 16) ? 1 : p_.threads, [&](int64_t i) { load_row(first + i, i); });
      if (!multiply(first, count)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kChunk = 256;

  void load_row(int64_t row, int64_t i) {
    const char* x = static_cast<const char*>(p_.x) + row * p_.x_stride * element_size(p_.x_dtype);
    scales_[i] = p_.row_scale == nullptr ? 1.0f : p_.row_scale[row];
    if (!integer_) {
      float* target = reinterpret_cast<float*>(x_) + i * p_.K;
      for (int64_t k = 0; k < p_.K; ++k) target[k] = load_as_float(x, p_.x_dtype, k);
      return;
    }
    int8_t* target = reinterpret_cast<int8_t*>(x_) + i * p_.K;
    if (p_.x_dtype == INT8) {
      memcpy(target, x, static_cast<size_t>(p_.K));
    } else {
      uint32_t top = 0;  // as integers magnitudes have the order of their values, NaN last
      for (int64_t k = 0; k < p_.K; ++k) {
        const uint32_t bits = float_to_bits(load_as_float(x, p_.x_dtype, k)) & 0x7fffffffu;
        top = bits > top ? bits : top;
      }
      const float scale = scales_[i] = int8_row_scale(bits_to_float(top));
      for (int64_t k = 0; k < p_.K; ++k) {
        float q = load_as_float(x, p_.x_dtype, k) / scale;
        q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q == q ? q : 0.0f;
        target[k] = static_cast<int8_t>(static_cast<int32_t>(float_to_bits(q + 12582912.0f)) - 0x4B400000);
      }
    }
    for (int64_t g = 0; g < p_.groups; ++g) {
      int32_t sum = 0;
      for (int64_t k = g * group(); k < min64(p_.K, (g + 1) * group()); ++k) sum += target[k];
      sums_[i * p_.groups + g] = sum;
    }
  }

  int64_t group() const { return p_.groups == 1 ? p_.K : p_.group_size; }

  bool multiply(int64_t first, int64_t count) {
    int64_t num_segments = 0, start = 0;
    if (p_.ends == nullptr) {
      segments_[num_segments++] = {0, 0, count};
    } else {
      for (int64_t e = 0; e < p_.experts; ++e) {
        const int64_t begin = max64(start, first), end = min64(p_.ends[e], first + count);
        if (end > begin) segments_[num_segments++] = {e, begin - first, end - begin};
        start = max64(start, p_.ends[e]);
      }
    }
    const int64_t panels = ceil_div(p_.N, kRows);
    std::atomic<bool> ok{true};
    parallel_for(num_segments * panels, p_.threads, [&](int64_t task) {
      const Segment& s = segments_[task / panels];
      const size_t sums = static_cast<size_t>(s.count * kRows) * sizeof(float);
      Scratch* scratch = static_cast<Scratch*>(thread_scratch(1, sizeof(Scratch) + sums));
      if (scratch == nullptr) {
        ok = false;
        return;
      }
      float* y = reinterpret_cast<float*>(scratch + 1);
      memset(y, 0, sums);
      panel(s, task % panels * kRows, *scratch, y);
      store(s, task % panels * kRows, first, y);
    });
    return ok;
  }

  void panel(const Segment& s, int64_t n, Scratch& scratch, float* y) const {
    const int64_t rows = min64(kRows, p_.N - n), scale_base = s.expert * p_.expert_scale;
    const uint8_t* qdata = p_.qdata + s.expert * p_.expert_qdata;
    for (int64_t k = 0; k < p_.K; k += kColumns) {
      const int64_t columns = min64(kColumns, p_.K - k);
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* row = qdata + (n + r) * p_.row_bytes;
        uint8_t* codes = scratch.codes + r * kColumns;
        unpack(row, p_.layout, k, columns, codes);
        const int64_t scale_first = scale_base + (n + r) / p_.scale_rows * p_.scale_stride;
        if (integer_) {
          if (p_.layout == BYTES_INT)
            for (int64_t i = 0; i < columns; ++i) codes[i] ^= 0x80;
        } else {
          decode(codes, scale_first, k, columns, scratch.weight + r * kColumns);
        }
        for (int64_t i = 0; i < s.count; ++i) {
          float* total = y + i * kRows + r;
          if (integer_) {
            *total = add_groups(scratch, r, s.first + i, scale_first, k, columns, *total);
          } else {
            *total += dot(reinterpret_cast<const float*>(x_) + (s.first + i) * p_.K + k,
                          scratch.weight + r * kColumns, columns);
          }
        }
      }
    }
  }

  // (level or code - zero) * scale in fp32.
  void decode(const uint8_t* codes, int64_t scale_first, int64_t k, int64_t columns, float* weight) const {
    for (int64_t at = 0; at < columns;) {
      const int64_t g = p_.groups == 1 ? 0 : (k + at) / p_.group_size;
      const int64_t end = p_.groups == 1 ? columns : min64(columns, (g + 1) * p_.group_size - k);
      const float scale = load_as_float(p_.scale, p_.scale_dtype, scale_first + g);
      if (p_.zero != nullptr) {
        const float zero = p_.zero[scale_first + g];
        for (int64_t i = at; i < end; ++i) weight[i] = (codes[i] - zero) * scale;
      } else if (p_.layout == BYTES_INT) {
        for (int64_t i = at; i < end; ++i) weight[i] = static_cast<int8_t>(codes[i]) * scale;
      } else {
        for (int64_t i = at; i < end; ++i) weight[i] = p_.levels[codes[i]] * scale;
      }
      at = end;
    }
  }

  float add_groups(const Scratch& scratch, int64_t r, int64_t i, int64_t scale_first, int64_t k, int64_t columns,
                   float total) const {
    const int8_t* x = reinterpret_cast<const int8_t*>(x_) + i * p_.K;
    const int offset = p_.layout == BYTES_INT ? 128 : 8;
    if (p_.groups == 1) {  // the sum stays an integer, in the bits of the float, until all columns are added
      const int32_t sum = static_cast<int32_t>(float_to_bits(total)) + dot(x + k, scratch.codes + r * kColumns, columns);
      if (k + columns < p_.K) return bits_to_float(static_cast<uint32_t>(sum));
      const int zero = p_.zero == nullptr ? offset : p_.zero[scale_first];
      return static_cast<float>(sum - zero * sums_[i]) * load_as_float(p_.scale, p_.scale_dtype, scale_first);
    }
    for (int64_t at = 0; at < columns;) {
      const int64_t g = (k + at) / p_.group_size, end = min64(columns, (g + 1) * p_.group_size - k);
      const int zero = p_.zero == nullptr ? offset : p_.zero[scale_first + g];
      int32_t sum = dot(x + k + at, scratch.codes + r * kColumns + at, end - at);
      if (k + at == g * p_.group_size) sum -= zero * sums_[i * p_.groups + g];
      total += static_cast<float>(sum) * load_as_float(p_.scale, p_.scale_dtype, scale_first + g);
      at = end;
    }
    return total;
  }

  void store(const Segment& s, int64_t n, int64_t first, const float* y) const {
    const float global = p_.global_scale == nullptr ? 1.0f : p_.global_scale[s.expert];
    for (int64_t i = 0; i < s.count; ++i) {
      for (int64_t r = 0; r < min64(kRows, p_.N - n); ++r) {
        const float bias =
            p_.bias == nullptr ? 0.0f : load_as_float(p_.bias, p_.bias_dtype, s.expert * p_.expert_bias + n + r);
        store_float(p_.y, p_.y_dtype, (first + s.first + i) * p_.N + n + r,
                    y[i * kRows + r] * (global * scales_[s.first + i]) + bias);
      }
    }
  }

  const Product& p_;
  const bool integer_;
  char* x_ = nullptr;
  float* scales_ = nullptr;
  int32_t* sums_ = nullptr;
  Segment* segments_ = nullptr;
};

static bool matmul(const Product& p) { return Matmul(p).run(); }

}  // namespace HFQ_SET
}  // namespace hfq
