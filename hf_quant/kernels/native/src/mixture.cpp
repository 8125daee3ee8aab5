// The router of a mixture of experts (https://arxiv.org/abs/1701.06538). Values are rounded where the ops of torch
// round them.
#include "mixture_route.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"

namespace hfq {

namespace {

struct Score {
  float value;
  int64_t expert;
};

// The highest scores first, by the steps of torch.topk, which decide between equal ones (topk_impl_loop in
// ATen/native/TopKImpl.h).
void choose(Score* scores, int64_t count, int64_t chosen) {
  const auto is_higher = [](const Score& a, const Score& b) {
    return (std::isnan(a.value) && !std::isnan(b.value)) || a.value > b.value;
  };
  if (chosen * 64 <= count) {
    std::partial_sort(scores, scores + chosen, scores + count, is_higher);
  } else {
    std::nth_element(scores, scores + chosen - 1, scores + count, is_higher);
    std::sort(scores, scores + chosen - 1, is_higher);
  }
}

void to_scores(int64_t count, bool by_sigmoid, float* values) {
  float top = -INFINITY, sum = 0.0f;
  for (int64_t e = 0; e < count; ++e) {
    if (by_sigmoid) values[e] = 1.0f / (1.0f + std::exp(-values[e]));
    top = values[e] > top ? values[e] : top;
  }
  if (by_sigmoid) return;
  for (int64_t e = 0; e < count; ++e) {
    values[e] = std::exp(values[e] - top);
    sum += values[e];
  }
  for (int64_t e = 0; e < count; ++e) values[e] /= sum;
}

float rounded(float value, int dtype) {
  if (dtype == BF16) return bf16_to_float(float_to_bf16(value));
  return dtype == F16 ? f16_to_float(float_to_f16(value)) : value;
}

// The scores of experts of groups that are not chosen become `outside`.
void choose_groups(const Router& r, Score* scores, Score* groups) {
  const int64_t size = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, scores[e].value));
      first = std::max(first, scores[e].value);
    }
    groups[g] = {r.summed == 2 ? first + second : first, g};
  }
  choose(groups, r.groups, r.chosen_groups);
  for (int64_t g = r.chosen_groups; g < r.groups; ++g)
    for (int64_t i = 0; i < size; ++i) scores[groups[g].expert * size + i].value = r.outside;
}

// The experts of a row, and their weights, from its logits, which become scores. `scores`: of experts, then of groups.
void route_row(const Router& r, int dtype, float* logits, Score* scores, int32_t* experts, float* weights) {
  to_scores(r.experts, r.by_sigmoid, logits);
  for (int64_t e = 0; e < r.experts; ++e)
    scores[e] = {logits[e] + (r.correction == nullptr ? 0.0f : load_as_float(r.correction, r.correction_dtype, e)), e};
  if (r.groups > 1) choose_groups(r, scores, scores + r.experts);
  choose(scores, r.experts, r.chosen);
  float sum = 0.0f;
  for (int64_t j = 0; j < r.chosen; ++j) {
    experts[j] = static_cast<int32_t>(scores[j].expert);
    weights[j] = logits[experts[j]];
    sum += weights[j];
  }
  for (int64_t j = 0; j < r.chosen; ++j) {
    weights[j] = (r.normalizes ? weights[j] / sum : weights[j]) * r.factor;
    if (r.rounds_weights) weights[j] = rounded(weights[j], dtype);
  }
}

// The places of pairs of a row and an expert, in the order of the experts, and where each expert's end.
void sort_pairs(const int32_t* experts, int64_t pairs, int64_t num_experts, const Routing& routing) {
  int32_t* ends = routing.ends;
  std::fill(ends, ends + num_experts, 0);
  for (int64_t i = 0; i < pairs; ++i) ++ends[experts[i]];
  for (int64_t e = 1; e < num_experts; ++e) ends[e] += ends[e - 1];
  for (int64_t i = pairs - 1; i >= 0; --i) routing.places[i] = --ends[experts[i]];  // now these are the beginnings
  for (int64_t e = 0; e + 1 < num_experts; ++e) ends[e] = ends[e + 1];
  ends[num_experts - 1] = static_cast<int32_t>(pairs);
}

bool multiply(const Kernels& kernels, SmallProduct p, int64_t M, const void* x, int dtype, int threads, float* y) {
  p.M = M;
  p.x = x;
  p.dtype = dtype;
  p.y = y;
  p.threads = threads;
  return kernels.small_product(p);
}

}  // namespace

bool route(const Kernels& kernels, const Router& r, int64_t M, const void* x, int dtype, int threads,
           const Routing& routing, void* gathered) {
  const int64_t pairs = M * r.chosen, row = r.product.K * element_size(dtype);
  char* memory = static_cast<char*>(
      thread_scratch(5, static_cast<size_t>((r.experts + r.groups) * sizeof(Score) + M * r.experts * 4 + pairs * 4)));
  if (memory == nullptr) return false;
  Score* scores = reinterpret_cast<Score*>(memory);
  float* logits = reinterpret_cast<float*>(scores + r.experts + r.groups);
  int32_t* experts = reinterpret_cast<int32_t*>(logits + M * r.experts);
  if (!multiply(kernels, r.product, M, x, dtype, threads, logits)) return false;
  for (int64_t m = 0; m < M; ++m)
    route_row(r, dtype, logits + m * r.experts, scores, experts + m * r.chosen, routing.weights + m * r.chosen);
  sort_pairs(experts, pairs, r.experts, routing);
  for (int64_t i = 0; i < pairs; ++i)
    memcpy(static_cast<char*>(gathered) + routing.places[i] * row, static_cast<const char*>(x) + i / r.chosen * row, row);
  return true;
}

bool weigh(const Kernels& kernels, const SmallProduct& product, int64_t M, const void* x, int dtype, int threads,
           int64_t width, void* y) {
  float* weights = static_cast<float*>(thread_scratch(5, static_cast<size_t>(M * 4)));
  if (weights == nullptr) return false;
  if (!multiply(kernels, product, M, x, dtype, threads, weights)) return false;
  for (int64_t m = 0; m < M; ++m) weights[m] = rounded(1.0f / (1.0f + std::exp(-weights[m])), dtype);
  kernels.combine_rows({M, width, 1, y, y, dtype, nullptr, weights, true, threads});
  return true;
}

}  // namespace hfq
