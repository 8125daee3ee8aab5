// The loops of adam.h, 16 values at a time: the same operations in the same order. GCC 12 would take 64 at a time, as many
// as there are codes in a register, and keep half of what it computes in memory.
#pragma once

#include "types.h"

namespace hfq {
namespace HFQ_SET {

// Lanes that are loaded and stored: all, without a mask, which would cost a third of the speed of fp32 states; or some.
struct AllLanes {
  HFQ_ALWAYS_METHOD __m512 load(const float* from) const { return _mm512_loadu_ps(from); }
  HFQ_ALWAYS_METHOD __m512i load(const uint16_t* from) const {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  HFQ_ALWAYS_METHOD __m512i load(const uint8_t* from) const {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  HFQ_ALWAYS_METHOD void store(__m512 value, float* to) const { _mm512_storeu_ps(to, value); }
  HFQ_ALWAYS_METHOD void store(__m512i value, uint16_t* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
  }
  HFQ_ALWAYS_METHOD void store(__m512i value, uint8_t* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value));
  }
  HFQ_ALWAYS_METHOD __m512i max(__m512i a, __m512i b) const { return _mm512_max_epu32(a, b); }
};
struct SomeLanes {
  __mmask16 mask;
  HFQ_ALWAYS_METHOD __m512 load(const float* from) const { return _mm512_maskz_loadu_ps(mask, from); }
  HFQ_ALWAYS_METHOD __m512i load(const uint16_t* from) const {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  }
  HFQ_ALWAYS_METHOD __m512i load(const uint8_t* from) const {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from));
  }
  HFQ_ALWAYS_METHOD void store(__m512 value, float* to) const { _mm512_mask_storeu_ps(to, mask, value); }
  HFQ_ALWAYS_METHOD void store(__m512i value, uint16_t* to) const { _mm512_mask_cvtepi32_storeu_epi16(to, mask, value); }
  HFQ_ALWAYS_METHOD void store(__m512i value, uint8_t* to) const { _mm512_mask_cvtepi32_storeu_epi8(to, mask, value); }
  HFQ_ALWAYS_METHOD __m512i max(__m512i a, __m512i b) const { return _mm512_mask_max_epu32(a, mask, a, b); }
};

template <class Body>
HFQ_ALWAYS void adam_each16(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) body(i, AllLanes{});
  if (i < count) body(i, SomeLanes{static_cast<__mmask16>((1u << (count - i)) - 1)});
}

template <class L>
HFQ_ALWAYS __m512 adam_load(const float* from, L lanes) {
  return lanes.load(from);
}
template <class L>
HFQ_ALWAYS __m512 adam_load(const uint16_t* from, L lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(lanes.load(from), 16));
}

template <bool STOCHASTIC, class L>
HFQ_ALWAYS void adam_put(__m512 value, __m512i, L lanes, float* to) {
  lanes.store(value, to);
}
template <bool STOCHASTIC, class L>
HFQ_ALWAYS void adam_put(__m512 value, __m512i bits, L lanes, uint16_t* to) {
  const __m512i raw = _mm512_castps_si512(value);
  if (!STOCHASTIC)
    bits = _mm512_add_epi32(_mm512_set1_epi32(0x7fff),
                            _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1)));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(raw, bits), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  lanes.store(rounded, to);
}

// Moments that are stored as floats.
template <class T, bool STOCHASTIC>
struct AdamFloats16 {
  T *m, *v;

  template <class L>
  HFQ_ALWAYS_METHOD __m512 first(int64_t i, L lanes) const {
    return adam_load(m + i, lanes);
  }
  template <class L>
  HFQ_ALWAYS_METHOD __m512 second(int64_t i, L lanes) const {
    return adam_load(v + i, lanes);
  }
  template <class L>
  HFQ_ALWAYS_METHOD void store(int64_t i, L lanes, __m512i bits, __m512 new_m, __m512 new_v) {
    adam_put<STOCHASTIC>(new_m, bits, lanes, m + i);
    adam_put<STOCHASTIC>(new_v, bits, lanes, v + i);
  }
};

template <class C, class L>
HFQ_ALWAYS __m512 adam_value16(const uint8_t* codes, L lanes, __m512 scale) {
  const __m512i raw = lanes.load(codes);
  const __m512i magnitude = C::SIGNED ? _mm512_andnot_si512(_mm512_set1_epi32(C::SIGN), raw) : raw;
  const __m512i shifted = _mm512_slli_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(C::OFFSET)), C::SHIFT);
  __m512 value = _mm512_castsi512_ps(shifted);
  const __m512 small = _mm512_set1_ps(C::small());
  if (C::ZERO == SUBNORMAL) {
    const __mmask16 below = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(1 << C::MANTISSA));
    value = _mm512_mask_sub_ps(value, below, _mm512_add_ps(value, value), small);
  }
  if (C::ZERO == SHIFTED) value = _mm512_sub_ps(value, small);
  value = _mm512_mul_ps(value, scale);
  if (!C::SIGNED) return value;
  // (raw << shift & sign) | value
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_slli_epi32(raw, 32 - C::BITS),
                                                       _mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(value), 0xEA));
}

