// One step of AdamW, in plain C++, compiled once for every instruction set: what hf_quant.kernels.adam_step computes, bit
// for bit. Each operation is rounded by itself; a block of a row passes through buffers in the L1 cache.
#pragma once

#include <cmath>

#include "philox.h"
#include "quantize.h"

#define HFQ_ALWAYS static inline __attribute__((always_inline))
#define HFQ_ALWAYS_METHOD inline __attribute__((always_inline))

namespace hfq {
namespace HFQ_SET {

constexpr int64_t kAdamBlock = 256;  // values at once

// A small float, see `Codec` of hf_quant.kernels.adam_step. LOWEST: the smallest code of a block that is not zero.
enum AdamZero { NONE, SUBNORMAL, SHIFTED };
template <int BITS_, int MANTISSA_, int SMALLEST, int LARGEST, bool SIGNED_, AdamZero ZERO_>
struct AdamCodec {
  static constexpr int BITS = BITS_, MANTISSA = MANTISSA_, SHIFT = 23 - MANTISSA_;
  static constexpr bool SIGNED = SIGNED_;
  static constexpr AdamZero ZERO = ZERO_;
  static constexpr int32_t OFFSET = (SMALLEST + 127 - (ZERO_ == SUBNORMAL)) * (1 << MANTISSA_);
  static constexpr int32_t SIGN = SIGNED_ ? 1 << (BITS_ - 1) : 0;

  static float small() { return bits_to_float(static_cast<uint32_t>(SMALLEST + 127) << 23); }
  static float top() {
    const float power = bits_to_float(static_cast<uint32_t>(LARGEST + OFFSET) << SHIFT);
    return ZERO_ == SHIFTED ? power - small() : power;
  }
};

struct AdamFactors {
  float decay, beta1, rest1, beta2, rest2, step_size, correction, eps;
};

struct AdamBuffers {
  alignas(64) float p[kAdamBlock], g[kAdamBlock], m[kAdamBlock], v[kAdamBlock];
  alignas(64) uint16_t drawn[kAdamBlock + 8 + kDraws];
  const uint16_t* bits;  // within `drawn`
  alignas(64) uint8_t m_codes[kAdamBlock], v_codes[kAdamBlock];
};

// How a moment is stored: as floats, or as codes with a scale.
HFQ_ALWAYS float adam_value(float stored) { return stored; }
HFQ_ALWAYS float adam_value(uint16_t stored) { return bf16_to_float(stored); }
template <class C>
HFQ_ALWAYS float adam_value(uint8_t raw_code, float scale) {
  const int32_t raw = raw_code, magnitude = raw & ~C::SIGN;
  float value = of_bits((magnitude + C::OFFSET) << C::SHIFT);
  if (C::ZERO == SUBNORMAL) {
    const float twice = value * 2.0f, below = twice - C::small();
    value = magnitude < (1 << C::MANTISSA) ? below : value;
  }
  if (C::ZERO == SHIFTED) value = value - C::small();
  if (C::SIGNED) value = of_bits(bits_of(value) | (raw & C::SIGN) << (32 - C::BITS));
  return value * scale;
}

// Rounded to what is stored.
template <bool STOCHASTIC>
HFQ_ALWAYS void adam_round(float value, uint16_t, float& to) {
  to = value;
}
template <bool STOCHASTIC>
HFQ_ALWAYS void adam_round(float value, uint16_t bits, uint16_t& to) {
  const uint32_t raw = float_to_bits(value), added = STOCHASTIC ? bits : 0x7fffu + ((raw >> 16) & 1);
  to = static_cast<uint16_t>((raw & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (raw + added) >> 16);
}

// The scale of a block whose largest magnitude has the bits `top`, what its values are multiplied by, its lowest code.
struct AdamRange {
  float scale, inverse;
  int32_t lowest;
};
template <class C>
HFQ_ALWAYS AdamRange adam_range(int32_t top) {
  const float amax = of_bits(top), limit = C::top(), below = limit * bits_to_float(0x3f7ffff8u), found = amax / limit;
  if (found < bits_to_float((127u - 90u) << 23)) return {0.0f, 0.0f, 0};
  return {found, below / amax, C::ZERO == NONE ? 0 : 1};
}

// Codes of values; returns the scale.
template <class C, bool STOCHASTIC>
HFQ_ALWAYS float adam_encode(const float* __restrict values, const uint16_t* __restrict bits, int64_t n, int32_t top,
                             uint8_t* __restrict codes) {
  const AdamRange range = adam_range<C>(top);
  const float inverse = range.inverse, small = C::small();
  const int32_t lowest = range.lowest;
  for (int64_t i = 0; i < n; ++i) {
    float magnitude = (C::SIGNED ? of_bits(bits_of(values[i]) & 0x7fffffff) : values[i]) * inverse;
    const bool is_small = C::ZERO == SUBNORMAL && magnitude < small;
    if (C::ZERO == SHIFTED) magnitude = magnitude + small;
    if (C::ZERO == SUBNORMAL) {
      const float sum = magnitude + small;
      magnitude = is_small ? sum : magnitude;
    }
    int32_t raw = bits_of(magnitude);
    if (STOCHASTIC) {
      raw += static_cast<int32_t>(bits[i]) << (C::SHIFT - 16);
    } else {
      raw += ((1 << (C::SHIFT - 1)) - 1) + ((raw >> C::SHIFT) & 1);
    }
    int32_t code = (raw >> C::SHIFT) - C::OFFSET;
    if (C::ZERO == SUBNORMAL) code -= is_small ? 1 << C::MANTISSA : 0;
    if (!C::SIGNED) code = max32(code, lowest);
    if (C::SIGNED) code |= (values[i] < 0 ? C::SIGN : 0);
    codes[i] = static_cast<uint8_t>(code);
  }
  return range.scale;
}

}  // namespace HFQ_SET
}  // namespace hfq

#if HFQ_VECTOR_BYTES == 64
#include "avx512_adam.h"
#endif

namespace hfq {
namespace HFQ_SET {

// Two codes a byte, the first in the low bits; an odd last one has 0 beside it.
HFQ_ALWAYS void adam_unpack(const uint8_t* __restrict packed, int64_t n, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const uint16_t pair = static_cast<uint16_t>((packed[i] & 15) | (packed[i] >> 4) << 8);
    memcpy(codes + 2 * i, &pair, 2);
  }
}
HFQ_ALWAYS void adam_pack(const uint8_t* __restrict codes, int64_t n, uint8_t* __restrict packed) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const uint16_t pair = load<uint16_t>(codes, i);
    packed[i] = static_cast<uint8_t>(pair | pair >> 4);
  }
}

