// What offsets of a weight add to its products: to y[i, n] the offset of each group of row n times the sum of x[i] over it.
#pragma once

#include "parallel.h"
#include "types.h"

namespace hfq {
namespace HFQ_SET {

// Values first..first + count of x as fp32; a loop for each dtype, which vectorizes.
static inline void to_float(const void* x, int dtype, int64_t first, int64_t count, float* __restrict values) {
  switch (dtype) {
    case F32: memcpy(values, static_cast<const char*>(x) + first * 4, static_cast<size_t>(count) * 4); return;
    case BF16:
      for (int64_t i = 0; i < count; ++i) values[i] = bf16_to_float(load<uint16_t>(x, first + i));
      return;
    case F16:
      for (int64_t i = 0; i < count; ++i) values[i] = f16_to_float(load<uint16_t>(x, first + i));
      return;
    default:
      for (int64_t i = 0; i < count; ++i) values[i] = load_as_float(x, dtype, first + i);
  }
}

constexpr int64_t kOffsetLanes = 16;  // rows of a weight whose offsets lie side by side

// Written out as vectors: GCC 12 makes loops over lanes of loops over rows, which take four times as long (M = 128).
typedef float OffsetLanes __attribute__((vector_size(HFQ_VECTOR_BYTES), aligned(4), may_alias));
constexpr int kLanesOfVector = HFQ_VECTOR_BYTES / 4, kOffsetVectors = kOffsetLanes / kLanesOfVector;
// Rows of x that meet offsets together, whose sums fill half of the registers, and sums side by side of a single one.
constexpr int kRowsAtOnce = HFQ_VECTOR_BYTES / 8, kChains = HFQ_VECTOR_BYTES / 16;

// The sums of row i of x over the groups of the weight.
static HFQ_LOOP void sum_groups_of_row(const Product& p, int64_t i, float* __restrict sums) {
  float values[256];
  const int64_t size = p.groups == 1 ? p.K : p.group_size;
  for (int64_t g = 0; g < p.groups; ++g) {
    OffsetLanes lanes = {};
    float total = 0.0f;
    const int64_t end = min64(p.K, (g + 1) * size);
    for (int64_t k = g * size; k < end; k += 256) {
      const int64_t count = min64(256, end - k), whole = count / kLanesOfVector * kLanesOfVector;
      to_float(p.x, p.x_dtype, i * p.x_stride + k, count, values);
      for (int64_t at = 0; at < whole; at += kLanesOfVector) lanes += *reinterpret_cast<const OffsetLanes*>(values + at);
      for (int64_t at = whole; at < count; ++at) total += values[at];
    }
    for (int lane = 0; lane < kLanesOfVector; ++lane) total += lanes[lane];
    sums[g] = p.row_scale == nullptr ? total : total * p.row_scale[i];
  }
}

// Fills sums [M, groups].
static void sum_over_groups(const Product& p, float* sums) {
  parallel_for(p.M, p.M * p.K < (1 << 16) ? 1 : p.threads, [&](int64_t i) { sum_groups_of_row(p, i, sums + i * p.groups); });
}

// The sums of ROWS rows, each of so many groups, with the offsets [groups, kOffsetLanes] of some rows of the weight. CHAINS:
// sums of one element that are added up side by side, as each waits for the one before.
template <int ROWS, int CHAINS>
static HFQ_LOOP void multiply_offsets(const float* __restrict offsets, int64_t groups, const float* __restrict sums,
                                      float* __restrict rest) {
  OffsetLanes total[CHAINS][ROWS][kOffsetVectors] = {};
  const auto add = [&](int chain, int64_t g) {
    for (int part = 0; part < kOffsetVectors; ++part) {
      const OffsetLanes offset = *reinterpret_cast<const OffsetLanes*>(offsets + g * kOffsetLanes + part * kLanesOfVector);
      for (int row = 0; row < ROWS; ++row) total[chain][row][part] += offset * sums[row * groups + g];
    }
  };
  int64_t g = 0;
  for (; g + CHAINS <= groups; g += CHAINS)
    for (int chain = 0; chain < CHAINS; ++chain) add(chain, g + chain);
  for (; g < groups; ++g) add(0, g);
  for (int row = 0; row < ROWS; ++row) {
    for (int part = 0; part < kOffsetVectors; ++part) {
      for (int chain = 1; chain < CHAINS; ++chain) total[0][row][part] += total[chain][row][part];
      *reinterpret_cast<OffsetLanes*>(rest + row * kOffsetLanes + part * kLanesOfVector) = total[0][row][part];
    }
  }
}

// Fills rest [M, N] from sums [M, groups].
static void multiply_sums(const Product& p, const float* sums, float* rest) {
  const int64_t blocks = ceil_div(p.N, kOffsetLanes), per_task = 8, tasks = ceil_div(blocks, per_task);
  for (int64_t e = 0, first = 0; e < p.experts; ++e) {
    const int64_t end = p.ends == nullptr ? p.M : min64(p.ends[e], p.M);
    const float* of_expert = p.offsets + e * blocks * kOffsetLanes * p.groups;
    parallel_for(first < end ? tasks : 0, p.threads, [&](int64_t task) {
      for (int64_t b = task * per_task; b < min64(blocks, (task + 1) * per_task); ++b) {
        const float* offsets = of_expert + b * kOffsetLanes * p.groups;
        const int64_t n = b * kOffsetLanes, count = min64(kOffsetLanes, p.N - n);
        float made[kRowsAtOnce * kOffsetLanes];
        for (int64_t i = first; i < end;) {
          const int64_t rows = end - i >= kRowsAtOnce ? kRowsAtOnce : 1;
          if (rows == 1) {
            multiply_offsets<1, kChains>(offsets, p.groups, sums + i * p.groups, made);
          } else {
            multiply_offsets<kRowsAtOnce, 1>(offsets, p.groups, sums + i * p.groups, made);
          }
          for (int64_t row = 0; row < rows; ++row, ++i)
            memcpy(rest + i * p.N + n, made + row * kOffsetLanes, static_cast<size_t>(count) * 4);
        }
      }
    });
    first = max64(first, end);
  }
}

// Adds what the offsets of an expert make of row `row` of x to the sums of rows n..n + count of its weight.
static inline void add_rest(const Product& p, int64_t expert, int64_t row, int64_t n, int64_t count, float* values) {
  if (p.rest != nullptr) {
    for (int64_t r = 0; r < count; ++r) values[r] += p.rest[row * p.N + n + r];
    return;
  }
  if (p.group_sums == nullptr) return;
  const float* offsets = p.offsets + expert * ceil_div(p.N, kOffsetLanes) * kOffsetLanes * p.groups;
  for (int64_t r = 0; r < count;) {
    float made[kOffsetLanes];
    const int64_t block = (n + r) / kOffsetLanes;
    multiply_offsets<1, kChains>(offsets + block * kOffsetLanes * p.groups, p.groups, p.group_sums + row * p.groups, made);
    for (int64_t lane = n + r - block * kOffsetLanes; lane < kOffsetLanes && r < count; ++lane, ++r) values[r] += made[lane];
  }
}

}  // namespace HFQ_SET
}  // namespace hfq
