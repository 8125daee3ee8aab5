// Random calls of the native kernels of every instruction set of this CPU, in buffers that end where a page without
// access begins, compared with plain sums in fp64. `sanitize_native.py` builds it with sanitizers and runs it:
//
//     native_driver CASES SEED CALLERS    # CALLERS threads share the cases and call at once
//
// Sanitizers see the loads and stores of compiled code; the pages catch those of masked instructions and assembly, too.
// GUARD_SCRATCH: what the kernels work in ends at such a page as well, and holds NaN until it is written.
// Sets without a name are left out: they were not built. NO_SANITIZER: as it says, for `emulate_arm.py`.

#ifndef NO_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "mixture_route.h"
#include "parallel.h"

namespace {

using namespace hfq;

// Numbers, by other means than types.h.

// v times a power of two in the range of normal numbers; that of libm takes a sixth of the whole time.
inline double scaled(double v, int64_t exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  memcpy(&power, &bits, 8);
  return v * power;
}

struct Grid {
  int exponent_bits, mantissa_bits;
};

Grid grid_of(int dtype) {
  switch (dtype) {
    case F32: return {8, 23};
    case BF16: return {8, 7};
    case F16: return {5, 10};
    default: return {4, 3};  // E4M3
  }
}

double decode(uint32_t bits, int dtype) {
  if (dtype == INT8) return static_cast<int8_t>(bits);
  if (dtype == E8M0) return scaled(1.0, static_cast<int>(bits) - 127);
  const Grid g = grid_of(dtype);
  const int bias = (1 << (g.exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> g.mantissa_bits & ((1u << g.exponent_bits) - 1));
  if (dtype != E4M3 && exponent == (1 << g.exponent_bits) - 1) return NAN;  // or inf, which no case makes
  const double fraction = scaled(bits & ((1u << g.mantissa_bits) - 1), -g.mantissa_bits);
  const double value = scaled(exponent == 0 ? fraction : 1 + fraction, (exponent == 0 ? 1 : exponent) - bias);
  return bits >> (g.exponent_bits + g.mantissa_bits) & 1 ? -value : value;
}

// The next value towards zero; what would be subnormal becomes zero.
uint32_t encode(double value, int dtype) {
  if (dtype == INT8) return static_cast<uint8_t>(static_cast<int8_t>(value));
  int exponent;
  const double fraction = std::frexp(std::fabs(value), &exponent);
  if (dtype == E8M0) return static_cast<uint32_t>(exponent - 1 + 127);
  const Grid g = grid_of(dtype);
  const int field = exponent - 1 + (1 << (g.exponent_bits - 1)) - 1;
  if (value == 0 || field < 1) return 0;
  const uint32_t mantissa = static_cast<uint32_t>((2 * fraction - 1) * (1 << g.mantissa_bits));
  return (value < 0 ? 1u : 0u) << (g.exponent_bits + g.mantissa_bits) |
         static_cast<uint32_t>(field) << g.mantissa_bits | mantissa;
}

// What rounding to a dtype may change.
double rounding(double value, int dtype) {
  const double subnormal = dtype == F16 ? scaled(1.0, -25) : 0;
  return scaled(1.01 * std::fabs(value), -grid_of(dtype).mantissa_bits - 1) + subnormal;
}

int bits_of(int layout) {
  switch (layout) {
    case PACKED2: return 2;
    case PACKED3: return 3;
    case PACKED4: return 4;
    case PACKED6: return 6;
    default: return 8;
  }
}

// Code k of a row, bit by bit: units of 32 codes, 3 bits as planes of 2 and 1, 6 bits as planes of 4 and 2.
uint32_t code_of(const uint8_t* row, int layout, int64_t k) {
  const int bits = bits_of(layout), first = bits == 3 ? 2 : bits == 6 ? 4 : bits;
  if (bits == 8) return row[k];
  const uint8_t* unit = row + k / 32 * 4 * bits;
  uint32_t code = 0;
  for (int b = 0; b < bits; ++b) {
    const int64_t bit = b < first ? k % 32 * first + b : 32 * first + k % 32 * (bits - first) + b - first;
    code |= (unit[bit / 8] >> (bit % 8) & 1u) << b;
  }
  return code;
}

// Memory.

enum Place { BEFORE_GUARD, AFTER_GUARD, HEAP };

constexpr uint8_t kGarbage = 0xA5;

// Exactly `bytes` bytes; `shift` moves them off their alignment.
class Buffer {
 public:
  Buffer(int64_t bytes, Place place, int64_t shift, uint8_t garbage = kGarbage) {
    const size_t size = static_cast<size_t>(bytes + shift);
    if (place == HEAP) {
      heap_ = static_cast<uint8_t*>(malloc(size));
      data = heap_ + shift;
    } else {
      const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), room = (size + page - 1) / page * page;
      mapped_ = room + 2 * page;
      void* map = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (map == MAP_FAILED) abort();
      map_ = static_cast<uint8_t*>(map);
      if (mprotect(map_, page, PROT_NONE) != 0 || mprotect(map_ + page + room, page, PROT_NONE) != 0) abort();
      data = place == BEFORE_GUARD ? map_ + page + room - bytes : map_ + page + shift;
      if (place == BEFORE_GUARD) data -= shift;
    }
    memset(data, garbage, static_cast<size_t>(bytes));
  }
  ~Buffer() {
    free(heap_);
    if (map_ != nullptr) munmap(map_, mapped_);
  }
  Buffer(const Buffer&) = delete;

  void put(int64_t i, int dtype, uint32_t bits) {
    memcpy(data + i * element_size(dtype), &bits, static_cast<size_t>(element_size(dtype)));
  }
  double at(int64_t i, int dtype) const {
    uint32_t bits = 0;
    memcpy(&bits, data + i * element_size(dtype), static_cast<size_t>(element_size(dtype)));
    return decode(bits, dtype);
  }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }

  uint8_t* data;

 private:
  uint8_t *heap_ = nullptr, *map_ = nullptr;
  size_t mapped_ = 0;
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double between(double low, double high) {
    return low + (high - low) * scaled(static_cast<double>(engine_() >> 11), -53);
  }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

// What is called, for the message when it ends the process.
thread_local std::string current = "between cases";

void print_current() { fprintf(stderr, "the case: %s\n", current.c_str()); }

std::string text_of(const Product& p) {
  char line[512];
  auto number = [](int64_t value) { return static_cast<long long>(value); };
  snprintf(line, sizeof line,
           "M=%lld N=%lld K=%lld group_size=%lld layout=%d compute=%d x_dtype=%d x_stride=%lld block=%lld y_dtype=%d "
           "scale_dtype=%d scale_rows=%lld scale_stride=%lld zero=%d offsets=%d bias=%d experts=%lld threads=%d",
           number(p.M), number(p.N), number(p.K), number(p.group_size), p.layout, p.compute, p.x_dtype,
           number(p.x_stride), number(p.block), p.y_dtype, p.scale_dtype, number(p.scale_rows), number(p.scale_stride),
           p.zero != nullptr, p.offsets != nullptr, p.bias != nullptr, number(p.experts), p.threads);
  return line;
}

// Sizes, dtypes and strides of a product, as hf_quant.kernels.native may ask for it.
Product draw(Random& random, bool has_bf16) {
  Product p{};
  do {
    p.M = random.one_in(8) ? random.of<int64_t>({0, 100, 255, 257, 481, 485, 961}) : random.below(26);
    p.N = random.one_in(4) ? random.of<int64_t>({1, 2, 7, 8, 63, 64, 65, 128, 129, 300}) : 1 + random.below(200);
    p.K = random.one_in(6) ? random.of<int64_t>({1, 31, 64, 127, 128, 129, 1024, 1025, 2049, 4096, 4160})
                           : 1 + random.below(700);
  } while (p.M * p.N * p.K > 6000000);
  p.layout = random.of<int>({PACKED2, PACKED3, PACKED4, PACKED4, PACKED6, BYTES_INT, BYTES_FLOAT});
  const bool integer = (p.layout == PACKED2 || p.layout == PACKED4 || p.layout == BYTES_INT) && random.one_in(2);
  p.x_dtype = integer && random.one_in(3) ? INT8 : random.of<int>({F32, BF16, BF16, F16});
  p.compute = integer ? BY_INT8 : p.x_dtype == BF16 && has_bf16 ? BY_BF16 : BY_F32;
  p.y_dtype = random.of<int>({F32, BF16, F16});
  p.x_stride = p.K + (random.one_in(4) ? random.below(40) : 0);
  p.group_size = random.one_in(3) ? p.K : random.of<int64_t>({16, 32, 48, 64, 80, 96, 128, 160, 256, 1024, 2048});
  p.groups = ceil_div(p.K, p.group_size);
  if (p.groups == 1) p.group_size = p.K;
  p.row_bytes = bits_of(p.layout) == 8 ? p.K : ceil_div(p.K, 32) * 4 * bits_of(p.layout);
  p.scale_dtype = random.of<int>({F32, BF16, F16, E8M0, E4M3});
  p.scale_rows = random.one_in(5) ? 128 : 1;
  p.scale_stride = p.scale_rows == 1 && random.one_in(5) ? 0 : p.groups;
  p.bias_dtype = random.of<int>({F32, BF16, F16});
  p.experts = random.one_in(4) ? 1 + random.below(6) : 1;
  p.threads = static_cast<int>(1 + random.below(3));
  p.expert_qdata = p.N * p.row_bytes;
  p.expert_scale = (p.scale_stride == 0 ? 1 : ceil_div(p.N, p.scale_rows)) * p.groups;
  p.expert_bias = p.N;
  return p;
}

// What every random call shares: buffers of random places and contents.
class RandomCall {
 protected:
  using Memory = std::unique_ptr<Buffer>;

  explicit RandomCall(Random& random) : random_(random) {}

  Memory make(int64_t bytes, bool may_shift) {
    return std::make_unique<Buffer>(bytes, random_.of<Place>({BEFORE_GUARD, BEFORE_GUARD, AFTER_GUARD, HEAP}),
                                    may_shift && random_.one_in(2) ? 1 : 0);
  }

  template <class F>
  void* fill(Memory& memory, int64_t count, int dtype, bool may_shift, F value) {
    memory = make(count * element_size(dtype), may_shift);
    for (int64_t i = 0; i < count; ++i) memory->put(i, dtype, encode(value(), dtype));
    return memory->data;
  }