template <class M, class V, int BLOCK>
struct AdamCodes {
  using First = M;
  using Second = V;
  static constexpr int64_t SIZE = BLOCK;
  static constexpr bool FLOATS = false;
};
template <class T>
struct AdamFloats {
  using Stored = T;
  static constexpr int64_t SIZE = kAdamBlock;
  static constexpr bool FLOATS = true;
};

template <class S, bool STOCHASTIC>
class AdamStepper {
 public:
  explicit AdamStepper(const AdamStep& a) : a_(a), blocks_(ceil_div(a.K, S::SIZE)) {
    memcpy(&f_, a.factors, sizeof f_);
  }

  void run() const {
    const int64_t count = a_.N * blocks_, per_task = 64;
    parallel_for(ceil_div(count, per_task), a_.N * a_.K < (1 << 15) ? 1 : a_.threads, [&](int64_t task) {
      AdamBuffers buffers;
      for (int64_t i = task * per_task; i < min64(count, (task + 1) * per_task); ++i) {
        const int64_t row = i / blocks_, k = i % blocks_ * S::SIZE, left = a_.K - k;
        if (left >= S::SIZE) {
          step<true>(row, k, i, S::SIZE, buffers);
        } else {
          step<false>(row, k, i, left, buffers);
        }
      }
    });
  }

