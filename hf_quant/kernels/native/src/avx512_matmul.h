// Products, rows of int8 codes and attention for AVX-512 with VNNI, with VBMI and GFNI (HFQ_VBMI is 1) or without (0).
#pragma once

#include <immintrin.h>

#include <atomic>

#include "portable.h"

#include "avx512_attention.h"
#include "avx512_fixed.h"
#include "avx512_tile.h"

namespace hfq {
namespace HFQ_AVX512 {

constexpr int64_t kChunk = 480;  // rows of x that are packed at once
constexpr int64_t kLeastFoldedRows = 48;  // of x, for each expert, from which on `folds` (4096 x 4096, Zen 4)
// Up to which number of rows of x streaming wins over panels (14336 x 4096, Zen 4).
template <class C>
constexpr int64_t max_dot_rows() {
  return C::INTEGER ? 8 : C::FIXED || C::FOLDS ? 0 : kMaxDotRows;
}

template <class C>
class Matmul {
  using D = typename C::Decoder;

 public:
  explicit Matmul(const Product& p) : p_(p), decoder_(p) {}

  bool run() {
    const int64_t blocks = ceil_div(p_.K, D::BLOCK);
    const int64_t stride = blocks * vecs<C>() * 64 + 64;
    const int64_t units = !C::INTEGER ? 0 : grouping() >= WITHIN_BLOCK ? blocks : p_.groups;
    x_.group_size = p_.group_size;
    x_.groups = p_.groups;
    if constexpr (C::FIXED) {
      x_.group_size = C::group_size(p_);
      x_.groups = ceil_div(p_.K, x_.group_size);
    }
    const int64_t groups = C::INTEGER || C::FIXED ? x_.groups : 0;  // of which something is kept, in 4 bytes
    const int64_t chunk = min64(p_.M, kChunk);
    // packed rows | sums of lanes | sums or steps of groups | row scales | lane groups | segments | orders
    x_.in_tiles = in_tiles(p_);
    const int64_t rows_bytes = (chunk + (x_.in_tiles ? 2 * kTile : 0)) * stride, lane_sums_bytes = chunk * units * 64;
    const int64_t sums_bytes = lane_sums_bytes + ceil_div(chunk * groups * 4, 64) * 64;
    const int64_t scale_bytes = ceil_div(chunk * 4, 64) * 64, lane_bytes = ceil_div(blocks * 68, 64) * 64;
    char* memory = static_cast<char*>(thread_scratch(
        0, static_cast<size_t>(rows_bytes + sums_bytes + scale_bytes + lane_bytes + chunk * (sizeof(Segment) + 1))));
    if (memory == nullptr) return false;
    x_.rows = memory;
    x_.stride = stride;
    x_.lane_sums = reinterpret_cast<int32_t*>(memory + rows_bytes);
    x_.group_sums = reinterpret_cast<int32_t*>(memory + rows_bytes + lane_sums_bytes);
    x_.steps = reinterpret_cast<float*>(memory + rows_bytes + lane_sums_bytes);
    x_.units = units;
    float* scales = reinterpret_cast<float*>(memory + rows_bytes + sums_bytes);
    const bool quantize = by_int8() && p_.x_dtype != INT8;
    x_.row_scale = quantize || p_.row_scale != nullptr ? scales : nullptr;
    int32_t* relative = reinterpret_cast<int32_t*>(memory + rows_bytes + sums_bytes + scale_bytes);
    int32_t* lane_first = relative + 16 * blocks;
    lanes_ = {relative, lane_first};
    segments_ = reinterpret_cast<Segment*>(memory + rows_bytes + sums_bytes + scale_bytes + lane_bytes);
    in_lanes_ = reinterpret_cast<bool*>(segments_ + chunk);
    if (grouping() >= WITHIN_BLOCK) {
      for (int64_t b = 0; b < blocks; ++b) {
        lane_first[b] = static_cast<int32_t>(b * D::BLOCK / p_.group_size);
        for (int lane = 0; lane < 16; ++lane)
          relative[16 * b + lane] =
              static_cast<int32_t>(min64((b * D::BLOCK + D::lane_code(lane)) / p_.group_size, p_.groups - 1)) -
              lane_first[b];
      }
    }
    for (int64_t first = 0; first < p_.M; first += kChunk) {
      const int64_t count = min64(kChunk, p_.M - first);
      num_segments_ = split_by_experts(p_, first, count, segments_);
      memset(in_lanes_, 0, static_cast<size_t>(count));
      for (const Segment* s = segments_; s < segments_ + num_segments_; ++s)
        memset(in_lanes_ + s->first, s->count > max_dot_rows<C>(), static_cast<size_t>(s->count));
      if (!pack(first, count, scales) || !multiply(first, count)) return false;
    }
    return true;
  }