// Moments that are stored as codes; the new ones go to buffers, until the largest is known.
template <class M, class V>
struct AdamCodes16 {
  const uint8_t *m, *v;
  __m512 m_scale, v_scale;
  float *new_m, *new_v;
  __m512i top_m, top_v;

  template <class L>
  HFQ_ALWAYS_METHOD __m512 first(int64_t i, L lanes) const {
    return adam_value16<M>(m + i, lanes, m_scale);
  }
  template <class L>
  HFQ_ALWAYS_METHOD __m512 second(int64_t i, L lanes) const {
    return adam_value16<V>(v + i, lanes, v_scale);
  }
  template <class L>
  HFQ_ALWAYS_METHOD void store(int64_t i, L lanes, __m512i, __m512 first_moment, __m512 second_moment) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    _mm512_store_ps(new_m + i, first_moment);
    _mm512_store_ps(new_v + i, second_moment);
    top_m = lanes.max(top_m, _mm512_and_si512(_mm512_castps_si512(first_moment), magnitude));
    top_v = lanes.max(top_v, _mm512_and_si512(_mm512_castps_si512(second_moment), magnitude));
  }
};

template <bool STOCHASTIC, class P, class G, class S>
HFQ_ALWAYS void adam_moments16(const AdamFactors& f, int64_t count, const uint16_t* bits, P* p, const G* g, S& states) {
  const __m512 beta1 = _mm512_set1_ps(f.beta1), rest1 = _mm512_set1_ps(f.rest1), beta2 = _mm512_set1_ps(f.beta2);
  const __m512 rest2 = _mm512_set1_ps(f.rest2), correction = _mm512_set1_ps(f.correction), eps = _mm512_set1_ps(f.eps);
  const __m512 step_size = _mm512_set1_ps(f.step_size), decay = _mm512_set1_ps(f.decay);
  adam_each16(count, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const __m512i random = STOCHASTIC ? lanes.load(bits + i) : _mm512_setzero_si512();
    const __m512 gradient = adam_load(g + i, lanes);
    const __m512 m = _mm512_add_ps(_mm512_mul_ps(states.first(i, lanes), beta1), _mm512_mul_ps(gradient, rest1));
    const __m512 square = _mm512_mul_ps(_mm512_mul_ps(gradient, rest2), gradient);
    const __m512 v = _mm512_add_ps(_mm512_mul_ps(states.second(i, lanes), beta2), square);
    const __m512 divisor = _mm512_add_ps(_mm512_mul_ps(_mm512_sqrt_ps(v), correction), eps);
    const __m512 change = _mm512_mul_ps(_mm512_div_ps(m, divisor), step_size);
    const __m512 kept = _mm512_mul_ps(adam_load(p + i, lanes), decay);
    adam_put<STOCHASTIC>(_mm512_sub_ps(kept, change), random, lanes, p + i);
    states.store(i, lanes, random, m, v);
  });
}

// As `adam_encode`.
template <class C, bool STOCHASTIC>
HFQ_ALWAYS float adam_encode16(const float* values, const uint16_t* bits, int64_t count, int32_t top, uint8_t* codes) {
  const AdamRange range = adam_range<C>(top);
  const __m512 inverse = _mm512_set1_ps(range.inverse), small = _mm512_set1_ps(C::small());
  const __m512i sign = _mm512_set1_epi32(INT32_MIN), lowest = _mm512_set1_epi32(range.lowest);
  adam_each16(count, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const __m512i value = _mm512_castps_si512(lanes.load(values + i));
    __m512 magnitude = _mm512_castsi512_ps(C::SIGNED ? _mm512_andnot_si512(sign, value) : value);
    magnitude = _mm512_mul_ps(magnitude, inverse);
    __mmask16 is_small = 0;
    if (C::ZERO == SHIFTED) magnitude = _mm512_add_ps(magnitude, small);
    if (C::ZERO == SUBNORMAL) {
      is_small = _mm512_cmp_ps_mask(magnitude, small, _CMP_LT_OQ);
      magnitude = _mm512_mask_add_ps(magnitude, is_small, magnitude, small);
    }
    const __m512i raw = _mm512_castps_si512(magnitude);
    __m512i added;
    if (STOCHASTIC) {
      added = _mm512_slli_epi32(lanes.load(bits + i), C::SHIFT - 16);
    } else {
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, C::SHIFT), _mm512_set1_epi32(1));
      added = _mm512_add_epi32(odd, _mm512_set1_epi32((1 << (C::SHIFT - 1)) - 1));
    }
    __m512i code = _mm512_srai_epi32(_mm512_add_epi32(raw, added), C::SHIFT);
    code = _mm512_sub_epi32(code, _mm512_set1_epi32(C::OFFSET));
    if (C::ZERO == SUBNORMAL) code = _mm512_mask_sub_epi32(code, is_small, code, _mm512_set1_epi32(1 << C::MANTISSA));
    if (C::SIGNED) {
      const __mmask16 negative = _mm512_cmp_ps_mask(_mm512_castsi512_ps(value), _mm512_setzero_ps(), _CMP_LT_OQ);
      code = _mm512_mask_or_epi32(code, negative, code, _mm512_set1_epi32(C::SIGN));
    } else {
      code = _mm512_max_epi32(code, lowest);
    }
    lanes.store(code, codes + i);
  });
  return range.scale;
}

}  // namespace HFQ_SET
}  // namespace hfq
