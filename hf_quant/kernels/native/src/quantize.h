// Weights to codes and scales, in plain C++, compiled once for every instruction set: what hf_quant.algorithms computes,
// bit for bit.
//
// That takes two things. Each step that rounds is the same: a quotient is divided, no product is fused with a sum. And
// the order of summing up does not count, since fp32 numbers are summed in fp64.
#pragma once

#include <atomic>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "portable.h"

// A function whose products are rounded before they are added to anything.
#if defined(__clang__)
#define HFQ_UNFUSED
#else
#define HFQ_UNFUSED __attribute__((noinline, optimize("fp-contract=off")))
#endif

namespace hfq {
namespace HFQ_SET {

// Adding it rounds to an integer, half to even, which is what the bits of the sum count from its own.
constexpr float kRound = 12582912.0f;  // 1.5 * 2**23
constexpr int32_t kRoundBits = 0x4B400000;

static inline int32_t bits_of(float value) { return static_cast<int32_t>(float_to_bits(value)); }
static inline float of_bits(int32_t bits) { return bits_to_float(static_cast<uint32_t>(bits)); }
static inline int32_t min32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t max32(int32_t a, int32_t b) { return a > b ? a : b; }

// Grids: `level` is the value nearest to x, `code` the code of that. As integers the bits of floats have the order of
// their values, negative ones all below zero, so that they are clamped where vectors have a minimum for them.

struct Integers {
  int32_t low, high, first;  // bits of kRound + the lowest value, the highest, that of code 0

  explicit Integers(const WeightQuantization& q)
      : low(kRoundBits + q.low), high(kRoundBits + q.high), first(q.layout == BYTES_INT ? kRoundBits : low) {}
  float level(float x) const { return of_bits(max32(min32(bits_of(x + kRound), high), low)) - kRound; }
  // Of x, rounded, and an integer.
  int32_t code(float x, int32_t zero) const {
    return max32(min32(bits_of(x + kRound) + zero, high), low) - first;
  }
};

// A sign, an exponent, a mantissa; neither inf nor NaN.
struct Minifloat {
  int32_t limit, normal, mantissa, sign;  // bits of the largest value and of the smallest normal one; widths

  Minifloat(float largest, int exponent_bits, int mantissa_bits, int bias)
      : limit(bits_of(largest)),
        normal((128 - bias) << 23),
        mantissa(mantissa_bits),
        sign(31 - exponent_bits - mantissa_bits) {}
  // 1.5 * 2**23 quanta of the binade of a magnitude.
  int32_t quanta(int32_t magnitude) const {
    return (max32(magnitude, normal) & 0x7f800000) + ((23 - mantissa) << 23) + 0x00400000;
  }
  float level(float x) const {
    const int32_t magnitude = min32(bits_of(x) & 0x7fffffff, limit);
    const float round = of_bits(quanta(magnitude));
    return of_bits(bits_of((of_bits(magnitude) + round) - round) | (bits_of(x) & INT32_MIN));
  }
  int32_t code(float x, int32_t) const {
    const int32_t magnitude = min32(bits_of(x) & 0x7fffffff, limit), round = quanta(magnitude);
    const int32_t count = bits_of(of_bits(magnitude) + of_bits(round)) - round;
    const int32_t binade = (max32(magnitude, normal) - normal) >> 23;
    return (count + (binade << mantissa)) | static_cast<int32_t>((float_to_bits(x) & 0x80000000u) >> sign);
  }
};

// Any 16 levels; a tie belongs to the lower.
struct Levels {
  float levels[16], midpoints[15];

  explicit Levels(const WeightQuantization& q) {
    memcpy(levels, q.levels, sizeof levels);
    memcpy(midpoints, q.levels + 16, sizeof midpoints);
  }
  float level(float x) const { return level(x, std::make_index_sequence<15>()); }
  int32_t code(float x, int32_t) const { return code(x, std::make_index_sequence<15>()); }

