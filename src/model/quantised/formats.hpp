// A matrix as a checkpoint stores it, read by the form that its tensors have. One function a family; each names what is
// missing, misshaped, of another dtype or not finite.
#pragma once

#include <string_view>

#include "model/quantised/stored.hpp"

namespace mla {

/// Any form: plain, or one of those below. Where no tensor says that the matrix is there, CheckpointError.
HostTensor read_matrix(const StoredMatrix& m);

/// `weight` in e4m3 with `weight_scale_inv` or `weight_scale`: one, one a row, one a block, or E8M0 for 32 in a row.
HostTensor read_fp8(const StoredMatrix& m);
/// `weight` in int8 with the same scales but the last, and `weight_zero_point` where there is one.
HostTensor read_int8(const StoredMatrix& m);
/// Pairs of e2m1 in `part`: NVFP4 in either of two conventions, or MXFP4.
HostTensor read_fp4(const StoredMatrix& m, std::string_view part);
/// compressed-tensors' pack-quantized: `weight_packed` in int32.
HostTensor read_packed_integers(const StoredMatrix& m);
HostTensor read_awq(const StoredMatrix& m);
HostTensor read_gptq(const StoredMatrix& m);

}  // namespace mla
