// What lies between the products of a block of a model: norms, rotary embeddings, activation functions. Values are
// rounded where the ops of torch round them.
#pragma once

#include <cmath>

#include "attention.h"
#include "kernels.h"
#include "parallel.h"
#include "portable.h"

namespace hfq {
namespace HFQ_SET {

constexpr int64_t kStepValues = 1024;  // that are computed at once

static HFQ_LOOP void round_values(int64_t count, int dtype, float* __restrict values) {
  if (dtype == BF16)
    for (int64_t i = 0; i < count; ++i) values[i] = bits_to_float(round_to_bf16(values[i]));
  if (dtype == F16)
    for (int64_t i = 0; i < count; ++i) values[i] = f16_to_float(float_to_f16(values[i]));
}

static HFQ_LOOP void square_values(int64_t count, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] *= values[i];
}

// Lanes of the vectors that torch adds rows in: those of AVX2 with AVX-512, too.
#if defined(__x86_64__)
constexpr int64_t kTorchLanes = 8;
#else
constexpr int64_t kTorchLanes = 4;
#endif

// The sum of a row in the order of torch's own, for the same bits: four vectors side by side, in levels of which each
// takes what 16 or more of the one below have added up (cascade_sum in ATen/native/cpu/SumKernel.cpp).
class RowSum {
 public:
  explicit RowSum(int64_t width) {
    int64_t power = 0;
    while ((int64_t{1} << power) < width / kStep) ++power;
    power_ = max64(4, power / kLevels);
    left_ = width / kStep;
  }

  // The next values of the row; all parts but the last one are whole steps.
  HFQ_LOOP void add(const float* __restrict values, int64_t count) {
    int64_t at = 0;
    for (; at + kStep <= count; at += kStep) {
      for (int64_t i = 0; i < kStep; ++i) sums_[0][i] += values[at + i];
      --left_;
      if (++added_ % (int64_t{1} << power_) == 0) carry();
    }
    if (left_ > 0 || at == count) return;
    merge();
    for (; at + kTorchLanes <= count; at += kTorchLanes)
      for (int64_t i = 0; i < kTorchLanes; ++i) sums_[0][i] += values[at + i];
    for (; at < count; ++at) tail_ += values[at];
  }

  float total() {
    merge();
    for (int64_t k = 1; k < 4; ++k)
      for (int64_t i = 0; i < kTorchLanes; ++i) sums_[0][i] += sums_[0][k * kTorchLanes + i];
    for (int64_t i = 0; i < kTorchLanes; ++i) tail_ += sums_[0][i];
    return tail_;
  }

 private:
  static constexpr int64_t kLevels = 4, kStep = 4 * kTorchLanes;

  void carry() {
    for (int64_t level = 1; level < kLevels; ++level) {
      add_level(level, level - 1);
      memset(sums_[level - 1], 0, sizeof sums_[0]);
      if ((added_ & (((int64_t{1} << power_) - 1) << (level * power_))) != 0) return;
    }
  }
  void merge() {
    for (int64_t level = 1; level < kLevels && !merged_; ++level) add_level(0, level);
    merged_ = true;
  }
  void add_level(int64_t to, int64_t from) {
    for (int64_t i = 0; i < kStep; ++i) sums_[to][i] += sums_[from][i];
  }

  float sums_[kLevels][kStep] = {}, tail_ = 0.0f;
  int64_t power_, left_, added_ = 0;
  bool merged_ = false;
};

static HFQ_LOOP void add_values(const float* __restrict more, int64_t count, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] += more[i];
}

static HFQ_LOOP void shift_values(int64_t count, float by, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] += by;
}

static HFQ_LOOP void scale_values(int64_t count, float factor, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

static HFQ_LOOP void multiply_values(const float* __restrict by, int64_t count, float more, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) values[i] *= by[i] + more;
}

