// The products for any CPU that the compiler builds for.
#define HFQ_SET portable
#define HFQ_VECTOR_BYTES 16
#include "set.h"

namespace hfq {
const Kernels kPortable = portable::kernels_of("portable", false, false, portable::matmul, portable::quantize_rows,
                                               portable::attention);
}