  Random& random_;
};

constexpr int64_t kLanes = 16;  // of rows of a weight, whose offsets lie side by side

// One random call with its buffers; `p` holds their addresses.
class Case : RandomCall {
 public:
  Case(Random& random, bool has_bf16) : RandomCall(random), p(draw(random, has_bf16)) {
    const int64_t scales = p.experts * p.expert_scale;
    const int codes = 1 << bits_of(p.layout);
    const bool has_zero = p.layout <= PACKED4 && random.one_in(2);
    const int x_bits = p.x_dtype;
    auto x_value = [&] { return x_bits == INT8 ? double(random_.below(256) - 128) : random_.between(-2, 2); };
    p.x = fill(x, p.M == 0 ? 0 : (p.M - 1) * p.x_stride + p.K, p.x_dtype, true, x_value);
    p.qdata = static_cast<uint8_t*>(fill(qdata, p.experts * p.expert_qdata, INT8, true, [&] {
      const int64_t code = random_.below(256);  // 127 and 255 are NaN as E4M3
      return static_cast<double>(static_cast<int8_t>(p.layout == BYTES_FLOAT && code % 128 == 127 ? code - 1 : code));
    }));
    p.scale = fill(scale, scales, p.scale_dtype, true, [&] { return random_.between(0.02, 0.2); });
    if (has_zero)
      p.zero = static_cast<uint8_t*>(fill(zero, scales, INT8, true, [&] { return double(random_.below(codes)); }));
    if (random.one_in(2))
      p.bias = fill(bias, p.experts * p.N, p.bias_dtype, true, [&] { return random_.between(-3, 3); });
    const bool quantizes_rows = p.compute == BY_INT8 && p.x_dtype != INT8;
    const int64_t num_offsets = p.experts * ceil_div(p.N, kLanes) * kLanes * p.groups;
    if (!has_zero && !quantizes_rows && random.one_in(3))
      p.offsets = static_cast<float*>(fill(offsets, num_offsets, F32, false, [&] { return random_.between(-1, 1); }));
    if (random.one_in(4)) {
      auto near_one = [&] { return random_.between(0.5, 1.5); };
      p.global_scale = static_cast<float*>(fill(global, p.experts, F32, false, near_one));
    }
    if (p.compute == BY_INT8 ? p.x_dtype == INT8 : random.one_in(4))
      p.row_scale = static_cast<float*>(fill(row_scale, p.M, F32, false, [&] { return random_.between(0.01, 0.1); }));
    if (p.x_dtype != INT8 && p.row_scale == nullptr && p.K % 2 == 0 && p.offsets == nullptr && random.one_in(3)) {
      p.block = 2;
      while (p.K % (2 * p.block) == 0 && p.block < 1024 && !random.one_in(6)) p.block *= 2;
      auto sign = [&] { return random_.one_in(2) ? 1.0 : -1.0; };
      p.diagonal = static_cast<float*>(fill(diagonal, p.K, F32, false, sign));
    }
    if (p.x_dtype != INT8 && p.row_scale == nullptr && random.one_in(3))
      p.input_scale = static_cast<float*>(fill(input_scale, 1, F32, false, [&] { return random_.between(0.005, 0.05); }));
    int code = 0;  // levels are exact in bf16, and those of 8-bit floats symmetric
    p.levels = static_cast<float*>(fill(levels, codes, F32, false, [&] {
      const int i = code++;
      if (has_zero) return static_cast<double>(i);
      if (p.compute == BY_INT8) return static_cast<double>(i - codes / 2);
      return p.layout == BYTES_FLOAT ? decode(i % 128 == 127 ? i - 1 : i, E4M3) : double(random_.below(129) - 64) / 8;
    }));
    starts = {0};
    for (int64_t e = 0; e < p.experts; ++e) {  // some experts without rows, some rows without an expert
      const int64_t some = random.one_in(3) ? 0 : random.below(p.M - starts.back() + 1);
      starts.push_back(p.experts > 1 ? starts.back() + some : p.M);
    }
    if (p.experts > 1) {
      ends = make(p.experts * 4, false);
      for (int64_t e = 0; e < p.experts; ++e) ends->put(e, F32, static_cast<uint32_t>(starts[e + 1]));
      p.ends = ends->as<int32_t>();
    }
  }

  // Whether the kernels compute what they should; says what is wrong.
  bool passes(const Kernels& kernels) {
    return multiplies(kernels) && dequantizes(kernels) && (p.x_dtype == INT8 || quantizes(kernels));
  }

 private:
  void row_of_x(int64_t m, double* row) const {
    for (int64_t k = 0; k < p.K; ++k) row[k] = x->at(m * p.x_stride + k, p.x_dtype);
    if (p.block == 0) return;
    // The sums that are rounded to fp32 are those of the kernels.
    const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.block)));
    std::vector<float> x(row, row + p.K);
    for (int64_t k = 0; k < p.K; ++k) x[k] *= p.diagonal[k];
    for (int64_t size = 1; size < p.block; size *= 2) {
      for (int64_t k = 0; k < p.K; ++k) {
        if (k / size % 2 != 0) continue;
        const float a = x[k], b = x[k + size];
        x[k] = a + b;
        x[k + size] = a - b;
      }
    }
    for (int64_t k = 0; k < p.K; ++k) row[k] = x[k] * factor;
  }

  // A row as int8 codes, and its scale.
  float quantize(double* row) const {
    float top = 0;
    for (int64_t k = 0; k < p.K; ++k) top = std::fmax(top, static_cast<float>(std::fabs(row[k])));
    const float scale = p.input_scale != nullptr ? *p.input_scale : top == 0 ? 1.0f : top / 127.0f;
    for (int64_t k = 0; k < p.K; ++k)
      row[k] = std::nearbyint(std::fmax(-127.0f, std::fmin(127.0f, static_cast<float>(row[k]) / scale)));
    return scale;
  }

  // Each is computed once, for all kernels.
  const std::vector<double>& row_of_weight(int64_t e, int64_t n) {
    weight_rows.resize(static_cast<size_t>(p.experts * p.N));
    std::vector<double>& row = weight_rows[e * p.N + n];
    if (!row.empty()) return row;
    row.resize(static_cast<size_t>(p.K));
    const int64_t first = e * p.expert_scale + n / p.scale_rows * p.scale_stride;
    for (int64_t k = 0; k < p.K; ++k) {
      const uint32_t code = code_of(p.qdata + e * p.expert_qdata + n * p.row_bytes, p.layout, k);
      const int64_t group = first + k / p.group_size;
      const double value = p.layout == BYTES_INT ? static_cast<int8_t>(code)
                           : p.zero != nullptr   ? static_cast<int>(code) - p.zero[group]
                                                 : static_cast<double>(p.levels[code]);
      row[k] = value * scale->at(group, p.scale_dtype) * (p.global_scale == nullptr ? 1.0f : p.global_scale[e]);
    }
    return row;
  }

  double offset_of(int64_t e, int64_t n, int64_t group) const {
    const int64_t block = e * ceil_div(p.N, kLanes) + n / kLanes;
    return offsets->at((block * p.groups + group) * kLanes + n % kLanes, F32);
  }

  bool differs(const Kernels& kernels, const char* what, int64_t row, int64_t column, double found, double exact,
               double allowed) const {
    if (std::fabs(found - exact) <= allowed) return false;
    fprintf(stderr, "%s: %s[%lld, %lld] is %.9g, not %.9g +- %.2g\n", kernels.name, what, static_cast<long long>(row),
            static_cast<long long>(column), found, exact, allowed);
    return true;
  }

  bool multiplies(const Kernels& kernels) {
    const Memory y = make(p.M * p.N * element_size(p.y_dtype), false);
    Product call = p;
    call.y = y->data;
    if (call.compute == BY_BF16 && !kernels.by_bf16) call.compute = BY_F32;
    current = std::string(kernels.name) + " matmul: " + text_of(call);
    if (!multiply(kernels, call)) {
      fprintf(stderr, "%s: no memory\n", kernels.name);
      return false;
    }
    const double tolerance = scaled(static_cast<double>(p.K) / 8 + 64, -24);  // of sums in fp32
    const bool is_bf16 = p.x_dtype == BF16 && p.compute != BY_INT8;  // also where the CPU multiplies none
    std::vector<double> rows(static_cast<size_t>(p.M * p.K));
    std::vector<float> factors;
    for (int64_t m = 0; m < p.M; ++m) {
      row_of_x(m, rows.data() + m * p.K);
      const bool quantized = p.compute == BY_INT8 && p.x_dtype != INT8;
      factors.push_back(quantized ? quantize(rows.data() + m * p.K) : p.row_scale == nullptr ? 1.0f : p.row_scale[m]);
    }
    for (int64_t e = 0; e < p.experts; ++e) {
      for (int64_t n = 0; n < p.N; ++n) {
        const std::vector<double>& weight = row_of_weight(e, n);
        const double added = p.bias == nullptr ? 0.0 : bias->at(e * p.expert_bias + n, p.bias_dtype);
        for (int64_t m = starts[e]; m < starts[e + 1]; ++m) {
          double sum = 0, magnitude = 0, largest = 0, weights = 0;
          for (int64_t k = 0; k < p.K; ++k) {
            sum += rows[m * p.K + k] * weight[k];
            magnitude += std::fabs(rows[m * p.K + k] * weight[k]);
            largest = std::max(largest, std::fabs(rows[m * p.K + k]));
            weights += std::fabs(weight[k]);
          }
          for (int64_t k = 0; p.offsets != nullptr && k < p.K; ++k) {
            const double product = rows[m * p.K + k] * offset_of(e, n, k / p.group_size);
            sum += product;
            magnitude += std::fabs(product);
          }
          // Rows in bf16 may be in fixed point: the smallest numbers to 2^-16 of the largest.
          const double fixed = is_bf16 && kernels.matmul != kPortable.matmul ? scaled(largest * weights, -16) : 0;
          const double exact = sum * factors[m] + added;
          const double unit = p.block != 0 && is_bf16 ? scaled(1.0, -8) : tolerance;
          const double allowed =
              fixed + unit * magnitude * factors[m] + tolerance * std::fabs(added) + rounding(exact, p.y_dtype);
          if (differs(kernels, "y", m, n, y->at(m * p.N + n, p.y_dtype), exact, allowed)) return false;
        }
      }
    }
    const int64_t bytes = p.N * element_size(p.y_dtype);
    for (int64_t i = starts.back() * bytes; i < p.M * bytes; ++i) {
      if (y->data[i] == kGarbage) continue;
      fprintf(stderr, "%s: rows of y that belong to no expert were written\n", kernels.name);
      return false;
    }
    return true;
  }

  bool dequantizes(const Kernels& kernels) {
    const Memory y = make(p.experts * p.N * p.K * element_size(p.y_dtype), false);
    Product call = p;
    call.y = y->data;
    current = std::string(kernels.name) + " dequantize: " + text_of(call);
    if (!kernels.dequantize(call)) return false;
    for (int64_t row = 0; row < p.experts * p.N; ++row) {
      const std::vector<double>& weight = row_of_weight(row / p.N, row % p.N);
      for (int64_t k = 0; k < p.K; ++k) {
        const double allowed = rounding(weight[k], p.y_dtype) + scaled(std::fabs(weight[k]), -22);
        if (differs(kernels, "weight", row, k, y->at(row * p.K + k, p.y_dtype), weight[k], allowed)) return false;
      }
    }
    return true;
  }

  bool quantizes(const Kernels& kernels) {
    const Memory codes = make(p.M * p.K, true), scales = make(p.M * 4, false), y = make(p.M * p.K * 4, false);
    RowQuantization call{};
    call.M = p.M;
    call.K = p.K;
    call.x = p.x;
    call.x_dtype = p.x_dtype;
    call.x_stride = p.x_stride;
    call.diagonal = p.diagonal;
    call.block = p.block;
    call.input_scale = p.input_scale;
    call.codes = codes->as<int8_t>();
    call.scales = scales->as<float>();
    call.threads = p.threads;
    current = std::string(kernels.name) + " quantize_rows: " + text_of(p);
    const uint32_t key[] = {7, 9};
    call.key = key;  // codes that are not looked at, then those of rounding to the nearest over them
    call.e4m3 = p.M % 2 == 0 && p.input_scale == nullptr;
    if (!kernels.quantize_rows(call)) return false;
    call.key = nullptr;
    if (!kernels.quantize_rows(call)) return false;
    if (p.block != 0) {
      call.codes = nullptr;
      call.y = y->data;
      call.y_dtype = F32;
      if (!kernels.quantize_rows(call)) return false;
    }
    std::vector<double> row(static_cast<size_t>(p.K));
    for (int64_t m = 0; m < p.M; ++m) {
      row_of_x(m, row.data());
      for (int64_t k = 0; k < p.K && p.block != 0; ++k)
        if (differs(kernels, "transformed x", m, k, y->at(m * p.K + k, F32), row[k], 0)) return false;
      if (differs(kernels, "scale", m, 0, scales->at(m, F32), quantize(row.data()), 0)) return false;
      for (int64_t k = 0; k < p.K; ++k)
        if (differs(kernels, "code", m, k, codes->at(m * p.K + k, INT8), row[k], 0)) return false;
    }
    return true;
  }

  Product p;
  Memory x, qdata, scale, zero, bias, global, row_scale, input_scale, levels, ends, diagonal, offsets;
  std::vector<int64_t> starts;  // rows of x of each expert, and the end of the last
  std::vector<std::vector<double>> weight_rows;
};

