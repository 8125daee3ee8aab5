// Attention over quantized keys and values: panels of 64 tokens meet up to 48 rows of queries (all heads that share the
// keys, at several positions) by an online softmax (https://arxiv.org/abs/2205.14135).
//
// The order of all sums depends on the shapes only, not on the number of threads. With few rows the tokens are split
// among tasks, whose results are merged in their order (https://pytorch.org/blog/flash-decoding).
#pragma once

#include <atomic>
#include <cmath>

#include "attention_parts.h"
#include "parallel.h"
#include "rotation.h"

namespace hfq {
namespace HFQ_SET {

// e**x for x <= 0, to 2 units in the last place; below e**-87 it is 0.
static inline float exp_of_negative(float x) {
  const float y = x * 1.44269504f, whole = y + 12582912.0f, n = whole - 12582912.0f;  // rounds to an integer
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;                           // x - n * ln 2
  float value = 1.9875691500e-4f;  // Cephes' expf
  value = value * r + 1.3981999507e-3f;
  value = value * r + 8.3334519073e-3f;
  value = value * r + 4.1665795894e-2f;
  value = value * r + 1.6666665459e-1f;
  value = value * r + 5.0000001201e-1f;
  value = value * (r * r) + r + 1.0f;
  const float power = bits_to_float((float_to_bits(whole) - 0x4B400000u + 127u) << 23);
  return y < -125.0f ? 0.0f : value * power;
}

// tanh to 2 units in the last place.
static inline float tanh_of(float x) {
  const float z = x * x, size = x < 0.0f ? -x : x, e = exp_of_negative(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  float near = -5.70498872745e-3f;  // Cephes' tanhf
  near = near * z + 2.06390887954e-2f;
  near = near * z - 5.37397155531e-2f;
  near = near * z + 1.33314422036e-1f;
  near = near * z - 3.33332819422e-1f;
  near = near * z * x + x;
  return size < 0.625f ? near : x < 0.0f ? -far : far;
}

// cap * tanh((score + shift) / cap)
static inline void cap_scores(int64_t count, float cap, float shift, float* __restrict scores) {
  const float inverse = 1.0f / cap;
  for (int64_t i = 0; i < count; ++i) scores[i] = cap * tanh_of((scores[i] + shift) * inverse);
}

// What has been seen of the tokens by `rows` rows of queries.
struct Partial {
  float* top;     // [rows] largest score
  float* weight;  // [rows] sum of exp(score - top)
  float* out;     // [rows, D] sum of exp(score - top) * value
};

template <class Panels>
class AttentionTasks {
 public:
  explicit AttentionTasks(const Attention& a) : a_(a), repeats_(a.H / a.H_kv), rows_(repeats_ * a.S) {
    blocks_ = ceil_div(rows_, kQueryRows);
    split_ = max64(a.T, 1);
    if (blocks_ == 1) split_ = max64(kSplitTokens, ceil_div(ceil_div(a.T, kMaxSplits), kTokens) * kTokens);
    splits_ = max64(ceil_div(a.T, split_), 1);
    // All heads read one cache of latents: a task for each thread.
    const int64_t tasks = a.B * a.H_kv * blocks_;
    if (a.more != nullptr && splits_ == 1 && tasks < a.threads) {
      block_rows_ = max64(ceil_div(rows_, ceil_div(a.threads, a.B * a.H_kv)), 8);
      blocks_ = ceil_div(rows_, block_rows_);
    }
  }

  bool run() {
    if (a_.part != WHOLE) return AttentionParts<Panels>(a_).run();
    const int64_t heads = a_.B * a_.H_kv, partial_rows = splits_ > 1 ? rows_ : 0;
    const size_t partial = static_cast<size_t>(partial_rows * (a_.D + 2));
    float* partials = nullptr;
    if (splits_ > 1) {
      partials = static_cast<float*>(thread_scratch(0, heads * splits_ * partial * sizeof(float)));
      if (partials == nullptr) return false;
    }
    const bool is_short = heads * rows_ * (a_.T + 96) * a_.D < (1 << 17);  // takes less time than a team of threads
    std::atomic<bool> ok{true};
    parallel_for(heads * blocks_ * splits_, is_short ? 1 : a_.threads, [&](int64_t task) {
      const int64_t split = task % splits_, block = task / splits_ % blocks_, head = task / splits_ / blocks_;
      const int64_t first = block * block_rows_, rows = min64(block_rows_, rows_ - first);
      float* scratch = static_cast<float*>(thread_scratch(1, scratch_floats(rows) * sizeof(float)));
      if (scratch == nullptr) {
        ok = false;
        return;
      }
      float* at = partials == nullptr ? scratch : partials + task * partial;
      const Partial seen{at, at + rows, at + 2 * rows};
      attend(head, first, rows, split * split_, min64(a_.T, (split + 1) * split_), seen, scratch + rows * (a_.D + 2));
      if (splits_ == 1) store(head, first, rows, seen);
    });
    if (!ok || splits_ == 1) return ok;
    parallel_for(heads, heads * splits_ * rows_ * a_.D < (1 << 15) ? 1 : a_.threads, [&](int64_t head) {
      float* at = partials + head * splits_ * partial;
      const Partial total{at, at + rows_, at + 2 * rows_};
      for (int64_t split = 1; split < splits_; ++split) {
        at += partial;
        merge(total, {at, at + rows_, at + 2 * rows_});
      }
      store(head, 0, rows_, total);
    });
    return true;
  }

 private:
  using Dot = typename Panels::Dot;
  static constexpr int PER = Dot::PER;

  // seen | queries [rows, D] | more of them | scores of the rows | panel [kTokens, D] | scores of a panel | of what the keys
  // lack [rows]
  size_t scratch_floats(int64_t rows) const {
    const int64_t of_panel = Panels::STEP == kTokens ? 0 : rows * kTokens;
    const int64_t of_rows = 2 * a_.D + more_channels() + step(rows) + 3;
    return static_cast<size_t>(rows * of_rows + kTokens * panel_channels() + of_panel);
  }

  int64_t more_channels() const { return a_.more == nullptr ? 0 : a_.more->D; }
  int64_t panel_channels() const { return max64(a_.D, more_channels()); }
  int64_t step(int64_t rows) const {
    return a_.more == nullptr && Panels::few(a_, rows) ? kFewTokens : Panels::STEP;
  }

  // Scores of tokens t..t + count, `tokens` apart.
  void score(int64_t b, int64_t h, int64_t t, int64_t count, const float* queries, int64_t rows, int64_t tokens,
             float* panel, float* of_panel, float* scores) const {
    for (int64_t at = 0; at < count; at += kTokens) {
      float* to = Panels::STEP == kTokens ? scores : of_panel;
      memset(to, 0, static_cast<size_t>(rows * kTokens) * sizeof(float));
      const float* left = queries;
      for (const Attention* a = &a_; a != nullptr; left += rows * a->D, a = a->more) {
        Panels::keys(*a, b, h, t + at, min64(kTokens, count - at), panel);
        multiply<Dot>(left, a->D, rows, panel, kTokens, a->D / PER, to);
      }
      for (int64_t i = 0; i < rows * kTokens && PER > 1; ++i) to[i] *= a_.scale;
      for (int64_t r = 0; r < rows && to != scores; ++r)
        memcpy(scores + r * tokens + at, to + r * kTokens, kTokens * sizeof(float));
    }
  }

  // With pairs of values in an element they stay pairs, of which the last one is whole.
  void round_scores(int64_t count, float* scores) const {
    if (!Panels::ROUNDS || a_.q_dtype == F32) return;
    uint16_t rounded[Panels::STEP];
    count = ceil_div(count, PER) * PER;
    store_row(scores, count, rounded, a_.q_dtype, 0);
    if (PER > 1) {
      memcpy(scores, rounded, static_cast<size_t>(count) * sizeof(uint16_t));
    } else {
      to_float(rounded, a_.q_dtype, 0, count, scores);
    }
  }

  // Row r of a head of the keys: position r / repeats_, head r % repeats_ of the queries that share it.
  const char* query(const Attention& a, int64_t head, int64_t r) const {
    const int64_t at = head / a_.H_kv * a.q_batch + (head % a_.H_kv * repeats_ + r % repeats_) * a.q_head +
                       r / repeats_ * a.q_position;
    return static_cast<const char*>(a.q) + at * element_size(a_.q_dtype);
  }

  // A row as it meets keys.
  void load_query(const Attention& a, int64_t head, int64_t r, float* values) const {
    const char* from = query(a, head, r);
    if (PER > 1) {  // scores are scaled
      memcpy(values, from, static_cast<size_t>(a.D) * sizeof(uint16_t));
      return;
    }
    transform_query(a, from, head, values);
    for (int64_t d = 0; d < a.D; ++d) values[d] *= a_.scale;
  }

  void transform_query(const Attention& a, const char* from, int64_t head, float* values) const {
    to_float(from, a_.q_dtype, 0, a.D, values);
    if (!a.rotates && a.frame == nullptr) return;
    if (a.frame != nullptr) {
      const float* spread = a.frame + (2 * head + 1) * a.D;
      for (int64_t d = 0; d < a.D; ++d) values[d] *= spread[d];
    }
    if (a.rotates) rotate(values, a.D);
    if (a_.q_dtype == F32) return;
    uint16_t rounded[kMaxHeadDim];
    store_row(values, a.D, rounded, a_.q_dtype, 0);
    to_float(rounded, a_.q_dtype, 0, a.D, values);
  }

  // The score of what the keys lack in their frame, which all tokens have.
  float lacking_score(const char* from, int64_t head) const {
    if (a_.frame == nullptr) return 0.0f;
    float values[kMaxHeadDim];
    to_float(from, a_.q_dtype, 0, a_.D, values);
    return dot(values, a_.frame + 2 * head * a_.D) * a_.scale;
  }

  int64_t start_of(int64_t b) const { return a_.starts == nullptr ? 0 : a_.starts[b]; }

  // Tokens begin..end that a position sees.
  int64_t first_seen(int64_t position) const {
    return a_.window == 0 ? 0 : max64(0, a_.T - a_.S + position + 1 - a_.window);
  }
  int64_t end_seen(int64_t position) const { return a_.causal ? max64(0, a_.T - a_.S + position + 1) : a_.T; }

  void attend(int64_t head, int64_t first, int64_t rows, int64_t begin, int64_t end, const Partial& seen,
              float* scratch) const {
    const int64_t b = head / a_.H_kv, h = head % a_.H_kv;
    const int64_t tokens = step(rows);
    float *queries = scratch, *more = queries + rows * a_.D, *scores = more + rows * more_channels();
    float *panel = scores + rows * tokens, *of_panel = panel + kTokens * panel_channels();
    float* lacking_scores = of_panel + (Panels::STEP == kTokens ? 0 : rows * kTokens);
    for (int64_t r = 0; r < rows; ++r) {
      if (a_.softcap > 0.0f) lacking_scores[r] = lacking_score(query(a_, head, first + r), head);
      load_query(a_, head, first + r, queries + r * a_.D);
      if (a_.more != nullptr) load_query(*a_.more, head, first + r, more + r * more_channels());
      seen.top[r] = -INFINITY;
      seen.weight[r] = 0.0f;
    }
    memset(seen.out, 0, static_cast<size_t>(rows * a_.D) * sizeof(float));
    const int64_t start = a_.first == nullptr ? -1 : start_of(b) - a_.past;
    if (tokens != kFewTokens) memset(panel, 0, static_cast<size_t>(kTokens * panel_channels()) * sizeof(float));  // it counts
    begin = max64(begin, first_seen(first / repeats_) / kTokens * kTokens);
    end = min64(end, end_seen((first + rows - 1) / repeats_));
    if (a_.kept != nullptr) end = min64(end, a_.T - a_.kept->recents);
    for (int64_t t = begin; t < end; t += tokens) {
      const int64_t count = min64(tokens, end - t);
      if (tokens == kFewTokens) {
        Panels::scores(a_, b, h, t, count, queries, rows, scores);
      } else {
        score(b, h, t, count, queries, rows, tokens, panel, of_panel, scores);
      }
      const bool has_start = start >= t && start < t + count;
      if (has_start) {
        const float* lacking = a_.first + head * a_.D;
        for (int64_t r = 0; r < rows; ++r) scores[r * tokens + start - t] += dot(queries + r * a_.D, lacking);
      }
      bool any = false;
      const int64_t used = tokens == kFewTokens ? tokens : ceil_div(count, kTokens) * kTokens;
      for (int64_t r = 0; r < rows; ++r) {
        if (a_.softcap > 0.0f) cap_scores(count, a_.softcap, lacking_scores[r], scores + r * tokens);
        mask(b, h, first + r, t, count, used, scores + r * tokens);
        any |= soften(used, scores + r * tokens, seen.top[r], seen.weight[r], seen.out + r * a_.D);
        round_scores(count, scores + r * tokens);
      }
      if (!any) continue;
      if (has_start && a_.shares) add_first(a_.first + head * a_.D, rows, tokens, scores + start - t, seen.out);
      if (tokens == kFewTokens) {
        Panels::add(a_, b, h, t, count, scores, rows, seen.out);
      } else {
        for (int64_t at = 0; at < count; at += kTokens) {
          const int64_t part = min64(kTokens, count - at);
          Panels::values(a_, b, h, t + at, part, panel);
          multiply<Dot>(scores + at / PER, tokens, rows, panel, a_.D, ceil_div(part, PER), seen.out);
        }
      }
    }
  }

  // What the first value lacks, to the sums of all rows.
  void add_first(const float* lacking, int64_t rows, int64_t tokens, const float* weights, float* out) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < a_.D; ++d) out[r * a_.D + d] += weights[r * tokens] * lacking[d];
  }

