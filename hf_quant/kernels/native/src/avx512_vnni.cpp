// AVX-512 with VNNI, without VBMI, GFNI and bf16 (Cascade Lake, Cooper Lake).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,bmi2")
#endif

#define HFQ_AVX512 avx512_vnni
#define HFQ_VBMI 0
#define HFQ_SET avx512_vnni_portable
#define HFQ_VECTOR_BYTES 64
#include "adam.h"
#include "append.h"
#include "avx512_matmul.h"
#include "fake.h"
#include "mixture.h"
#include "recurrent.h"
#include "steps.h"
#include "two_way.h"

namespace hfq {

const Kernels kAvx512Vnni = {"avx512_vnni", false, true, avx512_vnni::matmul, avx512_vnni_portable::dequantize, avx512_vnni::quantize_rows,
                         avx512_vnni::attention, avx512_vnni_portable::quantize, avx512_vnni_portable::append, avx512_vnni_portable::adam_step,
                         avx512_vnni_portable::fake_quantize, avx512_vnni_portable::quantize_two_way, avx512_vnni_portable::scale_sums,
                         avx512_vnni_portable::requantize_rows, avx512_vnni_portable::norm_rows, avx512_vnni_portable::turn_rows, avx512_vnni_portable::gate_rows, avx512_vnni_portable::add_rows,
                         avx512_vnni_portable::small_product, avx512_vnni_portable::combine_rows, avx512_vnni_portable::convolve_rows, avx512_vnni_portable::delta_rows,
                         avx512_vnni_portable::scan_rows};

}  // namespace hfq

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
