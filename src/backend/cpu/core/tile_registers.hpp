// AMX's tile registers: eight of 16 rows of 64 bytes, here always whole. tdpbf16ps adds to 16 x 16 f32 sums the
// products of 16 rows of 32 bf16 (a row-major operand) with 16 pair rows of 16 columns (pairs of inputs side by side).
// Sums of even and odd inputs are rounded apart; a number of the result depends on its own row and column alone.
#pragma once

#include <cstdint>

namespace mla::cpu {

/// Rows and columns of a register's f32 sums, pairs of bf16 in one of its rows, and bf16 in one.
constexpr int64_t kTileSide = 16, kTilePairs = 16, kTileInputs = 32;

/// The CPU multiplies bf16 in tile registers, and the kernel lets this process use them.
bool has_amx_bf16();

/// Flops of tile products in a loop of `steps`, operands from L1: what AMX does at most. Only where has_amx_bf16().
double amx_chains(int64_t steps);
/// The same for int8, products into int32: operations.
bool has_amx_int8();
double amx_int8_chains(int64_t steps);

}  // namespace mla::cpu

#if defined(__x86_64__) && defined(__linux__)
#define MLA_HAS_AMX 1
#define MLA_AMX [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")]]

namespace mla::cpu {

/// What ldtilecfg reads: palette 1, and every register's rows and bytes a row.
struct alignas(64) TileCut {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileCut) == 64);

/// All eight registers whole.
constexpr TileCut kWholeTiles = [] {
  TileCut cut;
  for (int i = 0; i < 8; ++i) {
    cut.row_bytes[i] = 64;
    cut.rows[i] = 16;
  }
  return cut;
}();

}  // namespace mla::cpu
#endif