 private:
  bool by_int8() const { return C::INTEGER || (C::FOLDS && p_.compute == BY_INT8); }

  Grouping grouping() const {
    if (p_.groups == 1) return ONE_GROUP;
    if (p_.group_size % D::BLOCK == 0) return WHOLE_BLOCKS;
    return (C::LANE_ZEROS || C::INTEGER) && p_.zero != nullptr ? WITHIN_BLOCK_ZEROS : WITHIN_BLOCK;
  }

  bool pack(int64_t first, int64_t count, float* scales) {
    const Order<C> order;
    const int64_t natural_bytes = ceil_div(p_.K, D::BLOCK) * D::BLOCK * C::X_BYTES + 64;
    const int64_t values_bytes = p_.block == 0 ? 0 : p_.K * 4, codes_bytes = C::FOLDS ? p_.K + 64 : 0;
    std::atomic<bool> ok{true};
    const int64_t element = element_size(p_.x_dtype);
    const int threads = count * p_.K < (1 << 16) ? 1 : p_.threads;
    parallel_for(count, threads, [&](int64_t i) {
      char* natural = static_cast<char*>(thread_scratch(1, static_cast<size_t>(natural_bytes + values_bytes + codes_bytes)));
      if (natural == nullptr) {
        ok = false;
        return;
      }
      const void* x = static_cast<const char*>(p_.x) + (first + i) * p_.x_stride * element;
      int dtype = p_.x_dtype;
      if (p_.block != 0) {
        float* values = reinterpret_cast<float*>(natural + natural_bytes);
        HFQ_SET::transform_row(x, dtype, p_.K, p_.diagonal, p_.block, values);
        x = values;
        dtype = F32;
      }
      float scale = 1.0f, amax = 0.0f;
      if (by_int8() && dtype != INT8) {
        amax = row_amax(x, dtype, p_.K);
        scale = scales[i] = int8_row_scale(amax, p_.input_scale);
      } else if (p_.row_scale != nullptr) {
        scales[i] = p_.row_scale[first + i];
      }
      if (C::FOLDS && by_int8() && dtype != INT8) {
        char* codes = natural + natural_bytes + values_bytes;
        int8_row(x, dtype, p_.K, p_.K, Divisor(scale, amax), codes);
        x = codes;
        dtype = INT8;
      }
      char* packed = const_cast<char*>(x_.rows) + i * x_.stride;
      if constexpr (C::FIXED) {
        const int64_t vectors = ceil_div(p_.K, D::BLOCK) * vecs<C>();
        float* steps = const_cast<float*>(x_.steps) + i * x_.groups;
        fixed_row(x, dtype, p_.K, vectors * 32, x_.group_size, decoder_.x_bits(), decoder_.unit(), natural, steps);
        return to_lanes<C>(order, natural, vectors, packed);
      }
      pack_row<C>(p_, order, in_lanes_[i], x, dtype, Divisor(scale, amax), natural, packed);
      if constexpr (C::INTEGER) {
        if (in_lanes_[i]) {
          sum_groups<C>(p_, packed, const_cast<int32_t*>(x_.group_sums) + i * p_.groups);
        } else {
          sum_lanes<C>(p_, grouping(), packed, const_cast<int32_t*>(x_.lane_sums) + i * x_.units * 16);
        }
      }
    });
    return ok;
  }

