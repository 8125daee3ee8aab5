// One token in layers that have a state instead of a cache: causal convolutions, and the gated delta rule.
#pragma once

#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "portable.h"
#include "steps.h"

namespace hfq {
namespace HFQ_SET {

template <class T>
static void shift_in(const T* x, int64_t count, int64_t taps, T* state) {
  for (int64_t c = 0; c < count; ++c, state += taps) {
    for (int64_t t = 0; t + 1 < taps; ++t) state[t] = state[t + 1];
    state[taps - 1] = x[c];
  }
}

static HFQ_LOOP void add_taps(const float* __restrict state, const float* __restrict weight, int64_t count, int64_t taps,
                              float* __restrict sums) {
  for (int64_t c = 0; c < count; ++c)
    for (int64_t t = 0; t < taps; ++t) sums[c] += state[c * taps + t] * weight[c * taps + t];
}

static void convolve_rows(const ConvolveRows& p) {
  const int64_t parts = ceil_div(p.width, kStepValues), size = element_size(p.dtype);
  parallel_for(p.rows * parts, p.rows * p.width < (1 << 14) ? 1 : p.threads, [&](int64_t task) {
    float state[kStepValues * kMaxTaps], weight[kStepValues * kMaxTaps], sums[kStepValues];
    const int64_t row = task / parts, column = task % parts * kStepValues, count = min64(kStepValues, p.width - column);
    const int64_t first = row * p.width + column;
    const char* x = static_cast<const char*>(p.x) + first * size;
    char* own = static_cast<char*>(p.state) + first * p.taps * size;
    if (size == 2)
      shift_in(reinterpret_cast<const uint16_t*>(x), count, p.taps, reinterpret_cast<uint16_t*>(own));
    else
      shift_in(reinterpret_cast<const float*>(x), count, p.taps, reinterpret_cast<float*>(own));
    to_float(p.state, p.dtype, first * p.taps, count * p.taps, state);
    to_float(p.weight, p.dtype, column * p.taps, count * p.taps, weight);
    if (p.bias != nullptr)
      to_float(p.bias, p.dtype, column, count, sums);
    else
      memset(sums, 0, sizeof sums);
    add_taps(state, weight, count, p.taps, sums);
    round_values(count, p.dtype, sums);
    activate(p.activation, count, sums);
    store_row(sums, count, p.y, p.dtype, first);
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
  parallel_for(p.rows * p.heads, p.threads, [&](int64_t task) {
    float q[kMaxHeadDim], k[kMaxHeadDim], v[kMaxHeadDim], sums[kMaxHeadDim];
    const int64_t row = task / p.heads, head = task % p.heads, shared = head / (p.heads / p.key_heads);
    load_unit(p, row * width + shared * p.key_dim, size, q);
    load_unit(p, row * width + keys + shared * p.key_dim, 1.0f, k);
    to_float(p.x, p.dtype, row * width + 2 * keys + head * p.value_dim, p.value_dim, v);
    const float step = load_as_float(p.a, p.a_dtype, task) + load_as_float(p.time_bias, p.bias_dtype, head);
    const float positive = step > 20.0f ? step : std::log1p(std::exp(step));  // as torch's softplus
    const float decay = std::exp(-std::exp(load_as_float(p.log_decay, p.decay_dtype, head)) * positive);
    float beta = 1.0f / (1.0f + std::exp(-load_as_float(p.b, p.b_dtype, task)));
    round_values(1, p.dtype, &beta);
    float* state = p.state + task * p.key_dim * p.value_dim;
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < p.key_dim; i += 4) add_four_rows(state + i * p.value_dim, p.value_dim, k + i, sums);
    for (int64_t i = 0; i < p.value_dim; ++i) v[i] = (v[i] - sums[i] * decay) * beta;
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < p.key_dim; i += 4)
      move_four_rows(state + i * p.value_dim, p.value_dim, decay, k + i, q + i, v, sums);
    store_row(sums, p.value_dim, p.y, p.dtype, task * p.value_dim);
  });
}

}  // namespace HFQ_SET
}  // namespace hfq
