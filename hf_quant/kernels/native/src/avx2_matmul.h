// The products of one instruction set with vectors of 256 bits: rows of x are packed, few of them meet codes as they
// stream through, many meet panels of codes.
#pragma once

#include <atomic>
#include <type_traits>

#include "avx2_pack.h"
#include "avx2_panel.h"

namespace hfq {
namespace HFQ_AVX2 {

constexpr int64_t kStreamRows = 4;     // of x, up to which streaming wins over panels
constexpr int64_t kStreamedX = 16384;  // bytes of x that stay in the L1 cache
constexpr int64_t kAloneX = 30720;     // of one row that fills it: in blocks, int8 at K = 8192 takes 3/4 of the time (Zen 4)

// Whether every expert's rows are few enough to stream its weight.
static bool has_few_rows(const Product& p) {
  if (p.ends == nullptr) return p.M <= kStreamRows;
  for (int64_t e = 0, start = 0; e < p.experts; start = max64(start, p.ends[e++]))
    if (p.ends[e] - start > kStreamRows) return false;
  return true;
}

template <class C>
class Matmul {
  using L = typename C::Loader;

 public:
  explicit Matmul(const Product& p) : p_(p), c_(p), units_(ceil_div(p.K, kUnit)) {
    runs_.aligned = p.groups == 1 || p.group_size % kUnit == 0;
    runs_.length = p.groups == 1 ? units_ : runs_.aligned ? p.group_size / kUnit : 1;
    runs_.count = ceil_div(units_, runs_.length);
    if constexpr (!C::FIXED)
      for (int half = 0; half < 2; ++half)
        for (int b = 0; b < 16; ++b) from_[C::place(half, b)] = static_cast<uint8_t>(16 * half + L::code(b));
    if constexpr (kIsInt4) in_vectors_ = has_few_rows(p) && Int4Pairs<false>::serves(p, runs_);
    if constexpr (kIsInt8) in_fours_ = FourOfInt8<C>::serves(p, runs_);
    if constexpr (kHasPlanes) {
      in_planes_ = L::BYTES <= 16 && has_few_rows(p) && Planes<C>::serves(p);
      in_vectors_ = has_few_rows(p) && (FixedPlanes<C, false>::serves(p) || FixedPlanes<C, true>::serves(p));
      if (in_planes_ || in_vectors_) plane_groups_ = Planes<C>::groups_of(p);
    }
  }