// `rotate` of hf_quant.kernels.kv_attention, as it says.
void rotate(std::vector<float>& x) {
  const size_t block = x.size() & (~x.size() + 1);
  for (size_t half = 1; half < block; half *= 2) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (i / half % 2 != 0) continue;
      const float low = x[i], high = x[i + half];
      x[i] = low + high;
      x[i + half] = low - high;
    }
  }
  for (float& value : x) value *= static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
}

// One random attention over a cache, with its buffers.
class AttentionCase : RandomCall {
 public:
  AttentionCase(Random& random, bool has_bf16) : RandomCall(random) {
    p.B = 1 + random.below(2);
    p.H_kv = 1 + random.below(2);
    p.H = p.H_kv * (1 + random.below(5));
    p.D = random.of<int64_t>({16, 48, 64, 64, 80, 96, 128, 128, 256, 512});
    p.S = random.one_in(3) ? 1 + random.below(12) : 1;
    p.T = random.one_in(10) ? random.of<int64_t>({0, 1, 64, 255, 256, 257, 1025, 2050}) : random.below(300);
    if (p.S > 3 && p.T > 300) p.T = 300;
    if (random.one_in(10)) {  // more rows than a panel has
      p.S = 50 + random.below(60);
      p.T = random.of<int64_t>({0, 1, 63, 64, 65});
    }
    p.layout = random.of<int>({PACKED2, PACKED4, PACKED4, BYTES_INT, BYTES_FLOAT, VALUES});
    p.equally_spaced = p.layout <= PACKED4 && random.one_in(2);
    do {
      p.group_size = 16 * (1 + random.below(p.D / 16));
    } while (p.D % p.group_size != 0);
    p.groups = p.D / p.group_size;
    p.q_dtype = random.of<int>({F32, BF16, F16});
    p.causal = random.one_in(2);
    p.scale = static_cast<float>(random.between(0.05, 0.5));
    if (p.layout == VALUES) {
      p.group_size = p.D;
      p.groups = 1;
      p.by_bf16 = has_bf16 && !random.one_in(3);
    } else {
      p.window = p.causal && random.one_in(2) ? 1 + random.below(100) : 0;
      p.rotates = random.one_in(3);
      p.rotates_values = random.one_in(3);
    }
    const auto number = [&] { return random_.between(0.5, 2); };
    const bool has_more = p.layout != VALUES;
    if (has_more && random.one_in(3)) p.frame = static_cast<float*>(fill(frame, p.B * p.H_kv * 2 * p.D, F32, false, number));
    if (has_more && random.one_in(3)) p.first = static_cast<float*>(fill(lacking, p.B * p.H_kv * p.D, F32, false, number));
    if (p.first != nullptr && random.one_in(2)) {
      for (int64_t b = 0; b < p.B; ++b) starts[b] = random.below(p.T + 2);
      p.starts = starts;
      p.past = random.below(3);
    }
    if (has_more && p.S == 1 && p.first == nullptr && random.one_in(3)) make_kept();
    if (random.one_in(3)) p.softcap = static_cast<float>(random.between(1, 20));
    p.sinks_dtype = random.of<int>({F32, BF16, F16});
    if (random.one_in(3)) p.sinks = fill(sinks, p.H, p.sinks_dtype, false, [&] { return random_.between(-3, 3); });
    p.threads = static_cast<int>(1 + random.below(3));
    p.mask_dtype = random.of<int>({F32, INT8});

    const bool by_head = random.one_in(2);  // [B, H, S, D], else [B, S, H, D]
    const int64_t row = p.D + random.below(3);
    p.q_head = by_head ? row * p.S : row;
    p.q_position = by_head ? row : row * p.H;
    p.q_batch = row * p.S * p.H;
    p.q = fill(q, p.B * p.q_batch, p.q_dtype, false, [&] { return random_.between(-1, 1); });
    p.y_position = p.D;
    p.y_head = p.D * p.S;
    p.y_batch = p.y_head * p.H;
    int code = 0;
    divisor = random.one_in(2) ? 1 : 64;  // some kernels know the levels of e4m3
    if (has_more) p.levels = static_cast<float*>(fill(levels, 1 << bits_of(p.layout), F32, false, [&] {
      const int i = code++;
      if (p.layout == BYTES_FLOAT) return decode(static_cast<uint32_t>(i % 128 == 127 ? i - 1 : i), E4M3) / divisor;
      return p.equally_spaced ? double(i - 3) : random_.between(-3, 3);
    }));
    k = make_cache(p, p.k);
    v = make_cache(p, p.v);
    if (p.H_kv == 1 && p.kept == nullptr && random.one_in(2)) share();
    if (random.one_in(2)) {
      p.mask_position = random.one_in(2) ? 0 : p.T;
      p.mask_head = random.one_in(2) ? 0 : p.S * p.T;
      p.mask_batch = p.H * p.S * p.T;
      p.mask = fill(mask, p.B * p.mask_batch, p.mask_dtype, false, [&] {
        return p.mask_dtype == INT8 ? double(!random_.one_in(3)) : random_.between(-3, 0);
      });
    }
    has_parts = p.layout != VALUES && p.H == p.H_kv && !p.shares;
    if (has_parts) fill(summed, p.B * p.H * p.S * p.T, p.q_dtype, false, [&] { return random_.between(-1, 1); });
  }

