// Calls with masks. Their kernels are compiled apart: what masks take would cost the others' loop instructions.
//
// A launch before them brings masks to the order in which threads hold columns, and looks whether all values of masked
// items are numbers: a weight of 0 times NaN would reach rows that do not see the key. Looked at in each tile, as
// values are that a diagonal crosses, they cost 15% of the call; once, 2%.
#include "backend/cuda/sm90/attend_expanded/launch.cuh"

namespace mla::cuda::sm90::expanded {
namespace {

constexpr int kThreads = 256;

/// Each of a row's four threads has a word of 32 of its keys, in their order. Afterwards each has the bits of its own
/// columns, those that mask() names.
__device__ __forceinline__ uint32_t own_columns(uint32_t word, int quad) {
  // Of every 8 keys two bits a thread: a square of 4 x 4 pairs of bits becomes one with a byte for each thread ..
  uint32_t x = (word ^ word >> 6) & 0x00cc00ccu;
  word ^= x ^ x << 6;
  x = (word ^ word >> 12) & 0x0000f0f0u;
  word ^= x ^ x << 12;
  // .. and the threads exchange bytes.
  word = __byte_perm(word, __shfl_xor_sync(~0u, word, 1), quad & 1 ? 0x3715 : 0x6240);
  return __byte_perm(word, __shfl_xor_sync(~0u, word, 2), quad & 2 ? 0x3276 : 0x5410);
}

struct Preparation {
  const ExpandedItem* items;
  int32_t items_count;
  int64_t tokens, keys;  // blocks are of one key each, then of a warp for each token
  const uint32_t* mask;
  uint32_t* columns;
  int64_t mask_row;
  int32_t columns_row;
  int32_t block_keys;
  const __nv_bfloat16* v;
  int64_t v_key, v_head;
  int32_t heads, value;
  int32_t* strange;
};

__device__ bool is_of(const ExpandedItem& item, int64_t key) {
  return item.masked && key >= item.k_begin && key < int64_t{item.k_begin} + item.k_count;
}

__device__ void look_at_values(const Preparation& p, int64_t key) {
  bool found = false;
  for (int i = threadIdx.x; i < p.items_count; i += kThreads) found |= p.items[i].q_count > 0 && is_of(p.items[i], key);
  if (!__syncthreads_or(found)) return;
  uint32_t strange = 0;
  const int chunks = p.value / 8;
  for (int i = threadIdx.x; i < p.heads * chunks; i += kThreads)
    strange |= no_numbers<__nv_bfloat16>(
        *reinterpret_cast<const uint4*>(p.v + key * p.v_key + i / chunks * p.v_head + i % chunks * 8));
  if (strange & 0x80008000u) *p.strange = 1;
}

__device__ void arrange(const Preparation& p, int64_t token) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  ExpandedItem item;
  for (int first = 0; first < p.items_count; first += 32) {
    bool mine = false;
    if (first + lane < p.items_count) {
      item = p.items[first + lane];
      mine = item.masked && token >= item.q_begin && token < int64_t{item.q_begin} + item.q_count && item.k_count > 0;
    }
    const uint32_t found = __ballot_sync(~0u, mine);
    if (!found) continue;
    const int owner = __ffs(found) - 1;
    const int32_t keys = __shfl_sync(~0u, item.k_count, owner), begin = __shfl_sync(~0u, item.mask_begin, owner);
    const int32_t last = (begin + keys - 1) / 32;
    const uint32_t* const words = p.mask + token * p.mask_row;
    uint32_t* const to = p.columns + token * p.columns_row;
    for (int32_t block = lane / 4; (block - lane / 4) * p.block_keys < keys; block += 8) {
      const int32_t column = begin + block * p.block_keys, at = column / 32 + quad;
      const uint32_t word = own_columns(__funnelshift_r(words[min(at, last)], words[min(at + 1, last)], column), quad);
      if (block * p.block_keys < keys) to[4 * block + quad] = word;
    }
    return;
  }
}

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Preparation p) {
  if (blockIdx.x < p.keys) return look_at_values(p, blockIdx.x);
  const int64_t token = (blockIdx.x - p.keys) * (kThreads / 32) + threadIdx.x / 32;
  if (token < p.tokens) arrange(p, token);
}

}  // namespace

int32_t prepare_masks(cudaStream_t stream, const AttendExpandedArgs& a, int block_keys, int32_t* counters) {
  const int64_t most = a.most_masked_keys > 0 ? a.most_masked_keys : a.k_nope.extent<Key>();
  Preparation p;
  p.items = a.items;
  p.items_count = static_cast<int32_t>(a.item_count);
  p.tokens = a.q.extent<Token>();
  p.keys = a.v.extent<Key>();
  p.mask = a.mask.data();
  p.mask_row = a.mask.stride<Token>();
  p.columns = static_cast<uint32_t*>(a.columns);
  p.columns_row = static_cast<int32_t>((most + block_keys - 1) / block_keys * 4);
  p.block_keys = block_keys;
  p.v = static_cast<const __nv_bfloat16*>(a.v.data());
  p.v_key = a.v.stride<Key>();
  p.v_head = a.v.stride<Head>();
  p.heads = static_cast<int32_t>(a.v.extent<Head>());
  p.value = static_cast<int32_t>(a.v.extent<Value>());
  p.strange = counters + 2;
  constexpr int64_t warps = kThreads / 32;
  cuda::launch(prepare_kernel,
               {.grid = static_cast<unsigned>(p.keys + (p.tokens + warps - 1) / warps), .block = kThreads}, stream, op,
               "masks", "tokens " + std::to_string(p.tokens) + ", keys " + std::to_string(p.keys), p);
  return p.columns_row;
}

void attend_masked(cudaStream_t stream, const AttendExpandedArgs& a) {
  if (a.quantized) return dispatch<__nv_bfloat16, Codes, true>(stream, a);
  if (a.out.dtype() == Dtype::f32) return dispatch<__nv_bfloat16, float, true>(stream, a);
  dispatch<__nv_bfloat16, __nv_bfloat16, true>(stream, a);
}

}  // namespace mla::cuda::sm90::expanded
