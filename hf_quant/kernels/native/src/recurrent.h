// Tokens in layers that have a state instead of a cache: causal convolutions, the gated delta rule, selective state spaces.
#pragma once

#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "portable.h"
#include "steps.h"

namespace hfq {
namespace HFQ_SET {

// values [count, taps] -> planes [taps, kStepValues], and back
static HFQ_LOOP void to_planes(const float* __restrict values, int64_t count, int64_t taps, float* __restrict planes) {
  if (taps == 4) {  // which the compiler vectorizes
    for (int64_t c = 0; c < count; ++c)
      for (int64_t t = 0; t < 4; ++t) planes[t * kStepValues + c] = values[4 * c + t];
    return;
  }
  for (int64_t c = 0; c < count; ++c)
    for (int64_t t = 0; t < taps; ++t) planes[t * kStepValues + c] = values[c * taps + t];
}

static HFQ_LOOP void from_planes(const float* __restrict planes, int64_t count, int64_t taps, int64_t first,
                                 float* __restrict values) {
  for (int64_t t = 0; t < taps; ++t) {
    const float* __restrict plane = planes + (first + t) % taps * kStepValues;
    for (int64_t c = 0; c < count; ++c) values[c * taps + t] = plane[c];
  }
}

static HFQ_LOOP void add_products(const float* __restrict x, const float* __restrict by, int64_t count,
                                  float* __restrict sums) {
  for (int64_t c = 0; c < count; ++c) sums[c] += x[c] * by[c];
}

static void convolve_rows(const ConvolveRows& p) {
  const int64_t parts = ceil_div(p.width, kStepValues);
  const bool is_small = p.sequences * p.tokens * p.width < (1 << 14);
  parallel_for(p.sequences * parts, is_small ? 1 : p.threads, [&](int64_t task) {
    // The last `taps` tokens, and the weights of each.
    float planes[kStepValues * kMaxTaps], weights[kStepValues * kMaxTaps], values[kStepValues * kMaxTaps];
    const int64_t sequence = task / parts, column = task % parts * kStepValues;
    const int64_t count = min64(kStepValues, p.width - column), state = (sequence * p.width + column) * p.taps;
    to_float(p.weight, p.dtype, column * p.taps, count * p.taps, values);
    to_planes(values, count, p.taps, weights);
    to_float(p.state, p.dtype, state, count * p.taps, values);
    to_planes(values, count, p.taps, planes);
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t at = (sequence * p.tokens + token) * p.width + column;
      float sums[kStepValues];
      if (p.bias != nullptr)
        to_float(p.bias, p.dtype, column, count, sums);
      else
        memset(sums, 0, sizeof sums);
      to_float(p.x, p.dtype, at, count, planes + token % p.taps * kStepValues);  // in place of the oldest
      for (int64_t t = 0; t < p.taps; ++t)
        add_products(planes + (token + 1 + t) % p.taps * kStepValues, weights + t * kStepValues, count, sums);
      round_values(count, p.dtype, sums);
      activate(p.activation, count, sums);
      store_row(sums, count, p.y, p.dtype, at);
    }
    from_planes(planes, count, p.taps, p.tokens, values);
    store_row(values, count * p.taps, p.state, p.dtype, state);
  });
}

// sums [width] += factors [4] @ rows [4, width]
static HFQ_LOOP void add_four_rows(const float* __restrict rows, int64_t width, const float* factors,
                                   float* __restrict sums) {
  const float a = factors[0], b = factors[1], c = factors[2], d = factors[3];
  const float *__restrict second = rows + width, *__restrict third = second + width, *__restrict fourth = third + width;
  for (int64_t i = 0; i < width; ++i) sums[i] += rows[i] * a + second[i] * b + (third[i] * c + fourth[i] * d);
}

// rows [4, width] = rows * decay + k [4] outer delta; sums += q [4] @ rows
static HFQ_LOOP void move_four_rows(float* __restrict rows, int64_t width, float decay, const float* k, const float* q,
                                    const float* __restrict delta, float* __restrict sums) {
  for (int64_t r = 0; r < 4; ++r) {
    float* __restrict row = rows + r * width;
    const float key = k[r], query = q[r];
    for (int64_t i = 0; i < width; ++i) {
      row[i] = row[i] * decay + delta[i] * key;
      sums[i] += row[i] * query;
    }
  }
}

// log(1 + e**x), as torch's
static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// q or k of a head with a length of `size`
static void load_unit(const DeltaRows& p, int64_t first, float size, float* values) {
  to_float(p.x, p.dtype, first, p.key_dim, values);
  float squares = p.eps;
  for (int64_t i = 0; i < p.key_dim; ++i) squares += values[i] * values[i];
  scale_values(p.key_dim, size / std::sqrt(squares), values);
}

static void delta_rows(const DeltaRows& p) {
  const int64_t keys = p.key_heads * p.key_dim, width = 2 * keys + p.heads * p.value_dim;
  const float size = 1.0f / std::sqrt(static_cast<float>(p.key_dim));
  parallel_for(p.sequences * p.heads, p.threads, [&](int64_t task) {
    float q[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim], sums[kMaxHeadDim];
    const int64_t head = task % p.heads, shared = head / (p.heads / p.key_heads) * p.key_dim;
    const float bias = load_as_float(p.time_bias, p.bias_dtype, head);
    const float speed = -std::exp(load_as_float(p.log_decay, p.decay_dtype, head));
    float* state = p.state + task * p.key_dim * p.value_dim;
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t row = task / p.heads * p.tokens + token, at = row * p.heads + head;
      load_unit(p, row * width + shared, size, q);
      load_unit(p, row * width + keys + shared, 1.0f, k);
      to_float(p.x, p.dtype, row * width + 2 * keys + head * p.value_dim, p.value_dim, v);
      const float step = load_as_float(p.a, p.a_dtype, at) + bias;
      const float decay = std::exp(speed * softplus(step));
      float beta = 1.0f / (1.0f + std::exp(-load_as_float(p.b, p.b_dtype, at)));
      round_values(1, p.dtype, &beta);
      memset(sums, 0, sizeof sums);
      for (int64_t i = 0; i < p.key_dim; i += 4) add_four_rows(state + i * p.value_dim, p.value_dim, k + i, sums);
      for (int64_t i = 0; i < p.value_dim; ++i) v[i] = (v[i] - sums[i] * decay) * beta;
      memset(sums, 0, sizeof sums);
      for (int64_t i = 0; i < p.key_dim; i += 4)
        move_four_rows(state + i * p.value_dim, p.value_dim, decay, k + i, q + i, v, sums);
      store_row(sums, p.value_dim, p.y, p.dtype, at * p.value_dim);
    }
  });
}

