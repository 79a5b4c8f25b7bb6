#include "backend/cuda/core/launch.hpp"
#include "cuda/kernels.hpp"

namespace mla::cuda::bench {
namespace {

__device__ uint64_t hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The numbers of an array: functions of an element's index.
struct Normal {
  uint32_t seed;
  float deviation;
  __device__ float operator()(uint64_t i) const {
    const uint64_t z = hash((uint64_t{seed} << 40) + i);
    const float a = (static_cast<float>(z & 0xffffff) + 1.0f) / 16777217.0f,
                b = static_cast<float>((z >> 24) & 0xffffff) / 16777216.0f;
    return deviation * sqrtf(-2.0f * logf(a)) * cospif(2.0f * b);
  }
};
struct Bounded {
  uint32_t seed;
  float deviation;
  __device__ float operator()(uint64_t i) const {
    const uint64_t at = 2 * ((uint64_t{seed} << 40) + i), a = hash(at), b = hash(at + 1);
    const float sum = static_cast<float>(a & 0xffffff) + static_cast<float>(a >> 40) +
                      static_cast<float>(b & 0xffffff) + static_cast<float>(b >> 40);
    return deviation * (sum * 0x1p-24f - 2.0f) * 1.7320508f;
  }
};
struct Uniform {
  uint32_t seed;
  __device__ float operator()(uint64_t i) const {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h = (h ^ (h >> 15)) * 2246822519u;
    h = (h ^ (h >> 13)) * 3266489917u;
    return static_cast<float>(static_cast<int32_t>(h ^ (h >> 16))) * 0x1p-30f;
  }
};

__device__ std::byte code(float x) { return std::byte{to_fp8_e4m3(x).bits}; }

template <class T, class Number>
__global__ void fill_kernel(T* to, size_t n, Number number) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x)
    to[i] = from_float<T>(number(i));
}

// A block a row: 512 codes, 4 scales, 64 rope numbers of bf16.
__global__ void ds_mla_kernel(std::byte* to, size_t rows, uint32_t seed, DsMlaScales scales) {
  const Bounded number{seed, 1.0f};
  for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
    std::byte* const at = to + row * 656;
    for (int i = threadIdx.x; i < 576; i += blockDim.x) {
      const float x = number(row * 576 + i);
      if (i >= 512) {
        reinterpret_cast<bf16*>(at + 528)[i - 512] = to_bf16(x);
        continue;
      }
      const size_t group = row * 4 + i / 128;
      const bool powers = scales == DsMlaScales::powers_of_two;
      const float scale = !powers ? (1 + group % 7) * 0.003f : hash(group) & 1 ? 0x1p-6f : 0x1p-7f;
      at[i] = code(powers ? 64 * x : x / scale);
      if (i % 128 == 0) reinterpret_cast<float*>(at + 512)[i / 128] = scale;
    }
  }
}

// A block a page: 64 rows of 448 codes and 64 rope numbers, then 8 exponents for each row.
__global__ void ds_v4_kernel(std::byte* to, size_t pages) {
  constexpr int rows = 64;
  const Bounded number{0, 1.0f};
  for (size_t page = blockIdx.x; page < pages; page += gridDim.x) {
    std::byte* const at = to + page * rows * 584;
    for (int i = threadIdx.x; i < rows * 512; i += blockDim.x) {
      const int row = i / 512, column = i % 512;
      const float x = number(page * rows * 512 + i);
      if (column < 448) at[row * 576 + column] = code(64 * x);
      else reinterpret_cast<bf16*>(at + row * 576 + 448)[column - 448] = to_bf16(x);
    }
    for (int i = threadIdx.x; i < rows * 8; i += blockDim.x)
      at[rows * 576 + i] = static_cast<std::byte>(i % 8 == 7 ? 0 : 121 - (hash(page * rows * 8 + i) & 1));
  }
}

// A page's codes, and behind them its scales.
__global__ void index_pages_kernel(uint8_t* to, size_t pages) {
  constexpr size_t codes = 64 * 128, bytes = codes + 64 * 4;
  const Normal number{0, 100.0f};
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < pages * bytes / 4;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t word = 0;
    if (i * 4 % bytes < codes) {
      for (int b = 0; b < 4; ++b) word |= uint32_t{to_fp8_e4m3(number(4 * i + b)).bits} << (8 * b);
    } else {
      word = __float_as_uint(0.01f + 1e-6f * static_cast<float>(hash(i) & 1023));
    }
    reinterpret_cast<uint32_t*>(to)[i] = word;
  }
}

