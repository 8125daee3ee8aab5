// Matrix units (AMX): tiles of 16 rows of 64 bytes, and instructions that multiply two of them into a third. A tile of x is
// 16 rows of it, one of the weight 16 steps of a panel, 16 rows of the weight side by side.
//
// https://www.intel.com/content/www/us/en/developer/articles/technical/intel-sdm.html, volume 1, chapter 18. Written in
// assembly: compilers never use tiles by themselves, and older ones do not know them.
#pragma once

#include <cstdlib>
#include <cstring>

#include "types.h"

#if HFQ_VBMI && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define HFQ_MATRIX_UNITS 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hfq {
namespace HFQ_AVX512 {

constexpr int64_t kTile = 16;              // rows of a tile
constexpr int64_t kLeastMatrixRows = 48;   // of x, for each expert, from which on tiles are used

#if defined(HFQ_MATRIX_UNITS)
// Tiles 0 to 3 are sums: 0 and 1 of the first 16 rows of x, 2 and 3 of the next. 4 and 5 are of x, 6 and 7 of the weight.
#define HFQ_ZERO_TILE(TILE) asm volatile("tilezero %tmm" #TILE)
#define HFQ_LOAD_TILE(TILE, FROM, STRIDE) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #TILE : : "r"(FROM), "r"(STRIDE) : "memory")
#define HFQ_STORE_TILE(TILE, TO, STRIDE) \
  asm volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" : : "r"(TO), "r"(STRIDE) : "memory")
#define HFQ_MULTIPLY_BYTES(SUM, X, W) asm volatile("tdpbssd %tmm" #W ", %tmm" #X ", %tmm" #SUM)
#define HFQ_MULTIPLY_BF16(SUM, X, W) asm volatile("tdpbf16ps %tmm" #W ", %tmm" #X ", %tmm" #SUM)

// The shapes of tiles, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// This thread's tiles, from here to the end of its scope: other code, as torch's, may use them before and after.
class Tiles {
 public:
  // `words` of 4 bytes of x are multiplied at once, 16 or 8.
  explicit Tiles(int64_t words) {
    asm volatile("sttilecfg %0" : "=m"(before_) : : "memory");
    TileShapes shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 4 * words : 64);
      shapes.rows[tile] = static_cast<uint8_t>(tile >= 6 ? words : kTile);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  }
  ~Tiles() {
    if (before_.palette == 0) {
      asm volatile("tilerelease" : : : "memory");
    } else {
      asm volatile("ldtilecfg %0" : : "m"(before_) : "memory");
    }
  }
  Tiles(const Tiles&) = delete;

 private:
  TileShapes before_;
};

// Whether bytes are multiplied as they should be.
static bool tiles_work() {
  alignas(64) int8_t x[kTile][32], w[8][64];
  int32_t sums[kTile][16];
  for (int i = 0; i < 512; ++i) {
    x[i / 32][i % 32] = static_cast<int8_t>(7 * i - 100);
    w[i / 64][i % 64] = static_cast<int8_t>(127 - 5 * i);
  }
  {
    const Tiles tiles(8);
    HFQ_ZERO_TILE(0);
    HFQ_LOAD_TILE(4, x, sizeof(x[0]));
    HFQ_LOAD_TILE(6, w, sizeof(w[0]));
    HFQ_MULTIPLY_BYTES(0, 4, 6);
    HFQ_STORE_TILE(0, sums, sizeof(sums[0]));
  }
  for (int m = 0; m < kTile; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t expected = 0;
      for (int k = 0; k < 32; ++k) expected += x[m][k] * w[k / 4][4 * n + k % 4];
      if (sums[m][n] != expected) return false;
    }
  return true;
}

// Whether the CPU has the units, and the system lets this process use them, which it must be asked for.
static bool has_matrix_units() {
  if (std::getenv("HF_QUANT_EMULATED_AMX") != nullptr) return tiles_work();  // tests catch the instructions
  unsigned a = 0, b = 0, c = 0, d = 0, states = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c >> 27 & 1) == 0) return false;
  asm volatile("xgetbv" : "=a"(states), "=d"(d) : "c"(0));
  const unsigned of_tiles = 3u << 17, features = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, int8
  if ((states & of_tiles) != of_tiles || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & features) != features)
    return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0 && tiles_work();
}
#else
struct Tiles {
  explicit Tiles(int64_t) {}
};
static bool has_matrix_units() { return false; }
#endif

// Whether a product is to be computed by tiles.
static bool in_tiles(const Product& p) {
  const int64_t least = kLeastMatrixRows * (p.ends == nullptr ? 1 : p.experts);
  return p.by_tiles && p.M >= least && (p.compute == BY_INT8 || p.compute == BY_BF16);
}

}  // namespace HFQ_AVX512
}  // namespace hfq