  bool multiply(int64_t first, int64_t count) {
    const int threads = threads_of(p_, count, num_segments_);
    const auto panels_of = [&](int64_t rows) {
      int64_t panels = 0;
      for (const Product* p = &p_; p != nullptr; p = p->sibling) panels += ceil_div(p->N, rows);
      return panels;
    };
    // Threads take whole panels: of few ones halves, which are shared more evenly.
    const bool halves = count <= max_dot_rows<C>() && threads > 1 && panels_of(kPanel) < 16 * threads;
    const int64_t rows = halves ? kPanel / 2 : kPanel, panels = panels_of(rows);
    std::atomic<bool> ok{true};
    parallel_for(num_segments_ * panels, threads, [&](int64_t task) {
      const Segment& segment = segments_[task / panels];
      const Product* p = &p_;
      int64_t n = task % panels * rows;
      for (; n >= ceil_div(p->N, rows) * rows; p = p->sibling) n -= ceil_div(p->N, rows) * rows;
      if (!multiply(*p, segment, first, n, min64(n + rows, p->N))) ok = false;
    });
    return ok;
  }

  // Rows n..end of a weight, of a panel at most.
  bool multiply(const Product& p, const Segment& segment, int64_t first, int64_t n, int64_t end) const {
    const Weight weight = weight_of(p, segment.expert);
    if constexpr (!C::FIXED && !C::FOLDS) {
      if (segment.count <= max_dot_rows<C>()) {
        float* memory = static_cast<float*>(thread_scratch(2, static_cast<size_t>(RowScales::floats(p)) * 4));
        if (memory == nullptr) return false;
        const RowScales scales(p, segment.expert * p.expert_scale, n, end, memory);
        dot(DotPanel<C>{p, decoder_, weight, x_, lanes_, scales, segment.first, first + segment.first, segment.count}, n, end);
        return true;
      }
    }
    if constexpr (C::LANE_ZEROS) {
      if (p.zero != nullptr) return tile<true>(p, weight, n, segment, first);
    }
    return tile<false>(p, weight, n, segment, first);
  }

  template <bool ZEROS>
  bool tile(const Product& p, const Weight& weight, int64_t n, const Segment& segment, int64_t first) const {
    using T = Tile<C, ZEROS>;
    char* memory = static_cast<char*>(thread_scratch(2, T::scratch_bytes(segment.count)));
    if (memory == nullptr) return false;
    T(p, decoder_, weight, x_)
        .run(n, n + kPanel, segment.first, first + segment.first, segment.count, memory);
    return true;
  }

  void dot(const DotPanel<C>& panel, int64_t n, int64_t end) const {
    switch (grouping()) {
      case ONE_GROUP: dot_panel<C, ONE_GROUP>(panel, n, end); break;
      case WHOLE_BLOCKS: dot_panel<C, WHOLE_BLOCKS>(panel, n, end); break;
      case WITHIN_BLOCK: dot_panel<C, WITHIN_BLOCK>(panel, n, end); break;
      default:
        if constexpr (C::LANE_ZEROS || C::INTEGER) dot_panel<C, WITHIN_BLOCK_ZEROS>(panel, n, end);
    }
  }

  static Weight weight_of(const Product& p, int64_t expert) {
    const int64_t scale = expert * p.expert_scale;
    return {p.qdata + expert * p.expert_qdata,
            static_cast<const char*>(p.scale) + scale * element_size(p.scale_dtype),
            p.zero == nullptr ? nullptr : p.zero + scale,
            p.global_scale == nullptr ? 1.0f : p.global_scale[expert],
            p.bias,
            expert * p.expert_bias,
            expert};
  }