 private:
  // Loops that are written out: GCC 12 does not vectorize what has a loop inside.
  template <size_t... I>
  float level(float x, std::index_sequence<I...>) const {
    float nearest = levels[0];
    ((nearest = x > midpoints[I] ? levels[I + 1] : nearest), ...);
    return nearest;
  }
  template <size_t... I>
  int32_t code(float x, std::index_sequence<I...>) const {
    return ((x > midpoints[I] ? 1 : 0) + ...);
  }
};

constexpr int64_t kSumLanes = 16;      // of sums; groups are filled up with zeros, which every grid holds
constexpr int64_t kWeights = 4096;  // quantized at once, unless a group is larger: 16 KB in fp32
constexpr int64_t kGroups = kWeights / kSumLanes;

// Of each of the groups that are quantized at once.
struct Groups {
  float low[kGroups], high[kGroups];  // how far it reaches below and above 0
  float scale[kGroups], zero[kGroups], shrink[kGroups];  // the best so far; zero: the grid value of weight 0
  double error[kGroups];
  float new_scale[kGroups], new_zero[kGroups], moved_zero[kGroups], new_shrink[2][kGroups];  // candidates
  float sign[kGroups];                                                                       // of their scales
};

static inline double sum_lanes(double* lanes) {
  for (int j = 0; j < 8; ++j) lanes[j] += lanes[j + 8];
  for (int j = 0; j < 4; ++j) lanes[j] += lanes[j + 4];
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// Codes of a group, one in a byte. The grid is a copy: writing bytes could change any other.
template <class Grid>
static void encode(const Grid grid, const float* __restrict values, int64_t count, float scale, float zero,
                   uint8_t* __restrict codes) {
  const int32_t whole_zero = static_cast<int32_t>(zero);
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(grid.code(values[i] / scale, whole_zero));
}

// Sum of squared errors of a group, in steps of the grid.
template <class Grid>
static double group_error(const Grid grid, const float* __restrict values, int64_t size, float scale, float zero) {
  double lanes[kSumLanes] = {};
  for (int64_t k = 0; k < size; k += kSumLanes) {
    for (int j = 0; j < kSumLanes; ++j) {
      const float x = values[k + j] / scale + zero, error = grid.level(x) - x;
      lanes[j] += static_cast<double>(error * error);
    }
  }
  return sum_lanes(lanes);
}

// Sums over a group of weights / scale and of the levels of their codes, both counted from the zero point.
struct Sums {
  double product, level_square, value_square, level, value;
};

template <class Grid>
static Sums group_sums(const Grid grid, const float* __restrict values, int64_t size, float scale, float zero) {
  double lanes[5][kSumLanes] = {};
  for (int64_t k = 0; k < size; k += kSumLanes) {
    for (int j = 0; j < kSumLanes; ++j) {
      const float x = values[k + j] / scale + zero;
      const float value = x - zero, level = grid.level(x) - zero;
      lanes[0][j] += static_cast<double>(value * level);
      lanes[1][j] += static_cast<double>(level * level);
      lanes[2][j] += static_cast<double>(value * value);
      lanes[3][j] += static_cast<double>(level);
      lanes[4][j] += static_cast<double>(value);
    }
  }
  return {sum_lanes(lanes[0]), sum_lanes(lanes[1]), sum_lanes(lanes[2]), sum_lanes(lanes[3]), sum_lanes(lanes[4])};
}

// Scales, none of them negative, become the nearest that can be stored times `unit`: scale_rounder of hf_quant.
static void round_scales(int dtype, float unit, int64_t count, float* __restrict scale) {
  const Minifloat half(65504.0f, 5, 10, 15), e4m3(448.0f, 4, 3, 7);
  auto each = [&](float largest, float smallest, auto round) {
    for (int64_t g = 0; g < count; ++g) {
      const float relative = scale[g] / unit, stored = round(relative < largest ? relative : largest);
      scale[g] = (scale[g] == 0 ? 1.0f : stored > smallest ? stored : smallest) * unit;
    }
  };
  switch (dtype) {
    case F32: return each(bits_to_float(0x7f7fffffu), bits_to_float(1), [](float x) { return x; });
    case BF16:
      return each(bits_to_float(0x7f7f0000u), bits_to_float(1u << 16), [](float x) {
        const uint32_t bits = float_to_bits(x);
        return bits_to_float((bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u);
      });
    case F16: return each(65504.0f, bits_to_float((127u - 24) << 23), [&](float x) { return half.level(x); });
    case E4M3: return each(448.0f, bits_to_float((127u - 9) << 23), [&](float x) { return e4m3.level(x); });
    default:  // E8M0: rounded up from a mantissa of 4/3
      return each(bits_to_float(0x7f000000u), bits_to_float(1u << 22),
                  [](float x) { return bits_to_float(float_to_bits(x * 1.5f) & 0x7f800000u); });
  }
}

static void store_scale(void* base, int dtype, int64_t i, float scale) {
  switch (dtype) {
    case E8M0: static_cast<uint8_t*>(base)[i] = static_cast<uint8_t>(float_to_bits(scale) >> 23); break;
    case E4M3: static_cast<uint8_t*>(base)[i] = static_cast<uint8_t>(Minifloat(448.0f, 4, 3, 7).code(scale, 0)); break;
    default: store_float(base, dtype, i, scale);
  }
}

// Bytes that each hold a code become words of codes: `count` codes, a multiple of 32, of which BITS bits from `shift`
// on go to `packed`. Those of a Word are folded into its lowest byte.
template <class Word, int BITS>
static inline void pack_plane(const uint8_t* __restrict codes, int64_t count, int shift, uint8_t* __restrict packed) {
  constexpr int kPer = 8 / BITS;
  static_assert(sizeof(Word) == kPer, "a word holds the codes of one byte");
  constexpr Word kMask = static_cast<Word>(static_cast<Word>(~Word{0}) / 255 * ((1 << BITS) - 1));
  for (int64_t b = 0; b < count / kPer; ++b) {
    const Word word = static_cast<Word>(load<Word>(codes, b) >> shift) & kMask;
    Word folded = word;
#pragma GCC unroll 8
    for (int j = 1; j < kPer; ++j) folded |= static_cast<Word>(word >> (j * (8 - BITS)));
    packed[b] = static_cast<uint8_t>(folded);
  }
}

static void pack_row(const uint8_t* codes, int64_t count, int layout, uint8_t* packed) {
  switch (layout) {
    case PACKED2: return pack_plane<uint32_t, 2>(codes, count, 0, packed);
    case PACKED4: return pack_plane<uint16_t, 4>(codes, count, 0, packed);
    case PACKED3:
      for (int64_t u = 0; u < count / 32; ++u) {
        pack_plane<uint32_t, 2>(codes + 32 * u, 32, 0, packed + 12 * u);
        pack_plane<uint64_t, 1>(codes + 32 * u, 32, 2, packed + 12 * u + 8);
      }
      return;
    default:
      for (int64_t u = 0; u < count / 32; ++u) {
        pack_plane<uint16_t, 4>(codes + 32 * u, 32, 0, packed + 24 * u);
        pack_plane<uint32_t, 2>(codes + 32 * u, 32, 4, packed + 24 * u + 16);
      }
  }
}

template <class Grid>
class WeightQuantizer {
 public:
  WeightQuantizer(const WeightQuantization& q, const Grid& grid)
      : q_(q), grid_(grid), size_(ceil_div(q.group_size, kSumLanes) * kSumLanes) {}

  // Whether there was memory; `finite`: whether every weight is.
  bool run(bool* finite) {
    const int64_t rows = q_.matrices * q_.N, per_task = max64(1, (1 << 16) / max64(q_.K, 1));
    std::atomic<bool> ok{true}, all_finite{true};
    parallel_for(ceil_div(rows, per_task), q_.threads, [&](int64_t task) {
      const int64_t values = max64(kWeights, size_), codes = ceil_div(q_.K, 32) * 32;
      char* memory = static_cast<char*>(
          thread_scratch(1, sizeof(Groups) + static_cast<size_t>(values) * 4 + static_cast<size_t>(codes)));
      if (memory == nullptr) {
        ok = false;
        return;
      }
      Groups& groups = *reinterpret_cast<Groups*>(memory);
      float* of_values = reinterpret_cast<float*>(memory + sizeof(Groups));
      uint8_t* of_codes = reinterpret_cast<uint8_t*>(of_values + values);
      memset(of_codes + q_.K, 0, static_cast<size_t>(codes - q_.K));
      for (int64_t row = task * per_task; row < min64(rows, (task + 1) * per_task); ++row)
        if (!quantize_row(row, groups, of_values, of_codes)) all_finite = false;
    });
    *finite = all_finite;
    return ok;
  }

 private:
  bool quantize_row(int64_t row, Groups& s, float* values, uint8_t* codes) const {
    const int64_t matrix = row / q_.N, first = matrix * q_.matrix_stride + row % q_.N * q_.row_stride;
    const float unit = q_.global_scale == nullptr ? 1.0f : q_.global_scale[matrix];
    const int64_t at_once = max64(1, kWeights / size_);
    uint8_t* qdata = q_.qdata + row * q_.row_bytes;
    const bool packed = q_.layout < BYTES_INT;
    int32_t top = 0;
    for (int64_t start = 0; start < q_.groups; start += at_once) {
      const int64_t count = min64(at_once, q_.groups - start);
      for (int64_t g = 0; g < count; ++g) top = max32(top, load_group(first, start + g, values + g * size_, s, g));
      choose(s, count, values, unit);
      for (int64_t g = 0; g < count; ++g) {
        const int64_t k = (start + g) * q_.group_size;
        encode(grid_, values + g * size_, min64(q_.group_size, q_.K - k), s.scale[g], s.zero[g],
               (packed ? codes : qdata) + k);
      }
      if (q_.norm) keep_norm(s, count, values, unit);
      for (int64_t g = 0; g < count; ++g) {
        const int64_t i = row * q_.groups + start + g;
        store_scale(q_.scale, q_.scale_dtype, i, s.scale[g] / unit);
        if (q_.zero != nullptr) q_.zero[i] = static_cast<uint8_t>(static_cast<int32_t>(s.zero[g]) - q_.low);
      }
    }
    if (packed) hfq::HFQ_SET::pack_row(codes, ceil_div(q_.K, 32) * 32, q_.layout, qdata);
    return top < 0x7f800000;
  }

  // The weights of one group, and how far they reach; returns the bits of the largest magnitude.
  int32_t load_group(int64_t row_first, int64_t group, float* __restrict values, Groups& s, int64_t g) const {
    const int64_t k = group * q_.group_size, count = min64(q_.group_size, q_.K - k);
    to_float(q_.weight, q_.weight_dtype, row_first + k, count, values);
    for (int64_t i = count; i < size_; ++i) values[i] = 0;
    int32_t low = 0, high = 0;
    for (int64_t i = 0; i < size_; ++i) {
      high = max32(high, bits_of(values[i]));
      low = max32(low, bits_of(values[i]) ^ INT32_MIN);
    }
    s.low[g] = of_bits(low);
    s.high[g] = of_bits(high);
    return max32(low, high);
  }

  // Scales and zero points that put the ends of each group, times `shrink`, on the ends of the grid.
  HFQ_UNFUSED void absmax(const Groups& s, int64_t count, float unit, const float* __restrict shrink,
                          float* __restrict scale, float* __restrict zero) const {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    const float top = static_cast<float>(q_.high - q_.low), low = static_cast<float>(q_.low);
    for (int64_t g = 0; g < count; ++g) {
      const float symmetric = (s.high[g] > s.low[g] ? s.high[g] : s.low[g]) / q_.max * shrink[g];
      const float range = s.high[g] * shrink[g] + s.low[g] * shrink[g];
      scale[g] = q_.zero == nullptr ? symmetric : range / top;
    }
    round_scales(q_.scale_dtype, unit, count, scale);
    for (int64_t g = 0; g < count; ++g) {
      const float levels = s.low[g] * shrink[g] / scale[g], clamped = levels < top ? levels : top;
      zero[g] = q_.zero == nullptr ? 0.0f : (clamped + kRound) - kRound + low;
    }
  }

  // The best scales and zero points: `clip_search` of hf_quant.algorithms.mse; without factors, those of absmax.
  void choose(Groups& s, int64_t count, const float* values, float unit) const {
    for (int64_t g = 0; g < count; ++g) s.shrink[g] = 1.0f;
    absmax(s, count, unit, s.shrink, s.scale, s.zero);
    if (q_.num_shrinks == 0) return;
    for (int64_t g = 0; g < count; ++g) {
      s.error[g] = error(s, g, values, s.scale[g], s.zero[g]);
      s.sign[g] = q_.turns && s.high[g] > s.low[g] ? -1.0f : 1.0f;
    }
    for (int i = 0; i < q_.num_shrinks; ++i) {
      float* shrink = s.new_shrink[0];
      for (int64_t g = 0; g < count; ++g) shrink[g] = q_.shrinks[i];
      absmax(s, count, unit, shrink, s.new_scale, s.new_zero);
      for (int64_t g = 0; g < count; ++g) s.new_scale[g] *= s.sign[g];
      consider(s, count, values, s.new_zero, shrink);
      if (q_.mirrors) {
        for (int64_t g = 0; g < count; ++g) s.new_scale[g] = -s.new_scale[g];
        consider(s, count, values, s.new_zero, shrink);
      }
      if (!q_.moves) continue;
      for (float move : {-1.0f, 1.0f}) {
        for (int64_t g = 0; g < count; ++g) {
          const float moved = s.new_zero[g] + move, low = static_cast<float>(q_.low);
          const float high = static_cast<float>(q_.high);
          s.moved_zero[g] = moved < low ? low : moved > high ? high : moved;
        }
        consider(s, count, values, s.moved_zero, shrink);
      }
    }
    if (q_.mirrors)
      for (int64_t g = 0; g < count; ++g) s.sign[g] = std::copysign(1.0f, s.scale[g]);
    for (int i = 0; i < q_.num_steps; ++i) {
      for (int64_t g = 0; g < count; ++g) {
        s.new_shrink[0][g] = s.shrink[g] - q_.steps[i];
        s.new_shrink[1][g] = s.shrink[g] + q_.steps[i];
      }
      for (const float* shrink : {s.new_shrink[0], s.new_shrink[1]}) {
        absmax(s, count, unit, shrink, s.new_scale, s.new_zero);
        for (int64_t g = 0; g < count; ++g) s.new_scale[g] *= s.sign[g];
        consider(s, count, values, s.zero, shrink);
      }
    }
    if (q_.fits) {
      fit(s, count, values, unit);
      consider(s, count, values, s.new_zero, s.shrink);
    }
  }

  double error(const Groups& s, int64_t g, const float* values, float scale, float zero) const {
    const double unit = scale;
    return group_error(grid_, values + g * size_, size_, scale, zero) * (unit * unit);
  }

  // Take the new scales, with these zero points and clip factors, where the error is smaller.
  void consider(Groups& s, int64_t count, const float* values, const float* zero, const float* shrink) const {
    for (int64_t g = 0; g < count; ++g) {
      const double found = error(s, g, values, s.new_scale[g], zero[g]);
      const bool better = found < s.error[g];
      s.error[g] = better ? found : s.error[g];
      s.scale[g] = better ? s.new_scale[g] : s.scale[g];
      s.zero[g] = better ? zero[g] : s.zero[g];
      s.shrink[g] = better ? shrink[g] : s.shrink[g];
    }
  }

  // The scale and zero point that fit the weights best by the codes of the best ones so far: `fit` of hf_quant.
  HFQ_UNFUSED void fit(Groups& s, int64_t count, const float* values, float unit) const {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    const double size = static_cast<double>(q_.group_size), top = q_.high - q_.low;
    for (int64_t g = 0; g < count; ++g) {
      Sums sums = group_sums(grid_, values + g * size_, size_, s.scale[g], s.zero[g]);
      s.new_zero[g] = s.zero[g];
      if (q_.zero != nullptr) {
        // weight / scale = slope * level + offset; weight 0 is the level -offset / slope.
        const double slope = (sums.product * size - sums.level * sums.value) /
                             (sums.level_square * size - sums.level * sums.level);
        double move = std::nearbyint((slope * sums.level - sums.value) / (size * slope));
        const double zero = s.zero[g] - static_cast<double>(q_.low), moved = std::isfinite(move) ? zero + move : zero;
        move = (moved < 0 ? 0 : moved > top ? top : moved) - zero;
        sums.product -= move * sums.value;
        sums.level_square = sums.level_square - 2 * move * sums.level + size * (move * move);
        s.new_zero[g] += static_cast<float>(move);
      }
      s.new_scale[g] = s.scale[g] * static_cast<float>(sums.product / sums.level_square);
    }
    store_fitted(s, count, unit);
  }

  // The new scales as they can be stored; the best ones so far in place of 0, inf and NaN.
  void store_fitted(Groups& s, int64_t count, float unit) const {
    float* magnitude = s.new_shrink[0];
    for (int64_t g = 0; g < count; ++g) magnitude[g] = std::fabs(s.new_scale[g]);
    round_scales(q_.scale_dtype, unit, count, magnitude);
    for (int64_t g = 0; g < count; ++g) {
      const bool fits = std::isfinite(s.new_scale[g]) && s.new_scale[g] != 0;
      s.new_scale[g] = fits ? std::copysign(magnitude[g], s.new_scale[g]) : s.scale[g];
    }
  }

  // Scales that give the weights of each group, whose codes are made, their norm back: `norm` of hf_quant.
  void keep_norm(Groups& s, int64_t count, const float* values, float unit) const {
    for (int64_t g = 0; g < count; ++g) {
      const Sums sums = group_sums(grid_, values + g * size_, size_, s.scale[g], s.zero[g]);
      s.new_scale[g] = s.scale[g] * static_cast<float>(std::sqrt(sums.value_square / sums.level_square));
    }
    store_fitted(s, count, unit);
    for (int64_t g = 0; g < count; ++g) s.scale[g] = s.new_scale[g];
  }

  const WeightQuantization& q_;
  const Grid grid_;
  const int64_t size_;  // of a group, filled up
};

static bool quantize(const WeightQuantization& q, bool* finite) {
  if (q.levels != nullptr) return WeightQuantizer<Levels>(q, Levels(q)).run(finite);
  if (q.exponent_bits != 0) {
    const Minifloat grid(q.max, q.exponent_bits, q.mantissa_bits, q.exponent_bias);
    return WeightQuantizer<Minifloat>(q, grid).run(finite);
  }
  return WeightQuantizer<Integers>(q, Integers(q)).run(finite);
}

}  // namespace HFQ_SET
}  // namespace hfq