  bool passes(const Kernels& kernels) {
    const Memory y = make(p.B * p.y_batch * element_size(p.q_dtype), false), lse = make(p.B * p.H * p.S * 4, false);
    Attention call = p;
    call.y = y->data;
    call.lse = lse->as<float>();
    char line[256];
    snprintf(line, sizeof line, "%s attention: B=%d H=%d/%d S=%d T=%d D=%d layout=%d group_size=%d window=%d", kernels.name,
             int(p.B), int(p.H), int(p.H_kv), int(p.S), int(p.T), int(p.D), p.layout, int(p.group_size), int(p.window));
    current = std::string(line) + (p.rotates ? " rotates" : "") + (p.rotates_values ? " values" : "") +
              (p.kept != nullptr ? " kept" : "") + (p.frame != nullptr ? " frame" : "") + (p.first != nullptr ? " first" : "") +
              (p.softcap > 0 ? " capped" : "") + (p.by_bf16 ? " by bf16" : "") +
              (p.shares ? " of " + std::to_string(more.D) + " more" : "") + (p.sinks != nullptr ? " sinks" : "");
    if (!kernels.attention(call)) return false;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t h = 0; h < p.H; ++h) {
        const int64_t kv = h / (p.H / p.H_kv);
        if (h % (p.H / p.H_kv) == 0) {
          keys = values_of(p, p.k, k, b, kv);
          if (p.shares) more_keys = values_of(more, more.k, more_codes, b, kv);
          const int64_t start = (p.starts == nullptr ? 0 : starts[b]) - p.past;
          for (int64_t d = 0; p.first != nullptr && start >= 0 && start < p.T && d < p.D; ++d)
            keys[start * p.D + d] += p.first[(b * p.H_kv + kv) * p.D + d];
          values = p.shares ? keys : values_of(p, p.v, v, b, kv);
          for (int64_t t = 0; t < p.T; ++t) put_kept(b, b * p.H_kv + kv, t);
        }
        for (int64_t s = 0; s < p.S; ++s)
          if (!row_passes(kernels, b, h, s, *y, *lse)) return false;
      }
    }
    return !has_parts || (part_passes(kernels, SCORES) && part_passes(kernels, SUMS));
  }

 private:
  struct Tensors {
    Memory codes, scale, offset;
  };

  void make_kept() {
    kept.sinks = random_.below(5);
    kept.recents = random_.one_in(3) ? 0 : random_.below(40);
    const int64_t numbers = p.B * p.H_kv * (kept.sinks + kept.recents + 1) * p.D;
    const auto number = [&] { return random_.between(-1, 1); };
    kept.k = static_cast<char*>(fill(kept_k, numbers, p.q_dtype, false, number));
    kept.v = static_cast<char*>(fill(kept_v, numbers, p.q_dtype, false, number));
    p.kept = &kept;
    if (random_.one_in(2)) return;
    for (int64_t& start : starts) start = random_.below(p.T + 2);
    p.starts = starts;
    p.past = random_.below(3);
  }

  // The place of token t among those that a head of sequence b keeps, -1 if it is read as codes, -2 if it is not read: padding
  // so near the end.
  int64_t slot_of(int64_t b, int64_t t) const {
    if (p.kept == nullptr) return -1;
    const int64_t position = p.past + t, number = position - (p.starts == nullptr ? 0 : starts[b]);
    if (number >= 0 && number < kept.sinks) return number;
    if (t < p.T - kept.recents) return -1;
    return number < 0 ? -2 : kept.sinks + position % kept.recents;
  }

  // The value of a kept token as the codes would have it.
  void put_kept(int64_t b, int64_t head, int64_t t) {
    const int64_t slot = slot_of(b, t), first = (head * (kept.sinks + kept.recents + 1) + slot) * p.D;
    if (slot < 0) return;
    std::vector<float> row(static_cast<size_t>(p.D));
    for (int64_t d = 0; d < p.D; ++d) row[d] = static_cast<float>(kept_v->at(first + d, p.q_dtype));
    if (p.rotates_values) rotate(row);
    std::copy(row.begin(), row.end(), values.begin() + static_cast<long>(t * p.D));
  }

  // The values are the keys, and there are more of these.
  void share() {
    p.v = p.k;
    p.shares = true;
    p.rotates_values = p.rotates;
    p.softcap = 0;
    p.sinks = nullptr;
    more = p;
    more.D = 16 * (1 + random_.below(8));
    if (p.layout != VALUES) more.group_size = random_.one_in(2) ? more.D : 16;
    if (p.layout == VALUES) more.group_size = more.D;
    more.groups = more.D / more.group_size;
    more.frame = nullptr;
    more.rotates = p.layout != VALUES && random_.one_in(3);
    more.q_head = more.D;
    more.q_position = more.D * p.H + random_.below(3);
    more.q_batch = more.q_position * p.S;
    more.q = fill(more_q, p.B * more.q_batch, p.q_dtype, false, [&] { return random_.between(-1, 1); });
    more.k = Cache{};
    more_codes = make_cache(more, more.k);
    p.more = &more;
  }

  Tensors make_cache(const Attention& p, Cache& cache) {
    Tensors made;
    if (p.layout == VALUES) {
      const int64_t row = p.D + random_.of<int64_t>({0, 0, 3}), size = element_size(p.q_dtype);
      cache.code_token = row * size;
      cache.code_head = cache.code_token * p.T;
      cache.code_batch = cache.code_head * p.H_kv;
      cache.codes = static_cast<uint8_t*>(
          fill(made.codes, p.B * p.H_kv * p.T * row, p.q_dtype, false, [&] { return random_.between(-1, 1); }));
      return made;
    }
    const int64_t bytes = p.D * bits_of(p.layout) / 8, rows = p.B * p.H_kv * p.T;
    cache.code_token = bytes + random_.of<int64_t>({0, 0, 3});
    cache.code_head = cache.code_token * p.T;
    cache.code_batch = cache.code_head * p.H_kv;
    made.codes = make(rows == 0 ? 0 : (rows - 1) * cache.code_token + bytes, false);
    for (int64_t i = 0; rows > 0 && i < (rows - 1) * cache.code_token + bytes; ++i) {
      const int64_t code = random_.below(256);
      made.codes->data[i] = static_cast<uint8_t>(p.layout == BYTES_FLOAT && code % 128 == 127 ? code - 1 : code);
    }
    cache.codes = made.codes->data;
    cache.scale_dtype = random_.of<int>({F32, BF16, F16});
    cache.scale_group = random_.of<int64_t>({1, 1, 2});
    cache.scale_token = p.groups * cache.scale_group;
    cache.scale_head = cache.scale_token * p.T;
    cache.scale_batch = cache.scale_head * p.H_kv;
    const int64_t scales = rows == 0 ? 0 : rows * cache.scale_token - cache.scale_group + 1;
    const double top = p.layout == BYTES_INT ? 128 : p.layout == BYTES_FLOAT && divisor == 1 ? 192 : 3;
    cache.scale = fill(made.scale, scales, cache.scale_dtype, false, [&] { return random_.between(0.5, 1) / top; });
    if (random_.one_in(2))
      cache.offset = fill(made.offset, scales, cache.scale_dtype, false, [&] { return random_.between(-0.3, 0.3); });
    return made;
  }

  // [T, D] of a head.
  std::vector<double> values_of(const Attention& p, const Cache& cache, const Tensors& tensors, int64_t b, int64_t h) const {
    const int bits = bits_of(p.layout);
    std::vector<double> values;
    for (int64_t t = 0; t < p.T; ++t) {
      const uint8_t* row = cache.codes + b * cache.code_batch + h * cache.code_head + t * cache.code_token;
      const int64_t first = b * cache.scale_batch + h * cache.scale_head + t * cache.scale_token;
      double scale = 0, offset = 0;
      for (int64_t d = 0; d < p.D; ++d) {
        if (p.layout == VALUES) {
          values.push_back(tensors.codes->at((row - cache.codes) / element_size(p.q_dtype) + d, p.q_dtype));
          continue;
        }
        if (d % p.group_size == 0) {
          const int64_t at = first + d / p.group_size * cache.scale_group;
          scale = tensors.scale->at(at, cache.scale_dtype);
          offset = cache.offset == nullptr ? 0.0 : tensors.offset->at(at, cache.scale_dtype);
        }
        const int code = row[d * bits / 8] >> (d * bits % 8) & ((1 << bits) - 1);
        const double level = p.layout == BYTES_INT ? static_cast<int8_t>(code) : p.levels[code];
        values.push_back(level * scale + offset);
      }
    }
    return values;
  }

  bool row_passes(const Kernels& kernels, int64_t b, int64_t h, int64_t s, const Buffer& y, const Buffer& lse) const {
    const int64_t last = p.causal ? p.T - p.S + s : p.T - 1;
    std::vector<double> weight(static_cast<size_t>(p.T), 0.0), out(static_cast<size_t>(p.D), 0.0);
    const int64_t kv = b * p.H_kv + h / (p.H / p.H_kv);
    double missing = 0;
    const std::vector<float> row = query_of(p, *q, b, h, s, kv, missing);
    const std::vector<float> more_row = p.shares ? query_of(more, *more_q, b, h, s, kv, missing) : row;
    double sum = 0;
    for (int64_t t = 0; t <= last; ++t) {
      if (p.window != 0 && t <= last - p.window) continue;
      double score = 0;
      const int64_t slot = slot_of(b, t), first = (kv * (kept.sinks + kept.recents + 1) + slot) * p.D;
      if (slot == -2) continue;
      for (int64_t d = 0; slot >= 0 && d < p.D; ++d)
        score += q->at(b * p.q_batch + h * p.q_head + d, p.q_dtype) * kept_k->at(first + d, p.q_dtype);
      if (slot >= 0) score -= missing / p.scale;
      for (int64_t d = 0; slot < 0 && d < p.D; ++d) score += double(row[d]) * keys[t * p.D + d];
      for (int64_t d = 0; p.shares && d < more.D; ++d) score += double(more_row[d]) * more_keys[t * more.D + d];
      score *= p.scale;
      if (p.softcap > 0) score = p.softcap * std::tanh((score + missing) / p.softcap);
      const int64_t at = b * p.mask_batch + h * p.mask_head + s * p.mask_position + t;
      if (p.mask != nullptr && p.mask_dtype == F32) score += mask->at(at, F32);
      weight[t] = p.mask != nullptr && p.mask_dtype == INT8 && mask->at(at, INT8) == 0 ? 0.0 : std::exp(score);
      sum += weight[t];
    }
    const float found = bits_to_float(load<uint32_t>(lse.data, (b * p.H + h) * p.S + s));
    if (sum == 0 ? found != -INFINITY : !(std::fabs(found - std::log(sum)) <= 1e-4)) {
      fprintf(stderr, "%s: log-sum-exp is %g, not %g\n", kernels.name, found, std::log(sum));
      return false;
    }
    if (p.sinks != nullptr) sum += std::exp(sinks->at(h, p.sinks_dtype) - (p.softcap > 0 ? 0 : missing));
    std::vector<double> magnitude(static_cast<size_t>(p.D), 0.0);
    for (int64_t t = 0; t < p.T; ++t) {
      for (int64_t d = 0; weight[t] != 0 && d < p.D; ++d) {
        out[d] += weight[t] / sum * values[t * p.D + d];
        magnitude[d] += weight[t] / sum * std::fabs(values[t * p.D + d]);
      }
    }
    if (p.rotates_values) {
      std::vector<float> turned(out.begin(), out.end());
      rotate(turned);
      out.assign(turned.begin(), turned.end());
    }
    for (int64_t d = 0; p.shares && p.frame != nullptr && sum != 0 && d < p.D; ++d)
      out[d] = out[d] * p.frame[(2 * kv + 1) * p.D + d] + p.frame[2 * kv * p.D + d];
    for (int64_t d = 0; d < p.D; ++d) {
      const double value = y.at(b * p.y_batch + h * p.y_head + s * p.y_position + d, p.q_dtype);
      // Weights that meet values are rounded to their dtype first.
      const double weights = p.layout == VALUES ? rounding(magnitude[d], p.q_dtype) : 0;
      if (std::fabs(value - out[d]) <= 1e-4 + weights + rounding(out[d], p.q_dtype)) continue;
      fprintf(stderr, "%s: y[%d, %d, %d, %d] is %.9g, not %.9g\n", kernels.name, int(b), int(h), int(s), int(d), value,
              out[d]);
      return false;
    }
    return true;
  }

  // A row of queries as it meets keys; `missing`: the score of what all of these lack.
  std::vector<float> query_of(const Attention& p, const Buffer& q, int64_t b, int64_t h, int64_t s, int64_t kv,
                              double& missing) const {
    std::vector<float> row(static_cast<size_t>(p.D));
    for (int64_t d = 0; d < p.D; ++d)
      row[d] = static_cast<float>(q.at(b * p.q_batch + h * p.q_head + s * p.q_position + d, p.q_dtype));
    for (int64_t d = 0; p.frame != nullptr && d < p.D; ++d) {
      missing += double(row[d]) * p.frame[2 * kv * p.D + d] * p.scale;
      row[d] *= p.frame[(2 * kv + 1) * p.D + d];
    }
    if (p.rotates) rotate(row);
    for (float& x : row) {  // what is not rotated is rounded already
      if (p.q_dtype == BF16) x = bf16_to_float(float_to_bf16(x));
      if (p.q_dtype == F16) x = f16_to_float(float_to_f16(x));
    }
    return row;
  }

  // One of the two products alone, of rows in the basis of the codes or in another one.
  bool part_passes(const Kernels& kernels, AttentionPart part) {
    const bool is_sum = part == SUMS;
    const int64_t columns = is_sum ? p.D : p.T, width = is_sum ? p.T : p.D;
    const Memory y = make(p.B * p.H * p.S * columns * element_size(p.q_dtype), false);
    Attention call = p;
    call.part = part;
    if (p.rotates) {
      const int64_t block = p.D & -p.D;
      call.block = random_.one_in(2) ? block : min64(16, block);
      call.diagonal = static_cast<float*>(fill(diagonal, p.D, F32, false, [&] { return random_.between(0.5, 2); }));
    }
    call.y = y->data;
    call.y_position = columns;
    call.y_head = columns * p.S;
    call.y_batch = call.y_head * p.H;
    if (is_sum) {
      call.q = summed->data;
      call.q_position = width;
      call.q_head = width * p.S;
      call.q_batch = call.q_head * p.H;
    }
    current += is_sum ? " sums" : " scores";
    if (!kernels.attention(call)) return false;
    for (int64_t head = 0; head < p.B * p.H; ++head) {
      const int64_t b = head / p.H, h = head % p.H;
      const std::vector<double> codes = is_sum ? values_of(p, p.v, v, b, h) : values_of(p, p.k, k, b, h);
      for (int64_t s = 0; s < p.S; ++s) {
        std::vector<float> row(static_cast<size_t>(width));
        for (int64_t i = 0; i < width; ++i) {
          const int64_t at = b * call.q_batch + h * call.q_head + s * call.q_position + i;
          row[i] = static_cast<float>((is_sum ? summed : q)->at(at, p.q_dtype));
        }
        if (call.block != 0 && !is_sum) rotate_blocks(row, *diagonal, call.block, true);
        std::vector<float> sums(static_cast<size_t>(columns));
        std::vector<double> sizes(sums.size(), 0.0);
        for (int64_t c = 0; c < columns; ++c) {
          double sum = 0;
          for (int64_t i = 0; i < width; ++i) {
            const double product = double(row[i]) * p.scale * codes[is_sum ? i * p.D + c : c * p.D + i];
            sum += product;
            sizes[c] += std::fabs(product);
          }
          sums[c] = static_cast<float>(sum);
        }
        if (call.block != 0 && is_sum) {  // by factors of up to 2
          rotate_blocks(sums, *diagonal, call.block, false);
          sizes.assign(sizes.size(), 2 * *std::max_element(sizes.begin(), sizes.end()));
        }
        for (int64_t c = 0; c < columns; ++c) {
          const double found = y->at((head * p.S + s) * columns + c, p.q_dtype);
          if (std::fabs(found - sums[c]) <= 1e-5 * sizes[c] + rounding(sums[c], p.q_dtype)) continue;
          fprintf(stderr, "%s: part %d, y[%d, %d, %d] is %.9g, not %.9g\n", kernels.name, part, int(head), int(s), int(c),
                  found, sums[c]);
          return false;
        }
      }
    }
    return true;
  }

  // Each block of columns times its Hadamard matrix, of what was multiplied with the diagonal first, or is then.
  static void rotate_blocks(std::vector<float>& x, const Buffer& diagonal, int64_t block, bool first) {
    const auto scale = [&] {
      for (size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(diagonal.at(static_cast<int64_t>(i), F32));
    };
    if (first) scale();
    for (size_t at = 0; at < x.size(); at += static_cast<size_t>(block)) {
      std::vector<float> part(x.begin() + static_cast<long>(at), x.begin() + static_cast<long>(at) + block);
      rotate(part);
      std::copy(part.begin(), part.end(), x.begin() + static_cast<long>(at));
    }
    if (!first) scale();
  }

  Attention p{}, more{};
  Kept kept{};
  int64_t starts[2];
  bool has_parts;
  int divisor;  // of the levels of e4m3
  Memory q, levels, mask, frame, lacking, sinks, summed, more_q, diagonal, kept_k, kept_v;
  Tensors k, v, more_codes;
  std::vector<double> keys, values, more_keys;  // of the head that is checked
};

