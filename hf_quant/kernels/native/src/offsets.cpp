// Products with weights that have offsets, by the kernels of any set.
#include "kernels.h"
#include "parallel.h"

namespace hfq {

// Rows of x whose products with offsets are kept at once, a multiple of those that kernels take together. Of more rows, as
// those of all experts may be, tasks of the product multiply the sums.
constexpr int64_t kKeptRows = 960;

// The products of some siblings, of an array, with rows first..first + count of x. `memory`: for what their offsets make.
static bool multiply_rows(const Kernels& kernels, Product* siblings, int64_t first, int64_t count, float* memory) {
  for (Product* each = siblings; each != nullptr; each = const_cast<Product*>(each->sibling)) {
    Product& p = *each;
    p.M = count;
    p.x = static_cast<const char*>(p.x) + first * p.x_stride * element_size(p.x_dtype);
    p.y = static_cast<char*>(p.y) + first * p.N * element_size(p.y_dtype);
    if (p.row_scale != nullptr) p.row_scale += first;
    if (p.offsets == nullptr) continue;
    kernels.sum_groups(p, memory);
    p.group_sums = memory;
    memory += count * p.groups;
    if (count < kOffsetRows || count > kKeptRows) continue;
    kernels.multiply_sums(p, p.group_sums, memory);
    p.rest = memory;
    memory += count * p.N;
  }
  return kernels.matmul(*siblings);
}

bool multiply(const Kernels& kernels, const Product& product) {
  Product siblings[kMaxSiblings];
  const int64_t M = product.M, rows = product.ends == nullptr ? min64(M, kKeptRows) : M;
  int64_t width = 0;
  for (const Product* p = &product; p != nullptr; p = p->sibling)
    width += p->offsets == nullptr ? 0 : p->groups + (rows > kKeptRows ? 0 : p->N);
  if (width == 0) return kernels.matmul(product);
  float* memory = static_cast<float*>(thread_scratch(4, static_cast<size_t>(rows * width) * 4));
  if (memory == nullptr) return false;
  for (int64_t first = 0; first < M; first += rows) {
    int64_t i = 0;
    for (const Product* p = &product; p != nullptr; p = p->sibling, ++i) {
      siblings[i] = *p;
      if (i > 0) siblings[i - 1].sibling = &siblings[i];
    }
    if (!multiply_rows(kernels, siblings, first, min64(rows, M - first), memory)) return false;
  }
  return true;
}

}  // namespace hfq
