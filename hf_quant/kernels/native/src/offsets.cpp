// Products with weights that have offsets, by the kernels of any set.
#include "kernels.h"
#include "parallel.h"

namespace hfq {

bool multiply(const Kernels& kernels, Product& product) {
  int64_t floats = 0;
  for (const Product* p = &product; p != nullptr; p = p->sibling)
    if (p->offsets != nullptr) floats += p->M * (p->groups + (p->M < kOffsetRows ? 0 : p->N));
  if (floats == 0) return kernels.matmul(product);
  float* memory = static_cast<float*>(thread_scratch(4, static_cast<size_t>(floats) * 4));
  if (memory == nullptr) return false;
  // The siblings of a product are const to the kernels, and all of one array.
  for (const Product* each = &product; each != nullptr; each = each->sibling) {
    Product& p = const_cast<Product&>(*each);
    if (p.offsets == nullptr) continue;
    kernels.sum_groups(p, memory);
    p.group_sums = memory;
    memory += p.M * p.groups;
    if (p.M < kOffsetRows) continue;  // tasks of the product multiply them
    kernels.multiply_sums(p, p.group_sums, memory);
    p.rest = memory;
    memory += p.M * p.N;
  }
  return kernels.matmul(product);
}

}  // namespace hfq
