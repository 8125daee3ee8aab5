// What an instruction set offers. Returns false if there is no memory for scratch.
#pragma once

#include "types.h"

namespace hfq {

struct Kernels {
  const char* name;
  bool by_bf16;  // whether Product.compute may be BY_BF16
  bool (*matmul)(const Product&);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

}  // namespace hfq