  bool run() {
    const int64_t chunk = min64(p_.M, kChunk);
    x_.stride = units_ * kUnit * C::X_BYTES + 64;
    // segments | packed rows | groups of runs | sums and steps | row scales
    const int64_t segment_bytes = ceil_div(chunk * static_cast<int64_t>(sizeof(Segment)), 64) * 64;
    const int64_t rows_bytes = chunk * x_.stride;
    const int64_t run_bytes = runs_.count * 8, halves = C::INTEGER && !C::FIXED ? chunk * runs_.count * 8 : 0;
    const int64_t groups_of_x = !C::INTEGER ? 0 : C::FIXED ? p_.K / Panel<C>::fixed_group(p_) : p_.groups;
    const int64_t sums = halves + chunk * groups_of_x * (C::FIXED ? 2 : 1);  // and steps
    char* memory = static_cast<char*>(
        thread_scratch(0, static_cast<size_t>(segment_bytes + rows_bytes + run_bytes + sums * 4 + chunk * 4)));
    if (memory == nullptr) return false;
    segments_ = reinterpret_cast<Segment*>(memory);
    x_.rows = memory + segment_bytes;
    int32_t* groups = reinterpret_cast<int32_t*>(x_.rows + rows_bytes);
    runs_.groups = groups;
    x_.half_sums = groups + 2 * runs_.count;
    x_.group_sums = x_.half_sums + halves;
    x_.most_rows = chunk;
    x_.steps = reinterpret_cast<float*>(x_.group_sums + chunk * groups_of_x);
    x_.scales = reinterpret_cast<float*>(x_.half_sums + sums);
    for (int64_t half = 0; half < 2 * runs_.count; ++half)
      groups[half] = static_cast<int32_t>(group_of(half / 2 * runs_.length * kUnit + half % 2 * kUnit / 2));
    for (int64_t first = 0; first < p_.M; first += kChunk) {
      const int64_t count = min64(kChunk, p_.M - first);
      if (!pack(first, count) || !multiply(first, count)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kChunk = 240;  // rows of x that are packed at once
  static constexpr int64_t kStreamed = 64;  // rows of the weight that a task streams
#ifdef HFQ_DOT_BYTES
  static constexpr bool kStreams = !C::INTEGER;  // and nothing else
#else
  static constexpr bool kStreams = false;
#endif
  static constexpr bool kIsInt4 = std::is_same<C, Int4ByInt8>::value, kIsInt8 = std::is_same<C, Int8ByInt8>::value;
  // At most 4 bits a code, or integers.
  static constexpr bool kHasPlanes = !C::INTEGER && (L::BYTES <= 16 || std::is_same<C, ByF32<Integers>>::value);
  static constexpr int64_t kMostPlanes = 4;

  int64_t group_of(int64_t k) const { return p_.groups == 1 ? 0 : min64(k / p_.group_size, p_.groups - 1); }

  bool pack(int64_t first, int64_t count) const {
    std::atomic<bool> ok{true};
    parallel_for(count, count * p_.K < (1 << 16) ? 1 : p_.threads, [&](int64_t i) {
      char* natural = static_cast<char*>(thread_scratch(1, static_cast<size_t>(units_ * kUnit * 8)));
      if (natural == nullptr) {
        ok = false;
        return;
      }
      const void* x = static_cast<const char*>(p_.x) + (first + i) * p_.x_stride * element_size(p_.x_dtype);
      int dtype = p_.x_dtype;
      if (p_.block != 0) {
        float* values = reinterpret_cast<float*>(natural + units_ * kUnit * 4);
        HFQ_SET::transform_row(x, dtype, p_.K, p_.diagonal, p_.block, values);
        x = values;
        dtype = F32;
      }
      x_.scales[i] = p_.row_scale == nullptr ? 1.0f : p_.row_scale[first + i];
      if constexpr (C::FIXED) {
        const int64_t size = Panel<C>::fixed_group(p_);
        float* values = reinterpret_cast<float*>(natural);
        load_floats(x, dtype, 0, p_.K, values);
        fixed_row<L>(values, p_.K / size, size, c_.x_bits(), p_.zero == nullptr ? -C::OFFSET : -1, c_.unit(),
                     x_.rows + i * x_.stride, x_.group_sums + i, x_.steps + i, x_.most_rows);
      } else if constexpr (C::INTEGER) {
        int8_t* codes = reinterpret_cast<int8_t*>(natural);
        if (dtype == INT8) {
          memcpy(codes, x, static_cast<size_t>(p_.K));
        } else {
          x_.scales[i] = quantize_row(x, dtype, p_.K, p_.input_scale, codes);
        }
        memset(codes + p_.K, 0, static_cast<size_t>(units_ * kUnit - p_.K));
        add_sums(codes, i);
        char* to = x_.rows + i * x_.stride;
        in_vectors_ ? Int4Pairs<false>::reorder(codes, units_, to) : reorder(codes, to);
      } else {
        float* values = reinterpret_cast<float*>(natural);
        memset(values + (units_ - 1) * kUnit, 0, kUnit * 4);
        load_floats(x, dtype, 0, p_.K, values);
        float* to = reinterpret_cast<float*>(x_.rows + i * x_.stride);
        if constexpr (kHasPlanes) {
          if (in_vectors_) {
            char* packed = reinterpret_cast<char*>(to);
            return p_.zero == nullptr ? FixedPlanes<C, false>::pack(p_, c_, values, packed)
                                      : FixedPlanes<C, true>::pack(p_, c_, values, packed);
          }
          if (in_planes_) return Planes<C>::reorder(values, units_, to);
        }
        reorder(values, to);
      }
    });
    return ok;
  }

  void reorder(const float* values, float* to) const {
    for (int64_t u = 0; u < units_; ++u, values += kUnit, to += kUnit)
      for (int j = 0; j < kUnit; ++j) to[j] = values[from_[j]];
  }

  // The same of bytes: those of packed x come from the same half, and those of 16 bits are sorted as the codes are.
  void reorder(const int8_t* codes, char* to) const {
    const __m256i from = _mm256_and_si256(load_vector(from_), _mm256_set1_epi8(15));
    for (int64_t u = 0; u < units_; ++u, codes += kUnit, to += kUnit * C::X_BYTES) {
      __m256i packed[C::X_BYTES];
      if constexpr (C::X_BYTES == 1) {
        packed[0] = _mm256_shuffle_epi8(load_vector(codes), from);
      } else {
        C::values(load_vector(codes), {}, packed);
      }
      memcpy(to, packed, sizeof packed);
    }
  }

  void add_sums(const int8_t* codes, int64_t i) const {
    int32_t *halves = x_.half_sums + i * runs_.count * 8, *groups = x_.group_sums + i;
    memset(halves, 0, static_cast<size_t>(runs_.count) * 32);
    for (int64_t g = 0; g < p_.groups; ++g) groups[g * x_.most_rows] = 0;
    const __m256i factor = _mm256_set1_epi16(static_cast<int16_t>(p_.zero == nullptr ? -C::OFFSET : -1));
    int64_t next_group = p_.groups == 1 ? p_.K : p_.group_size, last_groups = p_.groups - 1;
    for (int64_t u = 0, in_run = 0; u < units_; ++u) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), load_vector(codes + u * kUnit));
      const __m256i fours = _mm256_madd_epi16(pairs, factor);
      const __m256i twos = _mm256_hadd_epi32(fours, fours), ones = _mm256_hadd_epi32(twos, twos);
      const int32_t half[2] = {_mm256_cvtsi256_si32(ones), _mm256_extract_epi32(ones, 4)};
      for (int h = 0; h < 2; ++h) {
        if (u * kUnit + h * kUnit / 2 >= next_group && last_groups > 0) {
          groups += x_.most_rows;
          next_group += p_.group_size;
          --last_groups;
        }
        *groups += half[h];
      }
      if (kIsInt4 && in_vectors_) {
        halves[Int4Pairs<false>::place_of_sum(u, runs_.length)] += half[0] + half[1];
        continue;
      }
      if (C::OFFSET == 128) {
        // A large offset is made up for where it arises: an element of a sum stays as small as what it means.
        __m256i* own = reinterpret_cast<__m256i*>(halves);
        _mm256_storeu_si256(own, _mm256_add_epi32(_mm256_loadu_si256(own), fours));
      } else {
        halves[0] += half[0];
        halves[4] += half[1];
      }
      if (++in_run == runs_.length) {
        in_run = 0;
        halves += 8;
      }
    }
  }