// One random weight to be quantized, with its buffers.
class QuantizationCase : RandomCall {
 public:
  explicit QuantizationCase(Random& random) : RandomCall(random) {
    q.matrices = 1 + random.below(3);
    q.N = 1 + random.below(12);
    q.K = random.one_in(6) ? random.of<int64_t>({1, 31, 32, 128, 4096, 4097}) : 1 + random.below(700);
    q.group_size = random.one_in(3) ? q.K : random.of<int64_t>({1, 3, 15, 16, 17, 32, 48, 64, 100, 128, 256, 1024});
    q.groups = ceil_div(q.K, q.group_size);
    q.weight_dtype = random.of<int>({F32, BF16, F16});
    q.row_stride = q.K + (random.one_in(4) ? random.below(40) : 0);
    q.matrix_stride = q.N * q.row_stride + (random.one_in(4) ? random.below(40) : 0);
    q.layout = random.of<int>({PACKED2, PACKED3, PACKED4, PACKED4, PACKED6, BYTES_INT, BYTES_FLOAT});
    bits = bits_of(q.layout);
    q.row_bytes = bits == 8 ? q.K : ceil_div(q.K, 32) * 4 * bits;
    q.scale_dtype = random.of<int>({F32, BF16, F16, E8M0, E4M3});
    q.threads = static_cast<int>(1 + random.below(3));
    choose_grid();
    const double scale = random.of({1.0, 1e-3, 1e3});
    const int64_t weights = (q.matrices - 1) * q.matrix_stride + (q.N - 1) * q.row_stride + q.K;
    q.weight = fill(weight, weights, q.weight_dtype, true, [&] {
      return random_.one_in(9) ? 0.0 : scale * random_.between(-1, 1) * random_.between(0, 1);
    });
    if (random.one_in(8)) {
      broken = random.below(q.matrices * q.N * q.K);
      weight->put(place_of(broken), q.weight_dtype, infinity_of(q.weight_dtype) | random.below(2));  // inf or NaN
    }
    if (q.scale_dtype == E4M3) {
      auto unit = [&] { return scale * random_.between(0.5, 1) / 448; };
      q.global_scale = static_cast<float*>(fill(global, q.matrices, F32, false, unit));
    }
    const double shrinks[] = {1.0, 0.9, 0.8, 0.05, 0.025};
    int i = 0;
    q.shrinks = static_cast<float*>(fill(factors, 5, F32, false, [&] { return shrinks[i++]; }));
    q.steps = q.shrinks + 3;
    q.num_shrinks = random.one_in(4) ? 0 : static_cast<int>(random.below(4));
    if (q.num_shrinks > 0 && q.scale_dtype != E8M0) {
      q.num_steps = static_cast<int>(random.below(3));
      q.turns = !has_zero && integers && random.one_in(2);
      q.mirrors = !has_zero && random.one_in(2);
      q.moves = has_zero && random.one_in(2);
      q.fits = random.one_in(2);
      q.norm = random.one_in(3);
    }
  }

  // Whether the kernels compute what they should, and the same as the first that were asked.
  bool passes(const Kernels& kernels) {
    Result result(*this), absmax(*this);
    WeightQuantization plain = q;
    plain.num_shrinks = plain.num_steps = plain.norm = plain.fits = plain.turns = plain.mirrors = 0;
    if (!call(kernels, q, result) || !call(kernels, plain, absmax)) return false;
    if (broken >= 0) return true;
    std::vector<uint8_t> bytes = result.bytes(*this);
    if (first.empty()) first = bytes;
    if (bytes != first) return wrong(kernels, "differs from the others", 0, 0);
    for (int64_t row = 0; row < q.matrices * q.N; ++row) {
      for (int64_t k = q.K; bits != 8 && k < ceil_div(q.K, 32) * 32; ++k)
        if (code_of(result.qdata->data + row * q.row_bytes, q.layout, k) != 0) return wrong(kernels, "padding", row, k);
      for (int64_t g = 0; g < q.groups; ++g)
        if (!group_passes(kernels, result, absmax, row, g)) return false;
    }
    return true;
  }

 private:
  struct Result {
    explicit Result(QuantizationCase& of)
        : qdata(of.make(of.q.matrices * of.q.N * of.q.row_bytes, true)),
          scale(of.make(of.scales() * element_size(of.q.scale_dtype), false)),
          zero(of.make(of.scales(), true)) {}
    std::vector<uint8_t> bytes(const QuantizationCase& of) const {
      std::vector<uint8_t> all(qdata->data, qdata->data + of.q.matrices * of.q.N * of.q.row_bytes);
      all.insert(all.end(), scale->data, scale->data + of.scales() * element_size(of.q.scale_dtype));
      all.insert(all.end(), zero->data, zero->data + of.scales());
      return all;
    }
    Memory qdata, scale, zero;
  };

  void choose_grid() {
    integers = q.layout <= PACKED3 || q.layout == BYTES_INT || (q.layout == PACKED4 && random_.one_in(2));
    const int codes = 1 << bits;
    if (integers) {
      q.low = bits == 8 ? -127 : -codes / 2;
      q.high = bits == 8 ? 127 : codes / 2 - 1;
      q.max = bits == 8 ? 127.0f : static_cast<float>(codes / 2 - 0.5);
      has_zero = bits != 8 && random_.one_in(2);
      for (int i = 0; i < codes; ++i) grid.push_back(bits == 8 ? std::max<int>(static_cast<int8_t>(i), q.low) : q.low + i);
    } else if (q.layout == PACKED4 && random_.one_in(2)) {
      for (int i = 0; i < 16; ++i) grid.push_back((i - 7) * (i < 7 ? 0.125 : 0.1328125) + (i == 2 ? 0.0625 : 0));
      q.max = static_cast<float>(grid.back());
      std::vector<double> all = grid;
      for (int i = 0; i < 15; ++i) all.push_back((grid[i] + grid[i + 1]) / 2);
      int i = 0;
      q.levels = static_cast<float*>(fill(levels, 31, F32, false, [&] { return all[i++]; }));
    } else {
      q.exponent_bits = bits == 4 ? 2 : bits == 6 ? 3 : 4;
      q.mantissa_bits = bits - 1 - q.exponent_bits;
      q.exponent_bias = (1 << (q.exponent_bits - 1)) - 1;
      for (int i = 0; i < codes; ++i) {
        const int magnitude = i & (codes / 2 - 1), exponent = magnitude >> q.mantissa_bits;
        const double fraction = scaled(magnitude & ((1 << q.mantissa_bits) - 1), -q.mantissa_bits);
        const double value = scaled(exponent == 0 ? fraction : 1 + fraction, (exponent == 0 ? 1 : exponent) - q.exponent_bias);
        if (bits == 8 && magnitude == 127) continue;  // NaN, the last of its sign
        grid.push_back(i >= codes / 2 ? -value : value);
        q.max = std::fmax(q.max, static_cast<float>(value));
      }
    }
  }

  static uint32_t infinity_of(int dtype) { return dtype == F32 ? 0x7f800000 : dtype == BF16 ? 0x7f80 : 0x7c00; }

  int64_t scales() const { return q.matrices * q.N * q.groups; }

  int64_t place_of(int64_t i) const {
    return i / (q.N * q.K) * q.matrix_stride + i / q.K % q.N * q.row_stride + i % q.K;
  }

  bool wrong(const Kernels& kernels, const char* what, int64_t row, int64_t at) const {
    fprintf(stderr, "%s: %s, in row %lld at %lld\n", kernels.name, what, static_cast<long long>(row),
            static_cast<long long>(at));
    return false;
  }

  bool call(const Kernels& kernels, WeightQuantization p, Result& result) {
    p.qdata = result.qdata->data;
    p.scale = result.scale->data;
    p.zero = has_zero ? result.zero->data : nullptr;
    auto number = [](int64_t value) { return static_cast<long long>(value); };
    char line[512];
    snprintf(line, sizeof line,
             "%s quantize: %lld x %lld x %lld group_size=%lld strides=%lld, %lld dtype=%d layout=%d scale_dtype=%d zero=%d "
             "exponent_bits=%d levels=%d shrinks=%d steps=%d turns=%d mirrors=%d moves=%d fits=%d norm=%d threads=%d",
             kernels.name, number(p.matrices), number(p.N), number(p.K), number(p.group_size), number(p.matrix_stride),
             number(p.row_stride), p.weight_dtype, p.layout, p.scale_dtype, has_zero, p.exponent_bits,
             p.levels != nullptr, p.num_shrinks, p.num_steps, p.turns, p.mirrors, p.moves, p.fits, p.norm, p.threads);
    current = line;
    bool finite;
    if (!kernels.quantize(p, &finite)) return wrong(kernels, "no memory", 0, 0);
    return finite == (broken < 0) || wrong(kernels, "finite", 0, 0);
  }

  // The squared error of a group, and whether its codes are the nearest.
  bool decode_group(const Result& result, int64_t row, int64_t g, double* error) const {
    const double unit = q.global_scale == nullptr ? 1 : q.global_scale[row / q.N];
    const double scale = result.scale->at(row * q.groups + g, q.scale_dtype) * unit;
    const double zero = has_zero ? result.zero->data[row * q.groups + g] + q.low : 0;
    bool nearest = true;
    *error = 0;
    for (int64_t k = g * q.group_size; k < std::min(q.K, (g + 1) * q.group_size); ++k) {
      const double x = weight->at(place_of(row * q.K + k), q.weight_dtype) / scale + zero;
      uint32_t code = code_of(result.qdata->data + row * q.row_bytes, q.layout, k);
      if (grid.size() == 254 && code > 127) --code;  // two codes are NaN
      const double distance = std::fabs(grid[code] - x);
      for (double level : grid)
        nearest &= distance <= std::fabs(level - x) + scaled(std::fabs(x) + std::fabs(zero), -21);
      *error += distance * scale * distance * scale;
    }
    return nearest;
  }

  bool group_passes(const Kernels& kernels, const Result& result, const Result& absmax, int64_t row, int64_t g) const {
    double found, allowed, weights = 0;
    if (!decode_group(absmax, row, g, &allowed)) return wrong(kernels, "absmax, not the nearest code", row, g);
    const bool nearest = decode_group(result, row, g, &found);
    if (q.norm) return true;  // codes are those of another scale
    if (!nearest) return wrong(kernels, "not the nearest code", row, g);
    for (int64_t k = g * q.group_size; k < std::min(q.K, (g + 1) * q.group_size); ++k)
      weights += std::pow(weight->at(place_of(row * q.K + k), q.weight_dtype), 2);
    if (found > allowed * (1 + 1e-5) + 1e-12 * weights) return wrong(kernels, "a larger error than absmax", row, g);
    return true;
  }

  WeightQuantization q{};
  int bits = 8;
  bool integers = false, has_zero = false;
  int64_t broken = -1;  // which weight is not finite
  std::vector<double> grid;  // value of each code
  std::vector<uint8_t> first;  // what the first kernels gave
  Memory weight, global, factors, levels;
};

