// Products with weights that have offsets, by the kernels of any set.
#include "kernels.h"
#include "parallel.h"

namespace hfq {

// Rows of x whose products with offsets are kept at once, a multiple of those that kernels take together. Of more rows, as
// those of all experts may be, tasks of the product multiply the sums.
constexpr int64_t kKeptRows = 960;

bool multiply(const Kernels& kernels, const Product& product) {
  const int64_t M = product.M, rows = product.ends == nullptr ? min64(M, kKeptRows) : M;
  int64_t width = 0;
  for (const Product* p = &product; p != nullptr; p = p->sibling)
    width += p->offsets == nullptr ? 0 : p->groups + (rows > kKeptRows ? 0 : p->N);
  if (width == 0) return kernels.matmul(product);
  float* const memory = static_cast<float*>(thread_scratch(4, static_cast<size_t>(rows * width) * 4));
  if (memory == nullptr) return false;
  for (int64_t first = 0; first < M; first += rows) {
    const int64_t count = min64(rows, M - first);
    Product siblings[kMaxSiblings];
    Product* last = nullptr;
    float* made = memory;
    for (const Product* each = &product; each != nullptr; each = each->sibling) {
      Product& p = last == nullptr ? siblings[0] : last[1];
      p = *each;
      if (last != nullptr) last->sibling = &p;
      last = &p;
      p.M = count;
      p.x = static_cast<const char*>(p.x) + first * p.x_stride * element_size(p.x_dtype);
      p.y = static_cast<char*>(p.y) + first * p.N * element_size(p.y_dtype);
      if (p.row_scale != nullptr) p.row_scale += first;
      if (p.offsets == nullptr) continue;
      kernels.sum_groups(p, made);
      p.group_sums = made;
      made += count * p.groups;
      if (count < kOffsetRows || count > kKeptRows) continue;
      kernels.multiply_sums(p, p.group_sums, made);
      p.rest = made;
      made += count * p.N;
    }
    if (!kernels.matmul(siblings[0])) return false;
  }
  return true;
}

}  // namespace hfq