// `topk` steps of an odd stride over the context, from a random one on.
__global__ void slots_kernel(int32_t* to, size_t rows, int topk, int context, int query_tokens, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < rows * topk; i += size_t{gridDim.x} * blockDim.x) {
    const uint64_t row = i / topk, k = i % topk, a = hash(row + (uint64_t{seed} << 32));
    const uint64_t odd = (a >> 20 | 1) * 2654435761u | 1;
    to[i] = static_cast<int32_t>(row / query_tokens * context + ((a + k * odd) & (context - 1)));
  }
}

__global__ void read_all_kernel(const uint4* from, size_t n, uint4* to) {
  uint4 sum = {0, 0, 0, 0};
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = i + k * step < n ? __ldcs(from + i + k * step) : uint4{};
#pragma unroll
    for (int k = 0; k < 8; ++k) sum.x ^= v[k].x, sum.y ^= v[k].y, sum.z ^= v[k].z, sum.w ^= v[k].w;
  }
  if ((sum.x & sum.y & sum.z & sum.w) == 0x12345678) *to = sum;
}

__global__ void gather_rows_kernel(const uint4* cache, const int32_t* block_table, int start, int count, uint4* out) {
  constexpr int page = 64, width = 576 * 2 / 16;
  const int64_t all = int64_t{count} * width;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all; i += int64_t{gridDim.x} * blockDim.x) {
    const int position = start + static_cast<int>(i / width);
    out[i] = cache[(int64_t{block_table[position / page]} * page + position % page) * width + i % width];
  }
}

template <class... Params, class... Args>
void queue(void (*kernel)(Params...), int blocks, int threads, cudaStream_t stream, std::string_view name,
           Args... args) {
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(static_cast<unsigned>(threads))};
  launch(kernel, config, stream, "bench", name, "", args...);
}

template <class Number>
void fill(cudaStream_t stream, Dtype dtype, void* to, size_t n, Number number) {
  const auto as = [&]<class T>(T* typed) {
    queue(fill_kernel<T, Number>, 2048, 256, stream, "fill", typed, n, number);
  };
  switch (dtype) {
    case Dtype::f32: return as(static_cast<float*>(to));
    case Dtype::bf16: return as(static_cast<bf16*>(to));
    case Dtype::f16: return as(static_cast<f16*>(to));
    case Dtype::fp8_e4m3: return as(static_cast<fp8_e4m3*>(to));
  }
}

}  // namespace

void fill_normal(cudaStream_t stream, Dtype dtype, void* to, size_t n, uint32_t seed, float deviation) {
  fill(stream, dtype, to, n, Normal{seed, deviation});
}
void fill_bounded(cudaStream_t stream, Dtype dtype, void* to, size_t n, uint32_t seed, float deviation) {
  fill(stream, dtype, to, n, Bounded{seed, deviation});
}
void fill_uniform(cudaStream_t stream, Dtype dtype, void* to, size_t n, uint32_t seed) {
  fill(stream, dtype, to, n, Uniform{seed});
}

void fill_ds_mla(cudaStream_t stream, std::byte* to, size_t rows, uint32_t seed, DsMlaScales scales) {
  queue(ds_mla_kernel, 8192, 192, stream, "fill", to, rows, seed, scales);
}
void fill_ds_v4(cudaStream_t stream, std::byte* to, size_t pages) {
  queue(ds_v4_kernel, 4096, 128, stream, "fill", to, pages);
}
void fill_index_pages(cudaStream_t stream, uint8_t* to, size_t pages) {
  queue(index_pages_kernel, 4096, 256, stream, "fill", to, pages);
}
void fill_slots(cudaStream_t stream, int32_t* to, size_t rows, int topk, int context, int query_tokens, uint32_t seed) {
  queue(slots_kernel, 1024, 256, stream, "fill", to, rows, topk, context, query_tokens, seed);
}

void read_all(cudaStream_t stream, int blocks, uint4* data, size_t n) {
  queue(read_all_kernel, blocks, 256, stream, "read", data, n, data);
}
void gather_rows(cudaStream_t stream, int blocks, const uint16_t* cache, const int32_t* block_table, int start,
                 int count, uint16_t* out) {
  queue(gather_rows_kernel, blocks, 256, stream, "gather", reinterpret_cast<const uint4*>(cache), block_table, start,
        count, reinterpret_cast<uint4*>(out));
}

}  // namespace mla::cuda::bench
