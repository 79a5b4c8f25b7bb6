#include "backend/cpu/project/tile_amx.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "backend/cpu/project/tile_f32.hpp"

#define MLA_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace mla::cpu {
namespace {

constexpr int64_t kRows = 16;   // of a register
constexpr int64_t kPairs = 16;  // of inputs, of a register: 64 bytes a row

// How registers are cut. 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
struct alignas(64) Cut {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Rows of the first and second sums; pairs of inputs.
  Cut(int64_t first, int64_t second, int64_t pairs) {
    const int64_t height[] = {first, first, second, second, first, second, pairs, pairs};
    for (int i = 0; i < 8; ++i) {
      rows[i] = static_cast<uint8_t>(height[i]);
      row_bytes[i] = static_cast<uint16_t>(height[i] == 0 ? 0 : i == 4 || i == 5 ? 4 * pairs : 64);
    }
  }
};
static_assert(sizeof(Cut) == 64);

// The product of up to 32 rows; all pairs lie in whole registers of `depth`.
MLA_AMX void rows_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t group, int64_t pairs,
                          int64_t depth, float* sums, int64_t sums_stride, bool accumulate) {
  const int64_t second = std::max<int64_t>(0, rows - kRows);
  const Cut cut(std::min(rows, kRows), second, depth);
  _tile_loadconfig(&cut);
  const auto x_step = static_cast<size_t>(x_stride) * sizeof(bf16), sums_step = static_cast<size_t>(sums_stride) * 4;
  constexpr size_t kStep = kAmxColumns * 2 * sizeof(bf16);
  const bf16* x2 = x + kRows * x_stride;
  for (int64_t c = 0; c < kTileColumns; c += 2 * kAmxColumns, w += 2 * group) {
    float *to = sums + c, *to2 = to + kRows * sums_stride;
    if (accumulate) {
      _tile_loadd(0, to, sums_step);
      _tile_loadd(1, to + 16, sums_step);
      if (second > 0) {
        _tile_loadd(2, to2, sums_step);
        _tile_loadd(3, to2 + 16, sums_step);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if (second > 0) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int64_t p = 0; p < pairs; p += depth) {
      const bf16* at = w + p * kAmxColumns * 2;
      _tile_loadd(4, x + 2 * p, x_step);
      _tile_loadd(6, at, kStep);
      _tile_loadd(7, at + group, kStep);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second > 0) {
        _tile_loadd(5, x2 + 2 * p, x_step);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, sums_step);
    _tile_stored(1, to + 16, sums_step);
    if (second > 0) {
      _tile_stored(2, to2, sums_step);
      _tile_stored(3, to2 + 16, sums_step);
    }
  }
  _tile_release();
}

__attribute__((target("xsave"))) bool find_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  constexpr uint64_t kState = uint64_t{1} << 17 | uint64_t{1} << 18;
  if ((_xgetbv(0) & kState) != kState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool amx_bf16() {
  static const bool has = find_amx();
  return has;
}

void amx_product(const bf16* x, int64_t x_stride, int64_t rows, const bf16* w, int64_t group, int64_t pairs,
                 float* sums, int64_t sums_stride, bool accumulate) {
  const int64_t whole = pairs / kPairs * kPairs;
  for (int64_t r = 0; r < rows; r += 2 * kRows) {
    const int64_t n = std::min(2 * kRows, rows - r);
    const bf16* from = x + r * x_stride;
    float* to = sums + r * sums_stride;
    if (whole > 0) rows_product(from, x_stride, n, w, group, whole, kPairs, to, sums_stride, accumulate);
    if (whole < pairs)
      rows_product(from + 2 * whole, x_stride, n, w + whole * kAmxColumns * 2, group, pairs - whole, pairs - whole, to,
                   sums_stride, accumulate || whole > 0);
  }
}

}  // namespace mla::cpu

#else

namespace mla::cpu {
bool amx_bf16() { return false; }
void amx_product(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, float*, int64_t, bool) {}
}  // namespace mla::cpu

#endif
