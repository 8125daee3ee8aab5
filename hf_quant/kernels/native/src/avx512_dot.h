// Few rows of x: each row of codes streams once through registers and meets up to four rows of x.
//
// Bound by memory: a block of 128 4-bit codes costs 1 load, 3 shifts, 4 look-ups, 4 dot products and 1 scaling, some 5
// cycles for 64 bytes, where memory takes 7 (Zen 5, one core).
#pragma once

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "avx512_pack.h"

namespace hfq {
namespace HFQ_AVX512 {

// One expert's weight, and what was derived from it for the whole call.
struct Weight {
  const uint8_t* qdata;
  const void* scale;
  const uint8_t* zero;
  float global_scale;
  const void* bias;
  int64_t bias_first, expert;
};

constexpr int64_t kAhead = 8192;   // bytes that are prefetched, into the L2 cache: into L1, half of the speed is lost
constexpr int64_t kRowsAhead = 8;  // rows of the weight whose scales are prefetched

// R rows of the weight, `gap` bytes apart, with MB rows of x. Codes are prefetched: the CPU's own prefetcher follows them
// on Zen 4 (12.6 cycles a block of int4 with K = 4096, 15.1 by hand), but not on Zen 5 (26 cycles, 11 by hand), and nowhere
// with long rows of x or small groups. One row of x meets two short neighbours, which share its loads; with several rows
// of x, which then come from the L2 cache, a pair of rows far apart halves that traffic.
// Rows of x are told by a stride: with a register for each GCC 12 runs out of them and keeps vectors in memory.
template <class C, int R, int MB, Grouping GROUPING>
struct DotRows {
  using D = typename C::Decoder;
  using Sum = typename C::Sum;
  using Table = typename C::Table;
  static constexpr int V = vecs<C>();
  // Independent sums, so that the latency of the dot products (4 to 6 cycles) is hidden.
  static constexpr int CHAINS =
      V == 1 || GROUPING >= WITHIN_BLOCK || (R * MB >= 4 && MB > 1) ? 1 : R * MB >= 2 || V == 2 ? 2 : 4;
  static constexpr bool HAS_ZEROS = GROUPING == WITHIN_BLOCK_ZEROS;
  using Sums = Sum[R][MB][CHAINS];

  const Product& p;
  const D& decoder;
  const LaneGroups& lanes;
  const uint8_t* w;
  int64_t gap, ahead;  // ahead: bytes at which codes are prefetched
  const char* x;
  int64_t stride;
  const float* scales;  // those of row r start r * room floats on
  int64_t room;
  const uint8_t* zeros;  // those of row r start r * zero_gap on; null if there are none
  int64_t zero_gap;
  const int32_t* lane_sums;
  int64_t sum_stride;

  HFQ_METHOD void block(Masks m, const Table (&table)[R], const __m512i (&lane_zeros)[R], Sums& sums) {
    __m512i value[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint8_t* from = w + r * gap;
      _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T1);
      __m512i part[D::PARTS];
      decoder.load(from, m, part);
      if constexpr (GROUPING == WITHIN_BLOCK_ZEROS && C::LANE_ZEROS) {
        C::levels_lanes(decoder, part, lane_zeros[r], value[r]);
      } else {
        C::levels(decoder, part, table[r], value[r]);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
#pragma GCC unroll 8
      for (int i = 0; i < MB; ++i) {
        const __m512i values = _mm512_loadu_si512(x + i * stride + j * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][i][j % CHAINS] = C::dot(sums[r][i][j % CHAINS], values, value[r][j]);
      }
    }
    w += D::BYTES;
    x += V * 64;
  }

  // Zero points and sums at the start of group g, or of the block whose first group it is.
  HFQ_METHOD void begin(int64_t unit, int64_t g, const __m512i& relative, Table (&table)[R], __m512i (&lane_zeros)[R],
                        Sums& sums) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint8_t* zero = zeros + r * zero_gap + g;
      if constexpr (GROUPING == ONE_GROUP || GROUPING == WHOLE_BLOCKS) {
        table[r] = C::table(decoder, zeros == nullptr ? 0 : *zero);
        if (C::INTEGER && zeros != nullptr) lane_zeros[r] = _mm512_set1_epi32(*zero);
      } else {
        table[r] = C::table(decoder, 0);
        if (HAS_ZEROS) lane_zeros[r] = _mm512_permutexvar_epi32(relative, load_zeros(zero, 0, p.groups - g));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < MB; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < CHAINS; ++c) sums[r][i][c] = C::zero();
        if constexpr (C::INTEGER) {
          sums[r][i][0] = _mm512_loadu_si512(lane_sums + i * sum_stride + unit * 16);
          if (GROUPING >= WITHIN_BLOCK ? HAS_ZEROS : zeros != nullptr)
            sums[r][i][0] = _mm512_mullo_epi32(sums[r][i][0], lane_zeros[r]);
        }
      }
  }