static void norm_rows(const NormRows& n) {
  parallel_for(n.rows, n.rows * n.width < (1 << 15) ? 1 : n.threads, [&](int64_t row) {
    float values[kStepValues], weight[kStepValues], mean = 0.0f;
    if (n.centers) {
      RowSum sum(n.width);
      for (int64_t k = 0; k < n.width; k += kStepValues) {
        const int64_t count = min64(kStepValues, n.width - k);
        to_float(n.x, n.dtype, row * n.width + k, count, values);
        sum.add(values, count);
      }
      mean = sum.total() / static_cast<float>(n.width);
    }
    RowSum squares(n.width);
    for (int64_t k = 0; k < n.width; k += kStepValues) {
      const int64_t count = min64(kStepValues, n.width - k);
      to_float(n.x, n.dtype, row * n.width + k, count, values);
      if (n.centers) shift_values(count, -mean, values);
      square_values(count, values);
      squares.add(values, count);
    }
    const float factor = 1.0f / std::sqrt(squares.total() / static_cast<float>(n.width) + n.eps);
    for (int64_t k = 0; k < n.width; k += kStepValues) {
      const int64_t count = min64(kStepValues, n.width - k);
      to_float(n.x, n.dtype, row * n.width + k, count, values);
      if (n.centers) shift_values(count, -mean, values);
      scale_values(count, factor, values);
      if (n.rounds) round_values(count, n.dtype, values);
      if (n.weight != nullptr) {
        to_float(n.weight, n.weight_dtype, k, count, weight);
        if (n.plus_one) shift_values(count, 1.0f, weight);
        if (n.rounds_weight) round_values(count, n.weight_dtype, weight);
        multiply_values(weight, count, 0.0f, values);
      }
      if (n.bias != nullptr) {
        to_float(n.bias, n.bias_dtype, k, count, weight);
        add_values(weight, count, values);
      }
      store_row(values, count, n.y, n.dtype, row * n.width + k);
    }
  });
}

static void turn_rows(const TurnRows& t) {
  const bool by_pair = t.pairs == NEIGHBORS_BY_PAIR || t.pairs == HALVES_BY_PAIR;
  const int64_t half = t.turned / 2, angles = by_pair ? half : t.turned;
  const bool is_small = t.rows * t.heads * t.turned < (1 << 15);
  parallel_for(t.rows, is_small ? 1 : t.threads, [&](int64_t row) {
    float cos[kMaxHeadDim], sin[kMaxHeadDim], own[kMaxHeadDim], pairs[kMaxHeadDim];
    to_float(t.cos, t.angle_dtype, row * t.stride, angles, cos);
    to_float(t.sin, t.angle_dtype, row * t.stride, angles, sin);
    if (t.pairs == NEIGHBORS_BY_PAIR)
      for (int64_t c = t.turned - 1; c >= 0; --c) {
        cos[c] = cos[c / 2];
        sin[c] = sin[c / 2];
      }
    if (t.pairs == HALVES_BY_PAIR) {
      memcpy(cos + half, cos, static_cast<size_t>(half) * sizeof(float));
      memcpy(sin + half, sin, static_cast<size_t>(half) * sizeof(float));
    }
    for (int64_t h = 0; h < t.heads; ++h) {
      const int64_t first = (row * t.heads + h) * t.width;
      to_float(t.x, t.dtype, first, t.turned, own);
      if (t.pairs == HALVES_OF_NEIGHBORS) {
        memcpy(pairs, own, static_cast<size_t>(t.turned) * sizeof(float));
        for (int64_t c = 0; c < half; ++c) own[c] = pairs[2 * c];
        for (int64_t c = 0; c < half; ++c) own[c + half] = pairs[2 * c + 1];
      }
      if (t.pairs != NEIGHBORS && t.pairs != NEIGHBORS_BY_PAIR) {
        for (int64_t c = 0; c < half; ++c) pairs[c] = -own[c + half];
        for (int64_t c = 0; c < half; ++c) pairs[c + half] = own[c];
      } else {
        for (int64_t c = 0; c < t.turned; c += 2) {
          pairs[c] = -own[c + 1];
          pairs[c + 1] = own[c];
        }
      }
      multiply_values(cos, t.turned, 0.0f, own);
      multiply_values(sin, t.turned, 0.0f, pairs);
      if (t.rounds) {
        round_values(t.turned, t.dtype, own);
        round_values(t.turned, t.dtype, pairs);
      }
      add_values(pairs, t.turned, own);
      store_row(own, t.turned, t.x, t.dtype, first);
    }
  });
}

// 1 / (1 + e**-x)
static inline float sigmoid(float x) {
  const float small = exp_of_negative(x < 0.0f ? x : -x), one = 1.0f + small;
  return (x < 0.0f ? small : 1.0f) / one;
}