  const Product& p_;
  const D decoder_;
  PackedX x_{};
  LaneGroups lanes_{};
  Segment* segments_ = nullptr;  // of the chunk
  int64_t num_segments_ = 0;
  bool* in_lanes_ = nullptr;  // of its rows: those that meet panels
};

#if HFQ_VBMI
static bool by_bf16(const Product& p) { return p.compute == BY_BF16 && (in_tiles(p) || maker_of_cpu() != INTEL); }

static bool matmul_by_bf16(const Product& p) {
  switch (p.layout) {
    case PACKED2: return Matmul<ByBf16<Packed2>>(p).run();
    case PACKED3: return Matmul<ByBf16<Packed3>>(p).run();
    case PACKED4: return Matmul<ByBf16<Packed4>>(p).run();
    case PACKED6: return Matmul<ByBf16<Packed6>>(p).run();
    case BYTES_FLOAT: return Matmul<ByBf16<BytesFloat>>(p).run();
    default: return Matmul<ByBf16<BytesInt>>(p).run();
  }
}
#endif

static bool matmul_in_blocks(const Product& p) {
  if (p.compute == BY_INT8) {
    switch (p.layout) {
      case PACKED2: return Matmul<ByInt8<Packed2Unsigned>>(p).run();
      case PACKED4: return Matmul<ByInt8<Packed4Unsigned>>(p).run();
      default: return Matmul<ByInt8<BytesUnsigned>>(p).run();
    }
  }
#if HFQ_VBMI
  if (by_bf16(p)) return matmul_by_bf16(p);
#endif
  switch (p.layout) {
    case PACKED2: return Matmul<ByF32<Packed2>>(p).run();
    case PACKED3: return Matmul<ByF32<Packed3>>(p).run();
    case PACKED4: return Matmul<ByF32Levels<Packed4Float>>(p).run();
    case PACKED6: return Matmul<ByF32<Packed6>>(p).run();
    case BYTES_FLOAT: return Matmul<ByF32<BytesFloat>>(p).run();
    default: return Matmul<ByF32Levels<BytesIntFloat>>(p).run();
  }
}

template <class D>
static bool by_fixed(const Product& p) {
  return ByFixed<D>::group_size(p) != 0 && Matmul<ByFixed<D>>(p).run();
}

// Panels of integers for many rows of x in fixed point; false if it is to be computed otherwise.
static bool matmul_in_fixed_point(const Product& p) {
  if (maker_of_cpu() != INTEL || p.M <= most_fixed_rows(p) || fixed_product(p) == nullptr) return false;
  switch (p.layout) {
    case PACKED2: return by_fixed<Words<Packed2>>(p);
    case PACKED3: return by_fixed<Words<Packed3>>(p);
    case PACKED4:
      if (has_integers(p)) return by_fixed<Words<Packed4>>(p);
      return Fixed4Halves::fits(p) ? by_fixed<Words<Packed4, 2>>(p) : by_fixed<LevelWords<Packed4>>(p);
    case PACKED6: return by_fixed<LevelWords<Packed6>>(p);
    default: return by_fixed<WordBytes>(p);
  }
}

#if HFQ_VBMI
template <class D>
static bool by_folded(const Product& p) {
  return Folded<D>::serves(p) && Matmul<Folded<D>>(p).run();
}

static bool matmul_folded(const Product& p) {
  switch (p.layout) {
    case PACKED2: return by_folded<Packed2>(p);
    case PACKED3: return by_folded<Packed3>(p);
    case PACKED4: return by_folded<Packed4>(p);
    default: return false;
  }
}

// Whether so many rows of x read a panel that it takes less time to multiply its levels by their scales before.
static bool folds(const Product& p) {
  return by_bf16(p) && p.M >= kLeastFoldedRows * (p.ends == nullptr ? 1 : p.experts);
}
#endif

static bool matmul(const Product& p) {
#if HFQ_VBMI
  if ((in_tiles(p) || folds(p)) && matmul_folded(p)) return true;
  if (in_tiles(p)) return matmul_in_blocks(p);
#endif
  if (matmul_in_fixed_point(p)) return true;
  const FixedProduct fixed = fixed_product(p);
  if (fixed == nullptr) return matmul_in_blocks(p);
  for (const Product* each = &p; each != nullptr; each = each->sibling) {
    Product alone = *each;
    alone.sibling = nullptr;
    if (!fixed(alone)) return false;
  }
  return true;
}

#if HFQ_VBMI
static bool matmul_by_tiles(const Product& p) {
  Product with = p;
  with.by_tiles = true;
  return matmul(with);
}
#endif

static bool quantize_rows(const RowQuantization& q) {
  if (q.block != 0 || q.key != nullptr) return HFQ_SET::quantize_rows(q);
  parallel_for(q.M, q.M * q.K < (1 << 16) ? 1 : q.threads, [&](int64_t i) {
    const char* x = static_cast<const char*>(q.x) + i * q.x_stride * element_size(q.x_dtype);
    int8_t* codes = q.codes + i * q.K;
    const float amax = row_amax(x, q.x_dtype, q.K), scale = q.scales[i] = int8_row_scale(amax, q.input_scale);
    int8_row(x, q.x_dtype, q.K, q.K, Divisor(scale, amax), reinterpret_cast<char*>(codes));
  });
  return true;
}

}  // namespace HFQ_AVX512
}  // namespace hfq
