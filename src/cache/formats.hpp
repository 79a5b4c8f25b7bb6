// The one list of cache formats: each one's name in CacheFormat, its object in src/cache, its name in the C interface.
// In the order of their numbers.
#pragma once

#define MLA_CACHE_FORMATS(X)           \
  X(f32, kF32, F32)                    \
  X(bf16, kBf16, BF16)                 \
  X(f16, kF16, F16)                    \
  X(fp8, kFp8, FP8)                    \
  X(fp8_ds_mla, kFp8DsMla, FP8_DS_MLA) \
  X(fp8_ds_v4, kFp8DsV4, FP8_DS_V4)
