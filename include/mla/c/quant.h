// Quantised outputs: formats, sizes, memory. Formulas and layouts are those of mla/quant.hpp and docs/math.md.
#ifndef MLA_C_QUANT_H
#define MLA_C_QUANT_H

#include "mla/c/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  MLA_OUTPUT_NONE = 0,        ///< not quantised
  MLA_OUTPUT_FP8 = 1,         ///< e4m3 with one static scale
  MLA_OUTPUT_FP8_GROUPS = 2,  ///< e4m3 with a scale for each group of 128 or 64
  MLA_OUTPUT_NVFP4 = 3,       ///< e2m1, two a byte, low nibble first, with an e4m3 scale for each group of 16
  MLA_OUTPUT_MXFP4 = 4,       ///< e2m1 likewise, with a ue8m0 scale for each group of 32
};
/// Of fp8_groups' scales.
enum { MLA_SCALES_F32 = 0, MLA_SCALES_POWER_OF_TWO = 1, MLA_SCALES_PACKED_UE8M0 = 2 };
enum { MLA_LAYOUT_ROW_MAJOR = 0, MLA_LAYOUT_COLUMN_MAJOR = 1, MLA_LAYOUT_TMA_ALIGNED = 2 };

typedef struct mla_output_spec {
  size_t struct_size;
  int32_t kind;        ///< MLA_OUTPUT_...
  int32_t form;        ///< MLA_SCALES_...
  int32_t layout;      ///< MLA_LAYOUT_...
  float scale;         ///< fp8; default 1
  int64_t group;       ///< fp8_groups: 128 (default) or 64
  float global_scale;  ///< nvfp4: 448 * 6 / amax of the whole tensor; default 1
  int32_t reserved;    ///< 0
} mla_output_spec;

static inline mla_output_spec mla_output_spec_default(void) {
  mla_output_spec s;
  memset(&s, 0, sizeof s);
  s.struct_size = sizeof s;
  s.scale = 1.0f;
  s.group = 128;
  s.global_scale = 1.0f;
  return s;
}

/// Bytes of a row's codes, and of all scales with their padding, for `tokens` rows of `width` = Head * Value elements.
MLA_API mla_status mla_output_bytes(const mla_output_spec* spec, int64_t tokens, int64_t width, int64_t* row_bytes,
                                    int64_t* scale_bytes);
/// Where a group's scale lies, in bytes from the first.
MLA_API mla_status mla_output_scale_offset(const mla_output_spec* spec, int64_t tokens, int64_t width, int64_t row,
                                           int64_t group, int64_t* offset);

/// A quantised output's memory. The scales' layout follows from the rows that codes have.
typedef struct mla_quantized {
  size_t struct_size;
  const mla_output_spec* spec;
  int64_t width;           ///< Head * Value
  const DLTensor* codes;   ///< uint8 or fp8 [Token, row bytes], a row dense
  const DLTensor* scales;  ///< uint8 [scale bytes], dense, 4-byte aligned; NULL for MLA_OUTPUT_FP8
} mla_quantized;

/// Static scales of fp8 queries and caches: largest magnitudes over the divisors q, k and v.
typedef struct mla_kv_scales {
  size_t struct_size;
  float q_scale;  ///< of mla_plan_options
  float k_scale;  ///< of mla_cache_spec
  float v_scale;  ///< of values held apart from keys
  float reserved;
} mla_kv_scales;
/// q: f32 [Token, Head, QueryKey], kv_c: f32 [Token, Latent], on the host. Divisors 0: 200, 200 and 100.
/// MLA_ERROR_INPUT naming the element for infinity. A scale is 1 where nothing but zeros was seen.
MLA_API mla_status mla_calc_kv_scales(const DLTensor* q, const DLTensor* kv_c, float q_divisor, float k_divisor,
                                      float v_divisor, mla_kv_scales* scales);

#ifdef __cplusplus
}
#endif

#endif  // MLA_C_QUANT_H