  // Of D channels, which are a multiple of 16.
  float dot(const float* __restrict a, const float* __restrict b) const {
    float sums[16] = {}, sum = 0.0f;
    for (int64_t d = 0; d < a_.D; d += 16)
      for (int i = 0; i < 16; ++i) sums[i] += a[d + i] * b[d + i];
    for (int i = 0; i < 16; ++i) sum += sums[i];
    return sum;
  }

  // Scores of tokens t..t + count of one row, to which the mask is added; -inf for what the row does not see.
  void mask(int64_t b, int64_t h, int64_t r, int64_t t, int64_t count, int64_t tokens,
            float* __restrict scores) const {
    const int64_t position = r / repeats_;
    add_mask(b, h, r, t, count, scores);
    const int64_t from = first_seen(position) - t, to = min64(count, end_seen(position) - t);
    for (int64_t i = 0; i < min64(from, tokens); ++i) scores[i] = -INFINITY;
    for (int64_t i = max64(to, 0); i < tokens; ++i) scores[i] = -INFINITY;
    if (a_.kept == nullptr) return;
    const int64_t sink = start_of(b) - a_.past - t;
    for (int64_t i = max64(sink, 0); i < min64(sink + a_.kept->sinks, count); ++i) scores[i] = -INFINITY;
  }