// New keys and values for a cache, random strides of which have gaps that nobody may write to.
class AppendCase : RandomCall {
 public:
  explicit AppendCase(Random& random) : RandomCall(random) {
    p.B = 1 + random.below(2);
    p.H = 1 + random.below(3);
    p.S = random.one_in(4) ? random.below(60) : 1 + random.below(3);
    tokens = p.S + random.below(4);
    p.start = random.below(tokens - p.S + 1);
    p.layout = random.of<int>({PACKED2, PACKED4, PACKED4, BYTES_INT, BYTES_FLOAT, VALUES});
    p.x_dtype = random.of<int>({F32, BF16, F16});
    p.threads = static_cast<int>(1 + random.below(3));
    make_heads(p.k, k);
    make_heads(p.v, v);
    if (p.layout == VALUES) return;
    p.k.rotates = random.one_in(2);
    p.v.rotates = random.one_in(3);
    p.begins = random.one_in(3);
    if (p.begins || random.one_in(2))
      p.k.frame = static_cast<float*>(
          fill(frame, p.B * p.H * 2 * p.k.D, F32, false, [&] { return random_.between(0.3, 2); }));
    if (p.begins && random.one_in(2))
      p.first_lacks = static_cast<float*>(fill(lacks, p.B * p.H * p.k.D, F32, false, [] { return 0; }));
    for (int64_t& start : starts) start = p.begins && p.S > 0 && random.one_in(2) ? random.below(p.S) : 0;
    if (starts[0] + starts[1] > 0) p.starts = starts;
    if (p.S != 1 || p.begins || random.one_in(2)) return;
    kept.sinks = random.below(5);
    kept.recents = random.below(9);
    for (int64_t& start : starts) start = random.below(4);
    p.starts = starts;
    p.position = 4 + random.below(20);
  }

  // Whether what is written is right, the same as by the first kernels that were asked, and nothing else is.
  bool passes(const Kernels& kernels) {
    Append call = p;
    Result keys(*this, p.k), values(*this, p.v);
    keys.give(call.k);
    values.give(call.v);
    char line[256];
    snprintf(line, sizeof line,
             "%s append: B=%d H=%d S=%d start=%d layout=%d dtype=%d D=%d, %d groups=%d, %d rotates=%d scale_dtype=%d, %d "
             "begins=%d",
             kernels.name, int(p.B), int(p.H), int(p.S), int(p.start), p.layout, p.x_dtype, int(p.k.D), int(p.v.D),
             int(p.k.groups), int(p.v.groups), p.k.rotates, p.k.scale_dtype, p.v.scale_dtype, p.begins);
    current = line;
    const int64_t slots = p.position == 0 ? 0 : p.B * p.H * (kept.sinks + kept.recents + 1) * element_size(p.x_dtype);
    const Memory kept_k = make(slots * p.k.D, true), kept_v = make(slots * p.v.D, true);
    kept.k = reinterpret_cast<char*>(kept_k->data);
    kept.v = reinterpret_cast<char*>(kept_v->data);
    call.kept = slots == 0 ? nullptr : &kept;
    kernels.append(call);
    if (slots != 0 && !(kept_passes(p.k, *k, *kept_k) && kept_passes(p.v, *v, *kept_v))) return wrong(kernels, "kept");
    std::vector<uint8_t> bytes;
    keys.add_to(bytes);
    values.add_to(bytes);
    if (p.begins) bytes.insert(bytes.end(), frame->data, frame->data + p.B * p.H * 2 * p.k.D * 4);
    if (p.first_lacks != nullptr) bytes.insert(bytes.end(), lacks->data, lacks->data + p.B * p.H * p.k.D * 4);
    if (!first.empty()) return bytes == first || wrong(kernels, "differs from the others");
    first = bytes;
    for (int64_t head = 0; p.begins && head < p.B * p.H; ++head)
      if (!frame_passes(kernels, head / p.H, head % p.H)) return false;
    for (auto [heads, x, result] : {Part{&p.k, &k, &keys}, Part{&p.v, &v, &values}}) {
      for (int64_t row = 0; row < p.B * p.H * p.S; ++row)
        if (!row_passes(kernels, *heads, **x, *result, row % p.S, row / p.S % p.H, row / p.S / p.H)) return false;
      if (!result->untouched()) return wrong(kernels, "something else was written to");
    }
    return true;
  }

 private:
  struct Result {
    Result(AppendCase& of, const AppendedHeads& heads)
        : codes(of.make(sizes[0] = of.p.B * heads.code_batch, true)),
          scale(of.make(sizes[1] = of.p.B * heads.scale_batch * element_size(heads.scale_dtype), true)),
          offset(of.make(sizes[2] = of.p.B * heads.offset_batch * element_size(heads.scale_dtype), true)) {}
    void give(AppendedHeads& heads) const {
      heads.codes = codes->data;
      heads.scale = scale->data;
      heads.offset = heads.offset_batch == 0 ? nullptr : offset->data;
    }
    void add_to(std::vector<uint8_t>& bytes) const {
      int i = 0;
      for (const Memory* part : {&codes, &scale, &offset}) {
        bytes.insert(bytes.end(), (*part)->data, (*part)->data + sizes[i]);
        ++i;
      }
    }
    // Whether all that was not read, which makes it garbage again, is garbage.
    bool untouched() const {
      std::vector<uint8_t> bytes;
      add_to(bytes);
      return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == kGarbage; });
    }
    static double take(const Memory& memory, int64_t i, int dtype) {
      const double value = memory->at(i, dtype);
      memset(memory->data + i * element_size(dtype), kGarbage, static_cast<size_t>(element_size(dtype)));
      return value;
    }
    int64_t sizes[3];
    Memory codes, scale, offset;
  };

  struct Part {
    const AppendedHeads* heads;
    const Memory* x;
    const Result* result;
  };

  void make_heads(AppendedHeads& heads, Memory& x) {
    const bool packed = p.layout < BYTES_INT;
    const int64_t unit = packed ? 32 / bits_of(p.layout) : 1, element = packed ? 4 : 1;
    heads.D = unit * (1 + random_.below(random_.one_in(3) ? kMaxHeadDim / unit : 12));
    do {
      heads.groups = 1 + random_.below(std::min<int64_t>(heads.D, 40));
    } while (heads.D % heads.groups != 0);
    const bool by_head = random_.one_in(2);
    const int64_t row = heads.D + random_.below(3);
    heads.x_head = by_head ? row * p.S : row;
    heads.x_token = by_head ? row : row * p.H;
    heads.x_batch = row * p.S * p.H;
    heads.x = fill(x, p.B * heads.x_batch, p.x_dtype, true,
                   [&] { return random_.between(-1, 1) * random_.between(0, 1); });
    if (p.layout == VALUES) {
      heads.groups = 1;
      heads.code_token = element_size(p.x_dtype) * (heads.D + random_.below(3));
      heads.code_head = heads.code_token * tokens;
      heads.code_batch = heads.code_head * p.H;
      return;
    }
    heads.code_element = element * random_.of<int64_t>({1, 1, 2});
    heads.code_token = heads.D / unit * heads.code_element + random_.of<int64_t>({0, 0, 3});
    heads.code_head = heads.code_token * tokens;
    heads.code_batch = heads.code_head * p.H;
    heads.scale_dtype = random_.of<int>({F32, BF16, F16});
    heads.scale_group = random_.of<int64_t>({1, 1, 2});
    heads.scale_token = heads.groups * heads.scale_group;
    heads.scale_head = heads.scale_token * tokens + random_.below(2);
    heads.scale_batch = heads.scale_head * p.H;
    if (!packed) return;
    heads.offset_token = random_.of<int64_t>({1, 2});
    heads.offset_group = heads.offset_token * tokens;
    heads.offset_head = heads.offset_group * heads.groups;
    heads.offset_batch = heads.offset_head * p.H;
  }

  bool wrong(const Kernels& kernels, const char* what) const {
    fprintf(stderr, "%s: %s\n", kernels.name, what);
    return false;
  }

  // Whether the token lies in its places among the kept ones, and nothing else does.
  bool kept_passes(const AppendedHeads& heads, const Buffer& x, const Buffer& found) const {
    const int64_t row = heads.D * element_size(p.x_dtype), each = kept.sinks + kept.recents + 1;
    for (int64_t head = 0; head < p.B * p.H; ++head) {
      const int64_t b = head / p.H, h = head % p.H, number = p.position - starts[b];
      const uint8_t* from = x.data + (b * heads.x_batch + h * heads.x_head) * element_size(p.x_dtype);
      for (int64_t slot = 0; slot < each; ++slot) {
        const bool is_last = kept.recents > 0 && slot == kept.sinks + p.position % kept.recents;
        const uint8_t* to = found.data + (head * each + slot) * row;
        const bool is_there = is_last || (slot < kept.sinks && slot == number);
        if (is_there ? memcmp(to, from, static_cast<size_t>(row)) != 0
                     : !std::all_of(to, to + row, [](uint8_t byte) { return byte == kGarbage; }))
          return false;
      }
    }
    return true;
  }

  // Whether the frame of a head is the mean and the spread of its keys but the first one; `row_passes` works with it.
  bool frame_passes(const Kernels& kernels, int64_t b, int64_t h) const {
    const float* found = p.k.frame + (b * p.H + h) * 2 * p.k.D;
    const int64_t from = starts[b] + 1;
    const double count = static_cast<double>(p.S - from);
    std::vector<double> means, variances;
    double whole = 0;
    for (int64_t d = 0; d < p.k.D; ++d) {
      double sum = 0, squares = 0;
      const auto key = [&](int64_t t) { return k->at(b * p.k.x_batch + h * p.k.x_head + t * p.k.x_token + d, p.x_dtype); };
      for (int64_t t = from; t < p.S; ++t) sum += key(t);
      means.push_back(p.S > from ? sum / count : 0);
      for (int64_t t = from; t < p.S; ++t) squares += std::pow(key(t) - means.back(), 2);
      variances.push_back(p.S > from ? squares / count : 0);
      whole += variances.back() / static_cast<double>(p.k.D);
    }
    for (int64_t d = 0; d < p.k.D; ++d) {
      const double spread = whole > 1e-12 ? std::pow((count * variances[d] + whole) / ((count + 1) * whole), 0.25) : 1;
      if (!(std::fabs(found[d] - means[d]) < 1e-5) || !(std::fabs(found[p.k.D + d] - spread) < 1e-3))
        return wrong(kernels, "frame");
    }
    return true;
  }

  // Each code is nearer to its value than the next ones are, and scales are as good as those of the range of values.
  bool row_passes(const Kernels& kernels, const AppendedHeads& heads, const Buffer& x, const Result& result, int64_t t,
                  int64_t h, int64_t b) const {
    const int bits = p.layout == VALUES ? 0 : bits_of(p.layout);
    const int64_t token = p.start + t, size = heads.D / heads.groups;
    const int64_t element = bits == 8 ? 1 : 4;
    const int64_t row = b * heads.code_batch + h * heads.code_head + token * heads.code_token;
    if (p.layout == VALUES) {
      const int64_t value = element_size(p.x_dtype), at = b * heads.x_batch + h * heads.x_head + t * heads.x_token;
      uint8_t* written = result.codes->data + row;
      const bool equal = memcmp(written, x.data + at * value, static_cast<size_t>(heads.D * value)) == 0;
      memset(written, kGarbage, static_cast<size_t>(heads.D * value));
      return equal || wrong(kernels, "other values");
    }
    const int64_t scales = b * heads.scale_batch + h * heads.scale_head + token * heads.scale_token;
    const int64_t offsets = b * heads.offset_batch + h * heads.offset_head + token * heads.offset_token;
    std::vector<float> values(static_cast<size_t>(heads.D));
    for (int64_t d = 0; d < heads.D; ++d)
      values[d] = static_cast<float>(x.at(b * heads.x_batch + h * heads.x_head + t * heads.x_token + d, p.x_dtype));
    if (heads.frame != nullptr) {
      const float* mean = heads.frame + (b * p.H + h) * 2 * heads.D;
      for (int64_t d = 0; d < heads.D; ++d) values[d] = (values[d] - mean[d]) * (1.0f / mean[heads.D + d]);
    }
    if (heads.rotates) rotate(values);
    std::vector<uint8_t> codes;
    for (int64_t i = 0; i < heads.D * bits / 8; ++i) {
      uint8_t& code = result.codes->data[row + i / element * heads.code_element + i % element];
      codes.push_back(code);
      code = kGarbage;
    }
    for (int64_t g = 0; g < heads.groups; ++g) {
      const double scale = result.take(result.scale, scales + g * heads.scale_group, heads.scale_dtype);
      const double offset =
          bits == 8 ? 0 : result.take(result.offset, offsets + g * heads.offset_group, heads.scale_dtype);
      const auto value_of = [&](uint32_t code) {
        const double level = p.layout == BYTES_FLOAT ? decode(code, E4M3)
                             : p.layout == BYTES_INT ? decode(code, INT8)
                                                     : double(code) - (1 << (bits - 1));
        return level * scale + offset;
      };
      const auto [low, high] = std::minmax_element(values.begin() + g * size, values.begin() + (g + 1) * size);
      const double most = (1 << bits) - 1, span = (double(*high) - *low) * (bits == 2 ? 0.75 : 1);
      const double start = (double(*high) + *low - span) / 2, step = span / most;
      double error = 0, allowed = 0;
      for (int64_t d = g * size; d < (g + 1) * size; ++d) {
        const int own = static_cast<int>(code_of(codes.data(), p.layout, d));
        const double found = std::fabs(value_of(own) - values[d]);
        if (&heads == &p.k && t == starts[b] && p.first_lacks != nullptr &&
            !(std::fabs(std::fabs(p.first_lacks[(b * p.H + h) * heads.D + d]) - found) < 1e-5 + 1e-6 * std::fabs(offset)))
          return wrong(kernels, "what the first key's codes lack");
        for (int code = std::max(own - 3, 0); code <= std::min(own + 3, (1 << bits) - 1); ++code) {
          if (bits == 8 && (p.layout == BYTES_INT ? code == 128 : code % 128 == 127)) continue;  // -128 and NaN
          if (found > std::fabs(value_of(code) - values[d]) + 1e-6 * (scale + std::fabs(offset) + std::fabs(values[d])))
            return wrong(kernels, "not the nearest code");
        }
        error += found * found;
        const double level = step == 0 ? 0 : std::nearbyint((values[d] - start) / step);
        const double by_range = std::min(std::max(level, 0.0), most);
        allowed += std::pow(start + by_range * step - values[d], 2);
      }
      const double top = std::max(std::fabs(double(*low)), std::fabs(double(*high))), slack = top / 100 + 1e-6;
      const double largest = p.layout == BYTES_FLOAT ? 448 : 127;
      const double rounded = rounding(scale, heads.scale_dtype) * largest + 1e-6 * top;
      if (bits != 8 && std::sqrt(error) > std::sqrt(allowed) + slack * std::sqrt(double(size)))
        return wrong(kernels, "a larger error than by the range");
      if (bits == 8 && top > 1e-3 && std::fabs(scale * largest - top) > rounded)
        return wrong(kernels, "scale");
    }
    return true;
  }

  Append p{};
  Kept kept{};
  int64_t starts[2];
  int64_t tokens;  // of the caches
  std::vector<uint8_t> first;  // what the first kernels gave
  Memory k, v, frame, lacks;
};

