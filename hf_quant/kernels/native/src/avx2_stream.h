// Few rows of x: each row of codes streams once through registers and meets up to four rows of x.
#pragma once

#include "avx2_math.h"

namespace hfq {
namespace avx2 {

// Rows of x ready to multiply. Rows are 64 bytes longer than they need be: at a power of two apart they would meet in
// the same set of the cache. For products of integers, also sums of x, of the halves of each run and of each group.
struct PackedX {
  char* rows;
  int64_t stride;  // bytes
  int32_t* half_sums;   // [rows, runs, 2]
  int32_t* group_sums;  // [rows, groups]
  float* scales;        // [rows]
};

// Units whose halves are each of one group: `length` of them at a time (the last run may be shorter). Aligned: of one
// group both, that of the run's number.
struct Runs {
  bool aligned;
  int64_t count, length;
  const int32_t* groups;  // [count, 2]
};

// One row of an expert's weight with rows of x.
template <class C>
struct Stream {
  using L = typename C::Loader;
  const Product& p;
  const C& c;
  const Runs& runs;
  const PackedX& x;
  const uint8_t* row;
  const float* scales;  // of the row, as fp32
  const uint8_t* zeros;

  // Adds to out[i] the dot product of units u..end with row `first` + i of x, scaled. Of integers in one group `out` is
  // the sum, not scaled, in the bits of the float. The units are whole runs, but at the end of the row, or parts of one.
  template <int MB, bool ALIGNED>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    constexpr int CHAINS = MB == 1 ? C::V : C::V > 1 ? 2 : 1;  // so that the latency of sums is hidden
    const int64_t full = min64(p.row_bytes / L::BYTES, end);
    const uint8_t* from = row + u * L::BYTES;
    const char* from_x = x.rows + first * x.stride + u * (C::V * 32);
    const int32_t* half_sums = C::INTEGER ? x.half_sums + first * runs.count * 2 : nullptr;
    typename C::Table table = c.table(0);
    typename C::Part part[MB][CHAINS];
    typename C::Sum sums[MB];
    __m256 y[MB];
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) y[i] = _mm256_setzero_ps();

    auto add_unit = [&](const uint8_t* codes) HFQ_LAMBDA {
      typename C::Value value[C::V];
      if (MB > 1) _mm_prefetch(reinterpret_cast<const char*>(codes + 2 * p.row_bytes), _MM_HINT_T0);
      c.values(L::load(codes), table, value);
#pragma GCC unroll 4
      for (int j = 0; j < C::V; ++j)
#pragma GCC unroll 4
        for (int i = 0; i < MB; ++i)
          part[i][j % CHAINS] =
              C::dot(part[i][j % CHAINS], load_vector(from_x + i * x.stride + j * 32), value[j]);
      from_x += C::V * 32;
    };
    auto clear = [&]() HFQ_LAMBDA {
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < CHAINS; ++j) part[i][j] = C::zero();
    };
    auto flush = [&]() HFQ_LAMBDA {
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) {
#pragma GCC unroll 4
        for (int j = 1; j < CHAINS; ++j) part[i][0] = C::join(part[i][0], part[i][j]);
        sums[i] = C::add(sums[i], part[i][0]);
      }
    };

    for (int64_t r = p.groups == 1 ? 0 : u / runs.length; u < end; ++r) {
      const int64_t g0 = ALIGNED ? r : runs.groups[2 * r];
      const int64_t g1 = ALIGNED ? r : runs.groups[2 * r + 1];
      if (zeros != nullptr) table = ALIGNED ? c.table(zeros[g0]) : c.table(zeros[g0], zeros[g1]);
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) {
        sums[i] = typename C::Sum{};
        if constexpr (C::INTEGER) {
          if (C::OFFSET == 0 || (p.groups == 1 && u > 0)) continue;
          const int z0 = zeros == nullptr ? C::OFFSET : zeros[g0], z1 = zeros == nullptr ? C::OFFSET : zeros[g1];
          const int32_t* sum = half_sums + (i * runs.count + r) * 2;
          sums[i] = ALIGNED ? _mm256_zextsi128_si256(_mm_cvtsi32_si128(-z0 * (sum[0] + sum[1])))
                            : _mm256_setr_epi32(-z0 * sum[0], 0, 0, 0, -z1 * sum[1], 0, 0, 0);
        }
      }
      const int64_t stop = min64(u + runs.length, end), whole = min64(stop, full);
      clear();
      while (u < whole) {
        const int64_t next = C::MOST == INT64_MAX ? whole : min64(whole, u + C::MOST);
        for (; u < next; ++u, from += L::BYTES) add_unit(from);
        if (C::MOST != INT64_MAX && u < whole) {
          flush();
          clear();
        }
      }
      if (u < stop) {  // the last unit, of which only a part is there
        if (C::MOST != INT64_MAX && u > 0) {
          flush();
          clear();
        }
        alignas(32) uint8_t tail[32] = {};
        memcpy(tail, from, static_cast<size_t>(p.row_bytes - u * L::BYTES));
        add_unit(tail);
        ++u;
      }
      flush();
      __m256 scale = _mm256_set1_ps(scales[g0]);
      if (!ALIGNED) scale = _mm256_blend_ps(scale, _mm256_set1_ps(scales[g1]), 0xF0);
#pragma GCC unroll 4
      for (int i = 0; i < MB; ++i) y[i] = _mm256_fmadd_ps(C::to_float(sums[i]), scale, y[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < MB; ++i) {
      if constexpr (C::INTEGER) {
        if (p.groups == 1) {
          out[i] = bits_to_float(float_to_bits(out[i]) + static_cast<uint32_t>(reduce(sums[i])));
          continue;
        }
      }
      out[i] += reduce(y[i]);
    }
  }

  // With `count` rows of x, up to four.
  void run(int64_t first, int64_t count, int64_t u, int64_t end, float* out) const {
    switch (count) {
      case 1: return run<1>(first, u, end, out);
      case 2: return run<2>(first, u, end, out);
      case 3: return run<3>(first, u, end, out);
      default: return run<4>(first, u, end, out);
    }
  }

  template <int MB>
  void run(int64_t first, int64_t u, int64_t end, float* out) const {
    return runs.aligned ? run<MB, true>(first, u, end, out) : run<MB, false>(first, u, end, out);
  }
};

}  // namespace avx2
}  // namespace hfq
