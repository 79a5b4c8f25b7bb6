// How fast this core's bf16 dot products are.
#pragma once

namespace mla::cpu {

/// Instructions vdpbf16ps a second over f32 multiply-adds a second, both of 512 bits: about 1 where a dot product does
/// twice a multiply-add's arithmetic in its time, about 0.5 where it only does as much. Measured in some 50 us. Only
/// where native_bf16_dot() holds.
double bf16_dot_rate();

}  // namespace mla::cpu
