// What an instruction set offers. Returns false if there is no memory for scratch.
#pragma once

#include "types.h"

namespace hfq {

// Rows of x [M, K] to int8 codes [M, K] and scales [M].
struct RowQuantization {
  int64_t M, K;
  const void* x;
  int x_dtype;
  int64_t x_stride;  // elements from row to row
  int8_t* codes;
  float* scales;
  int threads;
};

struct Kernels {
  const char* name;
  bool by_bf16;  // whether Product.compute may be BY_BF16
  bool (*matmul)(const Product&);
  // y [experts, N, K] = the weights, rounded once; of the Product only they, y and threads count.
  bool (*dequantize)(const Product&);
  void (*quantize_rows)(const RowQuantization&);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

}  // namespace hfq
