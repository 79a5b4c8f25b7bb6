#include "backend/cpu/core/tile_registers.hpp"

#ifdef MLA_HAS_AMX

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mla::cpu {
namespace {

[[gnu::target("xsave")]] bool find_amx() {
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

bool has_amx_bf16() {
  static const bool has = find_amx();
  return has;
}

bool has_amx_int8() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_amx_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 25);
  }();
  return has;
}

namespace {
// Four tiles of sums, two operands each way: loads keep up with the products. Zeros: their values do not set the time.
constexpr int64_t kTile = kTileSide * kTileInputs;
alignas(64) constexpr uint16_t kOperands[4 * kTile] = {};
}  // namespace

#define MLA_CHAINS(product)                    \
  _tile_loadconfig(&kWholeTiles);              \
  _tile_zero(0);                               \
  _tile_zero(1);                               \
  _tile_zero(2);                               \
  _tile_zero(3);                               \
  for (int64_t n = 0; n < steps; ++n) {        \
    _tile_loadd(4, kOperands, 64);             \
    _tile_loadd(6, kOperands + kTile, 64);     \
    product(0, 4, 6);                          \
    _tile_loadd(7, kOperands + 2 * kTile, 64); \
    product(1, 4, 7);                          \
    _tile_loadd(5, kOperands + 3 * kTile, 64); \
    product(2, 5, 6);                          \
    product(3, 5, 7);                          \
  }                                            \
  _tile_release();

MLA_AMX double amx_chains(int64_t steps) {
  MLA_CHAINS(_tile_dpbf16ps)
  return 4.0 * 2.0 * kTileSide * kTileSide * kTileInputs * static_cast<double>(steps);
}

[[gnu::target("amx-tile,amx-int8")]] double amx_int8_chains(int64_t steps) {
  MLA_CHAINS(_tile_dpbssd)
  return 4.0 * 2.0 * kTileSide * kTileSide * 2 * kTileInputs * static_cast<double>(steps);
}
#undef MLA_CHAINS

}  // namespace mla::cpu

#else

namespace mla::cpu {
bool has_amx_bf16() { return false; }
double amx_chains(int64_t) { return 0; }
bool has_amx_int8() { return false; }
double amx_int8_chains(int64_t) { return 0; }
}  // namespace mla::cpu

#endif