  HFQ_INLINE Sum total(const Sum (&sums)[CHAINS]) {
    Sum sum = sums[0];
#pragma GCC unroll 8
    for (int c = 1; c < CHAINS; ++c) sum = C::add(sum, sums[c]);
    return sum;
  }

  HFQ_INLINE void fold(const Sums& sums, const __m512 (&scale)[R], __m512 (&y)[R][MB]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < MB; ++i) y[r][i] = _mm512_fmadd_ps(C::to_float(total(sums[r][i])), scale[r], y[r][i]);
  }

  // The next block, of up to 8 groups of 16 codes.
  HFQ_METHOD void groups_of_block(Masks m, const int32_t*& lane, const int32_t*& first, __m512 (&y)[R][MB]) {
    const __m512i relative = _mm512_loadu_si512(lane);
    const int64_t g = *first;
    Sums sums;
    Table table[R];
    __m512i lane_zeros[R];
    __m512 scale[R];
    begin(0, g, relative, table, lane_zeros, sums);
    block(m, table, lane_zeros, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      scale[r] = _mm512_permutexvar_ps(relative, _mm512_castps256_ps512(_mm256_loadu_ps(scales + r * room + g)));
    fold(sums, scale, y);
    lane += 16;
    lane_sums += 16;
    ++first;
  }

  // out[r][i] = the dot product of row r with row i of x, scaled.
  HFQ_METHOD void run(float (&out)[R][MB]) {
    const Masks all = {~__mmask64{0}, ~__mmask64{0}};
    const int64_t blocks = ceil_div(p.K, D::BLOCK);
    int64_t full = min64(p.row_bytes / D::BYTES, blocks);
    const Masks tail = masks_of(p.row_bytes - full * D::BYTES);
    const bool has_tail = full < blocks;
    Sums sums;
    Table table[R];
    __m512i lane_zeros[R], relative = _mm512_setzero_si512();
    if (GROUPING == ONE_GROUP) {
      begin(0, 0, relative, table, lane_zeros, sums);
      for (; full > 0; --full) block(all, table, lane_zeros, sums);
      if (has_tail) block(tail, table, lane_zeros, sums);
      Sum totals[R * MB];  // of integers exact, as long as K <= 65536
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < MB; ++i) totals[r * MB + i] = total(sums[r][i]);
      float whole[R * MB];
      reduce_add(totals, whole);
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < MB; ++i) out[r][i] = scales[r * room] * whole[r * MB + i];
      return;
    }
    __m512 y[R][MB], scale[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < MB; ++i) y[r][i] = _mm512_setzero_ps();
    if (GROUPING == WHOLE_BLOCKS) {
      const int64_t per_group = p.group_size / D::BLOCK, last = p.groups - 1;
      for (int64_t g = 0; g < last; ++g) {
        begin(g, g, relative, table, lane_zeros, sums);
        int64_t left = per_group;
        do block(all, table, lane_zeros, sums);
        while (--left > 0);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) scale[r] = _mm512_set1_ps(scales[r * room + g]);
        fold(sums, scale, y);
      }
      begin(last, last, relative, table, lane_zeros, sums);
      for (full -= last * per_group; full > 0; --full) block(all, table, lane_zeros, sums);
      if (has_tail) block(tail, table, lane_zeros, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) scale[r] = _mm512_set1_ps(scales[r * room + last]);
      fold(sums, scale, y);
    } else {
      const int32_t *lane = lanes.relative, *first = lanes.first;
      for (; full > 0; --full) groups_of_block(all, lane, first, y);
      if (has_tail) groups_of_block(tail, lane, first, y);
    }
    __m512 totals[R * MB];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < MB; ++i) totals[r * MB + i] = y[r][i];
    float whole[R * MB];
    reduce_add(totals, whole);
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < MB; ++i) out[r][i] = whole[r * MB + i];
  }
};

// First of the scales (and zero points) of row n.
HFQ_INLINE int64_t scale_of_row(const Product& p, int64_t n) {
  return (p.scale_rows == 1 ? n : n / p.scale_rows) * p.scale_stride;  // a division takes up to 18 cycles
}

constexpr int kPanel = 64;  // rows of the weight that a task takes