  bool multiply(int64_t first, int64_t count) const {
    const int64_t num_segments = split_by_experts(p_, first, count, segments_);
    const int64_t rows = max64(kStreamed, Panel<C>::ROWS);
    int64_t panels = 0;
    for (const Product* p = &p_; p != nullptr; p = p->sibling) panels += ceil_div(p->N, rows);
    std::atomic<bool> ok{true};
    parallel_for(num_segments * panels, threads_of(p_, count, num_segments), [&](int64_t task) {
      const Segment& s = segments_[task / panels];
      const Product* p = &p_;
      int64_t n = task % panels * rows;
      for (; n >= ceil_div(p->N, rows) * rows; p = p->sibling) n -= ceil_div(p->N, rows) * rows;
      const int64_t end = min64(n + rows, p->N);
      if constexpr (!C::FIXED) {
        if (kStreams || s.count <= kStreamRows) {
          if (!stream(*p, s, first, n, end)) ok = false;
          return;
        }
      }
      if constexpr (!kStreams)
        if (!panel(*p, s, first, n, end)) ok = false;
    });
    return ok;
  }

  bool stream(const Product& p, const Segment& s, int64_t first, int64_t n, int64_t end) const {
    // Several rows of x, or a long one, meet the rows block by block, so that they stay in the L1 cache.
    PackedX x = x_;
    const bool in_blocks = s.count > 1 || (!C::INTEGER && x.stride > kAloneX);
    if (in_blocks) x.ahead = 2 * p.row_bytes;
    const int64_t fit = in_blocks ? kStreamedX / (s.count * C::V * 32) : units_;
    const int64_t whole = max64(p.groups == 1 ? 1 : runs_.length, kHasPlanes && (in_planes_ || in_vectors_) ? kMostPlanes : 1);
    const int64_t block = max64(fit / whole, 1) * whole;
    // The scales of all rows are converted at once where there is one block, or one row of x, else row by row.
    const bool at_once = (s.count == 1 || block >= units_) && p.scale_rows == 1 && p.scale_stride == p.groups;
    const int64_t num_scales = at_once ? (end - n) * p.groups : p.groups;
    float* memory = static_cast<float*>(thread_scratch(2, static_cast<size_t>(2 * num_scales + 16) * 4));
    if (memory == nullptr) return false;
    const Weight weight = weight_of(p, s.expert);
    float* floats = in_vectors_ && p.zero != nullptr ? memory + num_scales + 8 : nullptr;  // zero points
    if (at_once) {
      const int64_t first_scale = scale_of_row(p, weight, n);
      load_floats(p.scale, p.scale_dtype, first_scale, num_scales, memory);
      if (floats != nullptr) load_floats(p.zero + first_scale, num_scales, floats);
    }
    float out[kStreamed][kStreamRows] = {};
    int64_t begin = n;
    if ((in_vectors_ || in_fours_) && at_once && !in_blocks) {  // four rows of the weight share what is read of x
      x.ahead = max64(kAhead, 4 * p.row_bytes);
      for (; begin + 4 <= end; begin += 4) {
        const uint8_t* codes = weight.qdata + begin * p.row_bytes;
        const int64_t own = (begin - n) * p.groups;
        if constexpr (kIsInt8) {
          FourOfInt8<C>{p, runs_, x, codes, memory + own}.run(s.first, out[begin - n], kStreamRows);
        } else {
          auto run = [&](const auto& rows) { rows.template run<4, 1>(s.first, 0, units_, out[begin - n], kStreamRows); };
          in_vectors(p, x, codes, memory + own, floats == nullptr ? nullptr : floats + own, run);
        }
      }
    }
    for (int64_t u = 0; u < units_; u += block) {
      const int64_t g = group_of(u * kUnit), groups = group_of((u + block) * kUnit - 1) - g + 1;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first_scale = scale_of_row(p, weight, row);
        const int64_t own = at_once ? (row - n) * p.groups : 0;
        const float *scales = memory + own, *own_zeros = floats == nullptr ? nullptr : floats + own;
        if (!at_once) {
          load_floats(p.scale, p.scale_dtype, first_scale + g, groups, memory + g);
          if (floats != nullptr) load_floats(p.zero + first_scale + g, groups, floats + g);
          // The CPU does not foresee that scales are read block by block.
          const int64_t element = element_size(p.scale_dtype);
          const char* ahead = static_cast<const char*>(p.scale) + (first_scale + g + 8 * p.scale_stride) * element;
          for (int64_t at = 0; at < groups * element; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T0);
        }
        const uint8_t* zeros = p.zero == nullptr ? nullptr : p.zero + first_scale;
        const uint8_t* codes = weight.qdata + row * p.row_bytes;
        const int64_t until = min64(u + block, units_);
        auto run = [&](const auto& rows) { run_rows(rows, s.first, s.count, u, until, out[row - n]); };
        if (in_vectors_) {
          in_vectors(p, x, codes, scales, own_zeros, run);
          continue;
        }
        if constexpr (kHasPlanes) {
          if (in_planes_) {
            run(Planes<C>{p, c_, plane_groups_, x, codes, scales});
            continue;
          }
        }
        run(Stream<C>{p, c_, runs_, x, codes, scales, zeros});
      }
    }
    store(p, s, first, n, end, weight, out);
    return true;
  }