 private:
  template <bool FULL>
  HFQ_UNFUSED void step(int64_t row, int64_t k, int64_t block, int64_t left, AdamBuffers& b) const {
    const int64_t first = row * a_.K + k, count = FULL ? S::SIZE : left;
    b.bits = b.drawn;
    if (STOCHASTIC) {  // eight values share a counter, wherever this part of the parameter begins
      const int64_t column = a_.column + k, before = column % 8;
      draw_row(a_.key, static_cast<uint32_t>(a_.row + row), column - before, count + before, b.drawn);
      b.bits = b.drawn + before;
    }
    if (a_.param_dtype == BF16 && a_.grad_dtype == BF16) {
      const uint16_t* g = static_cast<const uint16_t*>(a_.grad) + first;
      return update(static_cast<uint16_t*>(a_.param) + first, g, row, k, block, count, b);
    }
    const float* g = static_cast<const float*>(a_.grad) + first;
    if (a_.grad_dtype != F32) {
      to_float(a_.grad, a_.grad_dtype, first, count, b.g);
      g = b.g;
    }
    if (a_.param_dtype == F32) return update(static_cast<float*>(a_.param) + first, g, row, k, block, count, b);
    update(static_cast<uint16_t*>(a_.param) + first, g, row, k, block, count, b);
  }

  template <class P, class G>
  HFQ_ALWAYS_METHOD void update(P* __restrict p, const G* __restrict g, int64_t row, int64_t k,
                                                    int64_t block, int64_t count, AdamBuffers& b) const {
    if constexpr (S::FLOATS) {
      using T = typename S::Stored;
      const int64_t first = row * a_.K + k;
      T* __restrict m = static_cast<T*>(a_.exp_avg) + first;
      T* __restrict v = static_cast<T*>(a_.exp_avg_sq) + first;
#if HFQ_VECTOR_BYTES == 64
      AdamFloats16<T, STOCHASTIC> states{m, v};
      adam_moments16<STOCHASTIC>(f_, count, b.bits, p, g, states);
#else
      moments(count, b.bits, p, g, [&](int64_t i) { return adam_value(m[i]); },
              [&](int64_t i) { return adam_value(v[i]); },
              [&](int64_t i, float first_moment, float second_moment) {
                const uint16_t drawn = STOCHASTIC ? b.bits[i] : uint16_t{0};
                adam_round<STOCHASTIC>(first_moment, drawn, m[i]);
                adam_round<STOCHASTIC>(second_moment, drawn, v[i]);
              });
#endif
    } else {
      using M = typename S::First;
      using V = typename S::Second;
      const uint8_t* __restrict m = load_codes(a_.exp_avg, row, k, count, b.m_codes);
      const uint8_t* __restrict v = load_codes(a_.exp_avg_sq, row, k, count, b.v_codes);
      const float m_scale = a_.exp_avg_scale[block], v_scale = a_.exp_avg_sq_scale[block];
#if HFQ_VECTOR_BYTES == 64
      const __m512i zero = _mm512_setzero_si512();
      AdamCodes16<M, V> states{m, v, _mm512_set1_ps(m_scale), _mm512_set1_ps(v_scale), b.m, b.v, zero, zero};
      adam_moments16<STOCHASTIC>(f_, count, b.bits, p, g, states);
      const int32_t top_m = static_cast<int32_t>(_mm512_reduce_max_epu32(states.top_m));
      const int32_t top_v = static_cast<int32_t>(_mm512_reduce_max_epu32(states.top_v));
#else
      float* __restrict new_m = b.m;
      float* __restrict new_v = b.v;
      moments(count, b.bits, p, g, [&](int64_t i) { return adam_value<M>(m[i], m_scale); },
              [&](int64_t i) { return adam_value<V>(v[i], v_scale); },
              [&](int64_t i, float first_moment, float second_moment) {
                new_m[i] = first_moment;
                new_v[i] = second_moment;
              });
      int32_t top_m = 0, top_v = 0;  // bits of the largest magnitudes, NaN last
      for (int64_t i = 0; i < count; ++i) top_m = max32(top_m, bits_of(new_m[i]) & 0x7fffffff);
      for (int64_t i = 0; i < count; ++i) top_v = max32(top_v, bits_of(new_v[i]) & 0x7fffffff);
#endif
      a_.exp_avg_scale[block] = encode<M>(b.m, b.bits, count, top_m, row, k, a_.exp_avg, b.m_codes);
      a_.exp_avg_sq_scale[block] = encode<V>(b.v, b.bits, count, top_v, row, k, a_.exp_avg_sq, b.v_codes);
    }
  }

