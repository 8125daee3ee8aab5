// The same products in plain C++, compiled once for every instruction set: 8 rows of the weight at a time are decoded
// to fp32 (int8 for products with int8 x), and the compiler vectorizes the dot products.
#pragma once

#include <atomic>

#include "kernels.h"
#include "offsets.h"
#include "parallel.h"
#include "philox.h"
#include "rotation.h"

namespace hfq {
namespace HFQ_SET {

constexpr int64_t kRows = 8;        // rows of the weight that are decoded at once
constexpr int64_t kColumns = 1024;  // columns: 32 KB in fp32

// 2**shift times the BITS-wide codes of `bytes` bytes, put over `codes` or, with ADD, into them.
template <int BITS, bool ADD>
static inline void unpack_plane(const uint8_t* __restrict from, int64_t bytes, int shift, uint8_t* __restrict codes) {
  constexpr int kPer = 8 / BITS, kMask = (1 << BITS) - 1;
  for (int64_t b = 0; b < bytes; ++b) {
    for (int j = 0; j < kPer; ++j) {
      const uint8_t code = static_cast<uint8_t>((from[b] >> (BITS * j) & kMask) << shift);
      codes[kPer * b + j] = ADD ? codes[kPer * b + j] | code : code;
    }
  }
}

// Codes first..first + count of a row, `first` a multiple of 32; up to 31 codes of padding are written beyond.
static inline void unpack(const uint8_t* row, int layout, int64_t first, int64_t count, uint8_t* __restrict codes) {
  const int64_t units = ceil_div(count, 32);
  switch (layout) {
    case PACKED4: return unpack_plane<4, false>(row + first / 2, units * 16, 0, codes);
    case PACKED2: return unpack_plane<2, false>(row + first / 4, units * 8, 0, codes);
    case PACKED3:
      for (int64_t u = 0; u < units; ++u) {
        const uint8_t* from = row + (first / 32 + u) * 12;
        unpack_plane<2, false>(from, 8, 0, codes + 32 * u);
        unpack_plane<1, true>(from + 8, 4, 2, codes + 32 * u);
      }
      return;
    case PACKED6:
      for (int64_t u = 0; u < units; ++u) {
        const uint8_t* from = row + (first / 32 + u) * 24;
        unpack_plane<4, false>(from, 16, 0, codes + 32 * u);
        unpack_plane<2, true>(from + 16, 8, 4, codes + 32 * u);
      }
      return;
    default: memcpy(codes, row + first, static_cast<size_t>(count));
  }
}

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

static inline int32_t dot(const int8_t* __restrict a, const int8_t* __restrict b, int64_t count) {
  int64_t k = 0;
  int32_t total = 0;
#ifdef HFQ_SDOT
  int32x4_t even = vdupq_n_s32(0), odd = vdupq_n_s32(0);
  for (; k + 32 <= count; k += 32) {
    even = vdotq_s32(even, vld1q_s8(a + k), vld1q_s8(b + k));
    odd = vdotq_s32(odd, vld1q_s8(a + k + 16), vld1q_s8(b + k + 16));
  }
  total = vaddvq_s32(vaddq_s32(even, odd));
#endif
  for (; k < count; ++k) total += static_cast<int16_t>(a[k]) * static_cast<int16_t>(b[k]);
  return total;
}

// Weights from `codes` of columns k.., whose scales start at `scale_first`: (level or code - zero) * (scale * global).
static inline void decode(const Product& p, const uint8_t* __restrict codes, int64_t scale_first, float global, int64_t k,
                          int64_t columns, float* __restrict weight) {
  const int count = p.layout == PACKED2 ? 4 : p.layout == PACKED3 ? 8 : 16;
  bool equally_spaced = p.layout <= PACKED4;  // then a level is a subtraction, which vectorizes
  for (int i = 0; equally_spaced && i < count; ++i) equally_spaced = p.levels[i] == p.levels[0] + static_cast<float>(i);
  for (int64_t at = 0; at < columns;) {
    const int64_t g = p.groups == 1 ? 0 : (k + at) / p.group_size;
    const int64_t end = p.groups == 1 ? columns : min64(columns, (g + 1) * p.group_size - k);
    const float scale = load_as_float(p.scale, p.scale_dtype, scale_first + g) * global;
    if (equally_spaced) {
      const float zero = p.zero != nullptr ? p.zero[scale_first + g] : -p.levels[0];
      for (int64_t i = at; i < end; ++i) weight[i] = (static_cast<float>(codes[i]) - zero) * scale;
    } else if (p.layout == BYTES_INT) {
      for (int64_t i = at; i < end; ++i) weight[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
    } else {
      for (int64_t i = at; i < end; ++i) weight[i] = p.levels[codes[i]] * scale;
    }
    at = end;
  }
}

static inline void store_row(const float* __restrict from, int64_t count, void* base, int dtype, int64_t first) {
  if (dtype == F32) {
    memcpy(static_cast<float*>(base) + first, from, static_cast<size_t>(count) * 4);
  } else if (dtype == BF16) {
    uint16_t* __restrict to = static_cast<uint16_t*>(base) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = float_to_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) store_float(base, dtype, first + i, from[i]);
  }
}

static bool dequantize(const Product& p) {
  constexpr int64_t kRowsPerTask = 16;
  const int64_t tasks = ceil_div(p.N, kRowsPerTask);
  parallel_for(p.experts * tasks, p.N * p.K * p.experts < (1 << 16) ? 1 : p.threads, [&](int64_t task) {
    const int64_t e = task / tasks, first = task % tasks * kRowsPerTask;
    const float global = p.global_scale == nullptr ? 1.0f : p.global_scale[e];
    uint8_t codes[kColumns];
    float weight[kColumns];
    for (int64_t n = first; n < min64(first + kRowsPerTask, p.N); ++n) {
      const uint8_t* row = p.qdata + e * p.expert_qdata + n * p.row_bytes;
      const int64_t scale_first = e * p.expert_scale + n / p.scale_rows * p.scale_stride;
      for (int64_t k = 0; k < p.K; k += kColumns) {
        const int64_t columns = min64(kColumns, p.K - k);
        unpack(row, p.layout, k, columns, codes);
        decode(p, codes, scale_first, global, k, columns, weight);
        store_row(weight, columns, p.y, p.y_dtype, (e * p.N + n) * p.K + k);
      }
    }
  });
  return true;
}

// A row of x, multiplied with a diagonal [K], then with the Hadamard matrix in each block of columns.
static void transform_row(const void* x, int dtype, int64_t K, const float* __restrict diagonal, int64_t block,
                          float* __restrict values) {
  to_float(x, dtype, 0, K, values);
  rotate_blocks(values, diagonal, K, block);
}

// The largest magnitude of a row, NaN if it has one; up to kColumns values stay in the buffer.
static inline float row_top(const void* x, int dtype, int64_t K, float* __restrict values) {
  uint32_t top = 0;  // as integers magnitudes have the order of their values, NaN last
  for (int64_t k = 0; k < K; k += kColumns) {
    const int64_t count = min64(kColumns, K - k);
    to_float(x, dtype, k, count, values);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = float_to_bits(values[i]) & 0x7fffffffu;
      top = bits > top ? bits : top;
    }
  }
  return bits_to_float(top);
}

// Codes of one row, and its scale, which may be given.
static inline float quantize_row(const void* x, int dtype, int64_t K, const float* given, int8_t* __restrict codes) {
  float values[kColumns];
  const float scale = int8_row_scale(row_top(x, dtype, K, values), given);
  for (int64_t k = 0; k < K; k += kColumns) {
    const int64_t count = min64(kColumns, K - k);
    if (K > kColumns) to_float(x, dtype, k, count, values);
    for (int64_t i = 0; i < count; ++i) {
      float q = values[i] / scale;
      q = q < 127.0f ? q : 127.0f;  // NaN, too
      q = q > -127.0f ? q : -127.0f;
      codes[k + i] = static_cast<int8_t>(static_cast<int32_t>(float_to_bits(q + 12582912.0f)) - 0x4B400000);
    }
  }
  return scale;
}

// The same, with codes of int8 or E4M3 that are rounded at random: `round_stochastically` of hf_quant.kernels.rowwise.
template <bool E4M3_CODES>
static inline float quantize_row_randomly(const void* x, int dtype, int64_t K, const float* given, const uint32_t* key,
                                          uint32_t row, int8_t* __restrict codes) {
  float values[kColumns];
  uint16_t bits[kColumns];
  const float limit = E4M3_CODES ? 448.0f : 127.0f, scale = row_scale(row_top(x, dtype, K, values), given, limit);
  for (int64_t k = 0; k < K; k += kColumns) {
    const int64_t count = min64(kColumns, K - k);
    if (K > kColumns) to_float(x, dtype, k, count, values);
    draw_row(key, row, k, count, bits);
    for (int64_t i = 0; i < count; ++i) {
      const float offset = (static_cast<float>(bits[i]) + 0.5f) * bits_to_float((127u - 16u) << 23) - 0.5f;  // exact
      float q = values[i] / scale;
      q = q < limit ? q : limit;  // NaN, too
      q = q > -limit ? q : -limit;
      int32_t first = 0;  // code at which the steps of the value's power of two would begin
      if (E4M3_CODES) {
        const uint32_t power = float_to_bits(q) & 0x7f800000u, least = (127u - 6u) << 23;
        const uint32_t own = power > least ? power : least;
        first = static_cast<int32_t>((own >> 20) - ((127u - 6u) << 3));
        q *= bits_to_float(((254u + 3u) << 23) - own);  // in steps: 2**-3 of the power
      }
      const int32_t count_of = static_cast<int32_t>(float_to_bits(q + offset + 12582912.0f)) - 0x4B400000;
      if (E4M3_CODES) {
        const int32_t magnitude = count_of < 0 ? -count_of : count_of;
        codes[k + i] = static_cast<int8_t>((magnitude + first) | (count_of < 0 ? 0x80 : 0));
      } else {
        codes[k + i] = static_cast<int8_t>(count_of);
      }
    }
  }
  return scale;
}

static bool quantize_rows(const RowQuantization& q) {
  std::atomic<bool> ok{true};
  parallel_for(q.M, q.M * q.K < (1 << 16) ? 1 : q.threads, [&](int64_t i) {
    const void* x = static_cast<const char*>(q.x) + i * q.x_stride * element_size(q.x_dtype);
    int dtype = q.x_dtype;
    if (q.block != 0) {
      float* values = static_cast<float*>(thread_scratch(0, static_cast<size_t>(q.K) * 4));
      if (values == nullptr) {
        ok = false;
        return;
      }
      transform_row(x, dtype, q.K, q.diagonal, q.block, values);
      x = values;
      dtype = F32;
    }
    if (q.codes != nullptr) {
      int8_t* codes = q.codes + i * q.K;
      q.scales[i] = q.key == nullptr ? quantize_row(x, dtype, q.K, q.input_scale, codes)
                    : q.e4m3 ? quantize_row_randomly<true>(x, dtype, q.K, q.input_scale, q.key, i, codes)
                             : quantize_row_randomly<false>(x, dtype, q.K, q.input_scale, q.key, i, codes);
    } else {
      store_row(static_cast<const float*>(x), q.K, q.y, q.y_dtype, i * q.K);
    }
  });
  return ok;
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
      std::atomic<bool> ok{true};
      parallel_for(count, count * p_.K < (1 << 16) ? 1 : p_.threads, [&](int64_t i) {
        if (!load_row(first + i, i)) ok = false;
      });
      if (!ok || !multiply(first, count)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kChunk = 256;

  bool load_row(int64_t row, int64_t i) {
    const void* x = static_cast<const char*>(p_.x) + row * p_.x_stride * element_size(p_.x_dtype);
    int dtype = p_.x_dtype;
    scales_[i] = p_.row_scale == nullptr ? 1.0f : p_.row_scale[row];
    if (p_.block != 0) {
      float* values = integer_ ? static_cast<float*>(thread_scratch(1, static_cast<size_t>(p_.K) * 4))
                               : reinterpret_cast<float*>(x_) + i * p_.K;
      if (values == nullptr) return false;
      transform_row(x, dtype, p_.K, p_.diagonal, p_.block, values);
      if (!integer_) return true;
      x = values;
      dtype = F32;
    }
    if (!integer_) {
      to_float(x, dtype, 0, p_.K, reinterpret_cast<float*>(x_) + i * p_.K);
      return true;
    }
    int8_t* target = reinterpret_cast<int8_t*>(x_) + i * p_.K;
    if (dtype == INT8) {
      memcpy(target, x, static_cast<size_t>(p_.K));
    } else {
      scales_[i] = quantize_row(x, dtype, p_.K, p_.input_scale, target);
    }
    for (int64_t g = 0; g < p_.groups; ++g) {
      int32_t sum = 0;
      for (int64_t k = g * group(); k < min64(p_.K, (g + 1) * group()); ++k) sum += target[k];
      sums_[i * p_.groups + g] = sum;
    }
    return true;
  }

  int64_t group() const { return p_.groups == 1 ? p_.K : p_.group_size; }

  bool multiply(int64_t first, int64_t count) {
    const int64_t num_segments = split_by_experts(p_, first, count, segments_);
    const int64_t panels = ceil_div(p_.N, kRows);
    std::atomic<bool> ok{true};
    parallel_for(num_segments * panels, p_.threads, [&](int64_t task) {
      const Segment& s = segments_[task / panels];
      const size_t sums = static_cast<size_t>(s.count * kRows) * (sizeof(float) + sizeof(int32_t));
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
    int32_t* open = reinterpret_cast<int32_t*>(y + s.count * kRows);
    const int64_t rows = min64(kRows, p_.N - n), scale_base = s.expert * p_.expert_scale;
    const uint8_t* qdata = p_.qdata + s.expert * p_.expert_qdata;
    for (int64_t k = 0; k < p_.K; k += kColumns) {
      const int64_t columns = min64(kColumns, p_.K - k);
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* row = qdata + (n + r) * p_.row_bytes;
        uint8_t* codes = scratch.codes + r * kColumns;
        unpack(row, p_.layout, k, columns, codes);
        const int64_t scale_first = scale_base + (n + r) / p_.scale_rows * p_.scale_stride;
        if (!integer_) decode(p_, codes, scale_first, 1.0f, k, columns, scratch.weight + r * kColumns);
        for (int64_t i = 0; i < s.count; ++i) {
          float* total = y + i * kRows + r;
          if (integer_) {
            *total = add_groups(scratch, r, s.first + i, scale_first, k, columns, *total, open[i * kRows + r]);
          } else {
            *total += dot(reinterpret_cast<const float*>(x_) + (s.first + i) * p_.K + k,
                          scratch.weight + r * kColumns, columns);
          }
        }
      }
    }
  }

  // `open`: the sum of a group that goes on in the next columns.
  float add_groups(const Scratch& scratch, int64_t r, int64_t i, int64_t scale_first, int64_t k, int64_t columns,
                   float total, int32_t& open) const {
    const int8_t* x = reinterpret_cast<const int8_t*>(x_) + i * p_.K;
    const int8_t* codes = reinterpret_cast<const int8_t*>(scratch.codes) + r * kColumns;
    const int offset = p_.layout == PACKED2 ? 2 : p_.layout == PACKED4 ? 8 : 0;
    for (int64_t at = 0; at < columns;) {
      const int64_t g = p_.groups == 1 ? 0 : (k + at) / p_.group_size, group_end = min64(p_.K, (g + 1) * group());
      const int64_t end = min64(columns, group_end - k);
      open += dot(x + k + at, codes + at, end - at);
      if (k + end == group_end) {
        const int zero = p_.zero == nullptr ? offset : p_.zero[scale_first + g];
        total += static_cast<float>(open - zero * sums_[i * p_.groups + g]) *
                 load_as_float(p_.scale, p_.scale_dtype, scale_first + g);
        open = 0;
      }
      at = end;
    }
    return total;
  }

  void store(const Segment& s, int64_t n, int64_t first, const float* y) const {
    const float global = p_.global_scale == nullptr ? 1.0f : p_.global_scale[s.expert];
    for (int64_t i = 0; i < s.count; ++i) {
      const int64_t row = first + s.first + i;
      float rest[kRows] = {};
      add_rest(p_, s.expert, row, n, min64(kRows, p_.N - n), rest);
      for (int64_t r = 0; r < min64(kRows, p_.N - n); ++r) {
        const float bias =
            p_.bias == nullptr ? 0.0f : load_as_float(p_.bias, p_.bias_dtype, s.expert * p_.expert_bias + n + r);
        store_float(p_.y, p_.y_dtype, row * p_.N + n + r, y[i * kRows + r] * (global * scales_[s.first + i]) + bias + rest[r]);
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