// x times the normal distribution's probability of less than x: the complementary error function by formula 7.1.26 of
// Abramowitz and Stegun, to 1.5e-7.
static inline float gelu(float x) {
  const float z = (x < 0.0f ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  const float series = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float beyond = 0.5f * series * exp_of_negative(-z * z);
  return x * (x < 0.0f ? beyond : 1.0f - beyond);
}

static HFQ_LOOP void activate(int activation, int64_t count, float* __restrict x) {
  switch (activation) {
    case SILU:
      for (int64_t i = 0; i < count; ++i) x[i] *= sigmoid(x[i]);
      return;
    case GELU:
      for (int64_t i = 0; i < count; ++i) x[i] = gelu(x[i]);
      return;
    case GELU_TANH:  // (1 + tanh u) / 2 = sigmoid(2 u)
      for (int64_t i = 0; i < count; ++i) x[i] *= sigmoid(1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
      return;
    case QUICK_GELU:
      for (int64_t i = 0; i < count; ++i) x[i] *= sigmoid(1.702f * x[i]);
      return;
    case IDENTITY: return;
    case SIGMOID:
      for (int64_t i = 0; i < count; ++i) x[i] = sigmoid(x[i]);
      return;
    default:
      for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
      if (activation == RELU_SQUARED)
        for (int64_t i = 0; i < count; ++i) x[i] *= x[i];
  }
}

// `values` from pairs of gate and up, rounded after each op.
static HFQ_LOOP void activate_pairs(const GateRows& g, int64_t count, const float* __restrict pairs,
                                    float* __restrict values) {
  float up[kStepValues], gate[kStepValues];
  for (int64_t i = 0; i < count; ++i) {
    const float first = pairs[2 * i], second = pairs[2 * i + 1];
    gate[i] = first > g.limit ? g.limit : first;
    up[i] = (second > g.limit ? g.limit : second < -g.limit ? -g.limit : second) + 1.0f;
    values[i] = gate[i] * g.alpha;
  }
  round_values(count, g.dtype, values);
  for (int64_t i = 0; i < count; ++i) values[i] = sigmoid(values[i]);
  round_values(count, g.dtype, values);
  multiply_values(gate, count, 0.0f, values);
  round_values(count, g.dtype, values);
  round_values(count, g.dtype, up);
  multiply_values(up, count, 0.0f, values);
}

static void gate_rows(const GateRows& g) {
  const int64_t parts = ceil_div(g.width, kStepValues);
  parallel_for(g.rows * parts, g.rows * g.width < (1 << 14) ? 1 : g.threads, [&](int64_t task) {
    float values[kStepValues], up[2 * kStepValues];
    const int64_t row = task / parts, column = task % parts * kStepValues, count = min64(kStepValues, g.width - column);
    if (g.activation == CLAMPED_PAIRS) {
      to_float(g.x, g.dtype, row * g.stride + 2 * column, 2 * count, up);
      activate_pairs(g, count, up, values);
      store_row(values, count, g.y, g.dtype, row * g.width + column);
      return;
    }
    to_float(g.x, g.dtype, row * g.stride + column, count, values);
    activate(g.activation, count, values);
    if (g.up != nullptr) {
      if (!g.unrounded) round_values(count, g.dtype, values);
      to_float(g.up, g.dtype, row * g.stride + column, count, up);
      multiply_values(up, count, 0.0f, values);
    }
    store_row(values, count, g.y, g.dtype, row * g.width + column);
  });
}

static void add_rows(const AddRows& a) {
  parallel_for(ceil_div(a.count, kStepValues), a.count < (1 << 16) ? 1 : a.threads, [&](int64_t task) {
    float values[kStepValues], more[kStepValues];
    const int64_t first = task * kStepValues, count = min64(kStepValues, a.count - first);
    to_float(a.more, a.dtype, first, count, more);
    if (a.factor != 1.0f) {
      scale_values(count, a.factor, more);
      round_values(count, a.dtype, more);
    }
    if (a.x != nullptr) {
      to_float(a.x, a.dtype, first, count, values);
      add_values(values, count, more);
    }
    store_row(more, count, a.y, a.dtype, first);
  });
}

}  // namespace HFQ_SET
}  // namespace hfq
