// Every kernel of an instruction set in plain C++, which the compiler vectorizes, and the table of them. HFQ_SET names the set.
#pragma once

#include "adam.h"
#include "append.h"
#include "attention.h"
#include "fake.h"
#include "mixture.h"
#include "offsets.h"
#include "recurrent.h"
#include "steps.h"
#include "two_way.h"

namespace hfq {
namespace HFQ_SET {

// The first three kernels are those that a set may have of its own. A constant: at start-up no code of a set may run.
static constexpr Kernels kernels_of(const char* name, bool by_bf16, bool joins_siblings, decltype(Kernels::matmul) products,
                                    decltype(Kernels::quantize_rows) codes_of_rows, decltype(Kernels::attention) attends) {
  return {name,         by_bf16,          joins_siblings, products,       dequantize,   codes_of_rows, attends,
          quantize,     append,           adam_step,      fake_quantize,  quantize_two_way, scale_sums, requantize_rows,
          norm_rows,    turn_rows,        gate_rows,      add_rows,       small_product, combine_rows, convolve_rows,
          delta_rows,   scan_rows,        sum_over_groups, multiply_sums};
}

}  // namespace HFQ_SET
}  // namespace hfq