  void add_mask(int64_t b, int64_t h, int64_t r, int64_t t, int64_t count, float* __restrict scores) const {
    if (a_.mask == nullptr) return;
    const int64_t head = h * repeats_ + r % repeats_;
    const int64_t at = b * a_.mask_batch + head * a_.mask_head + r / repeats_ * a_.mask_position + t;
    if (a_.mask_dtype == F32) {
      for (int64_t i = 0; i < count; ++i) scores[i] += load<float>(a_.mask, at + i);
    } else {
      for (int64_t i = 0; i < count; ++i) scores[i] = load<uint8_t>(a_.mask, at + i) != 0 ? scores[i] : -INFINITY;
    }
  }

  // Scores of so many tokens -> exp(score - top), of the new top; whether there is one above -inf.
  bool soften(int64_t tokens, float* __restrict scores, float& top, float& weight, float* __restrict out) const {
    Lanes tops = Lanes{} - INFINITY;
    auto nans = tops != tops;
    for (int64_t t = 0; t < tokens; t += kLanes) {
      const Lanes some = *reinterpret_cast<const Lanes*>(scores + t);
      tops = some > tops ? some : tops;
      nans |= some != some;
    }
    float largest = top;
    bool any_nan = false;
    for (int i = 0; i < kLanes; ++i) {
      largest = tops[i] > largest ? tops[i] : largest;
      any_nan |= nans[i] != 0;
    }
    if (largest == -INFINITY && !any_nan) {
      memset(scores, 0, static_cast<size_t>(tokens) * sizeof(float));
      return false;
    }
    if (largest > top) {
      const float shrink = top == -INFINITY ? 0.0f : exp_of_negative(top - largest);
      for (int64_t d = 0; d < a_.D; ++d) out[d] *= shrink;
      weight *= shrink;
      top = largest;
    }
    float sums[16] = {};
    for (int64_t t = 0; t < tokens; t += 16) {
      for (int i = 0; i < 16; ++i) {
        scores[t + i] = exp_of_negative(scores[t + i] - largest);
        sums[i] += scores[t + i];
      }
    }
    for (int i = 0; i < 16; ++i) weight += sums[i];
    return true;
  }

