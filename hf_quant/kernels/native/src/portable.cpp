// The products for any CPU that the compiler builds for.
#define HFQ_SET portable
#include "portable.h"

namespace hfq {
const Kernels kPortable = {"portable", false, portable::matmul, portable::dequantize, portable::quantize_rows};
}
