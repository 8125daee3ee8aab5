// New keys and values of a cache to codes, scales and offsets: `kv_append_reference`, bit for bit (but for NaN, which has
// many, and for the sign of an offset of 0).
//
// As in quantize.h every step that rounds is the same; sums are added up in the order of `_sum`, halves onto halves.
#pragma once

#include "quantize.h"
#include "rotation.h"

namespace hfq {
namespace HFQ_SET {

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// Of `count` numbers; `to`, which may be `from`, has room for as many.
static HFQ_LOOP float sum_halves(const float* from, int64_t count, float* to) {
  for (; count != 16 && count > 1; from = to) {
    const int64_t half = (count + 1) / 2;
#pragma GCC ivdep
    for (int64_t i = 0; i < count - half; ++i) to[i] = from[i] + from[half + i];
    if (half > count - half) to[half - 1] = from[half - 1];
    count = half;
  }
  if (count == 1) return from[0];
  const Four* part = reinterpret_cast<const Four*>(from);  // most come here: 4 passes that are too short for loops
  const Four sum = (part[0] + part[2]) + (part[1] + part[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// As integers these have the order of the values whose bits they are, NaN at the ends; its own inverse.
static inline int32_t in_order(int32_t bits) { return bits ^ ((bits >> 31) & INT32_MAX); }

struct Line {
  float step, low;  // distance of two levels, value of the lowest one
};

struct Range {
  float low, high;
};

static HFQ_LOOP Range range_of(const float* __restrict values, int64_t count) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t key = in_order(bits_of(values[i]));
    low = min32(low, key);
    high = max32(high, key);
  }
  return {of_bits(in_order(low)), of_bits(in_order(high))};
}

// Codes 0 to `most` as fp32; returns their sum.
static HFQ_LOOP int32_t codes_on(Line line, const float* __restrict values, int64_t count, float most,
                                 float* __restrict codes) {
  const float step = line.step == 0.0f ? 1.0f : line.step, low = line.low;
  for (int64_t i = 0; i < count; ++i) {
    float code = (values[i] - low) / step;
    code = code < 0.0f ? 0.0f : code;
    code = code > most ? most : code;
    codes[i] = (code + kRound) - kRound;
  }
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += static_cast<int32_t>(codes[i]);
  return total;
}

// Distances of codes from their mean, squared, and times those of the values, which replace the codes.
static HFQ_LOOP void multiply_distances(const float* __restrict values, int64_t count, float mean, float mean_code,
                                        float* __restrict codes, float* __restrict squares) {
  for (int64_t i = 0; i < count; ++i) {
    const float distance = codes[i] - mean_code;
    codes[i] = distance * (values[i] - mean);
    squares[i] = distance * distance;
  }
}

// `_fitted` of a group of `count` values, for levels 0 to `most`.
static HFQ_UNFUSED Line fit_line(const float* values, int64_t count, int most, float first_range) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  const Range range = range_of(values, count);
  const float span = (range.high - range.low) * first_range, part = static_cast<float>(1.0 / static_cast<double>(count));
  Line line{span * static_cast<float>(1.0 / most), (range.low + range.high) * 0.5f - span * 0.5f};
  float codes[kMaxHeadDim], sums[kMaxHeadDim];
  const float mean = sum_halves(values, count, sums) * part;
  for (int fit = 0; fit < 2; ++fit) {
    if (!std::isfinite(line.step) || !std::isfinite(line.low)) return line;  // all codes would be NaN, or the last one
    const float mean_code = static_cast<float>(codes_on(line, values, count, static_cast<float>(most), codes)) * part;
    multiply_distances(values, count, mean, mean_code, codes, sums);
    const float square = sum_halves(sums, count, sums);
    if (!(square > 0.0f)) return line;
    line.step = sum_halves(codes, count, codes) / square;
    line.low = mean - line.step * mean_code;
  }
  return line;
}

// The nearest number of the dtype, which is stored at any address.
static inline float store_rounded(void* base, int dtype, int64_t i, float value) {
  char* to = static_cast<char*>(base) + i * element_size(dtype);
  if (dtype == F32) {
    memcpy(to, &value, 4);
    return value;
  }
  const uint16_t bits = dtype == BF16 ? float_to_bf16(value) : float_to_f16(value);
  memcpy(to, &bits, 2);
  return dtype == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Codes of (values - offset) / scale, one in a byte; what is NaN gets code 0, of fp8 NaN.
static HFQ_LOOP void encode_group(const float* __restrict values, int64_t count, int layout, float scale, float offset,
                         uint8_t* __restrict codes) {
  if (layout == BYTES_FLOAT) {
    const Minifloat grid(448.0f, 4, 3, 7);
    for (int64_t i = 0; i < count; ++i) {
      const float level = values[i] / scale;
      codes[i] = static_cast<uint8_t>(level == level ? grid.code(level, 0) : 0x7f);
    }
    return;
  }
  const int32_t zero = layout == PACKED2 ? 2 : layout == PACKED4 ? 8 : 0;
  const float low = zero == 0 ? -127.0f : static_cast<float>(-zero), high = -low - (zero == 0 ? 0.0f : 1.0f);
  for (int64_t i = 0; i < count; ++i) {
    float level = (values[i] - offset) / scale;  // bytes: the offset is 0, which changes nothing
    const bool is_number = level == level;
    level = level < low ? low : level;
    level = level > high ? high : level;
    const int32_t code = bits_of(level + kRound) - kRoundBits + zero;
    codes[i] = static_cast<uint8_t>(is_number ? code : 0);
  }
}

// A row's scale, offset and codes of one group, all of them rounded before the next needs them. `lacks` [count]: what the
// codes lack, or null.
static HFQ_UNFUSED void append_group(const AppendedHeads& a, int layout, int64_t scale_at, int64_t offset_at,
                                     const float* values, uint8_t* codes, float* lacks) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  const int64_t count = a.D / a.groups;
  float step, offset = 0.0f;
  if (layout < BYTES_INT) {
    const Line line = layout == PACKED4 ? fit_line(values, count, 15, 1.0f) : fit_line(values, count, 3, 0.75f);
    step = line.step;
    offset = store_rounded(a.offset, a.scale_dtype, offset_at, line.low + step * (layout == PACKED4 ? 8.0f : 2.0f));
  } else {
    int32_t largest = 0;  // NaN is above all others
    for (int64_t i = 0; i < count; ++i) largest = max32(largest, bits_of(values[i]) & INT32_MAX);
    step = of_bits(largest) * static_cast<float>(1.0 / (layout == BYTES_INT ? 127.0 : 448.0));
  }
  float scale = store_rounded(a.scale, a.scale_dtype, scale_at, step);
  if (scale == 0.0f) scale = store_rounded(a.scale, a.scale_dtype, scale_at, 1.0f);
  encode_group(values, count, layout, scale, offset, codes);
  for (int64_t i = 0; lacks != nullptr && i < count; ++i) {
    const float level = layout == BYTES_FLOAT ? e4m3_to_float(codes[i])
                        : layout == BYTES_INT ? static_cast<float>(static_cast<int8_t>(codes[i]))
                                              : static_cast<float>(codes[i] - (layout == PACKED4 ? 8 : 2));
    lacks[i] = values[i] - (level * scale + offset);
  }
}

constexpr int64_t kFrameTokens = 4096;  // that a frame is found from, at most

static int64_t start_of(const Append& p, int64_t b) { return p.starts == nullptr ? 0 : p.starts[b]; }

// `frame_of` of a head of new keys; sums are added up token by token.
static HFQ_UNFUSED void find_frame(const Append& p, int64_t b, int64_t h) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
  const AppendedHeads& a = p.k;
  const int64_t D = a.D, start = start_of(p, b), tokens = min64(p.S - start, kFrameTokens);
  const int64_t rows = b * a.x_batch + h * a.x_head + start * a.x_token;
  const float count = static_cast<float>(tokens - 1);
  float *mean = a.frame + (b * p.H + h) * 2 * D, *spread = mean + D;
  float first[kMaxHeadDim], x[kMaxHeadDim], squares[kMaxHeadDim] = {}, sums[kMaxHeadDim];
  bool finite = tokens > 1;
  if (finite) {
    to_float(a.x, p.x_dtype, rows + a.x_token, D, first);
    for (int64_t d = 0; d < D; ++d) mean[d] = 0.0f;
    for (int64_t t = 1; t < tokens; ++t) {
      to_float(a.x, p.x_dtype, rows + t * a.x_token, D, x);
      for (int64_t d = 0; d < D; ++d) mean[d] += x[d] - first[d];
    }
    for (int64_t d = 0; d < D; ++d) mean[d] /= count;
    for (int64_t t = 1; t < tokens; ++t) {
      to_float(a.x, p.x_dtype, rows + t * a.x_token, D, x);
      for (int64_t d = 0; d < D; ++d) {
        const float distance = (x[d] - first[d]) - mean[d];
        squares[d] += distance * distance;
      }
    }
    for (int64_t d = 0; d < D; ++d) squares[d] /= count;
    const float whole = sum_halves(squares, D, sums) / static_cast<float>(D);
    for (int64_t d = 0; d < D; ++d) {
      const float share = (count * squares[d] + whole) / ((count + 1.0f) * whole);
      spread[d] = whole > 0.0f ? std::sqrt(std::sqrt(share)) : 1.0f;
      mean[d] += first[d];
      finite = finite && std::isfinite(mean[d]) && std::isfinite(spread[d]);
    }
  }
  for (int64_t d = 0; !finite && d < D; ++d) {
    mean[d] = 0.0f;
    spread[d] = 1.0f;
  }
}

// x, of which the first row of a frame is taken off, divided by the second.
static HFQ_LOOP void place_in_frame(const float* __restrict frame, int64_t D, float* __restrict x) {
  for (int64_t d = 0; d < D; ++d) x[d] = (x[d] - frame[d]) * (1.0f / frame[D + d]);
}

// The one new token, among the first ones of its sequence, and in the ring of the last ones.
static void keep(const Append& p, const AppendedHeads& a, int64_t b, int64_t h) {
  const Kept& kept = *p.kept;
  const int64_t bytes = a.D * element_size(p.x_dtype), number = p.position - start_of(p, b);
  const char* from = static_cast<const char*>(a.x) + (b * a.x_batch + h * a.x_head) * element_size(p.x_dtype);
  char* to = (&a == &p.k ? kept.k : kept.v) + (b * p.H + h) * (kept.sinks + kept.recents + 1) * bytes;
  if (number < kept.sinks) memcpy(to + number * bytes, from, static_cast<size_t>(bytes));
  if (kept.recents == 0) return;
  memcpy(to + (kept.sinks + p.position % kept.recents) * bytes, from, static_cast<size_t>(bytes));
}

static void append_head(const Append& p, const AppendedHeads& a, int64_t b, int64_t h, int64_t t) {
  float values[kMaxHeadDim];
  uint8_t codes[kMaxHeadDim], packed[kMaxHeadDim / 2];
  const int64_t first = b * a.x_batch + h * a.x_head + t * a.x_token, token = p.start + t;
  uint8_t* to = a.codes + b * a.code_batch + h * a.code_head + token * a.code_token;
  if (p.layout == VALUES) {
    const int64_t size = element_size(p.x_dtype);
    memcpy(to, static_cast<const char*>(a.x) + first * size, static_cast<size_t>(a.D * size));
    return;
  }
  if (p.kept != nullptr) keep(p, a, b, h);
  to_float(a.x, p.x_dtype, first, a.D, values);
  if (a.frame != nullptr) place_in_frame(a.frame + (b * p.H + h) * 2 * a.D, a.D, values);
  if (a.rotates) rotate(values, a.D);
  const int64_t scale_at = b * a.scale_batch + h * a.scale_head + token * a.scale_token;
  const int64_t offset_at = b * a.offset_batch + h * a.offset_head + token * a.offset_token;
  const int64_t size = a.D / a.groups;
  const bool lacks_key = p.first_lacks != nullptr && &a == &p.k && t == start_of(p, b);
  float* lacks = lacks_key ? p.first_lacks + (b * p.H + h) * a.D : nullptr;
  for (int64_t g = 0; g < a.groups; ++g)
    append_group(a, p.layout, scale_at + g * a.scale_group, offset_at + g * a.offset_group, values + g * size,
                 codes + g * size, lacks == nullptr ? nullptr : lacks + g * size);
  const int64_t element = p.layout < BYTES_INT ? 4 : 1;
  const int64_t bytes = p.layout == PACKED4 ? a.D / 2 : p.layout == PACKED2 ? a.D / 4 : a.D;
  const bool in_one = a.code_element == element;
  const uint8_t* row = codes;
  if (p.layout < BYTES_INT) {
    pack_row(codes, a.D, p.layout, in_one ? to : packed);
    if (in_one) return;
    row = packed;
  } else if (in_one) {
    memcpy(to, codes, static_cast<size_t>(bytes));
    return;
  }
  for (int64_t i = 0; i < bytes / element; ++i)
    memcpy(to + i * a.code_element, row + i * element, static_cast<size_t>(element));
}

static void append(const Append& p) {
  const int64_t rows = p.B * p.H * p.S, values = p.k.D + p.v.D;
  // A thread that must wake up takes as long as some 10,000 values.
  const int64_t per_task = max64(1, (1 << 13) / values);
  const int threads = rows * values < (1 << 15) ? 1 : p.threads;
  if (p.begins) parallel_for(p.B * p.H, threads, [&](int64_t head) { find_frame(p, head / p.H, head % p.H); });
  parallel_for(ceil_div(rows, per_task), threads, [&](int64_t task) {
    for (int64_t row = task * per_task; row < min64(rows, (task + 1) * per_task); ++row) {
      const int64_t t = row % p.S, h = row / p.S % p.H, b = row / p.S / p.H;
      append_head(p, p.k, b, h, t);
      append_head(p, p.v, b, h, t);
    }
  });
}

}  // namespace HFQ_SET
}  // namespace hfq