  // The sum of all weights, of which those of the tokens are 1 and have the log-sum-exp `lse`, with that of head h's sink.
  float beside_sink(int64_t head, int64_t r, int64_t h, float lse) const {
    if (a_.sinks == nullptr) return 1.0f;
    const float all = a_.softcap > 0.0f ? lse : lse + lacking_score(query(a_, head, r), head);
    return 1.0f + std::exp(load_as_float(a_.sinks, a_.sinks_dtype, h) - all);
  }

  // Row r of a head: `out`, with the log-sum-exp `top`, becomes that over the kept tokens, too, whose log-sum-exp is returned.
  float add_kept(int64_t head, int64_t r, float top, float* __restrict out) const {
    const Kept& kept = *a_.kept;
    const int64_t b = head / a_.H_kv, D = a_.D, slots = head * (kept.sinks + kept.recents + 1);
    float q[kMaxHeadDim], x[kMaxHeadDim];
    to_float(query(a_, head, r), a_.q_dtype, 0, D, q);
    const float lacking = a_.softcap > 0.0f ? 0.0f : lacking_score(query(a_, head, r), head);
    float weight = top == -INFINITY ? 0.0f : 1.0f;
    const auto add = [&](int64_t position, int64_t slot) {
      to_float(kept.k, a_.q_dtype, (slots + slot) * D, D, x);
      float score = dot(q, x) * a_.scale - lacking;
      if (a_.softcap > 0.0f) cap_scores(1, a_.softcap, 0.0f, &score);
      add_mask(b, head % a_.H_kv, r, position - a_.past, 1, &score);
      if (score == -INFINITY) return;
      if (score > top) {
        const float shrink = weight == 0.0f ? 0.0f : exp_of_negative(top - score);
        for (int64_t d = 0; d < D; ++d) out[d] *= shrink;
        weight *= shrink;
        top = score;
      }
      const float part = exp_of_negative(score - top);
      to_float(kept.v, a_.q_dtype, (slots + slot) * D, D, x);
      for (int64_t d = 0; d < D; ++d) out[d] += part * x[d];
      weight += part;
    };
    const int64_t end = a_.past + a_.T, seen = a_.past + first_seen(0), behind = start_of(b) + kept.sinks;
    for (int64_t p = max64(start_of(b), seen); p < min64(behind, end); ++p) add(p, p - start_of(b));
    for (int64_t p = max64(max64(behind, seen), end - kept.recents); p < end; ++p) add(p, kept.sinks + p % kept.recents);
    if (weight == 0.0f) return -INFINITY;
    for (int64_t d = 0; d < D; ++d) out[d] /= weight;
    return top + std::log(weight);
  }

