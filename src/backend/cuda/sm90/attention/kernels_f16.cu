#include "backend/cuda/sm90/attention/kernels.cuh"

namespace mla::cuda::latent {
template void launch_kernel<__half>(const AttendLatentChoice&, const Params&, const CUtensorMap&, const CUtensorMap&,
                                    std::string_view, cudaStream_t);
}