constexpr int64_t kStateLanes = 16;  // state_size is a multiple of

// state [size] = state * decay + change * b; returns the sum of state * c.
static HFQ_LOOP float move_state(float* __restrict state, int64_t size, const float* __restrict decay, float change,
                                 const float* __restrict b, const float* __restrict c) {
  float sums[kStateLanes] = {};
  for (int64_t i = 0; i < size; i += kStateLanes)
    for (int64_t lane = 0; lane < kStateLanes; ++lane) {
      state[i + lane] = state[i + lane] * decay[i + lane] + change * b[i + lane];
      sums[lane] += state[i + lane] * c[i + lane];
    }
  for (int64_t half = kStateLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

// values = -e**values
static HFQ_LOOP void negative_exps(int64_t count, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) {
    const float small = exp_of_negative(values[i] < 0.0f ? values[i] : -values[i]);
    values[i] = values[i] < 0.0f ? -small : -1.0f / small;
  }
}

// decays = e**(speeds * step); speeds are negative, step is not.
static HFQ_LOOP void decays_of(const float* __restrict speeds, int64_t count, float step, float* __restrict decays) {
  for (int64_t i = 0; i < count; ++i) decays[i] = exp_of_negative(speeds[i] * step);
}

// steps = softplus(steps + bias), rounded after both.
static void time_steps(const ScanRows& p, int64_t first, int64_t head, int64_t count, float* steps) {
  to_float(p.step, p.step_dtype, first + head, count, steps);
  round_values(count, p.dtype, steps);
  for (int64_t h = 0; h < count && p.time_bias != nullptr; ++h) steps[h] += load_as_float(p.time_bias, p.bias_dtype, head + h);
  round_values(count, p.dtype, steps);
  for (int64_t h = 0; h < count; ++h) steps[h] = softplus(steps[h]);
  round_values(count, p.dtype, steps);
}

static void scan_rows(const ScanRows& p) {
  const int64_t each = p.is_decay_apart ? p.state_size : 1, rows = p.heads * p.head_dim;
  const int64_t together = max64(1, kStepValues / (p.head_dim * p.state_size));  // heads
  const int64_t parts = ceil_div(p.heads, together);
  parallel_for(p.sequences * parts, p.threads, [&](int64_t task) {
    float speeds[kStepValues], steps[kStepValues], skips[kStepValues], x[kStepValues], y[kStepValues];
    float b[kMaxHeadDim], c[kMaxHeadDim], decays[kMaxHeadDim];
    const int64_t sequence = task / parts, first = task % parts * together, count = min64(together, p.heads - first);
    to_float(p.log_decay, p.decay_dtype, first * each, count * each, speeds);
    negative_exps(count * each, speeds);
    to_float(p.skip, p.skip_dtype, first, count, skips);
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t row = sequence * p.tokens + token;
      time_steps(p, row * p.heads, first, count, steps);
      to_float(p.x, p.dtype, row * p.x_width + first * p.head_dim, count * p.head_dim, x);
      for (int64_t h = 0; h < count; ++h) {
        const int64_t head = first + h, group = head / (p.heads / p.groups);
        if (h == 0 || head % (p.heads / p.groups) == 0) {
          const int64_t at = row * p.inputs_width + p.first + group * p.state_size;
          to_float(p.inputs, p.dtype, at, p.state_size, b);
          to_float(p.inputs, p.dtype, at + p.groups * p.state_size, p.state_size, c);
        }
        decays_of(speeds + h * each, each, steps[h], decays);
        for (int64_t i = each; i < p.state_size; ++i) decays[i] = decays[0];
        float* state = p.state + (sequence * rows + head * p.head_dim) * p.state_size;
        for (int64_t r = h * p.head_dim; r < (h + 1) * p.head_dim; ++r, state += p.state_size)
          y[r] = move_state(state, p.state_size, decays, steps[h] * x[r], b, c) + skips[h] * x[r];
      }
      store_row(y, count * p.head_dim, p.y, p.dtype, row * rows + first * p.head_dim);
    }
  });
}

}  // namespace HFQ_SET
}  // namespace hfq