  void merge(const Partial& total, const Partial& more) const {
    for (int64_t r = 0; r < rows_; ++r) {
      const float top = more.top[r] > total.top[r] ? more.top[r] : total.top[r];
      if (top == -INFINITY) continue;
      const float old = exp_of_negative(total.top[r] - top), fresh = exp_of_negative(more.top[r] - top);
      float *out = total.out + r * a_.D, *from = more.out + r * a_.D;
      for (int64_t d = 0; d < a_.D; ++d) out[d] = out[d] * old + from[d] * fresh;
      total.weight[r] = total.weight[r] * old + more.weight[r] * fresh;
      total.top[r] = top;
    }
  }

  void store(int64_t head, int64_t first, int64_t rows, const Partial& seen) const {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t b = head / a_.H_kv, h = head % a_.H_kv * repeats_ + (first + r) % repeats_;
      const int64_t position = (first + r) / repeats_;
      float* out = seen.out + r * a_.D;
      float lse = seen.top[r] + std::log(seen.weight[r]);
      float inverse = seen.weight[r] == 0.0f ? 0.0f : 1.0f / seen.weight[r];
      if (a_.kept == nullptr) inverse /= beside_sink(head, first + r, h, lse);
      for (int64_t d = 0; d < a_.D; ++d) out[d] *= inverse;
      if (a_.rotates_values) rotate(out, a_.D);
      if (a_.kept != nullptr) {
        lse = add_kept(head, first + r, lse, out);
        const float all = beside_sink(head, first + r, h, lse);
        for (int64_t d = 0; d < a_.D; ++d) out[d] /= all;
      }
      if (a_.shares && a_.frame != nullptr && seen.weight[r] != 0.0f) {
        const float *mean = a_.frame + 2 * head * a_.D, *spread = mean + a_.D;
        for (int64_t d = 0; d < a_.D; ++d) out[d] = out[d] * spread[d] + mean[d];
      }
      store_row(out, a_.D, a_.y, a_.q_dtype, b * a_.y_batch + h * a_.y_head + position * a_.y_position);
      a_.lse[(b * a_.H + h) * a_.S + position] = lse;
    }
  }

  const Attention& a_;
  const int64_t repeats_, rows_;
  int64_t blocks_, block_rows_ = kQueryRows, split_, splits_;
};

static bool attention(const Attention& a) {
  return a.layout == VALUES ? AttentionTasks<ValuePanels>(a).run() : AttentionTasks<TokenPanels>(a).run();
}

}  // namespace HFQ_SET
}  // namespace hfq