  template <class P, class G, class M, class V, class Store>
  HFQ_ALWAYS_METHOD void moments(int64_t count, const uint16_t* __restrict bits, P* __restrict p,
                                                     const G* __restrict g, M old_m, V old_v, Store store) const {
    const AdamFactors f = f_;
    for (int64_t i = 0; i < count; ++i) {
      const float gradient = adam_value(g[i]), part = gradient * f.rest2;
      const float kept_m = old_m(i) * f.beta1, new_m = gradient * f.rest1, m = kept_m + new_m;
      const float kept_v = old_v(i) * f.beta2, new_v = part * gradient, v = kept_v + new_v;
      const float root = std::sqrt(v) * f.correction, divisor = root + f.eps;
      const float change = m / divisor * f.step_size, kept = adam_value(p[i]) * f.decay;
      adam_round<STOCHASTIC>(kept - change, STOCHASTIC ? bits[i] : uint16_t{0}, p[i]);
      store(i, m, v);
    }
  }

  // Where the codes of a block are, one in a byte.
  HFQ_ALWAYS_METHOD const uint8_t* load_codes(const void* base, int64_t row, int64_t k,
                                                                  int64_t count, uint8_t* codes) const {
    if (S::First::BITS == 8) return static_cast<const uint8_t*>(base) + row * a_.K + k;
    adam_unpack(static_cast<const uint8_t*>(base) + row * ceil_div(a_.K, 2) + k / 2, count + count % 2, codes);
    return codes;
  }

  // Write the codes of a block, return their scale.
  template <class C>
  HFQ_ALWAYS_METHOD float encode(const float* __restrict values, const uint16_t* __restrict bits, int64_t count,
                                 int32_t top, int64_t row, int64_t k, void* base, uint8_t* __restrict codes) const {
    uint8_t* to = static_cast<uint8_t*>(base);
    if (C::BITS == 8) codes = to + row * a_.K + k;
#if HFQ_VECTOR_BYTES == 64
    const float scale = adam_encode16<C, STOCHASTIC>(values, bits, count, top, codes);
#else
    const float scale = adam_encode<C, STOCHASTIC>(values, bits, count, top, codes);
#endif
    if (C::BITS == 4) {
      if (count % 2 != 0) codes[count] = 0;
      adam_pack(codes, count + count % 2, to + row * ceil_div(a_.K, 2) + k / 2);
    }
    return scale;
  }

  const AdamStep& a_;
  const int64_t blocks_;
  AdamFactors f_;
};

template <class S>
static void adam_by(const AdamStep& a) {
  if (a.stochastic) {
    AdamStepper<S, true>(a).run();
  } else {
    AdamStepper<S, false>(a).run();
  }
}

using AdamInt8 = AdamCodes<AdamCodec<8, 3, 0, 127, true, SHIFTED>, AdamCodec<8, 4, 0, 255, false, NONE>, 256>;
using AdamFp8 = AdamCodes<AdamCodec<8, 3, -6, 126, true, SUBNORMAL>, AdamCodec<8, 3, -6, 126, false, SUBNORMAL>, 256>;
using AdamInt4 = AdamCodes<AdamCodec<4, 1, 0, 7, true, SHIFTED>, AdamCodec<4, 1, 0, 15, false, NONE>, 128>;

static void adam_step(const AdamStep& a) {
  switch (a.states) {
    case ADAM_F32: return adam_by<AdamFloats<float>>(a);
    case ADAM_BF16: return adam_by<AdamFloats<uint16_t>>(a);
    case ADAM_INT8: return adam_by<AdamInt8>(a);
    case ADAM_FP8: return adam_by<AdamFp8>(a);
    default: return adam_by<AdamInt4>(a);
  }
}

}  // namespace HFQ_SET
}  // namespace hfq