// Two steps of AdamW: parameters and moments stay finite, and every instruction set gives the same bytes.
class AdamCase : RandomCall {
 public:
  explicit AdamCase(Random& random) : RandomCall(random) {
    a.N = random.one_in(6) ? 70 : 1 + random.below(5);
    a.K = random.one_in(6) ? random.of<int64_t>({128, 255, 256, 1024}) : 1 + random.below(700);
    a.param_dtype = random.of<int>({F32, BF16});
    a.grad_dtype = random.of<int>({F32, BF16});
    a.states = random.of<int>({ADAM_F32, ADAM_BF16, ADAM_INT8, ADAM_FP8, ADAM_INT4});
    a.stochastic = !random.one_in(3);
    a.key[0] = static_cast<uint32_t>(random.below(1 << 30));
    a.row = random.below(1000);
    a.column = random.below(1000);
    a.threads = static_cast<int>(1 + random.below(3));
    const double scale = random.of({1.0, 1e-3, 1e-20, 1e3});
    const auto some = [&] { return random_.one_in(9) ? 0.0 : scale * random_.between(-1, 1); };
    fill(param, a.N * a.K, a.param_dtype, false, some);
    a.grad = fill(grad, a.N * a.K, a.grad_dtype, false, some);
    const double values[] = {0.999, 0.9, 0.1, 0.99, 0.01, 1e-3, 1.5, 1e-8};
    int i = 0;
    a.factors = static_cast<float*>(fill(factors, 8, F32, false, [&] { return values[i++]; }));
  }

  bool passes(const Kernels& kernels) {
    current = std::string(kernels.name) + " adam_step: N=" + std::to_string(a.N) + " K=" + std::to_string(a.K) +
              " states=" + std::to_string(a.states) + " stochastic=" + std::to_string(a.stochastic);
    const int64_t element = a.states == ADAM_F32 ? 4 : a.states == ADAM_BF16 ? 2 : 1;
    const int64_t row = a.states == ADAM_INT4 ? ceil_div(a.K, 2) : a.K * element;
    const int64_t blocks = a.states < ADAM_INT8 ? 0 : a.N * ceil_div(a.K, a.states == ADAM_INT4 ? 128 : 256);
    const int64_t sizes[] = {a.N * a.K * element_size(a.param_dtype), a.N * row, a.N * row, blocks * 4, blocks * 4};
    std::vector<Memory> parts;
    for (int64_t size : sizes) {
      parts.push_back(make(size, false));
      memset(parts.back()->data, 0, static_cast<size_t>(size));
    }
    memcpy(parts[0]->data, param->data, static_cast<size_t>(sizes[0]));
    AdamStep call = a;
    call.param = parts[0]->data;
    call.exp_avg = parts[1]->data;
    call.exp_avg_sq = parts[2]->data;
    call.exp_avg_scale = parts[3]->as<float>();
    call.exp_avg_sq_scale = parts[4]->as<float>();
    for (uint32_t step = 1; step <= 2; ++step) {
      call.key[1] = step;
      kernels.adam_step(call);
    }
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < 5; ++i) bytes.insert(bytes.end(), parts[i]->data, parts[i]->data + sizes[i]);
    for (int64_t i = 0; i < a.N * a.K; ++i)
      if (!std::isfinite(parts[0]->at(i, a.param_dtype))) return wrong(kernels, "a parameter is not finite");
    if (first.empty()) first = bytes;
    return bytes == first || wrong(kernels, "differs from the others");
  }

 private:
  bool wrong(const Kernels& kernels, const char* what) const {
    fprintf(stderr, "%s: %s\n", kernels.name, what);
    return false;
  }

  AdamStep a{};
  std::vector<uint8_t> first;  // what the first kernels gave
  Memory param, grad, factors;
};

// Norms, rotary embeddings and activations of rows: each value to a few roundings of plain fp64.
class StepsCase : RandomCall {
 public:
  explicit StepsCase(Random& random) : RandomCall(random) {
    rows = 1 + random.below(4);
    heads = 1 + random.below(5);
    width = 2 * (1 + random.below(random.one_in(4) ? kMaxHeadDim / 2 : 40));
    turned = random.one_in(2) ? width : 2 * (1 + random.below(width / 2));
    dtype = random.of<int>({F32, BF16, F16});
    angle_dtype = random.of<int>({F32, dtype});
    pairs = random.of<int>({HALVES, NEIGHBORS, NEIGHBORS_BY_PAIR, HALVES_OF_NEIGHBORS});
    activation = random.of<int>({SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, QUICK_GELU});
    plus_one = random.one_in(2);
    centers = random.one_in(2);
    rounds_weight = random.one_in(2);
    rounds = random.one_in(2);
    threads = static_cast<int>(1 + random.below(3));
    const auto some = [&] { return 3 * random_.between(-1, 1); };
    const auto angle = [&] { return random_.between(-1, 1); };
    fill(x, rows * heads * width, dtype, false, some);
    fill(up, rows * heads * width, dtype, false, some);
    fill(weight, width, dtype, false, some);
    fill(cos, rows * turned, angle_dtype, false, angle);
    fill(sin, rows * turned, angle_dtype, false, angle);
  }

  bool passes(const Kernels& kernels) {
    current = std::string(kernels.name) + " steps: rows=" + std::to_string(rows) + " heads=" + std::to_string(heads) +
              " width=" + std::to_string(width) + " turned=" + std::to_string(turned) + " dtype=" +
              std::to_string(dtype) + " pairs=" + std::to_string(pairs) + " activation=" + std::to_string(activation);
    const int64_t count = rows * heads * width;
    Memory y = make(count * element_size(dtype), false);
    const float eps = 1e-5f;
    kernels.norm_rows({rows * heads, width, x->data, y->data, dtype, weight->data, centers ? up->data : nullptr, dtype,
                       dtype, eps, centers, plus_one, rounds_weight, rounds, threads});
    for (int64_t row = 0; row < rows * heads; ++row) {
      double mean = 0, squares = 0;
      for (int64_t c = 0; c < width && centers; ++c) mean += x->at(row * width + c, dtype) / width;
      for (int64_t c = 0; c < width; ++c) squares += std::pow(x->at(row * width + c, dtype) - mean, 2);
      for (int64_t c = 0; c < width; ++c) {
        const double factor = (weight->at(c, dtype) + (plus_one ? 1 : 0)) / std::sqrt(squares / width + eps);
        const double value = x->at(row * width + c, dtype), more = centers ? up->at(c, dtype) : 0;
        const double size = (std::fabs(value) + std::fabs(mean)) * std::fabs(factor) + std::fabs(more);
        if (!near(y->at(row * width + c, dtype), (value - mean) * factor + more, size)) return wrong(kernels, "a norm");
      }
    }
    memcpy(y->data, x->data, static_cast<size_t>(count * element_size(dtype)));
    kernels.turn_rows({rows, heads, width, turned, y->data, dtype, cos->data, sin->data, angle_dtype, turned, pairs, rounds, threads});
    for (int64_t i = 0; i < count; ++i) {
      const int64_t c = i % width, first = i - c, row = i / width / heads, half = turned / 2;
      double value = x->at(i, dtype), size = std::fabs(value);
      if (c < turned) {
        const bool by_halves = pairs == HALVES || pairs == HALVES_OF_NEIGHBORS;
        const bool is_first = by_halves ? c < half : c % 2 == 0;
        const int64_t from = pairs == HALVES_OF_NEIGHBORS ? (is_first ? 2 * c : 2 * (c - half) + 1) : c;
        const int64_t other = pairs == HALVES ? (is_first ? c + half : c - half) : from ^ 1;
        value = x->at(first + from, dtype);
        const int64_t at = row * turned + (pairs == NEIGHBORS_BY_PAIR ? c / 2 : c);
        const double own = value * cos->at(at, angle_dtype);
        const double more = x->at(first + other, dtype) * sin->at(at, angle_dtype);
        value = is_first ? own - more : own + more;
        size = std::fabs(own) + std::fabs(more);
      }
      if (!near(y->at(i, dtype), value, size)) return wrong(kernels, "a rotary embedding");
    }
    const bool gated = rows % 2 == 0;
    const int64_t parts = random_.one_in(2) ? rows : 1;
    kernels.gate_rows({parts, count / parts, x->data, gated ? up->data : nullptr, count / parts, y->data, dtype, activation,
                       0.0f, 0.0f, threads});
    for (int64_t i = 0; i < count; ++i) {
      const double factor = gated ? up->at(i, dtype) : 1, value = activated(x->at(i, dtype)) * factor;
      if (!near(y->at(i, dtype), value, std::fabs(value), 5e-7 * std::fabs(factor)))
        return wrong(kernels, "an activation");
    }
    kernels.add_rows({count, x->data, up->data, y->data, dtype, 1.0f, threads});
    for (int64_t i = 0; i < count; ++i) {
      const double value = x->at(i, dtype) + up->at(i, dtype);
      if (!near(y->at(i, dtype), value, std::fabs(value))) return wrong(kernels, "a sum");
    }
    return routes(kernels) && convolves(kernels) && recurs(kernels);
  }