  // Calls `run` with rows of the weight whose codes come in whole vectors; `zeros`: nullptr without zero points.
  template <class Run>
  void in_vectors(const Product& p, const PackedX& x, const uint8_t* codes, const float* scales, const float* zeros,
                  const Run& run) const {
    if constexpr (kIsInt4) {
      zeros == nullptr ? run(Int4Pairs<false>{p, runs_, x, codes, scales, zeros})
                       : run(Int4Pairs<true>{p, runs_, x, codes, scales, zeros});
    } else if constexpr (kHasPlanes) {
      zeros == nullptr ? run(FixedPlanes<C, false>{p, c_, plane_groups_, x, codes, scales, zeros})
                       : run(FixedPlanes<C, true>{p, c_, plane_groups_, x, codes, scales, zeros});
    }
  }

  // Sums of rows n..end of the weight, scaled by what is left, to y.
  void store(const Product& p, const Segment& s, int64_t first, int64_t n, int64_t end, const Weight& weight,
             const float (*out)[kStreamRows]) const {
    const int64_t count = end - n;
    const bool sums = C::INTEGER && p.groups == 1;
    float added[kStreamed], scale[kStreamed], y[kStreamed];
    for (int64_t r = 0; r < count; ++r) added[r] = bias(p, s, n + r);
    for (int64_t r = 0; sums && r < count; ++r)
      scale[r] = load_as_float(p.scale, p.scale_dtype, scale_of_row(p, weight, n + r));
    for (int64_t i = 0; i < s.count; ++i) {
      const float factor = global(p, s) * x_.scales[s.first + i];
      if (sums) {  // exact, as long as K <= 65536
        for (int64_t r = 0; r < count; ++r)
          y[r] = static_cast<float>(static_cast<int32_t>(float_to_bits(out[r][i]))) * scale[r] * factor + added[r];
      } else {
        for (int64_t r = 0; r < count; ++r) y[r] = out[r][i] * factor + added[r];
      }
      if (p.offsets != nullptr) HFQ_SET::add_rest(p, s.expert, first + s.first + i, n, count, y);
      store_floats(p.y, p.y_dtype, (first + s.first + i) * p.N + n, count, y);
    }
  }

