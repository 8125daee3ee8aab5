// Weights as they would be stored, and the gradients through that, in plain C++, compiled once for every instruction
// set: fake_quantize of hf_quant. The grids, and how each step rounds, are those of quantize.h.
#pragma once

#include "quantize.h"

namespace hfq {
namespace HFQ_SET {

// The level of x, and whether x rounds to a level without leaving the grid. `zero`: the grid value of weight 0.
template <class Grid>
struct FakeGrid {
  const Grid grid;
  float low, high;

  float level(float x, float) const { return grid.level(x); }
  float inside(float x) const { return x >= low && x <= high ? 1.0f : 0.0f; }
};

// Integers round before the zero point is added, which may be far from 0.
template <>
struct FakeGrid<Integers> {
  const Integers grid;
  float low, high;

  float level(float x, float zero) const {
    const int32_t whole = static_cast<int32_t>(zero), rounded = bits_of(x + kRound) + whole;
    return of_bits(max32(min32(rounded, grid.high), grid.low)) - kRound - zero;
  }
  float inside(float x) const { return x >= low && x <= high ? 1.0f : 0.0f; }
};

template <class Grid>
class FakeQuantizer {
 public:
  FakeQuantizer(const FakeQuantization& f, const Grid& grid) : f_(f), grid_{grid, f.inside_low, f.inside_high} {}

  bool run() {
    const int64_t per_task = max64(1, (1 << 16) / max64(f_.K, 1));
    std::atomic<bool> ok{true};
    parallel_for(ceil_div(f_.N, per_task), f_.threads, [&](int64_t task) {
      float* memory = static_cast<float*>(thread_scratch(1, static_cast<size_t>(f_.K) * 8));
      if (memory == nullptr) {
        ok = false;
        return;
      }
      for (int64_t row = task * per_task; row < min64(f_.N, (task + 1) * per_task); ++row) {
        to_float(f_.weight, f_.weight_dtype, row * f_.K, f_.K, memory);
        if (f_.grad != nullptr) to_float(f_.grad, f_.grad_dtype, row * f_.K, f_.K, memory + f_.K);
        for (int64_t g = 0; g < f_.groups; ++g) {
          const int64_t k = g * f_.group_size, count = min64(f_.group_size, f_.K - k), i = row * f_.groups + g;
          const float zero = f_.zero == nullptr ? 0.0f : static_cast<float>(f_.zero[i] + f_.low);
          if (f_.grad == nullptr) {
            forward(count, f_.scale[i], zero, memory + k);
          } else {
            f_.grad_scale[i] = backward(count, f_.scale[i], zero, memory + k, memory + f_.K + k);
          }
        }
        store_row(f_.grad == nullptr ? memory : memory + f_.K, f_.K, f_.result, f_.weight_dtype, row * f_.K);
      }
    });
    return ok;
  }

 private:
  void forward(int64_t count, float scale, float zero, float* __restrict values) const {
    const FakeGrid<Grid> grid = grid_;
    for (int64_t i = 0; i < count; ++i) values[i] = grid.level(values[i] / scale, zero) * scale;
  }

  // Puts the gradient of the weights in place of that of the result; returns that of the scale.
  float backward(int64_t count, float scale, float zero, const float* __restrict values,
                 float* __restrict grads) const {
    const FakeGrid<Grid> grid = grid_;
    double lanes[kSumLanes] = {};
    int64_t k = 0;
    auto of_scale = [&](int64_t i) {
      const float x = values[i] / scale, inside = grid.inside(x + zero), gradient = grads[i];
      grads[i] = inside != 0 ? gradient : 0.0f;
      const float kept = inside != 0 ? x : 0.0f;
      return static_cast<double>(gradient * (grid.level(x, zero) - kept));
    };
    for (; k + kSumLanes <= count; k += kSumLanes)
      for (int j = 0; j < kSumLanes; ++j) lanes[j] += of_scale(k + j);
    for (int j = 0; k + j < count; ++j) lanes[j] += of_scale(k + j);
    return static_cast<float>(sum_lanes(lanes));
  }

  const FakeQuantization& f_;
  const FakeGrid<Grid> grid_;
};

static bool fake_quantize(const FakeQuantization& f) {
  WeightQuantization q{};
  q.low = f.low;
  q.high = f.high;
  q.levels = f.levels;
  q.layout = BYTES_INT;
  if (f.levels != nullptr) return FakeQuantizer<Levels>(f, Levels(q)).run();
  if (f.exponent_bits != 0) {
    const Minifloat grid(f.max, f.exponent_bits, f.mantissa_bits, f.exponent_bias);
    return FakeQuantizer<Minifloat>(f, grid).run();
  }
  return FakeQuantizer<Integers>(f, Integers(q)).run();
}

}  // namespace HFQ_SET
}  // namespace hfq
