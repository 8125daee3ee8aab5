// One of the two products of an attention alone, of each head's own rows of codes: what a weight is multiplied with whose
// rows belong to heads, from either side.
#pragma once

#include <atomic>

#include "attention_panels.h"
#include "parallel.h"
#include "rotation.h"

namespace hfq {
namespace HFQ_SET {

template <class Panels>
class AttentionParts {
 public:
  explicit AttentionParts(const Attention& a) : a_(a), width_(a.part == SUMS ? a.T : a.D),
        scale_(a.global_scale == nullptr ? a.scale : a.scale * *a.global_scale) {}

  bool run() const {
    const int64_t rows = min64(a_.S, kQueryRows), heads = a_.B * a_.H;
    const size_t floats = static_cast<size_t>(rows * (width_ + a_.D + kFewTokens) + kTokens * a_.D);
    const bool is_short = heads * (a_.S + 8) * a_.T * a_.D < (1 << 17);  // takes less time than a team of threads
    std::atomic<bool> ok{true};
    parallel_for(heads, is_short ? 1 : a_.threads, [&](int64_t head) {
      float* scratch = static_cast<float*>(thread_scratch(1, floats * sizeof(float)));
      if (scratch == nullptr) {
        ok = false;
        return;
      }
      for (int64_t first = 0; first < a_.S; first += kQueryRows)
        multiply_rows_of(head, first, min64(kQueryRows, a_.S - first), scratch);
    });
    return ok;
  }

 private:
  // scratch: rows of q, fp32 | sums [rows, D] | scores, or weights, of some tokens | panel
  void multiply_rows_of(int64_t head, int64_t first, int64_t rows, float* scratch) const {
    const int64_t b = head / a_.H, h = head % a_.H, tokens = Panels::few(a_, rows) ? kFewTokens : kTokens;
    const int64_t q = b * a_.q_batch + h * a_.q_head + first * a_.q_position;
    const int64_t y = b * a_.y_batch + h * a_.y_head + first * a_.y_position;
    float *left = scratch, *sums = left + rows * width_, *some = sums + rows * a_.D, *panel = some + rows * kFewTokens;
    for (int64_t r = 0; r < rows; ++r) {
      to_float(a_.q, a_.q_dtype, q + r * a_.q_position, width_, left + r * width_);
      if (a_.part == SCORES && a_.block != 0) rotate_blocks(left + r * width_, a_.diagonal, a_.D, a_.block);
      for (int64_t i = 0; i < width_; ++i) left[r * width_ + i] *= scale_;
    }
    memset(sums, 0, static_cast<size_t>(rows * a_.D) * sizeof(float));
    for (int64_t t = 0; t < a_.T; t += tokens) {
      const int64_t count = min64(tokens, a_.T - t);
      if (a_.part == SCORES) {
        scores(b, h, t, count, rows, tokens, left, panel, some);
        for (int64_t r = 0; r < rows; ++r)
          store_row(some + r * tokens, count, a_.y, a_.q_dtype, y + r * a_.y_position + t);
      } else {
        for (int64_t r = 0; r < rows; ++r)
          memcpy(some + r * tokens, left + r * width_ + t, static_cast<size_t>(count) * sizeof(float));
        add(b, h, t, count, rows, tokens, some, panel, sums);
      }
    }
    for (int64_t r = 0; r < rows && a_.part == SUMS; ++r) {
      if (a_.block != 0) rotate_back(sums + r * a_.D, a_.diagonal, a_.D, a_.block);
      store_row(sums + r * a_.D, a_.D, a_.y, a_.q_dtype, y + r * a_.y_position);
    }
  }

  void scores(int64_t b, int64_t h, int64_t t, int64_t count, int64_t rows, int64_t tokens, const float* left,
              float* panel, float* to) const {
    if (tokens == kFewTokens) return Panels::scores(a_, b, h, t, count, left, rows, to);
    memset(to, 0, static_cast<size_t>(rows * tokens) * sizeof(float));
    Panels::keys(a_, b, h, t, count, panel);
    multiply<Products>(left, a_.D, rows, panel, kTokens, a_.D, to);
  }

  void add(int64_t b, int64_t h, int64_t t, int64_t count, int64_t rows, int64_t tokens, const float* weights,
           float* panel, float* sums) const {
    if (tokens == kFewTokens) return Panels::add(a_, b, h, t, count, weights, rows, sums);
    Panels::values(a_, b, h, t, count, panel);
    multiply<Products>(weights, tokens, rows, panel, a_.D, count, sums);
  }

  const Attention& a_;
  const int64_t width_;  // of rows of q
  const float scale_;
};

}  // namespace HFQ_SET
}  // namespace hfq
