// The products for any CPU that the compiler builds for.
#define HFQ_SET portable
#define HFQ_VECTOR_BYTES 16
#include "adam.h"
#include "append.h"
#include "attention.h"
#include "fake.h"
#include "mixture.h"
#include "recurrent.h"
#include "steps.h"
#include "two_way.h"

namespace hfq {
const Kernels kPortable = {"portable", false, false, portable::matmul, portable::dequantize, portable::quantize_rows,
                         portable::attention, portable::quantize, portable::append, portable::adam_step,
                         portable::fake_quantize, portable::quantize_two_way, portable::scale_sums,
                         portable::requantize_rows, portable::norm_rows, portable::turn_rows, portable::gate_rows, portable::add_rows,
                         portable::small_product, portable::combine_rows, portable::convolve_rows, portable::delta_rows,
                         portable::scan_rows};
}