// Scales of rows of a panel as fp32, each row's with a vector to spare behind it. Those of short rows, which lie side by side,
// are converted all at once; else those of up to four rows at a time.
class RowScales {
 public:
  static int64_t floats(const Product& p) {
    return is_at_once(p) ? kPanel * p.groups + kScalesAtOnce + 16 : 4 * room(p);
  }
  // `first`: of the expert, in elements. `memory`: `floats` of them.
  RowScales(const Product& p, int64_t first, int64_t n, int64_t end, float* memory)
      : p_(p), first_(first), at_once_(is_at_once(p)), n_(n), memory_(memory) {
    if (!at_once_) return;
    const int64_t at = first + n * p.groups, count = (end - n) * p.groups, element = element_size(p.scale_dtype);
    load_scales(p.scale, p.scale_dtype, at, count, memory);
    const char* ahead = static_cast<const char*>(p.scale) + (at + count) * element;  // of the next panel
    for (int64_t i = 0; i < count * element; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T1);
  }
  // Makes the scales of rows n, n + distance, .. ready.
  HFQ_METHOD void load(int64_t n, int rows, int64_t distance = 1) const {
    for (int r = 0; r < rows && !at_once_; ++r) load_row(n + r * distance, memory_ + r * room(p_));
  }
  HFQ_METHOD const float* of(int64_t n) const { return at_once_ ? memory_ + (n - n_) * p_.groups : memory_; }
  HFQ_METHOD int64_t gap(int64_t distance) const { return at_once_ ? distance * p_.groups : distance > 0 ? room(p_) : 0; }

 private:
  static bool is_at_once(const Product& p) {
    return p.groups <= kScalesAtOnce && p.scale_rows == 1 && p.scale_stride == p.groups;
  }
  HFQ_INLINE int64_t room(const Product& p) { return ceil_div(p.groups, kScalesAtOnce) * kScalesAtOnce + 16; }
  void load_row(int64_t n, float* to) const {
    const int64_t first = first_ + scale_of_row(p_, n), element = element_size(p_.scale_dtype);
    load_scales(p_.scale, p_.scale_dtype, first, p_.groups, to);
    // Those of a later row come in good time, too.
    const char* ahead = static_cast<const char*>(p_.scale) + (first + kRowsAhead * p_.scale_stride) * element;
    for (int64_t at = 0; at < p_.groups * element; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T0);
  }

  const Product& p_;
  const int64_t first_;
  const bool at_once_;
  const int64_t n_;
  float* const memory_;
};

// y of rows n..end of the weight with one row of x: `sums`, scaled by what is left, plus the bias and the rest.
HFQ_INLINE void store_column(const Product& p, const float* sums, float factor, int64_t bias_first, int64_t expert, int64_t n,
                             int64_t end, int64_t row) {
  float rest[kPanel];
  if (p.offsets != nullptr) {
    memset(rest, 0, sizeof rest);
    HFQ_SET::add_rest(p, expert, row, n, end - n, rest);
  }
  for (int64_t r = n; r < end; r += 16) {
    const __mmask16 mask = end - r >= 16 ? 0xffff : static_cast<__mmask16>((1u << (end - r)) - 1);
    __m512 added = p.bias == nullptr ? _mm512_setzero_ps() : load_scales(p.bias, p.bias_dtype, bias_first + r, end - r);
    if (p.offsets != nullptr) added = _mm512_add_ps(added, _mm512_loadu_ps(rest + r - n));
    const __m512 sum = _mm512_maskz_loadu_ps(mask, sums + r - n);
    store_y(p.y, p.y_dtype, row * p.N + r, mask, _mm512_fmadd_ps(sum, _mm512_set1_ps(factor), added));
  }
}

// What the rows of a panel share.
template <class C>
struct DotPanel {
  const Product& p;
  const typename C::Decoder& decoder;
  const Weight& weight;
  const PackedX& px;
  const LaneGroups& lanes;
  const RowScales& scales;
  int64_t first_x, first_y, count;
};

// Of a pair of rows, half a panel apart: what one is to prefetch is not what the other reads, but its place in the next
// panel. (1536 x 576 in int4 with 8 rows of x, from memory: 82 us by kAhead, 57 so, where they are 52 from the caches; Zen 5.)
static int64_t ahead_of_pair(int64_t gap) { return 2 * gap <= 16 * kAhead ? 2 * gap : kAhead; }

// Sums of rows n, n + distance, .. of the weight with MB rows of x from i0 on, scaled by the groups' scales.
template <class C, int R, int MB, Grouping GROUPING>
HFQ_INLINE void dot_rows(const DotPanel<C>& a, int64_t n, int64_t distance, int64_t i0, float (&out)[R][MB]) {
  const Product& p = a.p;
  const int64_t x = a.first_x + i0, first = scale_of_row(p, n);
  DotRows<C, R, MB, GROUPING> rows{p,
                                   a.decoder,
                                   a.lanes,
                                   a.weight.qdata + n * p.row_bytes,
                                   distance * p.row_bytes,
                                   distance > 1 ? ahead_of_pair(distance * p.row_bytes) : max64(R * p.row_bytes, kAhead),
                                   a.px.rows + x * a.px.stride,
                                   a.px.stride,
                                   a.scales.of(n),
                                   a.scales.gap(distance),
                                   a.weight.zero == nullptr ? nullptr : a.weight.zero + first,
                                   scale_of_row(p, n + distance) - first,
                                   C::INTEGER ? a.px.lane_sums + x * a.px.units * 16 : nullptr,
                                   a.px.units * 16};
  rows.run(out);
}

