// Products of few rows with weights of 16 or 32 bits, and the sum of what the experts of a mixture return. Values are rounded
// where the ops of torch round them.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "portable.h"
#include "steps.h"

namespace hfq {
namespace HFQ_SET {

// Sums of products with up to kDotRows rows of floats, `stride` apart.
constexpr int64_t kDotRows = 4, kDotLanes = 16;
constexpr int64_t kDotOutputs = 32;  // of a task, if there are many

static HFQ_LOOP void dot_values(const float* __restrict weight, const float* __restrict x, int64_t stride, int64_t rows,
                                int64_t count, float* __restrict totals) {
  float sums[kDotRows][kDotLanes] = {};
  int64_t i = 0;
  if (rows == kDotRows) {
    for (; i + kDotLanes <= count; i += kDotLanes)
      for (int64_t r = 0; r < kDotRows; ++r)
        for (int64_t l = 0; l < kDotLanes; ++l) sums[r][l] += weight[i + l] * x[r * stride + i + l];
  } else {
    for (int64_t r = 0; r < rows; ++r)
      for (i = 0; i + kDotLanes <= count; i += kDotLanes)
        for (int64_t l = 0; l < kDotLanes; ++l) sums[r][l] += weight[i + l] * x[r * stride + i + l];
    i = count / kDotLanes * kDotLanes;
  }
  for (int64_t r = 0; r < rows; ++r) {
    float total = totals[r];
    for (int64_t k = i; k < count; ++k) total += weight[k] * x[r * stride + k];
    for (int64_t l = 0; l < kDotLanes; ++l) total += sums[r][l];
    totals[r] = total;
  }
}

static bool small_product(const SmallProduct& p) {
  float* x = static_cast<float*>(thread_scratch(4, static_cast<size_t>(p.M * p.K * 4)));
  if (x == nullptr) return false;
  to_float(p.x, p.dtype, 0, p.M * p.K, x);
  const int64_t outputs = p.N < 64 * kDotOutputs ? 1 : kDotOutputs;
  parallel_for(ceil_div(p.N, outputs), p.M * p.N * p.K < (1 << 16) ? 1 : p.threads, [&](int64_t task) {
    float row[kStepValues], totals[kDotRows];
    for (int64_t n = task * outputs; n < min64(p.N, (task + 1) * outputs); ++n) {
      for (int64_t m = 0; m < p.M; ++m) p.y[m * p.N + n] = 0.0f;
      for (int64_t k = 0; k < p.K; k += kStepValues) {
        const int64_t count = min64(kStepValues, p.K - k);
        to_float(p.weight, p.weight_dtype, n * p.K + k, count, row);
        for (int64_t m = 0; m < p.M; m += kDotRows) {
          const int64_t rows = min64(kDotRows, p.M - m);
          for (int64_t r = 0; r < rows; ++r) totals[r] = p.y[(m + r) * p.N + n];
          dot_values(row, x + m * p.K + k, p.K, rows, count, totals);
          for (int64_t r = 0; r < rows; ++r) p.y[(m + r) * p.N + n] = totals[r];
        }
      }
    }
  });
  if (p.bias != nullptr)
    for (int64_t i = 0; i < p.M * p.N; ++i) p.y[i] += load_as_float(p.bias, p.bias_dtype, i % p.N);
  if (p.rounds) round_values(p.M * p.N, p.dtype, p.y);
  if (p.rounded != nullptr) store_row(p.y, p.M * p.N, p.rounded, p.dtype, 0);
  return true;
}

static void combine_rows(const CombineRows& c) {
  parallel_for(c.M, c.M * c.chosen * c.width < (1 << 16) ? 1 : c.threads, [&](int64_t m) {
    float values[kStepValues], sums[kStepValues];
    for (int64_t k = 0; k < c.width; k += kStepValues) {
      const int64_t count = min64(kStepValues, c.width - k);
      for (int64_t i = 0; i < count; ++i) sums[i] = 0.0f;
      for (int64_t j = 0; j < c.chosen; ++j) {
        const int64_t pair = m * c.chosen + j, row = c.places == nullptr ? pair : c.places[pair];
        to_float(c.x, c.dtype, row * c.width + k, count, values);
        scale_values(count, c.weights[pair], values);
        if (c.rounds) round_values(count, c.dtype, values);
        add_values(values, count, sums);
      }
      store_row(sums, count, c.y, c.dtype, m * c.width + k);
    }
  });
}

}  // namespace HFQ_SET
}  // namespace hfq