  bool panel(const Product& p, const Segment& s, int64_t first, int64_t n, int64_t end) const {
    char* memory = static_cast<char*>(thread_scratch(2, Panel<C>::scratch_bytes(s.count)));
    if (memory == nullptr) return false;
    const Weight weight = weight_of(p, s.expert);
    Panel<C> panel(p, c_, weight, x_);
    for (; n < end; n += Panel<C>::ROWS) {
      const float* y = panel.run(n, s.first, s.count, memory);
      const int64_t rows = min64(Panel<C>::ROWS, end - n);
      float of_bias[Panel<C>::ROWS] = {}, added[Panel<C>::ROWS] = {}, out[8];
      for (int64_t r = 0; r < rows; ++r) added[r] = of_bias[r] = bias(p, s, n + r);
      for (int64_t i = 0; i < s.count; ++i, y += Panel<C>::ROWS) {
        const __m256 factor = _mm256_set1_ps(global(p, s) * x_.scales[s.first + i]);
        const int64_t at = (first + s.first + i) * p.N + n;
        if (p.offsets != nullptr) {
          memcpy(added, of_bias, sizeof added);
          HFQ_SET::add_rest(p, s.expert, first + s.first + i, n, rows, added);
        }
        auto of_rows = [&](int64_t r) { return _mm256_fmadd_ps(_mm256_load_ps(y + r), factor, _mm256_loadu_ps(added + r)); };
        int64_t r = 0;
        for (; r + 16 <= rows; r += 16) store_floats(p.y, p.y_dtype, at + r, of_rows(r), of_rows(r + 8));
        for (; r < rows; r += 8) {
          _mm256_storeu_ps(out, of_rows(r));
          store_floats(p.y, p.y_dtype, at + r, min64(8, rows - r), out);
        }
      }
    }
    return true;
  }

  static Weight weight_of(const Product& p, int64_t expert) {
    return {p.qdata + expert * p.expert_qdata, expert * p.expert_scale};
  }
  static float global(const Product& p, const Segment& s) { return p.global_scale == nullptr ? 1.0f : p.global_scale[s.expert]; }
  static float bias(const Product& p, const Segment& s, int64_t n) {
    return p.bias == nullptr ? 0.0f : load_as_float(p.bias, p.bias_dtype, s.expert * p.expert_bias + n);
  }

  const Product& p_;
  const C c_;
  const int64_t units_;
  Runs runs_{};
  PackedX x_{};
  Segment* segments_ = nullptr;
  PlaneGroups plane_groups_;
  bool in_vectors_ = false, in_fours_ = false, in_planes_ = false;
  uint8_t from_[kUnit];  // where each element of a packed unit of x comes from
};

static bool matmul_by_int8(const Product& p) {
  switch (p.layout) {
    case PACKED2: return Matmul<Int2ByInt8>(p).run();
    case PACKED4: return Matmul<Int4ByInt8>(p).run();
    default: return Matmul<Int8ByInt8>(p).run();
  }
}

template <class C>
static bool multiply_by_fixed(const Product& p) {
  return Panel<C>::fixed_group(p) != 0 && Matmul<C>(p).run();
}

// Computes many rows of bf16 with codes that are integers, or levels of 4 bits; false if it cannot.
template <class L>
static bool multiply_in_fixed_point(const Product& p) {
  if (p.x_dtype != BF16 || has_few_rows(p)) return false;
  if (has_integers(p)) return multiply_by_fixed<ByFixed<L, L::BYTES == 16 ? 8 : L::BYTES == 32 ? 0 : L::BYTES == 8 ? 2 : 4>>(p);
  if constexpr (L::BYTES == 16) return p.zero == nullptr && multiply_by_fixed<LevelsByFixed>(p);
  return false;
}

}  // namespace HFQ_AVX2
}  // namespace hfq