constexpr int kMaxDotRows = 12;  // rows of x, at most
using DotSums = float[kMaxDotRows][kPanel];

// Sums of rows n and n + distance of the weight, which go to columns `at` and at + distance, with all rows of x, two at least.
template <class C, int MB, Grouping GROUPING>
static void dot_pair_rows(const DotPanel<C>& a, int64_t n, int64_t distance, int64_t i0, DotSums& sums, int64_t at) {
  float out[2][MB];
  dot_rows<C, 2, MB, GROUPING>(a, n, distance, i0, out);
  for (int r = 0; r < 2; ++r)
    for (int i = 0; i < MB; ++i) sums[i0 + i][at + r * distance] = out[r][i];
}

template <class C, Grouping GROUPING>
static void dot_pair(const DotPanel<C>& a, int64_t n, int64_t distance, DotSums& sums, int64_t at) {
  a.scales.load(n, 2, distance);
  for (int64_t i = 0; i < a.count;) {
    const int64_t left = a.count - i, rows = left <= 4 ? left : left == 5 ? 3 : 4;  // never 4 + 1
    switch (rows) {
      case 2: dot_pair_rows<C, 2, GROUPING>(a, n, distance, i, sums, at); break;
      case 3: dot_pair_rows<C, 3, GROUPING>(a, n, distance, i, sums, at); break;
      default: dot_pair_rows<C, 4, GROUPING>(a, n, distance, i, sums, at);
    }
    i += rows;
  }
}

// R rows from n on with the only row of x.
template <class C, int R, Grouping GROUPING>
static void dot_few(const DotPanel<C>& a, int64_t n, float* to) {
  float out[R][1];
  a.scales.load(n, R);
  dot_rows<C, R, 1, GROUPING>(a, n, R > 1 ? 1 : 0, 0, out);
  for (int r = 0; r < R; ++r) to[r] = out[r][0];
}

// Whether x of so many bytes stays in the L1 cache while a row of the weight passes through it. If it does not, four rows
// share what is read of it: 4096 x 14336 in int4 takes half of the time (Zen 4). Without VBMI they always do (Cascade Lake).
static bool stays_in_l1(int64_t bytes) {
  static const int64_t size = [] {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    const long found = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    if (found > 0) return static_cast<int64_t>(found);
#endif
    return int64_t{32} << 10;
  }();
  return bytes <= size * 9 / 16;
}

// Rows n..end of the weight with `count` rows of x.
template <class C, Grouping GROUPING>
static void dot_panel(const DotPanel<C>& a, int64_t n, int64_t end) {
  DotSums sums;
  if (a.count == 1) {
    // Bytes need no work that rows could share: one stream of them is a third faster than two (Zen 5).
    const bool shares = vecs<C>() > 1 && a.p.scale_rows == 1;
    int64_t row = n;
    const bool is_short = 4 * a.p.row_bytes <= kAhead;  // 6 cycles a block of W4A8 instead of 9 (Zen 4)
    if (shares && (is_short || !HFQ_VBMI || !stays_in_l1(a.px.stride + a.px.units * 64))) {
      for (; row + 4 <= end; row += 4) dot_few<C, 4, GROUPING>(a, row, sums[0] + row - n);
    } else if (shares && 2 * a.p.row_bytes <= kAhead) {  // of longer rows, one would read what is prefetched for the other
      for (; row + 2 <= end; row += 2) dot_few<C, 2, GROUPING>(a, row, sums[0] + row - n);
    }
    for (; row < end; ++row) dot_few<C, 1, GROUPING>(a, row, sums[0] + row - n);
  } else {
    const int64_t distance = (end - n + 1) / 2;  // of an odd number the one in the middle is computed twice
    for (int64_t i = 0; i < distance; ++i) dot_pair<C, GROUPING>(a, n + i, min64(distance, end - 1 - n - i), sums, i);
  }
  for (int64_t i = 0; i < a.count; ++i) {
    float factor = a.weight.global_scale;
    if (a.px.row_scale != nullptr) factor *= a.px.row_scale[a.first_x + i];
    store_column(a.p, sums[i], factor, a.weight.bias_first, a.weight.expert, n, end, a.first_y + i);
  }
}

}  // namespace HFQ_AVX512
}  // namespace hfq
