// The router of a mixture of experts.
#pragma once

#include "kernels.h"

namespace hfq {

struct Router {
  SmallProduct product;  // the logits of the experts
  int64_t experts, chosen;  // of them, for each row
  const void* correction;  // [experts], added to the scores by which experts are chosen; null if there is none
  int correction_dtype;
  bool by_sigmoid;  // scores, else by softmax
  bool normalizes;  // the weights of a row to a sum of 1
  float factor;     // of the weights
  bool rounds_weights;
  // If there is more than one group of experts: of how many the experts are chosen, and by how many of its highest scores,
  // 1 or 2, a group is. Experts of the other groups have the score `outside`.
  int64_t groups, chosen_groups, summed;
  float outside;
};

// Pairs of row and expert, sorted by experts.
struct Routing {
  int32_t* ends;    // [experts]: of each expert's pairs
  int32_t* places;  // [M, chosen]
  float* weights;   // [M, chosen]
};

// Chooses the experts of each row of x [M, K] and copies its row to each of its places in `gathered` [M * chosen, K].
// Returns false if there is no memory.
bool route(const Kernels& kernels, const Router& router, int64_t M, const void* x, int dtype, int threads,
           const Routing& routing, void* gathered);

// Multiplies the rows of y [M, width] by the sigmoid of a product [M, 1] with x.
bool weigh(const Kernels& kernels, const SmallProduct& product, int64_t M, const void* x, int dtype, int threads,
           int64_t width, void* y);

}  // namespace hfq