 private:
  // A convolution of each channel.
  bool convolves(const Kernels& kernels) {
    const int64_t taps = 1 + random_.below(kMaxTaps), channels = heads * width, count = rows * channels;
    Memory state, filter, y = make(count * element_size(dtype), false);
    const auto some = [&] { return random_.between(-1, 1); };
    fill(state, count * taps, dtype, false, some);  // enough for a token a sequence
    fill(filter, channels * taps, dtype, false, some);
    std::vector<double> before;
    for (int64_t i = 0; i < count * taps; ++i) before.push_back(state->at(i, dtype));
    const int64_t tokens = rows % 2 == 0 ? 2 : 1;
    kernels.convolve_rows({rows / tokens, tokens, channels, taps, x->data, state->data, y->data, filter->data,
                           centers ? up->data : nullptr, dtype, IDENTITY, threads});
    for (int64_t i = 0; i < count; ++i) {
      const int64_t channel = i % channels, token = i / channels % tokens, sequence = i / channels / tokens;
      const auto given = [&](int64_t at) {  // from the old state on
        const int64_t own = (sequence * channels + channel) * taps + at;
        if (at < taps) return before[static_cast<size_t>(own)];
        return x->at((sequence * tokens + at - taps) * channels + channel, dtype);
      };
      double sum = centers ? up->at(channel, dtype) : 0, size = std::fabs(sum);
      for (int64_t t = 0; t < taps; ++t) {
        if (token == 0 && state->at((sequence * channels + channel) * taps + t, dtype) != given(tokens + t))
          return wrong(kernels, "the state of a convolution");
        const double part = given(token + 1 + t) * filter->at(channel * taps + t, dtype);
        sum += part;
        size += std::fabs(part);
      }
      if (!near(y->at(i, dtype), sum, size)) return wrong(kernels, "a convolution");
    }
    return true;
  }

  // The gated delta rule.
  bool recurs(const Kernels& kernels) {
    const int64_t key_dim = 4 * (1 + random_.below(8)), value_dim = 1 + random_.below(40);
    const int64_t key_heads = heads % 2 == 0 ? heads / 2 : heads, keys = key_heads * key_dim;
    const int64_t all = 2 * keys + heads * value_dim;
    Memory given, a, b, decay, bias, state, y = make(rows * heads * value_dim * element_size(dtype), false);
    const auto some = [&] { return random_.between(-1, 1); };
    fill(given, rows * all, dtype, false, some);
    fill(a, rows * heads, F32, false, some);
    fill(b, rows * heads, dtype, false, some);
    fill(decay, heads, angle_dtype, false, some);
    fill(bias, heads, dtype, false, some);
    fill(state, rows * heads * key_dim * value_dim, F32, false, some);
    std::vector<double> old;
    for (int64_t i = 0; i < rows * heads * key_dim * value_dim; ++i) old.push_back(state->at(i, F32));
    const int64_t tokens = rows % 2 == 0 ? 2 : 1;
    kernels.delta_rows({rows / tokens, tokens, key_heads, heads, key_dim, value_dim, given->data, a->data, b->data, decay->data,
                        bias->data, state->as<float>(), y->data, dtype, F32, dtype, angle_dtype, dtype, 1e-6f, threads});
    for (int64_t i = 0; i < rows * heads; ++i) {  // by tokens, then by heads
      const int64_t row = i / heads * all, head = i % heads, shared = head / (heads / key_heads) * key_dim;
      const int64_t first = (i / heads / tokens * heads + head) * key_dim * value_dim;
      const auto unit = [&](int64_t from, int64_t c) {
        double squares = 1e-6;
        for (int64_t j = 0; j < key_dim; ++j) squares += std::pow(given->at(from + j, dtype), 2);
        return given->at(from + c, dtype) / std::sqrt(squares);
      };
      const double step = std::log1p(std::exp(a->at(i, F32) + bias->at(head, dtype)));
      const double kept = std::exp(-std::exp(decay->at(head, angle_dtype)) * step);
      const double beta = 1 / (1 + std::exp(-b->at(i, dtype)));
      for (int64_t v = 0; v < value_dim; ++v) {
        double known = 0, result = 0;
        double* own = old.data() + first + v;
        for (int64_t c = 0; c < key_dim; ++c) known += kept * own[c * value_dim] * unit(row + keys + shared, c);
        const double change = beta * (given->at(row + 2 * keys + head * value_dim + v, dtype) - known);
        for (int64_t c = 0; c < key_dim; ++c) {
          own[c * value_dim] = kept * own[c * value_dim] + unit(row + keys + shared, c) * change;
          result += own[c * value_dim] * unit(row + shared, c) / std::sqrt(static_cast<double>(key_dim));
        }
        if (!near(y->at(i * value_dim + v, dtype), result, 16.0)) return wrong(kernels, "a delta rule");
      }
    }
    for (size_t i = 0; i < old.size() / static_cast<size_t>(tokens); ++i)
      if (!near(state->at(static_cast<int64_t>(i), F32), old[i], 16.0)) return wrong(kernels, "the state of a delta rule");
    return true;
  }

  // The rows of x through experts that return what they get, whose weights add up to 1.
  bool routes(const Kernels& kernels) {
    const int64_t experts = width, chosen = 1 + random_.below(min64(experts, 8)), N = rows * heads;
    Memory router, ends = make(experts * 4, false), places = make(N * chosen * 4, false);
    Memory weights = make(N * chosen * 4, false), gathered = make(N * chosen * width * element_size(dtype), false);
    fill(router, experts * width, angle_dtype, false, [&] { return random_.between(-1, 1); });
    Router r{};
    r.product.N = r.experts = experts;
    r.product.K = width;
    r.product.weight = router->data;
    r.product.weight_dtype = angle_dtype;
    r.product.rounds = r.rounds_weights = rounds;
    r.by_sigmoid = plus_one;
    r.normalizes = true;
    r.factor = 1.0f;
    r.groups = 1 + random_.below(4);
    if (experts % r.groups != 0 || experts / r.groups < 2) r.groups = 1;
    r.chosen_groups = 1 + random_.below(r.groups);
    r.summed = 1 + random_.below(2);
    r.outside = random_.one_in(2) ? -INFINITY : 0.0f;
    r.chosen = min64(chosen, experts / r.groups * r.chosen_groups);
    const Routing routing = {reinterpret_cast<int32_t*>(ends->data), reinterpret_cast<int32_t*>(places->data),
                             reinterpret_cast<float*>(weights->data)};
    if (!route(kernels, r, N, x->data, dtype, threads, routing, gathered->data)) return wrong(kernels, "memory");
    if (routing.ends[experts - 1] != N * r.chosen) return wrong(kernels, "the end of the experts");
    Memory y = make(N * width * element_size(dtype), false);
    kernels.combine_rows({N, width, r.chosen, gathered->data, y->data, dtype, routing.places, routing.weights, false, threads});
    for (int64_t i = 0; i < N * width; ++i) {
      const double value = x->at(i, dtype);
      if (!near(y->at(i, dtype), value, 4 * std::fabs(value))) return wrong(kernels, "a mixture of experts");
    }
    return true;
  }

  double activated(double v) const {
    switch (activation) {
      case SILU: return v / (1 + std::exp(-v));
      case GELU: return 0.5 * v * (1 + std::erf(v * std::sqrt(0.5)));
      case GELU_TANH: return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
      case QUICK_GELU: return v / (1 + std::exp(-1.702 * v));
      default: return v < 0 ? 0 : activation == RELU ? v : v * v;
    }
  }
  // Three roundings to the dtype, and some of fp32.
  bool near(double found, double value, double size, double more = 0) const {
    const double step = dtype == BF16 ? 0x1p-8 : dtype == F16 ? 0x1p-11 : 0x1p-22;
    return std::fabs(found - value) <= 3.5 * step * size + more + (dtype == F16 ? 1e-7 : 1e-30);
  }
  bool wrong(const Kernels& kernels, const char* what) const {
    fprintf(stderr, "%s: %s is off\n", kernels.name, what);
    return false;
  }

  int64_t rows, heads, width, turned;
  int dtype, angle_dtype, pairs, activation, threads;
  bool plus_one, centers, rounds_weight, rounds;
  Memory x, up, weight, cos, sin;
};

}  // namespace

#ifdef GUARD_SCRATCH
// That of parallel.cpp is built under another name.
namespace hfq {
void* thread_scratch(int slot, size_t bytes) {
  static thread_local std::unique_ptr<Buffer> buffers[kSlots];
  buffers[slot].reset();
  buffers[slot] = std::make_unique<Buffer>(static_cast<int64_t>((bytes + 63) / 64 * 64), BEFORE_GUARD, 0, 0xFF);
  return buffers[slot]->data;
}
}  // namespace hfq
#endif

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s CASES SEED CALLERS\n", argv[0]);
    return 2;
  }
  const int64_t cases = atoll(argv[1]), seed = atoll(argv[2]), callers = atoll(argv[3]);
  const Kernels* sets[kMostSets];
  bool has_bf16;
  const Kernels** const end = std::remove_if(sets, sets + find_kernels(sets, &has_bf16),
                                             [](const Kernels* kernels) { return kernels->name == nullptr; });
  const int num_sets = static_cast<int>(end - sets);
  has_bf16 = has_bf16 && sets[0]->by_bf16;
#ifndef NO_SANITIZER
  __sanitizer_set_death_callback(print_current);
#endif
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    for (int64_t i = next++; i < cases && !failed; i = next++) {
      Random random(static_cast<uint64_t>(seed * 1000003 + i));
      Case it(random, has_bf16);
      AttentionCase attention(random, has_bf16);
      QuantizationCase weight(random);
      AppendCase appended(random);
      AdamCase adam(random);
      StepsCase steps(random);
      for (int set = 0; set < num_sets; ++set) {
        const Kernels* kernels = sets[set];
        if (it.passes(*kernels) && attention.passes(*kernels) && weight.passes(*kernels) &&
            appended.passes(*kernels) && adam.passes(*kernels) && steps.passes(*kernels))
          continue;
        print_current();
        failed = true;
      }
      current = "between cases";
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < callers; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failed) return 1;
  printf("%lld cases, %lld at once:", static_cast<long long>(cases), static_cast<long long>(callers));
  for (int set = 0; set < num_sets; ++set) printf(" %s", sets[set]->name);
  printf(has_bf16 ? " with bf16\n" : "\n");
  return 0;
}
